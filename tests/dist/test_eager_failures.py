"""Backwards in eager form that fail when they have updated a part: what may be read then, and what comes after."""

import copy
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.errors import text_of
from support.inside import interrupted_at_the_end_of_backward, member_of, settles_after_the_round
from support.models import Fragile, noise
from support.ranks import in_ranks
from support.sharded import MLP, SMALL, Parameters, one_step, parameters, require_equal, require_same_everywhere, training
from undertow import DistributedDataParallel, PeerFailed, PhaseError, load_checkpoint, save_checkpoint

EAGER: dict[str, Any] = {"optimizer": "SGD", "eager": True, **SMALL}
Read = Callable[[DistributedDataParallel, Any], Parameters]


def started(*, on_mesh: bool = False) -> AbstractContextManager[Any]:
    torch.manual_seed(3)
    return training(Fragile(), "hybrid" if on_mesh else "zero1", **EAGER)


def weighted_step(ddp: DistributedDataParallel, opt: Any, step: int, *, weight: float | None = None) -> None:
    if weight is not None:
        ddp.weight(weight)
    one_step(ddp, opt, step)


def train(ddp: DistributedDataParallel, opt: Any, num_steps: int = 3, **how: Any) -> Parameters:
    for step in range(num_steps):
        weighted_step(ddp, opt, step, **how)
    return parameters(ddp)


# Its error is not raised.
def failing_backward(ddp: DistributedDataParallel, opt: Any, num_failing: int, *, weight: float | None = None) -> None:
    ddp.module.fails = dist.get_rank() < num_failing
    with pytest.raises(ZeroDivisionError if ddp.module.fails else PeerFailed):
        weighted_step(ddp, opt, 3, weight=weight)
    ddp.module.fails = False


def evaluated(model: Callable[[Tensor], Tensor], numel: int) -> Parameters:
    with torch.no_grad():
        return {"output": model(noise(2, numel))}


def of_optimizer(opt: Any) -> Parameters:
    state = opt.full_state_dict()["state"]
    return {f"{number} {key}": value for number, of_param in state.items() for key, value in of_param.items()}


READS: dict[str, Read] = {
    "the state dict": lambda ddp, _: ddp.state_dict(),
    "the state dict of a layer": lambda ddp, _: ddp.module.last.state_dict(),
    "the parameters": lambda ddp, _: cloned(dict(ddp.named_parameters())),
    "a copy": lambda ddp, _: copy.deepcopy(ddp).state_dict(),
    "an evaluation": lambda ddp, _: evaluated(ddp.eval(), 6),
    "a layer's evaluation": lambda ddp, _: evaluated(ddp.module.last, 8),
    "the optimizer's state": lambda _, opt: of_optimizer(opt),
}


def cloned(found: Parameters) -> Parameters:
    return {name: value.detach().clone() for name, value in found.items()}


def require_whole_reads_after_a_failure(what: str, num_failing: int, *, on_mesh: bool) -> None:
    with started(on_mesh=on_mesh) as (ddp, opt):
        before = train(ddp, opt)
        failing_backward(ddp, opt, num_failing)
        found = cloned(READS[what](ddp, opt))
        ddp.wait()
        require_equal(found, cloned(READS[what](ddp, opt)))
        after = parameters(ddp)
        require_same_everywhere(after)
        assert not torch.equal(before["module.last.bias"], after["module.last.bias"])  # there was something to tear
        ddp.train()
        one_step(ddp, opt, 4)
        require_same_everywhere(parameters(ddp))


@in_ranks(2)
@pytest.mark.parametrize("num_failing", [1, 2])
@pytest.mark.parametrize("what", READS)
def test_what_is_read_after_a_failed_backward_is_whole(what: str, num_failing: int) -> None:
    require_whole_reads_after_a_failure(what, num_failing, on_mesh=False)


@in_ranks(4)
@pytest.mark.parametrize("num_failing", [1, 3])
def test_so_is_what_is_read_on_a_mesh(num_failing: int) -> None:
    require_whole_reads_after_a_failure("the state dict", num_failing, on_mesh=True)


@in_ranks(2)
@pytest.mark.parametrize("num_failing", [1, 2])
def test_a_checkpoint_in_an_except_block_is_whole(tmp_path: Path, num_failing: int) -> None:
    with started() as (ddp, opt):
        train(ddp, opt)
        failing_backward(ddp, opt, num_failing)
        save_checkpoint(tmp_path / "saved", ddp, opt)
        after, state = parameters(ddp), cloned(of_optimizer(opt))
    with started() as (ddp, opt):
        load_checkpoint(tmp_path / "saved", ddp, opt)
        require_equal(after, parameters(ddp))
        require_equal(state, of_optimizer(opt))


# On rank 0 no bucket is full yet, and rank 1 has sent some.
@in_ranks(2)
def test_a_rank_that_has_updated_nothing_takes_part_in_what_others_end(tmp_path: Path) -> None:
    def fails(_gradient: Tensor) -> None:
        raise ZeroDivisionError

    with started() as (ddp, opt):
        before = train(ddp, opt)
        ddp.module.fails = dist.get_rank() == 1
        if dist.get_rank() == 0:
            ddp.module.last.weight.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            one_step(ddp, opt, 3)
        save_checkpoint(tmp_path / "saved", ddp, opt)
        require_equal(before, parameters(ddp))
    with started() as (ddp, opt):
        load_checkpoint(tmp_path / "saved", ddp, opt)
        require_equal(before, parameters(ddp))


# When the last layer's buckets are on their way.
@in_ranks(2)
def test_another_thread_is_told_that_a_backward_updates_what_it_reads() -> None:
    with started() as (ddp, opt), ThreadPoolExecutor(1) as thread:
        train(ddp, opt)
        reads: list[Future[object]] = []

        def in_a_thread(_gradient: Tensor) -> None:
            reads.append(thread.submit(ddp.state_dict))
            reads[0].exception()

        hook = ddp.module.first.weight.register_hook(in_a_thread)
        one_step(ddp, opt, 3)
        hook.remove()
        one_step(ddp, opt, 4)
        require_same_everywhere(parameters(ddp))
        first, where, remedy = text_of(PhaseError, reads[0].result).splitlines()
    assert first == "parameters are read that a backward updates: the shards of other ranks are not there yet."
    assert re.fullmatch(rf"  ShardedOptimizer\(\.\.\., eager=True\), bucket .*, rank {dist.get_rank()}", where)
    assert remedy == "  Read them in the thread that trains, behind backward. If none runs, start again from a checkpoint."
    assert len(reads) == 1


# An interrupt where the synchronization ends: what cannot be ended any more is neither read nor trained on.
@in_ranks(2)
def test_what_cannot_be_made_whole_raises_wherever_it_is_read() -> None:
    with started() as (ddp, opt):
        train(ddp, opt)
        with interrupted_at_the_end_of_backward(ddp), pytest.raises(KeyboardInterrupt):
            one_step(ddp, opt, 3)
        for act in (ddp.state_dict, lambda: MLP.loss(ddp, 4).backward(), ddp.state_dict, ddp.close):
            with pytest.raises(PhaseError, match="parameters are read that a backward updates"):
                act()


# Of a backward that has updated a part; the other rank will never send its shards.
@in_ranks(2, is_fresh=True)
def test_what_a_lost_rank_leaves_in_part_is_not_read() -> None:
    with started() as (ddp, opt):
        train(ddp, opt)
        member, has_updated, update = member_of(ddp), threading.Event(), opt.update

        def noted(bucket: int) -> None:
            update(bucket)
            has_updated.set()

        def fails(_gradient: Tensor) -> None:
            assert has_updated.wait(30.0)
            if dist.get_rank() == 1:
                member.ring.say("failed", text="ZeroDivisionError")
                raise ZeroDivisionError
            with member.ring.condition:
                member.ring.condition.wait_for(lambda: member.known_fault)

        opt.update = noted
        ddp.module.first.weight.register_hook(fails)
        with pytest.raises((PeerFailed, ZeroDivisionError)):
            one_step(ddp, opt, 3)
        for read in [*READS.values()] * 2:
            with pytest.raises(PeerFailed, match="rank 1 has failed: ZeroDivisionError"):
                read(ddp, opt)


@in_ranks(2)
@pytest.mark.parametrize("num_failing", [1, 2])
def test_steps_behind_a_micro_batch_that_failed_are_as_ever(num_failing: int) -> None:
    def trained(*, fails: bool) -> Parameters:
        torch.manual_seed(3)
        with training(Fragile(), "zero2", **EAGER) as (ddp, opt):
            train(ddp, opt)
            if fails:
                with ddp.no_sync():
                    failing_backward(ddp, opt, num_failing)
            for step in range(4, 6):
                one_step(ddp, opt, step)
            return parameters(ddp)

    require_equal(trained(fails=False), trained(fails=True))


# Rank 0 fails, and gives the synchronization up, before what it has sent of the last layer is complete.
def require_divided_by_weights(*, on_mesh: bool) -> None:
    weight = 3.0 + dist.get_rank()
    with started(on_mesh=on_mesh) as (ddp, opt):
        healthy = train(ddp, opt, 4, weight=weight)
    with started(on_mesh=on_mesh) as (ddp, opt):
        before = train(ddp, opt, weight=weight)
        with settles_after_the_round(ddp):
            failing_backward(ddp, opt, 1, weight=weight)
            after = parameters(ddp)
    require_same_everywhere(after)
    for name, value in after.items():
        assert bool(((value == before[name]) | (value == healthy[name])).all()), name
    assert torch.equal(after["module.last.bias"], healthy["module.last.bias"])


@in_ranks(2)
def test_a_bucket_that_left_before_the_failure_is_divided_by_its_weights() -> None:
    require_divided_by_weights(on_mesh=False)


@in_ranks(4)
def test_nor_do_replicas_come_apart() -> None:
    require_divided_by_weights(on_mesh=True)
