"""Full messages between ranks: bytes from each, and the check that settings, parameters and buffers are the same on all."""

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from undertow.errors import Desync, PlanMismatch
from undertow.foreign import parsed_json
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.comm.group import OwnGroup
from undertow.version import __version__

_COMPARISON = "the comparison of all ranks' parameters"


def gather_json(group: OwnGroup, text: bytes, *, waits_for: str = _COMPARISON) -> list[Any]:
    """Gathers the JSON of every rank, in rank order; raises Desync on every rank if one sent something else.

    Reports name the wait `waits_for`.
    """
    sizes = [int(size) for size in group.all_gather(torch.tensor([len(text)], device=group.device), waits_for).take()]
    padded = torch.frombuffer(bytearray(text.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8)
    received = group.all_gather(padded.to(group.device), waits_for).take()
    found = []
    for rank, (row, size) in enumerate(zip(received, sizes, strict=True)):
        try:
            found.append(parsed_json(bytes(row[:size].tolist())))
        except ValueError as error:
            raise Desync(
                f"rank {rank} has sent something that cannot be read: {error}.",
                where="what ranks tell each other of their models",
                remedy="Run the same program, with the same versions, on every rank.",
            ) from error
    return found


def surroundings(group: OwnGroup, hook: CommHook | None) -> dict[str, Any]:
    """Returns what must match on every rank besides parameters and settings."""
    return {
        "torch": str(torch.__version__),
        "undertow": __version__,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),  # they freeze the plan
        "mesh": group.user.rows or None,
        "communication hook": None if hook is None else hook.name,
    }


class Agreement:
    """A running comparison of all ranks' settings, parameters and other tensors; a collective call."""

    def __init__(
        self,
        group: OwnGroup,
        *,
        settings: dict[str, Any],
        params: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
    ) -> None:
        described = {"settings": settings, "params": list(params), "others": list(others)}
        self._text = json.dumps(described, sort_keys=True).encode()
        self._group = group
        mine = torch.frombuffer(bytearray(hashlib.sha256(self._text).digest()), dtype=torch.uint8)
        self._digests = group.all_gather(mine.to(group.device), _COMPARISON)

    def is_reached(self) -> bool:
        """Waits, and returns True if all ranks have the same."""
        digests = self._digests.take()
        return all(torch.equal(digest, digests[0]) for digest in digests)

    def require(self) -> None:
        """Waits, and raises PlanMismatch on every rank if ranks differ."""
        if self.is_reached():
            return
        digests = [bytes(digest.tolist()) for digest in self._digests.value]
        described = gather_json(self._group, self._text)
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise _mismatch(described[0], described[other], other, fingerprints=[digest.hex()[:4] for digest in digests])


def _mismatch(first: dict[str, Any], second: dict[str, Any], rank: int, *, fingerprints: Sequence[str]) -> PlanMismatch:
    remedy = "Build the model the same way on every rank before wrapping it."
    if difference := _tensor_difference(first["params"], second["params"], rank, kind="parameter"):
        what = "ranks disagree on the parameters."
    elif difference := _tensor_difference(first["others"], second["others"], rank, kind="tensor"):
        what = "ranks disagree on the frozen parameters or the buffers."
    else:
        what, remedy = "ranks disagree on the settings.", "Give every rank the same settings and the same versions."
        mine, theirs = first["settings"], second["settings"]
        name = next(key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key))
        difference = f"{name} is {mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {rank}"
    summaries = [
        f"rank {number}: {len(described['params'])} parameters, fingerprint {fingerprints[number]}"
        for number, described in ((0, first), (rank, second))
    ]
    return PlanMismatch(what, where=f"{'   '.join(summaries)}\n  first difference: {difference}", remedy=remedy)


def _tensor_difference(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], rank: int, *, kind: str) -> str | None:
    for index, (mine, theirs) in enumerate(zip_longest(first, second)):
        if mine == theirs:
            continue
        if mine is None or theirs is None or mine["name"] != theirs["name"]:
            here, there = ("missing" if spec is None else repr(spec["name"]) for spec in (mine, theirs))
            return f"{kind} {index} is {here} on rank 0 and {there} on rank {rank}"
        # The shape first: other fields, such as the order of axes in memory, follow from it.
        field = next(key for key in ("shape", *mine, *theirs) if mine.get(key) != theirs.get(key))
        named = f"{kind} {index} ({mine['name']!r})"
        return f"{field} of {named} is {mine.get(field)} on rank 0 and {theirs.get(field)} on rank {rank}"
    return None
