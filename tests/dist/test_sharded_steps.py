"""What surrounds a sharded step: gradients, clipping, scaling, groups, schedules, changes of the parameters, mistakes."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.errors import text_of
from support.models import CASES, Branches, Case, noise
from support.ranks import Ranks, in_ranks
from support.sharded import OPTIMIZERS, optimizer_for, parameters, require_equal, trained, training
from undertow import (
    ConfigError,
    DistributedDataParallel,
    NonFiniteGradient,
    PhaseError,
    PlanMismatch,
    ShardedGradientError,
    ShardedOptimizer,
    SyncConfig,
    WrongType,
    attach,
)
from undertow.runtime.placeholder import GradientPlaceholder

MLP = CASES["mlp"]


def one_step(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int = 0) -> None:
    opt.zero_grad()
    MLP.loss(ddp, step).backward()
    opt.step()


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_gradient_is_a_placeholder_that_refuses_use(strategy: str) -> None:
    bare = copy.deepcopy(MLP.model())
    with training(MLP.model(), strategy) as (ddp, opt):
        MLP.loss(ddp, 0).backward()
        first = [param.grad for param in ddp.parameters()]
        assert not any(isinstance(grad, GradientPlaceholder) for grad in first)  # until the first step
        opt.step()
        opt.zero_grad()
        for mine, other in zip(bare.parameters(), ddp.parameters(), strict=True):
            mine.data.copy_(other)
        MLP.loss(ddp, 1).backward()
        MLP.loss(bare, 1).backward()
        for name, param in ddp.named_parameters():
            assert isinstance(param.grad, GradientPlaceholder)
            with pytest.raises(ShardedGradientError, match=f"the gradient of '{name.removeprefix('module.')}' is sharded"):
                param.grad.sum()
        with pytest.raises(ShardedGradientError, match=r"optimizer\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        for mine, param in zip(bare.parameters(), ddp.parameters(), strict=True):
            assert mine.grad is not None
            dist.all_reduce(mine.grad)
            full = ddp.full_gradient(param)
            assert full is not None
            # Three summands may come in another order than in the reference: an ulp or two of values below 16.
            assert torch.allclose(full, mine.grad / dist.get_world_size(), rtol=1e-6, atol=1e-6)
        opt.zero_grad()
        assert all(param.grad is None for param in ddp.parameters())


def clipped(norm_type: float) -> None:
    norms: dict[str, list[float]] = {}

    def each(strategy: str) -> Any:
        def step(ddp: DistributedDataParallel, opt: Any, number: int) -> None:
            opt.zero_grad()
            MLP.loss(ddp, number).backward()
            if strategy == "ddp":
                norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 2.0, norm_type)
            else:
                norm = opt.clip_grad_norm_(2.0, norm_type)
            norms.setdefault(strategy, []).append(norm.item())
            opt.step()

        return step

    expected = trained(MLP, "ddp", "SGD", num_steps=5, each=each("ddp"), reduction="ordered")
    first = trained(MLP, "zero1", "SGD", num_steps=5, each=each("zero1"), reduction="ordered")
    for cap in (2e-5, 1e-4, 1e-3):
        require_equal(
            first, trained(MLP, "zero2", "SGD", num_steps=5, each=each("zero2"), reduction="ordered", bucket_cap_mb=cap)
        )
    assert norms["zero2"] == norms["zero1"] * 3
    # Torch adds up fp32 norms of parameters, we fp64 powers of everything: an ulp of the norm, and then of every gradient.
    assert norms["zero1"] == pytest.approx(norms["ddp"], rel=1e-6)
    for name, param in expected.items():
        assert torch.allclose(param, first[name], rtol=1e-5, atol=1e-6)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, norms["zero1"])
    assert all(of_rank == gathered[0] for of_rank in gathered)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_is_that_of_the_whole_gradient(ranks: Ranks, norm_type: float) -> None:
    ranks.run(clipped, norm_type)


@in_ranks(2, 3)
def test_a_norm_that_is_not_finite_is_an_error_everywhere() -> None:
    with training(MLP.model()) as (ddp, opt):
        one_step(ddp, opt)
        opt.zero_grad()
        (MLP.loss(ddp, 1) * (math.inf if dist.get_rank() == 0 else 1.0)).backward()
        with pytest.raises(NonFiniteGradient, match=r"the total norm of order 2\.0 of the gradients is (nan|inf)"):
            opt.clip_grad_norm_(1.0, error_if_nonfinite=True)


def scaled(strategy: str) -> tuple[dict[str, Tensor], list[float]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    scales = []

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        loss = MLP.loss(ddp, step)
        if step in (0, 4) and dist.get_rank() == 0:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())

    return trained(MLP, strategy, "SGD", num_steps=8, each=each, reduction="ordered"), scales


@in_ranks(2, 3)
def test_a_gradient_scaler_skips_on_all_ranks_or_none() -> None:
    expected, scales = scaled("ddp")
    for strategy in ("zero1", "zero2"):
        got, got_scales = scaled(strategy)
        require_equal(expected, got)
        assert got_scales == scales
    assert scales[0] == 2.0**9
    assert min(scales) < 2.0**10


@in_ranks(2, 3)
def test_an_overflow_in_one_shard_is_everybodys() -> None:
    """Only the last rank's shard has the infinity: the first one learns of it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with training(MLP.model(), "zero1", "SGD") as (ddp, opt):
        one_step(ddp, opt)
        before = parameters(ddp)
        opt.zero_grad()
        loss = scaler.scale(MLP.loss(ddp, 1) + ddp.module[0].weight.flatten()[0] * math.inf)
        loss.backward()
        scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == 1.0
        require_equal(before, parameters(ddp))


@in_ranks(2, 3)
def test_a_closure_is_called_once_before_the_update() -> None:
    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = MLP.loss(ddp, step)
            loss.backward()
            return loss

        assert isinstance(opt.step(closure), Tensor)

    require_equal(
        trained(MLP, "ddp", num_steps=4, each=each, reduction="ordered"),
        trained(MLP, "zero1", num_steps=4, each=each, reduction="ordered"),
    )


@in_ranks(2, 3)
def test_groups_and_schedules_work() -> None:
    def run(strategy: str) -> dict[str, Tensor]:
        ddp = DistributedDataParallel(MLP.model(), config=SyncConfig(strategy=strategy, reduction="ordered"))
        groups = [
            {"params": [ddp.module[0].weight, ddp.module[2].weight], "weight_decay": 0.1},
            {"params": [ddp.module[0].bias], "lr": 0.2},
            {"params": [ddp.module[2].bias], "betas": (0.5, 0.9)},
        ]
        settings = {"lr": 0.01}
        opt = (
            torch.optim.AdamW(groups, **settings)
            if strategy == "ddp"
            else ShardedOptimizer(torch.optim.AdamW, ddp, groups, **settings)
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.1, 0.2, 0.3], total_steps=12)
        for step in range(10):
            one_step(ddp, opt, step)
            schedule.step()
        assert [group["lr"] for group in opt.param_groups] == schedule.get_last_lr()
        result = parameters(ddp)
        ddp.close()
        return result

    require_equal(run("ddp"), run("zero1"))


def frozen_for_a_while(strategy: str, state: str = "momentum_buffer") -> dict[str, Tensor]:
    model = Branches(3)
    torch.manual_seed(3)
    for param in model.parameters():
        nn.init.normal_(param)
    with training(model, strategy, "SGD", reduction="ordered", bucket_cap_mb=1e-4) as (ddp, opt):
        for step in range(12):
            opt.zero_grad()
            if step in (3, 8):
                model.layers[1].requires_grad_(step == 8)
            ddp(noise(3, 4, step=step)).square().sum().backward()
            opt.step()
        return parameters(ddp)


@in_ranks(2, 3)
def test_state_moves_when_parameters_freeze_and_thaw() -> None:
    expected = frozen_for_a_while("ddp")
    for strategy in ("zero1", "zero2"):
        require_equal(expected, frozen_for_a_while(strategy), what=strategy)


@in_ranks(2, 3)
def test_a_group_can_be_added_in_mid_training() -> None:
    def run(strategy: str) -> dict[str, Tensor]:
        torch.manual_seed(3)
        model = Branches(3)
        model.layers[2].requires_grad_(False)
        ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy, reduction="ordered"))
        chosen = [param for param in ddp.parameters() if param.requires_grad]
        cls, settings = OPTIMIZERS["AdamW"]
        opt = cls(chosen, **settings) if strategy == "ddp" else ShardedOptimizer(cls, ddp, chosen, **settings)
        for step in range(8):
            if step == 4:
                model.layers[2].requires_grad_(True)
                opt.add_param_group({"params": list(model.layers[2].parameters()), "lr": 0.5})
            opt.zero_grad()
            ddp(noise(3, 4, step=step)).square().sum().backward()
            opt.step()
        result = parameters(ddp)
        ddp.close()
        return result

    require_equal(run("ddp"), run("zero1"))


def failing_backwards(strategy: str) -> dict[str, Tensor]:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("as planned")

    with training(MLP.model(), strategy, "SGD", reduction="ordered", bucket_cap_mb=1e-4) as (ddp, opt):
        for step in range(6):
            opt.zero_grad()
            if step in (1, 4):
                hidden = ddp.module[1](Fails.apply(ddp.module[0](noise(5, 6, step=step))))
                with pytest.raises(ValueError, match="as planned"):
                    ddp.module[2](hidden).sum().backward()
                opt.zero_grad()
            MLP.loss(ddp, step).backward()
            opt.step()
        return parameters(ddp)


@in_ranks(2, 3)
def test_a_failed_backward_leaves_the_next_one_right() -> None:
    expected = failing_backwards("ddp")
    for strategy in ("zero1", "zero2"):
        require_equal(expected, failing_backwards(strategy), what=strategy)


def state_is_shared_out(strategy: str) -> list[int]:
    torch.manual_seed(0)
    case = Case(
        lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 100)), lambda m, step: m(noise(4, 512, step=step)).sum()
    )
    with training(case.model(), strategy, bucket_cap_mb=0.25) as (ddp, opt):
        for step in range(2):
            opt.zero_grad()
            case.loss(ddp, step).backward()
            opt.step()
        states = opt._inners[0].optimizer.state.values()  # type: ignore[attr-defined]
        mine = sum(value.numel() for state in states for value in state.values())
        return [mine, 2 * sum(param.numel() for param in ddp.parameters())]


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_each_rank_has_its_share_of_the_state(ranks: Ranks, strategy: str) -> None:
    for mine, whole in ranks.run(state_is_shared_out, strategy):
        assert mine / whole == pytest.approx(1 / ranks.num_ranks, rel=0.02)


def alone() -> None:
    expected = trained(MLP, "ddp", num_steps=5)
    require_equal(expected, trained(MLP, "zero1", num_steps=5))
    require_equal(expected, trained(MLP, "zero2", num_steps=5, bucket_cap_mb=2e-5))

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(2):
            MLP.loss(ddp, 10 * step + micro).backward()
            if step == 3:
                opt.clip_grad_norm_(1e-9) if isinstance(opt, ShardedOptimizer) else nn.utils.clip_grad_norm_(
                    ddp.parameters(), 1e-9
                )
        opt.step()

    require_equal(trained(MLP, "ddp", "SGD", num_steps=3, each=each), trained(MLP, "zero1", "SGD", num_steps=3, each=each))
    narrow = Case(lambda: MLP.make().bfloat16(), lambda model, step: model(noise(5, 6, step=step).bfloat16()).float().sum())
    with training(narrow.model(), "zero1", "SGD") as (ddp, opt):
        narrow.loss(ddp, 0).backward()
        assert opt.clip_grad_norm_(1e-9) > 1e-3
        assert opt.clip_grad_norm_(1.0) < 1e-8  # what was clipped is what is stepped on


def test_one_rank_has_everything() -> None:
    with Ranks(1) as one:
        one.run(alone)


@in_ranks(2, 3)
def test_an_attached_model_steps_in_shards() -> None:
    expected = trained(MLP, "ddp", num_steps=5, reduction="ordered")
    model = MLP.model()
    sync = attach(model, config=SyncConfig(reduction="ordered"))
    opt = ShardedOptimizer(torch.optim.AdamW, sync, lr=0.01)
    assert isinstance(opt, torch.optim.Optimizer)
    for step in range(5):
        opt.zero_grad()
        MLP.loss(model, step).backward()
        opt.step()
    sync.wait()
    require_equal(expected, {f"module.{name}": param.detach() for name, param in model.named_parameters()})
    sync.close()


@in_ranks(2, 3)
def test_a_rank_without_data_finishes_and_steps() -> None:
    """In odd steps the last rank has no data."""

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        if step % 2 and dist.get_rank() == dist.get_world_size() - 1:
            ddp.finish()
        else:
            MLP.loss(ddp, step).backward()
        opt.step()

    expected = trained(MLP, "ddp", "SGD", num_steps=8, each=each, reduction="ordered")
    for strategy in ("zero1", "zero2"):
        require_equal(expected, trained(MLP, strategy, "SGD", num_steps=8, each=each, reduction="ordered", bucket_cap_mb=1e-4))


@in_ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_between_steps_counts(dtype: torch.dtype) -> None:
    """Parameters that are loaded, set and given other memory between steps are what the next step starts from."""
    case = Case(lambda: MLP.make().to(dtype), lambda model, step: model(noise(5, 6, step=step).to(dtype)).float().square().sum())

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        case.loss(ddp, step).backward()
        opt.step()
        if step == 2:
            state = {name: torch.full_like(value, 0.25) for name, value in ddp.state_dict().items()}
            ddp.load_state_dict(state)
        if step == 3:
            ddp.wait()
            ddp.module[0].weight.data = ddp.module[0].weight.detach().clone() * 0.5
        if step == 4:
            ddp.wait()
            with torch.no_grad():
                ddp.module[2].weight.fill_(0.5)

    first = trained(case, "zero1", "SGD", num_steps=7, each=each, reduction="ordered")
    for cap in (2e-5, 1e-4):
        require_equal(first, trained(case, "zero2", "SGD", num_steps=7, each=each, reduction="ordered", bucket_cap_mb=cap))
    if dtype == torch.float32:
        require_equal(trained(case, "ddp", "SGD", num_steps=7, each=each, reduction="ordered"), first)


class Recomputed(nn.Module):
    """Layers of which one runs twice in reentrant checkpoints: its gradient arrives twice, the second time late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True).tanh()
        return self.last(x)


@in_ranks(2, 3)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_parts_that_come_late_are_added(num_micro_batches: int) -> None:
    case = Case(Recomputed, MLP.loss)

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        for micro in range(num_micro_batches):
            case.loss(ddp, 10 * step + micro).backward()
        opt.step()

    expected = trained(case, "ddp", "SGD", num_steps=6, each=each, reduction="ordered", bucket_cap_mb=5e-5)
    for strategy in ("zero1", "zero2"):
        for cap in (2e-5, 5e-5, 1e-4):
            got = trained(case, strategy, "SGD", num_steps=6, each=each, reduction="ordered", bucket_cap_mb=cap)
            for name, param in expected.items():
                # Until they are expected, late parts are averaged apart: an ulp of gradients below 10, a few times.
                assert torch.allclose(param, got[name], rtol=1e-5, atol=1e-5), name


@in_ranks(2, 3)
def test_two_forwards_in_a_step_and_one_after_it() -> None:
    """A loss that needs a graph of gradients, and a model called twice in a step."""

    def each(ddp: DistributedDataParallel, opt: Any, step: int) -> None:
        opt.zero_grad()
        (MLP.loss(ddp, step) + MLP.loss(ddp, step + 50)).backward()
        opt.step()
        with torch.no_grad():
            ddp(noise(2, 6))

    expected = trained(MLP, "ddp", num_steps=5, each=each, reduction="ordered")
    require_equal(expected, trained(MLP, "zero1", num_steps=5, each=each, reduction="ordered", bucket_cap_mb=1e-4))


class Coupled(torch.optim.SGD):
    """Not elementwise: the update depends on the norm of the parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"] / (1 + float(param.detach().norm())))


class Signs(torch.optim.SGD):
    """Elementwise, and not known to anybody."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad.sign(), alpha=-group["lr"])


class Counting(torch.optim.Optimizer):
    """Ever smaller steps, by a counter in the group, which is one of the settings or comes with the first step."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-0.1 / float(group["count"]))


def counts_in_groups(settings: dict[str, Any]) -> str:
    with contextlib.closing(DistributedDataParallel(MLP.model())) as ddp:
        return text_of(ConfigError, lambda: ShardedOptimizer(Counting, ddp, **settings))


@pytest.mark.parametrize("settings", [{}, {"count": 0}, {"count": torch.zeros(1)}], ids=["new", "a number", "a tensor"])
def test_an_optimizer_that_counts_in_its_groups_is_refused(two_ranks: Ranks, settings: dict[str, Any]) -> None:
    for text in two_ranks.run(counts_in_groups, settings):
        assert text == (
            "Counting cannot be sharded: its steps change 'count' in its parameter groups, and only its state is kept, moved and "
            "saved.\n"
            "  ShardedOptimizer, which gives each rank a part of a parameter as a flat piece\n"
            "  Use an elementwise optimizer such as AdamW or SGD, or this one without sharding."
        )


def mistakes() -> None:
    model = MLP.model()
    ddp = DistributedDataParallel(model, config=SyncConfig(strategy="zero1"))
    cases: list[tuple[type[Exception], str, Any]] = [
        (ConfigError, "LBFGS cannot be sharded: it takes scalar products", lambda: ShardedOptimizer(torch.optim.LBFGS, ddp)),
        (ConfigError, "Adafactor cannot be sharded: it keeps one", lambda: ShardedOptimizer(torch.optim.Adafactor, ddp)),
        (ConfigError, "Coupled cannot be sharded: it updates parts", lambda: ShardedOptimizer(Coupled, ddp, lr=0.1)),
        (WrongType, "target must be what attach", lambda: ShardedOptimizer(torch.optim.SGD, nn.Linear(1, 1), lr=0.1)),
        (WrongType, "cls must be a class of optimizers", lambda: ShardedOptimizer("SGD", ddp, lr=0.1)),  # type: ignore[arg-type]
        (
            ConfigError,
            r"parameter 0 of the optimizer, of shape \(1, 1\), is none that is synchronised",
            lambda: ShardedOptimizer(torch.optim.SGD, ddp, nn.Linear(1, 1).parameters(), lr=0.1),
        ),
    ]
    for kind, text, make in cases:
        with pytest.raises(kind, match=text):
            make()
    if hasattr(torch.optim, "Muon"):
        with pytest.raises(ConfigError, match="Muon cannot be sharded: it orthogonalises"):
            ShardedOptimizer(torch.optim.Muon, ddp, [model[0].weight], lr=0.1)
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    MLP.loss(ddp, 0).backward()
    with pytest.raises(PhaseError, match="strategy='zero1' needs a sharded optimizer, and SGD is none"):
        plain.step()
    newer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
    with pytest.raises(PhaseError, match="SGD steps on parameters that a ShardedOptimizer updates"):
        plain.step()
    newer.step()
    with pytest.raises(WrongType, match="cannot be pickled or copied"):
        copy.deepcopy(newer)
    with pytest.raises(ConfigError, match="communication hooks reduce whole gradients"):
        ddp.register_comm_hook(None, lambda _state, bucket: None)
    newer.zero_grad()
    with ddp.no_sync():
        MLP.loss(ddp, 1).backward()
    MLP.loss(ddp, 1).backward()
    with ddp.no_sync():
        MLP.loss(ddp, 2).backward()
    with pytest.raises(PhaseError, match="accumulated and not synchronised"):
        newer.step()
    ddp.close()
    whole = DistributedDataParallel(MLP.model(), config=SyncConfig(strategy="ddp"))
    with pytest.raises(ConfigError, match="strategy='ddp' keeps all of the optimizer on every rank"):
        ShardedOptimizer(torch.optim.SGD, whole, lr=0.1)
    whole.close()


def test_mistakes_are_told(two_ranks: Ranks) -> None:
    two_ranks.run(mistakes)


@in_ranks(2)
def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    ddp = DistributedDataParallel(model)
    opt = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
    ddp(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match=r"the gradient of '0\.weight' is sparse: it cannot be cut into shards"):
        opt.step()
    ddp.close()


@in_ranks(2)
def test_ranks_with_other_settings_are_found_out() -> None:
    ddp = DistributedDataParallel(MLP.model())
    with pytest.raises(PlanMismatch, match=r"ranks disagree on the settings"):
        ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.1 * (1 + dist.get_rank()))
    ddp.close()


@in_ranks(2, is_fresh=True)
def test_a_change_with_shards_held_is_refused() -> None:
    with training(Branches(3), "zero1", "SGD") as (ddp, opt):
        for step in range(2):
            opt.zero_grad()
            ddp(noise(3, 4, step=step)).sum().backward()
            opt.step()
        ddp.module.layers[0].requires_grad_(False)
        with pytest.raises(PhaseError, match="the parameters have changed while sharded gradients are held"):
            ddp(noise(3, 4)).sum().backward()
        opt.zero_grad()


def dropped() -> list[int]:
    """Neither the model nor its buckets stay when nobody holds them."""
    import weakref

    gone = []
    for _ in range(3):
        ddp = DistributedDataParallel(MLP.model())
        opt = optimizer_for(ddp, "zero1")
        one_step(ddp, opt)
        gone.append(weakref.ref(ddp.module))
        del ddp, opt
        gc.collect()
    dist.barrier()
    return [ref() is None for ref in gone]


def test_a_dropped_model_leaves_nothing_behind(two_ranks: Ranks) -> None:
    assert two_ranks.run(dropped) == [[True] * 3] * 2
