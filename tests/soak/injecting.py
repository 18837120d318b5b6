"""Runs one injection, and says whether it has ended as it must."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from soak.injections import KINDS, STALL_TIMEOUT_S, Injection
from support.faults import outcomes
from support.processes import Ended

WITHIN_S = 10.0  # from the fault to the error, and what it is waited for on purpose


@dataclass(frozen=True)
class Verdict:
    """How an injection has ended."""

    problems: tuple[str, ...]  # empty where all is well
    outcome: str  # in a word
    seconds: tuple[float, ...]  # from the fault to the error on each rank that has raised one


def inject(injection: Injection) -> Verdict:
    """Trains once with the fault."""
    return judged(injection, outcomes(injection))


def judged(injection: Injection, ended: list[Ended]) -> Verdict:
    """What is wrong with how the ranks have ended."""
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
    where = re.search(r"synchronisation (\d+), (?:rank (\d+)|bucket \d+)$", one.text, re.MULTILINE)
    is_of_step = kind.others == "PlanMismatch" or (where is not None and abs(int(where[1]) - fault["step"]) <= 1)
    if not is_of_step or (where is not None and where[2] and int(where[2]) != rank):
        return f"does not say that it was about synchronisation {fault['step']}, on rank {rank}"
    if words["at"] - fault["fault"] > WITHIN_S + (STALL_TIMEOUT_S if kind.others == "StallTimeout" else 0.0):
        return f"only {words['at'] - fault['fault']:.1f} s after the fault"
    return "" if one.exit_code == 1 else f"ended with {one.exit_code}, after its error"


def _last_word(one: Ended) -> str:
    parts = [f"exit code {one.exit_code}", *(f"{name}: {value}" for name, value in one.words.items()), one.log]
    return "    " + "\n".join(parts).replace("\n", "\n    ")
