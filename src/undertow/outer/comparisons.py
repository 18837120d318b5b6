"""Compares parameters that must have equal bits on the ranks of all replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from undertow.buckets.fingerprints import fingerprints
from undertow.engine.checks import mismatch
from undertow.engine.params import ModuleParams
from undertow.mesh.local_tensors import local_tensors
from undertow.outer.facts import first_that_differs
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup

_WRITES = (
    "Look for what writes to global parameters on some ranks only; broadcast_parameters() makes "
    "them equal again."
)

_WRITES_FROZEN = (
    "Replicas never exchange frozen parameters: write the same values on every rank, as when "
    "adapters are merged. broadcast_parameters() makes all parameters equal again."
)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A comparison of fingerprints on its way: one of each global parameter of a fragment, and one
    of all frozen parameters, which may be others on each rank."""

    names: list[str]
    frozen: dict[str, Tensor]  # this rank's fingerprints
    received: Handle


class Comparisons:
    """The comparisons on their way over `all_ranks`; `members` has the frozen parameters."""

    def __init__(self, all_ranks: OwnGroup, members: ModuleParams) -> None:
        self._all_ranks, self._members = all_ranks, members
        self._on_their_way: deque[_Compared] = deque()

    def start(self, values: Mapping[str, Tensor], known: set[int]) -> None:
        """Starts a comparison of these global parameters, and of all parameters that are not
        `known`, by id: they are in no fragment."""
        device = self._all_ranks.device
        frozen = {
            name: param for name, param in self._members.named_params() if id(param) not in known
        }
        of_frozen = fingerprints(local_tensors(frozen.values()), device=device)
        of_all = of_frozen.sum().view(1)
        mine = torch.cat([fingerprints(list(values.values()), device=device), of_all])
        what = "the comparison of all ranks' global parameters"
        received = self._all_ranks.all_gather(mine, what)
        by_name = dict(zip(frozen, of_frozen, strict=True))
        self._on_their_way.append(_Compared(list(values), by_name, received))

    def require_alike(self, step: int) -> None:
        """Waits for the comparisons; raises ReplicaMismatch on every rank if global parameters
        differ, or frozen ones."""
        while self._on_their_way:
            compared = self._on_their_way.popleft()
            names = compared.names
            of_ranks = compared.received.result().tolist()
            differing = [
                place
                for place, values in enumerate(zip(*of_ranks, strict=True))
                if len(set(values)) > 1
            ]
            if differing:
                first = differing[0]
                if first < len(names):
                    name, kind, remedy = names[first], "global", _WRITES
                else:
                    name = first_that_differs(self._all_ranks, compared.frozen)
                    kind, remedy = "frozen", _WRITES_FROZEN
                raise mismatch(
                    name,
                    {
                        rank: values[first]
                        for rank, values in zip(self._all_ranks.names, of_ranks, strict=True)
                    },
                    where=f"{kind} parameters, step {step}",
                    remedy=remedy,
                )
