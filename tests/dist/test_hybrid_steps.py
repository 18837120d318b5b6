"""What surrounds a step on a mesh: clipping, evaluation, delays, failures, changes, copies, and meshes that cannot be."""

from __future__ import annotations

import copy
import threading
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.errors import text_of
from support.hybrid import destroy, hybrid, mean_row_by_row, mesh_of, trained_naively, trained_on_mesh
from support.inside import late_calls, late_ops, observe, sharding_of
from support.models import CASES, Fragile
from support.ranks import Ranks, in_ranks
from support.sharded import OPTIMIZERS, parameters, require_equal
from undertow import (
    ConfigError,
    Desync,
    DistributedDataParallel,
    PeerFailed,
    PhaseError,
    PlanMismatch,
    ShardedOptimizer,
    SyncConfig,
    attach,
)
from undertow.runtime.group import GroupRef
from undertow.schedule import OpKind
from undertow.sync import Sync

MLP = CASES["mlp"]
TIED = CASES["tied transformer"]
ORDERED: dict[str, Any] = {"reduction": "ordered", "bucket_cap_mb": 1e-4}  # most parameters are in pieces


def one_step(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
    opt.zero_grad()
    MLP.loss(ddp, step).backward()
    opt.step()


def require_same_everywhere(found: dict[str, Tensor]) -> None:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    for other in gathered:
        require_equal(found, other)


@in_ranks(4)
def test_a_mesh_goes_to_attach_as_well() -> None:
    """Without a wrapper, with what a user writes."""
    expected = trained_naively(MLP, "SGD", num_steps=5)
    model = MLP.model()
    cls, settings = OPTIMIZERS["SGD"]
    with mesh_of(2, 2) as mesh:
        sync = attach(model, mesh=mesh, config=SyncConfig(strategy="hybrid", reduction="ordered"))
        assert dist.get_process_group_ranks(sync.process_group) == [0, 1, 2, 3]
        optimizer = ShardedOptimizer(cls, sync, **settings)
        for step in range(5):
            optimizer.zero_grad()
            MLP.loss(model, step).backward()
            optimizer.step()
        sync.wait()
        require_equal(expected, {f"module.{name}": param for name, param in model.named_parameters()})
        sync.close()


@in_ranks(4)
def test_a_part_of_a_larger_mesh_averages_over_its_ranks_alone() -> None:
    """Two stages of a pipeline, each on a mesh of its own."""
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "replicate", "shard"))
    pair = whole["replicate", "shard"]
    config = SyncConfig(strategy="hybrid", **ORDERED)
    cls, settings = OPTIMIZERS["SGD"]
    found = []
    for is_sharded in (True, False):
        if is_sharded:
            ddp = DistributedDataParallel(MLP.model(), device_mesh=pair, config=config)
            opt: Any = ShardedOptimizer(cls, ddp, **settings)
        else:
            ddp = DistributedDataParallel(MLP.model(), device_mesh=whole["shard"], config=SyncConfig(**ORDERED))
            opt = cls(ddp.parameters(), **settings)
        for step in range(4):
            one_step(ddp, opt, step)
        found.append(parameters(ddp))
        ddp.close()
    require_equal(*found)
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, found[0])
    require_equal(gathered[0], gathered[1])
    assert not any(torch.equal(gathered[0][name], gathered[2][name]) for name in gathered[0])
    destroy(whole)


@in_ranks(4)
def test_a_row_has_every_shard_once_and_gradients_are_the_mean_over_all_ranks() -> None:
    with hybrid(TIED.model(), bucket_cap_mb=1e-3) as (ddp, opt):
        for step in range(2):
            opt.zero_grad()
            TIED.loss(ddp, step).backward()
            opt.step()
        ddp.wait()
        mine = torch.tensor([part.numel for part in sharding_of(ddp).parts]).sum()
        row = [mine.clone(), mine.clone()]
        dist.all_gather(row, mine, group=sharding_of(ddp).group.process_group)
        assert sum(row) == sum(param.numel() for param in ddp.parameters())  # each once, in a row
        assert max(row) < 0.7 * sum(row)
        opt.zero_grad()
        TIED.loss(ddp, 2).backward()
        bare = copy.deepcopy(ddp.module)
        TIED.loss(bare, 2).backward()
        for name, param in bare.named_parameters():
            dist.all_reduce(param.grad)
            ours = ddp.sync.full_gradient(ddp.module.get_parameter(name))
            # The sum of four values in two orders: two roundings of sums that are at most four times the largest of them.
            atol = 8 * torch.finfo(torch.float32).eps * float(param.grad.abs().max())
            assert torch.allclose(ours, param.grad / 4, rtol=0.0, atol=atol), name


@in_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_counts_every_gradient_once(norm_type: float) -> None:
    reference = MLP.model()
    cls, settings = OPTIMIZERS["SGD"]
    plain = cls(reference.parameters(), **settings)
    with hybrid(MLP.model(), "SGD", **ORDERED) as (ddp, opt):
        for step in range(5):
            for model, optimizer in ((ddp, opt), (reference, plain)):
                optimizer.zero_grad()
                MLP.loss(model, step).backward()
            mean_row_by_row(reference)
            total = opt.clip_grad_norm_(0.5, norm_type)
            wanted = torch.nn.utils.get_total_norm([param.grad.double() for param in reference.parameters()], norm_type)
            # Both sum in fp64, and round to fp32 once.
            assert torch.isclose(total.double(), wanted, rtol=2.0**-23)
            for param in reference.parameters():
                param.grad.mul_((0.5 / (total + 1e-6)).clamp(max=1.0))
            opt.step()
            plain.step()
        require_equal({f"module.{name}": param for name, param in reference.named_parameters()}, parameters(ddp))


@in_ranks(4)
def test_all_ranks_skip_what_one_has_found_infinite() -> None:
    """One rank's infinite gradient has all ranks skip the step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with hybrid(MLP.model(), "SGD", **ORDERED) as (ddp, opt):
        one_step(ddp, opt, 0)
        for step in (1, 2):
            before = parameters(ddp)
            opt.zero_grad()
            factor = float("inf") if step == 1 and dist.get_rank() == 3 else 1.0
            scaler.scale(MLP.loss(ddp, step) * factor).backward()
            scaler.step(opt)
            scaler.update()
            has_moved = [not torch.equal(before[name], value) for name, value in parameters(ddp).items()]
            assert all(has_moved) if step == 2 else not any(has_moved)
        require_same_everywhere(parameters(ddp))


@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_a_rank_may_evaluate_alone(eager: bool) -> None:
    """In the middle of training, by one rank alone, with gathers under way."""
    expected = trained_naively(TIED, num_steps=6)

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        TIED.loss(ddp, step).backward()
        opt.step()
        if dist.get_rank() == step % 4:
            ddp.eval()
            with torch.no_grad():
                TIED.loss(ddp, 100)
            assert sharding_of(ddp).gathers.in_flight == {}
            ddp.train()

    require_equal(expected, trained_on_mesh(TIED, num_steps=6, each=each, eager=eager, **ORDERED))


@in_ranks(4)
@pytest.mark.parametrize(
    ("kind", "late_rank", "eager"),
    [
        *(
            (kind, late_rank, eager)
            for kind, late_rank in (
                (OpKind.PACK, 0),
                (OpKind.REDUCE_SCATTER, 1),
                (OpKind.ALL_REDUCE, 2),
                (OpKind.BIND, 1),
                (OpKind.ALL_GATHER, 2),
            )
            for eager in (False, True)
        ),
        (OpKind.STEP, 3, True),  # in the other form it is the script's own
    ],
)
def test_a_delay_at_any_op_changes_nothing(kind: OpKind, late_rank: int, eager: bool) -> None:
    expected, late = trained_naively(TIED, "SGD", num_steps=5), []

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        nonlocal late
        if step == 1:
            late = late_ops(ddp, kind, late_rank, seconds=0.003)
        opt.zero_grad()
        TIED.loss(ddp, step).backward()
        opt.step()

    require_equal(expected, trained_on_mesh(TIED, "SGD", num_steps=5, each=each, eager=eager, **ORDERED))
    assert (dist.get_rank() == late_rank) == (late != [])


@in_ranks(4)
@pytest.mark.parametrize(("axis", "where"), [("exchanges", "_send"), ("across", "_send"), ("across", "_post_both")])
@pytest.mark.parametrize("eager", [False, True])
def test_nor_does_one_in_a_thread_of_either_axis(axis: str, where: str, eager: bool) -> None:
    expected = trained_naively(TIED, "SGD", num_steps=5)

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        if step == 1:
            late_calls(getattr(sharding_of(ddp), axis), where, seconds=0.003, rank=1)
        opt.zero_grad()
        TIED.loss(ddp, step).backward()
        opt.step()

    require_equal(expected, trained_on_mesh(TIED, "SGD", num_steps=5, each=each, eager=eager, **ORDERED))


@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_backward_waits_for_neither_axis(eager: bool) -> None:
    """If the training thread waited for either reduction of a bucket, nobody would let the first of them leave."""
    expected = trained_naively(MLP, "SGD", num_steps=3)
    is_over = threading.Event()

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        if step == 1:
            inside = sharding_of(ddp).exchanges
            post = inside._post_reduce_scatter
            observe(ddp, before=lambda op: is_over.set() if op.kind is OpKind.BIND else None)

            def posted(*args: Any) -> Any:
                assert is_over.wait(40.0)
                return post(*args)

            inside._post_reduce_scatter = posted
        one_step(ddp, opt, step)

    require_equal(expected, trained_on_mesh(MLP, "SGD", num_steps=3, each=each, eager=eager, **ORDERED))
    assert is_over.is_set()


@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_the_axes_work_at_the_same_time(eager: bool) -> None:
    """The first bucket crosses when the second one is reduced inside, which does not wait for it."""
    expected = trained_naively(MLP, "SGD", num_steps=3)
    is_reduced = threading.Event()

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        if step == 1:
            inside, across = sharding_of(ddp).exchanges, sharding_of(ddp).across
            reduce, post, num_calls = inside.reduce_scatter, across._post_both, count()

            def reduced(*args: Any, **kwargs: Any) -> Any:
                handle = reduce(*args, **kwargs)
                if next(num_calls) == 1:
                    handle.on_done(lambda _: is_reduced.set())
                return handle

            def posted(*args: Any) -> Any:
                assert is_reduced.wait(40.0)
                return post(*args)

            inside.reduce_scatter, across._post_both = reduced, posted
        one_step(ddp, opt, step)

    require_equal(expected, trained_on_mesh(MLP, "SGD", num_steps=3, each=each, eager=eager, **ORDERED))
    assert is_reduced.is_set()


def alone(eager: bool) -> None:
    require_equal(
        trained_naively(MLP, num_steps=4), trained_on_mesh(MLP, num_steps=4, eager=eager, shape=(1, 1), reduction="ordered")
    )


@pytest.mark.parametrize("eager", [False, True])
def test_a_mesh_of_one_rank_trains_as_that_rank_does(eager: bool) -> None:
    with Ranks(1) as one_rank:
        one_rank.run(alone, eager)


@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("failing", [0, 3])
def test_ranks_of_both_rows_learn_who_has_failed(failing: int, eager: bool) -> None:
    torch.manual_seed(3)
    with hybrid(Fragile(), "SGD", eager=eager, bucket_cap_mb=1e-4) as (ddp, opt):
        for step in range(3):
            one_step(ddp, opt, step)
        before = parameters(ddp)
        opt.zero_grad()
        ddp.module.fails = dist.get_rank() == failing
        if ddp.module.fails:
            with pytest.raises(ZeroDivisionError):
                MLP.loss(ddp, 3).backward()
        else:
            with pytest.raises(PeerFailed, match=f"rank {failing}"):
                MLP.loss(ddp, 3).backward()
        ddp.module.fails = False
        one_step(ddp, opt, 4)  # and with it this rank ends the round that it has left open
        after = parameters(ddp)
        require_same_everywhere(after)
        assert not any(torch.equal(before[name], after[name]) for name in before)


@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_all_rows_find_out_that_one_rank_is_in_another_step(eager: bool) -> None:
    """One rank is a step ahead of the others, of its row too: no bucket is stepped on such a sum."""
    with hybrid(MLP.model(), "SGD", eager=eager, **ORDERED) as (ddp, opt):
        for step in range(2):
            one_step(ddp, opt, step)
        before = parameters(ddp)
        ddp.sync._engine._progress.num_rounds += dist.get_rank() == 3
        opt.zero_grad()
        with pytest.raises(Desync):
            MLP.loss(ddp, 2).backward()
        require_equal(before, parameters(ddp))


@in_ranks(4)
def test_all_rows_find_out_that_one_rank_has_frozen_a_parameter() -> None:
    with hybrid(MLP.model(), "SGD", **ORDERED) as (ddp, opt):
        for step in range(2):
            one_step(ddp, opt, step)
        opt.zero_grad()
        if dist.get_rank() == 2:
            ddp.module[2].bias.requires_grad_(False)
        with pytest.raises(PlanMismatch):
            MLP.loss(ddp, 2).backward()


@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_parameters_may_be_frozen_and_thawed(eager: bool) -> None:
    def freeze(model: nn.Module, step: int) -> None:
        for param in model[2].parameters():
            param.requires_grad_(not 3 <= step < 6)

    def backward(model: nn.Module, step: int) -> None:
        freeze(model, step)
        MLP.loss(model, step).backward()

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        freeze(ddp.module, step)
        MLP.loss(ddp, step).backward()
        opt.step()

    expected = trained_naively(MLP, "SGD", num_steps=9, backward=backward)
    require_equal(expected, trained_on_mesh(MLP, "SGD", num_steps=9, each=each, eager=eager, **ORDERED))


@in_ranks(4)
def test_parameters_and_buffers_of_all_rows_follow_rank_0() -> None:
    torch.manual_seed(100 + dist.get_rank())
    case = CASES["convolutions"]
    with hybrid(case.make(), "SGD") as (ddp, opt):
        require_same_everywhere(parameters(ddp))
        for step in range(3):
            opt.zero_grad()
            case.loss(ddp, step).backward()
            opt.step()
        ddp.sync.synchronise_buffers()
        require_same_everywhere({name: value.clone() for name, value in ddp.named_buffers()})
        require_same_everywhere(parameters(ddp))


@in_ranks(4)
def test_all_rows_compare_parameters_and_meshes() -> None:
    with mesh_of(2, 2) as mesh:
        odd = nn.Linear(6, 5 if dist.get_rank() == 3 else 4)
        text = text_of(PlanMismatch, lambda: attach(odd, mesh=mesh, config=SyncConfig(strategy="hybrid")))
        assert "shape of parameter 0 ('weight') is [4, 6] on rank 0 and [5, 6] on rank 3" in text
    world = GroupRef.of(dist.group.WORLD)
    rows = ((0, 1), (2, 3)) if dist.get_rank() < 2 else ((0, 2), (1, 3))
    sync = Sync(
        MLP.model(),
        process_group=GroupRef(world.ranks, world.backend, world.timeout, rows=rows),
        config=SyncConfig(strategy="hybrid"),
    )
    text = text_of(PlanMismatch, lambda: sync._engine.open())
    assert "mesh is [[0, 1], [2, 3]] on rank 0 and [[0, 2], [1, 3]] on rank 2" in text
    sync.close()


@in_ranks(4)
def test_a_copy_has_the_mesh() -> None:
    with hybrid(MLP.model(), "SGD", **ORDERED) as (ddp, opt):
        for step in range(2):
            one_step(ddp, opt, step)
        twin = copy.deepcopy(ddp)
        assert twin.sync.group_reference.rows == ((0, 1), (2, 3))
        cls, settings = OPTIMIZERS["SGD"]
        other = ShardedOptimizer(cls, twin, **settings)
        other.load_state_dict(opt.full_state_dict())
        for step in range(2, 4):
            one_step(ddp, opt, step)
            one_step(twin, other, step)
        require_equal(parameters(ddp), parameters(twin))
        twin.close()


@in_ranks(4)
def test_the_plan_follows_what_is_measured_and_says_so() -> None:
    with hybrid(MLP.model(), eager=False) as (ddp, opt):
        for step in range(14):
            one_step(ddp, opt, step)
        explanation = ddp.explain(show=False)
        assert explanation.strategy == "hybrid"
        assert explanation.why.startswith(("planned from what was measured", "sizes follow from the size of the model"))
        profile = ddp.sync.profile()
        assert (profile.strategy, profile.num_ranks) == ("hybrid", 4)
        assert profile.curves.keys() == {"reduce_scatter", "all_gather"}  # that of a reduction is of both axes
        assert len(ddp.report(show=False).buckets) == len(ddp.plan.buckets)
        *_, last = ddp.sync._recorder.records(generation=ddp.sync._engine.generation)
        assert len(last.busy_ms) == 4
        assert min(last.busy_ms) > 0  # by trailer, from both rows


NEEDS_A_MESH = (
    'strategy="hybrid" needs a mesh of two dimensions, got {}.\n'
    "  the ranks over which gradients are averaged\n"
    '  Write mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")): the first dimension replicates, the '
    "second shards."
)


def refused() -> dict[str, str]:
    config = SyncConfig(strategy="hybrid")
    meshes = [init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (1, 2, 2))]
    line, mesh, cube = meshes
    meshes.append(DeviceMesh("cpu", [[0, 3], [2, 1]]))
    texts = {
        "no mesh": text_of(ConfigError, lambda: attach(MLP.model(), config=config)),
        "a group": text_of(ConfigError, lambda: attach(MLP.model(), process_group=dist.group.WORLD, config=config)),
        "a line": text_of(ConfigError, lambda: attach(MLP.model(), mesh=line, config=config)).replace(str(line), "MESH"),
        "a cube": text_of(ConfigError, lambda: DistributedDataParallel(MLP.model(), device_mesh=cube, config=config)).replace(
            str(cube), "MESH"
        ),
        "another strategy": text_of(ConfigError, lambda: attach(MLP.model(), mesh=mesh)).replace(str(mesh), "MESH"),
        "out of order": text_of(ConfigError, lambda: attach(MLP.model(), mesh=meshes[-1], config=config)).replace(
            str(meshes[-1]), "MESH"
        ),
    }
    ddp = DistributedDataParallel(MLP.model(), device_mesh=mesh, config=config)
    texts["another group"] = text_of(ConfigError, lambda: ddp._update_process_group(dist.group.WORLD))
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    MLP.loss(ddp, 0).backward()
    texts["a plain optimizer"] = text_of(PhaseError, plain.step)
    ddp.close()
    for each in meshes:
        destroy(each)
    return texts


def test_meshes_and_optimizers_that_do_not_go_with_it_are_refused(four_ranks: Ranks) -> None:
    for texts in four_ranks.run(refused):
        assert texts == {
            "no mesh": NEEDS_A_MESH.format("no mesh"),
            "a group": NEEDS_A_MESH.format("no mesh"),
            "a line": NEEDS_A_MESH.format("MESH"),
            "a cube": NEEDS_A_MESH.format("MESH"),
            "another strategy": "Only 1D device mesh is supported, but got MESH.\n"
            "  the ranks over which gradients are averaged, with strategy=None\n"
            '  Give one dimension of it, such as mesh["dp"], or set strategy="hybrid", under which the first of two dimensions '
            "replicates and the second shards.",
            "out of order": "the second dimension of MESH does not count upwards.\n"
            "  it has the ranks 2, 1\n"
            '  Write mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), which puts them in order.',
            "another group": 'strategy="hybrid" needs a mesh of two dimensions, got a process group.\n'
            "  the ranks over which gradients are averaged\n"
            "  Close the wrapper, and wrap the model anew with another mesh.",
            "a plain optimizer": "strategy='hybrid' needs a sharded optimizer, and SGD is none.\n"
            "  the first step of the optimizer\n"
            "  Make it with undertow.ShardedOptimizer(torch.optim.SGD, model, ...).",
        }
