"""What is told of other ranks, as text, and what is concluded from the kernel's account of connections."""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from support.pages import snippets
from support.project import ROOT
from undertow import PeerFailed, RankLost, StallTimeout
from undertow.runtime import faults, links, patience
from undertow.runtime.connections import Connection, address_of_peers, connections, open_sockets
from undertow.runtime.faults import State
from undertow.runtime.links import Silence, Speeds, Table
from undertow.runtime.nonfinite import Finding
from undertow.runtime.replicas import mismatch

ASKING = State(rank=0, step=7, doing="", waits_for="bucket 2 ('a', 'b')", waited_s=31.4, stack=[])
LATE = State(rank=1, step=7, doing="loading data", waits_for="", waited_s=0.0, stack=["train.py, line 4, in rows"])
WAITING: State = {**ASKING, "rank": 2, "waited_s": 30.0}
OTHER: State = {**WAITING, "rank": 1, "waits_for": "the norm of all gradients"}


def test_a_report_has_every_rank_and_names_the_late_ones() -> None:
    states = {0: ASKING, 1: LATE, 2: WAITING}
    assert faults.stall_text(ASKING, states, {4: "rank 4 has left: so it is."}, ranks=range(5)) == (
        "rank 0 has waited 31 s for bucket 2 ('a', 'b'): rank 1, 3 has not come.\n"
        "  rank 0: synchronisation 7, waits for bucket 2 ('a', 'b')\n"
        "  rank 1: synchronisation 7, loading data\n"
        "    train.py, line 4, in rows\n"
        "  rank 2: synchronisation 7, waits for bucket 2 ('a', 'b')\n"
        "  rank 3: no answer; it is stopped, or in a call that keeps Python from running\n"
        "  rank 4 has left: so it is."
    )


def test_a_report_says_where_all_wait_for_different_things() -> None:
    told = "rank 0 has waited 31 s for bucket 2 ('a', 'b'): all ranks wait, for different things.\n"
    assert faults.stall_text(ASKING, {0: ASKING, 1: OTHER}, {}, ranks=range(2)).startswith(told)


PAGE = ROOT / "docs" / "reliability.md"
ASKED: State = {**ASKING, "step": 3, "waits_for": "bucket 0 ('last.bias')", "waited_s": 30.0}
TOLD = faults.stall_text(
    ASKED,
    {
        0: ASKED,
        1: {
            **LATE,
            "step": 3,
            "doing": "in the forward of 'norm'",
            "stack": re.findall(r"^    (\S+, line \d+, in \w+)$", PAGE.read_text(), re.M)[:1],
        },
    },
    {},
    ranks=range(2),
)
# What docs/reliability.md quotes.
QUOTES = [
    TOLD,
    f"PeerFailed: {faults.failed(1, 'ValueError: row 7 has no label').error('synchronisation 118, rank 0')}",
    f"StallTimeout: {faults.timed_out(0, TOLD).error('synchronisation 3, rank 0')}",
    f"RankLost: {faults.unreachable([2], by=0, silent_s=5.2).error('synchronisation 118, rank 0')}",
    f"NonFiniteGradient: {Finding(params=('last.bias',), ranks=(1,), where='synchronisation 118, bucket 0').error()}",
    f"ReplicaMismatch: {mismatch('last.weight', {0: 5, 1: 5, 2: 7}, where='synchronisation 199; 1 of 6 parameters differ')}",
]


@pytest.mark.parametrize("text", QUOTES, ids=lambda text: text.partition(":")[0])
def test_what_the_page_quotes_is_ours(text: str) -> None:
    assert text in [snippet.code.rstrip("\n") for snippet in snippets(PAGE)]


def test_an_error_of_a_fault_has_three_parts() -> None:
    error = faults.stalled("rank 0 has waited.\n  rank 1: loading data").error("synchronisation 7, rank 2")
    assert isinstance(error, StallTimeout)
    assert str(error) == (
        "rank 0 has waited.\n"
        "  synchronisation 7, rank 2\n"
        "  rank 1: loading data\n"
        "  Look at what the late ranks are doing, or set stall_timeout_s higher if that is how it must be."
    )


@pytest.mark.parametrize(("fault", "kind"), [(faults.failed(1, "x"), PeerFailed), (faults.lost(1), RankLost)])
def test_every_error_of_a_fault_is_a_new_one(fault: faults.Fault, kind: type[Exception]) -> None:
    errors = [fault.error("here"), fault.error("here")]
    assert [type(error) for error in errors] == [kind] * 2
    assert errors[0] is not errors[1]


def test_a_long_message_of_an_exception_is_cut() -> None:
    assert len(faults.text_of(ValueError("x" * 100_000))) == 2000


class Asked(nn.Module, IterableDataset):
    """Says what this thread is doing, in many a place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(2, 2), nn.Identity()
        self.said: dict[str, str] = {}
        self.inner.register_forward_hook(lambda *_: self.note("forward"))
        self.layer.weight.register_hook(lambda _: self.note("backward"))
        self.optimizer = torch.optim.SGD(self.parameters())
        self.optimizer.register_step_pre_hook(lambda *_: self.note("step"))

    def note(self, when: str) -> None:
        names = {id(module): name for name, module in self.named_modules()}
        self.said[when] = faults.activity(faults.frames_of(threading.get_ident()), names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.layer(x))

    def __iter__(self) -> Iterator[None]:
        self.note("data")
        yield


def test_what_a_thread_does_is_told_from_its_stack() -> None:
    asked, found = Asked(), dict[str, Any]()
    asked(torch.ones(1, 2)).sum().backward()
    asked.optimizer.step()
    next(iter(DataLoader(asked, batch_size=None)))
    asked.note("elsewhere")
    # A rank that waits at a barrier of its own, while others wait for it.
    path = os.path.join(os.path.dirname(torch.__file__), "distributed", "distributed_c10d.py")
    exec(compile("def barrier(ask):\n    return ask()", path, "exec"), found)
    found["barrier"](lambda: asked.note("barrier"))
    assert asked.said == {
        "forward": "in the forward of 'inner'",
        "backward": "in backward",
        "step": "in the optimizer",
        "data": "loading data",
        "elsewhere": "in code outside of the model",
        "barrier": "in barrier of torch.distributed",
    }


def test_a_stack_has_places_and_no_values() -> None:
    secret = "swordfish"
    lines = faults.stack_lines(faults.frames_of(threading.get_ident()))
    assert lines[-2].endswith(", in test_a_stack_has_places_and_no_values")
    assert not any(secret in line for line in lines)
    assert len(lines) <= 12


@pytest.mark.parametrize("broken", [{}, {**LATE, "stack": None}, {**LATE, "step": "x"}])
def test_what_is_no_state_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        faults.state_from(broken)


def test_a_rank_that_has_begun_no_step_is_said_to_be_idle() -> None:
    assert faults.idle_since(118) == ", no training forward since synchronisation 118"
    assert faults.idle_since(0) == ", no training forward yet"


def test_what_ranks_say_does_not_steer_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    said = {"text": "\x1b[2Jgone\u202e\r", "ranks": [1, 2], "stack": ["a.py,\tline 3", "zwei, Übung\n"], "seconds": 1.5}
    stack = ["a.py,\\tline 3", "zwei, Übung\n"]
    assert faults.printable(said) == {**said, "text": "\\x1b[2Jgone\\u202e\\r", "stack": stack}
    with caplog.at_level(logging.WARNING, "undertow"):
        faults.tell("waits for \x1b[2J\ud800 [/bold]\nand more")
    assert caplog.messages == ["waits for \\x1b[2J\\ud800 [/bold]\nand more"]


THERE = "10.0.0.2"


def connection(**changed: Any) -> Connection:
    like = {"socket": (3, 7), "here": "10.0.0.1", "there": THERE, "is_unacknowledged": True, "silent_s": 0.0}
    return Connection(**{**like, "sent_bytes": 0, "busy_s": 0.0, **changed})


ALIVE = connection(socket=(4, 8), is_unacknowledged=False, silent_s=1.0)
# What is found at a time, and for how long there is silence.
SILENCES: dict[str, list[tuple[float, list[Connection], float]]] = {
    "counts from the last acknowledgement since it was asked": [
        (100.0, [connection(silent_s=60.0)], 0.0),  # nothing may have been sent for a minute
        (104.0, [connection(silent_s=64.0)], 4.0),
        (106.0, [connection(silent_s=0.5)], 0.5),
        (112.0, [connection(silent_s=5.5)], 5.5),
    ],
    "any connection to a machine shows that it is there": [
        (100.0, [connection(silent_s=60.0), ALIVE], 0.0),
        (110.0, [connection(silent_s=60.0), ALIVE], 1.0),
    ],
    "there is none if nothing is to be acknowledged": [
        (100.0, [connection(silent_s=60.0)], 0.0),
        (130.0, [connection(is_unacknowledged=False, silent_s=90.0)], 0.0),
    ],
}


@pytest.mark.parametrize("looks", SILENCES.values(), ids=SILENCES)
def test_silence(looks: list[tuple[float, list[Connection], float]]) -> None:
    silence = Silence()
    assert [silence.silent_s(THERE, found, now_s) for now_s, found, _ in looks] == [silent_s for _, _, silent_s in looks]
    assert 5.0 <= patience.SILENT_S < 5.5


def test_a_ping_is_due_every_three_seconds_of_waiting() -> None:
    silence = Silence()
    due = [waited_s for waited_s in (0.5, 1.5, 2.5, 4.5, 5.0) if silence.is_ping_due(waited_s, 100.0 + waited_s)]
    assert due == [1.5, 4.5]


def test_a_speed_is_told_when_it_is_known_and_when_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = Speeds()

    def look(now_s: float, sent_bytes: int, busy_s: float) -> dict[str, Any] | None:
        monkeypatch.setattr(links, "connections", lambda: [connection(sent_bytes=sent_bytes, busy_s=busy_s)])
        return speeds.news(now_s)

    told = [
        look(100.0, 0, 0.0),
        look(102.0, 9_000_000, 0.1),  # too early
        look(105.0, 10_000_000, 0.1),
        look(110.0, 20_000_000, 0.3),  # half as fast
        look(115.0, 20_500_000, 4.3),  # too little to be told
        look(120.0, 24_500_000, 8.3),
    ]
    first, last = [100.0, 0.0, False], [pytest.approx(1.0), 100.0, True]  # a division by a difference
    assert told == [None, None, {"at": ["10.0.0.1"], "to": {THERE: first}}, None, None, {"at": ["10.0.0.1"], "to": {THERE: last}}]


def heard(*told: tuple[int, dict[str, list[Any]]], network: str = "10.0.0", first: int = 0) -> Table:
    """What ranks have told, whose addresses in the network count from `first`."""
    table = Table()
    for rank, to in told:
        table.hear(rank, {"at": [f"{network}.{rank + first}"], "to": to})
    table._due_s = min(table._due_s, 0.0) if table._slow else table._due_s
    return table


def test_a_slow_link_is_told_once_with_its_rank_and_figures() -> None:
    table = heard((0, {"10.0.0.1": [110.0, 0.0, True]}), (1, {"10.0.0.0": [1.2, 117.0, True]}))
    assert table.warning() == (
        "a link is slow, and training goes on at that pace: look at the network of rank 1.\n"
        "  rank 1 sends 1.2 MB/s to rank 0 (10.0.0.0); 117.0 MB/s before, 110.0 MB/s on links of other ranks"
    )
    assert table.warning() is None


def test_the_warning_of_docs_reliability_md_is_ours() -> None:
    there = {"10.77.0.1": [0.7, 57.9, True], "10.77.0.2": [0.7, 59.0, True]}
    table = heard((0, {"10.77.0.2": [28.6, 0.0, True]}), (1, {}), (2, there), network="10.77.0", first=1)
    assert table.warning() in [snippet.code.rstrip("\n") for snippet in snippets(ROOT / "docs" / "reliability.md")]


def test_the_rank_that_all_slow_links_have_in_common_is_named() -> None:
    # Acknowledgements go the slow way too.
    fast, slow = [110.0, 110.0, True], [2.0, 110.0, True]
    table = heard(
        (0, {"10.0.0.1": fast, "10.0.0.2": slow}),
        (1, {"10.0.0.0": fast, "10.0.0.2": slow}),
        (2, {"10.0.0.0": slow, "10.0.0.1": slow}),
    )
    assert str(table.warning()).startswith(
        "4 links are slow, and training goes on at that pace: look at the network of rank 2.\n"
    )


@pytest.mark.parametrize("speed", [[20.0, 117.0, True], [1.0, 117.0, False]], ids=["a sixth", "hardly used"])
def test_other_links_are_not_slow(speed: list[Any]) -> None:
    assert heard((0, {"10.0.0.1": [110.0, 0.0, True]}), (1, {"10.0.0.0": speed})).warning() is None


def test_nonsense_is_refused() -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Table().hear(0, {"at": [], "to": {"10.0.0.1": "fast"}})


def test_connections_within_this_machine_are_no_links() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.fileno() in [number for number, _ in open_sockets()]
        assert connections() == []


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
