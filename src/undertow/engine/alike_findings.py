"""Makes ranks skip the same steps under a gradient scaler, if each has checked other gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from undertow.engine.params import ModuleParams
from undertow.engine.progress import params_of
from undertow.engine.step_events import StepListener
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import unscaling


class AlikeFindings(StepListener):
    """Makes a scaler's finding the same on all ranks of `group`, if an optimizer has parameters of
    these `members`.

    Each rank has checked only its own experts, or its parts of the parameters on a mesh, and all
    must skip the same steps. Costs one all-reduce of one number, for every optimizer that holds a
    parameter of the model, an expert or not: which experts are trained may differ from group to
    group.
    """

    def __init__(self, group: OwnGroup, members: Sequence[ModuleParams]) -> None:
        self._group, self._members = group, members

    def unscaling_ends(self, optimizer: Optimizer, found: unscaling.Found) -> unscaling.Found:
        group = self._group
        if group.num_ranks == 1:
            return found
        # By id: a comparison of tensors would wait for gathers.
        stepped = set(map(id, params_of(optimizer)))
        if not any(members.has_any_of(stepped) for members in self._members):
            return found
        device = group.device
        on_any = torch.stack(
            [torch.zeros((), device=device), *(each.to(device) for each in found.values())]
        ).amax()
        what = "whether all ranks' gradients are finite"
        group.all_reduce(on_any, what, dist.ReduceOp.MAX).wait()
        # If none of a rank's experts was used it has checked nothing, which scalers reject.
        return {place: on_any.to(place, copy=True) for place in found or (device,)}
