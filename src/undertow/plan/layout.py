"""The layout of a bucket's storage, in elements of the bucket's dtype.

    0             numel        trailer.start                                   storage_numel
    | gradients   | padding    | used | signature | verdict                    |
      one slot                   one    48 bits     last bucket only:
      per parameter              per                digests of what all ranks must have alike; failed, changed
                                 slot               and non-finite ranks, late buckets, busy time of every rank

Gradients with the first part of the padding are cut into equal shards, one per rank. The end of that part, and the end of the
storage, are multiples of the number of ranks and of 16 bytes (vector loads).

The trailer is summed or averaged like the gradients. So everything in it except busy times and reasons of failed ranks is read
only as "not zero", which is exact in any dtype. A flag of `used` is NaN if the gradient contains NaN or Inf; a sum keeps NaN in
any dtype too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate, pairwise
from reprlib import repr as brief
from typing import Any

from undertow.errors import ConfigError

_ALIGN_BYTES = 16
STEP_BITS, _GENERATION_BITS, _MODE_BITS = 12, 8, 4
SIGNATURE_BITS = STEP_BITS + _GENERATION_BITS + _MODE_BITS
# What the last bucket says all ranks must have alike, each as the bits of a digest and their complements.
ALIKE = (
    "settings",
    "loaded",
)  # of optimizers' steps since the last synchronization; parameters that load_state_dict changed
DIGEST_BITS = 24
MOST = 2**63 - 1  # largest count: a signed integer of 64 bits
Kind = tuple[str, str, bool, str | None]
# Bytes per element of the dtypes that have gradients, by torch's names.
ITEMSIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter as the planner sees it; `dtype` and `device` are its gradient's."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch.": "float32"
    itemsize: int  # bytes per element
    device: str = "cpu"
    is_sparse: bool = False  # its gradient lists rows instead of holding all of them
    own_dtype: str | None = None  # the parameter's dtype, if its gradient has another one

    def __post_init__(self) -> None:
        texts = (
            self.name,
            self.dtype,
            self.device,
            self.dtype if self.own_dtype is None else self.own_dtype,
        )
        if not all(isinstance(text, str) for text in texts) or not isinstance(self.is_sparse, bool):
            raise ConfigError(
                f"parameter {brief(self.name)} has an impossible description: dtype {brief(self.dtype)}, "
                f"device {brief(self.device)}, sparse {brief(self.is_sparse)}.",
                remedy="Name, dtype and device are texts; whether it is sparse is true or false.",
            )
        sizes = (*self.shape, self.itemsize)
        is_whole = set(map(type, sizes)) == {int} and min(sizes) >= 0
        if not is_whole or self.itemsize == 0 or self.numel * self.itemsize > MOST:
            raise ConfigError(
                f"parameter {self.name!r} has an impossible size: shape {brief(self.shape)}, "
                f"{brief(self.itemsize)} bytes per element.",
                remedy="Sizes are zero or more, an element has at least one byte, and all of them fit into 64 bits.",
            )

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slot_numel(self) -> int:
        """Elements of its slot. A sparse gradient only has a flag in the bucket's trailer and travels separately."""
        return 0 if self.is_sparse else self.numel

    @property
    def num_bytes(self) -> int:
        """Bytes of its slot."""
        return self.slot_numel * self.itemsize

    @property
    def kind(self) -> Kind:
        """Gradients share a bucket only if these agree: dtype, device, sparse or not, and the dtype of the parameters."""
        return self.dtype, self.device, self.is_sparse, self.own_dtype

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, as in JSON."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None} | {"shape": [*self.shape]}


Groups = tuple[tuple[int, ...], ...]  # the parameters in each bucket of a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Place of one parameter's gradient inside a bucket."""

    param: int  # index into Plan.params
    start: int  # elements, inclusive
    stop: int  # elements, exclusive; equal to start for a parameter without elements

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """Fields after the gradients of a bucket, as half-open ranges of the bucket's storage.

    Only the last bucket, which is sent at the end of backward, carries the verdict: in the other buckets all fields after
    `signature` are empty.
    """

    used: range  # one flag per slot: a gradient arrived since the last synchronization. NaN: it arrived and is not finite
    signature: range  # the bits of `signature_of` and the step, lowest first
    alike: range  # the bits of a digest for each of ALIKE, as `with_complements` has them, lowest first
    failed: range  # one small number per rank: non-zero if it failed in this step, above 1 to give the reason
    changed: range  # one flag per rank, set if its parameters differ from the plan's
    nonfinite: range  # one flag per rank, set if one of its gradients is not finite
    late: range  # one flag per bucket, set if one of its gradients arrived again after the bucket was sent
    busy: range  # one time per rank in milliseconds, each written by its own rank

    @property
    def start(self) -> int:
        return self.used.start

    @property
    def stop(self) -> int:
        return self.busy.stop

    @property
    def has_verdict(self) -> bool:
        return len(self.late) > 0


def trailer_at(start: int, *, num_slots: int, num_late: int = 0, num_ranks: int = 0) -> Trailer:
    """Lays out a trailer from `start` on; with a verdict for the last bucket of `num_late`, and `num_ranks` ranks."""
    num_alike = 2 * DIGEST_BITS * len(ALIKE) if num_late else 0
    ends = accumulate(
        (num_slots, 2 * SIGNATURE_BITS, num_alike, *[num_ranks] * 3, num_late, num_ranks),
        initial=start,
    )
    names = (field.name for field in fields(Trailer))
    return Trailer(**{name: range(first, stop) for name, (first, stop) in zip(names, pairwise(ends), strict=True)})


@lru_cache(maxsize=256)
def signature_of(*, generation: int, mode: int | None, has_other_op: bool = False) -> int:
    """Returns an integer whose bits encode generation and mode, and above them their complements; the step's bits are 0.

    A rank whose mode is None accepts the mode of the others. `has_other_op` marks a reduction by hand that is not a mean.
    Summed over ranks, a bit and its complement are both non-zero exactly if ranks differ.
    """
    generation ^= has_other_op << (_GENERATION_BITS - 1)  # ranks have the same generation
    bits = generation % (1 << _GENERATION_BITS) << STEP_BITS | (mode or 0) % (1 << _MODE_BITS) << STEP_BITS + _GENERATION_BITS
    told = SIGNATURE_BITS if mode is not None else SIGNATURE_BITS - _MODE_BITS
    return bits | (~bits & (1 << told) - 1) << SIGNATURE_BITS


def with_complements(digest: int | None) -> int:
    """Returns an integer with the bits of a digest, and above them their complements; 0 for None, which accepts the others'."""
    bits = 0 if digest is None else digest % (1 << DIGEST_BITS)
    return 0 if digest is None else bits | (~bits & (1 << DIGEST_BITS) - 1) << DIGEST_BITS


def ranks_differ(signature: Sequence[bool]) -> bool:
    """Returns True if a reduced signature or digest, given as non-zero flags, shows that ranks differ."""
    half = len(signature) // 2
    return any(bit and complement for bit, complement in zip(signature[:half], signature[half:], strict=True))


def padded_numel(numel: int, *, itemsize: int, num_ranks: int) -> int:
    """Returns the least multiple of the number of ranks and of 16 bytes that holds `numel` elements."""
    unit = math.lcm(num_ranks, _ALIGN_BYTES // math.gcd(_ALIGN_BYTES, itemsize))
    return -(-numel // unit) * unit
