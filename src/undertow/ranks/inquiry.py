"""Has this rank waited too long? A query of ranks for their activity, whose answers are gathered up
the ring once.

        rank 3 asks           the others answer
    2 ◄── 3 ──► 4             2 ──► 3 ◄── 4
    1           5             1           5       each adds its answer to those of the ranks behind
    0 ◄───────► 6             0           6

    kind      from whom, to whom                            a rank that receives it
    asks      a rank that has waited for long, to the next  passes it on, away from the asker
    does      a rank, to the one that has asked it          adds its own answer, and passes it back
    answers   the rank that asked, to all                   keeps them: all ranks have the same

A rank has one neighbor that asked it, and waits for the answers of the other one, unless the query
also comes from there: then the two sides have met. It waits for a part of the time only, the
shorter the farther it is from the asker, and passes later answers on as they are. So a rank that is
stopped delays no other answer.

If several ranks ask at about the same time, one query replaces the others. Which one does not
depend on the order of ranks: if the lowest one did, all queries would follow each other round the
ring, and each would be replaced everywhere. A rank sends three messages for a query, however many
ranks there are, and a message has equal answers once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from undertow.config import SyncConfig
from undertow.ranks import faults, patience
from undertow.ranks.answers import (
    Answer,
    Answers,
    Call,
    answers_from,
    calls_from,
    reporters,
    stall_text,
)
from undertow.ranks.connections import Connection, Message, MessageKind
from undertow.ranks.faults import Fault


class Party(Protocol):
    """The ring, as a query needs it."""

    rank: int
    num_ranks: int

    @property
    def neighbors(self) -> Sequence[Connection]: ...

    def say_to(self, neighbor: Connection, kind: MessageKind, **content: Any) -> None:
        """Sends a message to one neighbor."""

    def say(self, kind: MessageKind, **content: Any) -> None:
        """Tells every rank, including this one."""

    def answer(self, number: int, about: Sequence[Call]) -> tuple[Answer, bool] | None:
        """Returns what this rank does in a model, and True if it has been in the same wait since it
        answered before; or None if this rank does not have the model."""


@dataclass(slots=True)
class _Query:
    """One query, as this rank takes part in it."""

    asker: int
    number: int  # of the asker's queries
    about: Sequence[Call]
    depth: int  # ranks between this one and the asker, and one
    parent: Connection | None  # the neighbor that has asked; None on the asker
    children: list[Connection]  # that have not answered
    until_s: float  # when this rank answers without them
    found: Answers = field(default_factory=Answers)
    is_answered: bool = False


class Inquiry:
    """The queries about one model that this rank takes part in.

    Used by the guard's thread alone, except `told_about`.
    """

    def __init__(self, ring: Party, number: int) -> None:
        self._ring = ring
        self._number = number  # of the model
        self._query: _Query | None = None
        self._seen: dict[int, int] = {}  # the last query of each rank that asked
        self.asked_s = -math.inf  # when the last query began
        self.is_about_calls = False  # the last query confirms calls of the answers before
        self.answers: Answers | None = None  # to the last query, when they have arrived
        self._told = -math.inf, ""  # time and text of the last report

    @property
    def limit_s(self) -> float:
        """The time for all answers."""
        return patience.answers_s(self._ring.num_ranks)

    @property
    def is_open(self) -> bool:
        """True while answers to the last query may arrive."""
        return self.answers is None and time.monotonic() <= self.asked_s + self.limit_s

    def ask(self, about: Sequence[Call]) -> None:
        """Asks all ranks."""
        number = self._seen.get(self._ring.rank, -1) + 1
        until_s = time.monotonic() + self.limit_s
        children = list(self._ring.neighbors)
        self._begin(_Query(self._ring.rank, number, about, 0, None, children, until_s))

    def hear(self, kind: str, source: Connection, message: Message) -> None:
        """Handles a message of a neighbor; raises an error if it is malformed."""
        asker, number = int(message["asker"]), int(message["query"])
        if asker not in range(self._ring.num_ranks):
            raise ValueError("it is from no rank.")
        if kind == MessageKind.ASKS:
            self._is_asked(asker, number, source, message)
        else:
            self._is_answered(asker, number, source, message)

    def end(self, message: Message) -> None:
        """Takes over the answers that the asker has gathered."""
        query, found = self._query, answers_from(message, self._ring.num_ranks)
        asker, number = int(message["from"]), int(message["query"])
        if query is None or (query.asker, query.number) != (asker, number):
            if number <= self._seen.get(asker, -1):  # they come from both sides, or very late
                return
            self._note(asker, number, bool(message["is_about_calls"]))  # it was not asked itself
        self._query = None
        self.answers = found

    def stall(self, waited_s: float, limits: SyncConfig, left: Mapping[int, Fault]) -> Fault | None:
        """Looks at this rank's wait: asks all ranks if it is long, prints their answers, and
        returns the fault that these show.

        `left` has the ranks that have closed the model, or ended.
        """
        now_s = time.monotonic()
        is_news = self._told[0] < self.asked_s and not self.is_about_calls
        if is_news and self.answers is not None:
            text = self.report(left)
            self._told = now_s, text
            if text:
                faults.tell(self._share_of(text, left.keys()))
        is_over = waited_s > limits.stall_timeout_s
        if waited_s < limits.stall_warning_s and not is_over:
            return None
        pause_s = 2 * self.limit_s
        about = self.calls_to_confirm()
        if not (is_over or about):
            pause_s = max(limits.stall_warning_s, pause_s)
        if now_s > self.asked_s + pause_s:
            self.ask(about)
        elif self.answers is not None:
            num_ranks = self._ring.num_ranks
            # if others are late, the wait may be for another rank
            if left and self.answers.late(num_ranks) <= left.keys():
                return next(iter(left.values()))
            if is_over or self.answers.are_in_deadlock(num_ranks):
                return faults.stalled(self.report(left))
        return None

    def report(self, left: Mapping[int, Fault]) -> str:
        """Returns the waits and activities of all ranks, or an empty text if no rank waits."""
        if self.answers is None:
            return ""
        gone = {rank: fault.what for rank, fault in left.items()}
        return stall_text(self.answers, gone, num_ranks=self._ring.num_ranks)

    def told_about(self, wait: tuple[str, float]) -> str:
        """Returns the last report if it was printed during this wait, with a name and a start."""
        told_s, text = self._told
        waits_for, since_s = wait
        return text if waits_for and told_s > since_s else ""

    def calls_to_confirm(self) -> list[Call]:
        """Returns the calls of ranks that all wait, if they were not asked about them yet."""
        answers = self.answers
        if answers is None or self.is_about_calls or answers.late(self._ring.num_ranks):
            return []
        return sorted(answers.calls) if len(answers.calls) > 1 else []

    def _share_of(self, report: str, gone: Set[int]) -> str:
        """Returns the lines of a report that this rank prints. Two ranks print all of it: thousands
        of equal reports in one log hide everything else."""
        assert self.answers is not None  # the report is made of them
        tellers = reporters(self.answers, gone, num_ranks=self._ring.num_ranks)
        if self._ring.rank in tellers:
            return report
        first, *_ = report.split("\n")
        return f"{first} The log of rank {tellers[0]} has the whole report."

    def look(self) -> None:
        """Answers without the ranks that have not done so in time."""
        self._advance()

    @property
    def due_s(self) -> float:
        """When `look` will have something to do."""
        query = self._query
        return math.inf if query is None or query.is_answered else query.until_s

    def _is_asked(self, asker: int, number: int, source: Connection, message: Message) -> None:
        query, about = self._query, calls_from(message["about"])
        if query is not None and (asker, number) == (query.asker, query.number):
            self._has_answered(query, source)  # the two sides have met
            self._advance()
            return
        if number <= self._seen.get(asker, -1):
            return
        before = None if query is None or not self.is_open else query.asker
        if before is not None and _place_in_line(asker) > _place_in_line(before):
            return
        depth = int(message["depth"]) + 1
        # A rank far away answers before one that is near, which waits for it.
        share = 0.25 + 0.5 * max(0, self._ring.num_ranks - depth) / self._ring.num_ranks
        until_s = time.monotonic() + share * self.limit_s
        children = [one for one in self._ring.neighbors if one is not source]
        self._begin(_Query(asker, number, about, depth, source, children, until_s))

    def _begin(self, query: _Query) -> None:
        self._query = query
        self._note(query.asker, query.number, bool(query.about))
        for child in query.children:
            self._ring.say_to(
                child,
                MessageKind.ASKS,
                number=self._number,
                asker=query.asker,
                query=query.number,
                depth=query.depth,
                about=query.about,
            )
        own = self._ring.answer(self._number, query.about)
        if own is not None:
            answer, is_still = own
            query.found.add(self._ring.rank, answer, is_still=is_still)
        self._advance()

    def _note(self, asker: int, number: int, is_about_calls: bool) -> None:
        self._seen[asker] = max(number, self._seen.get(asker, -1))
        self.asked_s = time.monotonic()
        self.is_about_calls = is_about_calls
        self.answers = None

    def _is_answered(self, asker: int, number: int, source: Connection, message: Message) -> None:
        query, found = self._query, answers_from(message, self._ring.num_ranks)
        if query is None or (asker, number) != (query.asker, query.number):
            return
        if query.is_answered:
            self._pass_back(query, found)
            return
        found.merge(query.found)  # in the order of the ring
        query.found = found
        self._has_answered(query, source)
        self._advance()

    def _has_answered(self, query: _Query, source: Connection) -> None:
        query.children = [child for child in query.children if child is not source]

    def _advance(self) -> None:
        query = self._query
        if query is None or query.is_answered:
            return
        is_over = time.monotonic() >= query.until_s
        if query.parent is not None:
            alive = self._ring.neighbors
            if is_over or not any(child in alive for child in query.children):
                query.is_answered = True
                self._pass_back(query, query.found)
            return
        if is_over or len(query.found.ranks) == self._ring.num_ranks:
            query.is_answered = True
            self._ring.say(
                MessageKind.ANSWERS,
                number=self._number,
                query=query.number,
                is_about_calls=bool(query.about),
                **query.found.in_order().content(),
            )

    def _pass_back(self, query: _Query, found: Answers) -> None:
        if query.parent is None:
            return
        self._ring.say_to(
            query.parent,
            MessageKind.DOES,
            number=self._number,
            asker=query.asker,
            query=query.number,
            **found.content(),
        )


class Inquiries:
    """The inquiries about the models of a ring, also about models that this rank lacks."""

    def __init__(self, ring: Party) -> None:
        self._ring = ring
        self._of_models: dict[int, Inquiry] = {}

    def of(self, number: int) -> Inquiry:
        """Returns the queries about a model."""
        return self._of_models.setdefault(number, Inquiry(self._ring, number))

    def forget(self, number: int) -> None:
        """Drops a model that this rank has closed."""
        self._of_models.pop(number, None)

    def hear(self, message: Message, source: Connection) -> None:
        """Handles a message of a neighbor; raises an error if it is malformed."""
        self.of(int(message["number"])).hear(message["kind"], source, message)

    def look(self) -> None:
        """Answers queries whose time is over."""
        for inquiry in list(self._of_models.values()):
            inquiry.look()

    @property
    def due_s(self) -> float:
        """When `look` will have something to do."""
        inquiries = list(self._of_models.values())
        return min((inquiry.due_s for inquiry in inquiries), default=math.inf)


def _place_in_line(rank: int) -> int:
    """Returns the order of ranks that ask at the same time. Neighbors are far apart in it."""
    return rank * 2_654_435_769 % (1 << 32)
