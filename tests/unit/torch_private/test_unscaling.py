"""What Undertow relies on in a GradScaler."""

from functools import partial

import pytest
import torch

from undertow.torch_private import unscaling


@pytest.mark.parametrize("how", ["unscale_", "step", "fused step"])
def test_what_is_around_unscaling_is_called_wherever_a_scaler_looks(how: str) -> None:
    param, seen = torch.ones(2, requires_grad=True), list[str]()
    optimizer = torch.optim.SGD([param], lr=1.0, fused=how == "fused step")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def around(name: str, looking: torch.optim.Optimizer, unscale: unscaling.Unscale) -> unscaling.Found:
        seen.append(f"{name} begins with {'it' if looking is optimizer else 'another'}")
        found = unscale()
        seen.append(f"{name} ends")
        return {device: torch.ones_like(value) for device, value in found.items()}

    original = torch.amp.GradScaler._unscale_grads_
    undo = [unscaling.around_unscaling(partial(around, name)) for name in ("first", "second")]
    scaler.scale(param.sum()).backward()
    if how == "unscale_":
        scaler.unscale_(optimizer)
        assert param.grad.tolist() == [1.0, 1.0]
    scaler.step(optimizer)
    scaler.update()
    # Skipped, for they have said so.
    assert (seen, param.tolist(), scaler.get_scale()) == (
        ["first begins with it", "second begins with it", "second ends", "first ends"],
        [1.0, 1.0],
        2.0,
    )
    for each in undo:
        assert torch.amp.GradScaler._unscale_grads_ is not original
        each()
    assert torch.amp.GradScaler._unscale_grads_ is original


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_fused_step_unscales_by_itself(is_fused: bool) -> None:
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=1.0, fused=is_fused)
    assert unscaling.is_done_by_step(optimizer) == is_fused


def test_gradients_are_unscaled_and_zeroed_together() -> None:
    grads, found = [torch.ones(2), torch.full((2,), torch.inf)], torch.zeros(1)
    unscaling.unscale_each(grads, found, torch.tensor([0.5]))
    assert (grads[0].tolist(), found.item()) == ([0.5, 0.5], 1)
    unscaling.zero_each(grads)
    assert [grad.tolist() for grad in grads] == [[0, 0]] * 2
