"""Subclasses of torch's class that frameworks make, on top of Undertow's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _find_tensors

from support.frameworks import Wrapper, same_as_torch, state_of
from support.models import noise
from support.ranks import Ranks


class Trainable(nn.Module):
    """A module that is trained by a method other than forward; every second step leaves a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.extra = nn.Linear(6, 1)

    def train_step(self, x: Tensor, *, with_extra: bool) -> dict[str, Tensor]:
        outputs = self.net(x) + (self.extra(x) if with_extra else 0.0)
        return {"loss": outputs.square().mean()}


def past_forward(wrapper: Wrapper) -> dict[str, Tensor]:
    """As OpenMMLab's wrapper: what torch's forward does around the module, done around another method of it."""

    class Redirecting(wrapper):
        def train_step(self, *inputs: Any, **kwargs: Any) -> Any:
            self.reducer._rebuild_buckets()
            if self._check_sync_bufs_pre_fwd():
                self._sync_buffers()
            outputs = self.module.train_step(*inputs, **kwargs)
            if self._check_sync_bufs_post_fwd():
                self._sync_buffers()
            self.reducer.prepare_for_backward(list(_find_tensors(outputs)))
            return outputs

    ddp = Redirecting(module := Trainable(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(4):
        loss = ddp.train_step(noise(4, 6, step=step), with_extra=step % 2 == 0)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state_of(module)


def test_a_subclass_may_run_the_module_past_forward(framework_ranks: Ranks) -> None:
    same_as_torch(framework_ranks, past_forward)
