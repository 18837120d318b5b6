"""Checks from time to time that parameters are still the same on every rank, by comparing fingerprints."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from undertow.errors import ReplicaMismatch
from undertow.runtime.comm.group import OwnGroup, Pending

_WORD = 8  # bytes
_HOST_WORDS = 1 << 16  # processed at once, so that weights and products stay in the cache
_DEVICE_WORDS = 1 << 22  # processed at once, for few launches
_DOWN = 33  # bits
_LOWER = (1 << (64 - _DOWN)) - 1
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 divided by the golden ratio, as a signed number; odd


class Replicas:
    """Compares the parameters of all ranks of `group` after every `every` synchronizations, unless that is None.

    Fingerprints are sent when a synchronization ends and compared when the next step begins. With several models in one backward,
    another rank may be at another model in between.
    """

    def __init__(self, group: OwnGroup, every: int | None, *, names: Sequence[int]) -> None:
        self._group = group
        self._names = names  # of the ranks
        self._every = every if group.num_ranks > 1 else None
        # Comparisons in flight: synchronization, names of parameters, and for each rank whether it counts, and its fingerprints.
        self._sent: list[tuple[int, Sequence[str], Pending[list[Tensor]]]] = []

    def is_due(self, number: int) -> bool:
        """Returns True if parameters are compared at the end of synchronization `number`."""
        return self._every is not None and (number + 1) % self._every == 0

    @torch.no_grad()
    def send(self, named_params: Sequence[tuple[str, Tensor]], *, number: int, counts: bool) -> None:
        """Starts the comparison; every rank calls it in the same synchronization, with parameters in the same order.

        With `counts=False`, this rank's parameters are allowed to differ.
        """
        if not named_params:
            return
        of_params = fingerprints([param for _, param in named_params], device=self._group.device)
        mine = torch.cat((torch.full_like(of_params[:1], counts), of_params))  # [1 + number of parameters] int64
        received = self._group.all_gather(mine, "the comparison of all ranks' parameters")
        self._sent.append((number, [name for name, _ in named_params], received))

    def require_alike(self) -> None:
        """Waits for the fingerprints; raises ReplicaMismatch on every rank if they differ."""
        while self._sent:
            number, names, received = self._sent.pop(0)
            rows = torch.stack(received.take()).tolist()
            of_ranks = {rank: row[1:] for rank, row in zip(self._names, rows, strict=True) if row[0]}
            differing = [index for index, values in enumerate(zip(*of_ranks.values(), strict=True)) if len(set(values)) > 1]
            if differing:
                raise mismatch(
                    names[differing[0]],
                    {rank: values[differing[0]] for rank, values in of_ranks.items()},
                    where=f"synchronization {number}; {len(differing)} of {len(names)} parameters differ",
                )


def fingerprints(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Returns a sum over the bits of each tensor, weighted by position; -0.0 and each NaN have distinct values.

    The fingerprint changes for every tensor that differs in a single 8-byte word, and for all but about one in 2**32 others.
    [number of tensors] int64, on `device`
    """
    weights = {used: _weights(used) for used in {tensor.device for tensor in tensors}}
    return torch.stack([_fingerprint(tensor, weights[tensor.device]).to(device) for tensor in tensors])


def _fingerprint(tensor: Tensor, weights: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if flat.storage_offset() * flat.itemsize % _WORD:  # its bits cannot be viewed as whole words
        flat = flat.clone()
    num_whole = flat.numel() * flat.itemsize // _WORD * _WORD // flat.itemsize
    words, rest = flat[:num_whole].view(torch.int64), flat[num_whole:].view(torch.uint8).long()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in (*torch.split(words, weights.numel()), rest):
        # Fold the upper bits down, because a product modulo 2**64 loses the weight of the top bits. The shift is not a multiple
        # of 16 bits; otherwise signs within one word would fall onto each other.
        folded = (chunk >> _DOWN).bitwise_and_(_LOWER).bitwise_xor_(chunk)
        total = total * _ODD + folded.mul_(weights[: chunk.numel()]).sum()
    return total


def _weights(device: torch.device) -> Tensor:
    """Returns pseudo-random odd numbers, by the steps of splitmix64. int64

    A difference in a single word is never lost, because they are odd.
    """
    number = _HOST_WORDS if device.type == "cpu" else _DEVICE_WORDS
    mixed = torch.arange(1, number + 1, dtype=torch.int64, device=device) * _ODD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * (factor - (1 << 64))
    return mixed ^ (mixed >> 31) | 1


def mismatch(name: str, values: Mapping[int, int], *, where: str) -> ReplicaMismatch:
    """Returns the error. The value of most ranks counts as right, and in a tie the value of the first rank among them."""
    (common, _), *_ = Counter(values.values()).most_common()
    others = [rank for rank, value in values.items() if value != common]
    alike = [rank for rank, value in values.items() if value == common]
    return ReplicaMismatch(
        f"parameter {name!r} has other values on rank {', '.join(map(str, others))} than on rank {', '.join(map(str, alike))}.",
        where=where,
        remedy="Look for what writes to parameters, or steps, on some ranks only; broadcast_parameters() makes them equal again.",
    )
