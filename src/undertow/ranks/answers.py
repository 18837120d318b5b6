"""Answers of ranks: their activity, as they answer a query, and texts that they tell each other.

Ranks that answer alike are one entry. The table of all activities has the ranks of an entry in
runs: if one of thousands of ranks is late, the table has two entries, and so has its report.

Ranks               a set of ranks, in few runs
Answer, Answers     the activity of one rank, and of all: the table
stall_text          the report made of the table
Alike, lines_of     ranks that have told the same text, and lines for all texts
in_ranges, named    ranks, in texts

Reasons: docs/design/lost-ranks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, NamedTuple, TypeAlias

ALL_WAIT = "all ranks wait, for different things"
ALL_WAIT_FOR_IT = "all ranks wait for it"
MAX_TEXT = 2000  # most characters of an error or a name that are sent
MOST_TEXTS = 8  # of different ones that an error lists
_MAX_ENTRIES = 32  # of a table; further ones are combined
_MAX_LINES = 8  # of a report, for ranks with the same answer each, without their frames
_NUM_FRAMES = 12  # of a report, in all
_MAX_RANGES = 16  # in one text
_OTHERS = -1  # the synchronization of entries that were combined

Run: TypeAlias = tuple[int, int, int]  # first, last, and the step from one to the next


class Ranks:
    """A set of ranks, in runs. Ranks are added one after another round the ring, so runs are
    few."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self.runs = list(runs)

    @classmethod
    def of(cls, ranks: Iterable[int]) -> Ranks:
        found = cls()
        for rank in sorted(set(ranks)):
            found.add(rank)
        return found

    def add(self, rank: int) -> None:
        """Adds a rank that is not in the set."""
        if self.runs:
            first, last, step = self.runs[-1]
            if first == last:
                step = rank - first
            if rank == last + step:
                self.runs[-1] = (first, rank, step)
                return
        self.runs.append((rank, rank, 1))

    def join(self, others: Ranks) -> None:
        """Adds ranks that are not in the set."""
        for run in others.runs:
            if run[0] == run[1]:
                self.add(run[0])
            else:
                self.runs.append(run)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(_range_of, self.runs))

    def __len__(self) -> int:
        return sum(len(_range_of(run)) for run in self.runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranks) and set(self) == set(other)

    __hash__ = None  # type: ignore[assignment]


def _range_of(run: Run) -> range:
    first, last, step = run
    return range(first, last + (1 if step > 0 else -1), step)


class Call(NamedTuple):
    """A collective call that a rank has made: the `number`-th with this name by these ranks."""

    name: str
    ranks: tuple[Run, ...]  # of the model's ranks; empty if all of them make it
    number: int

    def is_of(self, rank: int) -> bool:
        return not self.ranks or any(rank in _range_of(run) for run in self.ranks)


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank's own report of its activity, to ranks that have waited for long."""

    step: int  # its synchronization
    waits_for: str  # the name of its wait; empty if it does not wait
    doing: str = ""  # what it does if it does not wait, then its frames in lines
    waited_s: float = 0.0
    since_s: float = 0.0  # when the wait began, by the clock of that rank
    calls: Sequence[Call] = ()  # its last one over each group
    lacks: Sequence[Call] = ()  # those that it was asked about and has not made

    def is_like(self, before: Answer | None) -> bool:
        """Returns True if the rank has been in one wait since its answer `before`."""
        return (
            before is not None
            and bool(before.waits_for and self.waits_for)
            and (before.since_s, before.calls) == (self.since_s, self.calls)
        )


@dataclass(slots=True)
class _Entry:
    """Ranks that have answered alike."""

    ranks: Ranks
    waited_s: float  # of the one that has waited longest
    longest: int  # that rank


@dataclass(slots=True)
class Answers:
    """The answers of several ranks."""

    # by synchronization, wait and activity
    entries: dict[tuple[int, str, str], _Entry] = field(default_factory=dict)
    calls: dict[Call, Ranks] = field(default_factory=dict)  # last ones, and who has made them
    lacked: set[Call] = field(default_factory=set)  # by some rank
    still: Ranks = field(default_factory=Ranks)  # in the same wait as at their answer before

    def add(self, rank: int, answer: Answer, *, is_still: bool = False) -> None:
        key = (answer.step, answer.waits_for[:MAX_TEXT], answer.doing[: 2 * MAX_TEXT])
        self._add(key, _Entry(Ranks([(rank, rank, 1)]), answer.waited_s, rank))
        for call in answer.calls:
            self.calls.setdefault(call, Ranks()).add(rank)
        self.lacked.update(answer.lacks)
        if is_still:
            self.still.add(rank)

    def merge(self, other: Answers) -> None:
        """Adds the answers of other ranks."""
        for key, entry in other.entries.items():
            self._add(key, entry)
        for call, ranks in other.calls.items():
            self.calls.setdefault(call, Ranks()).join(ranks)
        self.lacked |= other.lacked
        self.still.join(other.still)

    def _add(self, key: tuple[int, str, str], entry: _Entry) -> None:
        if key not in self.entries and len(self.entries) >= _MAX_ENTRIES:
            key = (_OTHERS, "other things", "") if key[1] else (_OTHERS, "", "in other places")
        there = self.entries.setdefault(key, _Entry(Ranks(), entry.waited_s, entry.longest))
        there.ranks.join(entry.ranks)
        if (entry.waited_s, -entry.longest) > (there.waited_s, -there.longest):
            there.waited_s, there.longest = entry.waited_s, entry.longest

    def in_order(self) -> Answers:
        """Returns the same answers with as few runs as possible."""
        return Answers(
            {
                key: _Entry(Ranks.of(entry.ranks), entry.waited_s, entry.longest)
                for key, entry in self.entries.items()
            },
            {call: Ranks.of(ranks) for call, ranks in self.calls.items()},
            self.lacked,
            Ranks.of(self.still),
        )

    @property
    def ranks(self) -> set[int]:
        """The ranks that have answered."""
        return set(chain.from_iterable(entry.ranks for entry in self.entries.values()))

    @property
    def waiting(self) -> set[int]:
        """The ranks that wait."""
        waits = (entry.ranks for key, entry in self.entries.items() if key[1])
        return set(chain.from_iterable(waits))

    def late(self, num_ranks: int) -> set[int]:
        """Returns the ranks that do not wait, or do not answer."""
        return set(range(num_ranks)) - self.waiting

    def are_in_deadlock(self, num_ranks: int) -> bool:
        """Returns True if no rank can continue: each waits, and has made a call that another one of
        its ranks has not made.

        Ranks that run the same program make their calls in the same order, however slow they are.
        Then the last call of the rank that is furthest behind has been made by all, so this is
        never True. It is True only if ranks have taken different ways, and have been in the same
        waits during two queries. A wait that ends in between, late or not, is progress.
        """
        stuck = chain.from_iterable(self.calls.get(call, ()) for call in self.lacked)
        everyone = set(range(num_ranks))
        return self.waiting == set(self.still) == set(stuck) == everyone

    def content(self) -> dict[str, Any]:
        """Returns the content of a message, for `answers_from`."""
        return {
            "entries": [
                [*key, entry.ranks.runs, entry.waited_s, entry.longest]
                for key, entry in self.entries.items()
            ],
            "calls": [[*call, ranks.runs] for call, ranks in self.calls.items()],
            "lacked": sorted(self.lacked),
            "still": self.still.runs,
        }


def answers_from(message: Mapping[str, Any], num_ranks: int) -> Answers:
    """Parses answers of other ranks; raises ValueError, TypeError or KeyError if they are
    malformed."""
    found = Answers(lacked=set(calls_from(message["lacked"])))
    for step, waits_for, doing, runs, waited_s, longest in message["entries"]:
        key = (int(step), str(waits_for)[:MAX_TEXT], str(doing)[: 2 * MAX_TEXT])
        ranks = Ranks(_runs_from(runs, num_ranks))
        found.entries[key] = _Entry(ranks, float(waited_s), int(longest))
    for name, of, number, runs in message["calls"]:
        (call,) = calls_from([(name, of, number)])
        found.calls[call] = Ranks(_runs_from(runs, num_ranks))
    found.still = Ranks(_runs_from(message["still"], num_ranks))
    return found


def calls_from(values: Iterable[Any]) -> tuple[Call, ...]:
    """Parses calls of another rank; raises ValueError or TypeError if they are malformed."""
    return tuple(Call(str(name), _runs_from(runs), int(number)) for name, runs, number in values)


def _runs_from(values: Iterable[Any], num_ranks: int | None = None) -> tuple[Run, ...]:
    """Parses runs; raises ValueError if one has ranks that do not exist."""
    found = []
    for first, last, step in values:
        run = int(first), int(last), int(step)
        members = _range_of(run)
        if run[1] not in members or min(run[:2]) < 0 or max(run[:2]) >= (num_ranks or 1 << 32):
            raise ValueError(f"{run} is not a run of ranks.")
        found.append(run)
    return tuple(found)


def in_ranges(ranks: Iterable[int]) -> str:
    """Returns ranks as text, such as "0-62, 64"."""
    ordered = sorted(ranks)
    if not ordered:
        return ""
    starts = [ordered[0], *(after for before, after in pairwise(ordered) if after > before + 1)]
    stops = [*(before for before, after in pairwise(ordered) if after > before + 1), ordered[-1]]
    texts = list[str]()
    num_named = 0
    for start, stop in zip(starts, stops, strict=True):
        if len(texts) == _MAX_RANGES:
            return f"{', '.join(texts)} and {len(ordered) - num_named} more"
        separator = "-" if stop > start + 1 else ", "
        texts.append(f"{start}{separator}{stop}" if stop > start else f"{start}")
        num_named += stop - start + 1
    return ", ".join(texts)


def named(ranks: Iterable[int]) -> str:
    """Returns ranks as a subject, such as "rank 1" or "ranks 0-62, 64"."""
    ranks = set(ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {in_ranges(ranks)}"


class Alike(NamedTuple):
    """Ranks that have the same text."""

    ranks: list[int]
    text: str | None  # None if it was not sent: only the first texts are


def alike(texts: Mapping[int, str]) -> list[Alike]:
    """Returns the ranks by their texts, in the order of their lowest ranks."""
    found: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        found.setdefault(text, []).append(rank)
    return [Alike(ranks, text) for text, ranks in found.items()]


def lines_of(found: Sequence[Alike]) -> list[str]:
    """Returns a line for each text, and one for the ranks whose texts were not sent."""
    lines = [f"{named(one.ranks)}: {one.text}" for one in found if one.text is not None]
    others = list(chain.from_iterable(one.ranks for one in found if one.text is None))
    return [*lines, f"{named(others)}: something else"] if others else lines


def stall_text(answers: Answers, gone: Mapping[int, str], *, num_ranks: int) -> str:
    """Describes the wait or activity of all ranks, if one waits; `gone` has the ends of ranks.

    Ranks with the same answers produce the same text.
    """
    late, waiting = answers.late(num_ranks), answers.waiting
    if not waiting:
        return ""
    late = late - gone.keys() or late
    (_, waits_for, _), first = max(
        ((key, entry) for key, entry in answers.entries.items() if key[1]),
        key=lambda item: item[1].waited_s,
    )
    if late:
        why = f"{named(late)} {'have' if len(late) > 1 else 'has'} not arrived"
    else:
        waits = {key[1] for key in answers.entries}
        why = ALL_WAIT if len(waits) > 1 else ALL_WAIT_FOR_IT
    head = f"rank {first.longest} has waited {first.waited_s:.0f} s for {waits_for}: {why}."
    return "\n  ".join((head, *_lines(answers, gone, num_ranks)))


def reporters(answers: Answers, gone: Set[int], *, num_ranks: int) -> list[int]:
    """Returns the ranks that print a whole report: the lowest one that waits, and the lowest one
    that is late."""
    late = answers.late(num_ranks)
    lowest = {min(ranks) for ranks in (answers.waiting, late - gone or late) if ranks}
    return sorted(lowest)


def _lines(answers: Answers, gone: Mapping[int, str], num_ranks: int) -> list[str]:
    """Returns the lines of a report for all ranks, by their lowest ranks."""
    answered = {
        key: Ranks.of(set(entry.ranks) - gone.keys()) for key, entry in answers.entries.items()
    }
    silent = set(range(num_ranks)) - answers.ranks - gone.keys()
    late = [(set(ranks), key) for key, ranks in answered.items() if len(ranks) and not key[1]]
    late.sort(key=lambda item: min(item[0]))
    late = late[:_MAX_LINES]
    num_frames = max(1, _NUM_FRAMES // max(1, len(late)))
    told = list[tuple[set[int], str]]()
    if silent:
        they = "they are" if len(silent) > 1 else "it is"
        told.append(
            (
                silent,
                f"{named(silent)}: no answer; {they} stopped, out of reach, or in a call that "
                "keeps Python from running",
            )
        )
    for ranks, (step, _, doing) in late:
        activity, *frames = doing.split("\n")
        text = "\n    ".join((_subject(ranks, step) + activity, *frames[-num_frames:]))
        told.append((ranks, text))
    told += _ends(gone)
    waits = [(set(ranks), key) for key, ranks in answered.items() if len(ranks) and key[1]]
    waits.sort(key=lambda item: -len(item[0]))
    for ranks, (step, waits_for, _) in waits:
        verb = "wait" if len(ranks) > 1 else "waits"
        told.append((ranks, f"{_subject(ranks, step)}{verb} for {waits_for}"))
    kept = sorted(told[:_MAX_LINES], key=lambda item: min(item[0]))
    lines = [text for _, text in kept]
    others = set(range(num_ranks)).difference(*(ranks for ranks, _ in kept))
    return [*lines, f"{named(others)}: other answers"] if others else lines


def _subject(ranks: Set[int], step: int) -> str:
    return f"{named(ranks)}: " if step == _OTHERS else f"{named(ranks)}: synchronization {step}, "


def _ends(gone: Mapping[int, str]) -> list[tuple[set[int], str]]:
    """Returns the ranks that have ended alike, with one text for them."""
    alike: dict[str, set[int]] = {}
    for rank, text in gone.items():
        alike.setdefault(text.removeprefix(f"rank {rank} "), set()).add(rank)
    return [
        (ranks, gone[min(ranks)] if len(ranks) == 1 else f"{named(ranks)}: each {text}")
        for text, ranks in alike.items()
    ]
