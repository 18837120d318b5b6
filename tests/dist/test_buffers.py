from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.models import CASES, noise
from support.naive import wrapped
from support.ranks import Ranks
from undertow import attach

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


def evaluate_on_rank_0_alone() -> None:
    with wrapped(CASE.model()) as ddp:
        if dist.get_rank() == 0:
            with torch.no_grad():
                CASE.loss(ddp, 0)
            ddp.eval()
            CASE.loss(ddp, 0)


def test_a_rank_may_evaluate_alone(ranks: Ranks) -> None:
    ranks.run(evaluate_on_rank_0_alone)


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
        with wrapped(model) as callable_model:
            pass
    for step in range(2):
        CASE.loss(callable_model, step).backward()
    means = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.all_gather(means, model[0][1].running_mean)
    return any(torch.equal(means[0], other) for other in means[1:])


def test_a_closed_model_goes_on_alone(ranks: Ranks) -> None:
    for how in ("attach", "wrapper"):
        assert not any(ranks.run(goes_on_after_close, how))
