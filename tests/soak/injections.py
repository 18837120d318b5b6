"""What is done to a training, drawn from a seed, and whether it has ended as it must: the same numbers give the same again."""

import random
import re
from dataclasses import dataclass, field
from typing import Any

from support.faults import NAN, NAN_SKIPPED, NUM_STEPS, SMALL, Fault, outcomes
from support.processes import Ended

STALL_TIMEOUT_S = 1.0  # where a rank never goes on
WAYS = {"ddp": (2, 3, 4), "zero1": (2, 3, 4), "zero2": (2, 3, 4), "hybrid": (4,)}  # ranks
ENDINGS = ("left open", "closed", "destroyed")

_USERS = ("data", "forward", "backward", "optimizer", "after step")
_OURS = tuple(f"{when} {op}" for op in ("pack", "bind", "wait") for when in ("before", "after"))
_OF_WAY = {
    "ddp": ("all_reduce",),
    "zero1": ("reduce_scatter", "all_gather", "update"),
    "zero2": ("reduce_scatter", "all_gather", "update"),
    "hybrid": ("reduce_scatter", "all_reduce", "all_gather", "update"),
}
_IN_THREADS = ("post", "complete")  # of exchanges that are made of sends and receives
_ONCE = ("construction", "buffers")
_ACCUMULATES = ("ddp", "zero1", "hybrid")  # what has not traveled yet; the others add up what has, in another order


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    others: str = ""  # error of the other ranks; empty where the training is to be as if nothing had been
    says: str = ""  # a pattern of its text
    own: str = ""  # error of the rank itself; empty where it is none
    exit_code: int = 0  # of the rank itself
    points: tuple[str, ...] = ()  # where it can happen; none: everywhere
    is_in_threads: bool = True  # also where no code of the user's runs
    is_in_construction: bool = True
    settings: dict[str, Any] = field(default_factory=dict)
    ways: tuple[str, ...] = tuple(WAYS)


# Where they change before the first step is over they are compared with what they were on no rank.
_CHANGED = (
    r"^the parameters, or the communication hook, have changed on rank {rank}, but not on"
    r"|^ranks disagree on the parameters.*'middle.weight' on rank"
)
_FAILED = r"^rank {rank} has failed: .*BadBatch: row 7|^backward failed on rank {rank}\."  # that goes on, to its close()
_NAN = r"^the gradient of 'norm.bias' is not finite \(NaN or Inf\) on rank {rank}\."
KINDS = {
    "killed": Kind(others="RankLost", says=r"^rank {rank} is gone: its process exited or was killed", exit_code=-9),
    "raises": Kind(others="PeerFailed", says=_FAILED, own="BadBatch", exit_code=1, is_in_threads=False),
    "leaves": Kind(
        others="RankLost", says=r"^rank {rank} has left: it has finished after \d+ sync", points=("data", "after step")
    ),
    "stopped": Kind(
        others="StallTimeout",
        says=r"rank {rank} has not arrived.*rank {rank}: (stopped|no answer)",
        exit_code=-9,
        settings={"stall_warning_s": 0.5, "stall_timeout_s": STALL_TIMEOUT_S},
        is_in_construction=False,
    ),
    "paused": Kind(settings={"stall_warning_s": 0.5}),
    "late": Kind(),
    NAN: Kind(points=("data",)),
    f"{NAN}, raised": Kind(
        others="NonFiniteGradient",
        says=_NAN,
        own="NonFiniteGradient",
        exit_code=1,
        points=("data",),
        settings={"nonfinite": "raise"},
    ),
    NAN_SKIPPED: Kind(points=("data",), settings={"nonfinite": "skip"}, ways=("ddp", "zero1", "zero2", "hybrid")),
    "other graph": Kind(points=("data",)),
    "freezes": Kind(others="PlanMismatch", says=_CHANGED, own="PlanMismatch", exit_code=1, points=("data",)),
}


@dataclass(frozen=True, kw_only=True)
class Injection(Fault):
    seed: int
    number: int

    def __str__(self) -> str:
        micro_batches = f" with {self.num_micro_batches} micro-batches" if self.num_micro_batches > 1 else ""
        what = f"rank {self.rank} of {self.num_ranks}, {self.way}{micro_batches}, step {self.step}, {self.point}"
        return f"{self.kind}: {what}{f', passage {self.passage}' if self.passage else ''}"

    @property
    def command(self) -> str:
        return f'make soak ARGS="--seed {self.seed} --only {self.number}"'


def injection(seed: int, number: int) -> Injection:
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choice(tuple(KINDS))
    way = draw.choice(KINDS[kind].ways)
    num_ranks = draw.choice(WAYS[way])
    point, step = draw.choice(points_of(kind, way, num_ranks)), draw.randrange(NUM_STEPS)
    # A bucket passes a point once a step: later passages are sure to come where steps are left.
    passage = draw.randrange(3) if step < NUM_STEPS - 2 and point not in (*_USERS, *_ONCE) else 0
    return Injection(
        seed=seed,
        number=number,
        meets=False,
        kind=kind,
        way=way,
        num_ranks=num_ranks,
        rank=draw.randrange(num_ranks),
        step=step,
        point=point,
        passage=passage,
        seconds=draw.choice((0.02, 0.3, 1.5)),
        jitter_ms=draw.choice((0.0, 1.0, 10.0)),
        # Added up in the order of ranks there is one right result: two numbers have no order.
        settings=draw.choice((SMALL, SMALL, {})) | {"reduction": "ordered" if num_ranks > 2 else "native"} | KINDS[kind].settings,
        ending=draw.choice(ENDINGS),
        num_micro_batches=draw.choice((1, 1, 2)) if way in _ACCUMULATES else 1,
    )


def points_of(kind: str, way: str, num_ranks: int) -> tuple[str, ...]:
    how = KINDS[kind]
    if how.points:
        return how.points
    ops = tuple(f"{when} {op}" for op in _OF_WAY[way] if op != "update" for when in ("before", "after"))
    users = (*_USERS, "update") if "update" in _OF_WAY[way] else _USERS
    points = (*users, *_OURS, *ops, "buffers")
    if how.is_in_threads and not (way == "ddp" and num_ranks == 2):
        points += _IN_THREADS
    return (*points, "construction") if how.is_in_construction else points


WITHIN_S = 10.0  # from the fault to the error, and what it is waited for on purpose


@dataclass(frozen=True)
class Verdict:
    problems: tuple[str, ...]  # empty where all is well
    outcome: str  # in a word
    seconds: tuple[float, ...]  # from the fault to the error on each rank that has raised one


def inject(injection: Injection) -> Verdict:
    return judged(injection, outcomes(injection))


def judged(injection: Injection, ended: list[Ended]) -> Verdict:
    fault = ended[injection.rank].words
    if "fault" not in fault:
        problems = [f"rank {rank}: {_last_word(one)}" for rank, one in enumerate(ended)]
        return Verdict(("the fault has not come to pass", *problems), "", ())
    others = [ended[rank] for rank in injection.others]
    found = {rank: _problem(injection, rank, one, fault) for rank, one in enumerate(ended) if rank != injection.rank}
    found[injection.rank] = _own_problem(injection, ended[injection.rank])
    problems = tuple(f"rank {rank}: {found[rank]}\n{_last_word(one)}" for rank, one in enumerate(ended) if found[rank])
    kinds = sorted({one.kind or "identical" for one in others})
    return Verdict(problems, ", ".join(kinds), tuple(one.words["at"] - fault["fault"] for one in others if one.kind))


def _own_problem(injection: Injection, one: Ended) -> str:
    kind = KINDS[injection.kind]
    if one.kind != kind.own:
        return f"raised {one.kind or 'nothing'}, and not {kind.own or 'nothing'}"
    if one.exit_code != kind.exit_code:
        return f"ended with {one.exit_code}, and not with {kind.exit_code}"
    return _other_bits(one)


def _other_bits(one: Ended) -> str:
    names = one.words.get("value")
    return f"other bits: {', '.join(names)}" if names else ""


def _problem(injection: Injection, rank: int, one: Ended, fault: dict[str, Any]) -> str:
    kind, words = KINDS[injection.kind], one.words
    if one.was_killed or "at" not in words:
        return "has not ended" if one.was_killed else f"ended with {one.exit_code}, without a word"
    if not one.kind:
        return _other_bits(one) or ("" if one.exit_code == 0 else f"ended with {one.exit_code}, after training")
    if one.kind != kind.others or not re.search(kind.says.format(rank=injection.rank), one.text, re.DOTALL):
        return f"not {kind.others or 'as if nothing had been'}"
    where = re.search(r"synchronization (\d+), (?:rank (\d+)|bucket \d+)$", one.text, re.MULTILINE)
    is_of_step = kind.others == "PlanMismatch" or (where is not None and abs(int(where[1]) - fault["step"]) <= 1)
    if not is_of_step or (where is not None and where[2] and int(where[2]) != rank):
        return f"does not say that it was about synchronization {fault['step']}, on rank {rank}"
    if words["at"] - fault["fault"] > WITHIN_S + (STALL_TIMEOUT_S if kind.others == "StallTimeout" else 0.0):
        return f"only {words['at'] - fault['fault']:.1f} s after the fault"
    return "" if one.exit_code == 1 else f"ended with {one.exit_code}, after its error"


def _last_word(one: Ended) -> str:
    parts = [f"exit code {one.exit_code}", *(f"{name}: {value}" for name, value in one.words.items()), one.log]
    return "    " + "\n".join(parts).replace("\n", "\n    ")
