"""Full messages between ranks: bytes from each, and the check that settings, parameters and buffers are the same on all."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch

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
    sizes = [int(size) for size in group.all_gather(torch.tensor([len(text)], device=group.device), waits_for).take()]
    padded = torch.frombuffer(bytearray(text.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8)
    received = group.all_gather(padded.to(group.device), waits_for).take()
    found = []
    for rank, (row, size) in enumerate(zip(received, sizes, strict=True)):
        try:
            found.append(parsed_json(bytes(row[:size].tolist())))
        except ValueError as error:
            raise Desync(
                f"rank {rank} has sent a message that cannot be read: {error}.",
                where="the descriptions of models that ranks exchange",
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
        what, difference = next(_differences(described[0], described[other], other))
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


def _differences(first: dict[str, Any], second: dict[str, Any], rank: int) -> Iterator[tuple[str, str]]:
    """Yields the kind of each difference between rank 0 and `rank`, and the difference in words."""
    for key, kind, name_of_all in _TENSORS:
        for index, (mine, theirs) in enumerate(zip_longest(first[key], second[key])):
            if mine is None or theirs is None or mine["name"] != theirs["name"]:
                here, there = ("missing" if spec is None else repr(spec["name"]) for spec in (mine, theirs))
                yield name_of_all, f"{kind} {index} is {here} on rank 0 and {there} on rank {rank}"
            elif mine != theirs:
                # The shape first: other fields, such as the order of axes in memory, follow from it.
                field = next(name for name in ("shape", *mine, *theirs) if mine.get(name) != theirs.get(name))
                values = f"{mine.get(field)} on rank 0 and {theirs.get(field)} on rank {rank}"
                yield name_of_all, f"{field} of {kind} {index} ({mine['name']!r}) is {values}"
    mine, theirs = first["settings"], second["settings"]
    for name in mine | theirs:
        if mine.get(name) != theirs.get(name):
            yield _SETTINGS, f"{name} is {mine.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {rank}"
