"""Several models, several process groups, and the user's own collectives."""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

from dist.test_events import collectives
from dist.test_late_arrivals import require_nearly_same
from dist.test_nonfinite import heard
from support.drop_in import TIMEOUT_S
from support.models import CASES, Branches, mlp, noise
from support.naive import naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks, in_ranks
from support.sharded import training
from undertow import DistributedDataParallel, ExpertGroup, ShardedOptimizer, SyncConfig, attach, average_gradients
from undertow.runtime import private


def models_in_one_backward(num_models: int, reverse_on_rank_1: bool, changes: bool) -> None:
    """Each runs on the output of the one before; on rank 1 in the opposite order where that is asked for."""
    models = [nn.Linear(4, 4) for _ in range(num_models)]
    bare = [nn.Linear(4, 4) for _ in models]
    for ours, theirs in zip(models, bare, strict=True):
        theirs.load_state_dict(ours.state_dict())
    wrappers = [DistributedDataParallel(model) for model in models]
    is_reversed = reverse_on_rank_1 and dist.get_rank() == 1
    for step in range(3):
        if changes and step > 0:
            for model in (*models, *bare):
                model.weight = nn.Parameter(torch.full((4, 4), 0.25 * step))
        for chain in (wrappers, bare):
            x = noise(2, 4, step=step)
            for model in reversed(chain) if is_reversed else chain:
                model.zero_grad()
                x = model(x).tanh()
            x.sum().backward()
        for ours, theirs in zip(wrappers, bare, strict=True):
            naive_mean(theirs)
            require_same_gradients(ours, theirs)
    for wrapper in wrappers:
        wrapper.close()


@pytest.mark.parametrize("changes", [False, True], ids=["unchanged", "changed"])
@pytest.mark.parametrize("reverse_on_rank_1", [False, True], ids=["same order", "other order"])
def test_several_models_in_one_backward_are_right(ranks: Ranks, reverse_on_rank_1: bool, changes: bool) -> None:
    ranks.run(models_in_one_backward, 3, reverse_on_rank_1, changes, timeout_s=TIMEOUT_S)


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_late_parts_of_several_models_do_not_wait_for_each_other() -> None:
    """The middle layer of each runs twice in reentrant checkpoints; rank 1 runs the models in the other order."""
    models = [Branches(3), Branches(3)]
    bare = copy.deepcopy(models)
    wrappers = [DistributedDataParallel(model, bucket_cap_mb=1e-6) for model in models]
    for step in range(3):
        for chain, layered in ((wrappers, models), (bare, bare)):
            x = noise(2, 4, step=step).requires_grad_()
            for model, branches in list(zip(chain, layered, strict=True))[:: 1 if dist.get_rank() == 0 else -1]:
                model.zero_grad()
                x = model(x)
                for _ in range(2):
                    x = checkpoint(branches.layers[1], x, use_reentrant=True)
            x.sum().backward()
        for ours, theirs in zip(models, bare, strict=True):
            naive_mean(theirs)
            require_nearly_same(ours, theirs)
    for wrapper in wrappers:
        wrapper.close()


@in_ranks(2, 3)
def test_parts_of_a_model_can_be_attached_one_by_one() -> None:
    model, bare = mlp(), mlp()
    bare.load_state_dict(model.state_dict())
    syncs = [attach(model[0]), attach(model[2])]
    for step in range(3):
        for each in (model, bare):
            each.zero_grad()
            each(noise(2, 6, step=step)).sum().backward()
        naive_mean(bare)
        require_same_gradients(model, bare)
    for sync in syncs:
        sync.close()


def gradients_in_a_subgroup(members: list[int], with_wrapper: bool) -> list[float] | None:
    """Gradients are rank + 1."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    model = nn.Linear(1, 1, bias=False)
    sync = DistributedDataParallel(model, process_group=group) if with_wrapper else attach(model, process_group=group)
    grads = []
    for _ in range(3):
        model.zero_grad()
        (sync if with_wrapper else model)(torch.full((1, 1), dist.get_rank() + 1.0)).sum().backward()
        grads.append(model.weight.grad.item())
    sync.close()
    dist.destroy_process_group(group)
    return grads


@pytest.mark.parametrize("with_wrapper", [True, False])
def test_gradients_are_averaged_inside_a_subgroup(fresh_ranks: Ranks, with_wrapper: bool) -> None:
    assert fresh_ranks.run(gradients_in_a_subgroup, [0, 2], with_wrapper) == [[2.0] * 3, None, [2.0] * 3]
    assert fresh_ranks.run(gradients_in_a_subgroup, [2, 1], with_wrapper) == [None, [2.5] * 3, [2.5] * 3]


def late_to_a_subgroup() -> list[float] | None:
    if dist.get_rank() == 2:
        time.sleep(1.0)
    return gradients_in_a_subgroup([0, 2], True)


def test_a_model_can_be_wrapped_anew_over_a_subgroup(fresh_ranks: Ranks) -> None:
    fresh_ranks.run(gradients_in_a_subgroup, [0, 2], True)
    assert fresh_ranks.run(late_to_a_subgroup, timeout_s=TIMEOUT_S) == [[2.0] * 3, None, [2.0] * 3]


def group_beside_another_of_rank_0() -> list[float] | None:
    extra = dist.new_group([0], use_local_synchronization=True)
    grads = gradients_in_a_subgroup([0, 2], True)
    if dist.get_rank() == 0:
        dist.destroy_process_group(extra)
    return grads


def test_ranks_of_a_subgroup_may_be_in_different_numbers_of_other_groups(fresh_ranks: Ranks) -> None:
    assert fresh_ranks.run(group_beside_another_of_rank_0, timeout_s=TIMEOUT_S) == [[2.0] * 3, None, [2.0] * 3]


def groups_of_a_model(way: Callable[..., Any], members: list[int] | None) -> tuple[bool, bool, bool, str] | None:
    """Whether the user's group is named as such, while it is there and afterwards; whether ours is another one of ours."""
    group = dist.group.WORLD if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return None
    holder = way(mlp(), process_group=None if members is None else group)
    sync = holder.sync if isinstance(holder, nn.Module) else holder
    own = sync.own_group.process_group
    is_named = sync.process_group is holder.process_group is group
    is_other = own is not group and dist.get_process_group_ranks(own) == dist.get_process_group_ranks(group)
    description = own.group_desc
    if members is not None:
        dist.destroy_process_group(group)
    del group
    gc.collect()
    stays = sync.process_group is (dist.group.WORLD if members is None else own)
    holder.close()
    return is_named, is_other, stays, description


@pytest.mark.parametrize("members", [None, [0, 2]], ids=["all ranks", "some ranks"])
@pytest.mark.parametrize("way", [DistributedDataParallel, attach])
def test_the_process_group_is_the_users_and_ours_is_another_one(
    fresh_ranks: Ranks, way: Callable[..., Any], members: list[int] | None
) -> None:
    answers = fresh_ranks.run(groups_of_a_model, way, members)
    assert answers == [(True, True, True, "undertow") if members is None or rank in members else None for rank in range(3)]


def timeouts() -> list[timedelta | None]:
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=77))
    with wrapped(mlp(), process_group=group) as ddp, wrapped(mlp()) as other:
        found = [private.timeout_of(each.sync.own_group.process_group) for each in (ddp, other)]
        usual = private.timeout_of(dist.group.WORLD)
    dist.destroy_process_group(group)
    return [*found, usual]


def test_our_group_waits_as_long_as_the_users(ranks: Ranks) -> None:
    for found, found_of_the_default, usual in ranks.run(timeouts):
        assert found == timedelta(seconds=77)
        assert found_of_the_default == usual != found


def own_collectives_between() -> list[float]:
    """The sums of the user's own: the n-th of each rank has 10 n and the rank. Rank 0 launches one more of them before ours."""
    case, works = CASES["mlp"], []

    def reduce_mine(*_: torch.Tensor) -> None:
        mine = torch.tensor(10.0 * len(works) + dist.get_rank())
        works.append((dist.all_reduce(mine, async_op=True), mine))

    with wrapped_and_bare(case.model(), bucket_cap_mb=1e-6) as (ddp, bare):
        for param in ddp.parameters():
            param.register_post_accumulate_grad_hook(reduce_mine)
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
            if dist.get_rank() == 0:
                reduce_mine()
            case.loss(ddp, step).backward()
            if dist.get_rank() != 0:
                reduce_mine()
            case.loss(bare, step).backward()
            for work, _ in works:
                work.wait()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
    return [mine.item() for _, mine in works]


def test_the_users_own_collectives_do_not_meet_ours(ranks: Ranks) -> None:
    num_ranks = ranks.num_ranks
    sums = [10.0 * number * num_ranks + sum(range(num_ranks)) for number in range(3 * 5)]  # of 4 parameters, and one more
    assert ranks.run(own_collectives_between, timeout_s=TIMEOUT_S) == [sums] * num_ranks


def one_rank_alone() -> list[str]:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    case = CASES["convolutions"]
    with wrapped(case.model(), process_group=groups[dist.get_rank()]) as ddp, collectives() as called:
        bare = case.model()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        for step in range(2):
            for model in (ddp, bare):
                model.zero_grad()
                case.loss(model, step).backward()
            optimizer.step()
            with ddp.no_sync():
                case.loss(ddp, step).backward()
            case.loss(bare, step).backward()
            ddp.reduce_gradients_async().wait()
            ddp.finish()
            ddp.broadcast_parameters()
            require_same_gradients(ddp, bare)
        assert str(ddp.report(show=False)).startswith("no communication; step ")
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return called


def test_one_rank_alone_has_no_collective(two_ranks: Ranks) -> None:
    assert two_ranks.run(one_rank_alone) == [[], []]


def freed(way: Callable[[nn.Module], object], close: bool) -> list[str]:
    """What is still alive after everything was dropped."""
    case = CASES["mlp"]
    model = case.model()
    holder = way(model)
    for step in range(2):
        case.loss(holder if isinstance(holder, nn.Module) else model, step).backward()
    sync = holder.sync if isinstance(holder, nn.Module) else holder
    watched = {"model": model, "sync": sync, "engine": sync._engine, "parameter": model[0].weight}
    bucket = sync._engine.formation.assembly.executor._bindings[0].bucket.storage
    watches = {name: weakref.ref(it) for name, it in {**watched, "bucket": bucket}.items()}
    group = sync.own_group.process_group
    if close:
        sync.close()
    del model, holder, sync, watched, bucket
    alive = list(watches)
    deadline_s = time.monotonic() + 10
    # The first collection finds that nobody has the model, and takes the hooks off that keep the engine; a thread of
    # gloo lets go of the last tensor when it comes to it.
    while alive and time.monotonic() < deadline_s:
        gc.collect()
        alive = [name for name, watch in watches.items() if watch() is not None]
    return alive if dist.distributed_c10d._world.pg_map.get(group) is None else [*alive, "group"]


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("way", [DistributedDataParallel, attach])
def test_a_model_that_was_dropped_is_freed(two_ranks: Ranks, way: Callable[[nn.Module], object], close: bool) -> None:
    assert two_ranks.run(freed, way, close) == [[], []]


def hooks_of(model: nn.Module) -> list[str]:
    """Of all kinds, on modules and parameters."""
    parts = [*model.named_modules(), *model.named_parameters()]
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of tensors, which have them as attributes of their class
    return [
        f"{name}: {kind}"
        for name, part in parts
        for kind in (kinds if isinstance(part, torch.Tensor) else [kind for kind in vars(part) if "_hooks" in kind])
        if getattr(part, kind, None)
    ]


WAYS: dict[str, dict[str, Any]] = {
    "attached": {},
    "sharded": {"config": SyncConfig(strategy="zero1")},
    "in mixed precision": {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)},
}


def closed_leaves_nothing(way: str, num_steps: int) -> tuple[bool, list[str]]:
    """Whether there were hooks while the model was synchronised, and those that there are afterwards."""
    model = Branches()
    for _ in range(2):
        called = model if way == "attached" else DistributedDataParallel(model, **WAYS[way])
        sync = attach(model) if way == "attached" else called
        optimizer = ShardedOptimizer(torch.optim.SGD, called, lr=0.1) if way == "sharded" else None
        for _ in range(num_steps):
            called(noise(1, 4)).sum().backward()
            if optimizer is not None:
                optimizer.step()
        had_hooks = hooks_of(model) != []
        sync.close()
    return had_hooks, hooks_of(model)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_close_takes_every_hook_off(two_ranks: Ranks, way: str, num_steps: int) -> None:
    assert two_ranks.run(closed_leaves_nothing, way, num_steps) == [(True, [])] * 2


def without_a_ring() -> list[str]:
    """What is logged where gloo cannot connect neighbours, by a plain model and a sharded one that take a step."""
    case = CASES["mlp"]
    with heard() as texts, mock.patch.object(private, "gloo_device", side_effect=RuntimeError("no such interface")):
        for strategy in ("ddp", "zero1"):
            bare = case.model()
            with training(case.model(), strategy) as (ddp, optimizer):
                assert ddp.sync.own_group.member is None
                for model in (ddp, bare):
                    case.loss(model, 0).backward()
                naive_mean(bare)
                for ours, wanted in zip(ddp.parameters(), bare.parameters(), strict=True):
                    assert torch.equal(ddp.full_gradient(ours), wanted.grad)
                optimizer.step()
    return texts


def test_ranks_that_no_ring_connects_train_and_say_so(fresh_pair: Ranks) -> None:
    told = "rank {} reaches no ring of connections: lost ranks are found by the backend and its timeout alone."
    assert fresh_pair.run(without_a_ring, timeout_s=TIMEOUT_S) == [[told.format(rank)] * 2 for rank in range(2)]


@in_ranks(2, is_fresh=True)
def test_a_group_of_one_rank_in_a_job_of_several_is_warned_of() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([other], group_desc="context") for other in range(world)]
    mine = groups[rank]
    text = (
        f"^the process group 'context' has 1 rank, and the job has {world}: gradients are averaged with no other rank\\.\n"
        f"  {{}}, rank {rank}\n"
        "  Give the group of all ranks that hold the same parameters.*filter this warning\\.$"
    )
    with pytest.warns(UserWarning, match=text.format("Linear")):
        sync = attach(nn.Linear(2, 2), process_group=mine)
    sync.close()
    with pytest.warns(UserWarning, match=text.format("Linear")):
        model = DistributedDataParallel(nn.Linear(2, 2), process_group=mine)
    model.close()
    with pytest.warns(UserWarning, match=text.format(r"average_gradients\(gradients, parameters\)")):
        average_gradients([torch.ones(2)], process_group=mine)
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=text.format("Linear")):
        model._update_process_group(mine)
    model.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what says that it is meant, and a group of all
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("other", "dp"))
        attach(nn.Linear(2, 2), mesh=mesh["dp"]).close()
        attach(nn.Linear(2, 2), process_group=dist.group.WORLD).close()
        experts = (ExpertGroup(match="1.*", process_group=mine),)
        attach(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), config=SyncConfig(experts=experts)).close()
    for group in (mine, mesh.get_group(0), mesh.get_group(1)):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
