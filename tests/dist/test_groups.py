"""Several models, several process groups, and collectives of the user and of layers."""

import contextlib
import copy
import gc
import importlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from support.alike import backward_alike, backwards, heard, require_same_by_position
from support.errors import text_of
from support.inside import engine_of, is_watched, own_group_of, storage_of, timeout_of, without_a_ring
from support.levels import some
from support.models import CASES, Branches, mlp, noise
from support.naive import (
    TIMEOUT_S,
    alone,
    collectives,
    naive_mean,
    require_nearly_same,
    within,
    wrapped,
    wrapped_and_bare,
)
from support.ranks import in_ranks
from support.sharded import destroy, training
from undertow import ConfigError, DistributedDataParallel, ExpertGroup, ShardedOptimizer, SyncConfig, attach, average_gradients

MLP, CONVOLUTIONS = CASES["mlp"], CASES["convolutions"]
WRAP: dict[str, Callable[..., Any]] = {"DistributedDataParallel": DistributedDataParallel, "attach": attach}


def threads() -> set[str]:
    """Of the system, those of gloo too."""
    return set(os.listdir("/proc/self/task"))


@pytest.mark.deep
@in_ranks(2, 3, is_fresh=True)
def test_a_wrapper_starts_few_threads() -> None:
    """One that watches, of all neighbors and models, and those of a gloo group: one connects, two run collectives."""
    gloo = 3
    for expected in (1 + gloo, gloo):
        before = threads()
        model = DistributedDataParallel(nn.Linear(4, 4))
        model(noise(2, 4)).sum().backward()
        while any(thread.name == "undertow-connects" for thread in threading.enumerate()):
            time.sleep(0.01)  # it has done its work, and is about to end
        assert len(threads() - before) == expected


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("what", some(["unchanged", "changed", "late parts"], most=1))
@pytest.mark.parametrize("is_reversed", some([False, True], most=1), ids=["same order", "other order"])
def test_several_models_in_one_backward_are_right(is_reversed: bool, what: str) -> None:
    """Each runs on the output of the one before; on rank 1 in the opposite order. Late are parts of reentrant checkpoints."""
    models = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    bare = copy.deepcopy(models)
    wrappers = nn.ModuleList(DistributedDataParallel(model, bucket_cap_mb=1e-6) for model in models)

    def loss(chain: nn.ModuleList, step: int) -> Tensor:
        x = noise(2, 4, step=step).requires_grad_()
        for model in reversed(chain) if is_reversed and dist.get_rank() == 1 else chain:
            x = model(x).tanh()
            for _ in range(2 if what == "late parts" else 0):
                x = checkpoint(getattr(model, "module", model), x, use_reentrant=True)
        return x.sum()

    for step in range(3):
        for model in (*models, *bare) if what == "changed" and step > 0 else ():
            model.weight = nn.Parameter(torch.full((4, 4), 0.25 * step))
        backward_alike(
            wrappers, bare, loss, steps=[step], require=require_nearly_same if what == "late parts" else require_same_by_position
        )
    for wrapper in wrappers:
        wrapper.close()


@in_ranks(2, 3)
def test_parts_of_a_model_can_be_attached_one_by_one() -> None:
    model = mlp()
    bare = copy.deepcopy(model)
    with contextlib.closing(attach(model[0])), contextlib.closing(attach(model[2])):
        backward_alike(model, bare, MLP.loss)


# Ranks may be in different numbers of other groups, late to theirs, and have let go of a wrapper that others still have.
@pytest.mark.slow
@in_ranks(3, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("way", WRAP)
def test_gradients_are_averaged_inside_subgroups_one_after_another(way: str) -> None:
    rank, groups, kept = dist.get_rank(), [dist.new_group([0], use_local_synchronization=True)], []
    for members, mean, late_s in (([0, 2], 2.0, 0.0), ([2, 1], 2.5, 0.0), ([0, 2], 2.0, 1.0)):
        groups.append(dist.new_group(members))
        if rank not in members:
            continue
        time.sleep(late_s if rank == 2 else 0.0)
        for _ in range(2):
            model = nn.Linear(1, 1, bias=False)
            kept.append(WRAP[way](model, process_group=groups[-1]))
            for _ in range(3):
                model.zero_grad()
                (model if way == "attach" else kept[-1])(torch.full((1, 1), rank + 1.0)).sum().backward()
                assert model.weight.grad == mean
        kept.pop().close()
        if rank == 0:
            kept.clear()
            gc.collect()
    for sync in kept:
        sync.close()
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)


@in_ranks(3)
def test_gradients_by_hand_are_averaged_within_a_group_and_one_rank_alone_has_no_collective() -> None:
    with within([0, 1], [2]) as group, collectives() as called:
        (averaged,) = average_gradients([torch.full((2,), dist.get_rank() + 1.0)], process_group=group)
    assert (averaged.tolist(), called == []) == ([1.5 if dist.get_rank() < 2 else 3.0] * 2, dist.get_rank() == 2)


@in_ranks(3, is_fresh=True)
@pytest.mark.parametrize("members", some([[0, 1, 2], [0, 2]], most=1), ids=["all ranks", "some ranks"])
@pytest.mark.parametrize("way", some(WRAP, most=1))
def test_the_process_group_is_the_users_and_ours_is_another_one(way: str, members: list[int]) -> None:
    is_world = len(members) == 3
    group = dist.group.WORLD if is_world else dist.new_group(members, timeout=timedelta(seconds=77))
    if dist.get_rank() not in members:
        return
    holder = WRAP[way](mlp(), process_group=None if is_world else group)
    sync = getattr(holder, "sync", holder)
    own = own_group_of(sync).process_group
    assert sync.process_group is holder.process_group is group is not own
    assert (timeout_of(own), timeout_of(own) == timedelta(seconds=77), dist.get_process_group_ranks(own), own.group_desc) == (
        timeout_of(group),
        not is_world,
        members,
        "undertow",
    )
    if not is_world:
        dist.destroy_process_group(group)
    del group
    gc.collect()
    assert sync.process_group is (dist.group.WORLD if is_world else own)
    holder.close()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_the_users_own_collectives_do_not_meet_ours() -> None:
    """The n-th of each rank has 10 n and the rank. Rank 0 launches one more of them before ours."""
    works: list[tuple[dist.Work, Tensor]] = []

    def reduce_mine(*_: Tensor) -> None:
        mine = torch.tensor(10.0 * len(works) + dist.get_rank())
        works.append((dist.all_reduce(mine, async_op=True), mine))

    with wrapped_and_bare(MLP.model(), bucket_cap_mb=1e-6) as (ddp, bare):
        for param in ddp.parameters():
            param.register_post_accumulate_grad_hook(reduce_mine)

        def loss(model: nn.Module, step: int) -> Tensor:
            if (model is ddp) == (dist.get_rank() == 0):
                reduce_mine()
            return MLP.loss(model, step)

        def mean(bare: nn.Module) -> None:
            for work, _ in works:
                work.wait()
            naive_mean(bare)

        backward_alike(ddp, bare, loss, mean=mean)
    num_ranks = dist.get_world_size()
    sums = [10.0 * number * num_ranks + sum(range(num_ranks)) for number in range(3 * 5)]  # of 4 parameters, and one more
    assert [mine.item() for _, mine in works] == sums


@in_ranks(2)
def test_one_rank_alone_has_no_collective() -> None:
    bare = CONVOLUTIONS.model()
    with alone() as group, wrapped(CONVOLUTIONS.model(), process_group=group) as ddp, collectives() as called:

        def accumulated(model: nn.Module, step: int) -> Tensor:
            CONVOLUTIONS.loss(model, step).backward()
            optimizer.step()
            with ddp.no_sync():
                CONVOLUTIONS.loss(model, step).backward()
            if model is ddp:
                ddp.reduce_gradients_async().wait()
                ddp.finish()
                ddp.broadcast_parameters()
            return torch.zeros((), requires_grad=True)  # whose backward reaches nothing

        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        backward_alike(ddp, bare, accumulated, steps=range(2), mean=lambda _: None)
        assert ddp.report().overlap is None
    assert called == []


@in_ranks(2)
@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("way", WRAP)
def test_a_model_that_was_dropped_is_freed(way: str, close: bool) -> None:
    model = MLP.model()
    model[0].register_forward_hook(lambda *_, parent=model: None)  # a child that refers to its parent
    holder = WRAP[way](model)
    backwards(model if way == "attach" else holder, MLP.loss, range(2))
    sync = getattr(holder, "sync", holder)
    watched = {"model": model, "sync": sync, "engine": engine_of(sync), "parameter": model[0].weight}
    bucket = storage_of(sync)
    watches = {name: weakref.ref(it) for name, it in {**watched, "bucket": bucket}.items()}
    group = own_group_of(sync).process_group
    if close:
        sync.close()
    del model, holder, sync, watched, bucket
    alive, deadline_s = list(watches), time.monotonic() + 10
    # The first collection finds that nobody has the model, and takes the hooks off that keep the engine; a thread of
    # gloo lets go of the last tensor when it comes to it.
    while alive and time.monotonic() < deadline_s:
        gc.collect()
        alive = [name for name, watch in watches.items() if watch() is not None]
    assert (alive, group not in dist.distributed_c10d._world.pg_map) == ([], True)


def hooks_of(model: nn.Module) -> list[str]:
    parts = [*model.named_modules(), *model.named_parameters()]
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of tensors, which have them as attributes of their class
    return [
        f"{name}: {kind}"
        for name, part in parts
        for kind in (kinds if isinstance(part, Tensor) else [kind for kind in vars(part) if "hook" in kind])
        if getattr(part, kind, None)
    ]


WAYS: dict[str, dict[str, Any]] = {
    "attached": {},
    "sharded": {"config": SyncConfig(strategy="zero1")},
}


@in_ranks(1)
@pytest.mark.parametrize("name", WRAP)
def test_a_single_rank_has_no_hooks(name: str) -> None:
    net = MLP.model()
    with contextlib.closing(WRAP[name](net)) as model:
        loss = MLP.loss(model if isinstance(model, DistributedDataParallel) else net, 0)
        assert hooks_of(net) == []
        loss.backward()
        assert model.unused_parameters == ()
        net.zero_grad()
        assert set(model.unused_parameters) == {name for name, _ in net.named_parameters()}


@in_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_close_takes_every_hook_off(way: str) -> None:
    model = Branches()
    for num_steps in range(3):
        called = model if way == "attached" else DistributedDataParallel(model, **WAYS[way])
        sync = attach(model) if way == "attached" else called
        optimizer = ShardedOptimizer(torch.optim.SGD, called, lr=0.1) if way == "sharded" else None
        for _ in range(num_steps):
            called(noise(1, 4)).sum().backward()
            if optimizer is not None:
                optimizer.step()
        assert hooks_of(model) != []
        sync.close()
        assert hooks_of(model) == [], num_steps


UNWATCHED = (
    "the ranks do not watch over each other: rank {} cannot listen for other ranks: no such interface.\n"
    "  Training continues, but only the backend and its timeout find lost ranks.\n"
    "  Allow TCP connections between all ranks, on any port."
)


@pytest.mark.deep
@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
def test_ranks_that_no_ring_connects_train_and_say_so() -> None:
    with heard() as texts, without_a_ring():
        for strategy in ("ddp", "zero1"):
            bare = MLP.model()
            with training(MLP.model(), strategy) as (ddp, optimizer):
                assert not is_watched(ddp)
                for model in (ddp, bare):
                    MLP.loss(model, 0).backward()
                naive_mean(bare)
                for ours, wanted in zip(ddp.parameters(), bare.parameters(), strict=True):
                    assert torch.equal(ddp.full_gradient(ours), wanted.grad)
                optimizer.step()
    # Rank 0 alone says it, once, of whichever rank was the first.
    assert len(texts) == (dist.get_rank() == 0)
    assert all(text in [UNWATCHED.format(rank) for rank in range(2)] for text in texts)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_group_of_one_rank_in_a_job_of_several_is_warned_of() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [dist.new_group([other], group_desc="context") for other in range(world)][rank]
    text = (
        f"^the process group 'context' has 1 rank, and the job has {world}: gradients are averaged with no other rank\\.\n"
        f"  {{}}, rank {rank}\n"
        "  Give the group of all ranks that hold the same parameters.*filter this warning\\.$"
    )
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 2))):
        calls: list[tuple[str, Callable[[], object]]] = [
            ("Linear", lambda: attach(nn.Linear(2, 2), process_group=mine).close()),
            ("Linear", lambda: DistributedDataParallel(nn.Linear(2, 2), process_group=mine).close()),
            (r"average_gradients\(gradients, parameters\)", lambda: average_gradients([torch.ones(2)], process_group=mine)),
        ]
        for where, call in calls:
            with pytest.warns(UserWarning, match=text.format(where)):
                call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what says that it is meant, and a group of all
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("other", "dp"))
        attach(nn.Linear(2, 2), device_mesh=mesh["dp"]).close()
        attach(nn.Linear(2, 2), process_group=dist.group.WORLD).close()
        attach(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            config=SyncConfig(experts=(ExpertGroup(match="1.*", process_group=mine),)),
        ).close()
    destroy(mesh)
    dist.destroy_process_group(mine)


FAKE = (
    'the backend of the process group is "fake": 1 of its ranks do not exist.\n'
    "  the group over which gradients are averaged\n"
    '  For a dry run, call init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1); '
    "`undertow simulate` predicts the steps of more ranks."
)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("call", some([DistributedDataParallel, attach], most=1))
def test_a_group_without_peers_is_refused(call: Callable[..., object]) -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    group = dist.new_group(backend="fake")
    assert text_of(ConfigError, lambda: call(mlp(), process_group=group)) == FAKE
    dist.destroy_process_group(group)
