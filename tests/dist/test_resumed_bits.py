"""A run that continues from a checkpoint has the bits of the run without the break: its first step is rounded like all others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.models import CASES, Case
from support.ranks import in_ranks
from support.sharded import MLP, NARROW, of_ranks, step_of, training

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


@in_ranks(2)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_so_does_a_run_whose_gradients_travel_in_sixteen_bits(reduction: str) -> None:
    require_resumed(MLP, wire="bfloat16", reduction=reduction)


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("param_wire", ["int8", "bfloat16"])
def test_so_does_a_run_whose_parameters_travel_in_a_format(param_wire: str) -> None:
    require_resumed(CASES["wide"], wire="int8", param_wire=param_wire)


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("strategy", "each"),
    [("ddp", "steps"), ("ddp", "accumulates"), ("zero1", "accumulates"), ("zero2", "steps")],
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


@in_ranks(2)
def test_the_step_after_a_change_of_parameters_is_rounded_like_the_others() -> None:
    case = NARROW[torch.bfloat16]

    def freezes(model: Any, optimizer: Any, case: Case, number: int) -> None:
        if number >= 2:
            optimizer.zero_grad()
            model.module[0].bias.requires_grad_(False)
        step_of(model, optimizer, case, number)

    require_resumed(case, freezes)
