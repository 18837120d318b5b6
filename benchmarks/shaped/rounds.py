"""Rounds over one link: every system takes a turn in each, in an order that is reversed every other round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.errors import RankFailed
from benchmarks.links import network_of
from benchmarks.shaped.contenders import Contender
from benchmarks.shaped.session import Session

_TURN_S, _LEAST_STEPS = 20.0, 6  # a slow system makes fewer steps in a turn


@dataclass(slots=True, kw_only=True)
class Timed:
    """The steps of one system, in ms: by round, rank and step."""

    contender: Contender
    settling_ms: list[list[float]] = field(default_factory=list)  # by rank and step
    rounds_ms: list[list[list[float]]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)  # of one step of the whole process, by round: the slowest rank's
    told: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def of_rounds_ms(self) -> list[float]:
        """A step of each round: the median of the slowest rank's; with periods, the mean of the slowest rank."""
        if self.contender.period > 1:
            return [max(mean(of_rank) for of_rank in ranks) for ranks in self.rounds_ms]
        return [median(max(step) for step in zip(*ranks, strict=True)) for ranks in self.rounds_ms]

    @property
    def step_ms(self) -> float:
        return median(self.of_rounds_ms)

    def to_dict(self) -> dict[str, Any]:
        return {
            "system": self.contender.name,
            "title": self.contender.title,
            "error": self.error,
            "settling_ms": _rounded(self.settling_ms),
            "rounds_ms": [_rounded(ranks) for ranks in self.rounds_ms],
            "cpu_ms": [round(it, 2) for it in self.cpu_ms],
            "told": self.told,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What is measured in one session of processes."""

    workload: str
    link: str
    num_ranks: int
    contenders: Sequence[Contender]
    num_rounds: int
    num_steps: int
    sources: Mapping[str, Path]  # the folder of the library, by the name of its tree; "" is the one on the path


def run(course: Course, tell: Callable[[str], None]) -> list[Timed]:
    """Returns the steps of every system. A system that fails has its error instead; the others continue."""
    timed = [Timed(contender=each) for each in course.contenders]
    place = f"{course.workload}, {course.link}"
    with network_of(course.link, course.num_ranks) as network, ExitStack() as stack:
        sessions: dict[str, Session] = {}
        for each in timed:
            tell(f"{place}: {each.contender.name} settles")
            with _failing(each):
                source = course.sources[each.contender.tree]
                session = Session(each.contender, course.workload, network, num_ranks=course.num_ranks, source=source)
                sessions[each.contender.name] = stack.enter_context(session)
                each.settling_ms = session.settle()
        for number in range(course.num_rounds):
            for each in reversed(timed) if number % 2 else timed:
                if each.error is None:
                    tell(f"{place}, round {number + 1} of {course.num_rounds}: {each.contender.name}")
                    with _failing(each):
                        _take_turn(each, sessions[each.contender.name], course)
        for each in timed:
            if each.error is None:
                with _failing(each):
                    each.told = sessions[each.contender.name].told()
    return timed


@contextmanager
def _failing(each: Timed) -> Iterator[None]:
    """Keeps the error of a system whose ranks fail in the block."""
    try:
        yield
    except RankFailed as error:
        each.error = str(error)


def _take_turn(each: Timed, session: Session, course: Course) -> None:
    ranks = session.train(_num_steps(each, course.num_steps))
    each.rounds_ms.append([rank["steps_ms"] for rank in ranks])
    each.cpu_ms.append(max(rank["cpu_ms"] for rank in ranks))


def _num_steps(each: Timed, asked: int) -> int:
    """Returns the steps of a turn: whole periods, and otherwise as many as there is time for."""
    period = each.contender.period
    if period > 1:
        return -(-asked // period) * period
    settled_ms = median(each.settling_ms[0][-_LEAST_STEPS:])
    return min(asked, max(_LEAST_STEPS, int(_TURN_S * 1e3 / settled_ms)))


def _rounded(ranks: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(step, 2) for step in of_rank] for of_rank in ranks]
