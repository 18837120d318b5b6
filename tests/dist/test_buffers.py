from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist.test_events import collectives
from support.models import CASES, noise
from support.naive import wrapped
from support.ranks import Ranks
from undertow import attach
from undertow.runtime.buffers import BufferOwner, CommonBuffers, average_buffers, broadcast_buffers, broadcast_in_place
from undertow.runtime.group import GroupRef, OwnGroup

CASE = CASES["convolutions"]


def buffers_in_the_next_forward(training: bool, setting: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Buffers after a step on data of each rank's own, and what the next forward sees of them."""
    seen: dict[str, Tensor] = {}
    model = CASE.model()
    with wrapped(model, buffers=setting) as ddp:
        for step in range(2):
            CASE.loss(ddp, step).backward()
        after = {name: buffer.clone() for name, buffer in model.named_buffers()}
        ddp.train(training)
        model[0][0].register_forward_pre_hook(
            lambda *_: seen.update({name: buffer.clone() for name, buffer in model.named_buffers()})
        )
        CASE.loss(ddp, 2)
    return after, seen


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_buffers_follow_rank_0_before_a_training_forward(ranks: Ranks) -> None:
    (first, _), *others = ranks.run(buffers_in_the_next_forward, True, "rank0")
    for after, seen in others:
        assert not equal(after, first)
        assert equal(seen, first)


def test_buffers_stay_each_ranks_own_in_evaluation(ranks: Ranks) -> None:
    for after, seen in ranks.run(buffers_in_the_next_forward, False, "rank0"):
        assert equal(after, seen)


def test_buffers_can_be_left_alone(ranks: Ranks) -> None:
    for after, seen in ranks.run(buffers_in_the_next_forward, True, "off"):
        assert equal(after, seen)


def test_buffers_become_the_mean_over_ranks_before_a_training_forward(ranks: Ranks) -> None:
    answers = ranks.run(buffers_in_the_next_forward, True, "mean")
    assert not equal(answers[0][0], answers[1][0])
    for _, seen in answers:
        assert seen.keys() == answers[0][0].keys()
        for name, mean in seen.items():
            mine = [after[name] for after, _ in answers]
            wanted = torch.stack(mine).double().mean(0).float() if mean.is_floating_point() else mine[0]
            assert mean.dtype == mine[0].dtype
            assert torch.equal(mean, wanted), name


def test_buffers_are_not_averaged_in_evaluation(ranks: Ranks) -> None:
    for after, seen in ranks.run(buffers_in_the_next_forward, False, "mean"):
        assert equal(after, seen)


def evaluate_on_the_last_rank_alone() -> list[str]:
    """Not on rank 0, which others would have to wait for."""
    with wrapped(CASE.model()) as ddp, collectives() as called:
        if dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                CASE.loss(ddp, 0)
            ddp.eval()
            CASE.loss(ddp, 0)
        return called


def test_a_rank_may_evaluate_alone(ranks: Ranks) -> None:
    assert ranks.run(evaluate_on_the_last_rank_alone) == [[]] * ranks.num_ranks


class Scaled(nn.Module):
    """Multiplies by a buffer, which autograd saves, and then moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        self.register_buffer("scale", torch.tensor([float(3 + 100 * dist.get_rank())]))

    def forward(self, x: Tensor) -> Tensor:
        result = self.linear(x) * self.scale
        self.scale = self.scale + (1 + dist.get_rank())
        return result


def two_forwards_before_backward() -> list[float]:
    model = Scaled()
    with wrapped(model) as ddp:
        ddp.module.linear.weight.data.fill_(1.0)
        losses = [ddp(torch.ones(1, 1)).sum() for _ in range(2)]  # with scale 3, then 4
        losses[0].backward()
        first = model.linear.weight.grad.item()
        losses[1].backward()
        return [first, model.linear.weight.grad.item()]


def test_a_buffer_that_autograd_has_saved_keeps_its_value(ranks: Ranks) -> None:
    for grads in ranks.run(two_forwards_before_backward):
        assert grads == [3.0, 7.0]


class Shared(nn.Module):
    """A buffer that two modules own, one of another dtype, one that is not saved, and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(2))
        self.inner.register_buffer("table", self.table)
        self.register_buffer("flag", torch.tensor(False), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def shared_buffers() -> dict[str, object]:
    model = Shared()
    with wrapped(model, ignore=("count",)) as ddp:
        rank = dist.get_rank()
        model.table.fill_(rank + 1)
        model.count.fill_(rank + 1)
        model.flag.fill_(rank == 0)
        ddp(noise(1, 2))
        return {
            "is shared": model.table is model.inner.table,
            "table": model.table.tolist(),
            "flag": bool(model.flag),
            "count": int(model.count),
        }


def test_shared_buffers_stay_shared_and_ignored_ones_are_left_alone(ranks: Ranks) -> None:
    for rank, answer in enumerate(ranks.run(shared_buffers)):
        assert answer == {"is shared": True, "table": [1.0, 1.0], "flag": True, "count": rank + 1}


def shared_buffers_averaged() -> dict[str, object]:
    model = Shared()
    with wrapped(model, ignore=("inner.table",), buffers="mean") as ddp:
        model.table.fill_(dist.get_rank())
        ddp(noise(1, 2))
        ignored = model.table.tolist()
    with wrapped(model, buffers="mean") as ddp:
        rank, table, empty = dist.get_rank(), model.table, model.empty
        model.table.fill_(rank)
        model.count.fill_(rank + 5)
        model.flag.fill_(rank == 0)
        ddp(noise(1, 2))
        return {
            "ignored": ignored,
            "is shared": model.table is model.inner.table,
            "is new": model.table is not table and table.tolist() == [rank] * 2,
            "keeps what is the same": model.empty is empty,
            "table": model.table.tolist(),
            "flag": bool(model.flag),
            "count": int(model.count),
        }


def test_averaged_buffers_stay_shared_and_counters_follow_rank_0(ranks: Ranks) -> None:
    mean = (ranks.num_ranks - 1) / 2
    for rank, answer in enumerate(ranks.run(shared_buffers_averaged)):
        # With three ranks the mean is 1, which rank 1 has already: there the buffer stays the same tensor.
        assert answer == {
            "ignored": [rank] * 2,
            "is shared": True,
            "is new": rank != mean,
            "keeps what is the same": True,
            "table": [mean] * 2,
            "flag": True,
            "count": 5,
        }


class Registered(nn.Module):
    """Buffers by name."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def owners(self) -> list[BufferOwner]:
        return [BufferOwner(self._buffers, name) for name in self._buffers]


@contextlib.contextmanager
def own_group() -> Iterator[OwnGroup]:
    assert dist.group.WORLD is not None
    group = OwnGroup(GroupRef.of(dist.group.WORLD), device=torch.device("cpu"))
    try:
        yield group
    finally:
        group.close()


def averaged_in_every_dtype() -> dict[str, tuple[list[object], bool]]:
    values = noise(3).abs() + 1
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
    model = Registered(**{f"of_{str(dtype)[6:]}": values.to(dtype) for dtype in dtypes})
    with own_group() as group, collectives() as called:
        average_buffers(CommonBuffers(model.owners()), group)
    assert called == ["all_reduce"] * len(dtypes)
    return {name[3:]: (buffer.tolist(), buffer.dtype == getattr(torch, name[3:])) for name, buffer in model.named_buffers()}


def test_buffers_of_every_dtype_are_averaged_as_exactly_as_it_can(ranks: Ranks) -> None:
    answers = ranks.run(averaged_in_every_dtype)
    for answer in answers:
        for name, (mean, keeps_dtype) in answer.items():
            dtype = getattr(torch, name)
            values = [(noise(3, rank=rank).abs() + 1).to(dtype) for rank in range(ranks.num_ranks)]
            wide = torch.complex128 if dtype.is_complex else torch.float64
            exact = torch.stack(values).to(wide).mean(0).to(dtype)
            assert keeps_dtype
            # Ours divides before it adds: some roundings of fp64, which only fp64 itself shows.
            torch.testing.assert_close(torch.tensor(mean, dtype=dtype), exact, rtol=1e-15, atol=0.0)


def averaged_constants() -> bool:
    """What every rank has alike, not all of it a number that a third can be taken of; averaged many times."""
    lowest = torch.full((3,), torch.finfo(torch.float32).min)
    model = Registered(
        table=noise(1000, rank=0),
        halves=noise(1000, rank=0).half(),
        mask=torch.cat([lowest, torch.tensor([-torch.inf, torch.inf, 0.0])]),
        turned=noise(3, 4, rank=0).t(),
    )
    before = dict(model.named_buffers())
    with own_group() as group:
        for _ in range(3):
            average_buffers(CommonBuffers(model.owners()), group)
    return all(buffer is before[name] for name, buffer in model.named_buffers())


def test_a_buffer_that_is_the_same_on_every_rank_stays_the_same_tensor(ranks: Ranks) -> None:
    assert all(ranks.run(averaged_constants))


def follows_the_last_rank() -> dict[str, object]:
    rank = dist.get_rank()
    model = Registered(count=torch.tensor(rank), value=torch.full((2, 3), float(rank)).t())
    param = torch.full((2,), float(rank))
    with own_group() as group:
        last = group.num_ranks - 1
        value = model.value
        average_buffers(CommonBuffers(model.owners()), group, source=last)
        averaged = [int(model.count), model.value[0, 0].item(), model.value.stride()]
        model.count, model.value = torch.tensor(rank), value
        broadcast_buffers(CommonBuffers(model.owners()), group, source=last)
        broadcast_in_place([param], group, source=last)
    return {
        "averaged": averaged,
        "followed": [int(model.count), model.value[0, 0].item(), model.value.stride()],
        "is kept": model.value is value,
        "written": param.tolist(),
    }


def test_any_rank_can_be_followed(ranks: Ranks) -> None:
    last = ranks.num_ranks - 1
    for rank, answer in enumerate(ranks.run(follows_the_last_rank)):
        assert answer == {
            "averaged": [last, last / 2, (1, 3)],
            "followed": [last, last, (1, 3)],
            "is kept": rank == last,
            "written": [last] * 2,
        }


def in_chunks() -> tuple[list[str], bool]:
    """Five buffers of 8 MiB, of which four fill a chunk."""
    numel = 2 * 1024 * 1024
    model = Registered(**{f"b{index}": torch.full((numel,), float(dist.get_rank() + index)) for index in range(5)})
    with own_group() as group, collectives() as called:
        average_buffers(CommonBuffers(model.owners()), group)
    mean = (dist.get_world_size() - 1) / 2
    return called, all(bool((buffer == mean + index).all()) for index, buffer in enumerate(model.buffers()))


def test_large_buffers_travel_in_chunks(ranks: Ranks) -> None:
    assert ranks.run(in_chunks) == [(["all_reduce"] * 2, True)] * ranks.num_ranks


def no_broadcast_while_accumulating() -> bool:
    model = CASE.model()
    with wrapped(model) as ddp:
        CASE.loss(ddp, 0).backward()
        before = model[0][1].running_mean
        with ddp.no_sync():
            CASE.loss(ddp, 1).backward()
        return model[0][1].running_mean is before


def test_buffers_do_not_travel_while_accumulating(ranks: Ranks) -> None:
    assert all(ranks.run(no_broadcast_while_accumulating))


def goes_on_after_close(how: str) -> bool:
    model = CASE.model()
    if how == "attach":
        sync = attach(model)
        sync.close()
        callable_model = model
    else:
        with wrapped(model):
            callable_model = model
    for step in range(2):
        CASE.loss(callable_model, step).backward()
    means = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model[0][1].running_mean)
    return any(torch.equal(means[0], other) for other in means[1:])


def test_a_closed_model_goes_on_alone(ranks: Ranks) -> None:
    for how in ("attach", "wrapper"):
        assert not any(ranks.run(goes_on_after_close, how))


class Cached(nn.Module):
    """A buffer that a rank may replace by a longer one, beside one that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.full((2,), 1.0 + dist.get_rank()))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table[:2]


def changed_buffers_on_one_rank(changing: int, setting: str) -> list[dict[str, list[float]]]:
    """Buffers as every rank sees them in the forwards after one rank has replaced, removed and added some."""
    model = Cached()
    seen = []
    with wrapped(model, buffers=setting) as ddp:
        model.linear.register_forward_hook(
            lambda *_: seen.append({name: buffer.tolist() for name, buffer in model.named_buffers()})
        )
        ddp(torch.ones(1, 2)).sum().backward()
        model.count += 1 + dist.get_rank()
        if dist.get_rank() == changing:
            model.table = torch.full((3,), 9.0)
            model.register_buffer("added", torch.full((5,), 7.0))
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
        if dist.get_rank() == changing:
            model.table = torch.full((2,), 4.0)
        model.table[:2] += 1
        ddp(torch.ones(1, 2)).sum().backward()
    return seen


@pytest.mark.parametrize("changing", [0, 1])
def test_a_buffer_that_changes_its_shape_on_one_rank_is_left_alone_there(two_ranks: Ranks, changing: int) -> None:
    answers = two_ranks.run(changed_buffers_on_one_rank, changing, "rank0", timeout_s=20.0)
    for rank, seen in enumerate(answers):
        table = [9.0] * 3 if rank == changing else [1.0] * 2
        added = {"added": [7.0] * 5} if rank == changing else {}
        assert seen[1:3] == [{"table": table, "count": [1.0], **added}] * 2
        assert seen[3] == {"table": [5.0, 5.0] if changing == 0 else [2.0, 2.0], "count": [1.0], **added}


@pytest.mark.parametrize("changing", [0, 1])
def test_the_mean_of_buffers_outlives_a_changed_shape(two_ranks: Ranks, changing: int) -> None:
    answers = two_ranks.run(changed_buffers_on_one_rank, changing, "mean", timeout_s=20.0)
    assert answers[0][0] == answers[1][0] == {"table": [1.0, 1.0], "count": [0.0]}
    for seen in answers:
        assert [step["count"] for step in seen[1:]] == [[1.5]] * 3
    assert answers[1 - changing][2]["table"] == [1.0, 1.0]


def buffers_changed_alike(change: str) -> list[dict[str, list[float]]]:
    """What every forward sees, on ranks that move their buffers apart after each; changed before the second one."""
    model = Cached()
    seen = []
    with wrapped(model) as ddp:
        model.linear.register_forward_hook(lambda *_: seen.append({name: it.tolist() for name, it in model.named_buffers()}))
        for step in range(4):
            if step == 1 and change == "added":
                model.linear.register_buffer("new", torch.full((2,), 5.0))
            if step == 1 and change == "cast":
                model.count = model.count.double()
            if step == 1 and change == "grown":
                model.table = torch.full((3,), 5.0)
            ddp(torch.ones(1, 2)).sum().backward()
            for buffer in model.buffers():
                buffer += dist.get_rank()
    return seen


@pytest.mark.parametrize(("change", "name"), [("added", "linear.new"), ("cast", "count"), ("grown", "table")])
def test_buffers_that_change_on_all_ranks_follow_rank_0_from_the_next_step_on(ranks: Ranks, change: str, name: str) -> None:
    first, *others = ranks.run(buffers_changed_alike, change, timeout_s=20.0)
    assert name in first[1]
    for seen in others:
        assert seen[2:] == first[2:]
        assert [sorted(step) for step in seen] == [sorted(step) for step in first]


def buffers_that_grow_by_different_numbers() -> list[list[float]]:
    model = Cached()
    seen = []
    with wrapped(model) as ddp:
        for step in range(4):
            if step == 1:
                model.table = torch.full((3 + dist.get_rank(),), 5.0)
            ddp(torch.ones(1, 2)).sum().backward()
            seen.append(model.count.tolist())
            model.count += 1 + dist.get_rank()
    return seen


def test_buffers_that_change_differently_are_left_alone_and_others_follow_rank_0(ranks: Ranks) -> None:
    assert ranks.run(buffers_that_grow_by_different_numbers, timeout_s=20.0) == [[[0.0], [1.0], [2.0], [3.0]]] * ranks.num_ranks
