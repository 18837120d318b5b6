"""The engine over a fake group, in one process: whatever the order of events, `.grad` is the mean over ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.one_process import Rank, Trained, ranks_of
from undertow.buckets.trailer import Reading
from undertow.errors import PeerFailed, PhaseError, PlanMismatch, UndertowError

WIDTH = 4
CAPS = [0.00002, 0.00008, 25.0]  # MiB: a parameter in each bucket, a layer, or all of them


class Branches(nn.Module):
    """Layers that a forward uses in any order, as often as it likes, and that a checkpoint may recompute."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.layers = nn.ModuleList(layer(generator) for _ in range(num_layers))

    def forward(self, x: Tensor, uses: Sequence[int], nests: bool = False) -> Tensor:
        for index in uses:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=True) if nests else layer(x)
        return x.sum()


def layer(generator: torch.Generator) -> nn.Linear:
    """With small whole numbers, so that every sum of gradients is exact in any order."""
    made = nn.Linear(WIDTH, WIDTH)
    for param in made.parameters():
        param.data = torch.randint(-1, 2, param.shape, generator=generator).float()
    return made


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-2, 3, (4, WIDTH), generator=generator).float().requires_grad_()


def own_gradients(module: nn.Module, rank: int, step: int, *arguments: Any) -> list[Tensor | None]:
    params = [param for param in module.parameters() if param.requires_grad]
    loss = module(batch(rank, step), *arguments)
    return list(torch.autograd.grad(loss, params, allow_unused=True)) if loss.requires_grad else [None] * len(params)


def mean(of_ranks: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """The naive reference: divided, then added in rank order; None where no rank has a gradient."""
    means: list[Tensor | None] = []
    for of_param in zip(*of_ranks, strict=True):
        there = [grad for grad in of_param if grad is not None]
        parts = [torch.zeros_like(there[0]) if grad is None else grad / len(of_param) for grad in of_param] if there else []
        means.append(torch.stack(parts).sum(dim=0) if parts else None)
    return means


def require_equal(grads: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [grad is None for grad in grads] == [grad is None for grad in expected]
    for grad, value in zip(grads, expected, strict=True):
        if grad is not None and value is not None:
            assert torch.equal(grad, value)


def grads_of(module: nn.Module) -> list[Tensor | None]:
    return [param.grad for param in module.parameters() if param.requires_grad]


uses = st.lists(st.integers(0, 4), max_size=6)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    """Steps of some ranks: the layers that each of them uses, and what stays frozen."""
    num_ranks, num_steps = draw(st.sampled_from([2, 4])), draw(st.integers(1, 4))
    return {
        "num_ranks": num_ranks,
        "uses": [[draw(uses) for _ in range(num_ranks)] for _ in range(num_steps)],
        "frozen": [draw(st.sets(st.integers(0, 4), max_size=2)) for _ in range(num_steps)],
        "nests": [draw(st.booleans()) for _ in range(num_steps)],
        "cap": draw(st.sampled_from(CAPS)),
    }


@given(programs())
def test_gradients_are_the_mean_whatever_is_used_frozen_and_nested(program: dict[str, Any]) -> None:
    def freeze(module: Branches, step: int) -> None:
        for index, layer in enumerate(module.layers):
            layer.requires_grad_(index not in program["frozen"][step])

    def train(rank: Rank) -> None:
        module, reference = Branches(5), Branches(5)
        model = rank.engine(module, bucket_cap_mb=program["cap"])
        for step, of_ranks in enumerate(program["uses"]):
            freeze(module, step)
            freeze(reference, step)
            arguments = of_ranks[rank.number], program["nests"][step]
            loss = model(batch(rank.number, step), *arguments)
            if loss.requires_grad and arguments[0]:
                loss.backward()
            model.before_step()
            expected = mean([own_gradients(reference, other, step, used, False) for other, used in enumerate(of_ranks)])
            require_equal(grads_of(module), expected)
            module.zero_grad()
        model.close()

    ranks_of(program["num_ranks"], train)


@pytest.mark.parametrize("cap", CAPS)
def test_micro_batches_are_added_and_sent_once(cap: float) -> None:
    def train(rank: Rank) -> None:
        module = Branches(3)
        model = rank.engine(module, bucket_cap_mb=cap)
        for step in range(3):
            model.engine.is_accumulating = True
            model(batch(rank.number, 2 * step), [0, 1]).backward()
            model.engine.is_accumulating = False
            model(batch(rank.number, 2 * step + 1), [1, 2]).backward()
            model.before_step()
            sums = []
            for other in range(2):
                own = Branches(3)
                for part, used in enumerate(([0, 1], [1, 2])):
                    own(batch(other, 2 * step + part), used).backward()
                sums.append([param.grad for param in own.parameters()])
            require_equal(grads_of(module), mean(sums))
            module.zero_grad()
        model.close()

    ranks_of(2, train)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_backward_that_fails_on_one_rank_fails_on_all_and_the_next_is_sound(cap: float, place: int) -> None:
    def train(rank: Rank) -> str:
        module = Branches(3)
        model = rank.engine(module, bucket_cap_mb=cap)
        raises = module.layers[place].weight.register_hook(_raise) if rank.number == 1 else None
        with pytest.raises(PeerFailed if rank.number == 0 else ZeroDivisionError) as caught:
            model(batch(rank.number, 0), [0, 1, 2]).backward()
        if raises is not None:
            raises.remove()
        with pytest.raises(PhaseError):
            model.before_step()
        module.zero_grad()
        model(batch(rank.number, 1), [0, 1, 2]).backward()
        model.before_step()
        expected = mean([own_gradients(Branches(3), other, 1, [0, 1, 2]) for other in range(2)])
        require_equal(grads_of(module), expected)
        model.close()
        return str(caught.value)

    assert "backward failed on rank 1" in ranks_of(2, train)[0]


def _raise(_grad: Tensor) -> None:
    raise ZeroDivisionError


def changed(change: Callable[[Branches, int], None], *, num_ranks: int = 2) -> list[str]:
    """Trains a step, changes the module, and trains another one; returns each rank's error."""

    def train(rank: Rank) -> str:
        module = Branches(3)
        model = rank.engine(module)
        _step(model, rank, 0)
        change(module, rank.number)
        try:
            _step(model, rank, 1)
        except UndertowError as error:
            return f"{type(error).__name__}: {error}"
        reference = Branches(3)
        change(reference, rank.number)
        used = range(len(module.layers))
        require_equal(grads_of(module), mean([own_gradients(reference, other, 1, used) for other in range(num_ranks)]))
        return ""

    return ranks_of(num_ranks, train)


def _step(model: Trained, rank: Rank, step: int) -> None:
    model.module.zero_grad()
    model(batch(rank.number, step), range(len(model.module.layers))).backward()  # type: ignore[arg-type]
    model.before_step()


def test_a_layer_that_all_ranks_add_is_averaged() -> None:
    def add(module: Branches, _rank: int) -> None:
        module.layers.append(layer(torch.Generator().manual_seed(3)))

    assert changed(add) == ["", ""]


def test_a_layer_that_one_rank_adds_is_a_mismatch_on_all() -> None:
    def add(module: Branches, rank: int) -> None:
        if rank == 1:
            module.layers.append(nn.Linear(WIDTH, WIDTH))

    errors = changed(add)
    assert all(error.startswith(PlanMismatch.__name__) for error in errors)
    assert all("changed on rank 1 and not on rank 0" in error or "ranks disagree" in error for error in errors)


def test_a_bucket_leaves_when_its_last_gradient_arrives_and_the_last_one_after_backward() -> None:
    happened: list[str] = []

    def train(rank: Rank) -> None:
        module = Branches(3)
        model = rank.engine(module, bucket_cap_mb=0.00008)
        start = rank.group._start

        def noted(name: str, *args: Any) -> Any:
            happened.extend(["sent"] if name.startswith("all-reduce") else [])
            return start(name, *args)

        if rank.number == 0:
            rank.group._start = noted  # type: ignore[method-assign]
            for param in module.parameters():
                param.register_post_accumulate_grad_hook(lambda _: happened.append("arrives"))  # type: ignore[no-untyped-call]
        for step in range(3):
            if rank.number == 0:
                happened.clear()
            _step(model, rank, step)
        model.close()

    ranks_of(2, train)
    assert happened == ["arrives", "arrives", "sent"] * 3


def test_ranks_that_use_layers_in_other_orders_send_in_one_order() -> None:
    """The fake group fails if the ranks' collectives differ in size or order."""

    def train(rank: Rank) -> None:
        module = Branches(3)
        module.layers[1] = nn.Linear(WIDTH, WIDTH, bias=False)
        module.layers[1].weight.data.fill_(1.0)
        model = rank.engine(module, bucket_cap_mb=0.00008)
        for step in range(4):
            module.zero_grad()
            model(batch(rank.number, step), [2, 1, 0] if rank.number else [0, 1, 2]).backward()
            model.before_step()
        model.close()

    ranks_of(2, train)


class Overdue:
    """A trailer of an earlier step that has reached the host late, as one on a device does."""

    def is_there(self) -> bool:
        return True

    def read(self) -> Reading:
        return Reading(used=frozenset(), ranks_differ=False, flags={"failed": (1,)}, is_overdue=True)


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_trailer_that_comes_late_is_read_by_the_next_synchronization(accumulates: bool) -> None:
    """A backward that only accumulates draws no conclusions, so it must not take the trailer."""

    def train(rank: Rank) -> None:
        model = rank.engine(Branches(2))
        _step(model, rank, 0)
        model.engine.current_plan.compiled.snapshots.append(Overdue())  # type: ignore[arg-type]
        if accumulates:
            model.engine.is_accumulating = True
            model(batch(rank.number, 1), [0, 1]).backward()
            model.engine.is_accumulating = False
        with pytest.raises(PeerFailed, match="backward failed on rank 1"):
            model(batch(rank.number, 2), [0, 1]).backward()
        model.close()

    ranks_of(2, train)
