"""Full messages between ranks: bytes from each, and the check that settings, parameters and buffers are the same on all."""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from undertow.errors import Desync, PlanMismatch
from undertow.foreign import parsed_json
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.comm.group import OwnGroup
from undertow.version import __version__

# Tensors that are compared: their key, the word for one of them, and the words for all.
_TENSORS = (
    ("params", "parameter", "the parameters"),
    ("others", "tensor", "the frozen parameters or the buffers"),
    ("new", "new parameter", "the new parameters"),
)
_SETTINGS = "the settings"
_COMPARISON = "the comparison of all ranks' parameters"


def gather_json(group: OwnGroup, text: bytes, *, waits_for: str = _COMPARISON) -> list[Any]:
    """Gathers the JSON of every rank, in rank order; raises Desync on every rank if one sent something else.

    Reports name the wait `waits_for`.
    """
    received = gather_bytes(text, lambda tensor: group.all_gather(tensor, waits_for).take(), group.device)
    found = []
    for rank, of_rank in enumerate(received):
        try:
            found.append(parsed_json(of_rank))
        except ValueError as error:
            raise Desync(
                f"rank {rank} has sent a message that cannot be read: {error}.",
                where="the descriptions of models that ranks exchange",
                remedy="Run the same program, with the same versions, on every rank.",
            ) from error
    return found


def gather_bytes(mine: bytes, all_gather: Callable[[Tensor], list[Tensor]], device: torch.device) -> list[bytes]:
    """Gathers the bytes of every rank, in rank order. Pickled objects would run the sender's code."""
    sizes = list(map(int, all_gather(torch.tensor([len(mine)], device=device))))
    padded = torch.frombuffer(bytearray(mine.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8)
    rows = all_gather(padded.to(device))
    return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]


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
    """A running comparison of all ranks' settings, parameters and other tensors, and names of new ones; a collective call."""

    def __init__(
        self,
        group: OwnGroup,
        *,
        settings: dict[str, Any],
        params: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        new: Sequence[str] = (),
    ) -> None:
        tensors = {"params": list(params), "others": list(others), "new": [{"name": name} for name in new]}
        self._text = json.dumps({"settings": settings, **tensors}, sort_keys=True).encode()
        self._group = group
        mine = torch.frombuffer(bytearray(hashlib.sha256(self._text).digest()), dtype=torch.uint8)
        self._digests = group.all_gather(mine.to(group.device), _COMPARISON)

    def require(self) -> None:
        """Waits, and raises PlanMismatch on every rank if ranks differ."""
        digests = [bytes(digest.tolist()).hex() for digest in self._digests.take()]
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return
        described = gather_json(self._group, self._text)
        what, difference = _first_difference(described[0], described[other], other)
        ranks = [
            f"rank {rank}: {len(described[rank]['params'])} parameters, fingerprint {digests[rank][:4]}" for rank in (0, other)
        ]
        raise PlanMismatch(
            f"ranks disagree on {what}.",
            where=f"{'   '.join(ranks)}\n  first difference: {difference}",
            remedy="Give every rank the same settings and the same versions."
            if what == _SETTINGS
            else "Build the model the same way on every rank before wrapping it.",
        )


def _first_difference(first: dict[str, Any], second: dict[str, Any], rank: int) -> tuple[str, str]:
    """Returns the kind of the first difference between rank 0 and `rank`, and the difference in words."""
    for key, kind, name_of_all in _TENSORS:
        for index, (mine, theirs) in enumerate(zip_longest(first[key], second[key])):
            here, there = ("missing" if spec is None else repr(spec["name"]) for spec in (mine, theirs))
            if here != there:
                return name_of_all, f"{kind} {index} is {here} on rank 0 and {there} on rank {rank}"
            if mine != theirs:
                # The shape first: other fields, such as the order of axes in memory, follow from it.
                field = next(name for name in ("shape", *mine, *theirs) if mine.get(name) != theirs.get(name))
                values = f"{mine.get(field)} on rank 0 and {theirs.get(field)} on rank {rank}"
                return name_of_all, f"{field} of {kind} {index} ({here}) is {values}"
    mine, theirs = first["settings"], second["settings"]
    name = next(name for name in mine | theirs if mine.get(name) != theirs.get(name))
    return _SETTINGS, f"{name} is {mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {rank}"
