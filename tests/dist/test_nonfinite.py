"""Gradients that are infinite or no number, and parameters that are no longer the same on all ranks: found on every rank."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from dist.mixture import loss as mixture_loss
from dist.mixture import mixture, wrapped_mixture
from support.alike import of_all_ranks
from support.errors import text_of
from support.levels import some
from support.models import Branches, noise
from support.naive import alone, collectives, wrapped
from support.ranks import in_ranks
from support.sharded import MLP, Parameters, hybrid, optimizer_for, parameters, require_equal, training
from support.units import Applied
from undertow import (
    DistributedDataParallel,
    NonFiniteGradient,
    PhaseError,
    ReplicaMismatch,
    SyncConfig,
)

EACH_ALONE, ALL_IN_ONE = 1e-6, 25.0  # MiB
BAD_STEP = 2
REMEDY = '  No rank has taken the step. Look for the overflow there, or set nonfinite="skip".'
WHAT = "the gradient of '{}' is not finite (NaN or Inf) on {}."
STRATEGIES = ["ddp", "zero1", "zero2"]


class Layers(nn.Module):
    """Two layers; the gradient of the first one's weight is spoilt where it is told to be."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(4, 3, dtype=dtype), nn.Linear(3, 2, dtype=dtype)
        self.factor: float | None = None
        self.first.weight.register_hook(lambda grad: grad if self.factor is None else grad * self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(self.first.weight.dtype)).tanh())


def backward(ddp: nn.Module, step: int, *, factor: float | None = None) -> None:
    ddp.module.factor = factor if dist.get_rank() == dist.get_world_size() - 1 else None
    ddp(noise(5, 4, step=step)).square().mean().backward()


def train(ddp: nn.Module, optimizer: Any, step: int, *, factor: float | None = None) -> None:
    optimizer.zero_grad()
    backward(ddp, step, factor=factor)
    optimizer.step()


def found(rank: int, *, step: int = BAD_STEP) -> str:
    return f"{WHAT.format('first.weight', f'rank {rank}')}\n  synchronization {step}, bucket 0"


@in_ranks(2, 3)
@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("strategy", "settings"),
    some(
        [
            *((strategy, {}) for strategy in STRATEGIES),
            ("ddp", {"overlap": False}),
            ("ddp", {"reduction": "ordered"}),
            ("ddp", {"average_in_collective": False}),
            ("ddp", {"wire": "bfloat16"}),
            ("zero1", {"wire": "bfloat16"}),
            ("ddp", {"record": "off"}),
        ],
        most=3,
    ),
    ids=str,
)
def test_every_rank_names_parameter_rank_and_step(factor: float, strategy: str, settings: dict[str, Any]) -> None:
    settings = {"nonfinite": "raise", "bucket_cap_mb": ALL_IN_ONE, **settings}
    with training(Layers(), strategy, "SGD", **settings) as (ddp, optimizer):
        for step in range(BAD_STEP):
            train(ddp, optimizer, step)
        text = text_of(NonFiniteGradient, lambda: train(ddp, optimizer, BAD_STEP, factor=factor))
        assert text == f"{found(dist.get_world_size() - 1)}\n{REMEDY}"
        train(ddp, optimizer, BAD_STEP + 1)
        assert all(param.isfinite().all() for param in parameters(ddp).values())


@in_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_gradients_are_no_infinite_ones(dtype: torch.dtype) -> None:
    """Their sum, squares and norm overflow, and they do not themselves."""
    most = torch.finfo(dtype).max
    with training(Layers(dtype), "ddp", "SGD", nonfinite="raise", average_in_collective=False) as (ddp, optimizer):
        ddp.module.first.weight.register_hook(lambda grad: torch.full_like(grad, most))
        train(ddp, optimizer, 0)
        assert (ddp.module.first.weight.grad == most).all()


class Blocks(Layers):
    """The weights have several blocks of int8, and the biases less than one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 130), nn.Linear(130, 12)
        self.first.weight.register_hook(lambda grad: grad if self.factor is None else grad * self.factor)


@in_ranks(2, 3)
@pytest.mark.parametrize("factor", some([torch.inf, torch.nan], most=1))
@pytest.mark.parametrize("cap", [EACH_ALONE, ALL_IN_ONE])
@pytest.mark.parametrize("order", ["reverse", "observed"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_scales_tell_what_is_not_finite(strategy: str, order: Any, cap: float, factor: float) -> None:
    """Of a block with an infinite value; other parameters of its bucket are not named."""
    settings: dict[str, Any] = {"nonfinite": "raise", "bucket_cap_mb": cap, "order": order, "wire": "int8"}
    with training(Blocks(), strategy, "SGD", **settings) as (ddp, optimizer):
        for step in range(BAD_STEP):
            train(ddp, optimizer, step)
        text = text_of(NonFiniteGradient, lambda: train(ddp, optimizer, BAD_STEP, factor=factor))
        assert text.startswith(f"{WHAT.format('first.weight', f'rank {dist.get_world_size() - 1}')}\n")
        train(ddp, optimizer, BAD_STEP + 1)
        assert all(param.isfinite().all() for param in parameters(ddp).values())


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("name", ["first.bias", "last.weight"])
def test_a_bad_step_in_int8_is_skipped_whichever_parameter_is_bad(name: str, strategy: str) -> None:
    """A bias travels in full width in the same message."""
    with training(Blocks(), strategy, "SGD", nonfinite="skip", wire="int8", bucket_cap_mb=ALL_IN_ONE) as (ddp, optimizer):
        spoilt_now = []
        param = dict(ddp.module.named_parameters())[name]
        param.register_hook(lambda grad: grad * torch.inf if spoilt_now and dist.get_rank() == 1 else grad)
        for step in range(4):
            before = parameters(ddp)
            spoilt_now[:] = [step] if step == 2 else []
            train(ddp, optimizer, step)
            assert all(torch.equal(value, before[each]) for each, value in parameters(ddp).items()) == (step == 2)
        assert ddp.report().num_skipped == 1


# fp16 ends below 65520, and gradients are cast before they are added.
@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_what_overflows_on_a_narrow_wire_is_found(strategy: str) -> None:
    with training(Layers(), strategy, "SGD", nonfinite="raise", wire="float16") as (ddp, optimizer):
        for value in (65519.0, 65519.0, 65519.0, 65520.0):
            optimizer.zero_grad()
            mine = value if dist.get_rank() == 1 else 0.0
            hook = ddp.module.first.weight.register_hook(lambda grad, mine=mine: torch.full_like(grad, mine))
            (ddp(noise(5, 4)).sum() * 1e-3).backward()
            hook.remove()
            if value < 65520.0:
                optimizer.step()
        assert text_of(NonFiniteGradient, optimizer.step).startswith(found(1, step=3).split("\n")[0])


def state_of(optimizer: Any) -> Any:
    return copy.deepcopy(optimizer.state_dict())


def require_same_state(first: Any, second: Any) -> None:
    (ours, places), (theirs, other_places) = map(tree_flatten, (first, second))
    assert places == other_places
    assert all(torch.equal(mine, it) if isinstance(mine, Tensor) else mine == it for mine, it in zip(ours, theirs, strict=True))


@in_ranks(2, 3)
@pytest.mark.parametrize("optimizer_name", some(["SGD", "AdamW", "fused AdamW"], most=1))
@pytest.mark.parametrize("strategy", some(STRATEGIES, most=2))
def test_a_skipped_step_leaves_everything_as_it_was(strategy: str, optimizer_name: str) -> None:
    """Training with bad steps is training without them, to the bit, in parameters and in the optimizer's state."""
    # With one plan: rounding follows the plan where three ranks add up.
    settings = {"order": "reverse", "auto_tune": False, "reduction": "ordered", "nonfinite": "skip"}
    bad, results = (0, 3, 4), []
    for steps in (range(6), [1, 2, 5]):
        with training(Layers(), strategy, optimizer_name, **settings) as (ddp, optimizer):
            for step in steps:
                train(ddp, optimizer, step, factor=torch.inf if step in bad else None)
            assert ddp.report().num_skipped == len(steps) - 3
            results.append((parameters(ddp), state_of(optimizer)))
    require_same_state(*results)


def require_one_skipped(ddp: nn.Module, step: Callable[[int, float | None], object], optimizer: Any = None) -> None:
    for number in range(4):
        before = parameters(ddp), optimizer and state_of(optimizer)
        step(number, torch.nan if number == 2 else None)
        assert all(torch.equal(value, before[0][name]) == (number == 2) for name, value in parameters(ddp).items())
        if number == 2 and optimizer is not None:
            require_same_state(state_of(optimizer), before[1])
    assert ddp.report().num_skipped == 1


class Cached(torch.optim.Optimizer):
    """Steps parameters that it keeps outside of its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.kept:
            if param.grad is not None:
                param.add_(param.grad, alpha=-0.1)


@in_ranks(2)
def test_an_optimizer_that_keeps_its_own_list_of_parameters_skips_too() -> None:
    with wrapped(Layers(), nonfinite="skip") as ddp:
        optimizer = Cached(ddp.parameters())
        require_one_skipped(ddp, lambda step, factor: train(ddp, optimizer, step, factor=factor), optimizer)
        train(ddp, optimizer, 5, factor=torch.nan)
        assert not ddp.module.first.weight.grad.isfinite().any()  # it is there again


@in_ranks(4)
def test_all_ranks_of_a_mesh_skip_the_same_step() -> None:
    with hybrid(Layers(), "AdamW", nonfinite="skip", auto_tune=False) as (ddp, optimizer):
        require_one_skipped(ddp, lambda step, factor: train(ddp, optimizer, step, factor=factor), optimizer)


@in_ranks(2)
@pytest.mark.parametrize("optimizer_name", ["AdamW", "fused AdamW"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_what_a_scaler_deals_with_stays_its_own(policy: str, strategy: str, optimizer_name: str) -> None:
    with training(Layers(), strategy, optimizer_name, nonfinite=policy) as (ddp, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=100, backoff_factor=2.0**-20)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(1e3 * ddp(noise(5, 4, step=step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert (all(param.isfinite().all() for param in parameters(ddp).values()), ddp.report().num_skipped) == (True, 0)
    # The first step has overflowed, and the last one has not.
    assert (of_all_ranks(scales), scales[0], scales[-1]) == ([scales] * 2, 2.0**106, scales[-2])


STEPS: dict[str, Callable[[torch.optim.Optimizer, Any], object]] = {
    "by position": lambda optimizer, closure: optimizer.step(closure),
    "by name": lambda optimizer, closure: optimizer.step(closure=closure),
}


@in_ranks(2)
@pytest.mark.parametrize("way", STEPS)
def test_a_plain_step_with_a_closure_cannot_be_skipped(way: str) -> None:
    with wrapped(Layers(), nonfinite="skip") as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        assert text_of(PhaseError, lambda: STEPS[way](optimizer, lambda: backward(ddp, 0))) == (
            'nonfinite="skip" cannot be used with step(closure): the step has begun when the closure computes gradients.\n'
            f"  SGD, rank {dist.get_rank()}\n"
            '  Call the closure before step(), or use nonfinite="raise".'
        )


@in_ranks(2)
@pytest.mark.parametrize("way", STEPS)
def test_a_step_with_a_closure_raises_before_it_updates(way: str) -> None:
    with training(Layers(), "ddp", "SGD", nonfinite="raise", bucket_cap_mb=ALL_IN_ONE) as (ddp, optimizer):
        STEPS[way](optimizer, lambda: backward(ddp, 0))
        before = parameters(ddp)
        optimizer.zero_grad()
        text = text_of(NonFiniteGradient, lambda: STEPS[way](optimizer, lambda: backward(ddp, 1, factor=torch.inf)))
        assert text == f"{found(1, step=1)}\n{REMEDY}"
        require_equal(parameters(ddp), before)


@pytest.mark.deep
@in_ranks(2)
def test_a_sharded_step_with_a_closure_is_skipped() -> None:
    with training(Layers(), "zero1", nonfinite="skip") as (ddp, optimizer):

        def with_closure(step: int, factor: float | None) -> None:
            optimizer.zero_grad()
            optimizer.step(lambda: backward(ddp, step, factor=factor))

        require_one_skipped(ddp, with_closure, optimizer)


def zeros(_state, bucket):  # torch compares annotations, if there are any
    """Loses what has made the bucket infinite."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(torch.zeros_like(bucket.buffer()))
    return done


def spoilt(param: Tensor, *, rank: int = 1, factor: float = torch.inf) -> None:
    if dist.get_rank() == rank:
        param.register_hook(lambda grad: grad * factor)


def spoilt_between(layer: nn.Module, x: Tensor) -> Tensor:
    """The second part of the layer's gradients, which comes when their buckets have left, is not finite on rank 1."""
    x.register_hook(torch.zeros_like)
    inner = checkpoint(layer, x, use_reentrant=True)
    spoilt(inner)
    return checkpoint(layer, inner.tanh(), use_reentrant=True)


def loss_of_layers(ddp: Any) -> Tensor:
    spoilt(ddp.module.first.weight)
    return ddp(noise(5, 4)).square().mean()


def loss_of_two_branches(ddp: Any) -> Tensor:
    """Only rank 1 uses the second one, and badly; nobody uses the third one."""
    spoilt(ddp.module.layers[1].bias, factor=torch.nan)
    return ddp(noise(2, 4), (0, 1) if dist.get_rank() == 1 else (0,)).square().mean()


def loss_of_rows(ddp: Any, *, factor: float = torch.inf) -> Tensor:
    spoilt(ddp.module[0].weight, factor=factor)
    return ddp(torch.tensor([1, 2, 2])).square().sum()


def rows() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))


ONE, BRANCH = WHAT.format("first.weight", "rank 1"), WHAT.format("layers.1.bias", "rank 1")
# A model, the most MiB of a bucket, what is done before, its loss, what is found, and in which buckets.
FOUND: dict[str, tuple[Callable[[], nn.Module], float, Callable[[Any], object] | None, Callable[[Any], Tensor], str, str]] = {
    "all": (
        Layers,
        EACH_ALONE,
        None,
        lambda ddp: ddp(noise(5, 4)).square().mean() * (torch.inf if dist.get_rank() == 1 else 1.0),
        "the gradients of 'first.weight', 'first.bias', 'last.weight' and 1 more are not finite (NaN or Inf) on rank 1.",
        "0, 1, 2 and 1 more",
    ),
    "before a hook": (
        Layers,
        ALL_IN_ONE,
        lambda ddp: ddp.register_comm_hook(None, zeros),
        loss_of_layers,
        ONE,
        "0",
    ),
    "rows": (rows, ALL_IN_ONE, None, loss_of_rows, WHAT.format("0.weight", "rank 1"), "1"),
    "large rows": (rows, ALL_IN_ONE, None, partial(loss_of_rows, factor=1e9), "", ""),  # which do not travel in 16 bits
    "used by one rank": (Branches, ALL_IN_ONE, None, loss_of_two_branches, BRANCH, "0"),
    "late": (
        lambda: nn.Sequential(nn.Linear(4, 4), Applied(spoilt_between), nn.Linear(4, 4)),
        EACH_ALONE,
        None,
        lambda ddp: ddp(noise(3, 4)).sum(),
        "the gradients of '1.layer.weight', '1.layer.bias' are not finite (NaN or Inf) on some rank.",
        "2, 3",
    ),
}


@in_ranks(2)
@pytest.mark.parametrize("name", some(FOUND, most=2))
def test_what_is_not_finite_is_found_wherever_it_is(name: str) -> None:
    make, cap, before, loss, what, buckets = FOUND[name]
    wire = "float16" if name == "large rows" else None
    with wrapped(make(), nonfinite="raise", bucket_cap_mb=cap, order="reverse", wire=wire) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-9)
        if before is not None:
            before(ddp)
        loss(ddp).backward()
        if "used by one" in name:
            assert [param.grad is None for param in ddp.parameters()] == [False] * 4 + [True] * 2
        if what:
            number = int(name == "before a hook")  # the ranks have changed to the hook in one of its own
            assert text_of(NonFiniteGradient, optimizer.step) == f"{what}\n  synchronization {number}, bucket {buckets}\n{REMEDY}"
        else:
            optimizer.step()


@in_ranks(2)
@pytest.mark.parametrize("strategy", some(["ddp", "zero1"], most=1))
def test_looking_costs_no_collective(strategy: str) -> None:
    called = {}
    for policy in ("raise", "ignore"):
        with training(Layers(), strategy, nonfinite=policy, auto_tune=False, buffers="off") as (ddp, optimizer):
            for step in range(2):  # gradients are averaged as a whole, and the order is settled
                train(ddp, optimizer, step)
            with collectives() as called[policy]:
                for step in range(2, 4):
                    train(ddp, optimizer, step)
    assert called["raise"] == called["ignore"]


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_rank_alone_looks_when_it_steps(policy: str, strategy: str) -> None:
    model, config = Layers(), SyncConfig(strategy=strategy, nonfinite=policy)
    with alone() as mine, contextlib.closing(DistributedDataParallel(model, process_group=mine, config=config)) as ddp:
        optimizer = optimizer_for(ddp, strategy)

        def step(number: int, factor: float | None) -> None:
            optimizer.zero_grad()
            model.factor = factor
            ddp(noise(5, 4, step=number)).square().mean().backward()
            optimizer.step()

        if policy == "skip":
            require_one_skipped(ddp, step, optimizer)
        else:
            step(0, None)
            before = parameters(ddp)
            text = found(0).replace("synchronization 2, bucket 0", "one rank, when its optimizer steps")
            assert text_of(NonFiniteGradient, lambda: step(1, torch.nan)) == f"{text}\n{REMEDY}"
            require_equal(parameters(ddp), before)


@in_ranks(2)
@pytest.mark.parametrize(("policy", "has_mean"), [("raise", True), ("skip", False), ("skip", True)])
def test_a_step_inside_no_sync_looks_at_the_gradients_of_its_rank(policy: str, has_mean: bool) -> None:
    is_bad = dist.get_rank() == 1
    with training(Layers(), "ddp", "AdamW", nonfinite=policy, bucket_cap_mb=ALL_IN_ONE) as (ddp, optimizer):
        if has_mean:
            train(ddp, optimizer, 0, factor=torch.inf if policy == "skip" else None)  # says nothing of later steps
        before, state = parameters(ddp), state_of(optimizer)
        with ddp.no_sync():
            if is_bad and policy == "raise":
                assert text_of(NonFiniteGradient, lambda: train(ddp, optimizer, 1, factor=torch.nan)) == (
                    f"{WHAT.format('first.weight', 'rank 1')}\n  a step inside accumulate() or no_sync()\n"
                    "  This rank has not taken the step, which uses its own gradients. Look for the overflow there, or set "
                    'nonfinite="skip".'
                )
            else:
                train(ddp, optimizer, 1, factor=torch.nan)
        if is_bad:
            require_equal(parameters(ddp), before)
            require_same_state(state_of(optimizer), state)
        else:
            assert not torch.equal(parameters(ddp)["module.last.bias"], before["module.last.bias"])
        assert ddp.report().num_skipped == (policy == "skip") * (is_bad + has_mean)
        with ddp.no_sync():  # the next one has other gradients
            before = parameters(ddp)
            train(ddp, optimizer, 2)
        assert not torch.equal(parameters(ddp)["module.last.bias"], before["module.last.bias"])


@in_ranks(2)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_step_inside_no_sync_looks_at_the_mean_of_the_other_parameters_too(policy: str) -> None:
    """A bad mean is not judged yet when a backward inside no_sync() adds good gradients of another layer."""
    with wrapped(Branches(), nonfinite=policy, bucket_cap_mb=ALL_IN_ONE) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        loss_of_two_branches(ddp).backward()
        before = parameters(ddp)
        with ddp.no_sync():
            ddp(noise(2, 4), (0,)).sum().backward()
            if policy == "raise":
                what = WHAT.format("layers.1.bias", f"rank {dist.get_rank()}")
                assert text_of(NonFiniteGradient, optimizer.step).startswith(f"{what}\n  a step inside")
            else:
                optimizer.step()
        require_equal(parameters(ddp), before)
        assert ddp.report().num_skipped == (policy == "skip")


EXPERTS_RAISE = """the gradient of 'experts.0.bias' is not finite (NaN or Inf) on rank 3.
  synchronization {step}
  Ranks with other experts take the step: start from a checkpoint, and look for the overflow there."""


@pytest.mark.deep
@in_ranks(4, is_fresh=True)
def test_of_experts_every_rank_raises_for_others_have_taken_the_step() -> None:
    """The first expert of ranks 1 and 3 has a bad gradient on rank 3.

    Those that hold it raise at once, and the others when they next wait: nobody goes on with other dense parameters.
    """
    rank, texts = dist.get_rank(), []
    with wrapped_mixture(mixture(), reduction="native", nonfinite="raise") as (ddp, _, _):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        spoilt(ddp.module.experts["0"].bias, rank=3)
        mixture_loss(ddp, 3).backward()
        for _ in range(2):
            try:
                optimizer.step()
                mixture_loss(ddp, 4).backward()
            except NonFiniteGradient as error:
                texts.append(str(error))
    at_once = EXPERTS_RAISE.format(step="0, bucket 0")
    later = [text for text in texts if text != at_once]
    assert later == [EXPERTS_RAISE.format(step=f"1, rank {rank}")] * len(later)
    assert texts[0] == at_once if rank in (1, 3) else later


def steps_in_join(steps: list[int], bad: int | None) -> Parameters:
    """The first rank has data for two steps only; `bad` is one in which the last rank's gradient is infinite."""
    with training(Layers(), "ddp", "AdamW", nonfinite="skip") as (ddp, optimizer):
        with ddp.join():
            for step in steps[: 2 if dist.get_rank() == 0 else None]:
                train(ddp, optimizer, step, factor=torch.inf if step == bad else None)
        return parameters(ddp)


@pytest.mark.deep
@in_ranks(2, 3)
def test_where_a_rank_has_run_out_of_data_the_others_skip_a_step() -> None:
    require_equal(steps_in_join([0, 1, 2, 3, 4], 3), steps_in_join([0, 1, 2, 4], None))


EVERY: dict[str, Any] = {"check_replicas_every": 1}
WRITES = "  Look for what writes to parameters, or steps, on some ranks only; broadcast_parameters() makes them equal again."


def spoil(param: Tensor) -> None:
    param.detach().add_(1.0)


def step_of(ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
    ddp(noise(4, 6, step=step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_and_spoil(ddp: nn.Module, optimizer: torch.optim.Optimizer, other: int | None, *, num_steps: int = 9) -> None:
    """In the forward of step 3 the rank `other` writes to two parameters, to one of them the last bit of an element."""
    for step in range(num_steps):
        ddp.steps_begun = step
        if step == 3 and dist.get_rank() == other:
            ddp.wait()
            ddp.module[2].weight.detach().view(torch.int32).view(-1)[5].add_(1)
            spoil(ddp.module[2].bias)
        step_of(ddp, optimizer, step)


def require_found(ddp: nn.Module, optimizer: Any, other: int, *, ranks: str, step: int) -> None:
    assert text_of(ReplicaMismatch, lambda: train_and_spoil(ddp, optimizer, other)) == (
        f"parameter '2.weight' has other values on {ranks}.\n  synchronization {step}; 2 of 4 parameters differ\n{WRITES}"
    )
    assert ddp.steps_begun == step


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("strategy", "every", "step"), some([("ddp", 1, 3), ("ddp", 3, 5), ("zero1", 1, 3), ("zero2", 1, 3)], most=2)
)
def test_the_first_parameter_the_ranks_and_the_step_are_named(strategy: str, every: int, step: int) -> None:
    others = ", 2" if dist.get_world_size() == 3 else ""
    with training(MLP.model(), strategy, "SGD", check_replicas_every=every) as (ddp, optimizer):
        require_found(ddp, optimizer, 1, ranks=f"rank 1 than on rank 0{others}", step=step)


@pytest.mark.deep
@in_ranks(4)
def test_rows_of_a_mesh_are_compared_too() -> None:
    """A rank writes to what its row then gathers from it: the other row has other values."""
    with training(MLP.model(), "hybrid", "SGD", **EVERY) as (ddp, optimizer):
        require_found(ddp, optimizer, 3, ranks="rank 3 than on rank 0, 1, 2", step=3)


@pytest.mark.deep
@in_ranks(4)
def test_experts_are_compared_among_ranks_that_have_the_same() -> None:
    is_wrong = pytest.raises(
        ReplicaMismatch, match=r"^parameter 'experts\.0\.bias' has other values on rank 3 than on rank 1\.\n"
    )
    with wrapped_mixture(mixture(), reduction="native", check_replicas_every=2) as (ddp, _, _):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with is_wrong if dist.get_rank() % 2 else contextlib.nullcontext():
            for step in range(4):
                optimizer.zero_grad()
                if (dist.get_rank(), step) == (3, 3):
                    spoil(ddp.module.experts["0"].bias)
                mixture_loss(ddp, step).backward()
                optimizer.step()


@pytest.mark.deep
@in_ranks(2, 3, is_fresh=True, timeout_s=20.0)
@pytest.mark.parametrize(("num_batches", "spoils"), some([(3, False), (2, True), (5, True)], most=1))
def test_in_a_join_ranks_with_data_are_compared_and_the_others_are_told(num_batches: int, spoils: bool) -> None:
    """Rank 0 has so many batches, and keeps its parameters until the others are through; in step 4 the last rank writes."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    peers = [str(it) for it in range(last) if it > 0 or num_batches > 4]
    is_found = spoils and peers != []
    with wrapped(MLP.model(), **EVERY) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def train_jointly() -> None:
            with ddp.join():
                for step in range(num_batches if rank == 0 else 6):
                    if is_found and (rank, step) == (last, 4):
                        spoil(ddp.module[0].bias)
                    step_of(ddp, optimizer, step)

        if is_found:
            assert text_of(ReplicaMismatch, train_jointly).startswith(
                f"parameter '0.bias' has other values on rank {last} than on rank {', '.join(peers)}.\n"
            )
        else:
            train_jointly()
            step_of(ddp, optimizer)
