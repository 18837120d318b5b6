"""Experts on 2 x 2 ranks, each reduced over its group with its divisor; and steps that scalers skip."""

import contextlib
import copy
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist.mixture import (
    MATCH,
    SGD,
    WIDTH,
    experts_group,
    loss,
    mixture,
    reduce_naively,
    reduced,
    steps_alike,
    trained_naively,
    wrapped_mixture,
)
from support.alike import backward_alike, backwards, of_all_ranks, require_equal_gradients, require_equal_values
from support.errors import text_of
from support.inside import own_group_of
from support.levels import some
from support.models import Branches, noise
from support.naive import TIMEOUT_S, alone, wrapped
from support.ranks import in_ranks
from support.sharded import MLP, require_same_everywhere, training
from undertow import (
    CheckpointError,
    ConfigError,
    Desync,
    DistributedDataParallel,
    ExpertGroup,
    PhaseError,
    PlanMismatch,
    ShardedOptimizer,
    SyncConfig,
    WrongType,
    attach,
    clip_grad_norm_,
    save_checkpoint,
)


def all_step(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def all_zero_grad(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()


ALL_EXPERTS = [f"experts.{index}.{kind}" for index in (0, 1) for kind in ("bias", "weight")]


@in_ranks(4)
@pytest.mark.parametrize(
    ("divisor", "settings"),
    some(
        [
            (None, {}),
            (3, {"bucket_cap_mb": 1e-4}),  # not a power of two: the factor rounds
            (4, {"overlap": False}),
            (4, {"order": "reverse", "auto_tune": False}),
        ],
        most=1,
    ),
    ids=str,
)
def test_a_training_run_is_that_of_the_naive_reference(divisor: float | None, settings: dict[str, Any]) -> None:
    with wrapped_mixture(mixture(), divisor=divisor, **settings) as (ddp, bare, group):
        optimizers = [torch.optim.SGD(model.parameters(), **SGD) for model in (ddp, bare)]
        for step in range(8):
            steps_alike(ddp, bare, group, steps=[step], divisor=2 if divisor is None else divisor)
            all_step(optimizers)
        require_equal_values(ddp.module, bare)


def come_late(model: Any, rank: int) -> None:
    for param in model.experts.parameters() if dist.get_rank() == rank else ():
        param.register_hook(lambda _: time.sleep(0.05))


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "frozen and thawed": lambda model, step: model.experts["0"].requires_grad_(step < 2 or step > 3),
    # Ranks 1 and 3, which hold other experts, know nothing of it.
    "frozen in one group": lambda model, step: model.experts["0"].weight.requires_grad_(
        dist.get_rank() % 2 == 1 or step < 2 or step > 3
    ),
    "replaced in one group": lambda model, step: (
        model.experts["0"].register_parameter("weight", nn.Parameter(torch.full((WIDTH, WIDTH), 0.25)))
        if dist.get_rank() % 2 == 0 and step == 2
        else None
    ),
    # The gradients of others arrive, and leave, in another order.
    "late on rank 0": lambda model, step: step > 0 or come_late(model, 0),
    "late on rank 3": lambda model, step: step > 0 or come_late(model, 3),
}


@pytest.mark.slow
@in_ranks(4)
@pytest.mark.parametrize("name", CHANGES)
def test_experts_may_change_and_their_gradients_may_come_late(name: str) -> None:
    with wrapped_mixture(mixture(), **({"bucket_cap_mb": 1e-4} if "late" in name else {})) as (ddp, bare, group):
        for step in range(6):
            for model in (ddp.module, bare):
                CHANGES[name](model, step)
            steps_alike(ddp, bare, group, steps=[step])


@in_ranks(4)
def test_an_expert_that_one_rank_uses_has_its_gradient_on_all_that_hold_it_when_backward_is_over() -> None:
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        rank, rows, experts = dist.get_rank(), torch.ones(2, WIDTH), ddp.module.experts
        route = (0,) if rank == 0 else ()
        steps_alike(ddp, bare, group, steps=[0], loss=lambda model, _: model(rows, route).sum())
        assert (sorted(ddp.unused_parameters), [param.grad is not None for param in experts["0"].parameters()]) == (
            ALL_EXPERTS[2:] if rank == 0 else ALL_EXPERTS,
            [rank in (0, 2)] * 2,
        )
        # What no rank uses keeps what it has, to the bit.
        experts["1"].weight.grad = torch.full((WIDTH, WIDTH), 1 / 3)
        ddp(rows, route).sum().backward()
        assert torch.equal(experts["1"].weight.grad, torch.full((WIDTH, WIDTH), 1 / 3))


@in_ranks(4)
def test_a_backward_that_reaches_one_part_only_is_a_synchronization_of_all() -> None:
    """Rank 0 reaches experts alone, rank 1 dense parameters alone, rank 2 nothing at all."""
    with wrapped_mixture(mixture()) as (ddp, bare, group):
        rank, rows = dist.get_rank(), torch.ones(2, WIDTH)
        for model in (ddp, bare):
            model(rows)
            parts = getattr(model, "module", model)
            reached = [parts.experts["0"], parts.after, None, model][rank]
            if reached is not None:
                reached(rows).sum().backward()
        if rank == 2:
            ddp.finish()
        reduce_naively(bare, group)
        require_equal_gradients(ddp, bare)


@pytest.mark.deep
@in_ranks(4)
def test_several_synchronized_backwards_of_a_step_add_up() -> None:
    """A sum over two ranks over four is not a mean over the two: the factor must not apply to an earlier result again."""
    with wrapped_mixture(mixture(), divisor=4) as (ddp, bare, group):
        for step in range(3):
            wanted: dict[str, Tensor] = {}
            ddp.zero_grad()
            for part in range(2):
                loss(ddp, step, part=part).backward()
                bare.zero_grad()
                loss(bare, step, part=part).backward()
                reduce_naively(bare, group)
                for name, param in bare.named_parameters():
                    if param.grad is not None:
                        wanted[name] = param.grad + wanted[name] if name in wanted else param.grad
            found = {name: param.grad for name, param in ddp.module.named_parameters() if param.grad is not None}
            assert found.keys() == wanted.keys()
            # A mean of a mean is rounded in another place.
            assert [it for it in found if not torch.allclose(found[it], wanted[it], rtol=0.0, atol=1e-6)] == []


@in_ranks(4)
def test_experts_take_over_values_and_buffers_of_the_first_rank_of_their_group() -> None:
    rank, model = dist.get_rank(), mixture()
    expert = model.experts["0"]
    for owner in (model, expert):
        owner.register_buffer("load", torch.full((2,), float(rank)))
    with wrapped_mixture(model) as (ddp, _, _):
        values = of_all_ranks((model.before.weight[0, 0].item(), expert.weight[0, 0].item()))
        for owner in (model, expert):
            owner.load += 10 * rank
        ddp(torch.ones(2, WIDTH)).sum().backward()
    dense, experts = zip(*values, strict=True)
    assert len(set(dense)) == 1
    assert experts[0] == experts[2] != experts[1] == experts[3]
    assert (model.load.tolist(), expert.load.tolist()) == ([0.0] * 2, [11.0 * (rank % 2)] * 2)


@in_ranks(4)
def test_experts_have_buckets_a_process_group_and_a_report_of_their_own() -> None:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        (experts,) = ddp.sync.experts
        assert (
            sorted(spec.name for spec in ddp.plan.params),
            sorted(spec.name for spec in experts.plan.params),
            dist.get_process_group_ranks(ddp.process_group),
            dist.get_process_group_ranks(experts.process_group),
        ) == (
            ["after.bias", "after.weight", "before.bias", "before.weight"],
            ALL_EXPERTS,
            [0, 1, 2, 3],
            [dist.get_rank() % 2, dist.get_rank() % 2 + 2],
        )
        assert own_group_of(experts).process_group is not experts.process_group
        backwards(ddp, loss, range(3))
        name = f"{MATCH!r}, ranks {dist.get_rank() % 2}, {dist.get_rank() % 2 + 2}"
        report, explanation = ddp.report(), ddp.explain()
        assert (report.experts, explanation.experts) == ({name: experts.report()}, {name: experts.explain()})
        assert min(report.num_steps, experts.report().num_steps) > 0
        assert len(experts.explain().bucket_mb) > 0
        assert (str(report).count(f"Experts {name}:\n"), str(explanation).count(f"Experts {name}: ")) == (1, 1)


@in_ranks(4)
def test_several_groups_go_side_by_side_and_a_rank_alone_divides_too() -> None:
    """Two kinds of experts, one of which every rank has alone."""
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "mine": nn.Linear(2, 2), "ours": nn.Linear(2, 2)})
    with alone() as mine, experts_group() as group:
        groups = (
            ExpertGroup(match="mine.*", process_group=mine, divisor=4),
            ExpertGroup(match="ours.*", process_group=group, divisor=2.5),
        )
        with contextlib.closing(attach(model, config=SyncConfig(experts=groups, reduction="ordered"))):
            bare = copy.deepcopy(model)
            rows = torch.randn(3, 2, generator=torch.Generator().manual_seed(dist.get_rank()))
            for it in (model, bare, model, bare):
                it.zero_grad()
                it["ours"](it["mine"](it["dense"](rows))).square().sum().backward()
            for name, over, divisor in (("dense", None, 4), ("mine", mine, 4), ("ours", group, 2.5)):
                for param in bare[name].parameters():
                    param.grad = reduced(param, over, divisor=divisor)
            require_equal_gradients(model, bare)


@in_ranks(2)
@pytest.mark.parametrize("change", ["thawed", "replaced"])
def test_the_first_gradient_after_a_change_is_divided_too(change: str) -> None:
    model = nn.ModuleDict({"dense": nn.Linear(2, 2), "expert": nn.Linear(2, 1, bias=False)})
    expert = model["expert"].requires_grad_(change != "thawed")
    groups = (ExpertGroup(match="expert.*", process_group=dist.group.WORLD, divisor=4),)
    with contextlib.closing(attach(model, config=SyncConfig(experts=groups))):
        rows = torch.full((1, 2), 1.0 + dist.get_rank())
        expert(model["dense"](rows)).sum().backward()
        model.zero_grad()
        if change == "thawed":
            expert.requires_grad_(True)
        else:
            expert.weight = nn.Parameter(torch.ones(1, 2))
        expert(rows).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()  # which finds a parameter that no forward has found
        assert expert.weight.grad.tolist() == [[3 / 4, 3 / 4]]


@in_ranks(4)
def test_communication_hooks_see_the_dense_parameters_only() -> None:
    seen: list[int] = []

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.buffer().numel())
        return dist.all_reduce(bucket.buffer().div_(4), async_op=True).get_future().then(lambda done: done.value()[0])

    with wrapped_mixture(mixture(), reduction="native") as (ddp, bare, group):
        ddp.register_comm_hook(None, hook)
        for model in (ddp, bare):
            loss(model, 0).backward()
        reduce_naively(bare, group)
        require_equal_gradients(ddp.module.experts, bare.experts)
    assert sum(seen) == WIDTH * WIDTH + WIDTH + WIDTH + 1


NO_MATCH = (
    "no parameter matches '{}'.\n"
    "  ExpertGroup, for a model of type ModuleDict\n"
    "  Match names of named_parameters(), such as 'b.bias'."
)
REFUSED = {
    "no match": NO_MATCH.format("c.*"),
    "two groups": "parameter 'a.weight' is in several groups of experts.\n"
    "  it matches 'a.*' and '*.weight'\n"
    "  Write patterns so that no parameter matches two of them.",
    "ignored": NO_MATCH.format("a.*"),
    "no group": "process_group must be a torch.distributed.ProcessGroup, got NoneType.\n"
    "  ExpertGroup(match='a.*')\n"
    "  Pass what torch.distributed.new_group() returned for the ranks that hold the same experts.",
    "not in it": "rank {rank} is not in the process group of its experts.\n"
    "  ExpertGroup(match='a.*')\n"
    "  Give each rank the group of the ranks that hold the same experts as it does.",
    "strangers": "experts are on ranks that do not train this model: {strangers}.\n"
    "  ExpertGroup(match='a.*'), the model is on ranks {own}\n"
    "  Give a group of ranks of the model.",
    "optimizer": "this model has experts, whose parameters and optimizer state are sharded over other ranks than the dense "
    "ones.\n  ShardedOptimizer\n"
    "  Make one for the model with params=[param for _, param in sync.named_parameters()], its dense ones, and one for each "
    "of sync.experts.",
    "join": "a rank without data cannot leave a model with experts: tokens of other ranks need the experts that it holds.\n"
    "  join\n"
    "  Give every rank the same number of batches.",
    "checkpoint": "this model has experts: ranks have different tensors under one name, and a checkpoint stores one per name.\n"
    "  save_checkpoint, load_checkpoint\n"
    "  Save model.state_dict() and optimizer.state_dict() on each rank, in separate files.",
}


@in_ranks(4)
def test_what_cannot_be_is_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    places = {"rank": dist.get_rank(), "strangers": "0, 2" if dist.get_rank() % 2 else "1, 3"}
    places["own"] = "1, 3" if dist.get_rank() % 2 else "0, 2"
    refused: set[str] = set()

    def refuse(name: str, kind: type[Exception], call: Callable[[], object]) -> None:
        assert text_of(kind, call) == REFUSED[name].format_map(places)
        refused.add(name)

    with experts_group() as group:

        def attaching(*groups: ExpertGroup, **how: Any) -> Callable[[], object]:
            return lambda: attach(model, config=SyncConfig(experts=groups), **how)

        mine = ExpertGroup(match="a.*", process_group=group)
        strange = ExpertGroup(match="a.*", process_group=dist.group.WORLD)
        refuse("no match", ConfigError, attaching(mine, ExpertGroup(match="c.*", process_group=group)))
        refuse("two groups", ConfigError, attaching(mine, ExpertGroup(match="*.weight", process_group=group)))
        refuse("ignored", ConfigError, attaching(mine, ignore=("a",)))
        refuse("no group", WrongType, attaching(ExpertGroup(match="a.*", process_group=None)))
        refuse("not in it", ConfigError, attaching(ExpertGroup(match="a.*", process_group=dist.GroupMember.NON_GROUP_MEMBER)))
        refuse("strangers", ConfigError, attaching(strange, process_group=group))
        with contextlib.closing(attaching(mine)()) as sync:
            refuse("optimizer", ConfigError, lambda: ShardedOptimizer(torch.optim.SGD, sync, lr=0.1))
        with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(experts=(mine,)))) as ddp:
            refuse("join", PhaseError, ddp.join_hook)
            refuse("checkpoint", CheckpointError, lambda: save_checkpoint("nowhere", ddp))
    assert refused == REFUSED.keys()


# Experts whose optimizer is sharded over their ranks, and clipping that counts each parameter once.


ADAMW = {"lr": 0.01}
# Norms are summed in fp64 and rounded once, and so is the reference: half a unit in the last place of fp32 each.
EPS = torch.finfo(torch.float32).eps


# Dense gradients once, experts of ranks 0 and 1.
def distinct_norm(model: nn.Module, norm_type: float = 2.0) -> float:
    found = of_all_ranks({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    grads = [grad for rank in (0, 1) for name, grad in found[rank].items() if ".experts." in f".{name}" or rank == 0]
    assert any(".experts." in f".{name}" for name in found[dist.get_rank()])
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), norm_type).item()


def require_clipped(model: Any, total: torch.Tensor, before: dict[str, torch.Tensor | None], wanted: float, most: float) -> None:
    assert abs(total.item() - wanted) <= EPS * wanted
    scale = (most / (total + 1e-6)).clamp(max=1.0)
    assert scale < 1.0
    found = {name: model.full_gradient(param) for name, param in model.module.named_parameters()}
    assert [name for name, grad in found.items() if (grad is None) != (before[name] is None)] == []
    assert [name for name, grad in found.items() if grad is not None and not torch.equal(grad, before[name] * scale)] == []


@in_ranks(4)
@pytest.mark.parametrize("norm_type", some([2.0, 1.0, float("inf")], most=1))
def test_clipping_counts_each_parameter_once(norm_type: float) -> None:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        ddp(torch.randn(3, WIDTH)).square().sum().backward()
        before = {name: param.grad.clone() for name, param in ddp.module.named_parameters()}
        wanted = distinct_norm(ddp.module, norm_type)
        total = clip_grad_norm_(ddp, 0.1, norm_type)
        require_clipped(ddp, total, before, wanted, 0.1)
        assert len(set(of_all_ranks(total.item()))) == 1
        assert torch.equal(clip_grad_norm_(ddp.sync, 1e9, norm_type), clip_grad_norm_(ddp, 1e9, norm_type))
        ddp.module.experts["0"].weight.grad[0, 0] = float("inf") if dist.get_rank() % 2 == 1 else 0.0
        assert "is inf" in text_of(RuntimeError, lambda: clip_grad_norm_(ddp, 0.1, norm_type, error_if_nonfinite=True))


@in_ranks(2)
def test_clipping_goes_without_experts_as_well() -> None:
    model = MLP.model()
    for strategy in ("ddp", "zero1", "zero2"):
        with training(model, strategy, "plain SGD") as (ddp, optimizer):
            ddp.zero_grad()
            MLP.loss(ddp, 0).backward()
            if strategy == "ddp":
                wanted = torch.nn.utils.get_total_norm([param.grad.double() for param in model.parameters()]).float()
            else:
                wanted = optimizer.clip_grad_norm_(1e9)
            assert torch.equal(clip_grad_norm_(ddp, 1e9), wanted)
            assert "norm_type must be above zero" in text_of(ConfigError, lambda ddp=ddp: clip_grad_norm_(ddp, 1.0, 0.0))
    assert "target must be the result of attach()" in text_of(WrongType, lambda: clip_grad_norm_(model, 1.0))


@in_ranks(4)
def test_clipping_averages_first_and_is_an_error_inside_accumulate() -> None:
    with wrapped_mixture(mixture()) as (ddp, _, _):
        with ddp.no_sync():
            loss(ddp, 0).backward()
            assert text_of(PhaseError, lambda: clip_grad_norm_(ddp, 1.0)) == (
                "gradients were accumulated and are not synchronized: each rank would compute a different norm.\n"
                f"  clip_grad_norm_, rank {dist.get_rank()}\n"
                "  Clip outside of accumulate() and no_sync(): gradients are averaged there."
            )
        with pytest.warns(UserWarning, match="clip_grad_norm_"):
            norm = clip_grad_norm_(ddp, 1e9)
        assert of_all_ranks(float(norm)) == [float(norm)] * 4


@in_ranks(2)
def test_clipping_takes_rows_of_sparse_gradients() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    with contextlib.closing(DistributedDataParallel(model)) as ddp:
        ddp(torch.tensor([1, 1, 2 + dist.get_rank()])).sum().backward()
        dense = model.weight.grad.to_dense()
        assert dense.unique().tolist() == [0.0, 0.5, 2.0]
        assert clip_grad_norm_(ddp, 1.0) == 3.0  # 2 of 2 each, 4 of 0.5 each: the root of 9
        assert torch.equal(model.weight.grad.to_dense(), dense * torch.tensor(1.0 / (3.0 + 1e-6)))


def optimizers_of(ddp: DistributedDataParallel) -> list[ShardedOptimizer]:
    dense, (experts,) = [param for _, param in ddp.sync.named_parameters()], ddp.sync.experts
    parts: tuple[tuple[Any, Any], ...] = ((ddp, dense), (experts, None))
    return [ShardedOptimizer(torch.optim.AdamW, target, params, **ADAMW) for target, params in parts]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range = range(8)) -> None:
    for step in steps:
        all_zero_grad(optimizers)
        loss(model, step).backward()
        all_step(optimizers)


def require_same_model(model: nn.Module, bare: nn.Module, group: dist.ProcessGroup) -> None:
    trained_naively(bare, group, torch.optim.AdamW(bare.parameters(), **ADAMW), num_steps=8)
    require_equal_values(model, bare)


@in_ranks(4)
@pytest.mark.parametrize("strategy", some(["zero1", "zero2"], most=1))
@pytest.mark.parametrize("settings", some([{}, {"bucket_cap_mb": 1e-4}], most=1), ids=str)
def test_shards_of_experts_over_their_group_make_the_same_model(strategy: str, settings: Any) -> None:
    with wrapped_mixture(mixture(), strategy=strategy, **settings) as (ddp, bare, group):
        train(ddp, optimizers_of(ddp))
        ddp.wait()
        require_same_model(ddp, bare, group)


@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("strategy", some(["zero1", "zero2"], most=1))
def test_clipping_is_exact_over_shards_of_both(strategy: str) -> None:
    with wrapped_mixture(mixture(), strategy=strategy) as (ddp, bare, group):
        optimizers = optimizers_of(ddp)
        for step in (0, 4, 8):
            bare.load_state_dict(ddp.module.state_dict())
            backward_alike(ddp, bare, loss, steps=[step], mean=partial(reduce_naively, group=group), require=lambda *_: None)
            require_clipped(
                ddp,
                clip_grad_norm_(ddp, 0.01),
                {name: param.grad for name, param in bare.named_parameters()},
                distinct_norm(bare),
                0.01,
            )
            all_step(optimizers)
            ddp.wait()


# In the last step rank 1's backward reaches nothing, and a collective call about one part only comes before the other's.
@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("way", some(["clip", "look", "unscale", "step"], most=1))
def test_a_rank_without_gradients_joins_all_parts_before_a_collective_of_one(way: str) -> None:
    with wrapped_mixture(mixture(), strategy="zero1", overlap=way != "step") as (ddp, bare, group):
        optimizers, scaler = optimizers_of(ddp), torch.amp.GradScaler("cpu", init_scale=2.0, enabled=way == "unscale")
        theirs = torch.optim.AdamW(bare.parameters(), **ADAMW)
        for step in range(3):
            all_zero_grad((*optimizers, theirs))
            is_without = step == 2 and dist.get_rank() == 1
            for model in (ddp, bare):
                value = loss(model, step)
                value = value.detach().requires_grad_() if is_without else value
                (scaler.scale(value) if model is ddp else value).backward()
            if way == "clip":
                optimizers[0].clip_grad_norm_(float("inf"))
            elif way == "look":
                ddp.full_gradient(ddp.module.before.weight)
            for optimizer in optimizers:
                if way == "unscale":
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            reduce_naively(bare, group)  # collectives that rank 1 would begin while others are in backward
            theirs.step()
        ddp.wait()
        require_equal_values(ddp, bare)


SCALE = 2.0**10
OVERFLOWS = {1: 1, 4: 2}  # by step, the rank whose expert has an infinity; its peer of the group gets it too


def parts(ddp: DistributedDataParallel) -> list[Any]:
    """The dense parameters' synchronization and the experts', each with its parameters."""
    return [(part, [param for _, param in part.named_parameters()]) for part in (ddp.sync, *ddp.sync.experts)]


# Settings, and one optimizer for all, or one for each part.
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[DistributedDataParallel], list[torch.optim.Optimizer]]]] = {
    "one": ({}, lambda ddp: [torch.optim.SGD(ddp.parameters(), **SGD)]),
    "one for each part": ({}, lambda ddp: [torch.optim.SGD(params, **SGD) for _, params in parts(ddp)]),
    **{
        strategy: (
            {"strategy": strategy},
            lambda ddp: [ShardedOptimizer(torch.optim.SGD, part, params, **SGD) for part, params in parts(ddp)],
        )
        for strategy in ("zero1", "zero2")
    },
}


def with_overflow(ddp: DistributedDataParallel, step: int) -> Tensor:
    """Of an expert's weight alone: the dense gradients stay finite on every rank."""
    value = loss(ddp, step)
    if dist.get_rank() == OVERFLOWS.get(step):
        value = value + ddp.module.experts["1"].weight[0, 0] * float("inf")
    return value


@in_ranks(4, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("unscales", some([False, True], most=1), ids=["step", "unscale_, clip, step"])
@pytest.mark.parametrize("name", some(OPTIMIZERS, most=1))
def test_an_overflow_in_an_expert_is_everybodys(name: str, unscales: bool) -> None:
    """The references know which steps to leave out; scales are powers of two, which change no bit but the exponent."""
    settings, make = OPTIMIZERS[name]
    scales = []
    with wrapped_mixture(mixture(), **settings) as (ddp, bare, group):
        optimizers = make(ddp)
        dense = torch.optim.SGD([*bare.before.parameters(), *bare.after.parameters()], **SGD)
        experts = torch.optim.SGD(bare.experts.parameters(), **SGD)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        for step in range(6):
            all_zero_grad((*optimizers, dense, experts))
            scaler.scale(with_overflow(ddp, step)).backward()
            for optimizer in optimizers if unscales else ():
                scaler.unscale_(optimizer)
            if unscales:
                clip_grad_norm_(ddp, 1e9)
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            loss(bare, step).backward()
            reduce_naively(bare, group)
            if step not in OVERFLOWS:
                experts.step()
            elif unscales:  # and clipped by an infinite norm
                for param in dense.param_groups[0]["params"]:
                    param.grad.zero_()
            if step not in OVERFLOWS or len(optimizers) == 2:  # a scaler leaves out the step of one optimizer, not of others
                dense.step()
            ddp.wait()
            require_equal_values(ddp.module, bare)
    assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE, SCALE / 2, SCALE / 2]


@in_ranks(4, timeout_s=TIMEOUT_S)
def test_experts_without_gradients_do_not_stop_a_scaler() -> None:
    """Experts of some ranks are not trained at all, those of others have no gradients: theirs looks at nothing."""
    model = mixture()
    model.experts.requires_grad_(dist.get_rank() % 2 == 1)
    with wrapped_mixture(model) as (ddp, _, _):
        optimizers = OPTIMIZERS["one for each part"][1](ddp)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
        for step, scale in enumerate([SCALE, SCALE / 2, SCALE / 2]):
            all_zero_grad(optimizers)
            value = ddp(noise(3, 6, step=step), (0,) if dist.get_rank() == 1 and step else ()).sum()
            scaler.scale(value * (float("inf") if dist.get_rank() == 3 and step == 1 else 1.0)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
        require_same_everywhere({name: param.detach() for name, param in ddp.module.before.named_parameters()})


@pytest.mark.deep
@in_ranks(4, is_fresh=True)
def test_settings_of_experts_that_differ_are_told_by_the_ranks_of_the_model() -> None:
    rank = dist.get_rank()
    with wrapped_mixture(mixture()) as (ddp, _, _):
        optimizer = torch.optim.SGD(ddp.module.experts.parameters(), lr=0.5 if rank == 3 else 0.25)
        loss(ddp, 0).backward()
        optimizer.step()
        output = loss(ddp, 1)
        if rank in (0, 2):
            output.backward()
        else:
            text = text_of(PlanMismatch, output.backward)
            assert f"\n  synchronization 1, rank {rank}\n" in text
            assert "is 0.25 on rank 1, but 0.5 on rank 3" in text
        dist.barrier()


@pytest.mark.deep
@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
def test_rounds_of_different_steps_do_not_pair_off() -> None:
    """Rank 0 synchronizes twice in a step, rank 1's second backward reaches nothing, and it cannot know of the round.

    Before an optimizer has stepped for the first time nobody can: a rank may leave that to others.
    """
    with wrapped(Branches()) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)

        def train() -> None:
            for step in range(4):
                optimizer.zero_grad()
                ddp(noise(2, 4, step=step)).sum().backward()
                second = ddp(noise(2, 4, step=step + 10)).sum()
                if dist.get_rank() == 0:
                    second.backward()
                optimizer.step()

        assert text_of(Desync, train) == (
            "ranks are not in the same step.\n"
            f"  synchronization 3, rank {dist.get_rank()}\n"
            "  rank 0: synchronization 3, without an optimizer step since the one before\n"
            "  rank 1: synchronization 3, after an optimizer step\n"
            "  Run the same number of synchronized backwards and steps on every rank. A rank without a backward calls finish()."
        )
