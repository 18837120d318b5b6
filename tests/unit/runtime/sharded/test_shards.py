"""Parameters in the memory of their bucket, the optimizer over the parts of a rank, and placeholders of gradients."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from support.errors import text_of
from support.strategies import spec
from undertow import ShardedGradientError
from undertow.optim.state import InnerOptimizer, Owned
from undertow.plan import plan_from_groups
from undertow.runtime.sharded.binding import GradientPlaceholder
from undertow.runtime.sharded.shards import FlatParams, ShardPart, shard_parts
from undertow.runtime.torch_private import private


def flat_of_a_weight() -> FlatParams:
    """What the first of two ranks has of the only parameter of a bucket."""
    (bucket,) = plan_from_groups([spec("weight", 8)], ((0,),), num_ranks=2).buckets
    return FlatParams(bucket, [nn.Parameter(torch.ones(8))], shard_parts(bucket, rank=0), num_ranks=2)


def test_a_parameter_is_shared_while_another_tensor_has_its_memory() -> None:
    flat = flat_of_a_weight()
    assert not private.are_shared(flat.addresses)
    kept = flat.params[0].data
    assert private.are_shared(flat.addresses)
    del kept
    assert not private.are_shared(flat.addresses)


def sixteen_bits() -> tuple[InnerOptimizer, Owned]:
    values = torch.linspace(-1, 1, 64, dtype=torch.bfloat16)
    owned = Owned(
        part=ShardPart(param=0, bucket=0, start=0, stop=64, in_bucket=0, in_shard=0),
        param=values,
        values=values,
        target=values.float(),
    )
    return InnerOptimizer([owned], torch.optim.SGD([owned.target], lr=1e-3, momentum=0.9)), owned


def test_an_interrupted_update_of_sixteen_bits_loses_nothing() -> None:
    def interrupted(optimizer: torch.optim.Optimizer) -> None:
        step_unwatched(optimizer)
        raise KeyboardInterrupt

    step_unwatched = private.step_unwatched
    grad: Any = torch.full((64,), 0.5)
    (expected, whole), (actual, mine) = sixteen_bits(), sixteen_bits()
    for step in range(3):
        expected.step([{}], lambda _parts: [grad])
        if step == 1:
            with mock.patch.object(private, "step_unwatched", interrupted), pytest.raises(KeyboardInterrupt):
                actual.step([{}], lambda _parts: [grad])
        else:
            actual.step([{}], lambda _parts: [grad])
        assert (torch.equal(mine.target, whole.target), torch.equal(mine.values, whole.target.bfloat16())) == (True, True)


REMEDY = "Clip with optimizer.clip_grad_norm_(), look at all of it with model.full_gradient(param), or zero_grad() first."


def linear() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    for name, param in layer.named_parameters():
        param.grad = GradientPlaceholder(param, name=name)
    return layer


def test_it_looks_like_the_gradient() -> None:
    grad = linear().weight.grad
    assert (grad.shape, grad.dtype, grad.device.type, repr(grad)) == (
        (2, 3),
        torch.float32,
        "cpu",
        "GradientPlaceholder('weight', shape=(2, 3), dtype=torch.float32): a shard of it is here",
    )
    assert grad.detach() is grad


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda layer: layer.weight.grad.norm(), id="norm"),
        pytest.param(lambda layer: nn.utils.clip_grad_norm_(layer.parameters(), 1.0), id="clipping"),
        pytest.param(lambda layer: nn.utils.clip_grad_value_(layer.parameters(), 1.0), id="clipping of values"),
        pytest.param(lambda layer: layer.weight.grad.mul_(2), id="scaling"),
        pytest.param(lambda layer: layer.weight.grad.add_(layer.weight.grad), id="adding two"),
        pytest.param(lambda layer: layer.weight.grad.clone(), id="copy"),
        pytest.param(lambda layer: layer.weight.grad[0, 0].item(), id="item"),
        pytest.param(lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1).step(), id="optimizer"),
        pytest.param(lambda layer: torch.optim.AdamW(layer.parameters(), fused=True).step(), id="fused optimizer"),
    ],
)
def test_every_use_raises_with_the_way_out(use: Callable[[nn.Linear], object]) -> None:
    layer = linear()
    before = layer.weight.detach().clone()
    with pytest.raises(ShardedGradientError, match=rf"is sharded: no rank has all of it\.\n.*\n  {re.escape(REMEDY)}\n"):
        use(layer)
    assert torch.equal(layer.weight, before)


def test_the_error_names_the_parameter_and_the_operation() -> None:
    assert text_of(ShardedGradientError, lambda: linear().bias.grad.sum()) == (
        f"the gradient of 'bias' is sharded: no rank has all of it.\n  aten.sum.default\n  {REMEDY}"
    )


def test_a_later_backward_adds_to_it() -> None:
    layer, bare = linear(), nn.Linear(3, 2)
    bare.load_state_dict(layer.state_dict())
    held = layer.weight.grad
    for model in (layer, bare):
        for scale in (1.0, 2.0):
            model(torch.full((1, 3), scale)).sum().backward()
    assert (layer.weight.grad is held, torch.equal(held.added, bare.weight.grad)) == (True, True)


@pytest.mark.parametrize("foreach", [True, False])
def test_zeroing_clears_it(foreach: bool) -> None:
    layer = linear()
    layer(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(layer.parameters(), foreach=foreach).zero_grad(set_to_none=False)
    assert (layer.weight.grad.is_cleared, layer.weight.grad.added) == (True, None)


def test_a_scaler_unscales_the_parts() -> None:
    layer, part = linear(), torch.tensor([4.0, 8.0])
    layer.weight.grad.parts[0] = part
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(layer.parameters()))
    assert part.tolist() == [1.0, 2.0]
