"""What surrounds a step on a mesh: clipping, evaluation, failures, copies, and meshes that cannot be."""

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from support.alike import of_all_ranks
from support.errors import text_of
from support.inside import open_with_rows, records_of, rows_of, sharding_of, skip_a_round
from support.models import CASES
from support.ranks import in_ranks
from support.sharded import (
    MLP,
    OPTIMIZERS,
    ORDERED,
    TIED,
    average_gradients,
    bare_training,
    destroy,
    mesh_of,
    one_step,
    parameters,
    require_equal,
    require_moved,
    require_same_everywhere,
    step_of,
    stepped,
    training,
)
from undertow import ConfigError, Desync, DistributedDataParallel, PhaseError, PlanMismatch, ShardedOptimizer, SyncConfig, attach

HYBRID = SyncConfig(strategy="hybrid")


# Two stages of a pipeline, each on a mesh of its own.
@in_ranks(4)
def test_a_part_of_a_larger_mesh_averages_over_its_ranks_alone() -> None:
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "replicate", "shard"))
    cls, settings = OPTIMIZERS["SGD"]
    found = []
    for mesh, strategy in ((whole["replicate", "shard"], "hybrid"), (whole["shard"], None)):
        config = SyncConfig(strategy=strategy, **ORDERED)
        with contextlib.closing(DistributedDataParallel(MLP.model(), device_mesh=mesh, config=config)) as ddp:
            opt = ShardedOptimizer(cls, ddp, **settings) if strategy else cls(ddp.parameters(), **settings)
            for step in range(4):
                one_step(ddp, opt, step)
            found.append(parameters(ddp))
    require_equal(*found)
    first, second, other, _ = of_all_ranks(found[0])
    require_equal(first, second)
    require_moved(first, other)
    destroy(whole)


@in_ranks(4)
def test_a_row_has_every_shard_once() -> None:
    with stepped(2, "hybrid", "AdamW", case=TIED, bucket_cap_mb=1e-3) as (ddp, _):
        sharding = sharding_of(ddp)
        found, first = of_all_ranks(sum(part.numel for part in sharding.parts)), dist.get_rank() // 2 * 2
        row = found[first : first + 2]
        assert sum(row) == sum(param.numel() for param in ddp.parameters())  # each once, in a row
        assert max(row) < 0.7 * sum(row)


@in_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_the_norm_counts_every_gradient_once(norm_type: float) -> None:
    with (
        training(MLP.model(), "hybrid", "SGD", **ORDERED) as (ddp, opt),
        bare_training(MLP.model(), optimizer="SGD") as (bare, plain),
    ):
        for step in range(5):
            for model, optimizer in ((ddp, opt), (bare, plain)):
                optimizer.zero_grad()
                MLP.loss(model, step).backward()
            average_gradients(bare)
            total = opt.clip_grad_norm_(0.5, norm_type)
            wanted = torch.nn.utils.get_total_norm([param.grad.double() for param in bare.parameters()], norm_type)
            # Both sum in fp64, and round to fp32 once.
            assert torch.isclose(total.double(), wanted, rtol=2.0**-23)
            for param in bare.parameters():
                param.grad.mul_((0.5 / (total + 1e-6)).clamp(max=1.0))
            opt.step()
            plain.step()
        require_equal(parameters(bare), parameters(ddp))


# One rank is a step ahead of the others, of its row too: no bucket is stepped on such a sum.
@in_ranks(4)
@pytest.mark.parametrize("eager", [False, True])
def test_all_rows_find_out_that_one_rank_is_in_another_step(eager: bool) -> None:
    with stepped(2, "hybrid", eager=eager, **ORDERED) as (ddp, opt):
        before = parameters(ddp)
        if dist.get_rank() == 3:
            skip_a_round(ddp)
        opt.zero_grad()
        with pytest.raises(Desync):
            MLP.loss(ddp, 2).backward()
        require_equal(before, parameters(ddp))


@in_ranks(4)
def test_all_rows_find_out_that_one_rank_has_frozen_a_parameter() -> None:
    with stepped(2, "hybrid", **ORDERED) as (ddp, opt):
        opt.zero_grad()
        if dist.get_rank() == 2:
            ddp.module[2].bias.requires_grad_(False)
        with pytest.raises(PlanMismatch):
            MLP.loss(ddp, 2).backward()


@in_ranks(4)
def test_parameters_and_buffers_of_all_rows_follow_rank_0() -> None:
    torch.manual_seed(100 + dist.get_rank())
    case = CASES["convolutions"]
    with training(case.make(), "hybrid", "SGD") as (ddp, opt):
        require_same_everywhere(parameters(ddp))
        for step in range(3):
            step_of(ddp, opt, case, step)
        ddp.sync.synchronise_buffers()
        require_same_everywhere({name: value.clone() for name, value in ddp.named_buffers()})
        require_same_everywhere(parameters(ddp))


@in_ranks(4)
def test_all_rows_compare_parameters_and_meshes() -> None:
    with mesh_of(2, 2) as mesh:
        odd = nn.Linear(6, 5 if dist.get_rank() == 3 else 4)
        text = text_of(PlanMismatch, lambda: attach(odd, mesh=mesh, config=HYBRID))
        assert "shape of parameter 0 ('weight') is [4, 6] on rank 0 and [5, 6] on rank 3" in text
    rows = ((0, 1), (2, 3)) if dist.get_rank() < 2 else ((0, 2), (1, 3))
    text = text_of(PlanMismatch, lambda: open_with_rows(MLP.model(), rows))
    assert "mesh is [[0, 1], [2, 3]] on rank 0 and [[0, 2], [1, 3]] on rank 2" in text


@in_ranks(4)
def test_a_copy_has_the_mesh() -> None:
    with stepped(2, "hybrid", **ORDERED) as (ddp, opt):
        twin = copy.deepcopy(ddp)
        assert rows_of(twin) == ((0, 1), (2, 3))
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
    with stepped(14, "hybrid", "AdamW") as (ddp, _):
        explanation = ddp.explain(show=False)
        assert explanation.strategy == "hybrid"
        assert explanation.why.startswith(("planned from what was measured", "sizes follow from the size of the model"))
        profile = ddp.sync.profile()
        assert (profile.strategy, profile.num_ranks) == ("hybrid", 4)
        assert profile.curves.keys() == {"reduce_scatter", "all_gather"}  # that of a reduction is of both axes
        assert len(ddp.report(show=False).buckets) == len(ddp.plan.buckets)
        *_, last = records_of(ddp)
        assert len(last.busy_ms) == 4
        assert min(last.busy_ms) > 0  # by trailer, from both rows


WHERE = "  the ranks over which gradients are averaged"
NEEDS_A_MESH = (
    f'strategy="hybrid" needs a mesh of two dimensions, got {{}}.\n{WHERE}\n'
    '  Write mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")): the first dimension replicates, the '
    "second shards."
)


@in_ranks(4)
def test_meshes_that_do_not_go_with_it_are_refused() -> None:
    line, mesh, cube = (init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (1, 2, 2)))
    unordered = DeviceMesh("cpu", [[0, 3], [2, 1]])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"config": HYBRID}, NEEDS_A_MESH.format("no mesh")),
        ({"config": HYBRID, "process_group": dist.group.WORLD}, NEEDS_A_MESH.format("no mesh")),
        ({"config": HYBRID, "mesh": line}, NEEDS_A_MESH.format(line)),
        ({"config": HYBRID, "mesh": cube}, NEEDS_A_MESH.format(cube)),
        (
            {"mesh": mesh},
            f"Only 1D device mesh is supported, but got {mesh}.\n{WHERE}, with strategy=None\n"
            '  Give one dimension of it, such as mesh["dp"], or set strategy="hybrid", under which the first of two dimensions '
            "replicates and the second shards.",
        ),
        (
            {"config": HYBRID, "mesh": unordered},
            f"the second dimension of {unordered} does not count upwards.\n  it has the ranks 2, 1\n"
            '  Write mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), which puts them in order.',
        ),
    ]
    for arguments, text in refused:
        assert text_of(ConfigError, lambda arguments=arguments: attach(MLP.model(), **arguments)) == text
    for each in (line, mesh, cube, unordered):
        destroy(each)


@in_ranks(4)
def test_groups_and_optimizers_that_do_not_go_with_it_are_refused() -> None:
    with mesh_of(2, 2) as mesh, contextlib.closing(DistributedDataParallel(MLP.model(), device_mesh=mesh, config=HYBRID)) as ddp:
        assert text_of(ConfigError, lambda: ddp._update_process_group(dist.group.WORLD)) == (
            f'strategy="hybrid" needs a mesh of two dimensions, got a process group.\n{WHERE}\n'
            "  Close the wrapper, and wrap the model anew with another mesh."
        )
        plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
        MLP.loss(ddp, 0).backward()
        assert text_of(PhaseError, plain.step) == (
            "strategy='hybrid' needs a sharded optimizer, and SGD is none.\n"
            "  the first step of the optimizer\n"
            "  Make it with undertow.ShardedOptimizer(torch.optim.SGD, model, ...)."
        )
