"""Buffers follow rank 0 before a training forward."""

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nested import nested_tensor as nested

import undertow
from support.alike import backwards, of_all_ranks
from support.errors import text_of
from support.levels import some
from support.models import CASES, noise
from support.naive import require_same_gradients, wrapped
from support.ranks import in_ranks
from undertow import ConfigError, DistributedDataParallel, Outer, SyncConfig

CASE = CASES["convolutions"]


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("setting", "mode", "follows"),
    some(
        [
            ("rank0", "training", True),
            ("off", "training", False),
            ("rank0", "evaluation", False),
            ("rank0", "switched off", False),
        ],
        most=2,
    ),
)
def test_a_forward_finds_buffers_as_the_setting_says(setting: str, mode: str, follows: bool) -> None:
    """In a training forward: in an evaluation each rank has its own."""
    found: list[dict[str, Tensor]] = []
    model = CASE.model()
    with wrapped(model, buffers=setting) as ddp:
        backwards(ddp, CASE.loss, range(2))
        mine = copies(model)
        ddp.train(mode != "evaluation")
        ddp.require_forward_param_sync = mode != "switched off"
        model[0][0].register_forward_pre_hook(lambda *_: found.append(copies(model)))
        CASE.loss(ddp, 2)
    of_ranks = of_all_ranks(mine)
    assert not torch.equal(of_ranks[0]["0.1.running_mean"], of_ranks[1]["0.1.running_mean"])
    wanted = of_ranks[0] if follows else mine
    assert (found[0].keys(), [buffer.dtype for buffer in found[0].values()]) == (
        wanted.keys(),
        [buffer.dtype for buffer in wanted.values()],
    )
    assert [name for name in wanted if not torch.equal(found[0][name], wanted[name])] == []


@in_ranks(2, 3)
def test_a_buffer_that_autograd_has_saved_keeps_its_value() -> None:
    rank, model, losses = dist.get_rank(), nn.Linear(1, 1, bias=False), []
    model.register_buffer("scale", torch.tensor([3.0 + 100 * rank]))
    model.register_forward_hook(lambda module, _, out: out * module.scale)
    with wrapped(model) as ddp:
        for _ in range(2):  # with scale 3, then 4
            losses.append(ddp(torch.ones(1, 1)).sum())
            model.scale = model.scale + (1 + rank)
        for loss, grad in zip(losses, (3.0, 7.0), strict=True):
            loss.backward()
            assert model.weight.grad.item() == grad


class Buffered(nn.Module):
    """A layer, and buffers by name; a forward notes what it finds in them."""

    def __init__(self, **buffers: Tensor | None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.found: list[dict[str, Tensor]] = []
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(copies(self))
        return self.linear(x)

    @property
    def seen(self) -> list[dict[str, list[float]]]:
        return [{name: buffer.tolist() for name, buffer in found.items()} for found in self.found]


@in_ranks(2, 3)
@pytest.mark.parametrize("ignored", ["", "count", "linear.table"])
def test_shared_buffers_stay_shared_and_ignored_ones_are_left_alone(ignored: str) -> None:
    rank, model = dist.get_rank(), Buffered(count=torch.tensor(0), table=torch.zeros(2), nothing=None, empty=torch.zeros(0))
    model.linear.register_buffer("table", model.table)
    model.register_buffer("flag", torch.tensor(False), persistent=False)
    with wrapped(model, ignore=(ignored,) if ignored else ()) as ddp:
        model.table.fill_(rank)
        model.count.fill_(rank + 5)
        model.flag.fill_(rank == 0)
        table, flag, empty = model.table, model.flag, model.empty
        ddp(noise(1, 2))
    assert (model.table.tolist(), int(model.count), bool(model.flag)) == (
        [rank if ignored == "linear.table" else 0] * 2,
        rank + 5 if ignored == "count" else 5,
        True,
    )
    assert (model.table is model.linear.table is table, model.empty is empty) == (True, True)
    assert (model.flag is flag, flag.item()) == (rank == 0, rank == 0)  # what changes becomes a new tensor, unless it is shared


@in_ranks(2, 3)
def test_a_buffer_that_is_the_same_on_every_rank_stays_the_same_tensor() -> None:
    model = Buffered(
        table=noise(1000, rank=0),
        halves=noise(1000, rank=0).half(),
        mask=torch.cat([torch.full((3,), torch.finfo(torch.float32).min), torch.tensor([-torch.inf, torch.inf, 0.0])]),
        turned=noise(3, 4, rank=0).t(),
    )
    before = dict(model.named_buffers())
    with wrapped(model) as ddp:
        for _ in range(3):
            ddp(noise(1, 2))
    assert [name for name, buffer in model.named_buffers() if buffer is not before[name]] == []


class Codebook(nn.Module):
    """Reads and changes a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("code", torch.zeros(2))
        self.seen: list[float] = []

    def forward(self, x: float) -> Tensor:
        self.seen.append(float(self.code[0]))
        loss = (self.weight * (x - self.code)).sum()
        self.code = self.code + x + dist.get_rank()
        return loss


Train = Callable[[float], Tensor]
Accumulate = Callable[[], contextlib.AbstractContextManager[None]]


def micro_batches(forward: Train, accumulate: Accumulate) -> None:
    with accumulate():
        forward(1.0).backward()
        forward(2.0).backward()
    forward(3.0).backward()


def forwards_without_backward(forward: Train, accumulate: Accumulate) -> None:
    forward(1.0)
    with accumulate():
        forward(2.0)
        forward(3.0)
    forward(4.0)
    forward(5.0).backward()


def accumulating_from_backward_on(forward: Train, accumulate: Accumulate) -> None:
    loss = forward(1.0)
    with accumulate():
        loss.backward()
        forward(2.0).backward()
    forward(3.0).backward()


Program = Callable[[Train, Accumulate], None]


@in_ranks(2, 3)
@pytest.mark.parametrize("step", [micro_batches, forwards_without_backward, accumulating_from_backward_on])
@pytest.mark.parametrize("is_attached", [False, True], ids=["wrapper", "attach"])
def test_forwards_find_the_buffers_that_they_find_under_torchs_class(is_attached: bool, step: Program) -> None:
    """Rank 0's before the first forward of a step, and then each rank's own."""
    ours, theirs = Codebook(), Codebook()
    torchs = nn.parallel.DistributedDataParallel(theirs)
    with contextlib.closing(undertow.attach(ours)) if is_attached else wrapped(ours) as sync:
        for _ in range(3):
            step(ours if is_attached else sync, sync.accumulate)
            step(torchs, torchs.no_sync)
    assert ours.seen == theirs.seen
    require_same_gradients(ours, theirs)


@in_ranks(2, 3, timeout_s=20.0)
@pytest.mark.parametrize("num_forwards", [0, 1])
def test_a_rank_that_runs_out_of_micro_batches_follows_rank_0_in_the_same_step(num_forwards: int) -> None:
    """The last rank has none, or one of three, in the first step; in the second step all find the same buffers."""
    model, is_last = Codebook(), dist.get_rank() == dist.get_world_size() - 1
    with wrapped(model) as ddp:
        if is_last:
            for _ in range(num_forwards):
                with ddp.no_sync():
                    ddp(1.0).backward()
            ddp.finish()
        else:
            micro_batches(ddp, ddp.no_sync)
        assert ddp.will_sync_module_buffers()
        micro_batches(ddp, ddp.no_sync)
    assert model.seen[0 if is_last and num_forwards == 0 else -3] == 6.0


def cached() -> Buffered:
    """A buffer that may be replaced by a longer one, beside one that is shared."""
    return Buffered(table=torch.full((2,), 1.0 + dist.get_rank()), count=torch.zeros(1))


CHANGES: dict[str, Callable[[Buffered], object]] = {
    "linear.new": lambda model: model.linear.register_buffer("new", torch.full((2,), 5.0)),
    "count": lambda model: setattr(model, "count", model.count.double()),
    "table": lambda model: setattr(model, "table", torch.full((3 + dist.get_rank(),), 5.0)),
}


@in_ranks(2, timeout_s=20.0)
@pytest.mark.parametrize("name", CHANGES)
def test_a_buffer_that_is_new_or_changes_its_kind_is_left_alone_on_every_rank(name: str) -> None:
    model, rank = cached(), dist.get_rank()
    with wrapped(model) as ddp:
        for step in range(3):
            if step == 1:
                CHANGES[name](model)
            ddp(torch.ones(1, 2)).sum().backward()
            for buffer in model.buffers():
                buffer += 1 + rank
    own = [step[name] for step in model.seen[1:]]
    assert [value - own[0][0] for value in own[1]] == [1.0 + rank] * len(own[1])
    others = [{key: value for key, value in step.items() if key != name} for step in model.seen]
    assert others == of_all_ranks(others)[0]


@in_ranks(2, timeout_s=20.0)
@pytest.mark.parametrize("name", CHANGES)
def test_replicas_that_train_alone_leave_such_a_buffer_alone_too(name: str) -> None:
    """Also if it changes before the fragments are chosen. All others become their mean."""
    torch.manual_seed(0)
    model, rank = cached(), dist.get_rank()
    with contextlib.closing(DistributedDataParallel(model, config=SyncConfig(outer=Outer(every=3)))) as ddp:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(7):
            if step == 1:
                CHANGES[name](model)
                own = model.get_buffer(name)
                own += rank
                before = own.clone()
            ddp(torch.ones(1, 2)).sum().backward()
            if step == 0:
                model.table += rank
                model.count += rank
            optimizer.step()
        assert ddp.outer.num_synchronizations >= 2
    assert model.get_buffer(name) is own
    assert torch.equal(own, before)
    others = {key: value.tolist() for key, value in model.named_buffers() if key != name}
    wanted = {"table": [1.5, 1.5], "count": [0.5]}
    assert others == {key: value for key, value in wanted.items() if key != name}


@in_ranks(2)
def test_a_new_buffer_follows_rank_0_when_the_model_is_wrapped_again() -> None:
    model = cached()
    for _ in range(2):
        with wrapped(model) as ddp:
            ddp(torch.ones(1, 2)).sum().backward()
        model.register_buffer("new", torch.full((2,), 1.0 + dist.get_rank()))
    assert model.seen[1]["new"] == [1.0, 1.0]


# Buffers that torch's class cannot broadcast either.
NOT_SENT: dict[str, tuple[Callable[[], Tensor], str]] = {
    "expanded": (lambda: torch.zeros(3).expand(2, 3), "an expanded tensor: several of its elements share memory"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "a tensor whose layout is not torch.strided, such as a sparse one"),
    "jagged": (lambda: nested([torch.ones(2), torch.ones(3)], layout=torch.jagged), "a nested tensor"),
}
REFUSED = (
    "buffer 'linear.odd' is {}.\n  buffers follow rank 0, and only dense tensors can be sent\n"
    "  Register a dense tensor, such as a clone() of it, or leave it out: ignore=('linear.odd',)."
)


def with_odd_buffer(buffer: Tensor) -> Buffered:
    model = Buffered(table=torch.zeros(1))
    model.linear.register_buffer("odd", buffer)
    return model


@in_ranks(2)
@pytest.mark.parametrize("kind", NOT_SENT)
def test_a_buffer_that_cannot_be_sent_is_refused_by_its_name_on_every_rank(kind: str) -> None:
    make, words = NOT_SENT[kind]
    for wrap in (DistributedDataParallel, undertow.attach):
        assert text_of(ConfigError, lambda wrap=wrap: wrap(with_odd_buffer(make()))) == REFUSED.format(words)


@in_ranks(2)
@pytest.mark.parametrize("kind", NOT_SENT)
def test_a_buffer_that_cannot_be_sent_may_be_ignored_or_not_be_shared(kind: str) -> None:
    for how in ({"ignore": ("linear.odd",)}, {"broadcast_buffers": False}):
        model = with_odd_buffer(NOT_SENT[kind][0]())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # broadcast_buffers is deprecated
            ddp = DistributedDataParallel(model, **how)
        with contextlib.closing(ddp):
            for _ in range(2):
                ddp(torch.ones(1, 2)).sum().backward()


@in_ranks(2)
def test_a_buffer_that_cannot_be_sent_may_be_replaced_by_one_that_can() -> None:
    model = cached()
    with wrapped(model) as ddp:
        ddp(torch.ones(1, 2)).sum().backward()
        model.linear.scale = nn.Parameter(torch.ones(2))
        model.linear.register_buffer("odd", torch.eye(2).to_sparse())
        ddp(torch.ones(1, 2)).sum().backward()
        for _ in range(2):
            assert "buffer 'linear.odd' is a tensor whose layout" in text_of(ConfigError, lambda: ddp(torch.ones(1, 2)))
        model.linear.odd = torch.full((2,), 1.0 + dist.get_rank())
        ddp(torch.ones(1, 2)).sum().backward()
        assert model.linear.odd.tolist() == [1.0, 1.0]


@in_ranks(2)
def test_buffers_are_read_again_when_parameters_change() -> None:
    model, rank = cached(), dist.get_rank()
    with wrapped(model) as ddp:
        ddp(torch.ones(1, 2)).sum().backward()
        model.linear.scale = nn.Parameter(torch.ones(2))
        model.linear.register_buffer("new", torch.full((2,), 1.0 + rank))
        for _ in range(2):
            ddp(torch.ones(1, 2)).sum().backward()
    assert [found["linear.new"] for found in model.seen[1:]] == [[1.0 + rank] * 2, [1.0] * 2]


@in_ranks(2)
def test_a_buffer_that_is_replaced_by_one_of_another_layout_is_left_alone() -> None:
    model, rank = with_odd_buffer(torch.zeros(3, 3)), dist.get_rank()
    with wrapped(model) as ddp:
        ddp(torch.ones(1, 2)).sum().backward()
        own = model.linear.odd = (torch.eye(3) * rank).to_sparse()
        ddp(torch.ones(1, 2)).sum().backward()
    assert model.linear.odd is own
    assert torch.equal(own.to_dense(), torch.eye(3) * rank)


@in_ranks(2)
def test_a_buffer_that_is_replaced_by_an_expanded_one_follows_rank_0() -> None:
    model = with_odd_buffer(torch.zeros(2, 3))
    with wrapped(model) as ddp:
        ddp(torch.ones(1, 2)).sum().backward()
        model.linear.odd = (torch.arange(3.0) + dist.get_rank()).expand(2, 3)
        ddp(torch.ones(1, 2)).sum().backward()
    assert model.linear.odd.tolist() == [[0.0, 1.0, 2.0]] * 2


@in_ranks(2)
def test_buffers_of_every_sendable_kind_follow_rank_0() -> None:
    rank = float(dist.get_rank())
    complex_numbers = torch.full((2,), 1.0 + rank, dtype=torch.complex64)
    model = Buffered(
        scalar=torch.tensor(rank),
        small=torch.full((3,), rank).to(torch.float8_e4m3fn),
        conjugate=complex_numbers.conj(),
        negative=complex_numbers.clone().conj().imag,
        every_other=torch.full((6,), rank)[::2],
        last=torch.full((1, 4, 2, 2), rank).contiguous(memory_format=torch.channels_last),
        nowhere=torch.empty(3, device="meta"),
    )
    with torch.inference_mode():
        model.register_buffer("inferred", torch.full((2,), rank))
    with wrapped(model) as ddp:
        model.scalar += rank
        model.every_other += rank
        ddp(torch.ones(1, 2)).sum().backward()
    wrong = [
        name
        for name, buffer in model.named_buffers()
        if not buffer.is_meta and bool((buffer.to(torch.complex64) != (name == "conjugate")).any())
    ]
    assert (wrong, model.nowhere.is_meta, model.last.stride()) == ([], True, (16, 1, 8, 4))


SHARING: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "some elements": lambda table: (table[:4], table[2:]),
    "all elements": lambda table: (table, table.view(2, 3)),
}


@in_ranks(2)
@pytest.mark.parametrize("what", SHARING)
def test_buffers_that_share_memory_still_share_it_after_they_have_followed_rank_0(what: str) -> None:
    table = torch.zeros(6)
    first, last = SHARING[what](table)
    model = Buffered(first=first, last=last)
    with wrapped(model) as ddp:
        for step in range(3):
            table += 1 + dist.get_rank()
            ddp(torch.ones(1, 2)).sum().backward()
            assert (table.tolist(), model.first is first, model.last is last) == ([1.0 + step] * 6, True, True)


@in_ranks(2)
def test_a_buffer_that_requires_gradients_stays_the_same_tensor() -> None:
    model = Buffered(scale=torch.zeros(2, requires_grad=True))
    scale = model.scale
    with wrapped(model) as ddp:
        scale.data += 1 + dist.get_rank()
        (ddp(torch.ones(1, 2)) * model.scale).sum().backward()
    assert (model.scale is scale, scale.tolist(), scale.grad is None) == (True, [1.0, 1.0], False)
