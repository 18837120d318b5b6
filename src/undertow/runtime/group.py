"""Process groups of our own, and small exchanges over them."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from undertow.errors import ConfigError, PhaseError, PlanMismatch
from undertow.runtime import private

# Backends that divide inside the collective; for others we divide before a sum.
_BACKENDS_WITH_AVERAGE = ("gloo", "nccl", "xccl", "emulated")


class OwnGroup:
    """A clone of the user's process group: our collectives never interleave with the user's own.

    It is held weakly, for torch.distributed owns it: a process whose groups are held by somebody else when they are
    destroyed may abort at exit.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: torch.device) -> None:
        self._group = weakref.ref(group)
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.backend = dist.get_backend(group)
        self.device = device  # where small tensors of exchanges live

    @property
    def process_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None or not dist.is_initialized():
            raise PhaseError(
                "the process group of this model has been destroyed.",
                where="gradient synchronisation",
                remedy="Call torch.distributed.destroy_process_group() after the last backward.",
            )
        return group

    @property
    def is_alive(self) -> bool:
        """Whether torch.distributed still has the group."""
        return self._group() is not None and dist.is_initialized()

    @property
    def can_average(self) -> bool:
        return any(name in self.backend for name in _BACKENDS_WITH_AVERAGE)

    def close(self) -> None:
        """Destroys the clone; does nothing if torch.distributed has done so already."""
        group = self._group()
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def user_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The given group, or the default one; ConfigError, with the way out, where there is none."""
    if process_group is not None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ConfigError(
                f"process_group must be a torch.distributed.ProcessGroup, got {type(process_group).__name__}.",
                remedy="Pass what torch.distributed.new_group() returned; a rank outside of the group does not wrap.",
            )
        return process_group
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "torch.distributed is not initialised.",
            where="no default process group exists in this process",
            remedy='Call torch.distributed.init_process_group("gloo") (or "nccl") first, and start the ranks with '
            "torchrun --nproc-per-node=2 script.py.",
        )
    return dist.group.WORLD  # type: ignore[return-value]


def own_group(process_group: dist.ProcessGroup, *, device: torch.device) -> OwnGroup:
    """Clones `process_group`; a collective call."""
    ranks = dist.get_process_group_ranks(process_group)
    clone = dist.new_group(
        ranks,
        timeout=private.timeout_of(process_group),
        backend=dist.get_backend(process_group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="undertow",
    )
    assert isinstance(clone, dist.ProcessGroup)  # this rank is a member
    return OwnGroup(clone, device=device)


def gather_bytes(group: OwnGroup, payload: bytes) -> list[bytes]:
    """What every rank has given, in rank order; nothing is unpickled."""
    sizes = _all_gather(group, torch.tensor([len(payload)], dtype=torch.int64))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(max(1, longest), dtype=torch.uint8)
    padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    received = _all_gather(group, padded)
    return [bytes(row[: int(size)].tolist()) for row, size in zip(received, sizes, strict=True)]


def require_agreement(
    group: OwnGroup, *, settings: dict[str, Any], params: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] = ()
) -> None:
    """Returns where all ranks have the same settings, parameters and other tensors; else PlanMismatch on every one."""
    text = json.dumps({"settings": settings, "params": list(params), "others": list(others)}, sort_keys=True).encode()
    digests = gather_bytes(group, hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    described = [json.loads(received) for received in gather_bytes(group, text)]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    raise _mismatch(described[0], described[other], other, fingerprints=[digest.hex()[:4] for digest in digests])


def _all_gather(group: OwnGroup, tensor: torch.Tensor) -> list[torch.Tensor]:
    mine = tensor.to(group.device)
    received = [torch.empty_like(mine) for _ in range(group.num_ranks)]
    dist.all_gather(received, mine, group=group.process_group)
    return [row.cpu() for row in received]


def _mismatch(first: dict[str, Any], second: dict[str, Any], rank: int, *, fingerprints: Sequence[str]) -> PlanMismatch:
    def summary(number: int, described: dict[str, Any]) -> str:
        return f"rank {number}: {len(described['params'])} parameters, fingerprint {fingerprints[number]}"

    remedy = "Build the model the same way on every rank before wrapping it."
    if difference := _tensor_difference(first["params"], second["params"], rank, kind="parameter"):
        what = "ranks disagree on the parameters."
    elif difference := _tensor_difference(first["others"], second["others"], rank, kind="tensor"):
        what = "ranks disagree on the frozen parameters or the buffers."
    else:
        what, remedy = "ranks disagree on the settings.", "Give every rank the same settings and the same version of torch."
        difference = _setting_difference(first["settings"], second["settings"], rank)
    where = f"{summary(0, first)}   {summary(rank, second)}\n  first difference: {difference}"
    return PlanMismatch(what, where=where, remedy=remedy)


def _tensor_difference(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], rank: int, *, kind: str) -> str | None:
    for index in range(max(len(first), len(second))):
        mine = first[index] if index < len(first) else None
        theirs = second[index] if index < len(second) else None
        if mine == theirs:
            continue
        if mine is None or theirs is None or mine["name"] != theirs["name"]:
            return f"{kind} {index} is {_named(mine)} on rank 0 and {_named(theirs)} on rank {rank}"
        field = next(key for key in mine if mine[key] != theirs[key])
        return f"{field} of {kind} {index} ({mine['name']!r}) is {mine[field]} on rank 0 and {theirs[field]} on rank {rank}"
    return None


def _setting_difference(first: dict[str, Any], second: dict[str, Any], rank: int) -> str:
    name = next(key for key in (*first, *second) if first.get(key) != second.get(key))
    return f"{name} is {first.get(name)!r} on rank 0 and {second.get(name)!r} on rank {rank}"


def _named(spec: dict[str, Any] | None) -> str:
    return "missing" if spec is None else repr(spec["name"])
