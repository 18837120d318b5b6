"""Sums over ranks, and means over all tokens: gradients of small whole numbers, so that no order of additions matters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from support.drop_in import TIMEOUT_S, groups_of
from support.errors import text_of
from support.models import noise
from support.naive import gradients, wrapped
from support.ranks import Ranks, in_ranks
from undertow import ConfigError, DistributedDataParallel, PhaseError, PlanMismatch, ShardedOptimizer, SyncConfig, WrongType

NUM_STEPS = 3


class Integers(nn.Module):
    """Layers of small whole numbers; rank 0 uses the first two of them, other ranks the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3))
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                layer.weight.copy_(torch.arange(9.0).view(3, 3) % (index + 3) - 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 2 - min(1, dist.get_rank())]:
            x = layer(x)
        return x


def loss_of(model: nn.Module, number: int) -> Tensor:
    x = torch.arange(12.0).view(4, 3) % 5 + number + dist.get_rank()
    return model(x).sum()


def weight_of(number: int) -> int:
    """Of 2 ranks together 8 or 16."""
    return (3 + 2 * dist.get_rank()) * (1 + number % 2)


class Reference:
    """A bare model whose gradients are added up over ranks apart from those of earlier rounds."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.model = copy.deepcopy(model)
        self.is_weighted = kind == "weights"
        self.clear()

    def clear(self) -> None:
        self.model.zero_grad()
        self.result: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in self.model.named_parameters())
        self.weight, self.total = 0.0, 0.0

    def backward(self, number: int) -> None:
        loss_of(self.model, number).backward()
        self.weight += weight_of(number)

    def synchronise(self) -> None:
        new = torch.tensor(self.weight, dtype=torch.float64)
        dist.all_reduce(new)
        before, self.total = self.total, self.total + float(new)
        for name, param in self.model.named_parameters():
            is_used = torch.tensor(float(param.grad is not None))
            dist.all_reduce(is_used)
            earlier = self.result[name]
            if earlier is not None and self.is_weighted:
                earlier = earlier * (before / self.total)
            if is_used:
                part = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(part)
                part = part / self.total if self.is_weighted else part
                self.result[name] = part if earlier is None else part + earlier
            param.grad = None
        self.weight = 0.0


# a: a backward that accumulates, s: one that synchronises, z and 0: zero_grad() with and without set_to_none,
# r: what was accumulated is reduced by hand
PATTERNS = ["ar", "sar", "s", "as", "aas", "ss", "sss", "sas", "szs", "s0s", "azs", "a0s", "sazs", "sa0s", "saas", "sasas"]


def run(ddp: DistributedDataParallel, reference: Reference, letter: str, number: int) -> None:
    if letter in "z0":
        ddp.zero_grad(set_to_none=letter == "z")
        reference.clear()
        return
    if letter == "r":
        ddp.reduce_gradients_async().wait()
        reference.synchronise()
        return
    if reference.is_weighted:
        ddp.weight(weight_of(number))
    with ddp.accumulate() if letter == "a" else contextlib.nullcontext():
        loss_of(ddp, number).backward()
    reference.backward(number)
    if letter == "s":
        reference.synchronise()


def require_reference(ddp: DistributedDataParallel, reference: Reference, *, may_round: bool) -> None:
    # Of parameters that were cleared in place, and that nobody uses, zeros are left where the reference has None.
    ours = {name: ddp.full_gradient(param) for name, param in ddp.module.named_parameters()}
    for name, wanted in reference.result.items():
        got = ours[name]
        if wanted is None:
            assert got is None or not got.any(), name
            continue
        # Divisions by totals that are no powers of two, at most four of them on the way.
        tolerance = 4 * torch.finfo(wanted.dtype).eps * float(wanted.abs().max()) * may_round
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=tolerance)


def follow_pattern(pattern: str, kind: str, strategy: str, settings: dict[str, Any]) -> None:
    model = Integers()
    reference = Reference(model, kind)
    config = SyncConfig(strategy=strategy, op="sum" if kind == "sum" else "mean", **settings)
    is_exact = kind == "sum" or (
        pattern.count("s") + pattern.count("r") == 1 and dist.get_world_size() == 2 and strategy != "zero2"
    )
    ddp = DistributedDataParallel(model, config=config)
    try:
        sharded = strategy != "ddp"
        make = ShardedOptimizer if sharded else (lambda cls, target, **given: cls(target.parameters(), **given))
        optimizer = make(torch.optim.SGD, ddp, lr=0.0)
        number = 0
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            reference.clear()
            for letter in pattern:
                run(ddp, reference, letter, number)
                number += 1
                if letter in "sr":
                    require_reference(ddp, reference, may_round=not is_exact)
            optimizer.step()
    finally:
        ddp.close()


KINDS = pytest.mark.parametrize("kind", ["sum", "weights"])


@KINDS
@pytest.mark.parametrize("pattern", PATTERNS)
def test_ddp_follows_the_reference(ranks: Ranks, pattern: str, kind: str) -> None:
    ranks.run(follow_pattern, pattern, kind, "ddp", {"bucket_cap_mb": 1e-6}, timeout_s=TIMEOUT_S)


@KINDS
@pytest.mark.parametrize("pattern", ["s", "as", "ss", "sas", "szs", "s0s"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_sharded_steps_follow_the_reference(two_ranks: Ranks, strategy: str, pattern: str, kind: str) -> None:
    two_ranks.run(follow_pattern, pattern, kind, strategy, {}, timeout_s=TIMEOUT_S)


VARIANTS: dict[str, dict[str, Any]] = {
    "ordered": {"reduction": "ordered"},
    "no overlap": {"overlap": False},
    "divided beforehand": {"average_in_collective": False},
    "one bucket": {"bucket_cap_mb": 25.0},
}


@KINDS
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_of_reducing_follows_the_reference(two_ranks: Ranks, variant: str, strategy: str, kind: str) -> None:
    two_ranks.run(follow_pattern, "sas", kind, strategy, VARIANTS[variant], timeout_s=TIMEOUT_S)


@in_ranks(2, timeout_s=TIMEOUT_S)
@KINDS
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_eager_steps_follow_the_reference(kind: str, strategy: str) -> None:
    """In this form parameters say what the gradients were: plain gradient descent with a rate that is a power of two."""
    model = Integers()
    reference = Reference(model, kind)
    ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy, op="sum" if kind == "sum" else "mean"))
    try:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=2.0**-10, eager=True)
        for step in range(5):
            optimizer.zero_grad()
            reference.clear()
            for place, letter in enumerate("as"):
                run(ddp, reference, letter, 2 * step + place)
            optimizer.step()
            ddp.wait()
            for (name, ours), wanted in zip(ddp.module.named_parameters(), reference.model.parameters(), strict=True):
                grad = reference.result[name]
                with torch.no_grad():
                    if grad is not None:
                        wanted.sub_(grad, alpha=2.0**-10)
                # The reference divides and subtracts in fp32 as the optimizer does; what differs is the order of two sums.
                torch.testing.assert_close(ours.detach(), wanted.detach(), rtol=1e-6, atol=1e-6)
    finally:
        ddp.close()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@KINDS
def test_gradients_that_are_kept_over_a_step_stay_what_they_are(kind: str) -> None:
    model = Integers()
    reference = Reference(model, kind)
    with wrapped(model, op="sum" if kind == "sum" else "mean") as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        for number in range(4):
            run(ddp, reference, "s", number)
            require_reference(ddp, reference, may_round=kind == "weights")
            optimizer.step()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("begins_late", [False, True])
@pytest.mark.parametrize("gives_zero", [False, True])
def test_a_rank_without_data_has_weight_zero(gives_zero: bool, begins_late: bool) -> None:
    """Rank 1 has run out of data in some steps, and joins by finish()."""
    model = Integers()
    reference = Reference(model, "weights")
    with wrapped(model) as ddp:
        for number in range(5):
            ddp.zero_grad()
            reference.clear()
            has_data = dist.get_rank() == 0 or number % 2 == (1 if begins_late else 0)
            if has_data:
                run(ddp, reference, "s", number)
            else:
                if gives_zero:
                    ddp.weight(0)
                ddp.finish()
                reference.synchronise()
            require_reference(ddp, reference, may_round=dist.get_world_size() > 2)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_a_rank_that_has_left_its_loop_has_no_weight() -> None:
    model = Integers()
    reference = Reference(model, "weights")
    num_batches = 3 - dist.get_rank() % 2
    with wrapped(model) as ddp, ddp.join(divide_by_initial_world_size=False):
        for number in range(num_batches):
            ddp.zero_grad()
            ddp.weight(weight_of(number))
            loss_of(ddp, number).backward()
            if number < 2:
                continue
            # The last one of rank 0 and of other even ranks alone.
            weight = sum((3 + 2 * rank) * (1 + number % 2) for rank in range(0, dist.get_world_size(), 2))
            loss_of(reference.model, number).backward()
            if dist.get_rank() == 0:  # which alone uses that layer
                wanted = reference.model.layers[1].weight.grad / weight
                # Of 3 ranks it is divided by 3, and by 10 / 3, which is rounded too: three roundings, where this has one.
                tolerance = 2 * torch.finfo(wanted.dtype).eps * float(wanted.abs().max()) * (dist.get_world_size() > 2)
                torch.testing.assert_close(ddp.module.layers[1].weight.grad, wanted, rtol=0.0, atol=tolerance)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@KINDS
def test_a_change_of_parameters_is_followed(kind: str) -> None:
    """A layer is frozen, and another one unfrozen: all ranks meet once more under the old plan."""
    model = Integers()
    model.layers[1].requires_grad_(False)
    reference = Reference(model, kind)
    with wrapped(model, op="sum" if kind == "sum" else "mean") as ddp:
        for number in range(6):
            if number == 3:
                for each in (model, reference.model):
                    each.layers[0].requires_grad_(False)
                    each.layers[1].requires_grad_(True)
                reference.clear()
            ddp.zero_grad()
            reference.clear()
            for letter in "ss":
                # From the fourth step on rank 0 alone has gradients.
                if number < 3 or dist.get_rank() == 0:
                    run(ddp, reference, letter, number)
                else:
                    if kind == "weights":
                        ddp.weight(weight_of(number))
                    loss_of(ddp, number)
                    ddp.finish()
                    reference.weight = weight_of(number)
                    reference.synchronise()
            require_reference(ddp, reference, may_round=kind == "weights")


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_a_sum_is_over_the_ranks_that_still_have_data() -> None:
    """Of ranks that have left nothing is added, and nothing is made up for them."""
    model = nn.Linear(2, 1, bias=False)
    with wrapped(model, op="sum") as ddp, ddp.join(divide_by_initial_world_size=False):
        for number in range(1 + (dist.get_rank() == 0)):
            ddp.zero_grad()
            ddp(torch.ones(1, 2)).sum().backward()
            assert model.weight.grad.tolist() == [[1.0 if number else float(dist.get_world_size())] * 2]


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_without_a_call_it_is_the_mean_over_ranks_as_ever() -> None:
    model = Integers()
    weighted, plain = Reference(model, "weights"), Reference(model, "sum")
    with wrapped(model) as ddp:
        for number in range(6):
            ddp.zero_grad()
            reference = weighted if number % 3 == 1 else plain
            reference.clear()
            run(ddp, reference, "s", number)
            if reference is plain:
                for name, total in plain.result.items():
                    plain.result[name] = None if total is None else total / dist.get_world_size()
            require_reference(ddp, reference, may_round=dist.get_world_size() > 2)


def alone(pattern: str) -> None:
    group = groups_of(*[[rank] for rank in range(dist.get_world_size())])[0]
    model = nn.Linear(3, 2, bias=False)
    bare = copy.deepcopy(model)
    with wrapped(model, process_group=group) as ddp:
        for step in range(3):
            for each in (ddp, bare):
                each.zero_grad()
            total = 0
            for letter in pattern:
                n = 2 + step
                total += n
                ddp.weight(torch.tensor(n))
                with ddp.no_sync() if letter == "a" else contextlib.nullcontext():
                    ddp(noise(4, 3, step=step)).sum().backward()
                bare(noise(4, 3, step=step)).sum().backward()
            expected = bare.weight.grad / total
            tolerance = 4 * torch.finfo(torch.float32).eps * float(expected.abs().max()) * (pattern == "ss")  # of two divisions
            torch.testing.assert_close(model.weight.grad, expected, rtol=0.0, atol=tolerance)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("pattern", ["s", "as", "ss"])
def test_one_rank_alone_divides_too(two_ranks: Ranks, pattern: str) -> None:
    two_ranks.run(alone, pattern, timeout_s=TIMEOUT_S)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@KINDS
def test_what_arrives_late_is_combined_too(kind: str) -> None:
    """A reentrant checkpoint run twice brings a part of a gradient after its bucket has left."""
    layer = nn.Linear(3, 3, bias=False)
    bare = copy.deepcopy(layer)
    with wrapped(layer, op="sum" if kind == "sum" else "mean") as ddp:
        for number in range(3):
            ddp.zero_grad()
            bare.zero_grad()
            x = (torch.arange(6.0).view(2, 3) + dist.get_rank()).requires_grad_()
            if kind == "weights":
                ddp.weight(weight_of(number))
            total = torch.tensor(float(weight_of(number)))
            dist.all_reduce(total)
            for model in (ddp, bare):
                inner = model.module if model is ddp else model
                hidden = model(x)
                (hidden.sum() + sum(checkpoint(inner, x, use_reentrant=True).sum() for _ in range(2))).backward()
            dist.all_reduce(bare.weight.grad)
            expected = bare.weight.grad / (total if kind == "weights" else 1)
            # In parts, each of which is divided by itself.
            tolerance = 4 * torch.finfo(torch.float32).eps * float(expected.abs().max()) * (kind == "weights")
            torch.testing.assert_close(layer.weight.grad, expected, rtol=0.0, atol=tolerance)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@KINDS
def test_sparse_gradients_are_combined_too(kind: str) -> None:
    words = nn.Embedding(5, 2, sparse=True)
    bare = copy.deepcopy(words)
    with wrapped(words, op="sum" if kind == "sum" else "mean") as ddp:
        for _ in range(2):
            ddp.zero_grad()
            bare.zero_grad()
            total = 0.0
            for number in range(2):
                seen = torch.tensor([number, dist.get_rank(), 3])
                if kind == "weights":
                    ddp.weight(weight_of(number))
                ddp(seen).sum().backward()
                bare(seen).sum().backward()
                weight = torch.tensor(float(weight_of(number)))
                dist.all_reduce(weight)
                total += float(weight)
            expected = bare.weight.grad.to_dense()
            dist.all_reduce(expected)
            expected /= total if kind == "weights" else 1
            tolerance = 4 * torch.finfo(torch.float32).eps * (kind == "weights")  # of values below one
            torch.testing.assert_close(words.weight.grad.to_dense(), expected, rtol=0.0, atol=tolerance)


class Pair(Integers):
    """All ranks use the first two layers, so that all fail and change in the same place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@KINDS
@pytest.mark.parametrize("is_first", [False, True])
def test_a_layer_that_is_frozen_with_an_accumulated_gradient_gets_its_share(kind: str, is_first: bool) -> None:
    model = Pair()
    reference = Reference(model, kind)
    with wrapped(model, op="sum" if kind == "sum" else "mean") as ddp:
        if not is_first:
            run(ddp, reference, "s", 0)
            run(ddp, reference, "z", 0)
        run(ddp, reference, "a", 1)
        for each in (model, reference.model):
            each.layers[0].requires_grad_(False)
        run(ddp, reference, "s", 2)
        require_reference(ddp, reference, may_round=kind == "weights")
        assert reference.result["layers.0.weight"] is not None


def frozen_on_one_rank() -> str:
    """In the first step with weights: ranks that meet under the old plan must still start the same collectives."""
    model = Pair()
    with wrapped(model) as ddp:
        loss_of(ddp, 0).backward()
        ddp.zero_grad()
        if dist.get_rank() == 0:
            model.layers[0].requires_grad_(False)
        ddp.weight(3)
        return text_of(PlanMismatch, lambda: loss_of(ddp, 1).backward())


def test_a_change_on_one_rank_is_still_told_where_weights_begin(ranks: Ranks) -> None:
    for text in ranks.run(frozen_on_one_rank, timeout_s=TIMEOUT_S):
        assert "layers.0.weight" in text


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@KINDS
def test_two_models_in_one_backward(kind: str) -> None:
    """One backward reaches both: each of them sends its own weights, also the first time."""
    models = [nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False)]
    with torch.no_grad():
        for model in models:
            model.weight.copy_(torch.arange(float(model.weight.numel())).view_as(model.weight) % 4)
    bare = copy.deepcopy(models)
    op = "sum" if kind == "sum" else "mean"
    with wrapped(models[0], op=op) as first, wrapped(models[1], op=op) as second:
        for number in range(3):
            x = torch.arange(6.0).view(2, 3) + dist.get_rank() + number
            total = torch.tensor([float(weight_of(number)), 2.0 * dist.get_world_size()])
            for pair in ((first, second), bare):
                for model in pair:
                    model.zero_grad()
                if kind == "weights" and pair is not bare:
                    first.weight(weight_of(number))
                    second.weight(2)
                pair[1](pair[0](x)).sum().backward()
            dist.all_reduce(total[:1])
            for model, wanted, n in zip(models, bare, total.tolist(), strict=True):
                dist.all_reduce(wanted.weight.grad)
                expected = wanted.weight.grad / (n if kind == "weights" else 1)
                tolerance = 2 * torch.finfo(torch.float32).eps * float(expected.abs().max()) * (dist.get_world_size() > 2)
                torch.testing.assert_close(model.weight.grad, expected, rtol=0.0, atol=tolerance)


class _Broken(RuntimeError):
    pass


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@KINDS
def test_after_a_backward_that_failed_everywhere_all_is_as_before(kind: str) -> None:
    model = Pair()
    reference = Reference(model, kind)
    with wrapped(model, op="sum" if kind == "sum" else "mean", bucket_cap_mb=1e-6) as ddp:
        run(ddp, reference, "s", 0)
        before = gradients(ddp)

        def fail(_gradient: Tensor) -> None:
            raise _Broken

        if reference.is_weighted:
            ddp.weight(weight_of(1))
        loss = loss_of(ddp, 1)
        handle = ddp.module.layers[0].weight.register_hook(fail)
        with pytest.raises(_Broken):
            loss.backward()
        handle.remove()
        ddp(torch.ones(1, 3))  # the next forward ends the round
        ours = gradients(ddp)
        assert torch.equal(ours["layers.0.weight"], before["layers.0.weight"])
        ddp.zero_grad()
        reference.clear()
        run(ddp, reference, "s", 2)
        require_reference(ddp, reference, may_round=dist.get_world_size() > 2)


def errors_of_weights(give: Callable[[int, int], float | None], num_good: int) -> tuple[str, bool]:
    """The error where step `num_good` is not sound; and whether the next sound step is right again."""
    model = Integers()
    reference = Reference(model, "weights")
    with wrapped(model) as ddp:
        for number in range(num_good):
            ddp.zero_grad()
            reference.clear()
            run(ddp, reference, "s", number)
        ddp.zero_grad()
        weight = give(dist.get_rank(), dist.get_world_size())
        if weight is not None:
            ddp.weight(weight)
        text = text_of(PhaseError, lambda: loss_of(ddp, 7).backward())
        for number in range(2):
            ddp.zero_grad()
            reference.clear()
            run(ddp, reference, "s", number)
            require_reference(ddp, reference, may_round=dist.get_world_size() > 2)
    return text, True


def only_first(rank: int, _num_ranks: int) -> float | None:
    return 3.0 if rank == 0 else None


def zero(_rank: int, _num_ranks: int) -> float | None:
    return 0.0


REMEDY = "  Call weight(n) before every backward on every rank, with 0 where a rank has nothing to learn from."


@pytest.mark.parametrize("num_good", [0, 2])
def test_weights_on_some_ranks_only_are_an_error_on_every_rank(ranks: Ranks, num_good: int) -> None:
    others = ", ".join(map(str, range(1, ranks.num_ranks)))
    who = "" if num_good == 0 else f": with rank 0, without rank {others}"
    for rank, (text, is_fine) in enumerate(ranks.run(errors_of_weights, only_first, num_good, timeout_s=TIMEOUT_S)):
        assert is_fine
        assert text == (
            f"weights were given on some ranks and not on others.\n  synchronisation {num_good}, rank {rank}{who}\n{REMEDY}"
        )


@pytest.mark.parametrize("num_good", [0, 2])
def test_weights_that_add_up_to_zero_are_an_error_on_every_rank(ranks: Ranks, num_good: int) -> None:
    for rank, (text, is_fine) in enumerate(ranks.run(errors_of_weights, zero, num_good, timeout_s=TIMEOUT_S)):
        assert is_fine
        assert text == (
            "the weights of all ranks add up to 0, and gradients cannot be divided by that.\n"
            f"  synchronisation {num_good}, rank {rank}\n"
            "  Leave out a step in which no rank has anything to learn from."
        )


def given_after_backward() -> tuple[str, list[float]]:
    """Unseen, a weight would be that of the next step. Then with a closure, whose backward comes within the step."""
    with wrapped(nn.Linear(3, 2)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
        loss_of(ddp, 0).backward()
        ddp.weight(3)
        text = text_of(PhaseError, optimizer.step)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ddp(torch.ones(4, 3)).sum()
            loss.backward()
            return loss

        ddp.weight(Fraction(4))  # a number like numpy's, of no type of Python's own
        optimizer.step(closure)
        return text, ddp.module.bias.grad.tolist()


def test_a_weight_behind_its_backward_is_an_error_when_the_optimizer_steps(two_ranks: Ranks) -> None:
    for rank, (text, bias) in enumerate(two_ranks.run(given_after_backward)):
        assert text == (
            "weight(3) was given, and no backward has come before the optimizer steps.\n"
            f"  SGD.step, rank {rank}\n"
            "  Call weight(n) before the backward of the loss that is a sum over n, not behind it."
        )
        assert bias == [1.0] * len(bias)


def handed_on(is_accumulated: bool) -> dict[str, Any]:
    """What is accumulated goes to another wrapper and to another group, and cannot take its weights along."""
    texts: dict[str, Any] = {}
    group = dist.new_group([0, 1])
    with wrapped(nn.Linear(3, 2)) as ddp:
        with ddp.accumulate():
            ddp.weight(4)
            if is_accumulated:
                loss_of(ddp, 0).backward()
        texts["group"] = text_of(ConfigError, lambda: ddp._update_process_group(group))
        texts["wrapper"] = text_of(ConfigError, lambda: DistributedDataParallel(ddp.module))
        loss_of(ddp, 1).backward()  # with all of the weight
        ddp._update_process_group(group)
        ddp.zero_grad()
        ddp.weight(4)
        ddp(torch.ones(4, 3)).sum().backward()
        texts["bias"] = ddp.module.bias.grad.unique().tolist()
    dist.destroy_process_group(group)
    return texts


@pytest.mark.parametrize("is_accumulated", [True, False])
def test_weights_are_not_handed_on_to_another_group_or_wrapper(two_ranks: Ranks, is_accumulated: bool) -> None:
    for rank, texts in enumerate(two_ranks.run(handed_on, is_accumulated)):
        text = (
            "weights were given for gradients that are not synchronised yet.\n"
            f"  another process group, or another wrapper; rank {rank}\n"
            "  Synchronise what is accumulated first: a backward outside of accumulate(), or reduce_gradients_async()."
        )
        assert texts == {"group": text, "wrapper": text, "bias": [1.0]}


def refusals() -> dict[str, str]:
    texts = {}
    with wrapped(Integers(), op="sum") as ddp:
        texts["sum"] = text_of(ConfigError, lambda: ddp.weight(3))
        texts["hook with sums"] = text_of(ConfigError, lambda: ddp.register_comm_hook(None, allreduce_hook))
    with wrapped(Integers()) as ddp:
        texts["text"] = text_of(WrongType, lambda: ddp.weight("3"))
        texts["negative"] = text_of(ConfigError, lambda: ddp.weight(-1))
        texts["not finite"] = text_of(ConfigError, lambda: ddp.weight(float("nan")))
        ddp.register_comm_hook(None, allreduce_hook)
        texts["hook"] = text_of(ConfigError, lambda: ddp.weight(3))
    with wrapped(Integers()) as ddp:
        ddp.weight(3)
        texts["hook with weights"] = text_of(ConfigError, lambda: ddp.register_comm_hook(None, allreduce_hook))
    return texts


ASK = "  weight(n)\n  Give how many tokens, or samples, the loss of the next backward is a sum over."
NO_HOOK = (
    'a communication hook divides gradients as it sees fit: it goes neither with op="sum" nor with weights.\n'
    "  register_comm_hook(state, hook)\n"
    "  Leave the hook out, or have it divide by what you want."
)


def test_what_does_not_go_with_weights_is_refused(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(refusals):
        assert texts == {
            "sum": 'weights divide gradients, and op="sum" does not.\n  weight(n)\n  Leave op="sum" or the weights out.',
            "hook with sums": NO_HOOK,
            "hook with weights": NO_HOOK,
            "hook": "with a communication hook it is the hook that divides gradients.\n"
            "  weight(n)\n"
            "  Divide the loss by the number of tokens of all ranks, or leave the hook out.",
            "text": f"a weight must be a number, got str.\n{ASK}",
            "negative": f"a weight must be a number from 0 on, got -1.\n{ASK}",
            "not finite": f"a weight must be a number from 0 on, got nan.\n{ASK}",
        }


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize(
    ("letters", "weights"), [("as", (0, 3)), ("as", (3, 0)), ("aas", (0, 0, 3)), ("ss", (3, 0)), ("sas", (3, 0, 2))]
)
def test_micro_batches_of_weight_zero_add_what_they_have(letters: str, weights: Sequence[int], strategy: str) -> None:
    """Of some micro-batches, on every rank: the result is the sum of gradients over the sum of weights all the same."""
    model = Integers()
    bare = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy))
    try:
        optimizer = (
            torch.optim.SGD(model.parameters(), lr=0.0) if strategy == "ddp" else ShardedOptimizer(torch.optim.SGD, ddp, lr=0.0)
        )
        for step in range(3):
            optimizer.zero_grad()
            bare.zero_grad()
            for number, (letter, weight) in enumerate(zip(letters, weights, strict=True)):
                ddp.weight(weight)
                with ddp.accumulate() if letter == "a" else contextlib.nullcontext():
                    loss_of(ddp, 10 * step + number).backward()
                loss_of(bare, 10 * step + number).backward()
            for ours, wanted in zip(model.parameters(), bare.parameters(), strict=True):
                expected = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
                dist.all_reduce(expected)
                expected /= dist.get_world_size() * sum(weights)
                got = ddp.full_gradient(ours)
                # A division for each synchronisation, in fp32.
                tolerance = 4 * torch.finfo(torch.float32).eps * float(expected.abs().max())
                torch.testing.assert_close(torch.zeros_like(ours) if got is None else got, expected, rtol=0.0, atol=tolerance)
            optimizer.step()
    finally:
        ddp.close()


def nothing_in_all_micro_batches(strategy: str) -> str:
    ddp = DistributedDataParallel(Integers(), config=SyncConfig(strategy=strategy))
    try:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.0)
        ddp.weight(1)
        loss_of(ddp, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp.weight(0)
        with ddp.accumulate():
            loss_of(ddp, 1).backward()
        ddp.weight(0)
        return text_of(PhaseError, lambda: loss_of(ddp, 2).backward())
    finally:
        ddp.close()


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_a_step_of_weight_zero_is_an_error_when_it_ends(two_ranks: Ranks, strategy: str) -> None:
    for text in two_ranks.run(nothing_in_all_micro_batches, strategy, timeout_s=TIMEOUT_S):
        assert text.startswith("the weights of all ranks add up to 0, and gradients cannot be divided by that.")


def too_late_for_eager_steps(has_weights: tuple[bool, ...], has_data: tuple[bool, ...], strategy: str) -> str:
    """The error of the third step, after which parameters are what they were, and training goes on without weights."""
    rank, model = dist.get_rank(), Integers()
    ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy, bucket_cap_mb=1e-6))
    try:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=2.0**-10, eager=True)

        def train(number: int) -> None:
            optimizer.zero_grad()
            loss_of(ddp, number).backward()
            optimizer.step()
            ddp.wait()

        for number in range(2):
            train(number)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        if has_weights[rank]:
            ddp.weight(3)
        text = text_of(PhaseError, (lambda: loss_of(ddp, 2).backward()) if has_data[rank] else ddp.finish)
        ddp.wait()
        assert all(map(torch.equal, before, model.parameters()))
        train(3)
        assert not torch.equal(before[0], model.layers[0].weight)
        return text
    finally:
        ddp.close()


DIFFER = f"weights were given on some ranks and not on others.\n  {{where}}\n{REMEDY}"
TOO_LATE = (
    "weights come for the first time in a step of eager form, which divides before all ranks are known to have some.\n"
    "  {where}\n"
    "  The parameters are as they were: drop the gradients. Give weights from the first step on, or leave eager=True out."
)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize(
    ("has_weights", "has_data", "text"),
    [
        ((True, True), (True, True), TOO_LATE),
        ((True, False), (True, True), DIFFER),
        ((False, True), (True, True), DIFFER),
        ((True, False), (True, False), TOO_LATE),
    ],
    ids=["all", "rank 0", "rank 1", "rank 0, and rank 1 has no data"],
)
def test_weights_of_eager_steps_begin_with_the_first(
    two_ranks: Ranks, has_weights: tuple[bool, ...], has_data: tuple[bool, ...], text: str, strategy: str
) -> None:
    answers = two_ranks.run(too_late_for_eager_steps, has_weights, has_data, strategy, timeout_s=TIMEOUT_S)
    assert answers == [text.format(where=f"synchronisation 2, rank {rank}") for rank in range(2)]


def unsound_weights_in_eager_form(give: Callable[[int, int], float | None], strategy: str) -> str:
    """The error of the third step, after which parameters are what they were, and training with weights goes on."""
    model = Integers()
    ddp = DistributedDataParallel(model, config=SyncConfig(strategy=strategy, bucket_cap_mb=1e-6))
    try:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=2.0**-10, momentum=0.5, weight_decay=0.5, eager=True)

        def backward(number: int, weight: float | None) -> None:
            optimizer.zero_grad()
            if weight is not None:
                ddp.weight(weight)
            loss_of(ddp, number).backward()

        for number in range(2):
            backward(number, weight_of(number))
            optimizer.step()
        ddp.wait()
        before = [param.detach().clone() for param in model.parameters()]
        text = text_of(PhaseError, lambda: backward(2, give(dist.get_rank(), dist.get_world_size())))
        ddp.wait()
        assert all(map(torch.equal, before, model.parameters()))
        backward(3, weight_of(3))
        optimizer.step()
        ddp.wait()
        assert not torch.equal(before[0], model.layers[0].weight)
        return text
    finally:
        ddp.close()


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize(
    ("give", "text"),
    [(only_first, "weights were given on some ranks and not on others.\n"), (zero, "the weights of all ranks add up to 0")],
)
def test_weights_that_are_not_sound_update_nothing_in_eager_form(
    two_ranks: Ranks, give: Callable[[int, int], float | None], text: str, strategy: str
) -> None:
    for found in two_ranks.run(unsound_weights_in_eager_form, give, strategy, timeout_s=TIMEOUT_S):
        assert found.startswith(text)


def alone_with_shards() -> tuple[str, str]:
    group = groups_of(*[[rank] for rank in range(dist.get_world_size())])[0]
    texts = []
    with wrapped(nn.Linear(2, 2), process_group=group) as ddp:
        _optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
        texts.append(text_of(ConfigError, lambda: ddp.weight(3)))
    with wrapped(nn.Linear(2, 2), process_group=group) as ddp:
        ddp.weight(3)
        texts.append(text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)))
    dist.destroy_process_group(group)
    return texts[0], texts[1]


def test_weights_of_a_rank_alone_are_refused_with_shards(two_ranks: Ranks) -> None:
    text = (
        "weights with a ShardedOptimizer are not built for a rank alone.\n"
        "  weight(n)\n"
        "  Divide the loss by the weight, or use a plain optimizer there."
    )
    assert two_ranks.run(alone_with_shards) == [(text, text)] * 2


@contextlib.contextmanager
def counting_collectives() -> Iterator[list[int]]:
    """How many elements each all-reduce has, of those that Python starts."""
    numels: list[int] = []
    start = dist.all_reduce

    def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        numels.append(tensor.numel())
        return start(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        yield numels
    finally:
        dist.all_reduce = start


def collectives_of_a_step() -> tuple[int, list[int]]:
    with wrapped(Integers(), auto_tune=False, record="off") as ddp:
        for number in range(3):
            ddp.zero_grad()
            ddp.weight(weight_of(number))
            loss_of(ddp, number).backward()
        ddp.zero_grad()
        with counting_collectives() as numels:
            ddp.weight(1)
            loss_of(ddp, 1).backward()
        return len(ddp.plan.buckets), numels


def test_weights_cost_one_small_all_reduce_that_leaves_first(ranks: Ranks) -> None:
    for num_buckets, numels in ranks.run(collectives_of_a_step):
        assert len(numels) == num_buckets + 1
        assert numels[0] == 1 + ranks.num_ranks


def test_a_sum_is_a_setting_of_all_ranks() -> None:
    assert SyncConfig.from_json(SyncConfig(op="sum").to_json()).op == "sum"
