"""A run that continues from a checkpoint has the bits of the run without the break: its first step is rounded like all others."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torchs
from torch import Tensor, nn

from support.levels import some
from support.models import CASES, Case
from support.ranks import in_ranks
from support.sharded import MLP, NARROW, of_ranks, step_of, training
from undertow import load_checkpoint, save_checkpoint

NUM_STEPS = 4
Masters = list[Tensor]
Each = Callable[[Any, Any, Case, int], None]


def masters(model: Any, optimizer: Any) -> Masters:
    """The values that the optimizer updates: of 16-bit parameters, fp32 copies."""
    states = optimizer.state_dict()["state"]
    params = map(torch.clone, model.module.parameters())
    return [states.get(number, {}).get("master", param) for number, param in enumerate(params)]


def run(case: Case, each: Each, *, breaks: tuple[int, ...] = (), **settings: Any) -> list[Masters]:
    """Returns the masters after every step; before those in `breaks`, a new model and optimizer load what the old ones save."""
    found, saved = list[Masters](), None
    for first, stop in zip((0, *breaks), (*breaks, NUM_STEPS), strict=True):
        with training(case.model(), optimizer="SGD", **settings) as (model, optimizer):
            if saved is not None:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            for number in range(first, stop):
                each(model, optimizer, case, number)
                found.append(masters(model, optimizer))
            saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    return found


# Runs that are drawn: steps, writes into parameters, averages that are swapped in, and NaN that is rolled back. A run that saves
# and loads after each event, in any way, has the bits of the run that does not.

FORMATS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "int8": (torch.float32, {"param_wire": "int8"}),
    "bfloat16": (torch.float32, {"param_wire": "bfloat16"}),
    "16 bits": (torch.bfloat16, {}),
    "16 bits in int8": (torch.bfloat16, {"param_wire": "int8"}),
    "full width": (torch.float32, {}),
    "gradients in int8": (torch.float32, {"wire": "int8"}),
    "gradients in bfloat16": (torch.float32, {"wire": "bfloat16"}),
    "all in int8": (torch.float32, {"wire": "int8", "param_wire": "int8"}),
}
WAYS = ("files", "model first", "optimizer first", "torch's functions", "a new run")


class Wide(nn.Module):
    """Of some blocks of a format, which no parameter fills."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(24, 33), nn.Tanh(), nn.Linear(33, 24)).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Resumed:
    """A run that is saved and loaded if it is told to; otherwise it goes on."""

    def __init__(self, format: str, optimizer: str, path: Path | None) -> None:
        self.dtype, settings = FORMATS[format]
        self.settings = {"reduction": "ordered", "nonfinite": "ignore", **settings}
        self.name, self.path, self.num_steps, self.num_saved = optimizer, path, 0, 0
        self.begin()

    def begin(self) -> None:
        self.context = training(Wide(self.dtype), optimizer=self.name, **self.settings)
        self.model, self.optimizer = self.context.__enter__()

    def end(self) -> None:
        self.context.__exit__(None, None, None)

    def step(self, factor: float = 1.0) -> None:
        self.num_steps += factor == 1.0
        self.backward(factor)
        self.optimizer.step()

    def backward(self, factor: float = 1.0) -> None:
        data = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * self.num_steps + dist.get_rank()))
        self.optimizer.zero_grad()
        (self.model(data.to(self.dtype)).float().square().mean() * factor).backward()

    @torch.no_grad()
    def clip(self) -> None:
        for param in self.model.parameters():
            param.clamp_(-0.1, 0.1)

    @torch.no_grad()
    def swap(self) -> None:
        for param in self.model.parameters():
            param.data = param * 0.75

    def resume(self, way: str, *, is_rolled_back: bool = False) -> None:
        if self.path is None:
            if is_rolled_back and way != "a new run" and self.settings.get("wire") == "int8":
                self.backward()  # offsets turn on with a second synchronization of the same parameters
            return
        of_model, of_optimizer = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))
        by_torch = copy.deepcopy(torchs.get_state_dict(self.model, self.optimizer)) if way == "torch's functions" else None
        folder = self.path / str(self.num_saved)
        self.num_saved += 1
        if way == "files":
            save_checkpoint(folder, self.model, self.optimizer)
        if is_rolled_back:
            self.step(float("nan"))
        if way == "a new run":
            self.end()
            self.begin()
        if way == "files":
            load_checkpoint(folder, self.model, self.optimizer)
            return
        if by_torch is not None:
            torchs.set_state_dict(self.model, self.optimizer, model_state_dict=by_torch[0], optim_state_dict=by_torch[1])
            return
        if way == "optimizer first":
            self.optimizer.load_state_dict(of_optimizer)
        self.model.load_state_dict(of_model)
        if way != "optimizer first":
            self.optimizer.load_state_dict(of_optimizer)


def drawn_run(seed: int, format: str, optimizer: str, path: Path | None) -> list[Tensor]:
    chance = random.Random(seed)
    run = Resumed(format, optimizer, path)
    run.step()
    for _ in range(6):
        event, way, is_rolled_back = chance.choice(["step", "step", "clip", "swap"]), chance.choice(WAYS), chance.random() < 0.5
        getattr(run, event)()
        run.resume(way, is_rolled_back=is_rolled_back)
    for _ in range(2):
        run.step()
    run.model.wait()
    found = [param.detach().clone() for param in run.model.parameters()]
    run.end()
    return found


@in_ranks(2)
@pytest.mark.parametrize("format", some(FORMATS, most=2))
@pytest.mark.parametrize("optimizer", some(["SGD", "AdamW", "plain SGD"], most=1))
@pytest.mark.parametrize("seed", some(range(4), most=1))
def test_a_drawn_run_that_is_saved_and_loaded_has_the_bits_of_one_without_a_break(
    seed: int, format: str, optimizer: str, tmp_path: Path
) -> None:
    expected = drawn_run(seed, format, optimizer, None)
    assert all(param.isfinite().all() for param in expected)
    assert all(map(torch.equal, drawn_run(seed, format, optimizer, tmp_path), expected))


@in_ranks(2)
@pytest.mark.parametrize("format", ["int8", "16 bits"])
def test_other_weights_than_those_that_were_saved_stay(format: str) -> None:
    """Exact values belong to weights: an average that is loaded beside an optimizer, or a plain run's, has none here."""
    dtype, settings = FORMATS[format]
    with training(Wide(dtype), optimizer="AdamW", **settings) as (model, optimizer):
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 24), 1.0 + number, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
        of_optimizer = copy.deepcopy(optimizer.state_dict())
        average = {name: value * 0.5 for name, value in model.state_dict().items()}
        for first in ("model", "optimizer"):
            loads = [lambda: model.load_state_dict(average), lambda: optimizer.load_state_dict(of_optimizer)]
            for load in loads if first == "model" else reversed(loads):
                load()
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.zero_grad()
            model(torch.ones(2, 24, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            model.wait()
            assert all(torch.equal(value, average[name]) for name, value in model.state_dict().items()), first


def require_resumed(case: Case, each: Each = step_of, **settings: Any) -> list[Masters]:
    expected = run(case, each, **settings)
    for breaks in ((1,), (2, 3)):
        for number, (one, other) in enumerate(zip(run(case, each, breaks=breaks, **settings), expected, strict=True)):
            assert all(map(torch.equal, one, other)), f"step {number}, resumed before {breaks}"
    return expected


def accumulates(model: Any, optimizer: Any, case: Case, number: int) -> None:
    optimizer.zero_grad()
    with model.no_sync():
        case.loss(model, 100 + number).backward()
    case.loss(model, number).backward()
    optimizer.step()


def clips(model: Any, optimizer: Any, case: Case, number: int) -> None:
    optimizer.zero_grad()
    case.loss(model, number).backward()
    optimizer.clip_grad_norm_(0.05)
    optimizer.step()


def scales(model: Any, optimizer: Any, case: Case, number: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.zero_grad()
    scaler.scale(case.loss(model, number)).backward()
    scaler.step(optimizer)


EACH = {"steps": step_of, "accumulates": accumulates, "clips": clips, "scales": scales}


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize(
    ("each", "dtype"),
    [*((each, torch.bfloat16) for each in EACH), ("steps", torch.float16)],
    ids=str,
)
def test_a_run_of_sixteen_bits_continues_with_its_bits(dtype: torch.dtype, each: str) -> None:
    require_resumed(NARROW[dtype], EACH[each])


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize(
    "settings",
    [{"reduction": "ordered", "bucket_cap_mb": 1e-4}, {"strategy": "zero2"}],
    ids=str,
)
def test_so_it_does_with_other_settings(settings: dict[str, Any]) -> None:
    require_resumed(NARROW[torch.bfloat16], **settings)


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("reduction", some(["native", "ordered"], most=1))
def test_so_does_a_run_whose_gradients_travel_in_sixteen_bits(reduction: str) -> None:
    require_resumed(MLP, wire="bfloat16", reduction=reduction)


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("param_wire", ["int8", "bfloat16"])
def test_so_does_a_run_whose_parameters_travel_in_a_format(param_wire: str) -> None:
    require_resumed(CASES["wide"], wire="int8", param_wire=param_wire)


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("strategy", "each"),
    some([("ddp", "steps"), ("ddp", "accumulates"), ("zero1", "accumulates"), ("zero2", "steps")], most=1),
)
def test_so_does_a_run_whose_gradients_are_rounded_with_offsets(strategy: str, each: str) -> None:
    require_resumed(CASES["wide"], EACH[each], wire="int8", strategy=strategy)


@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_so_does_a_run_on_a_mesh(reduction: str) -> None:
    require_resumed(NARROW[torch.bfloat16], strategy="hybrid", reduction=reduction)


@pytest.mark.deep
@in_ranks(3)
def test_every_step_has_the_bits_of_sums_in_fp32() -> None:
    """Against plain SGD over fp32 copies, whose gradients are added up in fp32 in the order of the ranks."""
    case = NARROW[torch.bfloat16]
    bare = case.model()
    params = list(bare.parameters())
    wide = [param.detach().float() for param in params]
    optimizer = torch.optim.SGD(wide, lr=0.05, momentum=0.9, weight_decay=0.01)
    for number, found in enumerate(require_resumed(case, reduction="ordered")):
        bare.zero_grad()
        case.loss(bare, number).backward()
        for target, param in zip(wide, params, strict=True):
            first, *rest = of_ranks(param) or []
            target.grad = sum((part.float() for part in rest), start=first.float()) / dist.get_world_size()
        optimizer.step()
        for target, param in zip(wide, params, strict=True):
            param.data.copy_(target)
        assert all(map(torch.equal, found, wide)), f"step {number}"


@pytest.mark.deep
@in_ranks(2)
def test_the_step_after_a_change_of_parameters_is_rounded_like_the_others() -> None:
    case = NARROW[torch.bfloat16]

    def freezes(model: Any, optimizer: Any, case: Case, number: int) -> None:
        if number >= 2:
            optimizer.zero_grad()
            model.module[0].bias.requires_grad_(False)
        step_of(model, optimizer, case, number)

    require_resumed(case, freezes)
