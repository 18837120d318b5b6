"""Steps on gradients that were only accumulated, or that no forward of the wrapper precedes: they are averaged first."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.naive import naive_mean
from support.ranks import in_ranks
from undertow import DistributedDataParallel, PhaseError, PlanMismatch, ShardedOptimizer, SyncConfig, attach

SHARDS = [False, True]
LATE = "an optimizer steps on gradients that were not averaged"


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def loss(model: Callable[[Tensor], Tensor], step: int) -> Tensor:
    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))).square().sum()


@contextlib.contextmanager
def not_told() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", LATE)
        yield


@contextlib.contextmanager
def models(*, is_sharded: bool, **settings: Any) -> Iterator[tuple[Any, Any, nn.Module, torch.optim.Optimizer]]:
    """The wrapped model and its optimizer, and the same without Undertow."""
    bare = layers()
    config = SyncConfig(bucket_cap_mb=1e-6, **settings)
    with not_told(), contextlib.closing(DistributedDataParallel(layers(), config=config)) as ddp:
        sgd = torch.optim.SGD
        ours = ShardedOptimizer(sgd, ddp, lr=0.1, momentum=0.5) if is_sharded else sgd(ddp.parameters(), lr=0.1, momentum=0.5)
        yield ddp, ours, bare, sgd(bare.parameters(), lr=0.1, momentum=0.5)


def require_same(ddp: Any, bare: nn.Module) -> None:
    ddp.wait()
    assert all(map(torch.equal, ddp.module.parameters(), bare.parameters()))


def window(ddp: Any, bare: nn.Module, step: int, *, of: Any = None) -> None:
    """A window that ends before a backward that synchronizes."""
    for number in (2 * step, 2 * step + 1):
        with ddp.no_sync():
            loss(of or ddp, number).backward()
        loss(bare, number).backward()


def common_step(ddp: Any, ours: Any, bare: nn.Module, plain: Any, step: int) -> None:
    loss(ddp, 100 + step).backward()
    loss(bare, 100 + step).backward()
    naive_mean(bare)
    for optimizer in (ours, plain):
        optimizer.step()
        optimizer.zero_grad()
    require_same(ddp, bare)


ACCUMULATED = (
    "an optimizer steps on gradients that were not averaged: all their backwards ran inside accumulate() or no_sync(). They "
    "are averaged now, before the step, and no backward hides that. A norm that was clipped earlier was this rank's own.\n"
    "  {}, synchronization {}, rank {}\n"
    "  Run the last backward of a step outside of it, also at the end of an epoch: is_last = (i + 1) % n == 0 or i + 1 == "
    "len(loader). If each rank is to step on its own gradients, step inside of it, with a plain optimizer."
)
BARE = (
    "an optimizer steps on gradients that were not averaged: no training forward of the wrapper preceded their backward. They "
    "are averaged now, before the step, and no backward hides that. A norm that was clipped earlier was this rank's own.\n"
    "  {}, synchronization {}, rank {}\n"
    "  Call the wrapper, not model.module or a method of it; after attach(), call the module itself."
)


@in_ranks(2)
@pytest.mark.parametrize("is_sharded", SHARDS)
@pytest.mark.parametrize("text", [ACCUMULATED, BARE], ids=["accumulated", "of the bare module"])
def test_a_step_averages_first_and_says_so_once_for_each_reason(is_sharded: bool, text: str) -> None:
    other = BARE if text == ACCUMULATED else ACCUMULATED
    with (
        models(is_sharded=is_sharded) as (ddp, ours, bare, plain),
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        common_step(ddp, ours, bare, plain, 0)
        for step, kind in enumerate((text, text, other, text, other), start=1):
            if kind == BARE:
                loss(ddp.module, step).backward()
                loss(bare, step).backward()
            else:
                window(ddp, bare, step)
            naive_mean(bare)
            for optimizer in (ours, plain):
                optimizer.step()
                optimizer.zero_grad()
            require_same(ddp, bare)
        common_step(ddp, ours, bare, plain, 6)
    name, rank = type(ours).__name__, dist.get_rank()
    assert [str(warning.message) for warning in seen] == [text.format(name, 1, rank), other.format(name, 3, rank)]


@in_ranks(2)
def test_a_sharded_optimizer_cannot_step_inside_and_can_afterwards() -> None:
    with models(is_sharded=True) as (ddp, ours, bare, plain):
        for step in (0, 1):  # before its first step too
            window(ddp, bare, step)
            with ddp.no_sync():
                before = copy.deepcopy(ddp.module.state_dict())
                assert text_of(PhaseError, ours.step) == (
                    "a sharded optimizer steps inside accumulate() or no_sync(), on gradients that are not averaged: each shard "
                    "would move by its rank's own gradient.\n"
                    f"  ShardedOptimizer, synchronization {step}, rank {dist.get_rank()}\n"
                    "  Step outside of it, and run the last backward of a step outside too. To train ranks apart, use a plain "
                    "optimizer, or SyncConfig(outer=...)."
                )
                assert all(map(torch.equal, before.values(), ddp.module.state_dict().values()))
            naive_mean(bare)
            ours.step()
            plain.step()
            require_same(ddp, bare)
            ours.zero_grad()
            plain.zero_grad()
        common_step(ddp, ours, bare, plain, 2)


@in_ranks(2)
def test_a_plain_optimizer_that_steps_inside_trains_this_rank_alone() -> None:
    with models(is_sharded=False) as (ddp, ours, bare, plain), warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            window(ddp, bare, step)
            with ddp.no_sync():
                ours.step()
            plain.step()
            require_same(ddp, bare)
            ours.zero_grad()
            plain.zero_grad()
        # An outer optimizer by hand, whose gradients are no backward's: they stay as they are.
        for model in (ddp.module, bare):
            for param in model.parameters():
                param.grad = torch.full_like(param, float(dist.get_rank()))
        ours.step()
        plain.step()
        require_same(ddp, bare)


@in_ranks(2)
@pytest.mark.parametrize("is_sharded", SHARDS)
def test_a_scaler_sees_averages_and_infinities_of_any_rank(is_sharded: bool) -> None:
    with models(is_sharded=is_sharded) as (ddp, ours, bare, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        for step in range(4):
            factor = float("inf") if step == 2 and dist.get_rank() == 0 else 1.0
            with ddp.no_sync():
                (scaler.scale(loss(ddp, step)) * factor).backward()
            scaler.step(ours)
            before = scaler.get_scale()
            scaler.update()
            assert scaler.get_scale() == (before / 2 if step == 2 else before * 2)
            if step != 2:
                loss(bare, step).backward()
                naive_mean(bare)
                plain.step()
                plain.zero_grad()
            ours.zero_grad()
            ddp.wait()
            # scaling is by powers of two: exact
            assert all(map(torch.equal, ddp.module.parameters(), bare.parameters()))


@in_ranks(2)
@pytest.mark.parametrize("is_sharded", SHARDS)
@pytest.mark.parametrize("is_named", [False, True])
def test_a_closure_may_only_accumulate(is_sharded: bool, is_named: bool) -> None:
    with models(is_sharded=is_sharded) as (ddp, ours, bare, plain):
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                ours.zero_grad()
                with ddp.no_sync():
                    value = loss(ddp, step)
                    value.backward()
                return value

            ours.step(closure=closure) if is_named else ours.step(closure)
            plain.zero_grad()
            loss(bare, step).backward()
            naive_mean(bare)
            plain.step()
            require_same(ddp, bare)


@in_ranks(2)
def test_lbfgs_steps_on_averages() -> None:
    with not_told(), contextlib.closing(DistributedDataParallel(layers())) as ddp:
        bare = layers()
        ours, plain = (torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=3) for model in (ddp, bare))

        def closure() -> Tensor:
            ours.zero_grad()
            with ddp.no_sync():
                value = loss(ddp, 0)
                value.backward()
            return value

        def plain_closure() -> Tensor:
            plain.zero_grad()
            value = loss(bare, 0)
            value.backward()
            naive_mean(bare)
            return value

        for _ in range(2):
            ours.step(closure)
            plain.step(plain_closure)
        require_same(ddp, bare)


@in_ranks(2)
@pytest.mark.parametrize("is_sharded", SHARDS)
def test_the_first_of_several_optimizers_averages_for_all(is_sharded: bool) -> None:
    bare = layers()
    with not_told(), contextlib.closing(attach(net := layers())) as sync:

        def made(params: Any, model: Any) -> Any:
            sgd = torch.optim.SGD
            return ShardedOptimizer(sgd, sync, params, lr=0.1) if is_sharded and model is net else sgd(params, lr=0.1)

        ours, plain = ([made(list(part.parameters()), model) for part in (model[0], model[2])] for model in (net, bare))
        for step in range(3):
            with sync.accumulate():
                loss(net, step).backward()
            loss(bare, step).backward()
            naive_mean(bare)
            for optimizer in (*ours, *plain):
                optimizer.step()
            for optimizer in (*ours, *plain):
                optimizer.zero_grad()
            sync.wait()
            assert all(map(torch.equal, net.parameters(), bare.parameters()))


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_ranks_of_which_only_one_steps_alone_are_told() -> None:
    with models(is_sharded=False) as (ddp, ours, bare, plain):
        common_step(ddp, ours, bare, plain, 0)
        window(ddp, bare, 1)
        if dist.get_rank() == 0:
            with ddp.no_sync():
                ours.step()
            text = text_of(PlanMismatch, lambda: loss(ddp, 2).backward())
        else:
            text = text_of(PlanMismatch, ours.step)
        assert "first difference: stepping inside accumulate() of the model is True on rank 0, but not set on rank 1" in text


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_inside_join_such_a_step_is_an_error() -> None:
    with models(is_sharded=False) as (ddp, ours, bare, _), ddp.join():
        window(ddp, bare, 0)
        assert text_of(PhaseError, ours.step) == (
            "an optimizer steps inside join() on gradients that were only accumulated: ranks without data cannot help to average "
            "them now.\n"
            f"  SGD, synchronization 0, rank {dist.get_rank()}\n"
            "  Run the last backward of a step outside of accumulate() and no_sync(), with a forward of the wrapper."
        )
        ours.zero_grad()


@in_ranks(2)
def test_a_look_at_the_parts_in_a_window_leaves_its_gradients_to_be_averaged() -> None:
    with models(is_sharded=True) as (ddp, ours, bare, plain):
        window(ddp, bare, 0)
        assert set(ours.owned_parts()) == set(ddp.module.parameters())
        common_step(ddp, ours, bare, plain, 1)


@in_ranks(2)
def test_an_optimizer_that_is_made_in_a_window_leaves_its_gradients_to_be_averaged() -> None:
    with models(is_sharded=False) as (ddp, _, bare, plain):
        window(ddp, bare, 0)
        ours = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1, momentum=0.5)  # lays out shards
        common_step(ddp, ours, bare, plain, 1)
