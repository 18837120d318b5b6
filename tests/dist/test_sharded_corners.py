"""Corners of the sharded step in which numbers were once silently wrong, mistakes that are refused, and hooks of optimizers."""

import contextlib
import copy
import gc
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from support import inside
from support.alike import of_all_ranks, train
from support.errors import in_pieces, text_of
from support.inside import call_before, post
from support.levels import some
from support.naive import wrapped
from support.ranks import in_ranks
from support.sharded import (
    MLP,
    ORDERED,
    SMALL,
    Parameters,
    one_step,
    optimizer_for,
    parameters,
    require_equal,
    require_moved,
    require_same_everywhere,
    stepped,
    trained,
    training,
)
from undertow import (
    ConfigError,
    DistributedDataParallel,
    PhaseError,
    PlanMismatch,
    ShardedOptimizer,
    SyncConfig,
    WrongType,
    attach,
)

WRITERS: dict[str, Any] = {
    "broadcast": lambda ddp: ddp.broadcast_parameters(),
    "cast": lambda ddp: ddp.double(),
    "wrapped again": lambda ddp: DistributedDataParallel(ddp.module).close(),
}


@in_ranks(2)
@pytest.mark.parametrize("write", some(WRITERS, most=1))
def test_what_writes_parameters_right_after_a_step_waits_for_gathers(write: str) -> None:
    with stepped(2, optimizer="AdamW", **ORDERED) as (ddp, opt):
        call_before(ddp, "gathers", partial(time.sleep, 0.1))
        one_step(ddp, opt, 2)
        opt.zero_grad()
        WRITERS[write](ddp)
        found = {name: param.detach().clone() for name, param in ddp.named_parameters()}
        require_equal(found, parameters(ddp))
        require_same_everywhere(found)


# A hook that computes a weight from parameters runs after ours.
@in_ranks(2, 3)
def test_hooks_of_others_read_parameters_that_have_come() -> None:
    def run(*, is_sharded: bool) -> Parameters:
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and used all the same
            model = torch.nn.utils.weight_norm(nn.Linear(6, 4))
        with contextlib.closing(attach(model, config=SyncConfig(reduction="ordered"))) as sync:
            cls = torch.optim.SGD
            opt = ShardedOptimizer(cls, sync, lr=0.1) if is_sharded else cls(model.parameters(), lr=0.1)
            train(model, opt, MLP.loss, steps=range(5))
            sync.wait()
            return {name: param.detach().clone() for name, param in sync.named_parameters()}

    require_equal(run(is_sharded=False), run(is_sharded=True))


@in_ranks(2)
def test_after_close_and_with_strangers() -> None:
    with stepped(2) as (ddp, opt):
        assert "of shape (3,), is not synchronized" in text_of(
            ConfigError, lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        )
        assert len(opt.param_groups) == 1
        for wrong in (0, -1, float("-inf")):
            assert "norm_type must be above zero" in text_of(ConfigError, partial(opt.clip_grad_norm_, 1.0, wrong))
        assert torch.equal(opt.clip_grad_norm_(1e9, "inf"), opt.clip_grad_norm_(1e9, float("inf")))
        MLP.loss(ddp, 2).backward()
        ddp.close()
        assert all(param.grad is None for param in ddp.module.parameters())
        assert "the model of this optimizer is closed" in text_of(PhaseError, opt.step)
        before = parameters(ddp)
        one_step(ddp.module, torch.optim.SGD(ddp.module.parameters(), lr=0.1), 3)
        require_moved(before, parameters(ddp))


@pytest.mark.slow
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("keeping", [None, 1], ids=["both drop it", "one keeps it"])
def test_a_dropped_wrapper_leaves_parameters_that_have_come(keeping: int | None) -> None:
    model, kept = MLP.model(), []

    def train() -> None:
        ddp = DistributedDataParallel(model, config=SyncConfig(strategy="zero1", **ORDERED))
        opt = optimizer_for(ddp, "zero1", "SGD")
        for step in range(3):
            one_step(ddp, opt, step)
            if step == 1:
                call_before(ddp, "gathers", partial(time.sleep, 0.1))
        if dist.get_rank() == keeping:
            kept.append(ddp)

    expected = trained(MLP, "ddp", "SGD", num_steps=3, **ORDERED)
    train()
    for ddp in kept:
        ddp.wait()
    require_equal(expected, {f"module.{name}": value.clone() for name, value in model.state_dict().items()})


def stepped_twice() -> tuple[DistributedDataParallel, Any]:
    """Nothing is in flight, and nothing else holds either."""
    ddp = DistributedDataParallel(MLP.model(), config=SyncConfig(strategy="zero1", **ORDERED))
    opt = optimizer_for(ddp, "zero1", "SGD")
    train(ddp, opt, MLP.loss, steps=range(2))
    ddp.wait()
    return ddp, opt


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_dropped_wrapper_does_not_wait_for_a_rank_that_has_left() -> None:
    ddp, opt = stepped_twice()
    opt.zero_grad()
    MLP.loss(ddp, 2).backward()
    if dist.get_rank() == 1:
        ddp.close()  # never steps
        return
    opt.step()
    began_s = time.monotonic()
    del ddp, opt
    gc.collect()
    assert time.monotonic() - began_s < 30


# As a `__del__` does that the garbage collector runs there.
@in_ranks(2)
def test_a_read_in_a_thread_that_brings_parameters_is_an_error() -> None:
    with stepped(2, **SMALL) as (ddp, opt):
        weight, text, goes_on = ddp.module[0].weight, Future[str](), threading.Event()
        ddp.state_dict()  # all parameters are here: the next forward waits for none that is held up
        call_before(ddp, "gathers", goes_on.wait)
        one_step(ddp, opt, 2)
        post(ddp, lambda: text.set_result(text_of(PhaseError, weight.sum)))
        goes_on.set()
        assert "it would wait for itself" in text.result(10)


# Only rank 0 has a part of the gradient, and every rank says so of it.
@in_ranks(2)
def test_a_norm_of_a_gradient_that_is_not_synchronized_is_an_error_inside_and_averages_outside() -> None:
    with stepped(2) as (ddp, opt):
        opt.zero_grad()
        MLP.loss(ddp, 2).backward()
        owned = of_all_ranks([bool(part.numel) for part in opt.owned_parts().values()])
        index = list(zip(*owned, strict=True)).index((True, False))
        with ddp.no_sync():
            (2 * list(opt.owned_parts())[index]).sum().backward()
            what, where, remedy = text_of(PhaseError, lambda: opt.clip_grad_norm_(1.0)).splitlines()
        assert what.startswith("gradients were accumulated and are not synchronized")
        assert where == f"  clip_grad_norm_, rank {dist.get_rank()}"
        assert remedy == "  Clip outside of accumulate() and no_sync(): gradients are averaged there."
        with pytest.warns(UserWarning, match="clip_grad_norm_"):
            norm = float(opt.clip_grad_norm_(1e9))
        assert of_all_ranks(norm) == [norm] * 2
        opt.zero_grad()


def params_of(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], nn.Parameter]]:
    return [(group, param) for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


class Lion(torch.optim.Optimizer):
    """Elementwise, and nobody knows that."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group, param in params_of(self):
            state = self.state[param]
            if not state:
                state["average"] = torch.zeros_like(param)
            param.sub_(group["lr"] * state["average"].lerp(param.grad, 0.1).sign_())
            state["average"].lerp_(param.grad, 0.01)


UNKNOWN = (
    "{0} cannot be sharded: it needs all parameters at once, or sparse gradients.\n"
    "  ShardedOptimizer({0}, ..., whole=None)\n"
    "  Use this optimizer without sharding."
)
UNKNOWN_CLASS = (
    "{0} cannot be sharded: Undertow does not know that it updates each parameter on its own.\n"
    "  ShardedOptimizer({0}, ..., whole=None)\n"
    "  Pass whole=True if the update of a parameter depends on no other parameter and all that a step changes is in "
    "state[param]. If not, or if you are not sure, use this optimizer without sharding."
)
NEEDS_WHOLE = (
    "{0} needs whole matrices: an element's update depends on the others.\n"
    "  ShardedOptimizer({0}, ..., whole=False)\n"
    "  Leave whole=False out: one rank then updates all of a parameter."
)
SGD = torch.optim.SGD
# What cannot be made of a model, and how the error begins.
NOT_MADE: dict[str, tuple[type[Exception], str, Any]] = {
    **{
        name: (ConfigError, UNKNOWN.format(name), lambda it, name=name: (getattr(torch.optim, name), it))
        for name in ("LBFGS", "SparseAdam")
    },
    "a class of the user's": (ConfigError, UNKNOWN_CLASS.format("Lion"), lambda it: (Lion, it)),
    "a class derived from a known one": (ConfigError, UNKNOWN_CLASS.format("WithOwnHook"), lambda it: (WithOwnHook, it)),
    "a bare module": (WrongType, "target must be the result of attach", lambda _: (SGD, nn.Linear(1, 1))),
    "groups in the model's place": (
        WrongType,
        "target must be the result of attach() or DistributedDataParallel, got list.\n  ShardedOptimizer\n"
        "  Wrap the model first, then write ShardedOptimizer(torch.optim.AdamW, model, lr=...). Parameters or groups come third: "
        "ShardedOptimizer(torch.optim.AdamW, model, groups, lr=...).",
        lambda it: (SGD, [{"params": [*it.parameters()]}]),
    ),
    "a name": (WrongType, "cls must be a class of optimizers", lambda it: ("SGD", it)),
    "a stranger": (
        ConfigError,
        "parameter 0 of the optimizer, of shape (1, 1), is not synchronized",
        lambda it: (SGD, it, nn.Linear(1, 1).parameters()),
    ),
}


@in_ranks(2)
def test_what_cannot_be_sharded_is_refused() -> None:
    with training(MLP.model(), "ddp") as (ddp, _):
        for what, (kind, text, arguments) in NOT_MADE.items():
            assert text_of(kind, lambda arguments=arguments: ShardedOptimizer(*arguments(ddp), lr=0.1)).startswith(text), what
        assert text_of(ConfigError, lambda: ShardedOptimizer(SGD, ddp, lr=0.1)).startswith(
            "strategy='ddp' keeps all of the optimizer on every rank"
        )


@in_ranks(2)
@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_a_class_that_needs_whole_matrices_is_not_cut(name: str) -> None:
    with wrapped(MLP.model()) as ddp:
        text = text_of(ConfigError, lambda: ShardedOptimizer(getattr(torch.optim, name), ddp, lr=0.1, whole=False))
        assert text == NEEDS_WHOLE.format(name)


@pytest.mark.deep
@in_ranks(2)
def test_a_class_that_the_user_vouches_for_has_the_bits_of_the_plain_one() -> None:
    """The layout changes twice; a plain optimizer goes on from the state of the sharded one."""
    found = []
    for is_sharded in (False, True):
        with contextlib.closing(DistributedDataParallel(MLP.model(), config=SyncConfig(**ORDERED))) as ddp:
            opt: Any = Lion(ddp.parameters())
            if is_sharded:
                with in_pieces():
                    opt = ShardedOptimizer(Lion, ddp, whole=False)
            for step in range(6):
                ddp.module[0].requires_grad_(step != 3)
                one_step(ddp, opt, step)
            state, before = opt.state_dict(), parameters(ddp)
        with contextlib.closing(DistributedDataParallel(MLP.model(), config=SyncConfig(**ORDERED))) as ddp:
            ddp.load_state_dict(before)
            opt = Lion(ddp.parameters())
            opt.load_state_dict(state)
            one_step(ddp, opt, 6)
            found.append(parameters(ddp))
    require_equal(*found)


@in_ranks(2)
def test_mistakes_are_told() -> None:
    with contextlib.closing(DistributedDataParallel(MLP.model(), config=SyncConfig(strategy="zero1"))) as ddp:
        plain = SGD(ddp.parameters(), lr=0.1)
        MLP.loss(ddp, 0).backward()
        assert text_of(PhaseError, plain.step) == (
            "strategy='zero1' needs a sharded optimizer, and SGD is not one.\n"
            "  the first step of the optimizer\n"
            "  Make it with undertow.ShardedOptimizer(torch.optim.SGD, model, ...), or with "
            "undertow.shard_optimizer(optimizer, model)."
        )
        newer = ShardedOptimizer(SGD, ddp, lr=0.1)
        assert "SGD steps on parameters that a ShardedOptimizer updates" in text_of(PhaseError, plain.step)
        newer.step()
        assert "cannot be pickled or copied" in text_of(WrongType, lambda: copy.deepcopy(newer))
        assert "communication hooks reduce whole gradients" in text_of(
            ConfigError, lambda: ddp.register_comm_hook(None, lambda _state, bucket: None)
        )
        newer.zero_grad()
        for step in range(1, 4):
            with contextlib.nullcontext() if step == 2 else ddp.no_sync():
                MLP.loss(ddp, step).backward()
        with ddp.no_sync():
            assert "steps inside accumulate() or no_sync()" in text_of(PhaseError, newer.step)


@in_ranks(2)
def test_sparse_gradients_are_refused() -> None:
    with wrapped(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))) as ddp:
        assert "a gradient is sparse: it cannot be cut into shards.\n  ShardedOptimizer, parameter '0.weight'" in text_of(
            ConfigError, lambda: ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
        )


@in_ranks(2)
def test_ranks_with_other_settings_are_found_out() -> None:
    disagree = pytest.raises(PlanMismatch, match=r"ranks disagree on the settings")
    with contextlib.closing(DistributedDataParallel(MLP.model())) as ddp, disagree:
        ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.1 * (1 + dist.get_rank()))


class StepsAsItsBase(torch.optim.AdamW):
    """torch calls the hooks of all optimizers around the step of the base once more."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class WithOwnHook(torch.optim.AdamW):
    stepped: ClassVar[list[Any]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_step_pre_hook(lambda *_: WithOwnHook.stepped.append(self))


@contextlib.contextmanager
def two_models(cls: type[Any]) -> Iterator[tuple[DistributedDataParallel, Any]]:
    """The first one, and its optimizer; both are there and neither has to do with the other."""
    settings = {"strategy": "zero1", **SMALL}
    with wrapped(MLP.model(), **settings) as ddp, wrapped(MLP.model(), **settings):
        with contextlib.nullcontext() if cls is torch.optim.AdamW else in_pieces():
            optimizer = ShardedOptimizer(cls, ddp, lr=0.01, whole=False)
        yield ddp, optimizer


@in_ranks(2)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, StepsAsItsBase, WithOwnHook])
def test_parameters_are_looked_through_as_often_whatever_the_number_of_buckets(cls: type[Any]) -> None:
    """In the thread that trains: at a forward, at the step of another model. Hooks of the optimizer's own are called."""
    with two_models(cls) as (ddp, opt):
        train(ddp, opt, MLP.loss, steps=range(2))
        assert len(ddp.plan.buckets) > 2
        with inside.looks_at_parameters() as threads:
            one_step(ddp, opt, 2)
        if cls is WithOwnHook:
            inners = inside.inner_optimizers(opt)
            assert [WithOwnHook.stepped.count(inner) for inner in inners] == [3] * len(inners)
            WithOwnHook.stepped.clear()
    assert threads == [threading.get_ident()] * 2


@in_ranks(2)
def test_the_users_hooks_for_all_optimizers_are_called_once_a_step() -> None:
    called: list[tuple[str, str, int]] = []

    def note(when: str) -> Any:
        return lambda optimizer, *_: called.append((when, type(optimizer).__name__, threading.get_ident()))

    with two_models(torch.optim.AdamW) as (ddp, opt):
        hooks = [register_optimizer_step_pre_hook(note("before")), register_optimizer_step_post_hook(note("after"))]
        for step in range(3):
            called.clear()
            one_step(ddp, opt, step)
            assert called == [(when, "ShardedOptimizer", threading.get_ident()) for when in ("before", "after")]
        for hook in hooks:
            hook.remove()
