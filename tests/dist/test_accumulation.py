from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.errors import text_of
from support.models import CASES, Branches, noise
from support.naive import naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks
from undertow import PhaseError, attach

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


def sums_are_synchronised(way: str, bucket_cap_mb: float, set_to_none: bool) -> None:
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


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25.0])
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_are_summed_here_and_averaged_once(ranks: Ranks, way: str, bucket_cap_mb: float, set_to_none: bool) -> None:
    ranks.run(sums_are_synchronised, way, bucket_cap_mb, set_to_none)


def no_sync_around_forward_only_synchronises() -> None:
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


def test_no_sync_around_forward_only_changes_nothing(ranks: Ranks) -> None:
    ranks.run(no_sync_around_forward_only_synchronises)


def an_exception_leaves_the_context() -> None:
    with wrapped_and_bare(CASE.model()) as (ddp, bare):
        with contextlib.suppress(ZeroDivisionError), ddp.no_sync():
            CASE.loss(ddp, 0).backward()
            raise ZeroDivisionError
        CASE.loss(ddp, 1).backward()
        for step in range(2):
            CASE.loss(bare, step).backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)


def test_an_exception_inside_the_context_ends_accumulation(ranks: Ranks) -> None:
    ranks.run(an_exception_leaves_the_context)


def backwards_without_zero_grad(bucket_cap_mb: float) -> None:
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for step in range(4):
            for model in (ddp, bare):
                CASE.loss(model, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25.0])
def test_a_second_synchronised_backward_adds_the_mean_of_what_is_new(ranks: Ranks, bucket_cap_mb: float) -> None:
    ranks.run(backwards_without_zero_grad, bucket_cap_mb)


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


def several_losses(way: str, bucket_cap_mb: float) -> None:
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for _ in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                SEVERAL[way](model)
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@pytest.mark.parametrize("bucket_cap_mb", [1e-6, 25.0])
@pytest.mark.parametrize("way", SEVERAL)
def test_several_losses_in_one_step_are_right(ranks: Ranks, way: str, bucket_cap_mb: float) -> None:
    ranks.run(several_losses, way, bucket_cap_mb)


def reduction_by_hand_is_right() -> None:
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


def test_what_was_accumulated_can_be_reduced_by_hand(ranks: Ranks) -> None:
    ranks.run(reduction_by_hand_is_right)


def waited_for_by(end: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    with wrapped_and_bare(CASE.model(), bucket_cap_mb=1e-6) as (ddp, bare):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        around_both(ddp, 0)
        ddp.reduce_gradients_async()
        end(ddp, optimizer)
        CASE.loss(bare, 0).backward()
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


@pytest.mark.parametrize("end", [step_of_the_optimizer, next_forward, wait, finish])
def test_a_reduction_that_nobody_waited_for_is_completed(two_ranks: Ranks, end: Callable[..., None]) -> None:
    two_ranks.run(waited_for_by, end)


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


def nothing_to_reduce(number: int) -> str:
    return (
        "there is nothing to reduce: no accumulation has run since the last synchronisation.\n"
        f"  synchronisation {number}\n"
        "  Run backward inside accumulate() or no_sync(), then reduce once."
    )


def test_a_reduction_at_the_wrong_time_is_an_error(two_ranks: Ranks) -> None:
    for errors in two_ranks.run(errors_of_reductions):
        assert errors == {
            "before anything": nothing_to_reduce(0),
            "twice": "gradients are being synchronised already.\n"
            "  synchronisation 0\n"
            "  Call this outside of backward, and wait for the earlier reduction first.",
            "again": nothing_to_reduce(1),
            "after a synchronisation": nothing_to_reduce(2),
            "inside": "reduce_gradients_async() was called inside a backward.\n"
            "  Sync.reduce_gradients_async\n"
            "  Call it after the last backward of the step.",
        }


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


def a_failed_micro_batch_does_not_swallow_the_next_one() -> None:
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


def test_a_failed_micro_batch_does_not_keep_the_next_backward_from_synchronising(ranks: Ranks) -> None:
    ranks.run(a_failed_micro_batch_does_not_swallow_the_next_one)


def attached_accumulates() -> None:
    model, bare = CASE.model(), CASE.model()
    sync = attach(model)
    for each, context in ((model, sync.accumulate), (bare, contextlib.nullcontext)):
        with context():
            CASE.loss(each, 0).backward()
        CASE.loss(each, 1).backward()
    naive_mean(bare)
    require_same_gradients(model, bare)
    sync.close()


def test_an_attached_model_accumulates(ranks: Ranks) -> None:
    ranks.run(attached_accumulates)
