"""Full messages between ranks: bytes from each, and the check that settings, parameters and buffers are the same on all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from undertow.errors import Desync, PlanMismatch
from undertow.foreign import parsed_json
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.comm.handles import started
from undertow.version import __version__

if TYPE_CHECKING:
    from undertow.runtime.comm.comm_hook import CommHook


_COMPARISON = "the comparison of all ranks' parameters"


def gather_bytes(group: OwnGroup, payload: bytes, *, waits_for: str = _COMPARISON) -> list[bytes]:
    """Gathers the bytes of every rank, in rank order, without unpickling; reports name the wait `waits_for`."""
    sizes = _all_gather(group, torch.tensor([len(payload)], dtype=torch.int64), waits_for=waits_for)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(max(1, longest), dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    received = _all_gather(group, padded, waits_for=waits_for)
    return [bytes(row[: int(size)].tolist()) for row, size in zip(received, sizes, strict=True)]


def gather_json(group: OwnGroup, text: bytes, *, waits_for: str = _COMPARISON) -> list[Any]:
    """Gathers the JSON of every rank, in rank order; raises Desync on every rank if one sent something else."""
    found = []
    for rank, received in enumerate(gather_bytes(group, text, waits_for=waits_for)):
        try:
            found.append(parsed_json(received))
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
        mine = torch.frombuffer(bytearray(hashlib.sha256(self._text).digest()), dtype=torch.uint8).to(group.device)
        self._digests = [torch.empty_like(mine) for _ in range(group.num_ranks)]
        with group.waiting():
            self._work = started(dist.all_gather(self._digests, mine, group=group.process_group, async_op=True))

    def is_reached(self) -> bool:
        """Waits, and returns True if all ranks have the same."""
        with self._group.waiting(_COMPARISON):
            self._group.complete(self._work)
        return all(torch.equal(digest, self._digests[0]) for digest in self._digests)

    def require(self) -> None:
        """Waits, and raises PlanMismatch on every rank if ranks differ."""
        if self.is_reached():
            return
        digests = [bytes(digest.tolist()) for digest in self._digests]
        described = gather_json(self._group, self._text)
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        raise _mismatch(described[0], described[other], other, fingerprints=[digest.hex()[:4] for digest in digests])


def _all_gather(group: OwnGroup, tensor: torch.Tensor, *, waits_for: str) -> list[torch.Tensor]:
    mine = tensor.to(group.device)
    received = [torch.empty_like(mine) for _ in range(group.num_ranks)]
    with group.waiting(waits_for):
        group.complete(started(dist.all_gather(received, mine, group=group.process_group, async_op=True)))
    return [row.cpu() for row in received]


def _mismatch(first: dict[str, Any], second: dict[str, Any], rank: int, *, fingerprints: Sequence[str]) -> PlanMismatch:
    def summary(number: int, described: dict[str, Any]) -> str:
        return f"rank {number}: {len(described['params'])} parameters, fingerprint {fingerprints[number]}"

    remedy = "Build the model the same way on every rank before wrapping it."
    if difference := _tensor_difference(first["params"], second["params"], rank, kind="parameter"):
        what = "ranks disagree on the parameters."
    elif difference := _tensor_difference(first["others"], second["others"], rank, kind="tensor"):
        what = "ranks disagree on the frozen parameters or the buffers."
    else:
        what, remedy = "ranks disagree on the settings.", "Give every rank the same settings and the same versions."
        difference = _setting_difference(first["settings"], second["settings"], rank)
    where = f"{summary(0, first)}   {summary(rank, second)}\n  first difference: {difference}"
    return PlanMismatch(what, where=where, remedy=remedy)


def _tensor_difference(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], rank: int, *, kind: str) -> str | None:
    for index in range(max(len(first), len(second))):
        mine = first[index] if index < len(first) else None
        theirs = second[index] if index < len(second) else None
        if mine == theirs:
            continue
        if mine is None or theirs is None or mine["name"] != theirs["name"]:
            return f"{kind} {index} is {_named(mine)} on rank 0 and {_named(theirs)} on rank {rank}"
        # The shape first: other fields, such as the order of axes in memory, follow from it.
        field = next(key for key in ("shape", *mine, *theirs) if mine.get(key) != theirs.get(key))
        text = f"{field} of {kind} {index} ({mine['name']!r}) is {mine.get(field)}"
        return f"{text} on rank 0 and {theirs.get(field)} on rank {rank}"
    return None


def _setting_difference(first: dict[str, Any], second: dict[str, Any], rank: int) -> str:
    name = next(key for key in (*first, *second) if first.get(key) != second.get(key))
    return f"{name} is {first.get(name)!r} on rank 0 and {second.get(name)!r} on rank {rank}"


def _named(spec: dict[str, Any] | None) -> str:
    return "missing" if spec is None else repr(spec["name"])
