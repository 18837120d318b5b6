from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.models import Branches, noise
from support.naive import naive_mean, require_same_gradients, wrapped_and_bare
from support.ranks import Ranks
from undertow import Desync, DistributedDataParallel, PeerFailed, PhaseError, UndertowError, attach, save_checkpoint

CAPS = [1e-6, 25.0]


class Stop(Exception):
    """What the user's code raises."""


def raise_stop(*_: object) -> None:
    raise Stop


def loss(model: nn.Module, step: int = 0) -> Tensor:
    return model(noise(2, 4, step=step)).square().sum()


@contextlib.contextmanager
def failing_backward(ddp: nn.Module, index: int = 1) -> Iterator[None]:
    """Backward raises when it reaches a layer in the middle; some buckets have left, one is still empty."""
    handle = ddp.module.layers[index].weight.register_hook(raise_stop)
    try:
        with pytest.raises(Stop):
            yield
    finally:
        handle.remove()


@contextlib.contextmanager
def failing_forward(ddp: nn.Module) -> Iterator[None]:
    handle = ddp.module.layers[1].register_forward_hook(raise_stop)
    try:
        with pytest.raises(Stop):
            yield
    finally:
        handle.remove()


def step_is_right(ddp: nn.Module, bare: nn.Module, step: int, *, zero: str = "before forward") -> None:
    for model in (ddp, bare):
        if zero == "before forward":
            model.zero_grad()
        result = loss(model, step)
        if zero == "after forward":
            model.zero_grad()
        result.backward()
    naive_mean(bare)
    require_same_gradients(ddp, bare)


def all_ranks_fail(way: Callable, failing_step: int, bucket_cap_mb: float, zero: str) -> None:
    with wrapped_and_bare(Branches(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for step in range(4):
            if step == failing_step:
                with way(ddp):
                    loss(ddp, step).backward()
            step_is_right(ddp, bare, step, zero=zero)


@pytest.mark.parametrize("zero", ["before forward", "after forward"])
@pytest.mark.parametrize("bucket_cap_mb", CAPS)
@pytest.mark.parametrize("failing_step", [0, 2])
@pytest.mark.parametrize("way", [failing_forward, failing_backward])
def test_after_a_failure_on_all_ranks_the_next_step_is_right(
    ranks: Ranks, way: Callable, failing_step: int, bucket_cap_mb: float, zero: str
) -> None:
    ranks.run(all_ranks_fail, way, failing_step, bucket_cap_mb, zero)


def all_ranks_fail_before_the_next_loss_of_the_same_forwards(bucket_cap_mb: float, failing_step: int) -> None:
    with wrapped_and_bare(Branches(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for step in range(3):
            first, second = loss(ddp, 0), loss(ddp, 1)
            if step == failing_step:
                with failing_backward(ddp):
                    first.backward()
            ddp.zero_grad()
            second.backward()
            bare.zero_grad()
            loss(bare, 1).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)


@pytest.mark.parametrize("failing_step", [0, 1])
@pytest.mark.parametrize("bucket_cap_mb", CAPS)
def test_after_a_failed_backward_another_one_without_a_forward_is_right(
    ranks: Ranks, bucket_cap_mb: float, failing_step: int
) -> None:
    ranks.run(all_ranks_fail_before_the_next_loss_of_the_same_forwards, bucket_cap_mb, failing_step)


def accumulated_gradients_survive() -> None:
    """Layer 2 has a gradient from a micro-batch; the failed backward had not reached it, and no later one does."""
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6) as (ddp, bare):
        with ddp.no_sync():
            ddp(noise(2, 4), (2,)).sum().backward()
        with failing_backward(ddp):
            ddp(noise(2, 4), (1,)).sum().backward()
        ddp(noise(2, 4), (0,)).sum().backward()
        for index in (2, 0):
            bare(noise(2, 4), (index,)).sum().backward()
        naive_mean(bare)
        bare.layers[1].bias.grad = ddp.module.layers[1].bias.grad  # whatever the failed one has left
        require_same_gradients(ddp, bare)


def test_what_was_accumulated_before_a_failure_is_still_synchronised(ranks: Ranks) -> None:
    ranks.run(accumulated_gradients_survive)


def one_rank_fails(failing_rank: int, failing_step: int, bucket_cap_mb: float, rescue: str) -> list[str]:
    texts = []
    with wrapped_and_bare(Branches(), bucket_cap_mb=bucket_cap_mb) as (ddp, bare):
        for step in range(5):
            if step == failing_step:
                result = loss(ddp, step)
                if dist.get_rank() == failing_rank:
                    with failing_backward(ddp):
                        result.backward()
                    if rescue != "forward":
                        getattr(ddp, rescue)()
                else:
                    texts.append(text_of(PeerFailed, result.backward))
            step_is_right(ddp, bare, step)
    return texts


@pytest.mark.parametrize("rescue", ["forward", "finish", "wait"])
@pytest.mark.parametrize("bucket_cap_mb", CAPS)
@pytest.mark.parametrize("failing_step", [0, 2])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failure_on_one_rank_is_told_to_the_others_and_the_next_step_is_right(
    ranks: Ranks, failing_rank: int, failing_step: int, bucket_cap_mb: float, rescue: str
) -> None:
    for rank, texts in enumerate(ranks.run(one_rank_fails, failing_rank, failing_step, bucket_cap_mb, rescue)):
        expected = [
            f"backward failed on rank {failing_rank}.\n"
            f"  synchronisation {failing_step}, rank {rank}\n"
            "  The gradients of this step are incomplete on every rank: drop them, and see the log of that rank."
        ]
        assert texts == ([] if rank == failing_rank else expected)


def two_of_three_fail() -> list[str]:
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6) as (ddp, bare):
        result = loss(ddp)
        texts = []
        if dist.get_rank() != 1:
            with failing_backward(ddp):
                result.backward()
        else:
            texts = text_of(PeerFailed, result.backward).splitlines()
        step_is_right(ddp, bare, 1)
    return texts


def test_all_failed_ranks_are_named(three_ranks: Ranks) -> None:
    first, second, third = three_ranks.run(two_of_three_fail)
    assert (first, third) == ([], [])
    assert second[0] == "backward failed on rank 0, 2."


def fails_before_anything_arrived() -> None:
    """Rank 1 fails at its first gradient, so that no round of its own has begun."""
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6) as (ddp, bare):
        result = loss(ddp)
        if dist.get_rank() == 1:
            result.register_hook(raise_stop)
            with pytest.raises(Stop):
                result.backward()
            ddp.finish()
        else:
            result.backward()
        step_is_right(ddp, bare, 1)


def test_a_rank_that_failed_before_its_first_gradient_can_finish(ranks: Ranks) -> None:
    ranks.run(fails_before_anything_arrived)


def forward_fails_on_one_rank() -> None:
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6) as (ddp, bare):
        if dist.get_rank() == 1:
            with failing_forward(ddp):
                loss(ddp)
        step_is_right(ddp, bare, 0)


def test_a_failed_forward_on_one_rank_does_not_shift_its_steps(ranks: Ranks) -> None:
    ranks.run(forward_fails_on_one_rank)


def in_another_step() -> str:
    """No order of calls that we know of leads to this; but a rank that has counted wrongly must not train on."""
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6) as (ddp, bare):
        step_is_right(ddp, bare, 0)
        ddp.sync._engine._progress.num_rounds += dist.get_rank() == 1
        return text_of(Desync, loss(ddp).backward)


def test_a_rank_in_another_step_is_an_error_on_all(ranks: Ranks) -> None:
    texts = ranks.run(in_another_step)
    places = "".join(f"  rank {rank}: synchronisation {1 + (rank == 1)}\n" for rank in range(len(texts)))
    for rank, text in enumerate(texts):
        assert text == (
            "ranks are not in the same step.\n"
            f"  synchronisation {1 + (rank == 1)}, rank {rank}\n"
            f"{places}"
            "  Run as many synchronised backwards and optimizer steps on every rank; one without a backward calls finish()."
        )


def step_in_backward() -> list[str]:
    """The optimizer steps in a hook of the user's, when the first gradients are there."""
    texts = []
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6) as (ddp, bare):
        optimizer = torch.optim.SGD(ddp.module.layers[2].parameters(), lr=0.1)
        for step in range(2):
            before = [param.detach().clone() for param in ddp.parameters()]
            handle = ddp.module.layers[0].weight.register_hook(lambda _: optimizer.step())
            texts.append(text_of(PhaseError, loss(ddp, step).backward))
            handle.remove()
            assert all(map(torch.equal, before, ddp.parameters()))
            step_is_right(ddp, bare, step)
        other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        handle = ddp.module.layers[0].weight.register_hook(lambda _: other.step())  # of no concern to us
        step_is_right(ddp, bare, 2)
        handle.remove()
    return texts


def test_an_optimizer_that_steps_in_backward_is_an_error(ranks: Ranks) -> None:
    for rank, texts in enumerate(ranks.run(step_in_backward)):
        # The round that the first error has ended counts, and the right one after it.
        assert texts == [
            "an optimizer steps within a backward, on gradients that are not averaged yet.\n"
            f"  synchronisation {number}, rank {rank}\n"
            "  Step after backward, or leave optimizers in backward to torch's _apply_optimizer_in_backward."
            for number in (0, 2)
        ]


def after_the_group_is_gone(in_forward: bool) -> str:
    model = Branches()
    sync = attach(model)
    result = None if in_forward else loss(model)
    dist.destroy_process_group(sync.own_group.process_group)
    text = text_of(PhaseError, lambda: (loss(model) if result is None else result).backward())
    sync.close()
    return text


@pytest.mark.parametrize("in_forward", [True, False], ids=["before the forward", "before the backward"])
def test_a_step_after_the_group_is_gone_is_an_error(fresh_pair: Ranks, in_forward: bool) -> None:
    assert (
        fresh_pair.run(after_the_group_is_gone, in_forward)
        == [
            "the process group of this model has been destroyed.\n"
            "  gradient synchronisation\n"
            "  Call torch.distributed.destroy_process_group() after the last backward."
        ]
        * 2
    )


def caught_as_torchs_errors_are() -> bool:
    """Code that catches RuntimeError around a step catches ours too."""
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6) as (ddp, bare):
        caught: BaseException | None = None
        try:
            if dist.get_rank() == 1:
                with failing_backward(ddp):
                    loss(ddp).backward()
                ddp.finish()
            else:
                loss(ddp).backward()
        except RuntimeError as error:
            caught = error
        step_is_right(ddp, bare, 1)
    return isinstance(caught, UndertowError)


def test_errors_of_ours_are_runtime_errors(two_ranks: Ranks) -> None:
    assert two_ranks.run(caught_as_torchs_errors_are) == [True, False]


def closes_after_a_failure(where: str, path: Path) -> str:
    """Rank 1 ends training with an exception and lives on, so that no connection breaks; rank 0 waits over the user's group."""
    torch.manual_seed(0)
    with contextlib.suppress(Stop), contextlib.closing(DistributedDataParallel(nn.Linear(4, 4))) as ddp:
        around = ddp.join() if where == "join" else contextlib.nullcontext()

        def train() -> None:
            with around:
                for step in range(3):
                    if dist.get_rank() == 1 and step == 2:
                        raise_stop()
                    if dist.get_rank() == 0 and step == 2:
                        break
                    loss(ddp, step).backward()
            if where == "checkpoint, later":
                while dist.get_rank() == 0 and not ddp.sync._group.member.left:  # the other one has closed its model
                    time.sleep(0.01)
            if where != "join":
                save_checkpoint(path, ddp)

        if dist.get_rank() == 0:
            return text_of(PeerFailed, train)
        train()
    return ""


@pytest.mark.parametrize("where", ["join", "checkpoint", "checkpoint, later"])
def test_a_rank_that_closes_its_model_after_a_failure_is_not_waited_for(fresh_pair: Ranks, where: str, tmp_path: Path) -> None:
    """Sooner than a stall is reported, which takes half a minute."""
    text = fresh_pair.run(closes_after_a_failure, where, tmp_path / "checkpoint", timeout_s=20.0)[0]
    assert text.startswith(f"rank 1 has failed: {Stop.__module__}.Stop\n  synchronisation 2, rank 0\n")
