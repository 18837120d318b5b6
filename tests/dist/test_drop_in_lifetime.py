"""Wrappers that are closed, dropped, copied, or followed by another one: a closed one averages nothing, and leaves nothing."""

import contextlib
import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim.optimizer import _global_optimizer_pre_hooks

from support.alike import backward_alike, of_all_ranks
from support.errors import text_of
from support.levels import some
from support.models import CASES, mlp, noise
from support.naive import TIMEOUT_S, groups_of, naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from undertow import ConfigError, DistributedDataParallel, PhaseError, PlanMismatch, ShardedOptimizer, SyncConfig, attach

WRAP = pytest.mark.parametrize("wrap", [DistributedDataParallel, attach])


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def batch() -> Tensor:
    return torch.full((2, 4), 1.0 + dist.get_rank())


def require_closed(what: str, call: Callable[[], object]) -> None:
    """The call is refused by the name of what was called."""
    assert text_of(PhaseError, call) == (
        "this model is closed, by close() or by a newer wrapper of its parameters: its gradients are no longer averaged.\n"
        f"  {what}, rank {dist.get_rank()}\n"
        "  Use the newer wrapper. If there is none, wrap `model.module` again, or train it without averaging."
    )


@in_ranks(1, 2)
def test_a_training_forward_through_a_closed_wrapper_is_an_error() -> None:
    model = DistributedDataParallel(linear())
    model(batch()).sum().backward()
    model.close()
    model.close()
    require_closed("a training forward", lambda: model(batch()))
    with torch.no_grad():
        assert torch.equal(model(batch()), model.module(batch()))
    assert torch.equal(model.eval()(batch()), model.module(batch()))
    model.train().module.zero_grad()
    model.module(batch()).sum().backward()  # the user's own module, on this rank's batch alone
    assert torch.equal(model.module.bias.grad, torch.full((3,), 2.0))
    assert torch.equal(model.module.weight.grad, torch.full((3, 4), 2.0 * (1 + dist.get_rank())))


@in_ranks(2)
@WRAP
def test_the_newest_wrapper_closes_the_older_one(wrap: Callable[[nn.Module], Any]) -> None:
    """Gradients are averaged once, also if the older one has accumulated some."""
    earlier = DistributedDataParallel(linear())
    with earlier.no_sync():
        earlier(batch()).sum().backward()
    newer = wrap(earlier.module)
    called = newer if wrap is DistributedDataParallel else earlier.module
    called(batch()).sum().backward()
    assert torch.equal(earlier.module.weight.grad, torch.full((3, 4), 6.0))
    require_closed("accumulate()", lambda: earlier.accumulate().__enter__())
    torch.optim.SGD(earlier.module.parameters(), lr=0.1).step()
    require_closed("a training forward", lambda: earlier(batch()))
    newer.close()
    require_closed("a training forward", lambda: earlier(batch()))


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3))


def in_a_cycle(module: nn.Module) -> None:
    cycle: list[object] = [DistributedDataParallel(module)]
    cycle.append(cycle)


def in_a_thread(module: nn.Module) -> None:
    kept = [DistributedDataParallel(module)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()


def before_its_backward(module: nn.Module) -> None:
    DistributedDataParallel(module)(batch()).sum().backward()


def after_a_step(module: nn.Module) -> None:
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.125)
    model(batch()).sum().backward()
    optimizer.step()


def within_a_backward(module: nn.Module) -> None:
    """After its first bucket has left."""
    kept = [DistributedDataParallel(module, config=SyncConfig(bucket_cap_mb=1e-6))]
    hidden = module[0].register_forward_hook(lambda *results: results[-1].register_hook(lambda _: kept.clear()) and None)
    loss = kept[0](batch()).sum()
    hidden.remove()
    assert "the process group of this model has been destroyed" in text_of(PhaseError, loss.backward)


DROPS: dict[str, Callable[[Any], object]] = {
    "at once": lambda module: DistributedDataParallel(module) and None,
    "before its backward": before_its_backward,
    "within its backward": within_a_backward,
    "after a step": after_a_step,
    "in a cycle": in_a_cycle,
    "in another thread": in_a_thread,
}


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("is_collected", [True, False], ids=["collected", "wrapped again at once"])
@pytest.mark.parametrize("name", some(DROPS, most=3))
def test_a_wrapper_that_is_dropped_is_closed_and_its_module_can_be_wrapped_again(name: str, is_collected: bool) -> None:
    gc.collect()
    module, num_groups, num_hooks = two_layers(), len(dist.distributed_c10d._world.pg_map), len(_global_optimizer_pre_hooks)
    DROPS[name](module)
    if is_collected:
        gc.collect()
        assert (len(dist.distributed_c10d._world.pg_map), len(_global_optimizer_pre_hooks)) == (num_groups, num_hooks)
        assert [param for param in module.parameters() if param._post_accumulate_grad_hooks] == []
        bare = copy.deepcopy(module)
        backward_alike(module, bare, lambda model, _: model(batch()).sum(), mean=lambda _: None)  # each rank trains alone
    module.zero_grad()
    with wrapped_and_bare(module) as (ddp, bare):
        backward_alike(ddp, bare, lambda model, _: model(batch()).sum(), steps=[0])
        gc.collect()
        backward_alike(ddp, bare, lambda model, _: model(batch()).sum(), steps=[1])


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_a_reduction_on_its_way_arrives_when_the_wrapper_is_dropped() -> None:
    module = linear()
    model = DistributedDataParallel(module)
    with model.no_sync():
        model(batch()).sum().backward()
    reduction = model.reduce_gradients_async()
    del model
    gc.collect()
    reduction.wait()
    assert torch.equal(module.weight.grad, torch.full((3, 4), 3.0))


@in_ranks(2)
def test_attach_averages_whether_its_result_is_kept_or_not() -> None:
    module = linear()
    attach(module)
    gc.collect()
    module(batch()).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((3, 4), 3.0))


CALLS: dict[str, dict[str, Callable[[Any], object]]] = {
    "both": {
        "accumulate()": lambda sync: sync.accumulate().__enter__(),
        "mean_over_ranks(number)": lambda sync: sync.mean_over_ranks(2),
        "finish()": lambda sync: sync.finish(),
        "reduce_gradients_async()": lambda sync: sync.reduce_gradients_async(),
        "register_comm_hook()": lambda sync: sync.register_comm_hook(None, print),
        "broadcast_parameters()": lambda sync: sync.broadcast_parameters(),
        "measure_network()": lambda sync: sync.measure_network(),
        "ShardedOptimizer": lambda sync: ShardedOptimizer(torch.optim.SGD, sync, lr=0.1),
    },
    "a wrapper": {
        "join()": lambda wrapper: wrapper.join(),
        "accumulate()": lambda wrapper: wrapper.no_sync().__enter__(),
    },
}


@in_ranks(2)
@WRAP
def test_what_asks_a_closed_one_to_synchronize_is_the_same_error(wrap: Callable[[nn.Module], Any]) -> None:
    module = linear()
    model = wrap(module)
    module(batch()).sum().backward()
    model.close()
    for name, call in [*CALLS["both"].items(), *(CALLS["a wrapper"].items() if wrap is DistributedDataParallel else ())]:
        require_closed(name, lambda call=call: call(model))
    model.wait()
    assert (model.report().rank, len(model.plan.params)) == (dist.get_rank(), 2)


@in_ranks(2)
def test_the_state_of_shards_cannot_be_gathered_when_the_model_is_closed() -> None:
    with wrapped(linear()) as model:
        optimizer = ShardedOptimizer(torch.optim.AdamW, model, lr=0.1)
        model(batch()).sum().backward()
        optimizer.step()
    assert any(optimizer.state.values())  # this rank's shards, which save_checkpoint writes
    for call in (optimizer.state_dict, optimizer.consolidate_state_dict):
        assert text_of(PhaseError, call) == (
            "the model of this optimizer is closed, by close() or by a newer wrapper of its parameters: its shards are no "
            "longer gathered.\n"
            f"  ShardedOptimizer, rank {dist.get_rank()}\n"
            "  Call state_dict() before close(); save_checkpoint() works afterwards too."
        )


def run_once_in_a_wrapper(module: nn.Module) -> None:
    with wrapped(module) as model:
        model(batch())


@in_ranks(2)
@pytest.mark.parametrize(("is_attached", "strategy"), [(False, None), (True, None), (False, "zero1")])
def test_a_backward_after_close_is_warned_of_if_its_forward_was_before(is_attached: bool, strategy: str | None) -> None:
    module, config = linear(), SyncConfig(strategy=strategy)
    model = attach(module, config=config) if is_attached else DistributedDataParallel(module, config=config)
    called = module if is_attached else model
    called(batch()).sum().backward()
    loss, other_loss = called(batch()).sum(), called(batch()).sum()
    model.close()
    with pytest.warns(UserWarning, match="this backward averages nothing: the model was closed between its forward and this"):
        loss.backward()
    other_loss.backward()  # it is told once
    assert not module._forward_pre_hooks
    assert not module.weight._post_accumulate_grad_hooks
    run_once_in_a_wrapper(module)
    pickle.dumps(module)
    module(batch()).sum().backward()  # the forward of this one is the user's own
    assert not module._forward_pre_hooks
    run_once_in_a_wrapper(module)
    dropped = weakref.ref(module)
    del module, model, called
    gc.collect()
    assert dropped() is None


@in_ranks(2)
def test_close_inside_a_backward_is_refused() -> None:
    texts: list[str] = []
    with wrapped(linear()) as ddp:
        x = batch().requires_grad_()
        x.register_hook(lambda _: texts.append(text_of(PhaseError, ddp.close)))
        ddp(x).sum().backward()
    assert texts == [
        "close() was called inside a backward.\n"
        f"  rank {dist.get_rank()}\n"
        "  Call it after backward: gradients of this one may be on their way."
    ]


# Copies, and other process groups.

MLP = CASES["mlp"]
Way = Callable[[nn.Module], nn.Module]


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


with_every_way = pytest.mark.parametrize("way", [copy.deepcopy, saved])


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("num_steps_before", [0, 1, 2])
@WRAP
@with_every_way
def test_a_copy_trains_on(way: Way, wrap: Callable[..., Any], num_steps_before: int) -> None:
    """The copy and its origin go on in turns, on data and with parameters of their own. That of an attached model is bare."""
    model = MLP.model()
    bare, is_attached = copy.deepcopy(model), wrap is attach
    holder = wrap(model, config=SyncConfig(bucket_cap_mb=1e-6 if num_steps_before == 1 else None))
    origin = model if is_attached else holder
    backward_alike(origin, bare, MLP.loss, steps=range(num_steps_before))
    twin, other = way(origin), copy.deepcopy(bare)
    assert type(twin) is type(origin)
    if is_attached and dist.get_rank() == 0:
        backward_alike(twin, other, MLP.loss, mean=lambda _: None)
    again = attach(twin) if is_attached else twin
    for param in (*twin.parameters(), *other.parameters()):
        param.data.mul_(0.5)
    for step in range(3):
        backward_alike(twin, other, MLP.loss, steps=[10 + step])
        backward_alike(origin, bare, MLP.loss, steps=[step])
    again.close()
    holder.close()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_every_way
def test_one_rank_may_copy_the_wrapper_alone_in_the_middle_of_a_step(way: Way) -> None:
    """As for a checkpoint, or for a moving average of the weights: nobody else takes part."""

    def loss(model: nn.Module, step: int) -> Tensor:
        with ddp.no_sync():
            MLP.loss(model, 2 * step).backward()
        if model is ddp and dist.get_rank() == 0:
            twin, x = way(ddp), noise(5, 6)
            with torch.no_grad():
                assert torch.equal(twin.module(x), bare(x))
                assert torch.equal(twin.eval()(x), bare(x))
            twin.close()
        return MLP.loss(model, 2 * step + 1)

    with wrapped_and_bare(mlp()) as (ddp, bare):
        backward_alike(ddp, bare, loss)


def doubled(_state, bucket):
    """Twice the sum."""
    return dist.all_reduce(bucket.buffer().mul_(2), async_op=True).get_future()


@in_ranks(2)
@with_every_way
def test_a_communication_hook_is_not_copied(way: Way) -> None:
    """The copy averages in the usual way, and may get a hook of its own; the origin keeps its own."""
    with wrapped_and_bare(mlp()) as (ddp, bare):
        ddp.register_comm_hook(None, doubled)
        with pytest.warns(UserWarning, match=r"^the communication hook is not copied; register it on the copy again\.$"):
            twin = way(ddp)
        for model in (ddp, twin, bare):
            MLP.loss(model, 0).backward()
        naive_mean(bare)
        require_same_gradients(twin, bare)
        for param in bare.parameters():
            param.grad *= 2 * dist.get_world_size()
        require_same_gradients(ddp, bare)
        twin.register_comm_hook(None, allreduce_hook)
        twin.close()


NOT_AMONG = (
    "this process is not among the ranks of the model, {}.\n"
    "  a copy of a wrapped model\n"
    "  Call torch.distributed.init_process_group() and load it on those ranks only, or save model.module."
)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_copy_that_is_loaded_in_the_wrong_place_says_so() -> None:
    rank, (group,) = dist.get_rank(), groups_of([0], [1])
    with wrapped(mlp(), process_group=group) as ddp:
        written = of_all_ranks(pickle.dumps(ddp))
    assert text_of(ConfigError, lambda: pickle.loads(written[1 - rank])) == (NOT_AMONG.format(1 - rank))
    dist.destroy_process_group()
    assert text_of(ConfigError, lambda: pickle.loads(written[rank])) == NOT_AMONG.format(rank)


PATIENCE_S = 10.0


def step(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(2, 4)).sum().backward()


def wraps_and_closes(*, has_shards: bool) -> None:
    ddp = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1) if has_shards else None
    step(ddp)
    if optimizer is not None:
        optimizer.step()
    ddp.close()


WRAPS: dict[str, Callable[[], object]] = {
    "closed": partial(wraps_and_closes, has_shards=False),
    "closed with shards": partial(wraps_and_closes, has_shards=True),
    "dropped": lambda: step(DistributedDataParallel(nn.Linear(4, 4))),
    "failed on all ranks": lambda: text_of(PlanMismatch, lambda: DistributedDataParallel(nn.Linear(4, 4 + dist.get_rank()))),
    "refused": lambda: text_of(ConfigError, lambda: DistributedDataParallel(nn.Linear(4, 4), ignore=["no such parameter"])),
}


def held() -> Counter[str]:
    gc.collect()
    threads = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    descriptors = Counter(_target(entry) for entry in os.listdir("/proc/self/fd"))
    groups = {"process groups": len(dist.distributed_c10d._world.pg_map), "tasks": len(os.listdir("/proc/self/task"))}
    # What ranks tell each other all the time is in bytes and whole numbers: parameters, gradients and buckets are not.
    tensors = {"tensors": sum(isinstance(each, torch.Tensor) and each.is_floating_point() for each in gc.get_objects())}
    return threads + descriptors + Counter(groups) + Counter(tensors)


def held_at_rest() -> Counter[str]:
    """What is held when no thread is about to let go of anything."""
    deadline, now = time.monotonic() + PATIENCE_S, held()
    while True:
        time.sleep(0.3)
        before, now = now, held()
        if before == now or time.monotonic() > deadline:
            return now


def grown_since(before: Counter[str]) -> dict[str, tuple[int, int]]:
    """What there is more of, or less, than then. A thread may hold something for a moment: it is looked for again."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        now = held()
        changed = {name: (before[name], now[name]) for name in before.keys() | now.keys() if before[name] != now[name]}
        if not changed or time.monotonic() > deadline:
            return changed
        time.sleep(0.1)


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0]
    except FileNotFoundError:
        return "the one that lists them"


@pytest.mark.slow
@in_ranks(2)
@pytest.mark.parametrize("name", WRAPS)
def test_nothing_is_left_of_many_wraps(name: str) -> None:
    for number in range(16):
        if number == 6:
            dist.barrier()
            after_6 = held_at_rest()
        WRAPS[name]()
    dist.barrier()
    assert grown_since(after_6) == {}


def storages() -> dict[int, int]:
    """Address and bytes of every storage above 1 KB of a tensor that Python sees, except messages, which are of bytes."""
    kinds = (torch.Tensor, nn.Parameter)
    tensors = [thing for thing in gc.get_objects() if type(thing) in kinds and thing.dtype != torch.uint8]
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {pointer: size for pointer, size in found.items() if size > 1024}


@pytest.mark.deep
@in_ranks(2)
def test_after_a_change_of_plan_the_gradients_are_still_there_once() -> None:
    layers = [nn.Linear(64, 64) for _ in range(6)]
    # They run in another order than they are registered in, so that the second step has another plan.
    module = nn.ModuleList(layers)
    module.forward = nn.Sequential(*reversed(layers)).forward
    gc.collect()
    gc.disable()  # what only the garbage collector frees is held for long
    try:
        before = storages()
        with contextlib.closing(DistributedDataParallel(module, config=SyncConfig(bucket_cap_mb=0.04))) as model:
            first_plan = model.plan.to_json()
            for _ in range(3):
                model.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
            held = sum(size for pointer, size in storages().items() if pointer not in before)
    finally:
        gc.enable()
    assert model.plan.to_json() != first_plan
    # Trailers and padding: some 60 elements for each of the eight buckets or fewer.
    gradient_bytes = sum(param.nbytes for param in module.parameters())
    assert gradient_bytes <= held <= gradient_bytes + 8 * 100 * 4
