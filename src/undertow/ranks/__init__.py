"""Communication between ranks, and what happens if one does not answer.

Communication:

group                the ranks that the user chooses, and the abilities of their backend
transport            Undertow's clone of that group, and collectives over it
torch_group          a group of torch's, whose waits can be interrupted
users_groups         collectives over the user's own groups
handle               an operation on its way, and its *waiter*: how a wait ends
exchanges            reduce-scatter, all-reduce and all-gather of parts, added in rank order
exchange_messages    the messages of an exchange on their way, as data
posted_messages      a *carrier* of them, by sends and receives: for gloo
backend_collectives  a carrier of them, by collectives: for all other backends
parcels              the contents of messages: a part in full width, or in a format
dither               offsets before values are rounded
agreement            facts that must be equal on all ranks, compared while all wait
buffers              values of one rank that all take
threads              threads that may be stuck when a rank is lost

If a rank does not answer, in the order of reading:

guard        the one thread of a process, which listens to its rings
watch        the *ring* of connected ranks of a group; each model's *watch*, which knows its fault
faults       a *fault*, the reason why a step cannot continue, as a value and as text
inquiry      asks all ranks for their activity if this rank has waited for long
activity     what this rank does, for such a query
answers      the answers of all ranks, in one table and as a report
patience     how long ranks wait before they look, ask, or give up

How ranks connect:

meeting      all ranks have arrived at one place: before they connect, or make a group
handshake    neighbors connect to each other at a meeting
connections  a TCP connection to a neighbor, and the kinds of messages
descriptors  the files that a process may open, which connections count towards
"""
