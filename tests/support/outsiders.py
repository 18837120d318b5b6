"""Processes that are no rank, and connect to a port that a rank has opened: here threads."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

_PAUSE_S = 0.4  # a token of 64 bytes takes longer than ranks have to connect


@contextlib.contextmanager
def outsiders(num_links: int, *, words: Sequence[bytes]) -> Iterator[Callable[[tuple[str, int]], object]]:
    """A visit by so many outsiders to an address; it returns when all are connected.

    Each sends one of `words` every 0.4 s, in turn, and connects again when it is closed.
    """
    is_over, threads = threading.Event(), list[threading.Thread]()

    def stay(at: tuple[str, int], are_there: threading.Event) -> None:
        with contextlib.ExitStack() as opened:
            links: list[socket.socket | None] = [None] * num_links
            while not is_over.wait(_PAUSE_S if are_there.is_set() else 0.0):
                for place, link in enumerate(links):
                    try:
                        if link is None:
                            link = opened.enter_context(socket.socket())
                            link.settimeout(1.0)
                            link.connect(at)
                        link.send(words[place % len(words)])
                    except OSError:
                        link = None
                    links[place] = link
                are_there.set()

    def visit(at: tuple[str, int]) -> None:
        are_there = threading.Event()
        threads.append(threading.Thread(target=stay, args=(at, are_there), daemon=True))
        threads[-1].start()
        are_there.wait()

    try:
        yield visit
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
