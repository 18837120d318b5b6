"""A wrapped model that is copied, saved and loaded, moved to another process group, or fed unevenly."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from support.drop_in import LEARNING_RATE, TIMEOUT_S, SideBySide, groups_of, squares, with_both_plans
from support.errors import text_of
from support.models import mlp, noise
from support.naive import naive_mean, require_same_gradients
from support.ranks import Ranks, in_ranks
from undertow import ConfigError, DistributedDataParallel, attach


def deep_copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


Way = Callable[[nn.Module], nn.Module]
with_every_way = pytest.mark.parametrize("way", [deep_copied, pickled, saved])


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(("num_steps_before", "bucket_cap_mb"), [(0, None), (1, 1e-6), (2, None)])
@with_every_way
def test_a_copy_of_the_wrapper_trains_on(way: Way, num_steps_before: int, bucket_cap_mb: float | None) -> None:
    """The copy and its origin go on in turns, on data of their own."""
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for step in range(num_steps_before):
            side.step(squares(5, 6, step=step))
        twin = way(side.ddp)
        assert type(twin) is DistributedDataParallel
        with SideBySide.of(twin, copy.deepcopy(side.bare)) as other:
            other.compare_parameters()
            for step in range(3):
                other.step(squares(5, 6, step=10 + step))
                side.step(squares(5, 6, step=step))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_every_way
def test_copying_in_the_middle_of_a_step_does_not_disturb_it(way: Way) -> None:
    """In the middle of an accumulation: the origin's gradients are none of the copy's business."""
    with SideBySide(mlp()) as side:
        with side.accumulating():
            side.backward(squares(5, 6, step=0))
        twin = way(side.ddp)
        side.backward(squares(5, 6, step=1))
        side.compare()
        side.optimize()
        twin.close()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_every_way
def test_one_rank_may_copy_the_wrapper_alone(way: Way) -> None:
    """As for a checkpoint, or for a moving average of the weights: nobody else takes part."""
    with SideBySide(mlp()) as side:
        for step in range(3):
            if dist.get_rank() == 0:
                twin = way(side.ddp)
                with torch.no_grad():
                    assert torch.equal(twin.module(noise(5, 6)), side.module(noise(5, 6)))
                    assert torch.equal(twin.eval()(noise(5, 6)), side.module(noise(5, 6)))
                twin.close()
            side.step(squares(5, 6, step=step))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
@with_every_way
def test_a_copy_of_an_attached_model_is_bare_and_can_be_attached(way: Way, bucket_cap_mb: float | None) -> None:
    """The copy is bare, and trains alone on rank 0; attached in its turn, it trains beside its origin."""
    with SideBySide(mlp(), bucket_cap_mb, is_attached=True) as side:
        side.step(squares(5, 6, step=0))
        twin, bare = way(side.module), copy.deepcopy(side.bare)
        if dist.get_rank() == 0:
            alone = copy.deepcopy(bare)
            for model in (twin, alone):
                model.zero_grad()
                squares(5, 6, step=1)(model).backward()
            require_same_gradients(twin, alone)
        with contextlib.closing(attach(twin)):
            for step in range(2, 5):
                for model in (twin, bare):
                    model.zero_grad()
                    squares(5, 6, step=step)(model).backward()
                naive_mean(bare)
                require_same_gradients(twin, bare)
                side.step(squares(5, 6, step=step))


@in_ranks(2)
def test_a_state_dict_can_be_saved_and_loaded() -> None:
    with SideBySide(mlp()) as side:
        side.ddp(noise(5, 6)).sum().backward()
        file = io.BytesIO()
        torch.save(side.ddp.state_dict(), file)
        file.seek(0)
        with torch.no_grad():
            for param in side.ddp.parameters():
                param.zero_()
        side.ddp.load_state_dict(torch.load(file))
        side.compare_parameters()
        side.ddp(noise(5, 6)).sum().backward()


def copy_without_the_hook(way: Way) -> list[str]:
    """The copy averages in the usual way, and may get a hook of its own; the origin keeps its own."""
    with SideBySide(mlp()) as side:
        side.ddp.register_comm_hook(None, doubled)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            twin = way(side.ddp)
        for model in (side.ddp, twin, side.bare):
            squares(5, 6)(model).backward()
        naive_mean(side.bare)
        require_same_gradients(twin, side.bare)
        for param in side.bare.parameters():
            param.grad *= 2 * dist.get_world_size()
        require_same_gradients(side.ddp, side.bare)
        twin.register_comm_hook(None, allreduce_hook)
        twin.close()
    return [str(each.message) for each in caught]


def doubled(_state, bucket):
    """Twice the sum."""
    return dist.all_reduce(bucket.buffer().mul_(2), async_op=True).get_future()


@with_every_way
def test_a_communication_hook_is_not_copied(two_ranks: Ranks, way: Way) -> None:
    text = "the communication hook is not copied; register it on the copy again."
    assert two_ranks.run(copy_without_the_hook, way) == [[text]] * 2


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + x


def copied_without_what_was_ignored(way: Way) -> tuple[set[str], set[str]]:
    ddp = DistributedDataParallel(Headed(), ignore=["head", "body.bias"])
    before = ddp.parameters_to_ignore
    del ddp.module.head
    twin = way(ddp)
    for model in (ddp, twin):
        squares(5, 6)(model).backward()
        model.close()
    return before, twin.parameters_to_ignore


@with_every_way
def test_a_copy_forgets_ignored_names_that_are_gone(two_ranks: Ranks, way: Way) -> None:
    for before, after in two_ranks.run(copied_without_what_was_ignored, way):
        assert before == {"body.bias", "head.weight", "head.bias"}
        assert after == {"body.bias"}


def copy_in_the_wrong_place() -> dict[str, str]:
    (group,) = groups_of([0], [1])
    ddp = DistributedDataParallel(mlp(), process_group=group)
    written: list[object] = [None, None]
    dist.all_gather_object(written, pickle.dumps(ddp))
    ddp.close()
    texts = {"another rank": text_of(ConfigError, lambda: pickle.loads(written[1 - dist.get_rank()]))}
    mine = written[dist.get_rank()]
    dist.destroy_process_group()
    texts["no group"] = text_of(ConfigError, lambda: pickle.loads(mine))
    return texts


def test_a_copy_that_is_loaded_in_the_wrong_place_says_so(fresh_pair: Ranks) -> None:
    for rank, texts in enumerate(fresh_pair.run(copy_in_the_wrong_place)):
        assert texts == {
            "another rank": f"rank {rank} is not among the ranks of the model, {1 - rank}.\n"
            "  a copy of a wrapped model\n"
            "  Load it on those ranks only, or save model.module and wrap that.",
            "no group": "torch.distributed is not initialised.\n"
            "  a copy of a model that was wrapped over 1 ranks\n"
            "  Call torch.distributed.init_process_group() before loading it, or save model.module instead.",
        }


def other_group(bucket_cap_mb: float | None) -> None:
    """Means over all ranks, then over ranks 0 and 1 (a third rank stays alone), then over all again."""
    (group,) = groups_of([0, 1], *([rank] for rank in range(2, dist.get_world_size())))
    with SideBySide(mlp(), bucket_cap_mb) as side:
        for index, current in enumerate([dist.group.WORLD, group, dist.group.WORLD]):
            if index > 0:
                side.ddp._update_process_group(current)
            for step in range(2):
                side.zero_grad()
                side.backward(squares(5, 6, step=2 * index + step))
                naive_mean(side.bare, current)
                require_same_gradients(side.ddp, side.bare)
    dist.destroy_process_group(group)


@pytest.mark.parametrize(("fresh", "bucket_cap_mb"), [("fresh_pair", 1e-6), ("fresh_pair", None), ("fresh_ranks", 1e-6)])
def test_the_process_group_can_be_changed(request: pytest.FixtureRequest, fresh: str, bucket_cap_mb: float | None) -> None:
    """In processes of its own: torch names a group of some ranks by these alone, and finds the keys of earlier ones."""
    request.getfixturevalue(fresh).run(other_group, bucket_cap_mb, timeout_s=TIMEOUT_S)


# How many batches each rank has; a third number is for a third rank.
BATCHES = {"rank 0 ends first": (1, 3, 4), "rank 0 ends last": (4, 2, 1), "even": (2, 2, 2), "rank 1 has none": (2, 0, 1)}


def step_alone(model: nn.Module, steps_of_rank: dict[int, list[int]], divisor: int) -> None:
    """A step with the data of all ranks in one process: each rank's gradients are summed up, then those of the ranks."""
    total = [torch.zeros_like(param) for param in model.parameters()]
    for rank, steps in steps_of_rank.items():
        model.zero_grad()
        for step in steps:
            model(noise(5, 6, step=step, rank=rank)).square().mean().backward()
        for param, summed in zip(model.parameters(), total, strict=True):
            summed += param.grad
    for param, summed in zip(model.parameters(), total, strict=True):
        param.grad = summed / divisor
    torch.optim.SGD(model.parameters(), lr=LEARNING_RATE).step()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(
    ("divides_by_all", "bucket_cap_mb"),
    [(True, None), (True, 1e-6), (False, 1e-6)],
    ids=["by all ranks", "by all ranks, a bucket per parameter", "by active ranks"],
)
@pytest.mark.parametrize("name", BATCHES)
def test_join_allows_uneven_inputs(name: str, divides_by_all: bool, bucket_cap_mb: float | None) -> None:
    batches = BATCHES[name][: dist.get_world_size()]
    with SideBySide(mlp(), bucket_cap_mb) as side:
        optimizer = torch.optim.SGD(side.ddp.parameters(), lr=LEARNING_RATE)
        for _ in range(2):  # epochs
            with side.ddp.join(divide_by_initial_world_size=divides_by_all):
                for step in range(batches[dist.get_rank()]):
                    optimizer.zero_grad()
                    squares(5, 6, step=step)(side.ddp).backward()
                    optimizer.step()
            for step in range(max(batches)):
                active = [rank for rank, num_batches in enumerate(batches) if step < num_batches]
                divisor = len(batches) if divides_by_all else len(active)
                step_alone(side.bare, {rank: [step] for rank in active}, divisor)
            side.compare_parameters()
        side.step(squares(5, 6, step=9))  # and without the context everybody counts again


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@with_both_plans
def test_join_allows_accumulation(bucket_cap_mb: float | None) -> None:
    """Every second micro-batch synchronises; rank 0 has one pair fewer."""
    num_pairs = [1, 2, 2][: dist.get_world_size()]
    with SideBySide(mlp(), bucket_cap_mb) as side:
        with side.ddp.join():
            for pair in range(num_pairs[dist.get_rank()]):
                side.ddp.zero_grad()
                with side.accumulating():
                    squares(5, 6, step=2 * pair)(side.ddp).backward()
                squares(5, 6, step=2 * pair + 1)(side.ddp).backward()
                torch.optim.SGD(side.ddp.parameters(), lr=LEARNING_RATE).step()
        for pair in range(2):
            steps = {rank: [2 * pair, 2 * pair + 1] for rank, num in enumerate(num_pairs) if pair < num}
            step_alone(side.bare, steps, divisor=len(num_pairs))
        side.compare_parameters()


def join_that_throws() -> str:
    def train() -> None:
        with ddp.join(throw_on_early_termination=True):
            for step in range(1 + dist.get_rank()):
                squares(5, 6, step=step)(ddp).backward()

    with SideBySide(mlp()) as side:
        ddp = side.ddp
        return text_of(RuntimeError, train)


def test_join_can_throw_on_all_ranks_when_one_has_run_out(ranks: Ranks) -> None:
    """In torch's words."""
    first, *others = ranks.run(join_that_throws, timeout_s=TIMEOUT_S)
    assert first == "Rank 0 exhausted all inputs."
    assert others == ["Detected at least one rank that exhausted inputs. Throwing across all ranks."] * len(others)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_join_can_be_switched_off() -> None:
    with SideBySide(mlp()) as side, side.ddp.join(enable=False):
        for step in range(2):
            side.step(squares(5, 6, step=step))
