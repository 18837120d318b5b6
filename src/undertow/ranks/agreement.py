"""Facts that must be equal on all ranks: ranks compare them, and send messages about them.

require_agreement                     settings, parameters and buffers: raises where ranks differ
gather_json, gather_bytes             a full message of each rank
json_of, bytes_of                     a full message of one rank
Extremes                              numbers that must be equal: the largest and the least of each
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.errors import PlanMismatch
from undertow.ranks.transport import OwnGroup
from undertow.version import __version__

# Tensors that are compared: their key, the word for one of them, and the words for all.
_TENSORS = (
    ("params", "parameter", "the parameters"),
    ("others", "tensor", "the frozen parameters or the buffers"),
    ("new", "new parameter", "the new parameters"),
)
_SETTINGS = "the settings"
BUILD_ALIKE = "Build the model the same way on every rank before wrapping it."
_COMPARISON = "the comparison of all ranks' parameters"


def gather_json(group: OwnGroup, value: object, *, waits_for: str = _COMPARISON) -> list[Any]:
    """Gathers a value of every rank as JSON, in rank order. Reports name the wait `waits_for`."""
    text = json.dumps(value, sort_keys=True).encode()

    def all_gather(tensor: Tensor) -> Tensor:
        return group.all_gather(tensor, waits_for).result()

    return list(map(json.loads, gather_bytes(text, all_gather, group.device)))


def any_rank(group: OwnGroup, is_here: bool, what: str) -> bool:
    """Returns True on every rank if it `is_here` on some rank; a collective call. Reports call the
    wait for it `what`."""
    found = torch.tensor(float(is_here), device=group.device)
    group.all_reduce(found, what, dist.ReduceOp.MAX).wait()
    return bool(found)


def gather_bytes(
    mine: bytes, all_gather: Callable[[Tensor], Tensor], device: torch.device
) -> list[bytes]:
    """Gathers the bytes of every rank, in rank order. Pickled objects would run the sender's
    code."""
    sizes = all_gather(torch.tensor(len(mine), device=device)).tolist()
    padded = torch.frombuffer(bytearray(mine.ljust(max(1, *sizes), b"\0")), dtype=torch.uint8)
    rows = all_gather(padded.to(device))
    on_host = rows.cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(on_host, sizes, strict=True)]


def bytes_of(mine: bytes, broadcast: Callable[[Tensor], Tensor], device: torch.device) -> bytes:
    """Returns the bytes that `broadcast` brings from one rank; other ranks give any, which are not
    sent."""
    size = int(broadcast(torch.tensor(len(mine), device=device)))
    padded = torch.frombuffer(bytearray(mine.ljust(max(1, size))), dtype=torch.uint8)
    sent = broadcast(padded[: max(1, size)].to(device))
    return sent.cpu().numpy()[:size].tobytes()


def json_of(group: OwnGroup, value: object, *, source: int) -> Any:
    """Returns the value that rank `source` has; other ranks' values are not sent."""
    text = json.dumps(value, sort_keys=True).encode() if group.rank == source else b""

    def broadcast(tensor: Tensor) -> Tensor:
        return group.broadcast(tensor, _COMPARISON, source=source).result()

    return json.loads(bytes_of(text, broadcast, group.device))


class Extremes:
    """The largest and the least of all ranks' values of each number.

    Two numbers for each are sent, however many ranks there are. A rank with `is_counted=False` has
    no say.
    """

    def __init__(
        self, group: OwnGroup, values: Tensor, name: str, *, is_counted: bool = True
    ) -> None:
        """Starts to compare; a collective call. Reports call the wait for it `name`.

        values: [numbers] int64
        """
        self.values, self.is_counted = values, is_counted
        self._group, self._name = group, name
        # The complement of the least one is the largest complement.
        both = torch.cat((values.new_ones(1), values, ~values))
        if not is_counted:
            both.fill_(torch.iinfo(torch.int64).min)
        self._both = both
        self._handle = group.all_reduce(both, name, dist.ReduceOp.MAX)

    def differing(self) -> list[int]:
        """Waits, and returns the numbers that are not the same on all ranks, which get equal
        answers."""
        self._handle.wait()
        if self._both[0] != 1:  # no rank counts
            return []
        numel = len(self.values)
        largest, complements = self._both[1 : 1 + numel], self._both[1 + numel :]
        return [int(index) for index in (largest != ~complements).nonzero().flatten().tolist()]

    def of_ranks(self, index: int, *, flag: bool = False) -> list[tuple[bool, int, bool]]:
        """Returns if each rank counts, its value of one number, and its flag, in rank order.

        A collective call, of ranks that know that the number differs.
        """
        mine = self.values.new_tensor([self.is_counted, 0, flag])
        mine[1] = self.values[index]
        rows = self._group.all_gather(mine, self._name).result().tolist()
        return [(bool(counts), value, bool(is_set)) for counts, value, is_set in rows]


def surroundings(group: OwnGroup) -> dict[str, Any]:
    """Returns what must match on every rank besides parameters and settings."""
    return {
        "torch": str(torch.__version__),
        "undertow": __version__,
        # they freeze the plan
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "mesh": group.user.rows or None,
    }


def require_agreement(  # noqa: PLR0913  # what ranks compare, each by its name
    group: OwnGroup,
    *,
    settings: dict[str, Any],
    params: Sequence[dict[str, Any]] = (),
    others: Sequence[dict[str, Any]] = (),
    new: Sequence[str] = (),
    at_all_places: Sequence[dict[str, Any]] = (),
    remedy: str = BUILD_ALIKE,
    is_of_axis: bool = False,
) -> None:
    """Compares all ranks' settings, parameters and other tensors, and names of new parameters.

    A collective call. Raises PlanMismatch, on every rank, if ranks differ; if tensors do, the error
    has this `remedy`. On a mesh the ranks of each data axis must be alike, and all ranks in
    `at_all_places`. The error is raised on all ranks of the mesh: the others would wait for those
    that have raised it. With `is_of_axis` only the ranks of this data axis call it.
    """
    everyone = group if is_of_axis else group.everyone
    named = [{"name": name} for name in new]
    mine = {"settings": settings, "params": params, "others": others, "new": named}
    sent = b"".join(map(_digest, (mine, list(group.user.ranks), list(at_all_places))))
    rows = torch.frombuffer(bytearray(sent), dtype=torch.uint8).view(3, -1)
    gathered = everyone.all_gather(rows.to(group.device), _COMPARISON).result()
    digests, axes, of_places = (_texts(gathered[:, row]) for row in range(3))
    firsts: dict[str, int] = {}  # the first rank of each data axis
    for rank, axis in enumerate(axes):
        firsts.setdefault(axis, rank)
    pairs = [(firsts[axis], rank) for rank, axis in enumerate(axes)]
    error = _disagreement(everyone, mine, digests, pairs, remedy=remedy)
    if error is None:
        error = unlike_places(everyone, at_all_places, of_places, remedy=remedy)
    if error is not None:
        raise error


def unlike_places(
    everyone: OwnGroup,
    params: Sequence[dict[str, Any]],
    digests: Sequence[str],
    *,
    remedy: str,
) -> PlanMismatch | None:
    """Returns the error if places of a mesh have different parameters, the same on every rank.

    `digests` are of the `params` of all ranks. A collective call if they differ.
    """
    mine = {"settings": {}, "params": params, "others": (), "new": ()}
    pairs = [(0, rank) for rank in range(len(digests))]
    return _disagreement(everyone, mine, digests, pairs, remedy=remedy)


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()


def _texts(digests: Tensor) -> list[str]:
    return [bytes(digest).hex() for digest in digests.tolist()]


def _disagreement(
    everyone: OwnGroup,
    mine: dict[str, Any],
    digests: Sequence[str],
    pairs: Sequence[tuple[int, int]],
    *,
    remedy: str,
) -> PlanMismatch | None:
    """Returns the error of the first of these `pairs` of ranks that differ."""
    unlike = next((pair for pair in pairs if digests[pair[0]] != digests[pair[1]]), None)
    if unlike is None:
        return None
    # Of two ranks only: of thousands, the descriptions would not fit in memory.
    described = {rank: json_of(everyone, mine, source=rank) for rank in unlike}
    what, difference = _first_difference(*(described[rank] for rank in unlike), ranks=unlike)
    ranks = [
        f"rank {rank}: {len(described[rank]['params'])} parameters, fingerprint {digests[rank][:4]}"
        for rank in unlike
    ]
    return PlanMismatch(
        f"ranks disagree on {what}.",
        where=f"{'   '.join(ranks)}\n  first difference: {difference}",
        remedy="Give every rank the same settings and the same versions."
        if what == _SETTINGS
        else remedy,
    )


def _first_difference(
    first: dict[str, Any], second: dict[str, Any], *, ranks: tuple[int, int]
) -> tuple[str, str]:
    """Returns the kind of the first difference between two ranks, and the difference in words."""
    one, other = ranks
    for key, kind, name_of_all in _TENSORS:
        for index, (mine, theirs) in enumerate(zip_longest(first[key], second[key])):
            here, there = (
                "missing" if spec is None else repr(spec["name"]) for spec in (mine, theirs)
            )
            if here != there:
                return (
                    name_of_all,
                    f"{kind} {index} is {here} on rank {one} and {there} on rank {other}",
                )
            if mine != theirs:
                # Other fields follow from these two, such as the order of axes in memory.
                names = ("is frozen", "shape", *mine, *theirs)
                field = next(name for name in names if mine.get(name) != theirs.get(name))
                values = f"{mine.get(field)} on rank {one} and {theirs.get(field)} on rank {other}"
                return name_of_all, f"{field} of {kind} {index} ({here}) is {values}"
    mine, theirs = first["settings"], second["settings"]
    name = next(name for name in mine | theirs if mine.get(name) != theirs.get(name))
    return _SETTINGS, (
        f"{name} is {mine.get(name)!r} on rank {one} and {theirs.get(name)!r} on rank {other}"
    )
