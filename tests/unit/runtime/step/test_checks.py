"""A step that is skipped changes nothing; fingerprints of parameters."""

import copy
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from support.checkpoints import require_equal
from support.errors import text_of
from support.strategies import spec
from undertow.errors import NonFiniteGradient
from undertow.plan import plan_from_groups
from undertow.runtime.execute.round import Round, RoundKind, RoundResult
from undertow.runtime.gradients.trailer import Reading
from undertow.runtime.step import checks
from undertow.runtime.step.checks import NonFinite, fingerprints

PLAN = plan_from_groups([spec("weight", 6)], ((0,),), num_ranks=2)
# LBFGS needs a closure, with which a step cannot be skipped.
OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)


class Counting(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0, "total": torch.zeros(())})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.calls += 1
        (group,) = self.param_groups
        group["steps"] += 1
        group["total"] += 1
        for param in group["params"]:
            self.state[param]["steps"] = group["steps"]


def numbers(policy: str = "skip", *, is_found: bool) -> NonFinite:
    judge = NonFinite(policy, rank=1, look=lambda: None, names=range(2))
    judge.round_ends(a_round(is_found), PLAN)
    return judge


def a_round(is_found: bool, *, number: int = 4, ranks: tuple[int, ...] = (1,), keeps_earlier: bool = False) -> RoundResult:
    this = RoundResult(
        Round(kind=RoundKind.REDUCE, number=number, generation=0, not_arrived=lambda _: []), keeps_earlier=keeps_earlier
    )
    if is_found:
        this.nonfinite[0] = frozenset({0})
        this.readings.append(Reading(used=frozenset({0}), ranks_differ=False, nonfinite_ranks=ranks))
    return this


def stepped(optimizer: torch.optim.Optimizer, judge: NonFinite) -> None:
    """With the hook that every optimizer of our parameters has."""
    handle = optimizer.register_step_pre_hook(judge.before_step)
    optimizer.step()
    handle.remove()


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.randn(3))], lr=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_every_optimizer_of_torchs_is_left_as_it_was(name: str, num_steps: int) -> None:
    param, more = nn.Parameter(torch.randn(3, 2)), {"momentum": 0.9, "weight_decay": 0.1} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, name)([param], lr=0.1, **more)
    param.grad = torch.ones_like(param).to_sparse(1) if name == "SparseAdam" else torch.ones_like(param)
    for _ in range(num_steps):
        optimizer.step()
    before = copy.deepcopy({"param": param.detach(), "optimizer": optimizer.state_dict()})
    stepped(optimizer, numbers(is_found=True))
    require_equal({"param": param.detach(), "optimizer": optimizer.state_dict()}, before)
    stepped(optimizer, numbers(is_found=False))
    assert not torch.equal(param, before["param"])


def test_steps_that_an_optimizer_counts_elsewhere_are_not_counted() -> None:
    param = nn.Parameter(torch.randn(3))
    param.grad, optimizer = torch.ones(3), Counting([param])
    optimizer.step()
    stepped(optimizer, numbers(is_found=True))
    (group,) = optimizer.param_groups
    assert (optimizer.calls, group["steps"], float(group["total"]), optimizer.state[param]["steps"], group["params"]) == (
        1,
        1,
        1.0,
        1,
        [param],
    )


def test_a_scheduler_does_not_take_a_skipped_step_for_none() -> None:
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepped(optimizer, numbers(is_found=True))
    scheduler.step()  # would warn, and warnings are errors here
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)  # 0.1 * 0.1 in doubles


def test_a_step_with_found_inf_is_the_scalers() -> None:
    optimizer = sgd()
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as torch's GradScaler does
    assert not any(numbers(policy, is_found=True).skips(optimizer) for policy in ("raise", "skip", "warn"))


def test_what_was_found_counts_until_a_round_that_does_not_add_to_it() -> None:
    optimizer, judge = sgd(), numbers(is_found=True)
    assert [judge.skips(optimizer), judge.skips(optimizer)] == [True, True]
    skips = []
    for this in (a_round(False, keeps_earlier=True), a_round(False), a_round(True)):
        judge.round_ends(this, PLAN)
        skips.append((judge.skips(optimizer), judge.num_skipped))
    assert skips == [(True, 1), (False, 1), (True, 2)]  # the first round belongs to the step that was counted


def test_the_first_of_several_rounds_of_a_step_is_named() -> None:
    optimizer, judge = sgd(), numbers("raise", is_found=True)
    judge.round_ends(a_round(True, number=5, ranks=(0, 1)), PLAN)  # the mean of the one before, and what is new
    text = "the gradient of 'weight' is not finite (NaN or Inf) on rank 1.\n  synchronization 4, bucket 0\n"
    assert text_of(NonFiniteGradient, lambda: judge.skips(optimizer)).startswith(text)
    judge.round_ends(a_round(True, number=6), PLAN)
    assert "on rank 1.\n  synchronization 6," in text_of(NonFiniteGradient, lambda: judge.skips(optimizer))


def num_different(tensors: Sequence[Tensor]) -> int:
    return len(set(fingerprints(tensors, device=torch.device("cpu")).tolist()))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 8, 1000])
def test_every_single_bit_counts(dtype: torch.dtype, numel: int) -> None:
    tensors = [torch.zeros(numel, dtype=dtype)]
    num_bytes, num_bits = min(64, tensors[0].nbytes), 1 if dtype == torch.bool else 8
    for byte, bit in product(range(num_bytes), range(num_bits)):
        tensors.append(tensors[0].clone())
        tensors[-1].view(torch.uint8)[byte] ^= 1 << bit
    assert num_different(tensors) == len(tensors)


def test_minus_zero_and_every_nan_are_values_of_their_own() -> None:
    values = [
        torch.tensor([0.0]),
        torch.tensor([-0.0]),
        torch.tensor([math.nan]),
        torch.tensor([-math.nan]),
        torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
    ]
    assert num_different(values) == num_different([*values, *(value.clone() for value in values)]) == 5


@given(st.permutations(list(range(8))))
def test_the_same_elements_in_another_order_differ(order: list[int]) -> None:
    assert num_different([torch.arange(8.0), torch.arange(8.0)[order]]) == (1 if order == sorted(order) else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_signs_of_several_elements_do_not_make_up_for_each_other(dtype: torch.dtype) -> None:
    tensors = [torch.ones(1000, dtype=dtype)]
    for first in range(0, 100, 7):
        for second in range(first + 1, 1000, 31):
            tensors.append(tensors[0].clone())
            tensors[-1][[first, second]] *= -1
    assert num_different(tensors) == len(tensors)


def test_chunks_in_another_order_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_HOST_WORDS", 8)  # at least as many as a rest has bytes
    tensor = torch.randn(83, generator=torch.Generator().manual_seed(1))
    tensors = [tensor, torch.cat([tensor[16:32], tensor[:16], tensor[32:]]), tensor[:-1], tensor * 2]
    for index in range(83):
        tensors.append(tensor.clone())
        tensors[-1][index] += 1
    assert num_different(tensors) == len(tensors)


CUBE = torch.randn(2, 3, 4, 5)


@pytest.mark.parametrize(
    "tensors",
    [
        [CUBE, CUBE.to(memory_format=torch.channels_last), torch.cat([torch.zeros(1), CUBE.flatten()])[1:].view(2, 3, 4, 5)],
        [torch.zeros(0, 3), torch.zeros(0)],
        [torch.tensor(1.5), torch.tensor([1.5])],
    ],
    ids=["another layout in memory", "no elements", "no dimensions"],
)
def test_tensors_that_are_the_same(tensors: list[Tensor]) -> None:
    assert num_different(tensors) == 1
