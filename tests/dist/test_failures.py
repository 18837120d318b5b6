import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from support.alike import backward_alike, of_all_ranks
from support.errors import text_of
from support.inside import cloned_group, interrupt, own_group_of, skip_a_round, watch_of
from support.levels import some
from support.models import Branches, noise
from support.naive import naive_mean, require_same_gradients, wrapped_and_bare
from support.ranks import in_ranks
from undertow import Desync, DistributedDataParallel, PeerFailed, PhaseError, attach, save_checkpoint


class Stop(Exception):
    """What the user's code raises."""


def raise_stop(*_: object) -> None:
    raise Stop


def loss(model: nn.Module, step: int = 0) -> Tensor:
    return model(noise(2, 4, step=step)).square().sum()


def failing_backward(ddp: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Backward raises when it reaches a layer in the middle; some buckets have left, one is still empty."""
    return failing(ddp.module.layers[1].weight.register_hook(raise_stop))


@contextlib.contextmanager
def failing(hook: RemovableHandle) -> Iterator[None]:
    try:
        with pytest.raises(Stop):
            yield
    finally:
        hook.remove()


SMALL = {"bucket_cap_mb": 1e-6}
THEIRS = (
    "backward failed on rank {ranks}.\n"
    "  synchronization {step}, rank {rank}\n"
    "  The gradients of this step are incomplete on every rank: drop them, and see the log of that rank."
)


def step_is_right(ddp: nn.Module, bare: nn.Module, step: int) -> None:
    backward_alike(ddp, bare, loss, steps=[step])


@in_ranks(2, 3)
def test_what_was_accumulated_before_a_failure_is_still_synchronized() -> None:
    """Layer 2 has a gradient from a micro-batch; the failed backward had not reached it, and no later one does."""
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, bare):
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


@in_ranks(2, 3)
@pytest.mark.parametrize("rescue", ["forward", "finish", "wait"])
@pytest.mark.parametrize("failing_step", [0, 2])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_failure_on_one_rank_is_told_to_the_others_and_the_next_step_is_right(
    failing_rank: int, failing_step: int, rescue: str
) -> None:
    rank = dist.get_rank()
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, bare):
        for step in range(5):
            if step == failing_step:
                result = loss(ddp, step)
                if rank == failing_rank:
                    with failing_backward(ddp):
                        result.backward()
                    if rescue != "forward":
                        getattr(ddp, rescue)()
                else:
                    assert text_of(PeerFailed, result.backward) == THEIRS.format(ranks=failing_rank, step=failing_step, rank=rank)
            step_is_right(ddp, bare, step)


STEPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "of all": lambda _, optimizer: optimizer.step(),
    "of some parameters": lambda ddp, _: torch.optim.SGD(ddp.module.layers[2].parameters(), lr=0.1).step(),
    "of others too": lambda ddp, _: torch.optim.SGD([*ddp.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1).step(),
    "after a norm": lambda ddp, optimizer: (nn.utils.clip_grad_norm_(ddp.parameters(), 1.0), optimizer.step()),
    "by a scaler": lambda _, optimizer: scaler().step(optimizer),
    "after zero_grad": lambda _, optimizer: (optimizer.zero_grad(), optimizer.step()),
}
UNSOUND = (
    "the last backward or synchronization failed: these gradients are not the mean over ranks.\n"
    "  SGD, rank {rank}\n"
    "  Call zero_grad(), and run a backward that succeeds on every rank, before the next step."
)


def scaler() -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu", init_scale=1.0)
    made.scale(torch.zeros(()))
    return made


def equal_on_all_ranks(model: nn.Module) -> None:
    values = [param.tolist() for param in model.parameters()]
    assert of_all_ranks(values) == [values] * dist.get_world_size()


@in_ranks(2)
@pytest.mark.parametrize("how", some(STEPS, most=1))
@pytest.mark.parametrize("failing_ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("failing_step", [0, 2])
def test_a_step_after_a_failed_backward_is_an_error_on_every_rank(
    failing_step: int, failing_ranks: tuple[int, ...], how: str
) -> None:
    rank = dist.get_rank()
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, _):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for step in range(4):
            if step == failing_step:
                result = loss(ddp, step)
                with failing_backward(ddp) if rank in failing_ranks else pytest.raises(PeerFailed):
                    result.backward()
                assert text_of(PhaseError, lambda: STEPS[how](ddp, optimizer)) == UNSOUND.format(rank=rank)
                equal_on_all_ranks(ddp)
                if how == "of all":
                    loss(ddp, step).backward()  # once more, with what there is
                    optimizer.step()
            optimizer.zero_grad()
            loss(ddp, step).backward()
            optimizer.step()
            equal_on_all_ranks(ddp)


@in_ranks(2)
def test_a_step_with_a_closure_begins_anew_after_a_failure() -> None:
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, _):
        optimizer = torch.optim.LBFGS(ddp.parameters(), max_iter=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            result = loss(ddp)
            result.backward()
            return result

        with failing_backward(ddp) if dist.get_rank() == 1 else pytest.raises(PeerFailed):
            optimizer.step(closure)
        optimizer.step(closure)
        equal_on_all_ranks(ddp)


@in_ranks(2)
def test_a_step_after_a_micro_batch_that_failed_is_an_error() -> None:
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, bare):
        with ddp.no_sync(), failing_backward(ddp):
            loss(ddp).backward()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        assert text_of(PhaseError, optimizer.step) == UNSOUND.format(rank=dist.get_rank())
        ddp.zero_grad()
        with ddp.no_sync():
            loss(ddp).backward()
            optimizer.step()  # each rank by itself, on purpose
        ddp.broadcast_parameters()
        bare.load_state_dict(ddp.module.state_dict())
        step_is_right(ddp, bare, 1)


@in_ranks(2)
def test_a_step_after_a_failed_forward_is_the_others() -> None:
    """A rank without gradients joins the others when its optimizer steps, whatever has kept it from a backward."""
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, _):
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if dist.get_rank() == 1:
            with failing(ddp.module.layers[1].register_forward_hook(raise_stop)):
                loss(ddp)
        else:
            loss(ddp).backward()
        optimizer.step()
        equal_on_all_ranks(ddp)


@in_ranks(2, 3)
def test_a_rank_that_failed_before_its_first_gradient_can_finish() -> None:
    """No synchronization of its own has begun."""
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, bare):
        result = loss(ddp)
        if dist.get_rank() == 1:
            with failing(result.register_hook(raise_stop)):
                result.backward()
            ddp.finish()
        else:
            result.backward()
        step_is_right(ddp, bare, 1)


@in_ranks(2, 3)
def test_a_rank_in_another_step_is_an_error_on_all() -> None:
    """No order of calls that we know of leads to this; but a rank that has counted wrongly must not train on."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, bare):
        step_is_right(ddp, bare, 0)
        if rank == 1:
            skip_a_round(ddp)
        others = "rank 0" if num_ranks == 2 else "ranks 0, 2"
        places = f"  {others}: synchronization 1\n  rank 1: synchronization 2\n"
        assert text_of(Desync, loss(ddp).backward) == (
            "ranks are not in the same step.\n"
            f"  synchronization {1 + (rank == 1)}, rank {rank}\n"
            f"{places}"
            "  Run the same number of synchronized backwards and steps on every rank. A rank without a backward calls finish()."
        )


@pytest.mark.deep
@in_ranks(2, 3)
def test_an_optimizer_that_steps_in_backward_is_an_error() -> None:
    """In a hook of the user's, when the first gradients are there."""
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, bare):
        optimizer = torch.optim.SGD(ddp.module.layers[2].parameters(), lr=0.1)
        for step in range(2):
            before = [param.detach().clone() for param in ddp.parameters()]
            handle = ddp.module.layers[0].weight.register_hook(lambda _: optimizer.step())
            # The synchronization that the first error has ended counts, and the right one after it.
            assert text_of(PhaseError, loss(ddp, step).backward) == (
                "an optimizer steps within a backward, on gradients that are not averaged yet.\n"
                f"  SGD, synchronization {2 * step}, rank {dist.get_rank()}\n"
                "  Step after backward. torch's _apply_optimizer_in_backward is not supported."
            )
            handle.remove()
            assert all(map(torch.equal, before, ddp.parameters()))
            step_is_right(ddp, bare, step)
        other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        handle = ddp.module.layers[0].weight.register_hook(lambda _: other.step())  # of no concern to us
        step_is_right(ddp, bare, 2)
        handle.remove()


@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("in_forward", some([True, False], most=1), ids=["before the forward", "before the backward"])
def test_a_step_after_the_group_is_gone_is_an_error(in_forward: bool) -> None:
    model = Branches()
    with contextlib.closing(attach(model)) as sync:
        result, rank = None if in_forward else loss(model), dist.get_rank()
        dist.destroy_process_group(own_group_of(sync).process_group)
        assert text_of(PhaseError, lambda: (loss(model) if result is None else result).backward()) == (
            "the process group of this model has been destroyed.\n"
            f"  a message to other ranks, rank {rank}\n"
            "  Call torch.distributed.destroy_process_group() after the last backward. With a ShardedOptimizer, call it after "
            "the last step() and state_dict()."
        )


@pytest.mark.deep
@in_ranks(2, is_fresh=True, timeout_s=20.0)  # sooner than a stall is reported, which takes half a minute
@pytest.mark.parametrize("where", ["join", "checkpoint, later"])
def test_a_rank_that_closes_its_model_after_a_failure_is_not_waited_for(where: str, tmp_path: Path) -> None:
    """Rank 1 ends training with an exception and lives on, so that no connection breaks; rank 0 waits over the user's group."""
    failed = pytest.raises(Stop if dist.get_rank() == 1 else PeerFailed)
    with failed as caught, contextlib.closing(DistributedDataParallel(nn.Linear(4, 4))) as ddp:
        with ddp.join() if where == "join" else contextlib.nullcontext():
            for step in range(2 if dist.get_rank() == 0 else 3):
                if step == 2:
                    raise_stop()
                loss(ddp, step).backward()
        while where == "checkpoint, later" and not watch_of(ddp).left:  # the other one has closed its model
            time.sleep(0.01)
        if where != "join":
            save_checkpoint(tmp_path / "checkpoint", ddp)
    if dist.get_rank() == 0:
        assert str(caught.value).startswith(f"rank 1 has failed: {Stop.__module__}.Stop\n  synchronization 2, rank 0\n")


@pytest.mark.deep
@in_ranks(2, timeout_s=20.0)
def test_ranks_go_on_within_join_after_a_backward_that_failed_on_one() -> None:
    with wrapped_and_bare(Branches(), **SMALL) as (ddp, _), ddp.join():
        for step in range(3):
            hook = next(ddp.parameters()).register_hook(raise_stop) if dist.get_rank() == step == 1 else None
            with pytest.raises((Stop, PeerFailed)) if step == 1 else contextlib.nullcontext():
                ddp(noise(4, 4, step=step)).sum().backward()
            if hook is not None:
                hook.remove()
            ddp.zero_grad()


# What is relied on of gloo where a rank fails: torch's waits end, and a connection tells whether its peer is there.


WORKS: dict[str, Callable[[dist.ProcessGroup], dist.Work]] = {
    "a receive": lambda group: dist.irecv(torch.zeros(4), group=group, group_src=1),
    "a reduction": lambda group: dist.all_reduce(torch.zeros(4), group=group, async_op=True),
}


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("what", some(WORKS, most=1))
def test_what_waits_wakes_up_and_other_groups_go_on(what: str) -> None:
    """Rank 0 waits for what rank 1 never sends, and is woken on this rank alone."""
    group = cloned_group()
    dist.barrier()  # it is made on both
    if dist.get_rank() == 0:
        work, waker = WORKS[what](group), threading.Timer(0.2, interrupt, [group])
        waker.start()
        assert text_of(RuntimeError, work.wait) == "Application timeout caused pair closure"
        waker.join()
        del work
    dist.barrier()  # of another group, which goes on
    dist.destroy_process_group(group)
