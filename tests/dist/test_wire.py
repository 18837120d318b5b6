"""Gradients and parameters that travel in a format, compared with a naive reference that encodes each parameter by itself."""

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist.mixture import MATCH, experts_group
from support.errors import text_of
from support.inside import Rounding, Turn, carriers_of, turn_of, turn_of_experts
from support.levels import some
from support.models import CASES, Wide, noise
from support.naive import wrapped
from support.outer import offsets, sent
from support.ranks import in_ranks
from support.sharded import (
    hybrid,
    mesh_of,
    parameters,
    require_equal,
    require_same_everywhere,
    step_of,
    trained,
    training,
)
from undertow import ConfigError, ExpertGroup, PlanMismatch, load_checkpoint, save_checkpoint
from undertow.wire import WIRES

WIDE = CASES["wide"]
FORMATS = [*WIRES]
PLANS: list[dict[str, Any]] = [{"bucket_cap_mb": 1e-4}, {"bucket_cap_mb": 5e-3}]


def of_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    found = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, values.contiguous(), group=group)
    return found


def sum_as_sent(
    values: Tensor, name: str, turn: Turn, group: dist.ProcessGroup | None = None, stage: Rounding = Rounding.OWN
) -> Tensor:
    total = torch.zeros_like(values)
    for rank, of_rank in enumerate(of_ranks(values, group)):
        total += sent(of_rank, name, offsets(name, turn, stage, rank))
    return total


def mean_as_sent(values: Tensor, name: str, turn: Turn, group: dist.ProcessGroup | None = None) -> Tensor:
    return sum_as_sent(values, name, turn, group) / dist.get_world_size(group)


def mean_as_returned(mean: Tensor, name: str, turn: Turn) -> Tensor:
    return sent(mean, name, offsets(name, turn, Rounding.MEAN))


def largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def own_gradients(model: nn.Module, *numbers: int) -> dict[str, Tensor]:
    """Returns what this rank adds, from a copy that has the same parameters."""
    bare = Wide()
    bare.load_state_dict(model.state_dict())
    for number in numbers:
        WIDE.loss(bare, number).backward()
    return {name: param.grad for name, param in bare.named_parameters() if param.grad is not None}


@in_ranks(2, 3)
@pytest.mark.parametrize("wire", some(FORMATS, most=1))
@pytest.mark.parametrize("strategy", some(["ddp", "zero1", "zero2"], most=2))
def test_gradients_arrive_as_the_mean_of_encoded_values(wire: str, strategy: str) -> None:
    with training(Wide(), strategy, "SGD", wire=wire) as (ddp, opt):
        for number in range(4):
            grads = own_gradients(ddp.module, number)
            opt.zero_grad()
            WIDE.loss(ddp, number).backward()
            turn = turn_of(ddp)
            wanted = {name: mean_as_sent(grad, wire, turn) for name, grad in grads.items()}
            if strategy == "ddp":  # whole gradients: the mean is encoded again
                wanted = {name: mean_as_returned(mean, wire, turn) for name, mean in wanted.items()}
            for name, param in ddp.module.named_parameters():
                assert torch.equal(ddp.full_gradient(param), wanted[name]), (name, number)
            opt.step()
            ddp.wait()


@pytest.mark.deep
@in_ranks(3, 4)
@pytest.mark.parametrize("wire", FORMATS)
def test_ranks_are_equal_after_every_step_and_every_plan_has_the_same_bits(wire: str) -> None:
    settings = [{"strategy": strategy} for strategy in ("ddp", "zero1", "zero2")]
    if dist.get_world_size() == 4:
        settings = [{"strategy": "hybrid"}]

    def each(ddp: Any, opt: Any, number: int) -> None:
        step_of(ddp, opt, WIDE, number)
        ddp.wait()
        require_same_everywhere(parameters(ddp))

    for way in settings:
        require_equal(*(trained(WIDE, num_steps=6, each=each, wire=wire, **way, **plan) for plan in PLANS), what=str(way))


def sum_over(values: Tensor, name: str | None, turn: Turn, group: dist.ProcessGroup, stage: Rounding) -> Tensor:
    if name is not None:
        return sum_as_sent(values, name, turn, group, stage)
    first, *others = of_ranks(values, group)
    return sum(others, start=first.clone())


@in_ranks(4)
@pytest.mark.parametrize("wires", some([((None, "int8"),), (("bfloat16", "int8"),), (("int8", None),)], most=1), ids=str)
def test_each_axis_of_a_mesh_may_have_its_own_format(wires: tuple[str | None, str | None]) -> None:
    inside, across = wires
    with mesh_of(2, 2) as mesh, hybrid(Wide(), "SGD", wire=wires) as (ddp, opt):
        rows = mesh.get_group("shard"), mesh.get_group("replicate")
        for number in range(3):
            grads = own_gradients(ddp.module, number)
            opt.zero_grad()
            WIDE.loss(ddp, number).backward()
            for name, param in ddp.module.named_parameters():
                if param.numel() < 512:
                    continue  # in full width for both
                turn = turn_of(ddp)
                total = sum_over(grads[name], inside, turn, rows[0], Rounding.OWN) / 4
                mean = sum_over(total, across, turn, rows[1], Rounding.ACROSS)
                wanted = mean if across is None else mean_as_returned(mean, across, turn)
                assert torch.equal(ddp.full_gradient(param), wanted), (name, number)
            opt.step()
            ddp.wait()
            require_same_everywhere(parameters(ddp))


@in_ranks(2, 3)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_block_that_is_not_finite_spoils_no_other_and_no_later_step(value: float) -> None:
    with wrapped(Wide(), wire="int8") as ddp:
        for number in range(3):
            ddp.zero_grad()
            loss = WIDE.loss(ddp, number)
            if number == 1 and dist.get_rank() == 1:
                ddp.module.first.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([36]), value))
            loss.backward()
            are_finite = ddp.module.first.weight.grad.isfinite()
            # Rows of 20: the first block of 512 ends in row 25.
            assert bool(are_finite.all()) == (number != 1 or dist.get_rank() is None)
            assert bool(are_finite[:25].all())
            ddp.module.first.weight._backward_hooks = None


@in_ranks(2, 3)
@pytest.mark.parametrize("param_wire", ["int8", "bfloat16"])
@pytest.mark.parametrize("strategy", some(["zero1", "zero2"], most=1))
def test_parameters_travel_as_differences_and_errors_do_not_add_up(param_wire: str, strategy: str) -> None:
    exact = trained(WIDE, strategy, "SGD", num_steps=12)
    with training(Wide(), strategy, "SGD", param_wire=param_wire) as (ddp, opt):
        for number in range(12):
            before = parameters(ddp)
            step_of(ddp, opt, WIDE, number)
            ddp.wait()
            require_same_everywhere(parameters(ddp))
        now = parameters(ddp)
    # A difference arrives with an error of 1/254 of the largest one of its block. An error is part of the next difference, so
    # it is never larger than one step's; what else differs is that gradients were taken elsewhere by as much.
    moved = max(largest(now[name] - before[name]) for name in now)
    for name, value in now.items():
        assert largest(value - exact[name]) < moved / 50, (name, moved)
    assert any(not torch.equal(value, exact[name]) for name, value in now.items())


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", some(["ddp", "zero1"], most=1))
def test_the_sum_of_micro_batches_is_encoded_once(strategy: str) -> None:
    with training(Wide(), strategy, "SGD", wire="int8") as (ddp, opt):
        for number in range(3):
            grads = own_gradients(ddp.module, 2 * number, 2 * number + 1)
            opt.zero_grad()
            with ddp.no_sync():
                WIDE.loss(ddp, 2 * number).backward()
            WIDE.loss(ddp, 2 * number + 1).backward()
            turn = turn_of(ddp)
            wanted = {name: mean_as_sent(grad, "int8", turn) for name, grad in grads.items()}
            if strategy == "ddp":
                wanted = {name: mean_as_returned(mean, "int8", turn) for name, mean in wanted.items()}
            for name, param in ddp.module.named_parameters():
                assert torch.equal(ddp.full_gradient(param), wanted[name]), (name, number)
            opt.step()
            ddp.wait()


@in_ranks(2)
@pytest.mark.parametrize("strategy", some(["ddp", "zero1"], most=1))
def test_gradients_are_scaled_and_clipped_after_they_have_arrived(strategy: str) -> None:
    found = []
    for scale in (1.0, 1024.0):  # powers of two change no code and no rounding
        with training(Wide(), strategy, "SGD", wire="int8", param_wire=None if strategy == "ddp" else "int8") as (ddp, opt):
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            for number in range(3):
                opt.zero_grad()
                scaler.scale(WIDE.loss(ddp, number)).backward()
                scaler.unscale_(opt)
                if strategy == "ddp":
                    nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
                else:
                    opt.clip_grad_norm_(0.05)
                scaler.step(opt)
                scaler.update()
            found.append(parameters(ddp))
            require_same_everywhere(found[-1])
    require_equal(*found)


@in_ranks(2, 3)
def test_a_rank_without_data_adds_zeros() -> None:
    with wrapped(Wide(), wire="int8") as ddp, ddp.join():
        for number in range(1 + dist.get_rank()):
            ddp.zero_grad()
            WIDE.loss(ddp, number).backward()
            mine = own_gradients(ddp.module, number)["block"]
            if number == dist.get_world_size() - 1:  # the last rank is alone
                turn = turn_of(ddp)
                own = sent(mine, "int8", offsets("int8", turn, Rounding.OWN, dist.get_rank()))
                assert torch.equal(ddp.module.block.grad, mean_as_returned(own / dist.get_world_size(), "int8", turn))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(24, 24, bias=False)
        torch.manual_seed(1 + dist.get_rank() % 2)
        self.experts = nn.ModuleList([nn.Linear(24, 24, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](self.dense(x))


@in_ranks(4)
def test_experts_travel_in_the_format_over_their_own_ranks() -> None:
    with experts_group() as group:
        experts = (ExpertGroup(match=MATCH, process_group=group),)
        with wrapped(Routed(), wire="int8", experts=experts) as ddp:
            bare = Routed()
            for model in (ddp, bare):
                model(noise(5, 24)).square().mean().backward()
            for mine, param, ranks in (
                (ddp.module.dense, bare.dense, dist.group.WORLD),
                (ddp.module.experts[0], bare.experts[0], group),
            ):
                turn = turn_of(ddp) if ranks is dist.group.WORLD else turn_of_experts(ddp)
                mean = mean_as_sent(param.weight.grad, "int8", turn, ranks)
                assert torch.equal(mine.weight.grad, mean_as_returned(mean, "int8", turn))


@dataclass(frozen=True)
class Halves:
    """A toy: fp16 with another block."""

    block: int = 64
    least: float = 2.0**-25
    is_dithered: bool = False
    largest: float = 65504.0
    coding_us_per_mb: float = 1.0
    bucket_us: float = 0.0

    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor, message: Tensor, _dither: Tensor | None = None, *, is_host: bool = True) -> None:
        message.view(torch.float16).copy_(values)

    def decode(self, message: Tensor, into: Tensor, *, adds: bool) -> None:
        into.copy_(message.view(torch.float16).to(into.dtype) + (into if adds else 0))


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_new_format_is_one_object(strategy: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WIRES, "halves", Halves())  # type: ignore[arg-type]  # a dict
        with training(Wide(), strategy, "SGD", wire="halves", nonfinite="raise") as (ddp, opt):
            for number in range(3):
                step_of(ddp, opt, WIDE, number)
            require_same_everywhere(parameters(ddp))
            assert {bucket.wire for bucket in ddp.plan.buckets} == {"halves"}


@in_ranks(2)
def test_a_communication_hook_does_not_go_with_a_format() -> None:
    with wrapped(Wide(), wire="int8") as ddp:
        told = text_of(ConfigError, lambda: ddp.register_comm_hook(None, lambda state, bucket: torch.futures.Future()))
    assert told == (
        "a communication hook chooses the format of the gradients that it sends, and wire asks for another one.\n"
        "  register_comm_hook, with wire=...\n"
        "  Leave wire out, or encode in the hook."
    )


@in_ranks(2)
@pytest.mark.parametrize("name", ["wire", "param_wire"])
def test_ranks_with_different_formats_are_told(name: str) -> None:
    value = "int8" if dist.get_rank() else None
    told = text_of(PlanMismatch, lambda: wrapped(Wide(), **{name: value}))
    assert f"first difference: {name} is None on rank 0 and 'int8' on rank 1" in told


@in_ranks(2)
@pytest.mark.parametrize("strategy", some(["ddp", "zero1"], most=1))
def test_complex_and_narrow_gradients_travel_as_they_are(strategy: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.imaginary = nn.Parameter(torch.randn(600, dtype=torch.complex64))
            self.sixteen = nn.Parameter(torch.randn(600, dtype=torch.bfloat16))
            self.real = nn.Parameter(torch.randn(600))

    with training(Mixed(), strategy, "plain SGD", wire="bfloat16") as (ddp, opt):
        factor = float(1 + dist.get_rank())
        for _ in range(2):
            opt.zero_grad()
            module = ddp.module
            loss = (
                (module.imaginary * module.imaginary.conj()).real.sum() + module.sixteen.square().sum() + module.real.sum()
            ) * factor
            loss.backward()
            for param in (module.imaginary, module.sixteen):  # factors of 1 and 2, whose mean is 1.5
                assert torch.equal(ddp.full_gradient(param), (3 * param.detach()).to(param.dtype))
            opt.step()
            ddp.wait()


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize(("before", "after"), some([("int8", None), (None, "int8"), ("int8", "bfloat16")], most=1), ids=str)
def test_a_checkpoint_continues_under_another_format(tmp_path: Path, before: str | None, after: str | None) -> None:
    path = tmp_path / "saved"
    with training(Wide(), "zero1", "SGD", param_wire=before) as (ddp, opt):
        for number in range(3):
            step_of(ddp, opt, WIDE, number)
        save_checkpoint(path, ddp, opt)
        step_of(ddp, opt, WIDE, 3)
        ddp.wait()
        wanted = exact_values(ddp, opt)
    for _ in range(2):  # what was loaded and saved again continues too
        with training(Wide(), "zero1", "SGD", param_wire=after) as (ddp, opt):
            load_checkpoint(path, ddp, opt)
            save_checkpoint(path, ddp, opt)
            step_of(ddp, opt, WIDE, 3)
            ddp.wait()
            require_equal(exact_values(ddp, opt), wanted)
            require_same_everywhere(parameters(ddp))


def exact_values(ddp: Any, opt: Any) -> dict[str, Tensor]:
    """Returns the values that the optimizer updates."""
    states = opt.state_dict()["state"]
    named = enumerate(parameters(ddp).items())
    return {name: states.get(number, {}).get("master", value).clone() for number, (name, value) in named}


@pytest.mark.deep
@in_ranks(2, 3)
def test_parameters_with_separate_memory_add_differences_to_all_of_their_values() -> None:
    model = Wide()
    kept = model.state_dict()  # refers to the memory of the parameters, which stay there
    exact = trained(WIDE, "zero1", "SGD", num_steps=3)
    with training(model, "zero1", "SGD", param_wire="int8") as (ddp, opt):
        for number in range(3):
            step_of(ddp, opt, WIDE, number)
            ddp.wait()
            require_same_everywhere(parameters(ddp))
        for name, value in parameters(ddp).items():
            assert torch.equal(kept[name.removeprefix("module.")], value)
            # Far less than the parameters themselves, which have values of about 0.1 to 1.
            assert largest(value - exact[name]) < 1e-3, name


@pytest.mark.deep
@in_ranks(2)
def test_a_sharded_optimizer_may_follow_a_plan_with_several_formats() -> None:
    with training(Wide(), "zero1", "SGD", wire="auto", bucket_cap_mb=3e-3) as (ddp, opt):
        saved = ddp.plan.to_dict()
    saved["wires"] = ["int8" if number % 2 else None for number in range(len(saved["buckets"]))]
    with training(Wide(), "zero1", "SGD", wire="auto", plan=json.dumps(saved)) as (ddp, opt):
        assert len(set(ddp.plan.wires)) == 2
        for number in range(3):
            step_of(ddp, opt, WIDE, number)
            ddp.wait()
            require_same_everywhere(parameters(ddp))


@in_ranks(2, 4)
def test_memory_for_messages_is_freed_with_the_plan_that_sent_them() -> None:
    strategy = "hybrid" if dist.get_world_size() == 4 else "zero1"
    with training(Wide(), strategy, "SGD", wire="int8") as (ddp, opt):
        of_whole, *of_shards = carriers_of(ddp)
        step_of(ddp, opt, WIDE, 0)
        ddp.wait()
        assert not of_whole.free
        before = [set(axis.free) for axis in of_shards]
        assert all(before)
        opt.zero_grad()
        ddp.module.second.weight.requires_grad_(False)
        WIDE.loss(ddp, 1).backward()  # under another plan, whose messages have other sizes
        assert carriers_of(ddp) == [of_whole, *of_shards]
        assert not any(sizes <= set(axis.free) for sizes, axis in zip(before, of_shards, strict=True))
        opt.step()


def mean_of_exchanges(model: Any, opt: Any, given: Tensor, number: int) -> Tensor:
    """Returns the mean of what arrives of the same gradient in several synchronizations."""
    total = torch.zeros_like(given, dtype=torch.float64)
    for _ in range(number):
        model.zero_grad()
        (model() * given).sum().backward()
        total += model.full_gradient(model.module.values)
        if opt is not None:
            opt.step()
            model.wait()
    return total / number


class Values(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.ones(*shape))

    def forward(self) -> Tensor:
        return self.values


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_gradients_below_half_a_unit_arrive_on_average(strategy: str, steps: bool) -> None:
    given = torch.linspace(-1, 1, 2 * 512).view(2, 512)
    given[:, 0] = 300.0  # a unit of 2.4: no other element is as much as half of it
    given *= 1 + dist.get_rank()
    wanted = sum(of_ranks(given), start=torch.zeros(2, 512)) / dist.get_world_size()
    with training(Values(2, 512), strategy, "plain SGD", wire="int8") as (ddp, opt):
        found = mean_of_exchanges(ddp, opt if steps else None, given, 200)
        require_same_everywhere({"mean": found})
    # Rounded at random twice, 200 times: a deviation of a unit / 2 of the mean's block, times sqrt(2 / 200); six of them.
    allowed = 6 * 0.5 * float(wanted.max()) / 127 * math.sqrt(2 / 200)
    assert largest(found - wanted) < allowed
    assert largest(wanted[:, 1:]) > allowed / 2  # so that zeros, as without offsets, would not be right for all
    assert float((found - wanted)[:, 1:].square().mean().sqrt()) < allowed / 6


@in_ranks(2)
def test_the_report_has_the_share_of_values_that_arrive_as_zero() -> None:
    given = torch.zeros(2, 512)
    given[:, 0], given[0, 1:257] = 1000.0, 1e-5  # 256 of 258 values arrive as zero
    with training(Values(2, 512), "ddp", "plain SGD", wire="int8") as (ddp, _):
        assert ddp.report().zeroed is None
        mean_of_exchanges(ddp, None, given, 1)
        assert ddp.report().zeroed == 256 / 258
        assert "99% of the gradient values that are not zero arrive as zero" in str(ddp.report())
        assert ddp.report().scalars()["undertow/zeroed"] == 256 / 258
    with training(Values(2, 512), "ddp", "plain SGD") as (ddp, _):
        mean_of_exchanges(ddp, None, given, 1)
        assert ddp.report().zeroed is None
        assert "arrive as zero" not in str(ddp.report())


@in_ranks(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize(
    ("wire", "value", "dtype", "told"),
    some(
        [
            ("float16", 1e-8, torch.float32, "are too small for wire='float16', and arrive as zero in every step"),
            ("float16", 1e6, torch.float32, "are too large for wire='float16', and arrive as Inf"),
            ("int8", 1e-50, torch.float64, "are too small for wire='int8', and arrive as zero in every step"),
            ("int8", 1e50, torch.float64, "are too large for wire='int8', and arrive as Inf"),
            ("bfloat16", 1e50, torch.float64, "are too large for wire='bfloat16', and arrive as Inf"),
            ("float16", 1e-6, torch.float32, None),
            ("int8", 1e-43, torch.float32, None),
            ("int8", 1e-30, torch.float64, None),
        ],
        most=1,
    ),
    ids=str,
)
def test_values_outside_of_a_formats_range_are_told_once(
    strategy: str, wire: str, value: float, dtype: torch.dtype, told: str | None
) -> None:
    given = torch.ones(4, 512, dtype=dtype)
    given[:2] = value
    with (
        warnings.catch_warnings(record=True) as caught,
        training(Values(4, 512).to(dtype), strategy, "plain SGD", wire=wire) as (
            ddp,
            opt,
        ),
    ):
        warnings.simplefilter("always")
        mean_of_exchanges(ddp, None, given, 2)
        opt.step()
        mean_of_exchanges(ddp, None, given, 5)
    texts = [str(each.message) for each in caught if "gradient values" in str(each.message)]
    assert len(texts) == (told is not None)
    assert all(f"gradient values {told}.\n  parameter 'values'\n" in text for text in texts)


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_an_inf_of_one_rank_arrives_as_such(strategy: str, bad: float) -> None:
    given = torch.ones(2, 512)
    if dist.get_rank() == 1:
        given[0, 5] = bad
    with training(Values(2, 512), strategy, "plain SGD", wire="int8") as (ddp, opt):
        for _ in range(2):  # whole, and in shards
            found = mean_of_exchanges(ddp, None, given, 1)
            assert float(found[0, 5]) == bad
            assert not bool(found[0].isfinite().any())
            assert torch.equal(found[1], torch.ones(512, dtype=torch.float64))
            opt.zero_grad()
            opt.step()
