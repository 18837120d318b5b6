from __future__ import annotations

import os
import socket

import pytest

from undertow.runtime.connections import address_of_peers, open_sockets


@pytest.mark.parametrize("kind", ["a pipe", "a socket"])
def test_a_descriptor_that_is_used_again_is_left_alone(kind: str) -> None:
    """Another thread may close a socket after it was listed, and open something else, which gets its number."""
    listener = socket.create_server(("127.0.0.1", 0))
    first, second = (socket.create_connection(listener.getsockname()) for _ in range(2))
    (listed,) = (found for found in open_sockets() if found[0] == first.fileno())
    assert address_of_peers(frozenset([listed])) == "127.0.0.1"
    read, write = os.pipe()
    os.dup2(read if kind == "a pipe" else second.fileno(), first.fileno())
    before = os.listdir("/proc/self/fd")
    assert address_of_peers(frozenset([listed])) is None
    assert os.listdir("/proc/self/fd") == before
    for each in (first, second, listener):
        each.close()
    os.close(read)
    os.close(write)
