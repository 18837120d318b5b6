"""Dtypes of gradients, of what is computed, and of what travels."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from support.alike import backward_alike, require_equal_values, train
from support.errors import text_of
from support.inside import change_process_group, readings_of_trailers
from support.models import CASES, noise
from support.ranks import in_ranks
from support.sharded import Parameters, hybrid, parameters, require_equal, training
from support.units import Applied
from undertow import DistributedDataParallel, SyncConfig, attach
from undertow.errors import ConfigError, PhaseError

MLP = CASES["mlp"]
LR = 0.05
BRAIN = torch.bfloat16
needs_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")


@contextlib.contextmanager
def wrapped(model: nn.Module, *, mixed: dict[str, Any] | None = None, **settings: Any) -> Iterator[DistributedDataParallel]:
    with contextlib.closing(
        DistributedDataParallel(
            model, mixed_precision=None if mixed is None else _MixedPrecision(**mixed), config=SyncConfig(**settings)
        )
    ) as ddp:
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


class NarrowAndWide(nn.Module):
    """Parameters of two dtypes, whose gradients have one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = nn.Linear(6, 5).bfloat16(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(self.narrow(x).float().tanh())


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


@in_ranks(2)
@needs_grad_dtype
@pytest.mark.parametrize("way", ["closed", "a second wrapper", "one without the setting", "another group"])
def test_gradients_keep_their_dtype_until_closing_gives_it_back(way: str) -> None:
    """Also where they are passed on to a second wrapper, or to another group."""
    model, settings = narrow_model(), SyncConfig(reduce_dtype="float32")
    first, later, group = attach(model, config=settings), [], None
    narrow_loss(model, 0).backward()
    if way == "another group":
        group = dist.new_group()
        change_process_group(first, group)
    elif way != "closed":
        later = [attach(model, config=settings if way == "a second wrapper" else None)]
        first.close()
    narrow_loss(model, 1).backward()
    assert dtypes_of(model) == {torch.float32}
    means = [param.grad.bfloat16() for param in model.parameters()]
    for sync in (first, *later):
        sync.close()
    if group is not None:
        dist.destroy_process_group(group)
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


@in_ranks(2)
@needs_grad_dtype
def test_gradients_of_parameters_that_are_cast_later_are_never_narrower_than_those() -> None:
    with wrapped(narrow_model(), reduce_dtype="float32") as ddp:
        for dtype, wanted in {BRAIN: torch.float32, torch.float64: torch.float64, torch.half: torch.float32}.items():
            ddp.zero_grad()
            ddp.to(dtype)
            ddp(noise(5, 6).to(dtype)).double().square().mean().backward()
            assert dtypes_of(ddp) == {wanted}


class Normed(nn.Module):
    """A buffer, a tied weight, a parameter that is read outside of its module, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(7, 6), nn.BatchNorm1d(6)
        self.out, self.scale = nn.Linear(6, 7, bias=False), nn.Linear(6, 6)
        self.out.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.seen: list[torch.dtype] = []

    def forward(self, tokens: Tensor, noise: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens) + noise) * self.frozen
        hidden = nn.functional.linear(hidden, self.scale.weight)
        self.seen.append(hidden.dtype)
        return self.out(hidden)


@in_ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"param_dtype": BRAIN, "buffer_dtype": BRAIN, "reduce_dtype": torch.float32},
        {"reduce_dtype": torch.float32},
        {"buffer_dtype": torch.float64},
    ],
    ids=str,
)
def test_torchs_mixed_precision_computes_in_its_dtype(options: dict[str, torch.dtype]) -> None:
    """By hand: a copy of each parameter computes, and hands its gradient on. Buffers are cast for good."""
    reference, tokens, dtype = Normed(), torch.arange(7).repeat(2), options.get("param_dtype", torch.float32)
    for buffer in (reference.norm.running_mean, reference.norm.running_var):
        buffer.data = buffer.to(options.get("buffer_dtype"))

    def loss(model: nn.Module, step: int) -> Tensor:
        x = noise(14, 6, step=step)
        if model is ddp:
            return ddp(tokens, x).float().square().mean()
        copies = {name: param.to(dtype) for name, param in model.named_parameters()}
        return torch.func.functional_call(model, copies, (tokens, x.to(dtype))).float().square().mean()

    with wrapped(Normed(), mixed=options, buffers="off") as ddp:
        if options.keys() != {"buffer_dtype"}:  # torch's batch norm takes no buffers that are wider than what it computes
            backward_alike(ddp, reference, loss)
            assert set(ddp.module.seen) == {dtype}
        assert ({param.dtype for param in ddp.parameters()}, ddp.module.norm.running_mean.dtype) == (
            {torch.float32},
            options.get("buffer_dtype", torch.float32),
        )
        assert ddp.module.norm.num_batches_tracked.dtype == torch.int64


def mean_on_the_wire(grad: Tensor, wire: torch.dtype, *, is_native: bool, is_sharded: bool) -> Tensor:
    """Over two ranks, of what has traveled; whole gradients are sent back as narrow as they came."""
    if not is_native or is_sharded:
        mean = mean_of_all(grad.to(wire).float())
        return mean if is_sharded else mean.to(wire).float()
    narrow = (grad / dist.get_world_size()).to(wire)  # divided before: a sum may be too large for 16 bits
    dist.all_reduce(narrow)
    return narrow.float()


@in_ranks(2)
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("strategy", "reduction"), [("ddp", "native"), ("ddp", "ordered"), ("zero1", "native"), ("zero2", "ordered")]
)
def test_gradients_travel_in_sixteen_bits(wire: str, strategy: str, reduction: str) -> None:
    reference = MLP.model()
    with training(MLP.model(), strategy, "SGD", wire_dtype=wire, reduction=reduction) as (ddp, opt):
        for step in range(4):
            reference.load_state_dict(ddp.module.state_dict())
            for model in (ddp, reference):
                model.zero_grad()
                MLP.loss(model, step).backward()
            is_sharded = strategy != "ddp" and step > 0  # from the optimizer's first step on
            how = {"wire": getattr(torch, wire), "is_native": reduction == "native", "is_sharded": is_sharded}
            require_equal(
                {name: mean_on_the_wire(param.grad, **how) for name, param in reference.named_parameters()},
                full_gradients(ddp),
                what=f"step {step}",
            )
            opt.step()
            ddp.wait()


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_sixteen_bits_halve_the_bytes(strategy: str) -> None:
    sent = {}
    for wire in (None, "bfloat16"):
        with training(nn.Linear(512, 512), strategy, "SGD", wire_dtype=wire) as (ddp, opt):
            train(ddp, opt, lambda model, step: model(noise(3, 512, step=step)).square().mean())
            sent[wire] = ddp.report().sent_bytes
    ratio = sent["bfloat16"] / sent[None]
    print(f"bytes {sent}: ratio {ratio:.4f}", flush=True)  # shown by -rP, for docs/concepts.md
    # A megabyte of gradients; of shards the trailer, some hundred elements, stays as it is.
    assert 0.5 <= ratio < 0.501


@in_ranks(2, 3)
def test_what_travels_narrower_has_the_same_bits_under_every_plan() -> None:
    results = []
    for cap in (1e-4, 1.0):
        with training(MLP.model(), "zero1", "SGD", wire_dtype="bfloat16", reduction="ordered", bucket_cap_mb=cap) as (ddp, opt):
            train(ddp, opt, MLP.loss, steps=range(5))
            results.append(parameters(ddp))
    require_equal(*results)


@in_ranks(2)
@pytest.mark.parametrize(
    ("mixed", "own", "wire"),
    [
        ({"param_dtype": BRAIN}, None, "bfloat16"),
        ({"param_dtype": BRAIN, "reduce_dtype": torch.float32}, None, None),
        ({"reduce_dtype": torch.float16}, None, "float16"),
        ({"reduce_dtype": torch.float16}, "bfloat16", "bfloat16"),
    ],
    ids=str,
)
def test_torchs_mixed_precision_says_what_travels(mixed: dict[str, torch.dtype], own: str | None, wire: str | None) -> None:
    """Its reduce_dtype, and without one its param_dtype; a setting of ours goes before. A hook goes with none of these."""
    with wrapped(nn.Linear(2, 2), mixed=mixed, wire_dtype=own) as ddp:
        assert ddp.sync.config.wire_dtype == wire
        if wire is None:
            ddp.register_comm_hook(None, bf16_compress_hook)
            ddp(torch.ones(1, 2)).float().sum().backward()
            assert ddp.module.weight.grad.tolist() == [[1.0, 1.0]] * 2
        else:
            assert text_of(ConfigError, lambda: ddp.register_comm_hook(None, bf16_compress_hook)) == (
                f"a communication hook chooses the dtype of sent gradients, and the settings ask for torch.{wire}.\n"
                "  register_comm_hook, with wire_dtype=... or mixed_precision=...\n"
                "  Leave wire_dtype out; with mixed_precision, give it reduce_dtype=torch.float32."
            )


@in_ranks(2)
def test_a_sparse_gradient_that_would_be_cast_is_refused() -> None:
    model, narrow = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2)), _MixedPrecision(param_dtype=BRAIN)
    assert text_of(ConfigError, lambda: DistributedDataParallel(model, mixed_precision=narrow)) == (
        "mixed_precision casts parameter '0.weight', whose gradient is sparse, and autograd cannot cast that back.\n"
        "  DistributedDataParallel(mixed_precision=...)\n"
        "  Make the embedding with sparse=False, or use torch.autocast around the forward."
    )
    with wrapped(model.bfloat16(), mixed={"param_dtype": BRAIN}) as ddp:  # nothing is to be cast
        ddp(torch.tensor([1, 2])).float().sum().backward()
        assert model[0].weight.grad.is_sparse


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


@in_ranks(2)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_mixed_precision_refuses_to_compute_again(use_reentrant: bool) -> None:
    """Copies of the bare module may, and a copy of the wrapper may not until it is closed."""
    x, model = torch.ones(2, 4, requires_grad=True), Applied(partial(checkpoint, use_reentrant=use_reentrant))
    with wrapped(model, mixed={"param_dtype": BRAIN}) as ddp:
        average, other = copy.deepcopy(ddp.module), copy.deepcopy(ddp)
        average(x).sum().backward()
        for model in (ddp, other):
            assert text_of(PhaseError, lambda model=model: model(x).sum().backward()) == (
                "Linear runs its forward again during backward, when its parameters have their own dtype again.\n"
                "  DistributedDataParallel(mixed_precision=...), with activation checkpoints\n"
                "  Use torch.autocast around the forward instead of mixed_precision, or leave checkpoints out."
            )
    other.close()
    for model in (ddp, other):
        model.module(x).sum().backward()


def steep(wire: str | None) -> tuple[nn.Module, Tensor]:
    """A model and an input with which every gradient is 40,000: two of them are more than fp16 has."""
    dtype = torch.float32 if wire else torch.float16
    return nn.Linear(8, 1, bias=False, dtype=dtype), torch.full((1, 8), 4e4, dtype=dtype)


@in_ranks(4)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("wire", [None, "float16"])
def test_sums_that_cross_a_mesh_in_fp16_are_divided_before(reduction: str, shape: tuple[int, int], wire: str | None) -> None:
    model, x = steep(wire)
    with hybrid(model, "SGD", shape=shape, reduction=reduction, wire_dtype=wire) as (ddp, opt):
        for step in range(3):
            opt.zero_grad()
            ddp(x).sum().backward()
            grad = ddp.full_gradient(ddp.module.weight)
            # The first step is one of whole gradients, of which gloo adds up those of 16 bits before it divides.
            assert step == 0 or torch.equal(grad.float(), torch.full((1, 8), 4e4))  # a multiple of 32: fp16 has it
            opt.step()


@in_ranks(2)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
@pytest.mark.parametrize("wire", [None, "float16"])
def test_a_mean_of_halves_does_not_overflow(wire: str | None, reduction: str) -> None:
    model, x = steep(wire)
    with wrapped(model, wire_dtype=wire, reduction=reduction) as ddp:
        ddp(x).sum().backward()
        assert torch.equal(model.weight.grad.float(), torch.full((1, 8), 4e4))


@in_ranks(2, 3)
@pytest.mark.parametrize(("strategy", "settings"), [("zero1", {}), ("ddp", {"op": "sum"})])
def test_trailers_that_were_added_up_are_not_taken_apart(strategy: str, settings: dict[str, Any]) -> None:
    """What every rank has written alike says nothing, also where it comes back as a sum."""
    with readings_of_trailers() as readings, training(MLP.model(), strategy, "SGD", **settings) as (ddp, opt):
        train(ddp, opt, MLP.loss)
    assert set(readings) == {None}
