"""Faults of other ranks as text."""

import json
import logging
import os
import random
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from support.pages import snippets
from support.project import ROOT
from undertow import PeerFailed, RankLost, SyncConfig
from undertow.engine.checks import mismatch
from undertow.engine.nonfinite import Finding
from undertow.ranks import faults
from undertow.ranks.activity import Activity, doing_in, frames_of, stack_lines
from undertow.ranks.answers import Answer, Answers, Call, Ranks, answers_from, stall_text
from undertow.ranks.watch import Ring


def table(answers: dict[int, Answer]) -> Answers:
    found = Answers()
    for rank, answer in answers.items():
        found.add(rank, answer)
    return found


def waiting(waited_s: float, waits_for: str = "bucket 2 ('a', 'b')") -> Answer:
    return Answer(7, waits_for, waited_s=waited_s)


LATE = Answer(7, "", "loading data\ntrain.py, line 4, in rows")
WAITING = {0: waiting(31.4), 2: waiting(30.0)}


def test_a_report_has_every_rank_and_names_the_late_ones() -> None:
    assert stall_text(table({1: LATE, **WAITING}), {4: "rank 4 has left: so it is."}, num_ranks=5) == (
        "rank 0 has waited 31 s for bucket 2 ('a', 'b'): ranks 1, 3 have not arrived.\n"
        "  ranks 0, 2: synchronization 7, wait for bucket 2 ('a', 'b')\n"
        "  rank 1: synchronization 7, loading data\n"
        "    train.py, line 4, in rows\n"
        "  rank 3: no answer; it is stopped, out of reach, or in a call that keeps Python from running\n"
        "  rank 4 has left: so it is."
    )


def test_a_report_has_ranks_in_ranges() -> None:
    answers = {rank: waiting(30.0) for rank in range(16_384) if rank not in (63, 100, 101)}
    gone = {100: "rank 100 has left: so it is.", 101: "rank 101 has left: so it is."}
    assert stall_text(table(answers), gone, num_ranks=16_384) == (
        "rank 0 has waited 30 s for bucket 2 ('a', 'b'): rank 63 has not arrived.\n"
        "  ranks 0-62, 64-99, 102-16383: synchronization 7, wait for bucket 2 ('a', 'b')\n"
        "  rank 63: no answer; it is stopped, out of reach, or in a call that keeps Python from running\n"
        "  ranks 100, 101: each has left: so it is."
    )


def test_a_report_on_many_late_ranks_stays_short() -> None:
    frames = "\n".join(f"train.py, line {line}, in rows" for line in range(12))
    for num_late in (1, 2, 3, 40, 1000):
        answers = {rank: Answer(7, "", f"in {rank}\n{frames}") for rank in range(num_late)} | {1000: waiting(30.0)}
        text = stall_text(table(answers), {}, num_ranks=1002)
        assert len(text.split("\n")) <= 24
        assert len(text) < 3000
        assert "line 11, in rows" in text  # the innermost one


def test_every_second_rank_of_many_is_no_endless_line() -> None:
    answers = {rank: waiting(30.0) for rank in range(0, 16_384, 2)}
    first, *_ = stall_text(table(answers), {}, num_ranks=16_384).split("\n")
    assert first.endswith(": ranks 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31 and 8176 more have not arrived.")


def test_a_report_says_where_all_wait_for_different_things() -> None:
    told = "rank 0 has waited 31 s for bucket 2 ('a', 'b'): all ranks wait, for different things.\n"
    answers = {0: WAITING[0], 1: waiting(9.0, "the norm of all gradients")}
    assert stall_text(table(answers), {}, num_ranks=2).startswith(told)


def test_a_report_says_where_all_wait_for_the_same() -> None:
    told = "rank 0 has waited 31 s for bucket 2 ('a', 'b'): all ranks wait for it.\n"
    text = stall_text(table({0: WAITING[0], 1: waiting(9.0)}), {}, num_ranks=2)
    assert text.startswith(told)
    assert "the network is slow" in faults.stalled(text).remedy


def random_ranks(draw: random.Random) -> list[int]:
    return draw.sample(range(64), draw.randint(0, 64))


def test_ranks_in_runs_are_the_same_ranks() -> None:
    draw = random.Random(0)
    for _ in range(200):
        first, second = random_ranks(draw), random_ranks(draw)
        joined = Ranks.of(first)
        joined.join(Ranks.of(set(second) - set(first)))
        assert set(joined) == {*first, *second}
        assert len(joined) == len({*first, *second})
    strided = range(5, 16_384, 8)
    assert Ranks.of(strided).runs == [(5, 16_381, 8)]


def test_a_table_is_the_same_after_a_message() -> None:
    found = Answers()
    for rank in range(9):
        answer = Answer(rank % 3, "" if rank == 4 else "bucket 2", "here", 1.0 * rank, 2.0, [Call("bucket 1", ((0, 8, 2),), 3)])
        found.add(rank, replace(answer, lacks=answer.calls[rank % 2 :]), is_still=rank > 3)
    assert answers_from(json.loads(json.dumps(found.content())), 9) == found


Program = Sequence[tuple[str, tuple[int, ...]]]  # names of calls, and their ranks; all if empty


def answers_after(*programs: Program) -> dict[int, Answer]:
    """The answers of ranks that have made these calls and wait, when all are asked about all."""
    ranks = [Activity(wait=("a call", 1.0)) for _ in programs]
    for rank, (here, program) in enumerate(zip(ranks, programs, strict=True)):
        watch = Ring([], rank=rank, num_ranks=len(programs)).join(SyncConfig(), here)
        for name, of in program:
            if not of or rank in of:
                watch.makes_call(name, of)
    calls = [call for rank, here in enumerate(ranks) for call in here.answer(rank).calls]
    return {rank: here.answer(rank, calls) for rank, here in enumerate(ranks)}


def are_in_deadlock(before: dict[int, Answer], answers: dict[int, Answer]) -> bool:
    """What a rank finds that has these answers to two queries."""
    found = Answers()
    for rank, answer in answers.items():
        found.add(rank, answer, is_still=answer.is_like(before.get(rank)))
    return found.are_in_deadlock(len({*before, *answers}))


BUCKET, STATE = ("bucket 0", ()), ("the state", ())


def in_deadlock() -> dict[int, Answer]:
    return answers_after([BUCKET, STATE], [BUCKET, BUCKET], [BUCKET, BUCKET])


def test_ranks_that_wait_for_different_calls_are_in_a_deadlock() -> None:
    answers = in_deadlock()
    assert are_in_deadlock(answers, answers)


@pytest.mark.parametrize(
    "change",
    [{"waits_for": ""}, {"since_s": 2.0}, {"calls": [Call("bucket 1", (), 1)]}, {"lacks": ()}],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("is_after", [False, True])
def test_ranks_that_move_are_in_no_deadlock(change: dict[str, Any], is_after: bool) -> None:
    answers = in_deadlock()
    changed = {rank: replace(answer, **change) if rank == 0 else answer for rank, answer in answers.items()}
    before = changed if not is_after else answers
    after = changed if is_after else answers
    is_still = not is_after and set(change) & {"lacks"}  # only in the second answer
    assert are_in_deadlock(before, after) == bool(is_still)


def test_a_rank_that_did_not_answer_is_in_no_deadlock() -> None:
    answers = in_deadlock()
    fewer = {rank: answers[rank] for rank in (0, 2)}
    assert [are_in_deadlock(*both) for both in ((fewer, answers), (answers, fewer))] == [False, False]


# Rank 0 and 1 hold one half of the experts, rank 2 and 3 the other.
STEP = [("buffers", ()), BUCKET, ("bucket 0", (0, 1)), ("bucket 0", (2, 3)), ("the norm", ())]


def test_ranks_at_any_places_of_one_program_are_in_no_deadlock() -> None:
    draw = random.Random(0)
    for _ in range(500):
        done = [draw.randint(1, 2 * len(STEP)) for _ in range(4)]
        answers = answers_after(*((STEP * 2)[:num_calls] for num_calls in done))
        assert not are_in_deadlock(answers, answers), done


@pytest.mark.parametrize(
    ("rank_0", "is_deadlock"),
    [([*STEP, STATE], True), ([*STEP[:2], STATE], True), ([*STEP, *STEP[:2], STATE], False)],
    ids=["before the others' step", "before the others' experts", "after a launch"],
)
def test_another_call_of_one_rank_is_a_deadlock_once_the_others_need_it(rank_0: Program, is_deadlock: bool) -> None:
    """The others are in their second step. After a launch, rank 0 and 1 wait for calls that all others have made: no proof."""
    others = [*STEP, *STEP[:4]]
    answers = answers_after(rank_0, others, others, others)
    assert are_in_deadlock(answers, answers) == is_deadlock


def test_there_is_no_report_where_no_rank_waits_any_more() -> None:
    assert stall_text(table({1: LATE}), {}, num_ranks=2) == ""


PAGE = ROOT / "docs" / "reliability.md"
FRAME = re.findall(r"^    (\S+, line \d+, in \w+)$", PAGE.read_text(), re.M)[0]
TOLD = stall_text(
    table({0: Answer(3, "bucket 0 ('last.bias')", waited_s=30.0), 1: Answer(3, "", f"in the forward of 'norm'\n{FRAME}")}),
    {},
    num_ranks=2,
)
WRITTEN = {
    "where": "synchronization 199; 1 of 6 parameters differ",
    "remedy": "Look for what writes to parameters, or steps, on some ranks only; broadcast_parameters() makes them equal again.",
}
INFINITE = Finding(params=("last.bias",), ranks=(1,), where="synchronization 118, bucket 0")


# What docs/reliability.md quotes.


@pytest.mark.parametrize(
    "text",
    [
        TOLD,
        f"PeerFailed: {faults.failed(1, ValueError('row 7 has no label')).error('synchronization 118, rank 0')}",
        f"StallTimeout: {faults.timed_out(0, TOLD).error('synchronization 3, rank 0')}",
        f"NonFiniteGradient: {INFINITE.error(is_alone=False)}",
        f"ReplicaMismatch: {mismatch('last.weight', {0: 5, 1: 5, 2: 7}, **WRITTEN)}",
    ],
    ids=lambda text: text.partition(":")[0],
)
def test_what_the_page_quotes_is_ours(text: str) -> None:
    assert text in [snippet.code.rstrip("\n") for snippet in snippets(PAGE)]


@pytest.mark.parametrize(("fault", "kind"), [(faults.failed(1, KeyError("x")), PeerFailed), (faults.lost(1), RankLost)])
def test_every_error_of_a_fault_is_a_new_one(fault: faults.Fault, kind: type[Exception]) -> None:
    first, second = fault.error("here"), fault.error("here")
    assert (type(first), type(second), first is second) == (kind, kind, False)


@pytest.mark.parametrize(
    ("waits_for", "remedy"),
    [
        ("bucket 0 ('weight')", "Give every rank the same number of batches"),
        ("the state of a ShardedOptimizer, for which every rank must call state_dict()", "Make the call on every rank"),
        ("all ranks, to save a checkpoint", "Call save_checkpoint() on every rank"),
        ("all ranks, to load a checkpoint", "Call load_checkpoint() on every rank"),
    ],
)
def test_the_remedy_of_a_rank_that_left_fits_the_wait_for_it(waits_for: str, remedy: str) -> None:
    text = str(faults.left(1, None, 3).error("rank 0", waits_for=waits_for))
    assert ("rank 1 has left" in text, remedy in text, "state_dict()" in text) == (True, True, "state" in waits_for)


def test_a_long_message_of_an_exception_is_cut() -> None:
    assert (
        faults.failed(1, ValueError("x" * 100_000)).what == f"rank 1 has failed: ValueError: {'x' * (2000 - len('ValueError: '))}"
    )


class Asked(nn.Module, IterableDataset):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(2, 2), nn.Identity()
        self.said: dict[str, str] = {}
        self.inner.register_forward_hook(lambda *_: self.note("forward"))
        self.layer.weight.register_hook(lambda _: self.note("backward"))
        self.optimizer = torch.optim.SGD(self.parameters())
        self.optimizer.register_step_pre_hook(lambda *_: self.note("step"))

    def note(self, when: str) -> None:
        self.said[when] = doing_in(frames_of(threading.get_ident()), {id(module): name for name, module in self.named_modules()})

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
    secret, lines = "swordfish", stack_lines(frames_of(threading.get_ident()))
    assert lines[-2].endswith(", in test_a_stack_has_places_and_no_values")
    assert not any(secret in line for line in lines)
    assert len(lines) <= 12


def test_a_stack_shows_the_script_and_not_the_library_around_it() -> None:
    """It waits in torch: the line of the script is many frames away."""
    told: list[str] = []

    class Waits(nn.Module):
        def forward(self) -> None:
            told.extend(stack_lines(frames_of(threading.get_ident())[:-2]))

    inner = nn.Sequential()
    inner.forward = lambda: Waits()()  # type: ignore[assignment]
    inner()
    assert not any(", in _call_impl" in line for line in told[:-1])
    assert told[-1].endswith(", in _call_impl")
    assert told[-2].endswith(", in <lambda>")
    assert told[-3].endswith(", in test_a_stack_shows_the_script_and_not_the_library_around_it")


def test_a_rank_that_has_begun_no_step_is_said_to_be_idle() -> None:
    idle = [Activity(steps=partial(tuple, (number, False))) for number in (118, 0)]
    assert [here.answer(1).doing.splitlines()[0].rpartition(", ")[2] for here in idle] == [
        "no training forward since synchronization 118 (if its data has ended: finish())",
        "no training forward yet (if its data has ended: finish())",
    ]


def test_what_ranks_say_does_not_steer_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    fault = faults.fault_from({"error": "RankLost", "what": "\x1b[2Jgone\u202e\r", "remedy": "mend", "told": "a.py,\tline 3"})
    assert str(fault.error("here")) == "\\x1b[2Jgone\\u202e\\r\n  here\n  a.py,\\tline 3\n  mend"
    with caplog.at_level(logging.WARNING, "undertow"):
        faults.tell("waits for \x1b[2J\ud800 [/bold]\nand more")
    assert caplog.messages == ["waits for \\x1b[2J\\ud800 [/bold]\nand more"]
