"""Dtypes of gradients, of what is computed, and of what travels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from support.errors import text_of
from support.hybrid import hybrid
from support.models import CASES, noise
from support.ranks import Ranks, in_ranks
from support.sharded import require_equal, training
from undertow import DistributedDataParallel, SyncConfig, attach
from undertow.errors import ConfigError, PhaseError
from undertow.runtime.trailer import TrailerCodec

MLP = CASES["mlp"]
LR = 0.05
needs_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")


def narrow_model() -> nn.Module:
    return MLP.model().bfloat16()


def narrow_loss(model: nn.Module, number: int) -> Tensor:
    return model(noise(5, 6, step=number).bfloat16()).float().square().mean()


def mean_of_micro_batches(model: nn.Module, numbers: list[int], *, is_each_reduced: bool) -> dict[str, Tensor]:
    """The mean over ranks of sums in fp32 of gradients of bfloat16; of two ranks there is one order only."""
    if is_each_reduced:
        means = [mean_of_micro_batches(model, [number], is_each_reduced=False) for number in numbers]
        return {name: sum((mean[name] for mean in means[1:]), start=means[0][name]) for name in means[0]}
    sums: dict[str, Tensor] = {}
    for number in numbers:
        model.zero_grad()
        narrow_loss(model, number).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            sums[name] = sums[name] + param.grad.float() if name in sums else param.grad.float()
    for total in sums.values():
        dist.all_reduce(total)
    return {name: total / dist.get_world_size() for name, total in sums.items()}


class NarrowAndWide(nn.Module):
    """Parameters of two dtypes, whose gradients have one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(6, 5).bfloat16(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.wide(self.narrow(x).float().tanh())
        return out


@in_ranks(2)
@needs_grad_dtype
@pytest.mark.parametrize("make", [narrow_model, NarrowAndWide])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_gradients_of_sixteen_bits_add_up_in_fp32(make: Callable[[], nn.Module], strategy: str) -> None:
    reference = make()
    masters = {name: param.detach().float() for name, param in reference.named_parameters()}
    with training(make(), strategy, "SGD", reduce_dtype="float32") as (ddp, opt):
        for group in opt.param_groups:
            group |= {"lr": LR, "momentum": 0.0, "weight_decay": 0.0}
        for step in range(6):
            numbers = [10 * step + micro for micro in range(3)]
            opt.zero_grad()
            with ddp.no_sync():
                for number in numbers[:-1]:
                    narrow_loss(ddp, number).backward()
            narrow_loss(ddp, numbers[-1]).backward()
            is_each_reduced = strategy == "zero2" and step > 0  # from the optimizer's first step on
            expected = mean_of_micro_batches(reference, numbers, is_each_reduced=is_each_reduced)
            actual = {name: ddp.full_gradient(param) for name, param in ddp.module.named_parameters()}
            assert {grad.dtype for grad in actual.values() if grad is not None} == {torch.float32}
            require_equal(expected, actual, what=f"step {step}")  # type: ignore[arg-type]
            opt.step()
            with torch.no_grad():
                for name, param in reference.named_parameters():
                    # A plain optimizer steps the parameter itself, a sharded one a copy in fp32.
                    start = masters[name] if strategy != "ddp" else param
                    start.add_(expected[name], alpha=-LR)
                    param.copy_(start)
            ddp.wait()
            require_equal(dict(reference.named_parameters()), dict(ddp.module.named_parameters()), what=f"step {step}")


def restored_when_closed() -> list[torch.dtype]:
    model = narrow_model()
    ddp = DistributedDataParallel(model, config=SyncConfig(reduce_dtype="float32"))
    narrow_loss(ddp, 0).backward()
    means = {name: param.grad.bfloat16() for name, param in model.named_parameters() if param.grad is not None}
    ddp.close()
    require_equal(means, {name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    narrow_loss(model, 0).backward()
    return [param.grad.dtype for param in model.parameters() if param.grad is not None]


@needs_grad_dtype
def test_closing_gives_gradients_their_dtype_back(two_ranks: Ranks) -> None:
    assert set(two_ranks.run(restored_when_closed)[0]) == {torch.bfloat16}


@in_ranks(2)
@needs_grad_dtype
@pytest.mark.parametrize("way", ["a second wrapper", "one without the setting", "another group"])
def test_gradients_that_are_passed_on_keep_their_dtype(way: str) -> None:
    """To a second wrapper, or to another group: gradients keep the dtype in which they are added up."""
    model, settings = narrow_model(), SyncConfig(reduce_dtype="float32")
    first = attach(model, config=settings)
    narrow_loss(model, 0).backward()
    second, group = None, None
    if way != "another group":
        second = attach(model, config=settings if way == "a second wrapper" else None)
        first.close()
    else:
        group = dist.new_group()
        first.change_process_group(group)
    narrow_loss(model, 1).backward()
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.float32}
    for sync in (first, second):
        if sync is not None:
            sync.close()
    if group is not None:
        dist.destroy_process_group(group)
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.bfloat16}


def with_a_gradient() -> str:
    model = narrow_model()
    narrow_loss(model, 0).backward()
    return text_of(ConfigError, lambda: DistributedDataParallel(model, config=SyncConfig(reduce_dtype="float32")))


@needs_grad_dtype
def test_a_gradient_that_is_there_already_is_refused(two_ranks: Ranks) -> None:
    first = next(iter(dict(MLP.model().named_parameters())))
    assert two_ranks.run(with_a_gradient)[0] == (
        f"parameter {first!r} has a gradient of torch.bfloat16, and reduce_dtype asks for torch.float32.\n"
        "  SyncConfig(reduce_dtype=...)\n"
        "  Clear gradients with zero_grad() before the model is wrapped, and before a parameter changes its dtype."
    )


def cast_later() -> list[torch.dtype]:
    model = narrow_model()
    ddp = DistributedDataParallel(model, config=SyncConfig(reduce_dtype="float32"))
    found = []
    for step, dtype in enumerate([torch.bfloat16, torch.float64, torch.float16]):
        ddp.zero_grad()
        ddp.to(dtype)
        ddp(noise(5, 6, step=step).to(dtype)).double().square().mean().backward()
        found += {param.grad.dtype for param in model.parameters() if param.grad is not None}
    ddp.close()
    return found


@needs_grad_dtype
def test_gradients_of_parameters_that_are_cast_later_are_never_narrower_than_those(two_ranks: Ranks) -> None:
    assert two_ranks.run(cast_later) == [[torch.float32, torch.float64, torch.float32]] * 2


class Normed(nn.Module):
    """A buffer, a tied weight, a parameter that is read outside of its module, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.embedding.weight
        self.scale = nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.seen: list[torch.dtype] = []

    def forward(self, tokens: Tensor, noise: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens) + noise) * self.frozen
        hidden = nn.functional.linear(hidden, self.scale.weight)
        self.seen.append(hidden.dtype)
        out: Tensor = self.out(hidden)
        return out


def mixed(strategy: str, options: dict[str, torch.dtype]) -> None:
    tokens, rank = torch.arange(7).repeat(2), dist.get_rank()
    reference = Normed()
    dtype = options.get("param_dtype", torch.float32)
    for buffer in (reference.norm.running_mean, reference.norm.running_var):
        assert buffer is not None
        buffer.data = buffer.to(options.get("buffer_dtype"))
    ddp = DistributedDataParallel(
        Normed(), mixed_precision=_MixedPrecision(**options), config=SyncConfig(strategy=strategy, buffers="off")
    )
    for step in range(3):
        x = noise(14, 6, step=10 * step + rank)
        ddp.zero_grad()
        ddp(tokens, x).float().square().mean().backward()
        # By hand: a copy of each parameter computes, and hands its gradient on.
        reference.zero_grad()
        copies = {name: param.to(dtype) for name, param in reference.named_parameters()}
        torch.func.functional_call(reference, copies, (tokens, x.to(dtype))).float().square().mean().backward()
        for (name, param), own in zip(reference.named_parameters(), ddp.module.parameters(), strict=True):
            if param.grad is None:
                assert own.grad is None, name
                continue
            dist.all_reduce(param.grad)
            assert torch.equal(param.grad / dist.get_world_size(), own.grad), name  # type: ignore[arg-type]
    assert set(ddp.module.seen) == {dtype}
    assert {param.dtype for param in ddp.module.parameters()} == {torch.float32}
    assert ddp.module.norm.running_mean.dtype == options.get("buffer_dtype", torch.float32)  # type: ignore[union-attr]
    assert ddp.module.norm.num_batches_tracked.dtype == torch.int64  # type: ignore[union-attr]
    ddp.close()


@pytest.mark.parametrize(
    "options",
    [
        dict.fromkeys(("param_dtype", "buffer_dtype"), torch.bfloat16) | {"reduce_dtype": torch.float32},
        {"reduce_dtype": torch.float32},
    ],
    ids=["bfloat16", "nothing narrower"],
)
def test_torchs_mixed_precision_computes_in_its_dtype(two_ranks: Ranks, options: dict[str, Any]) -> None:
    two_ranks.run(mixed, "ddp", options)


def mixed_buffers() -> torch.dtype:
    ddp = DistributedDataParallel(Normed(), mixed_precision=_MixedPrecision(buffer_dtype=torch.float64))
    return ddp.module.norm.running_mean.dtype  # type: ignore[no-any-return]


def test_buffers_are_cast_for_good(two_ranks: Ranks) -> None:
    assert two_ranks.run(mixed_buffers) == [torch.float64] * 2


def wire_reference(model: nn.Module, wire: torch.dtype, *, reduction: str, is_sharded: bool) -> dict[str, Tensor]:
    """The mean over two ranks of what has travelled; whole gradients are sent back as narrow as they came."""
    means = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        if reduction == "native" and not is_sharded:  # divided before: a sum may be too large for 16 bits
            narrow = (param.grad / dist.get_world_size()).to(wire)
            dist.all_reduce(narrow)
            means[name] = narrow.float()
        else:
            total = param.grad.to(wire).float()
            dist.all_reduce(total)
            mean = total / dist.get_world_size()
            means[name] = mean if is_sharded else mean.to(wire).float()
    return means


@in_ranks(2)
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("strategy", "reduction"), [("ddp", "native"), ("ddp", "ordered"), ("zero1", "native"), ("zero2", "ordered")]
)
def test_gradients_travel_in_sixteen_bits(wire: str, strategy: str, reduction: str) -> None:
    reference, dtype = MLP.model(), getattr(torch, wire)
    settings: dict[str, Any] = {"wire_dtype": wire, "reduction": reduction}
    with training(MLP.model(), strategy, "SGD", **settings) as (ddp, opt):
        for step in range(4):
            opt.zero_grad()
            reference.zero_grad()
            MLP.loss(ddp, step).backward()
            MLP.loss(reference, step).backward()
            is_sharded = strategy != "ddp" and step > 0  # from the optimizer's first step on
            expected = wire_reference(reference, dtype, reduction=reduction, is_sharded=is_sharded)
            actual = {name: ddp.full_gradient(param) for name, param in ddp.module.named_parameters()}
            require_equal(expected, actual, what=f"step {step}")  # type: ignore[arg-type]
            opt.step()
            ddp.wait()
            with torch.no_grad():
                for mine, theirs in zip(reference.parameters(), ddp.module.parameters(), strict=True):
                    mine.copy_(theirs)


def sent_bytes(strategy: str, wire: str | None) -> int:
    model = nn.Linear(512, 512)
    with training(model, strategy, "SGD", wire_dtype=wire) as (ddp, opt):
        for step in range(3):
            opt.zero_grad()
            ddp(noise(3, 512, step=step)).square().mean().backward()
            opt.step()
        return ddp.report(show=False).sent_bytes


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_sixteen_bits_halve_the_bytes(two_ranks: Ranks, strategy: str) -> None:
    wide, narrow = (two_ranks.run(sent_bytes, strategy, wire)[0] for wire in (None, "bfloat16"))
    print(f"bytes {wide}, in bfloat16 {narrow}: ratio {narrow / wide:.4f}")  # shown by -rP, for docs/concepts.md
    # A megabyte of gradients; of shards the trailer, some hundred elements, stays as it is.
    assert 0.5 <= narrow / wide < 0.501


@in_ranks(2, 3)
def test_what_travels_narrower_has_the_same_bits_under_every_plan() -> None:
    results = []
    for cap in (1e-4, 1.0):
        with training(MLP.model(), "zero1", "SGD", wire_dtype="bfloat16", reduction="ordered", bucket_cap_mb=cap) as (ddp, opt):
            for step in range(5):
                opt.zero_grad()
                MLP.loss(ddp, step).backward()
                opt.step()
            ddp.wait()
            results.append({name: param.detach().clone() for name, param in ddp.named_parameters()})
    require_equal(*results)


def torchs_wire_dtype() -> list[str | None]:
    made = [
        DistributedDataParallel(nn.Linear(2, 2), mixed_precision=_MixedPrecision(**options)).sync.config.wire_dtype
        for options in (
            {"param_dtype": torch.bfloat16},
            {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
            {"reduce_dtype": torch.float16},
        )
    ]
    config = SyncConfig(wire_dtype="bfloat16")
    own = DistributedDataParallel(nn.Linear(2, 2), mixed_precision=_MixedPrecision(reduce_dtype=torch.float16), config=config)
    return [*made, own.sync.config.wire_dtype]


def test_torchs_mixed_precision_says_what_travels(two_ranks: Ranks) -> None:
    """Its reduce_dtype, and without one its param_dtype; a setting of ours goes before."""
    assert two_ranks.run(torchs_wire_dtype)[0] == ["bfloat16", None, "float16", "bfloat16"]


def hook_and_wire() -> list[str]:
    narrow = _MixedPrecision(param_dtype=torch.bfloat16)
    found = []
    for how in ({"config": SyncConfig(wire_dtype="bfloat16")}, {"mixed_precision": narrow}):
        ddp = DistributedDataParallel(nn.Linear(2, 2), **how)  # type: ignore[arg-type]
        found.append(text_of(ConfigError, lambda ddp=ddp: ddp.register_comm_hook(None, bf16_compress_hook)))
        ddp.close()
    whole = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(nn.Linear(2, 2), mixed_precision=whole)  # the way out
    ddp.register_comm_hook(None, bf16_compress_hook)
    ddp(torch.ones(1, 2)).float().sum().backward()
    assert ddp.module.weight.grad.tolist() == [[1.0, 1.0]] * 2
    ddp.close()
    return found


def test_a_hook_and_a_wire_dtype_are_one_too_many(two_ranks: Ranks) -> None:
    text = (
        "a communication hook decides in which dtype gradients travel, and they are to travel in torch.bfloat16.\n"
        "  register_comm_hook, with wire_dtype=... or mixed_precision=...\n"
        "  Leave wire_dtype out; with mixed_precision let reduce_dtype=torch.float32 say that they travel as they are."
    )
    assert two_ranks.run(hook_and_wire) == [[text, text]] * 2


def mixed_and_sparse() -> str:
    model, narrow = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)), _MixedPrecision(param_dtype=torch.bfloat16)
    text = text_of(ConfigError, lambda: DistributedDataParallel(model, mixed_precision=narrow))
    ddp = DistributedDataParallel(model.bfloat16(), mixed_precision=narrow)  # nothing is to be cast
    ddp(torch.tensor([1, 2])).float().sum().backward()
    assert model[0].weight.grad.is_sparse
    ddp.close()
    return text


def test_a_sparse_gradient_that_would_be_cast_is_refused(two_ranks: Ranks) -> None:
    assert (
        two_ranks.run(mixed_and_sparse)
        == [
            "mixed_precision casts parameter '0.weight', whose gradient is sparse, and autograd cannot cast that back.\n"
            "  DistributedDataParallel(mixed_precision=...)\n"
            "  Make the embedding with sparse=False, or use torch.autocast around the forward."
        ]
        * 2
    )


class Rows(nn.Module):
    """An embedding that the second rank does not always use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 3, sparse=True)
        self.out = nn.Linear(3, 2)

    def forward(self, tokens: Tensor | None) -> Tensor:
        rows = torch.ones(2, 3, dtype=self.out.weight.dtype) if tokens is None else self.embedding(tokens)
        out: Tensor = self.out(rows)
        return out


@in_ranks(2)
@needs_grad_dtype
def test_sparse_gradients_add_up_in_fp32_also_where_a_rank_has_none() -> None:
    rank, model, reference = dist.get_rank(), Rows().bfloat16(), Rows().bfloat16()
    ddp = DistributedDataParallel(model, config=SyncConfig(reduce_dtype="float32"))
    for step in range(4):
        tokens = None if rank == 1 and step % 2 else torch.tensor([step, rank + 1])
        ddp.zero_grad()
        reference.zero_grad()
        ddp(tokens).float().square().sum().backward()
        reference(tokens).float().square().sum().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mean = torch.zeros(theirs.shape) if theirs.grad is None else theirs.grad.to_dense().float()
            dist.all_reduce(mean)
            assert mine.grad is not None
            assert torch.equal(mine.grad.to_dense(), mean / dist.get_world_size())
    ddp.close()


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(4, 4), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return out


def checkpointed(use_reentrant: bool) -> str:
    ddp = DistributedDataParallel(Checkpointed(use_reentrant), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    x = torch.ones(2, 4, requires_grad=True)
    text = text_of(PhaseError, lambda: ddp(x).sum().backward())
    ddp.close()
    ddp.module(x).sum().backward()  # on its own it may
    return text


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_mixed_precision_refuses_to_compute_again(two_ranks: Ranks, use_reentrant: bool) -> None:
    assert two_ranks.run(checkpointed, use_reentrant)[0] == (
        "Linear computes again in a backward, where its parameters are not narrow any more.\n"
        "  DistributedDataParallel(mixed_precision=...), with activation checkpoints\n"
        "  Use torch.autocast around the forward in place of mixed_precision, or leave checkpoints out."
    )


@in_ranks(2)
def test_copies_of_a_model_of_mixed_precision_may_compute_again() -> None:
    """A copy computes again, which only what is wrapped with mixed precision may not."""
    x = torch.ones(2, 4)
    ddp = DistributedDataParallel(Checkpointed(False), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    average, other = copy.deepcopy(ddp.module), copy.deepcopy(ddp)
    average(x).sum().backward()
    text_of(PhaseError, lambda: other(x).sum().backward())
    for model in (ddp, other):
        model.close()
    other.module(x).sum().backward()


class Steep(nn.Module):
    """Every gradient is 40,000: two of them are more than fp16 has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self) -> Tensor:
        return (self.weight * 4e4).sum()


def across_in_half(shape: tuple[int, int], model: nn.Module, settings: dict[str, Any]) -> None:
    with hybrid(model, "SGD", shape=shape, **settings) as (ddp, opt):
        for step in range(3):
            opt.zero_grad()
            ddp().backward()
            grad = ddp.full_gradient(ddp.module.weight)  # type: ignore[arg-type]
            assert grad is not None
            # The first step is one of whole gradients, of which gloo adds up those of 16 bits before it divides.
            assert step == 0 or torch.equal(grad.float(), torch.full((8,), 4e4))  # a multiple of 32: fp16 has it
            opt.step()


@pytest.mark.parametrize("reduction", ["native", "ordered"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("is_wire", [True, False])
def test_sums_that_cross_a_mesh_in_fp16_are_divided_before(
    four_ranks: Ranks, reduction: str, shape: tuple[int, int], is_wire: bool
) -> None:
    settings = {"reduction": reduction, "wire_dtype": "float16" if is_wire else None}
    four_ranks.run(across_in_half, shape, Steep() if is_wire else Steep().half(), settings)


@in_ranks(2)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
@pytest.mark.parametrize("wire", [None, "float16"])
def test_a_mean_of_halves_does_not_overflow(wire: str | None, reduction: str) -> None:
    """40,000 twice is more than float16 holds, and the mean is not."""
    model = nn.Linear(4, 1, bias=False)
    model = model if wire else model.half()
    dtype = model.weight.dtype
    with training(model, "ddp", wire_dtype=wire, reduction=reduction) as (ddp, _):
        ddp(torch.full((1, 4), 40_000.0, dtype=dtype)).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((1, 4), 40_000.0, dtype=dtype))


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("strategy", "settings"), [("zero1", {}), ("ddp", {"op": "sum"}), ("ddp", {"average_in_collective": False})]
)
def test_trailers_that_were_added_up_are_not_taken_apart(strategy: str, settings: dict[str, Any]) -> None:
    """What every rank has written alike says nothing, also where it comes back as a sum."""
    readings: list[object] = []
    parse = TrailerCodec.parse

    def noted(*args: Any) -> Any:
        readings.append(parse(*args))
        return readings[-1]

    with mock.patch.object(TrailerCodec, "parse", noted), training(MLP.model(), strategy, "SGD", **settings) as (ddp, opt):
        for step in range(3):
            opt.zero_grad()
            MLP.loss(ddp, step).backward()
            opt.step()
    assert set(readings) == {None}
