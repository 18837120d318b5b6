"""Gradients that are infinite or no number: named alike on every rank, and a step that all ranks skip."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dist.test_drop_in_lifetime import step_in_backward
from dist.test_events import collectives
from dist.test_late_arrivals import Layers as PartsOfLayers
from support.errors import text_of
from support.hybrid import hybrid
from support.mixture import MATCH, experts_group, mixture
from support.mixture import loss as mixture_loss
from support.models import Branches, noise
from support.ranks import Ranks, in_ranks
from support.sharded import Parameters, optimizer_for, parameters, require_equal, training
from undertow import (
    ConfigError,
    DistributedDataParallel,
    ExpertGroup,
    NonFiniteGradient,
    PhaseError,
    ShardedOptimizer,
    SyncConfig,
)

EACH_ALONE = 1e-6  # MiB: a bucket for each parameter
BAD_STEP = 2
REMEDY = '  No rank has taken the step. Look for what has overflowed there, or set nonfinite="skip".'


class Layers(nn.Module):
    """Two layers; the gradient of the first one's weight is spoilt where it is told to be."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 3, dtype=dtype), nn.Linear(3, 2, dtype=dtype)
        self.factor: float | None = None
        self.first.weight.register_hook(lambda grad: grad if self.factor is None else grad * self.factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.to(self.first.weight.dtype)).tanh())


def layers(dtype: torch.dtype = torch.float32) -> Layers:
    torch.manual_seed(5)
    return Layers(dtype)


def backward(ddp: nn.Module, step: int, *, factor: float | None = None) -> None:
    """Of this rank's loss; the last rank's gradient is multiplied by `factor`."""
    ddp.module.factor = factor if dist.get_rank() == dist.get_world_size() - 1 else None
    ddp(noise(5, 4, step=step)).square().mean().backward()


def found(rank: int, *, step: int = BAD_STEP, bucket: str = "3") -> str:
    return f"the gradient of 'first.weight' is infinite or no number on rank {rank}.\n  synchronisation {step}, bucket {bucket}"


def raised(factor: float, strategy: str, eager: bool, settings: dict[str, Any]) -> str:
    """What a step says where one gradient is not finite on one rank; the next one may be tried."""
    with training(layers(), strategy, "SGD", eager=eager, nonfinite="raise", **settings) as (ddp, optimizer):
        for step in range(BAD_STEP):
            optimizer.zero_grad()
            backward(ddp, step)
            optimizer.step()
        optimizer.zero_grad()
        backward(ddp, BAD_STEP, factor=factor)
        text = text_of(NonFiniteGradient, optimizer.step)
        optimizer.zero_grad()
        backward(ddp, BAD_STEP + 1)
        optimizer.step()
        assert all(param.isfinite().all() for param in parameters(ddp).values())
    return text


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_every_rank_names_the_parameter_the_rank_and_the_step(ranks: Ranks, strategy: str, factor: float) -> None:
    texts = ranks.run(raised, factor, strategy, False, {"bucket_cap_mb": 25.0})
    assert texts == [f"{found(ranks.num_ranks - 1, bucket='0')}\n{REMEDY}"] * ranks.num_ranks


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": False},
        {"reduction": "ordered"},
        {"average_in_collective": False},
        {"op": "sum"},
        {"wire_dtype": "bfloat16"},
        {"record": "off"},
    ],
    ids=str,
)
def test_whatever_way_gradients_travel(ranks: Ranks, settings: dict[str, Any]) -> None:
    texts = ranks.run(raised, torch.inf, "ddp", False, {"bucket_cap_mb": 25.0, **settings})
    assert texts == [f"{found(ranks.num_ranks - 1, bucket='0')}\n{REMEDY}"] * ranks.num_ranks


def test_an_eager_step_leaves_the_bucket_as_it_is(ranks: Ranks) -> None:
    texts = ranks.run(raised, torch.nan, "zero1", True, {"bucket_cap_mb": 25.0})
    partly = "  Other buckets are updated already: start from a checkpoint, and look for what has overflowed there."
    assert texts == [f"{found(ranks.num_ranks - 1, bucket='0')}\n{partly}"] * ranks.num_ranks


def several() -> tuple[str, str]:
    """All gradients of rank 1 in one step, some of two ranks in the next."""
    with training(layers(), "ddp", nonfinite="raise", bucket_cap_mb=EACH_ALONE, order="reverse") as (ddp, optimizer):
        scale = torch.inf if dist.get_rank() == 1 else 1.0
        (ddp(noise(5, 4)).square().mean() * scale).backward()
        first = text_of(NonFiniteGradient, optimizer.step)
        optimizer.zero_grad()
        ddp.module.factor = torch.nan
        ddp(noise(5, 4)).square().mean().backward()
        return first, text_of(NonFiniteGradient, optimizer.step)


def test_several_parameters_and_ranks_are_all_named(two_ranks: Ranks) -> None:
    all_of_one = (
        "the gradients of 'first.weight', 'first.bias', 'last.weight' and 1 more are infinite or no number on rank 1.\n"
        f"  synchronisation 0, bucket 0, 1, 2 and 1 more\n{REMEDY}"
    )
    one_of_all = f"the gradient of 'first.weight' is infinite or no number on rank 0, 1.\n  synchronisation 1, bucket 3\n{REMEDY}"
    assert two_ranks.run(several) == [(all_of_one, one_of_all)] * 2


def large_and_finite(dtype: torch.dtype) -> bool:
    """Gradients whose sum, squares and norm overflow, and which do not themselves."""
    with training(layers(dtype), "ddp", "SGD", nonfinite="raise", average_in_collective=False) as (ddp, optimizer):
        ddp.module.first.weight.register_hook(lambda grad: torch.full_like(grad, torch.finfo(dtype).max))
        backward(ddp, 0)
        optimizer.step()
        return bool((ddp.module.first.weight.grad == torch.finfo(dtype).max).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_gradients_are_no_infinite_ones(two_ranks: Ranks, dtype: torch.dtype) -> None:
    assert two_ranks.run(large_and_finite, dtype) == [True, True]


def narrow_wire(strategy: str, settings: dict[str, Any], value: float) -> str:
    with training(layers(), strategy, "SGD", nonfinite="raise", wire_dtype="float16", **settings) as (ddp, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            ddp.module.first.weight.register_hook(lambda grad: torch.full_like(grad, value if dist.get_rank() == 1 else 0.0))
            (ddp(noise(5, 4)).sum() * 1e-3).backward()
            try:
                optimizer.step()
            except NonFiniteGradient as error:
                return f"step {step}: {str(error).splitlines()[0]}"
    return ""


# fp16 ends below 65520. A mean over two ranks is divided before it is cast; shards and ordered sums are not.
@pytest.mark.parametrize(
    ("strategy", "settings", "fits", "overflows"),
    [("ddp", {}, 2 * 65519.0, 2 * 65520.0), ("zero1", {}, 65519.0, 65520.0), ("ddp", {"reduction": "ordered"}, 65519.0, 65520.0)],
    ids=["ddp", "zero1", "ordered"],
)
def test_what_overflows_on_a_narrow_wire_is_found(
    two_ranks: Ranks, strategy: str, settings: dict[str, Any], fits: float, overflows: float
) -> None:
    assert two_ranks.run(narrow_wire, strategy, settings, fits) == ["", ""]
    text = "the gradient of 'first.weight' is infinite or no number on rank 1."
    assert [said.split(": ")[1] for said in two_ranks.run(narrow_wire, strategy, settings, overflows)] == [text] * 2


def plain_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = optimizer.full_state_dict() if isinstance(optimizer, ShardedOptimizer) else optimizer.state_dict()
    return copy.deepcopy(state)


def require_same_state(first: Any, second: Any) -> None:
    if isinstance(first, Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            require_same_state(first[key], second[key])
    elif isinstance(first, list | tuple):
        for one, other in zip(first, second, strict=True):
            require_same_state(one, other)
    else:
        assert first == second


def skipped(strategy: str, optimizer_name: str, settings: dict[str, Any], bad: tuple[int, ...]) -> None:
    """Training with bad steps is training without them, to the bit, in parameters and in the optimizer's state."""
    results: list[tuple[Parameters, Any]] = []
    for is_spoilt in (True, False):
        with training(layers(), strategy, optimizer_name, **settings, nonfinite="skip") as (ddp, optimizer):
            for step in range(6):
                if step in bad and not is_spoilt:
                    continue
                optimizer.zero_grad()
                backward(ddp, step, factor=torch.inf if step in bad else None)
                optimizer.step()
            assert ddp.report(show=False).num_skipped == (len(bad) if is_spoilt else 0)
            results.append((parameters(ddp), plain_state(optimizer)))
    (spoilt, spoilt_state), (clean, clean_state) = results
    require_equal(spoilt, clean)
    require_same_state(spoilt_state, clean_state)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "fused AdamW"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_skipped_step_leaves_everything_as_it_was(ranks: Ranks, strategy: str, optimizer: str) -> None:
    # With one plan: rounding follows the plan where three ranks add up.
    ranks.run(skipped, strategy, optimizer, {"order": "reverse", "auto_tune": False, "reduction": "ordered"}, (0, 3, 4))


@in_ranks(4)
def test_all_ranks_of_a_mesh_skip_the_same_step() -> None:
    with hybrid(layers(), "AdamW", nonfinite="skip", auto_tune=False) as (ddp, optimizer):
        for step in range(5):
            before = parameters(ddp)
            state = plain_state(optimizer)
            optimizer.zero_grad()
            backward(ddp, step, factor=torch.nan if step == 3 else None)
            optimizer.step()
            if step == 3:
                require_equal(parameters(ddp), before)
                require_same_state(plain_state(optimizer), state)
        assert ddp.report(show=False).num_skipped == 1


def accumulated(strategy: str, when: int, later: bool, settings: dict[str, Any]) -> list[int]:
    """Whether steps of three micro-batches were skipped, where one of the second step's is bad; the last one communicates."""
    with training(layers(), strategy, nonfinite="skip", **settings) as (ddp, optimizer):
        num_skipped = []
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(3):
                factor = torch.inf if (step, micro) == (1, when) else None
                with ddp.no_sync() if micro < 2 and not later else contextlib.nullcontext():
                    backward(ddp, 3 * step + micro, factor=factor)
            optimizer.step()
            num_skipped.append(ddp.report(show=False).num_skipped)
        assert all(param.isfinite().all() for param in parameters(ddp).values())
        return num_skipped


@pytest.mark.parametrize("settings", [{}, {"op": "sum"}], ids=["mean", "sum"])
@pytest.mark.parametrize("later", [False, True], ids=["no_sync", "each synchronises"])
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_bad_micro_batch_spoils_its_step_and_no_other(
    two_ranks: Ranks, strategy: str, when: int, later: bool, settings: dict[str, Any]
) -> None:
    assert two_ranks.run(accumulated, strategy, when, later, settings) == [[0, 1, 1, 1]] * 2


def scaled(policy: str, strategy: str, fused: bool) -> list[float]:
    """Under a GradScaler whose scale is too large at first: the scale behind every step."""
    config = SyncConfig(strategy=strategy, nonfinite=policy)
    with contextlib.closing(DistributedDataParallel(layers(), config=config)) as ddp:
        settings: dict[str, Any] = {"lr": 0.01, "fused": fused}
        optimizer: Any = (
            torch.optim.AdamW(ddp.parameters(), **settings)
            if strategy == "ddp"
            else ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=100, backoff_factor=2.0**-20)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            scaler.scale(1e3 * ddp(noise(5, 4, step=step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert all(param.isfinite().all() for param in parameters(ddp).values())
        assert ddp.report(show=False).num_skipped == 0
        return scales


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("policy", ["raise", "skip", "warn"])
def test_what_a_scaler_deals_with_stays_its_own(two_ranks: Ranks, policy: str, strategy: str, fused: bool) -> None:
    first, second = two_ranks.run(scaled, policy, strategy, fused)
    assert first == second
    assert first[0] == 2.0**106  # the first step has overflowed
    assert first[-1] == first[-2]  # and the last one has not


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    handler = Heard()
    logging.getLogger("undertow").addHandler(handler)
    try:
        yield handler.texts
    finally:
        logging.getLogger("undertow").removeHandler(handler)


def told(policy: str) -> list[str]:
    with heard() as texts, training(layers(), "ddp", "SGD", nonfinite=policy, bucket_cap_mb=25.0) as (ddp, optimizer):
        others = torch.optim.SGD(ddp.module.last.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            backward(ddp, step, factor=torch.inf)
            if policy == "warn":
                with torch.no_grad():
                    ddp.module.first.weight.grad.zero_()  # that training goes on does not depend on us
            optimizer.step()
            others.step()
    return texts


@pytest.mark.parametrize(("policy", "follows"), [("warn", "The step is taken."), ("skip", "The step is skipped on every rank.")])
def test_rank_0_tells_of_the_first_the_second_and_the_fourth_time(two_ranks: Ranks, policy: str, follows: str) -> None:
    texts, others = two_ranks.run(told, policy)

    def line(step: int, times: str = "") -> str:
        what, where = found(1, step=step, bucket="0").split("\n")
        return f"{what} {follows}{times}\n{where}"

    assert texts == [line(0), line(1, " Steps like this so far: 2."), line(3, " Steps like this so far: 4.")]
    assert others == []


def unlike(make: Callable[[nn.Module], torch.optim.Optimizer], step: Callable[[torch.optim.Optimizer, Any], object]) -> str:
    ddp = DistributedDataParallel(layers(), config=SyncConfig(nonfinite="skip"))
    with contextlib.closing(ddp):
        optimizer = make(ddp)
        return text_of(PhaseError, lambda: step(optimizer, lambda: ddp(noise(5, 4)).sum().backward()))


def sgd(ddp: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.1)


def by_position(optimizer: torch.optim.Optimizer, closure: Any) -> object:
    return optimizer.step(closure)


def by_name(optimizer: torch.optim.Optimizer, closure: Any) -> object:
    return optimizer.step(closure=closure)


@pytest.mark.parametrize("step", [by_position, by_name])
def test_a_plain_step_with_a_closure_cannot_be_skipped(two_ranks: Ranks, step: Any) -> None:
    for rank, text in enumerate(two_ranks.run(unlike, sgd, step)):
        assert text == (
            'nonfinite="skip" does not go with step(closure): the step has begun when the closure brings gradients.\n'
            f"  SGD, rank {rank}\n"
            '  Call the closure before step(), or use nonfinite="raise".'
        )


def raised_in_closure(step: Any) -> str:
    with training(layers(), "ddp", "SGD", nonfinite="raise", bucket_cap_mb=25.0) as (ddp, optimizer):
        step(optimizer, lambda: backward(ddp, 0))
        before = parameters(ddp)
        optimizer.zero_grad()
        text = text_of(NonFiniteGradient, lambda: step(optimizer, lambda: backward(ddp, 1, factor=torch.inf)))
        require_equal(parameters(ddp), before)
    return text


@pytest.mark.parametrize("step", [by_position, by_name])
def test_a_step_with_a_closure_raises_before_it_updates(two_ranks: Ranks, step: Any) -> None:
    assert two_ranks.run(raised_in_closure, step) == [f"{found(1, step=1, bucket='0')}\n{REMEDY}"] * 2


def sharded_closure() -> int:
    with training(layers(), "zero1", nonfinite="skip") as (ddp, optimizer):
        for step in range(4):
            optimizer.zero_grad()
            before = parameters(ddp)
            optimizer.step(lambda step=step: backward(ddp, step, factor=torch.inf if step == 2 else None))
            if step == 2:
                require_equal(parameters(ddp), before)
        return ddp.report(show=False).num_skipped


def test_a_sharded_step_with_a_closure_is_skipped(two_ranks: Ranks) -> None:
    assert two_ranks.run(sharded_closure) == [1, 1]


def eager_skip() -> str:
    with contextlib.closing(DistributedDataParallel(layers(), config=SyncConfig(nonfinite="skip"))) as ddp:
        return text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1, eager=True))


def test_an_eager_step_cannot_be_skipped(two_ranks: Ranks) -> None:
    assert (
        two_ranks.run(eager_skip)
        == [
            'nonfinite="skip" does not go with eager=True: buckets are updated before the last one is known to be finite.\n'
            "  ShardedOptimizer\n"
            '  Leave eager=True out, or use nonfinite="raise".'
        ]
        * 2
    )


def with_hook() -> str:
    with training(layers(), "ddp", nonfinite="raise", bucket_cap_mb=25.0) as (ddp, optimizer):

        def zeros(_state, bucket):  # torch compares annotations, if there are any
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(torch.zeros_like(bucket.buffer()))  # loses what has made it infinite
            return done

        ddp.register_comm_hook(None, zeros)
        backward(ddp, 0, factor=torch.inf)
        return text_of(NonFiniteGradient, optimizer.step)


def test_what_a_communication_hook_gets_is_looked_at(two_ranks: Ranks) -> None:
    assert two_ranks.run(with_hook) == [f"{found(1, step=0, bucket='0')}\n{REMEDY}"] * 2


def with_weights() -> str:
    with training(layers(), "ddp", nonfinite="raise", bucket_cap_mb=25.0) as (ddp, optimizer):
        ddp.weight(5)
        backward(ddp, 0, factor=torch.inf)
        return text_of(NonFiniteGradient, optimizer.step)


def test_weighted_gradients_are_looked_at(two_ranks: Ranks) -> None:
    assert two_ranks.run(with_weights) == [f"{found(1, step=0, bucket='0')}\n{REMEDY}"] * 2


def sparse_rows(factor: float, settings: dict[str, Any]) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 2))
    with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(nonfinite="raise", **settings))) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-9)
        if dist.get_rank() == 1:
            model[0].weight.register_hook(lambda grad: grad * factor)
        ddp(torch.tensor([1, 2, 2])).square().sum().backward()
        try:
            optimizer.step()
        except NonFiniteGradient as error:
            return str(error).split(",")[0]
        return ""


def test_a_sparse_gradient_is_looked_at(two_ranks: Ranks) -> None:
    text = "the gradient of '0.weight' is infinite or no number on rank 1.\n  synchronisation 0"
    assert two_ranks.run(sparse_rows, torch.inf, {}) == [text] * 2
    assert two_ranks.run(sparse_rows, 1e9, {"wire_dtype": "float16"}) == [""] * 2  # its rows do not travel in it


def unused_here(bucket_cap_mb: float) -> tuple[str, list[bool]]:
    """Only rank 1 uses the second layer, and badly; nobody uses the third one."""
    torch.manual_seed(2)
    config = SyncConfig(nonfinite="raise", bucket_cap_mb=bucket_cap_mb, order="reverse")
    with contextlib.closing(DistributedDataParallel(Branches(), config=config)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.module.layers[1].bias.register_hook(lambda grad: grad * torch.nan)
        ddp(noise(2, 4), (0, 1) if dist.get_rank() == 1 else (0,)).square().mean().backward()
        are_none = [param.grad is None for param in ddp.parameters()]
        return text_of(NonFiniteGradient, optimizer.step), are_none


@pytest.mark.parametrize(("bucket_cap_mb", "bucket"), [(25.0, 0), (EACH_ALONE, 2)])
def test_parameters_that_some_ranks_or_all_do_not_use(two_ranks: Ranks, bucket_cap_mb: float, bucket: int) -> None:
    text = f"the gradient of 'layers.1.bias' is infinite or no number on rank 1.\n  synchronisation 0, bucket {bucket}\n{REMEDY}"
    assert two_ranks.run(unused_here, bucket_cap_mb) == [(text, [False] * 4 + [True] * 2)] * 2


def collectives_of_two_steps(policy: str, strategy: str) -> list[str]:
    with training(layers(), strategy, nonfinite=policy, auto_tune=False, buffers="off") as (ddp, optimizer):

        def train(step: int) -> None:
            optimizer.zero_grad()
            backward(ddp, step)
            optimizer.step()

        train(0)  # gradients are averaged as a whole, and the order is settled
        train(1)
        with collectives() as called:
            train(2)
            train(3)
    return called


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_looking_costs_no_collective(two_ranks: Ranks, strategy: str) -> None:
    assert two_ranks.run(collectives_of_two_steps, "raise", strategy) == two_ranks.run(
        collectives_of_two_steps, "ignore", strategy
    )


def alone(policy: str, strategy: str) -> tuple[str, int]:
    """Every rank by itself; gradients of the second step are bad."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine = groups[dist.get_rank()]
    config = SyncConfig(strategy=strategy, nonfinite=policy)
    text, model = "", layers()
    with contextlib.closing(DistributedDataParallel(model, process_group=mine, config=config)) as ddp:
        optimizer = optimizer_for(ddp, strategy)
        for step in range(3):
            before = parameters(ddp)
            optimizer.zero_grad()
            model.factor = torch.nan if step == 1 else None
            ddp(noise(5, 4, step=step)).square().mean().backward()
            try:
                optimizer.step()
            except NonFiniteGradient as error:
                text = str(error)
            if step == 1:
                require_equal(parameters(ddp), before)
        num_skipped = ddp.report(show=False).num_skipped
    dist.destroy_process_group(mine)
    return text, num_skipped


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_rank_alone_looks_when_it_steps(two_ranks: Ranks, strategy: str) -> None:
    text = f"the gradient of 'first.weight' is infinite or no number on rank 0.\n  one rank, when its optimizer steps\n{REMEDY}"
    assert two_ranks.run(alone, "raise", strategy) == [(text, 0)] * 2
    assert two_ranks.run(alone, "skip", strategy) == [("", 1)] * 2


@in_ranks(2)
def test_optimizers_in_backward_are_skipped() -> None:
    """Optimizers that torch has put on parameters, which step when their gradients are the mean, are skipped too."""
    model = layers()
    step_in_backward(model, lr=0.1, momentum=0.9)
    with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(nonfinite="skip"))) as ddp:
        for step in range(4):
            before = parameters(ddp)
            backward(ddp, step, factor=torch.nan if step == 2 else None)
            after = parameters(ddp)
            assert all(torch.equal(before[name], after[name]) == (step == 2) for name in before)
        assert ddp.report(show=False).num_skipped == 1


def spoilt_between(layer: nn.Module, x: Tensor) -> Tensor:
    """The second part of the layer's gradients, which comes when their buckets have left, is not finite on rank 1."""
    x.register_hook(torch.zeros_like)
    inner = checkpoint(layer, x, use_reentrant=True)
    if dist.get_rank() == 1:
        inner.register_hook(lambda grad: grad * torch.inf)
    return checkpoint(layer, inner.tanh(), use_reentrant=True)


def late_part() -> str:
    config = SyncConfig(nonfinite="raise", bucket_cap_mb=EACH_ALONE, order="reverse")
    with contextlib.closing(DistributedDataParallel(PartsOfLayers(spoilt_between), config=config)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp(noise(3, 4)).sum().backward()
        return text_of(NonFiniteGradient, optimizer.step)


def test_a_part_that_comes_late_is_looked_at(two_ranks: Ranks) -> None:
    what = "the gradients of 'middle.weight', 'middle.bias' are infinite or no number on some rank."
    assert two_ranks.run(late_part) == [f"{what}\n  synchronisation 0, bucket 2, 3\n{REMEDY}"] * 2


def experts_raise() -> list[str]:
    """The first expert of ranks 1 and 3 has a bad gradient on rank 3."""
    with experts_group() as group:
        config = SyncConfig(experts=(ExpertGroup(match=MATCH, process_group=group, divisor=4),), nonfinite="raise")
        ddp = DistributedDataParallel(mixture(), config=config)
        with contextlib.closing(ddp):
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            if dist.get_rank() == 3:
                ddp.module.experts["0"].bias.register_hook(lambda grad: grad * torch.inf)
            mixture_loss(ddp, 3).backward()
            texts = []
            for _ in range(2):
                try:
                    optimizer.step()
                    mixture_loss(ddp, 4).backward()
                    texts.append("")
                except NonFiniteGradient as error:
                    texts.append(str(error))
            return texts


EXPERTS_RAISE = """the gradient of 'experts.0.bias' is infinite or no number on rank 3.
  synchronisation {step}
  Ranks with other experts take the step: start from a checkpoint, and look for what has overflowed there."""


def test_of_experts_every_rank_raises_for_others_have_taken_the_step(fresh_four: Ranks) -> None:
    """Those that hold them at once, and the others when they next wait: nobody goes on with other dense parameters."""
    at_once = EXPERTS_RAISE.format(step="0, bucket 0")
    for rank, texts in enumerate(fresh_four.run(experts_raise)):
        later = [text for text in texts if text not in ("", at_once)]
        assert later == [EXPERTS_RAISE.format(step=f"1, rank {rank}")] * len(later)
        if rank in (1, 3):
            assert texts[0] == at_once
        else:
            assert later


def steps_in_join(strategy: str, steps: range | list[int], bad: int | None) -> Parameters:
    """The first rank has data for two steps only; `bad` is one in which the last rank's gradient is infinite."""
    with training(layers(), strategy, "AdamW", nonfinite="skip") as (ddp, optimizer):
        with ddp.join():
            for step in list(steps)[: 2 if dist.get_rank() == 0 else None]:
                optimizer.zero_grad()
                backward(ddp, step, factor=torch.inf if step == bad else None)
                optimizer.step()
        return parameters(ddp)


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_a_rank_that_has_run_out_of_data_skips_the_step_of_the_others(strategy: str) -> None:
    require_equal(steps_in_join(strategy, range(5), 3), steps_in_join(strategy, [0, 1, 2, 4], None))
