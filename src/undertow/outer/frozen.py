"""The parameters that replicas do not exchange: all ranks are told if they differ."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from undertow.buckets.fingerprints import fingerprints
from undertow.engine.checks import has_bits
from undertow.engine.params import ModuleParams
from undertow.mesh.local_tensors import local_tensor
from undertow.outer.facts import MODULO, first_that_differs
from undertow.ranks.transport import OwnGroup

_MOST_VALUES = 64  # of a parameter in its sample


class Frozen:
    """Compares a sample of each frozen parameter with every exchange, if it `is_needed`.

    It is cheap, and finds writes to most of a parameter, as when an adapter is merged.
    `check_replicas_every` compares all values instead.
    """

    def __init__(self, members: ModuleParams, *, is_needed: bool) -> None:
        self.known: set[int] = set()  # parameters in fragments, by id
        self._members = members
        self._is_quiet = not is_needed

    def digest(self, device: torch.device) -> float | Tensor:
        """Returns a number below `MODULO`; the host does not wait for it."""
        samples = () if self._is_quiet else self._samples().values()
        if not samples:
            return 0.0
        together = torch.cat([sample.to(device) for sample in samples])
        return fingerprints([together], device=device)[0] % MODULO

    def _samples(self) -> dict[str, Tensor]:
        """Returns bytes of each frozen parameter, by name."""
        found = {}
        for name, param in self._members.named_params():
            if id(param) not in self.known and param.numel() and has_bits(param):
                flat = local_tensor(param.detach()).reshape(-1)
                few = flat[:: max(1, flat.numel() // _MOST_VALUES)]
                found[name] = few.contiguous().view(torch.uint8)
        return found

    def tell(self, group: OwnGroup, *, where: str) -> None:
        """Warns once that they differ; every rank calls this."""
        if self._is_quiet:
            return
        samples = self._samples()
        values = fingerprints(list(samples.values()), device=group.device)
        name = first_that_differs(group, dict(zip(samples, values, strict=True)))
        self._is_quiet = True
        warnings.warn(
            f"replicas have different values of the frozen parameter {name!r}, which they never "
            f"exchange.\n  {where}, rank {group.name}\n"
            "  If an adapter was merged into it, write the same values on every rank: compute them "
            "inside of model.outer.synchronized(). If each replica writes into it, as for a "
            "teacher, ignore this.",
            stacklevel=2,
        )
