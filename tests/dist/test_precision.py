"""Dtypes of gradients, of what is computed, and of what travels."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.alike import require_equal_values, train
from support.errors import text_of
from support.levels import some
from support.models import CASES, noise
from support.ranks import in_ranks
from support.sharded import Parameters, hybrid, parameters, require_equal, training
from undertow import DistributedDataParallel, SyncConfig, attach
from undertow.errors import ConfigError

MLP = CASES["mlp"]
LR = 0.05
BRAIN = torch.bfloat16
needs_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")


@contextlib.contextmanager
def wrapped(model: nn.Module, **settings: Any) -> Iterator[DistributedDataParallel]:
    with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(**settings))) as ddp:
        yield ddp


def narrow_model() -> nn.Module:
    return MLP.model().bfloat16()


def narrow_loss(model: nn.Module, number: int) -> Tensor:
    return model(noise(5, 6, step=number).bfloat16()).float().square().mean()


def dtypes_of(model: nn.Module) -> set[torch.dtype]:
    return {param.grad.dtype for param in model.parameters() if param.grad is not None}


def mean_of_all(grad: Tensor) -> Tensor:
    """Of two ranks there is one order only."""
    total = grad.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def full_gradients(ddp: DistributedDataParallel) -> Any:
    return {name: ddp.full_gradient(param) for name, param in ddp.module.named_parameters()}


def mean_of_micro_batches(model: nn.Module, numbers: list[int], *, is_each_reduced: bool) -> Parameters:
    """The mean over ranks of sums in fp32 of gradients of bfloat16."""
    if is_each_reduced:
        means = [mean_of_micro_batches(model, [number], is_each_reduced=False) for number in numbers]
        return {name: sum((mean[name] for mean in means[1:]), start=means[0][name]) for name in means[0]}
    sums: Parameters = {}
    for number in numbers:
        model.zero_grad()
        narrow_loss(model, number).backward()
        for name, param in model.named_parameters():
            sums[name] = sums[name] + param.grad.float() if name in sums else param.grad.float()
    return {name: mean_of_all(total) for name, total in sums.items()}


@in_ranks(2)
@needs_grad_dtype
@pytest.mark.parametrize("strategy", some(["ddp", "zero1", "zero2"], most=1))
def test_gradients_of_sixteen_bits_add_up_in_fp32(strategy: str) -> None:
    reference = narrow_model()
    masters = {name: param.detach().float() for name, param in reference.named_parameters()}
    with training(narrow_model(), strategy, "SGD", reduce_dtype="float32") as (ddp, opt):
        for group in opt.param_groups:
            group |= {"lr": LR, "momentum": 0.0, "weight_decay": 0.0}
        for step in range(6):
            numbers = [10 * step + micro for micro in range(3)]
            opt.zero_grad()
            with ddp.no_sync():
                for number in numbers[:-1]:
                    narrow_loss(ddp, number).backward()
            narrow_loss(ddp, numbers[-1]).backward()
            expected = mean_of_micro_batches(reference, numbers, is_each_reduced=strategy == "zero2")
            actual = full_gradients(ddp)
            assert {grad.dtype for grad in actual.values()} == {torch.float32}
            require_equal(expected, actual, what=f"step {step}")
            opt.step()
            with torch.no_grad():
                for name, param in reference.named_parameters():
                    # A plain optimizer steps the parameter itself, a sharded one a copy in fp32.
                    start = masters[name] if strategy != "ddp" else param
                    start.add_(expected[name], alpha=-LR)
                    param.copy_(start)
            ddp.wait()
            require_equal_values(ddp, reference)


@pytest.mark.deep
@in_ranks(2)
@needs_grad_dtype
@pytest.mark.parametrize("is_wrapped_again", some([False, True], most=1))
def test_gradients_keep_their_dtype_until_closing_gives_it_back(is_wrapped_again: bool) -> None:
    model, settings = narrow_model(), SyncConfig(reduce_dtype="float32")
    sync = attach(model, config=settings)
    narrow_loss(model, 0).backward()
    if is_wrapped_again:
        model.zero_grad()
        sync = attach(model, config=settings)
    narrow_loss(model, 1).backward()
    assert dtypes_of(model) == {torch.float32}
    means = [param.grad.bfloat16() for param in model.parameters()]
    sync.close()
    assert all(map(torch.equal, means, [param.grad for param in model.parameters()]))
    narrow_loss(model, 0).backward()
    assert dtypes_of(model) == {BRAIN}


@in_ranks(2)
@needs_grad_dtype
def test_a_gradient_that_is_there_already_is_refused() -> None:
    model = narrow_model()
    narrow_loss(model, 0).backward()
    first = next(name for name, _ in model.named_parameters())
    assert text_of(ConfigError, lambda: DistributedDataParallel(model, config=SyncConfig(reduce_dtype="float32"))) == (
        f"parameter {first!r} has a gradient of torch.bfloat16, and reduce_dtype asks for torch.float32.\n"
        "  SyncConfig(reduce_dtype=...)\n"
        "  Clear gradients with zero_grad() before the model is wrapped, and before a parameter changes its dtype."
    )


@pytest.mark.deep
@in_ranks(2)
@needs_grad_dtype
def test_gradients_of_parameters_that_are_cast_later_are_never_narrower_than_those() -> None:
    with wrapped(narrow_model(), reduce_dtype="float32") as ddp:
        for dtype, wanted in {BRAIN: torch.float32, torch.float64: torch.float64, torch.half: torch.float32}.items():
            ddp.zero_grad()
            ddp.to(dtype)
            ddp(noise(5, 6).to(dtype)).double().square().mean().backward()
            assert dtypes_of(ddp) == {wanted}


def mean_on_the_wire(grad: Tensor, wire: torch.dtype, *, is_native: bool, is_sharded: bool) -> Tensor:
    """Over two ranks, of what has traveled; whole gradients are sent back as narrow as they came."""
    if not is_native or is_sharded:
        mean = mean_of_all(grad.to(wire).float())
        return mean if is_sharded else mean.to(wire).float()
    narrow = (grad / dist.get_world_size()).to(wire)  # divided before: a sum may be too large for 16 bits
    dist.all_reduce(narrow)
    return narrow.float()


@in_ranks(2)
@pytest.mark.parametrize("wire", some(["bfloat16", "float16"], most=1))
@pytest.mark.parametrize(
    ("strategy", "reduction"), some([("ddp", "native"), ("ddp", "ordered"), ("zero1", "native"), ("zero2", "ordered")], most=1)
)
def test_gradients_travel_in_sixteen_bits(wire: str, strategy: str, reduction: str) -> None:
    reference = MLP.model()
    with training(MLP.model(), strategy, "SGD", wire=wire, reduction=reduction) as (ddp, opt):
        for step in range(4):
            reference.load_state_dict(ddp.module.state_dict())
            for model in (ddp, reference):
                model.zero_grad()
                MLP.loss(model, step).backward()
            how = {"wire": getattr(torch, wire), "is_native": reduction == "native", "is_sharded": strategy != "ddp"}
            require_equal(
                {name: mean_on_the_wire(param.grad, **how) for name, param in reference.named_parameters()},
                full_gradients(ddp),
                what=f"step {step}",
            )
            opt.step()
            ddp.wait()


@in_ranks(2)
@pytest.mark.parametrize("strategy", some(["ddp", "zero1"], most=1))
def test_sixteen_bits_halve_the_bytes(strategy: str) -> None:
    sent = {}
    for wire in (None, "bfloat16"):
        with training(nn.Linear(512, 512), strategy, "SGD", wire=wire) as (ddp, opt):
            train(ddp, opt, lambda model, step: model(noise(3, 512, step=step)).square().mean())
            sent[wire] = ddp.report().sent_bytes
    ratio = sent["bfloat16"] / sent[None]
    print(f"bytes {sent}: ratio {ratio:.4f}", flush=True)  # shown by -rP, for docs/concepts.md
    # A megabyte of gradients; the trailer, some hundred elements, stays as it is.
    assert 0.5 <= ratio < 0.501


@in_ranks(2, 3)
def test_what_travels_narrower_has_the_same_bits_under_every_plan() -> None:
    results = []
    for cap in (1e-4, 1.0):
        with training(MLP.model(), "zero1", "SGD", wire="bfloat16", reduction="ordered", bucket_cap_mb=cap) as (ddp, opt):
            train(ddp, opt, MLP.loss, steps=range(5))
            results.append(parameters(ddp))
    require_equal(*results)


class Rows(nn.Module):
    """An embedding that the second rank does not always use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)

    def forward(self, tokens: Tensor | None) -> Tensor:
        return self.out(torch.ones(2, 3, dtype=self.out.weight.dtype) if tokens is None else self.embedding(tokens))


@in_ranks(2)
@needs_grad_dtype
def test_sparse_gradients_add_up_in_fp32_also_where_a_rank_has_none() -> None:
    rank, model, reference = dist.get_rank(), Rows().bfloat16(), Rows().bfloat16()
    with wrapped(model, reduce_dtype="float32") as ddp:
        for step in range(4):
            tokens = None if rank == 1 and step % 2 else torch.tensor([step, rank + 1])
            for each in (ddp, reference):
                each.zero_grad()
                each(tokens).float().square().sum().backward()
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                grad = torch.zeros(theirs.shape) if theirs.grad is None else theirs.grad.to_dense().float()
                assert torch.equal(mine.grad.to_dense(), mean_of_all(grad))


def steep(wire: str | None) -> tuple[nn.Module, Tensor]:
    """A model and an input with which every gradient is 40,000: two of them are more than fp16 has."""
    dtype = torch.float32 if wire else torch.float16
    return nn.Linear(8, 1, bias=False, dtype=dtype), torch.full((1, 8), 4e4, dtype=dtype)


@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("reduction", some(["native", "ordered"], most=1))
@pytest.mark.parametrize("shape", some([((2, 2),), ((4, 1),)], most=1))
@pytest.mark.parametrize("wire", some([None, "float16"], most=1))
def test_sums_that_cross_a_mesh_in_fp16_are_divided_before(reduction: str, shape: tuple[int, int], wire: str | None) -> None:
    model, x = steep(wire)
    with hybrid(model, "SGD", shape=shape, reduction=reduction, wire=wire) as (ddp, opt):
        for _ in range(3):
            opt.zero_grad()
            ddp(x).sum().backward()
            grad = ddp.full_gradient(ddp.module.weight)
            assert torch.equal(grad.float(), torch.full((1, 8), 4e4))  # a multiple of 32: fp16 has it
            opt.step()


@in_ranks(2)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
@pytest.mark.parametrize("wire", [None, "float16"])
def test_a_mean_of_halves_does_not_overflow(wire: str | None, reduction: str) -> None:
    model, x = steep(wire)
    with wrapped(model, wire=wire, reduction=reduction) as ddp:
        ddp(x).sum().backward()
        assert torch.equal(model.weight.grad.float(), torch.full((1, 8), 4e4))
