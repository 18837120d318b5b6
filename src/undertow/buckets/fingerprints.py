"""Fingerprints of tensors: ranks compare them instead of sending values."""

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 8  # bytes
_HOST_WORDS = 1 << 16  # processed at once, so that weights and products stay in the cache
_DEVICE_WORDS = 1 << 22  # processed at once, for few launches
_DOWN = 33  # bits
_LOWER = (1 << (64 - _DOWN)) - 1
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # 2**64 divided by the golden ratio, as a signed number; odd


def fingerprints(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """Returns a sum over the bits of each tensor, weighted by position; -0.0 and each NaN have
    distinct values.

    The fingerprint changes for every tensor that differs in a single 8-byte word, and for all but
    about one in 2**32 others. [number of tensors] int64, on `device`
    """
    if not tensors:
        return torch.empty(0, dtype=torch.int64, device=device)
    weights = {used: _weights(used) for used in {tensor.device for tensor in tensors}}
    return torch.stack(
        [_fingerprint(tensor, weights[tensor.device]).to(device) for tensor in tensors]
    )


def _fingerprint(tensor: Tensor, weights: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1).contiguous()
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    if flat.storage_offset() * flat.itemsize % _WORD:  # its bits cannot be viewed as whole words
        flat = flat.clone()
    num_whole = flat.numel() * flat.itemsize // _WORD * _WORD // flat.itemsize
    words, rest = flat[:num_whole].view(torch.int64), flat[num_whole:].view(torch.uint8).long()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in (*torch.split(words, weights.numel()), rest):
        # Fold the upper bits down, because a product modulo 2**64 loses the weight of the top bits.
        # The shift is not a multiple of 16 bits; otherwise signs within one word would fall onto
        # each other.
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
