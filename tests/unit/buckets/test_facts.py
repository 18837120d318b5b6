"""What each rank writes is read from the sum over ranks: by the codec of facts, and in the trailers of buckets."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.strategies import spec
from undertow.buckets.facts import FactCodec, Facts, Reading, TrailerCodec, differing, majority
from undertow.buckets.gradients import FlatGradients
from undertow.plan import plan_from_groups, signature_of
from undertow.plan.facts import FACTS, FactKind

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.complex32]
KINDS = {
    "count": FactKind.NUMBERS,
    "digest": FactKind.DIGEST,
    "failed": FactKind.RANK_FLAGS,
    "late": FactKind.ITEM_FLAGS,
}


def told_by(*of_ranks: Facts, dtype: torch.dtype = torch.float32) -> tuple[FactCodec, Tensor]:
    """The sum over ranks of what each one writes."""
    num_ranks = len(of_ranks)
    told = torch.zeros(0)
    for rank, facts in enumerate(of_ranks):
        codec = FactCodec.alone(KINDS, rank=rank, num_ranks=num_ranks, num_items=3)
        said = torch.zeros(codec.numel, dtype=dtype)
        codec.write(said, facts)
        told = said if rank == 0 else told + said
    return codec, told


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_flags_name_the_ranks_and_items_that_are_marked(dtype: torch.dtype) -> None:
    first, last = Facts(flags={"failed": [0], "late": [1]}), Facts(flags={"failed": [2], "late": [0, 1]})
    codec, told = told_by(first, Facts(), last, dtype=dtype)
    assert codec.flags((told != 0).tolist()) == {"failed": (0, 2), "late": (0, 1)}


@pytest.mark.parametrize(
    ("said", "common", "others"), [("aab", "a", [2]), ("abb", "b", [0]), ("ab", "a", [1]), ("aaa", "a", []), ("abc", "a", [1, 2])]
)
def test_the_ranks_that_differ_are_those_that_most_do_not_follow(said: str, common: str, others: list[int]) -> None:
    assert majority(said) == common
    assert differing(dict(enumerate(said))) == others


def reduced(facts: Sequence[Facts], *, dtype: torch.dtype = torch.float32, divides: bool = True) -> tuple[Reading | None, Any]:
    """What rank 0 reads when each of the ranks has written its facts, and its codec."""
    num_ranks = len(facts)
    name = str(dtype).removeprefix("torch.")
    plan = plan_from_groups([spec("weight", 6, dtype=name)], ((0,),), num_ranks=num_ranks)
    layout = plan.buckets[0]
    codecs = []
    for rank, own in enumerate(facts):
        memory = FlatGradients(layout, [torch.zeros(6, dtype=dtype, device="cpu")])
        divisor = num_ranks if divides else 1
        codec = TrailerCodec(layout, memory, divisor=divisor, rank=rank, names=range(10, 10 + num_ranks))
        codec.write(unused=(), signature=signature_of(generation=1, mode=0), step=3, facts=own)
        # as `OwnGroup` sends them
        codecs.append((codec, torch.view_as_real(memory.flat) if dtype.is_complex else memory.flat))
    total = torch.stack([flat for _, flat in codecs]).sum(dim=0)
    codecs[0][1].copy_(total / num_ranks if divides else total)
    return codecs[0][0].read(), codecs[0][0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("fact", [name for name, kind in FACTS.items() if kind is FactKind.RANK_FLAGS])
def test_ranks_that_set_a_flag_are_known_to_all(fact: str, divides: bool, dtype: torch.dtype) -> None:
    facts = [Facts(flags={fact: (rank,) if rank in (1, 2) else ()}) for rank in range(4)]
    reading, _ = reduced(facts, dtype=dtype, divides=divides)
    assert reading is not None
    assert {name: marked for name, marked in reading.flags.items() if marked} == {fact: (11, 12)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("divides", [True, False])
def test_usual_trailers_say_nothing_and_are_not_parsed(
    divides: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrailerCodec, "parse", lambda *_: pytest.fail("it was parsed, which takes long"))
    facts = [Facts(digests={"settings": 7}, numbers={"busy_ms": 2.0})] * 4
    assert reduced(facts, dtype=dtype, divides=divides)[0] is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_parameter_without_a_gradient_is_unused_until_it_has_one_again(dtype: torch.dtype) -> None:
    plan = plan_from_groups([spec("weight", 6, dtype=str(dtype).removeprefix("torch."))] * 3, ((0, 1, 2),), num_ranks=2)
    memory = FlatGradients(plan.buckets[0], [torch.zeros(6, dtype=dtype)] * 3)
    codec = TrailerCodec(plan.buckets[0], memory, divisor=2, rank=0, names=range(2))
    used = []
    for unused in ([], [1], [0, 2], []):
        codec.write(unused=unused, signature=signature_of(generation=1, mode=0), step=3, facts=Facts())
        used.append(memory.trailer[:3].tolist())
    assert used == [[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("fact", [name for name, kind in FACTS.items() if kind is FactKind.DIGEST])
@pytest.mark.parametrize(
    ("digests", "differ"), [((5, 5, 5), False), ((5, None, 5), False), ((5, 5, 4), True), ((None, 1, 2), True)]
)
def test_digests_that_differ_are_named(fact: str, digests: tuple[int | None, ...], differ: bool) -> None:
    reading, _ = reduced([Facts(digests={fact: digest}) for digest in digests])
    assert (() if reading is None else reading.unlike) == ((fact,) if differ else ())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank_learns_the_numbers_of_all(dtype: torch.dtype) -> None:
    _, codec = reduced([Facts(numbers={"busy_ms": ms}) for ms in (4.0, 8.0, 1e9, 0.5)], dtype=dtype)
    assert codec.numbers("busy_ms") == pytest.approx((4.0, 8.0, 60_000.0, 0.5), rel=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", FactKind)
def test_a_new_fact_is_one_line(kind: FactKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FACTS, "tired", kind)  # type: ignore[arg-type]  # a dict
    values: dict[FactKind, list[dict[str, Any]]] = {
        FactKind.DIGEST: [{"digests": {"tired": 1}}, {"digests": {"tired": 2}}],
        FactKind.RANK_FLAGS: [{"flags": {"tired": (0,)}}, {}],
        FactKind.ITEM_FLAGS: [{}, {"flags": {"tired": (0,)}}],
        FactKind.NUMBERS: [{"numbers": {"tired": 3.0}}, {"numbers": {"tired": 5.0}}],
    }
    reading, codec = reduced([Facts(**own) for own in values[kind]])
    if kind is FactKind.NUMBERS:
        assert (reading, codec.numbers("tired")) == (None, (3.0, 5.0))
    elif kind is FactKind.DIGEST:
        assert reading is not None
        assert reading.unlike == ("tired",)
    else:
        assert reading is not None
        assert reading.flags["tired"] == ((10,) if kind is FactKind.RANK_FLAGS else (0,))


def test_a_digest_that_is_left_out_accepts_the_others_again() -> None:
    plan = plan_from_groups([spec("weight", 6)], ((0,),), num_ranks=2)
    memory = FlatGradients(plan.buckets[0], [torch.zeros(6)])
    codec = TrailerCodec(plan.buckets[0], memory, divisor=2, rank=0, names=range(2))
    written = []
    for facts in (Facts(), Facts(digests={"settings": 5}), Facts()):
        codec.write(unused=(), signature=signature_of(generation=1, mode=0), step=3, facts=facts)
        written.append(memory.trailer.clone())
    assert torch.equal(written[0], written[2])
    assert not torch.equal(written[0], written[1])


def test_a_default_device_does_not_move_the_trailer_from_the_host() -> None:
    with torch.device("meta"):
        reading, codec = reduced([Facts(flags={"failed": (0,)}, numbers={"busy_ms": 2.0}), Facts(numbers={"busy_ms": 4.0})])
        assert reading is not None
        assert (reading.flags["failed"], codec.numbers("busy_ms")) == ((10,), (2.0, 4.0))
