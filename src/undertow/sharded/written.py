"""Gradients that a sharded optimizer finds whole, because a program has written them.

Each rank steps on its own part of them. So they must be the same on every rank, as
`average_gradients` and `full_gradient` return them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from undertow.buckets.fingerprints import fingerprints
from undertow.engine.agreed_errors import told_to_places
from undertow.engine.step_settings import Settings, written_differ, written_gradients
from undertow.ranks.agreement import Extremes
from undertow.ranks.transport import OwnGroup

_COMPARISON = "the comparison of gradients that no synchronization has averaged"
_NOT_WRITTEN = 0


def require_alike(group: OwnGroup, names: Sequence[str], written: Mapping[int, Tensor]) -> None:
    """Raises ReplicaMismatch on every rank unless all ranks have written the same; a collective
    call.

    `names` are of all parameters, and `written` has this rank's gradients by their indices.
    """
    values = torch.full((len(names),), _NOT_WRITTEN, dtype=torch.int64, device=group.device)
    if written:
        # A gradient of zeros has the fingerprint 0.
        values[list(written)] = _fingerprints(written, group.device) + 1
    extremes = Extremes(group, values, _COMPARISON)
    differing = extremes.differing()
    if not differing:
        return
    of_ranks = [value for _, value, _ in extremes.of_ranks(differing[0])]
    with told_to_places(group):
        raise written_differ(
            names[differing[0]],
            dict(zip(group.names, of_ranks, strict=True)),
            where="a step of a sharded optimizer without a synchronization since the one before; "
            f"{len(differing)} of {len(names)} gradients differ",
            remedy="On every rank, write g = undertow.average_gradients(g, parameters) before you "
            "assign a gradient that is this rank's own.",
        )


def as_settings(names: Sequence[str], written: Mapping[int, Tensor]) -> Settings:
    """Returns the gradients that this rank has written as settings of its step."""
    values = _fingerprints(written, torch.device("cpu")).tolist()
    return written_gradients(
        {names[index]: value for index, value in zip(written, values, strict=True)}
    )


def _fingerprints(written: Mapping[int, Tensor], device: torch.device) -> Tensor:
    return fingerprints([grad.to_dense() for grad in written.values()], device=device)
