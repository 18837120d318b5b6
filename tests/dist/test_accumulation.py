from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from support.errors import text_of
from support.models import CASES, Branches, noise
from support.naive import naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks, in_ranks
from support.sharded import parameters, require_equal, trained, training
from undertow import ConfigError, Desync, DistributedDataParallel, PhaseError, attach

CASE = CASES["mlp"]
NUM_MICRO_BATCHES = 3


def around_both(ddp: nn.Module, step: int) -> None:
    with ddp.no_sync():
        CASE.loss(ddp, step).backward()


def around_backward_only(ddp: nn.Module, step: int) -> None:
    loss = CASE.loss(ddp, step)
    with ddp.no_sync():
        loss.backward()


def nested(ddp: nn.Module, step: int) -> None:
    with ddp.no_sync():
        with ddp.accumulate():
            pass
        CASE.loss(ddp, step).backward()


WAYS = {way.__name__: way for way in (around_both, around_backward_only, nested)}


@in_ranks(2, 3)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25.0])
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_are_summed_here_and_averaged_once(way: str, bucket_cap_mb: float, set_to_none: bool) -> None:
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for step in range(0, 4 * NUM_MICRO_BATCHES, NUM_MICRO_BATCHES):
            ddp.zero_grad(set_to_none=set_to_none)
            bare.zero_grad(set_to_none=set_to_none)
            for micro_step in range(step, step + NUM_MICRO_BATCHES - 1):
                WAYS[way](ddp, micro_step)
                CASE.loss(bare, micro_step).backward()
                require_same_gradients(ddp, bare)  # nothing has been sent
            for model in (ddp, bare):
                CASE.loss(model, step + NUM_MICRO_BATCHES - 1).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@in_ranks(2, 3)
def test_no_sync_around_forward_only_changes_nothing() -> None:
    with wrapped_and_bare(CASE.model()) as (ddp, bare):
        for step in range(3):
            with ddp.no_sync():
                loss = CASE.loss(ddp, step)
            ddp.zero_grad()
            loss.backward()
            bare.zero_grad()
            CASE.loss(bare, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@in_ranks(2, 3)
def test_an_exception_inside_the_context_ends_accumulation() -> None:
    with wrapped_and_bare(CASE.model()) as (ddp, bare):
        with contextlib.suppress(ZeroDivisionError), ddp.no_sync():
            CASE.loss(ddp, 0).backward()
            raise ZeroDivisionError
        CASE.loss(ddp, 1).backward()
        for step in range(2):
            CASE.loss(bare, step).backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)


@in_ranks(2, 3)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25.0])
def test_a_second_synchronised_backward_adds_the_mean_of_what_is_new(bucket_cap_mb: float) -> None:
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for step in range(4):
            for model in (ddp, bare):
                CASE.loss(model, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


def two_forwards_then_two_backwards(model: nn.Module) -> None:
    first, second = CASE.loss(model, 0), CASE.loss(model, 1)
    first.backward()
    if not hasattr(model, "sync"):
        naive_mean(model)
    second.backward()


def backward_twice_through_one_graph(model: nn.Module) -> None:
    loss = CASE.loss(model, 0)
    loss.backward(retain_graph=True)
    if not hasattr(model, "sync"):
        naive_mean(model)
    loss.backward()


def one_backward_of_two_losses(model: nn.Module) -> None:
    torch.autograd.backward([CASE.loss(model, 0), CASE.loss(model, 1)])


SEVERAL = {
    way.__name__: way for way in (two_forwards_then_two_backwards, backward_twice_through_one_graph, one_backward_of_two_losses)
}


@in_ranks(2, 3)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25.0])
@pytest.mark.parametrize("way", SEVERAL)
def test_several_losses_in_one_step_are_right(way: str, bucket_cap_mb: float) -> None:
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for _ in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                SEVERAL[way](model)
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@in_ranks(2, 3)
def test_what_was_accumulated_can_be_reduced_by_hand() -> None:
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=1e-6) as (ddp, bare):
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
            for micro_step in range(2 * step, 2 * step + 2):
                around_both(ddp, micro_step)
                CASE.loss(bare, micro_step).backward()
            ddp.reduce_gradients_async().wait()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


def step_of_the_optimizer(_ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def next_forward(ddp: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    CASE.loss(ddp, 1)


def wait(ddp: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    ddp.wait()


def finish(ddp: nn.Module, _optimizer: torch.optim.Optimizer) -> None:
    ddp.finish()


@in_ranks(2)
@pytest.mark.parametrize("end", [step_of_the_optimizer, next_forward, wait, finish])
def test_a_reduction_that_nobody_waited_for_is_completed(end: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=1e-6) as (ddp, bare):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        around_both(ddp, 0)
        ddp.reduce_gradients_async()
        end(ddp, optimizer)
        CASE.loss(bare, 0).backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)


def errors_of_reductions() -> dict[str, str]:
    errors = {}
    model = Branches(2)
    with wrapped(model) as ddp:
        errors["before anything"] = text_of(PhaseError, ddp.reduce_gradients_async)
        with ddp.no_sync():
            ddp(noise(2, 4), (0, 1)).sum().backward()
        reduction = ddp.reduce_gradients_async()
        errors["twice"] = text_of(PhaseError, ddp.reduce_gradients_async)
        reduction.wait()
        errors["again"] = text_of(PhaseError, ddp.reduce_gradients_async)
        ddp(noise(2, 4), (0, 1)).sum().backward()
        errors["after a synchronisation"] = text_of(PhaseError, ddp.reduce_gradients_async)

        model.layers[0].weight.register_hook(lambda _: ddp.reduce_gradients_async())
        errors["inside"] = text_of(PhaseError, ddp(noise(2, 4), (0, 1)).sum().backward)
    return errors


def nothing_to_reduce(number: int, ranks: str = "0, 1") -> str:
    return (
        f"there is nothing to reduce on rank {ranks}: no accumulation has run there since the last synchronisation.\n"
        f"  reduce_gradients_async(), synchronisation {number}\n"
        "  Run backward inside accumulate() or no_sync() on every rank, then reduce once."
    )


def reduced_twice(number: int, ranks: str = "0, 1") -> str:
    return (
        f"an earlier reduction was not waited for on rank {ranks}.\n"
        f"  reduce_gradients_async(), synchronisation {number}\n"
        "  Call wait() on what reduce_gradients_async() has returned before the next call."
    )


def test_a_reduction_at_the_wrong_time_is_an_error(two_ranks: Ranks) -> None:
    for errors in two_ranks.run(errors_of_reductions):
        assert errors == {
            "before anything": nothing_to_reduce(0),
            "twice": reduced_twice(2),
            "again": nothing_to_reduce(3),
            "after a synchronisation": nothing_to_reduce(5),
            "inside": "reduce_gradients_async() was called inside a backward.\n"
            "  Sync.reduce_gradients_async\n"
            "  Call it after the last backward of the step.",
        }


def reduces_too_much(strategy: str, which: str) -> tuple[str, bool]:
    """Rank 1 alone is wrong; what it is told, and whether all go on afterwards."""
    is_wrong = dist.get_rank() == 1
    with training(CASE.model(), strategy, "SGD", bucket_cap_mb=1e-4) as (ddp, opt):
        CASE.loss(ddp, 0).backward()
        opt.step()
        opt.zero_grad()
        if which == "twice":
            around_both(ddp, 1)
            reduction = ddp.reduce_gradients_async()
            if not is_wrong:
                reduction.wait()
                around_both(ddp, 1)
        elif not is_wrong:
            around_both(ddp, 1)
        text = text_of(PhaseError, lambda: ddp.reduce_gradients_async().wait())
        for step in range(2):
            opt.zero_grad()
            CASE.loss(ddp, step).backward()
            opt.step()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, parameters(ddp))
    return text, all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("which", ["nothing accumulated", "twice"])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_where_one_rank_reduces_at_the_wrong_time_all_are_told(ranks: Ranks, strategy: str, which: str) -> None:
    expected = reduced_twice(2, "1") if which == "twice" else nothing_to_reduce(1, "1")
    assert ranks.run(reduces_too_much, strategy, which) == [(expected, True)] * ranks.num_ranks


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize(("op", "configured"), [("sum", "mean"), ("mean", "mean"), ("mean", "sum"), (None, "sum")])
def test_a_reduction_by_hand_has_an_op_of_its_own(op: str | None, configured: str, strategy: str) -> None:
    case, num_ranks = CASE, dist.get_world_size()
    bare = case.model()
    with training(case.model(), strategy, "SGD", op=configured, bucket_cap_mb=1e-4, reduction="ordered") as (ddp, opt):
        for step in range(3):
            opt.zero_grad()
            bare.zero_grad()
            bare.load_state_dict(ddp.module.state_dict())
            for micro_step in range(2):
                around_both(ddp, micro_step)
                case.loss(bare, micro_step).backward()
            ddp.reduce_gradients_async(op).wait() if op else ddp.reduce_gradients_async().wait()
            for name, param in bare.named_parameters():
                ours = ddp.full_gradient(ddp.module.get_parameter(name))
                gathered = [torch.empty_like(param) for _ in range(num_ranks)]
                dist.all_gather(gathered, param.grad)
                wanted = functools.reduce(torch.add, gathered)
                if (op or configured) == "mean" or configured == "mean":
                    wanted = wanted / num_ranks
                if (op or configured) == "sum" and configured == "mean":
                    wanted = wanted * num_ranks  # as it says: the mean, times the number of ranks
                assert torch.equal(ours, wanted), (step, name)
            opt.step()


def refused_ops() -> list[str]:
    """On all ranks alike: unknown ones, hooks, weights, shards of an earlier mean, and ranks that differ."""
    texts = []
    with wrapped(CASE.model()) as ddp:
        around_both(ddp, 0)
        texts.append(text_of(ConfigError, lambda: ddp.reduce_gradients_async("avg")))
        texts.append(text_of(Desync, lambda: ddp.reduce_gradients_async(("sum", "mean")[dist.get_rank()]).wait()))
        ddp.weight(2.0)
        around_both(ddp, 0)
        texts.append(text_of(PhaseError, lambda: ddp.reduce_gradients_async("sum").wait()))
    with wrapped(CASE.model()) as ddp:
        ddp.register_comm_hook(None, allreduce_hook)
        around_both(ddp, 0)
        texts.append(text_of(ConfigError, lambda: ddp.reduce_gradients_async("sum")))
    with training(CASE.model(), "zero1", "SGD") as (ddp, opt):
        for _ in range(2):
            CASE.loss(ddp, 0).backward()
            opt.step()
        around_both(ddp, 0)
        texts.append(text_of(PhaseError, lambda: ddp.reduce_gradients_async("sum").wait()))
    return [" | ".join(line.strip() for line in text.splitlines()) for text in texts]


def test_an_op_that_cannot_be_right_is_refused_on_every_rank(two_ranks: Ranks) -> None:
    expected = [
        'op must be "mean" or "sum", got \'avg\'. | reduce_gradients_async(op) | Leave it out for the op of the settings.',
        'ranks are not in the same step. | synchronisation 0, rank {rank} | rank 0: synchronisation 0, op="sum" | '
        "rank 1: synchronisation 0 | Run as many synchronised backwards and optimizer steps on every rank; one without a "
        "backward calls finish().",
        'weights divide gradients, and op="sum" was asked for on rank 0, 1. | reduce_gradients_async(), synchronisation 1 | '
        "Leave the op or the weights out.",
        "with a communication hook it is the hook that divides gradients. | reduce_gradients_async(op) | "
        "Leave op out, and have the hook do what you want.",
        "rank 0, 1 holds shards of what an earlier synchronisation has brought, which another op would count again. | "
        "reduce_gradients_async(), synchronisation 2 | Call zero_grad() before the accumulation, or set op in SyncConfig.",
    ]
    for rank, texts in enumerate(two_ranks.run(refused_ops)):
        assert texts == [text.format(rank=rank) for text in expected]


@in_ranks(2)
def test_what_zero2_has_accumulated_can_be_reduced_by_hand_in_every_step() -> None:
    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        for micro in range(2):
            around_both(ddp, 2 * step + micro)
        ddp.reduce_gradients_async().wait()
        opt.step()

    def usual(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        around_both(ddp, 2 * step)
        CASE.loss(ddp, 2 * step + 1).backward()
        opt.step()

    expected = trained(CASE, "zero2", "SGD", num_steps=4, each=usual)
    require_equal(expected, trained(CASE, "zero2", "SGD", num_steps=4, each=each))


def alone_at_the_wrong_time() -> list[str]:
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    texts = []
    with wrapped(CASE.model(), process_group=group) as ddp:
        texts.append(text_of(PhaseError, ddp.reduce_gradients_async))
        around_both(ddp, 0)
        ddp.reduce_gradients_async("sum").wait()
        texts.append(text_of(PhaseError, ddp.reduce_gradients_async))
        around_both(ddp, 1)
        CASE.loss(ddp, 1).backward()
        texts.append(text_of(PhaseError, ddp.reduce_gradients_async))
    dist.destroy_process_group(group)
    return [text.splitlines()[0] for text in texts]


def test_a_rank_alone_is_told_the_same(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(alone_at_the_wrong_time):
        assert texts == [nothing_to_reduce(0, "0").splitlines()[0]] * 3


def backward_during_a_reduction() -> str:
    with wrapped(CASE.model()) as ddp:
        around_both(ddp, 0)
        loss = CASE.loss(ddp, 1)
        reduction = ddp.reduce_gradients_async()
        text = text_of(PhaseError, loss.backward)
        reduction.wait()
    return text


def test_a_backward_during_a_reduction_is_an_error(two_ranks: Ranks) -> None:
    for text in two_ranks.run(backward_during_a_reduction):
        assert text == (
            "a backward began while gradients are being synchronised.\n"
            "  synchronisation 0\n"
            "  Wait for reduce_gradients_async() before the next backward."
        )


@in_ranks(2, 3)
def test_a_failed_micro_batch_does_not_keep_the_next_backward_from_synchronising() -> None:
    """The loss that synchronises was made before another one failed while accumulating."""
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=1e-6) as (ddp, bare):
        last = CASE.loss(ddp, 1)
        failing = CASE.loss(ddp, 0)
        first_weight = next(ddp.parameters())
        handle = first_weight.register_hook(lambda _: 1 / 0)
        with ddp.no_sync(), contextlib.suppress(ZeroDivisionError):
            failing.backward()
        handle.remove()
        ddp.zero_grad()
        last.backward()
        CASE.loss(bare, 1).backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)


@in_ranks(2, 3)
def test_an_attached_model_accumulates() -> None:
    model, bare = CASE.model(), CASE.model()
    sync = attach(model)
    for each, context in ((model, sync.accumulate), (bare, contextlib.nullcontext)):
        with context():
            CASE.loss(each, 0).backward()
        CASE.loss(each, 1).backward()
    naive_mean(bare)
    require_same_gradients(model, bare)
    sync.close()
