"""The facts that all ranks must know at the end of a backward, and their place in the trailer of a
bucket.

    trailer   | used            | signature                | facts                        |
                a flag per slot   bits and complements       in the last bucket: FACTS

The trailer is summed or averaged with the gradients, in their dtype. So everything in it except
numbers is read only as "not zero", which is exact in any dtype. A flag of `used` is NaN if the
gradient contains NaN or Inf; a sum keeps NaN in any dtype too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import lru_cache

STEP_BITS = 12
_GENERATION_BITS = 8
_MODE_BITS = 4
SIGNATURE_BITS = STEP_BITS + _GENERATION_BITS + _MODE_BITS
DIGEST_BITS = 24


class FactKind(Enum):
    """The form of a fact, and the meaning of its sum over ranks."""

    DIGEST = auto()  # bits and complements: whether ranks differ; None accepts the others' digests
    RANK_FLAGS = auto()  # a flag per rank: the ranks that have set it
    ITEM_FLAGS = auto()  # a flag per item, such as a bucket: the items that some rank has marked
    # A number per rank, from 0 to 60,000, in the precision of gradients: bfloat16 has 8 bits. It is
    # read only where trailers are read at once (`Round._read_trailer`).
    NUMBERS = auto()


class Fact(StrEnum):
    """The name of a fact. docs/architecture.md tells how to add one."""

    SETTINGS = "settings"  # of optimizers that have stepped since the last synchronization
    FAILED = "failed"  # backward has failed
    TAKEN = "taken"  # a gradient had arrived, and was gone when its bucket left
    CHANGED = "changed"  # parameters, or the hook, differ from the plan's
    LOADED = "loaded"  # load_state_dict has run since the last synchronization
    NONFINITE = "nonfinite"  # a gradient is not finite
    STOPPING = "stopping"  # a signal has asked the rank to stop
    LATE = "late"  # a gradient arrived again after the bucket was sent
    BUSY_MS = "busy_ms"  # time since the rank finished the previous synchronization


FACTS: Mapping[str, FactKind] = {
    Fact.SETTINGS: FactKind.DIGEST,
    Fact.FAILED: FactKind.RANK_FLAGS,
    Fact.TAKEN: FactKind.RANK_FLAGS,
    Fact.CHANGED: FactKind.RANK_FLAGS,
    Fact.LOADED: FactKind.RANK_FLAGS,
    Fact.NONFINITE: FactKind.RANK_FLAGS,
    Fact.STOPPING: FactKind.RANK_FLAGS,
    Fact.LATE: FactKind.ITEM_FLAGS,
    Fact.BUSY_MS: FactKind.NUMBERS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trailer:
    """Half-open ranges of a bucket's storage, after the gradients.

    Only the last bucket, which is sent at the end of backward, has facts.
    """

    used: range  # a flag per slot: a gradient arrived since the last synchronization
    signature: range  # the bits of `signature_of` and the step, and their complements, lowest first
    facts: tuple[tuple[str, range], ...]  # by name; numbers last
    numbers: range  # the part of `facts` that is numbers

    @property
    def start(self) -> int:
        return self.used.start

    @property
    def stop(self) -> int:
        return self.numbers.stop


def trailer_at(start: int, *, num_slots: int, num_buckets: int = 0, num_ranks: int = 0) -> Trailer:
    """Lays out a trailer from `start` on; with facts for the last of `num_buckets`."""
    used = range(start, start + num_slots)
    signature = range(used.stop, used.stop + 2 * SIGNATURE_BITS)
    kinds = FACTS if num_buckets else {}
    places = places_of(kinds, signature.stop, num_ranks=num_ranks, num_items=num_buckets)
    stop = first_number = signature.stop
    for name, place in places.items():
        stop = place.stop
        if kinds[name] is not FactKind.NUMBERS:
            first_number = stop
    numbers = range(first_number, stop)
    return Trailer(used=used, signature=signature, facts=tuple(places.items()), numbers=numbers)


def places_of(
    kinds: Mapping[str, FactKind], start: int, *, num_ranks: int, num_items: int
) -> dict[str, range]:
    """Lays out facts from `start` on, numbers last: usual trailers differ in nothing else."""
    sizes = {
        FactKind.DIGEST: 2 * DIGEST_BITS,
        FactKind.RANK_FLAGS: num_ranks,
        FactKind.ITEM_FLAGS: num_items,
        FactKind.NUMBERS: num_ranks,
    }
    places: dict[str, range] = {}
    stop = start
    for name in sorted(kinds, key=lambda name: kinds[name] is FactKind.NUMBERS):
        places[name] = range(stop, stop + sizes[kinds[name]])
        stop = places[name].stop
    return places


@lru_cache(maxsize=256)
def signature_of(*, generation: int, mode: int | None, has_other_op: bool = False) -> int:
    """Returns the bits of generation and mode, and above them their complements.

    The step's bits are 0. A rank whose mode is None accepts the mode of the others. `has_other_op`
    marks a reduction by hand that is not a mean. Summed over ranks, a bit and its complement are
    both non-zero exactly if ranks differ.
    """
    generation ^= has_other_op << (_GENERATION_BITS - 1)  # ranks have the same generation
    bits = generation % (1 << _GENERATION_BITS) << STEP_BITS
    bits |= (mode or 0) % (1 << _MODE_BITS) << STEP_BITS + _GENERATION_BITS
    told = SIGNATURE_BITS if mode is not None else SIGNATURE_BITS - _MODE_BITS
    return bits | (~bits & (1 << told) - 1) << SIGNATURE_BITS


def with_complements(digest: int | None) -> int:
    """Returns the bits of a digest, and above them their complements.

    0 for None, which accepts the digests of the others.
    """
    if digest is None:
        return 0
    bits = digest % (1 << DIGEST_BITS)
    return bits | (~bits & (1 << DIGEST_BITS) - 1) << DIGEST_BITS


def ranks_differ(signature: Sequence[bool]) -> bool:
    """Returns True if a reduced signature or digest, as non-zero flags, shows that ranks differ."""
    half = len(signature) // 2
    pairs = zip(signature[:half], signature[half:], strict=True)
    return any(bit and complement for bit, complement in pairs)


def plans_differ(signature: Sequence[bool]) -> bool:
    """Returns True if a reduced signature, as non-zero flags, shows that ranks have different
    generations of the plan, or different ops."""
    generation = slice(STEP_BITS, STEP_BITS + _GENERATION_BITS)
    bits, complements = signature[:SIGNATURE_BITS], signature[SIGNATURE_BITS:]
    return ranks_differ([*bits[generation], *complements[generation]])
