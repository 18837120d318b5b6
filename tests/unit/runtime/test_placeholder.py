"""The gradient of a parameter of which a rank has a shard."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.errors import text_of
from undertow.errors import ShardedGradientError
from undertow.runtime.placeholder import GradientPlaceholder

REMEDY = "Clip with optimizer.clip_grad_norm_(), look at all of it with sync.full_gradient(param), or zero_grad() first."


def linear() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    for name, param in layer.named_parameters():
        param.grad = GradientPlaceholder(param, name=name)
    return layer


def test_it_looks_like_the_gradient() -> None:
    grad = linear().weight.grad
    assert (grad.shape, grad.dtype, grad.device.type) == ((2, 3), torch.float32, "cpu")
    assert repr(grad) == ("GradientPlaceholder('weight', shape=(2, 3), dtype=torch.float32): a shard of it is here")
    assert grad.detach() is grad


USES: dict[str, Callable[[nn.Linear], object]] = {
    "norm": lambda layer: layer.weight.grad.norm(),
    "clipping": lambda layer: nn.utils.clip_grad_norm_(layer.parameters(), 1.0),
    "clipping of values": lambda layer: nn.utils.clip_grad_value_(layer.parameters(), 1.0),
    "scaling": lambda layer: layer.weight.grad.mul_(2),
    "adding two": lambda layer: layer.weight.grad.add_(layer.weight.grad),
    "copy": lambda layer: layer.weight.grad.clone(),
    "item": lambda layer: layer.weight.grad[0, 0].item(),
    "optimizer": lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1).step(),
    "fused optimizer": lambda layer: torch.optim.AdamW(layer.parameters(), fused=True).step(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_raises_with_the_way_out(use: Callable[[nn.Linear], object]) -> None:
    layer = linear()
    before = layer.weight.detach().clone()
    with pytest.raises(ShardedGradientError, match=rf"is sharded: no rank has all of it\.\n.*\n  {re.escape(REMEDY)}$"):
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
    assert layer.weight.grad is held
    assert torch.equal(held.added, bare.weight.grad)


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
