"""What surrounds a sharded step: gradients, clipping, scaling, groups, schedules, changes of the parameters, failures."""

import contextlib
import copy
import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import undertow
from support.alike import of_all_ranks, train
from support.errors import text_of
from support.inside import num_state_elements, open_with_rows, sharding_of, skip_a_round
from support.levels import some
from support.models import CASES, Branches, Case, noise
from support.ranks import in_ranks
from support.sharded import (
    MLP,
    NARROW,
    ORDERED,
    TIED,
    WRITES,
    Parameters,
    Write,
    average_gradients,
    bare_training,
    destroy,
    mesh_of,
    one_step,
    optimizer_for,
    parameters,
    require_bits,
    require_equal,
    require_moved,
    require_same_everywhere,
    step_of,
    stepped,
    trained,
    training,
)
from undertow import (
    ConfigError,
    Desync,
    DistributedDataParallel,
    NonFiniteGradient,
    PhaseError,
    PlanMismatch,
    ReplicaMismatch,
    ShardedGradientError,
    ShardedOptimizer,
    SyncConfig,
    attach,
    clip_grad_norm_,
)

BARRIER = [{"strategy": "zero1"}, {"strategy": "zero2"}]


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_gradient_is_a_placeholder_that_refuses_use(strategy: str) -> None:
    with training(MLP.model(), strategy) as (ddp, opt):
        MLP.loss(ddp, 0).backward()
        for name, param in ddp.module.named_parameters():
            assert repr(param.grad).startswith(f"GradientPlaceholder('{name}'")
            assert f"the gradient of '{name}' is sharded" in text_of(ShardedGradientError, param.grad.sum)
        assert "optimizer.clip_grad_norm_" in text_of(
            ShardedGradientError, lambda: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        )
        opt.zero_grad()
        assert all(param.grad is None for param in ddp.parameters())


def clipped_step(ddp: Any, opt: Any, step: int, *, norms: list[float], max_norm: float = 2.0, norm_type: float = 2.0) -> None:
    opt.zero_grad()
    MLP.loss(ddp, step).backward()
    clip = getattr(opt, "clip_grad_norm_", partial(torch.nn.utils.clip_grad_norm_, ddp.parameters()))
    norms.append(clip(max_norm, norm_type).item())
    opt.step()


@pytest.mark.deep
@in_ranks(2, 3, 4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_is_that_of_the_whole_gradient(norm_type: float) -> None:
    norms: list[list[float]] = []

    def run(strategy: str, **settings: Any) -> Parameters:
        norms.append([])
        return trained(
            MLP,
            strategy,
            "SGD",
            num_steps=5,
            each=partial(clipped_step, norms=norms[-1], norm_type=norm_type),
            reduction="ordered",
            **settings,
        )

    once, again = ("hybrid", "hybrid") if dist.get_world_size() == 4 else ("zero1", "zero2")
    expected, first = run("ddp"), run(once)
    for cap in (2e-5, 1e-4, 1e-3):
        require_equal(first, run(again, bucket_cap_mb=cap))
    # Torch adds up fp32 norms of parameters, we fp64 powers of everything: an ulp of the norm, and then of every gradient; a
    # mesh adds up row by row.
    assert (norms[1:], norms[1]) == ([norms[1]] * 4, pytest.approx(norms[0], rel=1e-6))
    assert all(torch.allclose(param, first[name], rtol=1e-5, atol=1e-6) for name, param in expected.items())
    require_same_everywhere({"norms": torch.tensor(norms[1])})


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.is_unused = False

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers[:: 2 if self.is_unused else 1]:
            rows = layer(rows).tanh()
        return rows


def prepare(model: nn.Module, kind: str, number: int) -> None:
    """Brings gradients of a kind that no backward of this step makes, or leaves them, for the third step."""
    if kind == "tied":
        model.layers[1].weight = model.layers[0].weight
    keeps = number == 2 and kind in ("frozen", "unused")
    for name, param in model.named_parameters():
        if kind == "zeroed" and param.grad is not None:
            param.grad.zero_()
        elif not (keeps and name.startswith("layers.1.")):
            param.grad = None
    model.is_unused = number == 2 and kind in ("unused", "zeroed")
    model.layers[1].requires_grad_(not (number == 2 and kind == "frozen"))


def norms_of(kind: str, clip: Callable[[Any, Any], Tensor], *, is_sharded: bool) -> list[float]:
    """The norms of three steps; before the third, a gradient is left from the second, or the parameters change."""
    torch.manual_seed(0)
    bare = Layers()
    prepare(bare, kind, 0)
    ignored = ["layers.3.weight", "layers.3.bias"] if kind == "ignored" else []
    trained_by = [param for name, param in bare.named_parameters() if name not in ignored]
    groups = [{"params": trained_by[:2]}, {"params": trained_by[2:], "lr": 0.05}]
    model = DistributedDataParallel(bare, config=SyncConfig(ignore=ignored, reduction="ordered"))
    optimizer = ShardedOptimizer(torch.optim.SGD, model, groups, lr=0.1) if is_sharded else torch.optim.SGD(groups, lr=0.1)
    norms = []
    with contextlib.closing(model):
        for number in range(3):
            prepare(bare, kind, number)
            model(noise(4, 6, step=number)).square().sum().backward()
            norms.append(clip(model, optimizer).item())
            optimizer.step()
        norms.append(clip(model, optimizer).item())  # of gradients that are clipped, the left one too
    return norms


def torchs_clip(_model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return torch.nn.utils.clip_grad_norm_(params, 0.5)


@in_ranks(2)
@pytest.mark.parametrize("kind", some(["tied", "ignored", "frozen", "unused", "zeroed"], most=1))
def test_the_norm_covers_the_gradients_that_torchs_function_sees(kind: str) -> None:
    expected = norms_of(kind, torchs_clip, is_sharded=False)
    assert expected[3] == pytest.approx(0.5)
    for clip in (lambda _, optimizer: optimizer.clip_grad_norm_(0.5), lambda model, _: clip_grad_norm_(model, 0.5)):
        # torch adds up fp32 norms of parameters, Undertow fp64 powers of all elements.
        assert norms_of(kind, clip, is_sharded=True) == pytest.approx(expected, rel=1e-5)


@in_ranks(2, 3)
def test_a_norm_that_is_not_finite_is_an_error_everywhere() -> None:
    with stepped(1) as (ddp, opt):
        opt.zero_grad()
        (MLP.loss(ddp, 1) * (math.inf if dist.get_rank() == 0 else 1.0)).backward()
        with pytest.raises(NonFiniteGradient, match=r"the total norm of order 2\.0 of the gradients is (nan|inf)"):
            opt.clip_grad_norm_(1.0, error_if_nonfinite=True)


@in_ranks(1, 2, 3)
@pytest.mark.parametrize("set_to_none", some([True, False], most=1))
def test_a_gradient_scaler_skips_on_all_ranks_or_none(set_to_none: bool) -> None:
    scales: list[float] = []

    def each(ddp: Any, opt: Any, step: int) -> None:
        if step == 0:
            opt.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        opt.zero_grad(set_to_none=set_to_none)
        opt.scaler.scale(MLP.loss(ddp, step) * (math.inf if step in (0, 4) and dist.get_rank() == 0 else 1.0)).backward()
        if step % 2:
            opt.scaler.unscale_(opt)
        opt.scaler.step(opt)
        opt.scaler.update()
        scales.append(opt.scaler.get_scale())

    require_bits(MLP, num_steps=8, each=each, among=BARRIER)
    assert (scales, scales[0], min(scales)) == (scales[:8] * 3, 2.0**9, 2.0**9)


# If only the last rank's shard has the infinity, the first rank learns of it; on a mesh both rows do, from one rank.
@in_ranks(2, 3, 4)
@pytest.mark.parametrize("in_one_shard", some([True, False], most=1))
def test_an_overflow_anywhere_is_everybodys(in_one_shard: bool) -> None:
    scaler, num_ranks = torch.amp.GradScaler("cpu", init_scale=2.0), dist.get_world_size()
    with stepped(1, "hybrid" if num_ranks == 4 else "zero1", **ORDERED) as (ddp, opt):
        for is_skipped in (True, False):
            before = parameters(ddp)
            opt.zero_grad()
            factor = math.inf if is_skipped and (in_one_shard or dist.get_rank() == num_ranks - 1) else 0.0
            overflow = ddp.module[0].weight.flatten()[0] if in_one_shard else ddp.module[0].weight.sum()
            scaler.scale(MLP.loss(ddp, 1) + overflow * factor).backward()
            scaler.step(opt)
            scaler.update()
            (require_equal if is_skipped else require_moved)(before, parameters(ddp))
            assert scaler.get_scale() == 1.0
        require_same_everywhere(parameters(ddp))


BRANCHES = Case(Branches, lambda model, step: model(noise(3, 4, step=step)).square().sum())


def step_by_closure(ddp: Any, opt: Any, step: int) -> None:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = MLP.loss(ddp, step)
        loss.backward()
        return loss

    assert isinstance(opt.step(closure), Tensor)


@pytest.mark.deep
@in_ranks(2, 3)
def test_steps_with_a_closure_train_as_without_shards() -> None:
    require_bits(MLP, each=step_by_closure, among=BARRIER)


# Parameters that are loaded, set and given other memory between steps are what the next step starts from.
@pytest.mark.deep
@in_ranks(2, 3)
def test_what_is_written_between_steps_counts_with_sixteen_bits() -> None:
    case = NARROW[torch.bfloat16]

    def each(ddp: Any, opt: Any, step: int) -> None:
        step_of(ddp, opt, case, step)
        if step == 2:
            ddp.load_state_dict({name: torch.full_like(value, 0.25) for name, value in ddp.state_dict().items()})
        if step == 3:
            ddp.wait()
            ddp.module[0].weight.data = ddp.module[0].weight.detach().clone() * 0.5
        if step == 4:
            ddp.wait()
            with torch.no_grad():
                ddp.module[2].weight.fill_(0.5)

    settings: dict[str, Any] = {"optimizer": "SGD", "num_steps": 7, "each": each, "reduction": "ordered"}
    first = trained(case, "zero1", **settings)
    for cap in (2e-5, 1e-4):
        require_equal(first, trained(case, "zero2", bucket_cap_mb=cap, **settings))


@pytest.mark.deep
@in_ranks(2, 3)
def test_groups_have_settings_of_their_own_and_one_can_be_added_in_mid_training() -> None:
    cls, found = torch.optim.AdamW, []
    for strategy in ("ddp", "zero1"):
        model = BRANCHES.model()
        first, second, later = model.layers
        later.requires_grad_(False)
        with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(strategy=strategy, reduction="ordered"))) as ddp:
            groups = [{"params": first.parameters(), "weight_decay": 0.1}, {"params": second.parameters(), "betas": (0.5, 0.9)}]
            opt = cls(groups, lr=0.01) if strategy == "ddp" else ShardedOptimizer(cls, ddp, groups, lr=0.01)
            for step in range(10):
                if step == 4:
                    later.requires_grad_(True)
                    opt.add_param_group({"params": list(later.parameters()), "lr": 0.5})
                step_of(ddp, opt, BRANCHES, step)
            found.append(parameters(ddp))
    require_equal(*found)


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_each_rank_has_its_share_of_the_state(strategy: str) -> None:
    large = Case(
        lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 100)), lambda model, step: model(noise(4, 512, step=step)).sum()
    )
    with stepped(2, strategy, "AdamW", case=large, bucket_cap_mb=0.25) as (ddp, opt):
        whole = 2 * sum(param.numel() for param in ddp.parameters())
        assert num_state_elements(opt) / whole == pytest.approx(1 / dist.get_world_size(), rel=0.02)


def clipped_micro_batches(ddp: Any, opt: Any, step: int) -> None:
    opt.zero_grad(set_to_none=step % 2 == 0)
    for micro in range(2):
        MLP.loss(ddp, 10 * step + micro).backward()
        if step == 3:
            getattr(opt, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, ddp.parameters()))(1e-9)
    opt.step()


@in_ranks(1)
def test_one_rank_has_everything() -> None:
    require_bits(
        MLP,
        "AdamW",
        among=[*BARRIER, {"strategy": "hybrid", "shape": (1, 1)}],
        plans=[{}, {"bucket_cap_mb": 2e-5}],
    )
    require_bits(MLP, each=clipped_micro_batches, among=BARRIER)
    with training(NARROW[torch.bfloat16].model(), "zero1", "SGD") as (ddp, opt):
        NARROW[torch.bfloat16].loss(ddp, 0).backward()
        assert opt.clip_grad_norm_(1e-9) > 1e-3
        assert opt.clip_grad_norm_(1.0) < 1e-8  # what was clipped is what is stepped on


@in_ranks(2)
def test_a_change_with_shards_held_is_refused() -> None:
    with stepped(2, case=BRANCHES) as (ddp, opt):
        ddp.module.layers[0].requires_grad_(False)
        assert "the parameters have changed while sharded gradients are held" in text_of(
            PhaseError, lambda: BRANCHES.loss(ddp, 2).backward()
        )
        opt.zero_grad()


class Halves(nn.Module):
    """Two layers, of which a forward uses those that it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, rows: Tensor, *names: str) -> Tensor:
        return sum(getattr(self, name)(rows).square().sum() for name in names)


def stepped_on_means_of(*micro_batches: tuple[str, ...]) -> Parameters:
    """The layers of each micro-batch, whose gradients are averaged one by one."""
    with bare_training(Halves(), optimizer="SGD") as (bare, opt):
        means: dict[nn.Parameter, Tensor] = {}
        for number, names in enumerate(micro_batches):
            bare(noise(4, 6, step=number), *names).backward()
            average_gradients(bare)
            for param in bare.parameters():
                if param.grad is not None:
                    means[param] = means[param] + param.grad if param in means else param.grad
            opt.zero_grad()
        for param, mean in means.items():
            param.grad = mean
        opt.step()
        return parameters(bare)


@in_ranks(2)
def test_no_gradient_of_a_micro_batch_drops_out_if_everything_is_frozen_after_it() -> None:
    with training(Halves(), "zero2", "SGD", **ORDERED) as (ddp, opt):
        with ddp.no_sync():
            ddp(noise(4, 6, step=0), "first", "second").backward()
        ddp.module.requires_grad_(False)
        ddp(noise(4, 6, step=5), "first")
        assert text_of(PhaseError, ddp.finish).startswith(
            f"the parameters have changed while sharded gradients are held.\n  parameter 'first.weight', rank {dist.get_rank()}\n"
        )
        ddp.module.requires_grad_(True)
        ddp(noise(4, 6, step=1), "second").backward()
        opt.step()
        require_equal(parameters(ddp), stepped_on_means_of(("first", "second"), ("second",)))


@in_ranks(2)
def test_no_gradient_of_a_micro_batch_drops_out_if_all_that_have_one_are_frozen_after_it() -> None:
    with training(Halves(), "zero2", "SGD", **ORDERED) as (ddp, opt):
        with ddp.no_sync():
            ddp(noise(4, 6, step=0), "first").backward()
        ddp.module.first.requires_grad_(False)
        text = text_of(PhaseError, lambda: ddp(noise(4, 6, step=1), "second").backward())
        assert text.startswith("the parameters have changed while sharded gradients are held.\n  parameter 'first.weight'")
        opt.zero_grad()
        ddp(noise(4, 6, step=0), "second").backward()  # the parameters change now
        opt.step()
        require_equal(parameters(ddp), stepped_on_means_of(("second",)))


# Gradients that a program writes into `.grad`, which no synchronization has averaged.


def written(model: nn.Module, rows: int) -> list[nn.Parameter]:
    """The parameters of the bare module, with gradients of a batch that no hook has seen."""
    params = list(model.parameters())
    grads = torch.autograd.grad(MLP.loss(model.module, rows), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


UNLIKE = (
    "the gradient of '{name}' is not the same on rank 1 as on rank 0, and a sharded optimizer steps on it.\n"
    "  a step of a sharded optimizer without a synchronization since the one before; {number} of 4 gradients differ\n"
    "  On every rank, write g = undertow.average_gradients(g, parameters) before you assign a gradient that is this rank's own."
)


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_gradients_by_hand_are_means_or_an_error_on_every_rank(strategy: str) -> None:
    with (
        training(MLP.model(), strategy, "SGD", **ORDERED) as (ddp, opt),
        bare_training(MLP.model(), optimizer="SGD") as (bare, other),
    ):
        names = [spec.name for spec in ddp.plan.params]
        for step in range(3):
            params, before = written(ddp, step), parameters(ddp)
            assert text_of(ReplicaMismatch, opt.step) == UNLIKE.format(name=names[0], number=4)
            require_equal(parameters(ddp), before)
            means = undertow.average_gradients([param.grad for param in params], params)
            for param, mean in zip(params, means, strict=True):
                param.grad = mean
            opt.step()
            written(bare, step)
            other.step()
            require_equal(parameters(ddp), parameters(bare))


@in_ranks(2)
def test_zeros_on_one_rank_are_not_the_same_as_no_gradient_on_the_other() -> None:
    with training(MLP.model(), "zero1", "SGD") as (ddp, opt):
        name, param = next(iter(ddp.module.named_parameters()))
        param.grad = torch.zeros_like(param) if dist.get_rank() == 0 else None
        assert text_of(ReplicaMismatch, opt.step) == UNLIKE.format(name=name, number=1)


@in_ranks(2)
def test_a_scaler_does_not_unscale_gradients_by_hand_that_differ() -> None:
    with training(MLP.model(), "zero1", "SGD") as (ddp, opt):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(torch.zeros(()))
        written(ddp, 0)
        assert text_of(ReplicaMismatch, lambda: scaler.unscale_(opt)).startswith("the gradient of ")


@in_ranks(2)
def test_gradients_may_be_replaced_after_backward_if_every_rank_does_it_alike() -> None:
    """A rank cannot know then if others have replaced theirs: all tell it in their next synchronization."""
    with training(MLP.model(), "zero1", "SGD") as (ddp, opt):
        param = ddp.module[0].weight
        for step in range(3):
            opt.zero_grad()
            MLP.loss(ddp, step).backward()
            param.grad = ddp.full_gradient(param).clamp(-0.1, 0.1)
            opt.step()
        opt.zero_grad()
        MLP.loss(ddp, 3).backward()
        if dist.get_rank() == 1:
            param.grad = torch.ones_like(param)
        opt.step()
        opt.zero_grad()
        assert text_of(ReplicaMismatch, lambda: MLP.loss(ddp, 4).backward()) == (
            "the gradient of '0.weight' is not the same on rank 1 as on rank 0, and a sharded optimizer steps on it.\n"
            f"  the step before synchronization 4, rank {dist.get_rank()}\n"
            "  On every rank, write the same values into `.grad` after backward. If that step was not skipped, it has mixed the "
            "ranks' gradients: load a checkpoint."
        )


@in_ranks(2)
@pytest.mark.parametrize("write", WRITES)
def test_a_full_gradient_that_one_rank_has_written_is_an_error_on_every_rank(write: Write) -> None:
    """It would not gather the shards, for which the other rank waits."""
    with training(MLP.model(), "zero1", "SGD") as (ddp, opt):
        param = ddp.module[0].weight
        MLP.loss(ddp, 0).backward()
        mean = ddp.full_gradient(param)
        if dist.get_rank() == 1:
            write(param)
        assert text_of(ReplicaMismatch, lambda: ddp.full_gradient(param)) == (
            "the gradient of '0.weight' is not the same on rank 1 as on rank 0, and a sharded optimizer steps on it.\n"
            "  full_gradient(); 1 of 1 gradients differ\n"
            "  On every rank, write the same values into `.grad` after backward."
        )
        param.grad = mean
        assert torch.equal(ddp.full_gradient(param), mean)
        opt.step()


@pytest.mark.deep
@in_ranks(4)
def test_gradients_by_hand_are_compared_over_all_ranks_of_a_mesh() -> None:
    with training(MLP.model(), "hybrid", "SGD") as (ddp, opt):
        param = next(ddp.parameters())
        param.grad = torch.full_like(param, float(dist.get_rank() > 1))  # each row alike
        assert text_of(ReplicaMismatch, opt.step).startswith("the gradient of ")
        param.grad = torch.ones_like(param)
        opt.step()


@in_ranks(2)
def test_a_dropped_model_leaves_nothing_behind() -> None:
    gone = []
    for _ in range(3):
        ddp = DistributedDataParallel(MLP.model())
        opt = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
        one_step(ddp, opt)
        gone.append(weakref.ref(ddp.module))
        del ddp, opt
        gc.collect()
    dist.barrier()
    assert [ref() for ref in gone] == [None] * 3


# What surrounds a step on a mesh: clipping, evaluation, failures, copies, and meshes that cannot be.


HYBRID = SyncConfig(strategy="hybrid")


# Two stages of a pipeline, each on a mesh of its own.
@pytest.mark.deep
@in_ranks(4)
def test_a_part_of_a_larger_mesh_averages_over_its_ranks_alone() -> None:
    whole = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "replicate", "shard"))
    found = []
    for mesh, strategy in ((whole["replicate", "shard"], "hybrid"), (whole["shard"], None)):
        with contextlib.closing(
            DistributedDataParallel(MLP.model(), device_mesh=mesh, config=SyncConfig(strategy=strategy, **ORDERED))
        ) as ddp:
            opt = optimizer_for(ddp, strategy or "ddp", "SGD")
            train(ddp, opt, MLP.loss, steps=range(4))
            found.append(parameters(ddp))
    require_equal(*found)
    first, second, other, _ = of_all_ranks(found[0])
    require_equal(first, second)
    require_moved(first, other)
    destroy(whole)


@in_ranks(4)
def test_a_row_has_every_shard_once() -> None:
    with stepped(2, "hybrid", "AdamW", case=TIED, bucket_cap_mb=1e-3) as (ddp, _):
        owned = sum(part.numel for part in sharding_of(ddp).parts.values())
        found, first = of_all_ranks(owned), dist.get_rank() // 2 * 2
        row = found[first : first + 2]
        assert sum(row) == sum(param.numel() for param in ddp.parameters())  # each once, in a row
        assert max(row) < 0.7 * sum(row)


# One rank is a step ahead of the others, of its row too: no bucket is stepped on such a sum. Or it has frozen a parameter.
@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("freezes", some([False, True], most=1), ids=["step", "frozen"])
def test_all_rows_find_out_that_one_rank_is_in_another_step_or_has_frozen_a_parameter(freezes: bool) -> None:
    with stepped(2, "hybrid", **ORDERED) as (ddp, opt):
        before = parameters(ddp)
        opt.zero_grad()
        if dist.get_rank() == 3 and not freezes:
            skip_a_round(ddp)
        ddp.module[2].bias.requires_grad_(dist.get_rank() != 2 or not freezes)
        text_of(PlanMismatch if freezes else Desync, lambda: MLP.loss(ddp, 2).backward())
        require_equal(before, parameters(ddp))


@pytest.mark.deep
@in_ranks(4)
def test_parameters_and_buffers_of_all_rows_follow_rank_0() -> None:
    torch.manual_seed(100 + dist.get_rank())
    case = CASES["convolutions"]
    with training(case.make(), "hybrid", "SGD") as (ddp, opt):
        require_same_everywhere(parameters(ddp))
        train(ddp, opt, case.loss)
        ddp._sync_module_buffers(0)
        require_same_everywhere({name: value.clone() for name, value in ddp.named_buffers()})
        require_same_everywhere(parameters(ddp))


@in_ranks(4)
def test_all_rows_compare_parameters_and_meshes() -> None:
    with mesh_of(2, 2) as mesh:
        odd = nn.Linear(6, 5 if dist.get_rank() == 3 else 4)
        assert "shape of parameter 0 ('weight') is [4, 6] on rank 0 and [5, 6] on rank 3" in text_of(
            PlanMismatch, lambda: attach(odd, device_mesh=mesh, config=HYBRID)
        )
    rows = ((0, 1), (2, 3)) if dist.get_rank() < 2 else ((0, 2), (1, 3))
    assert "mesh is [[0, 1], [2, 3]] on rank 0 and [[0, 2], [1, 3]] on rank 2" in text_of(
        PlanMismatch, lambda: open_with_rows(MLP.model(), rows)
    )


@pytest.mark.deep
@in_ranks(4)
def test_a_copy_has_the_mesh() -> None:
    with stepped(2, "hybrid", **ORDERED) as (ddp, opt):
        twin = copy.deepcopy(ddp)
        other = optimizer_for(twin, "hybrid", "SGD")
        other.load_state_dict(opt.state_dict())
        for step in range(2, 4):
            one_step(ddp, opt, step)
            one_step(twin, other, step)
        require_equal(parameters(ddp), parameters(twin))
        twin.close()


@pytest.mark.deep
@in_ranks(4)
def test_a_mesh_is_measured_and_its_plan_stays() -> None:
    with stepped(14, "hybrid", "AdamW") as (ddp, _):
        explanation = ddp.explain()
        assert explanation.strategy == "hybrid"
        assert explanation.why == "no other is tried with shards: the optimizer's state would have to move"
        profile = ddp.sync.profile()
        assert (profile.strategy, profile.num_ranks) == ("hybrid", 4)
        assert profile.curves.keys() == {"reduce_scatter", "all_gather"}  # that of a reduction is of both axes
        assert len(ddp.report().buckets) == len(ddp.plan.buckets)
        busy_ms = ddp.report().busy_ms
        assert (len(busy_ms), min(busy_ms) > 0) == (4, True)  # by trailer, from both rows


WHERE = "  the ranks over which gradients are averaged"
NEEDS_A_MESH = (
    f'strategy="hybrid" needs a mesh of two dimensions, got {{}}.\n{WHERE}\n'
    '  Write device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")): the first dimension replicates, '
    "the second shards."
)


@in_ranks(4)
def test_meshes_that_do_not_go_with_it_are_refused() -> None:
    line, mesh, cube = (init_device_mesh("cpu", shape) for shape in ((4,), (2, 2), (1, 2, 2)))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"config": HYBRID}, NEEDS_A_MESH.format("no mesh")),
        ({"config": HYBRID, "device_mesh": line}, NEEDS_A_MESH.format(line)),
        ({"config": HYBRID, "device_mesh": cube}, NEEDS_A_MESH.format(cube)),
    ]
    for arguments, text in refused:
        assert text_of(ConfigError, lambda arguments=arguments: attach(MLP.model(), **arguments)) == text
    for each in (line, mesh, cube):
        destroy(each)
