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

# What a rank may have of a parameter's gradient: nothing, a shard of the mean, or a whole gradient,
# which has its fingerprint after these.
_NOTHING, _SHARD, _WHOLE = range(3)


def require_alike(
    group: OwnGroup,
    names: Sequence[str],
    gradients: Mapping[int, Tensor | None],
    *,
    where: str,
    remedy: str,
) -> None:
    """Raises ReplicaMismatch on every rank unless all ranks have the same gradients; a collective
    call.

    `names` are of all parameters. `gradients` has those on this rank, by the parameters' indices:
    None for a shard, or a whole gradient that a program has written.
    """
    if group.num_ranks == 1:
        return
    states = [_NOTHING] * len(names)
    written: dict[int, Tensor] = {}
    for index, grad in gradients.items():
        if grad is None:
            states[index] = _SHARD
        else:
            written[index] = grad
    values = torch.tensor(states, dtype=torch.int64, device=group.device)
    if written:
        # A gradient of zeros has the fingerprint 0.
        values[list(written)] = _fingerprints(written, group.device) + _WHOLE
    extremes = Extremes(group, values, f"the comparison of gradients: {where}")
    differing = extremes.differing()
    if not differing:
        return
    of_ranks = [value for _, value, _ in extremes.of_ranks(differing[0])]
    with told_to_places(group):
        raise written_differ(
            names[differing[0]],
            dict(zip(group.names, of_ranks, strict=True)),
            where=f"{where}; {len(differing)} of {len(names)} gradients differ",
            remedy=remedy,
        )


def as_settings(names: Sequence[str], written: Mapping[int, Tensor]) -> Settings:
    """Returns the gradients that this rank has written as settings of its step."""
    values = _fingerprints(written, torch.device("cpu")).tolist()
    return written_gradients(
        {names[index]: value for index, value in zip(written, values, strict=True)}
    )


def _fingerprints(written: Mapping[int, Tensor], device: torch.device) -> Tensor:
    return fingerprints([grad.to_dense() for grad in written.values()], device=device)
