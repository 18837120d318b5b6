"""Corners of the sharded step in which numbers were once silently wrong, or an error said nothing."""

from __future__ import annotations

import copy
import gc
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from support.errors import text_of
from support.inside import exchanges_of, late_gathers
from support.models import CASES, Branches, Case, noise
from support.naive import naive_mean, require_same_gradients
from support.ranks import Ranks, in_ranks
from support.sharded import optimizer_for, parameters, require_equal, trained, training
from undertow import ConfigError, DistributedDataParallel, PhaseError, ShardedOptimizer, SyncConfig, attach
from undertow.plan import Piece

MLP = CASES["mlp"]
SMALL = {"bucket_cap_mb": 1e-4, "reduction": "ordered"}


def step_of(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int, case: Case = MLP) -> None:
    opt.zero_grad()
    case.loss(ddp, step).backward()
    opt.step()


def scaled_alone(set_to_none: bool) -> None:
    def run(strategy: str) -> dict[str, Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

        def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
            opt.zero_grad(set_to_none=set_to_none)
            scaler.scale(MLP.loss(ddp, step)).backward()
            scaler.step(opt)
            scaler.update()

        return trained(MLP, strategy, "SGD", num_steps=4, each=each)

    require_equal(run("ddp"), run("zero1"))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_one_rank_unscales_what_it_steps_on(set_to_none: bool) -> None:
    with Ranks(1) as one:
        one.run(scaled_alone, set_to_none)


def pinned_in_pieces() -> str:
    """A plan of two ranks that has large parameters in several buckets."""
    with training(MLP.model(), "zero1", "SGD", **SMALL) as (ddp, opt):
        step_of(ddp, opt, 0)
        step_of(ddp, opt, 1)
        assert any(isinstance(member, Piece) for group in ddp.plan.groups for member in group)
        return ddp.plan.to_json()


def trained_alone_by_a_plan(plan: str) -> None:
    def clipped(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        MLP.loss(ddp, step).backward()
        opt.clip_grad_norm_(1e-3)
        opt.step()

    require_equal(trained(MLP, "ddp", "SGD"), trained(MLP, "zero1", "SGD", plan=plan))
    require_equal(trained(MLP, "zero1", "SGD", each=clipped), trained(MLP, "zero1", "SGD", each=clipped, plan=plan))


def test_one_rank_steps_all_of_what_a_plan_of_two_has_in_pieces(two_ranks: Ranks) -> None:
    plan = two_ranks.run(pinned_in_pieces)[0]
    with Ranks(1) as one:
        one.run(trained_alone_by_a_plan, plan)


class TwoWays(nn.Module):
    """Reads its embedding in the embedding's own forward, or, given vectors, in its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.embedding = nn.Embedding(64, 64)

    def forward(self, tokens: Tensor | None = None, vectors: Tensor | None = None) -> Tensor:
        hidden = functional.linear(vectors, self.embedding.weight) if tokens is None else self.embedding(tokens)
        return self.body(hidden)


@in_ranks(2, is_fresh=True)
def test_a_read_at_a_new_place_waits() -> None:
    tokens, vectors = torch.arange(8), noise(8, 64)
    with training(TwoWays(), bucket_cap_mb=0.0166) as (ddp, opt):
        for step in range(4):
            opt.zero_grad()
            ddp(tokens=tokens).square().mean().backward()
            opt.step()
            if step == 1:
                late_gathers(ddp, seconds=0.1)
        with torch.no_grad():
            ddp.eval()
            got = ddp(vectors=vectors)
            ddp.train()
            ddp.wait()
            assert torch.equal(got, ddp.module(vectors=vectors))
        opt.zero_grad()
        ddp(tokens=tokens).square().mean().backward()
        opt.step()
        trained = ddp(vectors=vectors.requires_grad_())
        assert torch.equal(trained, ddp.module(vectors=vectors))
        trained.square().mean().backward()


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_another_memory_format_is_a_change_like_others(strategy: str) -> None:
    """Channels-last weights become contiguous in mid-training, while rank 0 holds last step's gradients, if they are whole."""
    case = CASES["convolutions"]
    bare = case.model()
    held: list[Any] = []
    values: list[Tensor] = []
    ddp = DistributedDataParallel(copy.deepcopy(bare), config=SyncConfig(strategy=strategy, **SMALL))
    opt: Any = (
        torch.optim.AdamW(ddp.parameters(), lr=0.01) if strategy == "ddp" else ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
    )
    reference = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for step in range(6):
        if step == 3:
            ddp.wait()
            opt.zero_grad()
            for model in (ddp.module, bare):
                model.to(memory_format=torch.contiguous_format)
        opt.zero_grad()
        reference.zero_grad()
        case.loss(ddp, step).backward()
        case.loss(bare, step).backward()
        naive_mean(bare)
        if strategy == "ddp":
            require_same_gradients(ddp, bare)
            assert all(map(torch.equal, held, values))
            if dist.get_rank() == 0:
                held = [param.grad for param in ddp.parameters()]
                values = [grad.clone() for grad in held]
        else:
            for mine, theirs in zip(ddp.parameters(), bare.parameters(), strict=True):
                full = ddp.full_gradient(mine)
                assert full is not None
                assert torch.equal(full, theirs.grad)
        opt.step()
        reference.step()
    ddp.wait()
    for mine, theirs in zip(ddp.parameters(), bare.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    ddp.close()


@in_ranks(2, 3)
def test_gradients_with_a_graph_may_be_in_pieces() -> None:
    """`create_graph` in a backward that only accumulates, for gradients of which several buckets take a piece."""

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        with ddp.no_sync(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a cycle, which is cut below
            MLP.loss(ddp, 2 * step).backward(create_graph=step % 2 == 0)
        for param in ddp.module.parameters():
            if param.grad is not None and param.grad.requires_grad:
                param.grad = param.grad.detach()
        MLP.loss(ddp, 2 * step + 1).backward()
        opt.step()

    expected = trained(MLP, "ddp", "SGD", num_steps=5, each=each, reduction="ordered")
    require_equal(expected, trained(MLP, "zero1", "SGD", num_steps=5, each=each, **SMALL))


@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("write", ["broadcast", "cast", "wrapped again"])
def test_writers_wait_for_gathers(write: str) -> None:
    """What writes parameters right after a step finds them all there."""
    with training(MLP.model(), **SMALL) as (ddp, opt):
        step_of(ddp, opt, 0)
        step_of(ddp, opt, 1)
        late_gathers(ddp, seconds=0.1)
        step_of(ddp, opt, 2)
        opt.zero_grad()
        if write == "broadcast":
            ddp.broadcast_parameters()
        elif write == "cast":
            ddp.double()
        elif write == "wrapped again":
            DistributedDataParallel(ddp.module).close()
        found = [param.detach().clone() for param in ddp.module.parameters()]
        ddp.wait()
        assert all(torch.equal(mine, now) for mine, now in zip(found, ddp.module.parameters(), strict=True))
        gathered = [torch.empty_like(found[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, found[0])
        assert all(torch.equal(of_rank, gathered[0]) for of_rank in gathered)


@in_ranks(2, 3)
def test_hooks_of_others_read_parameters_that_have_come() -> None:
    """A hook that computes a weight from parameters runs behind ours."""

    def run(is_sharded: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and used all the same
            model = torch.nn.utils.weight_norm(nn.Linear(6, 4))
        sync = attach(model, config=SyncConfig(reduction="ordered"))
        opt = (
            ShardedOptimizer(torch.optim.SGD, sync, lr=0.1)
            if is_sharded
            else torch.optim.SGD([param for _, param in sync.named_parameters()], lr=0.1)
        )
        for step in range(5):
            step_of(model, opt, step)  # type: ignore[arg-type]
        sync.wait()
        result = {name: param.detach().clone() for name, param in sync.named_parameters()}
        sync.close()
        return result

    require_equal(run(False), run(True))


@in_ranks(2, 3)
def test_everything_may_be_frozen_for_a_while() -> None:
    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        if step in (2, 4):
            ddp.module.requires_grad_(step == 4)
        opt.zero_grad()
        if step in (2, 3):
            ddp(noise(5, 6))
        else:
            MLP.loss(ddp, step).backward()
        opt.step()

    expected = trained(MLP, "ddp", "SGD", num_steps=7, each=each, reduction="ordered")
    require_equal(expected, trained(MLP, "zero1", "SGD", num_steps=7, each=each, **SMALL))


@in_ranks(2, 3)
def test_parameters_freeze_while_gradients_are_zeros() -> None:
    case = Case(Branches, lambda model, step: model(noise(3, 4, step=step)).square().sum())

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.param_groups[0] |= {"momentum": 0.0, "weight_decay": 0.0}  # or a plain optimizer moves what is frozen and has zeros
        opt.zero_grad(set_to_none=False)
        if step in (2, 5):
            ddp.module.layers[1].requires_grad_(step == 5)
        case.loss(ddp, step).backward()
        opt.step()

    expected = trained(case, "ddp", "SGD", num_steps=8, each=each, reduction="ordered")
    require_equal(expected, trained(case, "zero1", "SGD", num_steps=8, each=each, **SMALL))


@in_ranks(2)
def test_after_close_and_with_strangers() -> None:
    ddp = DistributedDataParallel(MLP.model())
    opt = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
    for step in range(2):
        step_of(ddp, opt, step)
    stranger = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigError, match=r"of shape \(3,\), is none that is synchronised"):
        opt.add_param_group({"params": [stranger]})
    assert len(opt.param_groups) == 1
    for wrong in (0, -1, float("-inf")):
        with pytest.raises(ConfigError, match="norm_type must be above zero"):
            opt.clip_grad_norm_(1.0, wrong)
    assert torch.equal(opt.clip_grad_norm_(1e9, "inf"), opt.clip_grad_norm_(1e9, float("inf")))  # type: ignore[arg-type]
    MLP.loss(ddp, 2).backward()
    ddp.close()
    assert all(param.grad is None for param in ddp.module.parameters())
    with pytest.raises(PhaseError, match="the model of this optimizer is closed"):
        opt.step()
    before = parameters(ddp)
    plain = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
    MLP.loss(ddp.module, 3).backward()
    plain.step()
    assert not torch.equal(before["module.0.weight"], ddp.module[0].weight)


@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("keeping", [None, 1], ids=["both drop it", "one keeps it"])
@pytest.mark.parametrize("eager", [False, True], ids=["barrier", "eager"])
def test_a_dropped_wrapper_leaves_parameters_that_have_come(eager: bool, keeping: int | None) -> None:
    model, kept = MLP.model(), []

    def train() -> None:
        ddp = DistributedDataParallel(model, config=SyncConfig(strategy="zero1", **SMALL))
        opt = optimizer_for(ddp, "zero1", "SGD", eager=eager)
        for step in range(3):
            step_of(ddp, opt, step)
            if step == 1:
                late_gathers(ddp, seconds=0.1)
        if dist.get_rank() == keeping:
            kept.append(ddp)

    expected = trained(MLP, "ddp", "SGD", num_steps=3, **SMALL)
    train()
    for ddp in kept:
        ddp.wait()
    require_equal(expected, {f"module.{name}": value.clone() for name, value in model.state_dict().items()})


def stepped_twice() -> tuple[DistributedDataParallel, Any]:
    """Nothing is in flight."""
    ddp = DistributedDataParallel(MLP.model(), config=SyncConfig(strategy="zero1", **SMALL))
    opt = optimizer_for(ddp, "zero1", "SGD")
    for step in range(2):
        step_of(ddp, opt, step)
    ddp.wait()
    return ddp, opt


def dropped_when_a_rank_is_lost() -> float:
    """Seconds that it takes."""
    ddp, opt = stepped_twice()
    opt.zero_grad()
    MLP.loss(ddp, 2).backward()
    if dist.get_rank() == 1:
        ddp.close()  # never steps
        return 0.0
    opt.step()
    began_s = time.monotonic()
    del ddp, opt
    gc.collect()
    return time.monotonic() - began_s


def test_a_dropped_wrapper_does_not_wait_for_a_rank_that_has_left(fresh_pair: Ranks) -> None:
    assert max(fresh_pair.run(dropped_when_a_rank_is_lost)) < 30


@in_ranks(2, is_fresh=True)
def test_a_thread_of_ours_that_drops_a_wrapper_waits_for_nothing() -> None:
    """Which may be the one that brings what would be waited for."""
    ddp, opt = stepped_twice()
    held, is_dropped = [ddp, opt], threading.Event()
    posting = exchanges_of(ddp)._posting
    step_of(ddp, opt, 2)

    def drop() -> None:
        held.clear()
        is_dropped.set()

    posting.submit(drop)
    del ddp, opt
    assert is_dropped.wait(10)


def stray_gradient(eager: bool, clips: bool) -> str:
    """What every rank says of a gradient that only rank 1 has a part of."""
    with training(MLP.model(), "zero1", "SGD", eager=eager, bucket_cap_mb=1e-4) as (ddp, opt):
        for step in range(2):
            step_of(ddp, opt, step)
        opt.zero_grad()
        MLP.loss(ddp, 2).backward()
        owned: list[list[bool]] = [[] for _ in range(2)]
        dist.all_gather_object(owned, [bool(parts) for parts in opt.owned_parts().values()])
        index = list(zip(*owned, strict=True)).index((False, True))
        param = list(opt.owned_parts())[index]
        with ddp.no_sync():
            (2 * param).sum().backward()
        text = text_of(PhaseError, lambda: opt.clip_grad_norm_(1.0) if clips else opt.step())
        opt.zero_grad()
        name = ddp.plan.params[index].name
        return text.replace(repr(name), "'it'").replace(f"rank {dist.get_rank()}", "rank mine")


@pytest.mark.parametrize(("eager", "clips"), [(False, False), (False, True), (True, False)], ids=["step", "clip", "eager step"])
def test_a_gradient_that_is_not_synchronised_is_an_error_on_every_rank(fresh_pair: Ranks, eager: bool, clips: bool) -> None:
    text = (
        "the optimizer steps on gradients that were accumulated and not synchronised.\n"
        "  parameter 'it', rank mine\n"
        "  Run the last backward of a step outside of accumulate() and no_sync()."
    )
    assert fresh_pair.run(stray_gradient, eager, clips) == [text, text]
