from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.models import Branches, noise
from support.naive import gradients, naive_mean, require_same, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks, in_ranks

SENDING = [(1e-6, True), (25.0, True), (1e-6, False)]  # largest bucket in MiB, overlap
ALL, NONE = (0, 1, 2), ()


def loss(model: nn.Module, order: tuple[int, ...], step: int = 0) -> Tensor:
    return model(noise(2, 4, step=step), order).square().sum()


def layer(*indices: int) -> tuple[str, ...]:
    """Names of parameters, in the order of the plan."""
    return tuple(f"layers.{index}.{kind}" for index in indices for kind in ("bias", "weight"))


# By step, what each rank uses; a third rank uses what the first one does.
USES = {
    "one rank leaves one out": [(ALL, (0, 2))] * 3,
    "rank 0 leaves one out": [((0, 2), ALL)] * 3,
    "every rank leaves another one out": [((0, 1), (1, 2))] * 3,
    "all ranks leave the same out": [((0, 2), (0, 2))] * 3,
    "only the first step": [((0,), (1,)), (ALL, ALL), (ALL, ALL)],
    "another one in each step": [((0,), (1,)), ((1,), (2,)), ((2, 0), (0,)), (ALL, (0,)), ((0,), ALL)],
    "one comes late into use": [((0, 1), (0, 1)), ((0, 1), ALL), (ALL, ALL)],
}


def mine(uses: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return uses[dist.get_rank() % 2]


def each_step_is_right(name: str, bucket_cap_mb: float, overlap: bool, zero: bool) -> list[tuple[str, ...]]:
    unused = []
    with wrapped_and_bare(Branches(), bucket_cap_mb=bucket_cap_mb, overlap=overlap) as (ddp, bare):
        for step, uses in enumerate(USES[name]):
            for model in (ddp, bare):
                if zero:
                    model.zero_grad()
                loss(model, mine(uses), step).backward()
            if zero:
                naive_mean(bare)
                require_same_gradients(ddp, bare)
            else:
                unused_everywhere_keep_their_bits(ddp, bare, uses)
            unused.append(ddp.unused_parameters)
    return unused


def unused_everywhere_keep_their_bits(ddp: nn.Module, bare: nn.Module, uses: tuple[tuple[int, ...], ...]) -> None:
    """The naive mean of equal values may differ from them in the last bit with three ranks."""
    before = gradients(bare)
    naive_mean(bare)
    for index in {0, 1, 2} - {used for each in uses for used in each}:
        for kind in ("weight", "bias"):
            getattr(bare.layers[index], kind).grad = before[f"layers.{index}.{kind}"]
    require_same_gradients(ddp, bare)


@pytest.mark.parametrize("zero", [True, False], ids=["zeroed", "kept"])
@pytest.mark.parametrize(("bucket_cap_mb", "overlap"), SENDING)
@pytest.mark.parametrize("name", USES)
def test_unused_parameters_are_right(ranks: Ranks, name: str, bucket_cap_mb: float, overlap: bool, zero: bool) -> None:
    for rank, unused in enumerate(ranks.run(each_step_is_right, name, bucket_cap_mb, overlap, zero)):
        expected = [set(layer(*({0, 1, 2} - set(uses[rank % 2])))) for uses in USES[name]]
        assert [set(names) for names in unused] == expected


@in_ranks(2, 3)
@pytest.mark.parametrize("kind", ["reduced", "accumulated", "set by hand"])
def test_an_old_gradient_that_no_rank_has_added_to_stays_to_the_bit(kind: str) -> None:
    with wrapped(Branches(), bucket_cap_mb=25.0) as ddp:
        if kind == "reduced":
            loss(ddp, ALL).backward()
        elif kind == "accumulated":
            with ddp.no_sync():
                loss(ddp, (0, 1)).backward()
            ddp.reduce_gradients_async().wait()
            ddp.module.layers[0].weight.grad.mul_(0.3)
        else:
            for param in ddp.module.layers[1].parameters():
                param.grad = noise(*param.shape, rank=0) / 3
        before = gradients(ddp.module.layers[1])
        pointers = [param.grad.data_ptr() for param in ddp.module.layers[1].parameters()]
        for step in range(4):
            loss(ddp, (0, 2), step).backward()
            for name, grad in gradients(ddp.module.layers[1]).items():
                assert torch.equal(grad, before[name]), (step, name)
        if kind == "set by hand":
            assert pointers == [param.grad.data_ptr() for param in ddp.module.layers[1].parameters()]


def a_rank_without_any_use(end: str) -> tuple[str, ...]:
    """Rank 1's loss reaches no parameter; the others reduce with it all the same."""
    with wrapped_and_bare(Branches(), bucket_cap_mb=1e-6) as (ddp, bare):
        optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, bare)}
        for step in range(3):
            for model, optimizer in optimizers.items():
                optimizer.zero_grad()
                result = loss(model, NONE if dist.get_rank() == 1 else ALL, step)
                if result.requires_grad:
                    result.backward()
            if end == "finish":
                ddp.finish()
                ddp.finish()  # a second call does nothing
            optimizers[ddp].step()
            naive_mean(bare)
            optimizers[bare].step()
            require_same_gradients(ddp, bare)
        return ddp.unused_parameters


@pytest.mark.parametrize("end", ["finish", "optimizer"])
def test_a_rank_that_uses_nothing_joins_in(ranks: Ranks, end: str) -> None:
    first, second, *_ = ranks.run(a_rank_without_any_use, end)
    assert first == ()
    assert set(second) == set(layer(*ALL))


def used_in_one_micro_batch() -> tuple[str, ...]:
    with wrapped_and_bare(Branches(), bucket_cap_mb=25.0) as (ddp, bare):
        for _ in range(2):
            ddp.zero_grad()
            bare.zero_grad()
            for model, context in ((ddp, ddp.no_sync), (bare, contextlib.nullcontext)):
                with context():
                    loss(model, (0, 1), 1).backward()
                loss(model, (0,), 2).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
        return ddp.unused_parameters


def test_a_parameter_used_in_one_micro_batch_is_used(ranks: Ranks) -> None:
    for unused in ranks.run(used_in_one_micro_batch):
        assert set(unused) == set(layer(2))


@in_ranks(2, 3)
def test_a_gradient_that_was_thrown_away_was_not_used() -> None:
    with wrapped_and_bare(Branches(), bucket_cap_mb=25.0) as (ddp, bare):
        with ddp.no_sync():
            loss(ddp, ALL).backward()
        ddp.zero_grad()
        for model in (ddp, bare):
            loss(model, (0,)).backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)
        assert set(ddp.unused_parameters) == set(layer(1, 2))


@in_ranks(2)
def test_settings_of_torchs_class_that_we_do_not_need_are_accepted() -> None:
    from undertow import DistributedDataParallel

    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True)
    loss(ddp, (0,)).backward()
    require_same({"unused": None}, {"unused": ddp.module.layers[1].weight.grad})
    ddp.close()


def extra_forward_before_the_step() -> bool:
    """One rank looks at its loss once more, in training mode, between backward and step."""
    with wrapped_and_bare(Branches()) as (ddp, bare):
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, bare)]
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                loss(model, ALL, step).backward()
            naive_mean(bare)
            if dist.get_rank() == 0:
                loss(ddp, ALL, step)
            for optimizer in optimizers:
                optimizer.step()
        return all(map(torch.equal, ddp.module.parameters(), bare.parameters()))


def test_one_more_forward_on_one_rank_does_not_start_a_round(two_ranks: Ranks) -> None:
    assert two_ranks.run(extra_forward_before_the_step) == [True, True]
