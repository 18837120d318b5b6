"""On a mesh of 2 x 2 ranks: the bits of gradients that are added up row by row, in both forms, whatever the buckets."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.hybrid import mean_row_by_row, trained_naively, trained_on_mesh
from support.models import CASES, Branches, Case, noise
from support.ranks import in_ranks
from support.scripted import all_in_one, in_pieces, one_each, scripted
from support.sharded import OPTIMIZERS, require_equal, trained
from undertow import DistributedDataParallel

SMALL: dict[str, Any] = {"bucket_cap_mb": 1e-4}  # most parameters are in pieces
ORDERED: dict[str, Any] = {"reduction": "ordered"}


@in_ranks(4)
@pytest.mark.parametrize("case", ["mlp", "tied transformer"])
def test_steps_have_the_bits_of_sums_row_by_row_in_both_forms_under_every_plan(case: str) -> None:
    expected = trained_naively(CASES[case])
    for eager in (False, True):
        for plan in (SMALL, {"bucket_cap_mb": 3e-4}, {}) if eager else (SMALL, {}, {"overlap": False}):
            got = trained_on_mesh(CASES[case], eager=eager, **ORDERED, **plan)
            require_equal(expected, got, what=f"eager={eager} {plan}")


@in_ranks(4)
@pytest.mark.parametrize("optimizer", ["Nesterov", "Adam", "Adagrad", "NAdam"])
def test_so_with_other_optimizers(optimizer: str) -> None:
    expected = trained_naively(CASES["mlp"], optimizer)
    for eager in (False, True):
        require_equal(expected, trained_on_mesh(CASES["mlp"], optimizer, eager=eager, **ORDERED, **SMALL), what=str(eager))


class Whole(nn.Module):
    """Gradients are sums of whole numbers, which are exact in any order, and do not depend on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x * (at + 1)) for at, layer in enumerate(self.layers)]).sum()


WHOLE = Case(Whole, lambda model, step: model(noise(5, 5, step=step).mul(4).round()))


@in_ranks(4)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_where_sums_are_exact_a_step_has_the_bits_of_plain_training(reduction: str) -> None:
    settings: dict[str, Any] = {"num_steps": 8, "reduction": reduction}
    expected = trained(WHOLE, "ddp", "SGD", **settings)
    for eager in (False, True):
        require_equal(expected, trained_on_mesh(WHOLE, "SGD", eager=eager, **settings, **SMALL), what=str(eager))


@in_ranks(4)
@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_a_mesh_with_one_rank_along_an_axis_adds_up_in_rank_order(shape: tuple[int, int]) -> None:
    expected = trained(CASES["mlp"], "ddp", num_steps=8, **ORDERED)
    for eager in (False, True):
        got = trained_on_mesh(CASES["mlp"], num_steps=8, eager=eager, shape=shape, **ORDERED, **SMALL)
        require_equal(expected, got, what=str(eager))


@in_ranks(4)
def test_the_collectives_of_a_backend_do_the_same() -> None:
    """By the backend's own collectives, as where sends and receives are not posted: what NCCL would be asked for."""
    with mock.patch("undertow.runtime.group._BACKENDS_OVER_GLOO", ()):
        got = trained_on_mesh(CASES["mlp"], **ORDERED, **SMALL)
        exact = trained_on_mesh(WHOLE, "SGD", **SMALL)
    require_equal(trained_naively(CASES["mlp"]), got)
    require_equal(trained(WHOLE, "ddp", "SGD", num_steps=12), exact)


@in_ranks(4)
@pytest.mark.parametrize("reduction", ["native", "ordered"])
def test_parameters_of_sixteen_bits_have_the_same_bits_in_both_forms(reduction: str) -> None:
    case = CASES["mlp"]
    narrow = Case(lambda: case.make().bfloat16(), lambda model, step: model(noise(5, 6, step=step).bfloat16()).float().sum())
    settings: dict[str, Any] = {"num_steps": 8, "reduction": reduction}
    expected = trained_on_mesh(narrow, **settings, **SMALL)
    # Where no order is asked for the backend reduces the first step's gradients, which it rounds as the plan has it.
    for plan in (SMALL, {"bucket_cap_mb": 3e-4}) if reduction == "ordered" else (SMALL,):
        require_equal(expected, trained_on_mesh(narrow, eager=True, **settings, **plan), what=str(plan))


@in_ranks(4)
@pytest.mark.parametrize("to_none", [True, False])
def test_micro_batches_add_up_before_they_are_sent(to_none: bool) -> None:
    case = CASES["mlp"]

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad(set_to_none=to_none)
        with ddp.no_sync():
            for micro in range(2):
                case.loss(ddp, 10 * step + micro).backward()
        case.loss(ddp, 10 * step + 2).backward()
        opt.step()

    def backward(model: nn.Module, step: int) -> None:
        for micro in range(3):
            case.loss(model, 10 * step + micro).backward()

    expected = trained_naively(case, "SGD", num_steps=6, backward=backward)
    for eager in (False, True):
        got = trained_on_mesh(case, "SGD", num_steps=6, each=each, eager=eager, **ORDERED, **SMALL)
        require_equal(expected, got, what=str(eager))


@in_ranks(4)
def test_what_one_rank_has_used_moves_on_all_and_what_nobody_has_used_on_none() -> None:
    """Layer 2 is used in no odd step, layer 1 by one rank alone, and momentum must not move what nobody has used."""
    case = Case(Branches, lambda model, step: model(noise(3, 4, step=step)).sum())

    def backward(model: nn.Module, step: int) -> None:
        order = (0, 1, 2) if step % 2 == 0 else (0, 1) if dist.get_rank() == step // 2 else (0,)
        model(noise(3, 4, step=step), order).square().sum().backward()

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad()
        backward(ddp, step)
        opt.step()

    expected = trained_naively(case, "SGD", num_steps=8, backward=backward)
    for eager in (False, True):
        for cap in (2e-5, None):
            got = trained_on_mesh(case, "SGD", num_steps=8, each=each, eager=eager, bucket_cap_mb=cap, **ORDERED)
            require_equal(expected, got, what=f"eager={eager} {cap}")


@in_ranks(4)
def test_other_plans_on_the_way_change_no_bit() -> None:
    """Another plan every few steps, and once parameters that are frozen for a while."""
    expected = trained_naively(CASES["tied transformer"], "Adam", num_steps=24)
    for eager in (False, True):
        with scripted(all_in_one, one_each, in_pieces) as seen:
            got = trained_on_mesh(CASES["tied transformer"], "Adam", num_steps=24, eager=eager, **ORDERED)
        if dist.get_rank() == 0:
            assert len({plan.fingerprint for plan in seen}) > 1
        require_equal(expected, got, what=str(eager))


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward; the last one shares the first one's weight, both in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.blocks[2][2].weight = self.blocks[0][0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@in_ranks(4)
def test_parts_that_come_late_are_averaged_over_all_rows() -> None:
    """The first step learns how often gradients come; it reduces the late parts by themselves, which rounds otherwise."""
    case = Case(Checkpointed, lambda model, step: model(noise(5, 6, step=step)).square().mean())
    settings: dict[str, Any] = {"num_steps": 6, **ORDERED, **SMALL}
    barrier, eager = (trained_on_mesh(case, "SGD", eager=eager, **settings) for eager in (False, True))
    require_equal(barrier, eager)
    for name, expected in trained_naively(case, "SGD", num_steps=6).items():
        # One more rounding of gradients of the size of 1 in the first of six steps of 0.05, which momentum repeats ten times.
        assert torch.allclose(barrier[name], expected, rtol=0.0, atol=10 * 0.05 * torch.finfo(torch.float32).eps * 8), name


@in_ranks(4)
def test_several_synchronised_backwards_add_up() -> None:
    """Every backward of a step is reduced, and added to what is there; the first step's is whole, of which the mean is taken."""
    case = CASES["mlp"]

    def each(ddp: DistributedDataParallel, opt: torch.optim.Optimizer, step: int) -> None:
        opt.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(2 if step else 1):
            case.loss(ddp, 10 * step + micro).backward()
        opt.step()

    reference = case.model()
    cls, settings = OPTIMIZERS["SGD"]
    opt = cls(reference.parameters(), **settings)
    for step in range(5):
        total: dict[str, Tensor] = {}
        for micro in range(2 if step else 1):
            opt.zero_grad()
            case.loss(reference, 10 * step + micro).backward()
            mean_row_by_row(reference)
            for name, param in reference.named_parameters():
                total[name] = total[name] + param.grad if micro else param.grad
        for name, param in reference.named_parameters():
            param.grad = total[name]
        opt.step()
    expected = {f"module.{name}": param for name, param in reference.named_parameters()}
    require_equal(expected, trained_on_mesh(case, "SGD", num_steps=5, each=each, **ORDERED, **SMALL))
