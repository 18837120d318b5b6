"""Communication between ranks, and what happens if one does not answer.

Communication:

group                the ranks that the user chooses, and the abilities of their backend
transport            Undertow's clone of that group, and collectives over it
handle               a message in flight, to wait for
exchanges            reduce-scatter, all-reduce and all-gather of parts, added in rank order
messages             the messages of an exchange on their way, as data
posted_messages      they travel as sends and receives: for gloo
backend_collectives  they travel by collectives: for all other backends
parcels              what the messages contain: a part in full width, or in a format
dither               offsets before values are rounded
agreement            facts that must be equal on all ranks, compared while all wait

If a rank does not answer:

meeting      all ranks have arrived: before they connect, or make a group
handshake    neighbors connect to each other at a meeting
connections  a TCP connection to a neighbor
watch        the *ring* of connected ranks of a group, and each model's *watch* over them
null_watch   the watch of a rank without others
guard        the one thread of a process, which listens to its rings
faults       a *fault*, the reason why a step cannot continue, as a value and as text
patience     how long ranks wait before they look, ask, or give up
threads      threads that may be stuck when a rank is lost
"""
