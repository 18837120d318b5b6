"""What is called around a scaler's look at gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from undertow.runtime import private_scaling


@pytest.mark.parametrize("how", ["unscale_", "step", "fused step"])
def test_what_is_around_unscaling_is_called_wherever_a_scaler_looks(how: str) -> None:
    param, seen = torch.ones(2, requires_grad=True), list[str]()
    optimizer = torch.optim.SGD([param], lr=1.0, fused=how == "fused step")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def around(name: str, looking: torch.optim.Optimizer, look: private_scaling.Look) -> private_scaling.Found:
        seen.append(f"{name} begins with {'it' if looking is optimizer else 'another'}")
        found = look()
        seen.append(f"{name} ends")
        return {device: torch.ones_like(value) for device, value in found.items()}

    original = torch.amp.GradScaler._unscale_grads_
    undo = [private_scaling.around_unscaling(partial(around, name)) for name in ("first", "second")]
    scaler.scale(param.sum()).backward()
    if how == "unscale_":
        scaler.unscale_(optimizer)
        assert param.grad is not None
        assert param.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    scaler.update()
    assert seen == ["first begins with it", "second begins with it", "second ends", "first ends"]
    assert (param.tolist(), scaler.get_scale()) == ([1.0, 1.0], 2.0)  # skipped, for they have said so
    for each in undo:
        assert torch.amp.GradScaler._unscale_grads_ is not original
        each()
    assert torch.amp.GradScaler._unscale_grads_ is original
