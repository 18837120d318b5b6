"""Torch's private API for process groups and their store."""

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

_c10d: Any = torch.distributed.distributed_c10d
# The store that the ranks of the default group have met through.
default_store: Callable[[], Any] = _c10d._get_default_store

_NOBODYS_TAG = (1 << 30) + 1  # no message ever has this tag


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout of `group`'s collectives, or None, which means the backend's default, if
    it does not tell."""
    with contextlib.suppress(AttributeError, IndexError, RuntimeError):
        return group._get_backend(group._device_types[0]).options._timeout
    return None


def name_of(ranks: Sequence[int]) -> str:
    """Returns a short name for these ranks, the same in every process.

    It is part of keys of torch's store, which refuses keys above 8 KB.
    """
    return hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:24]


def new_name() -> str:
    """Returns a name for a process group that no other one has, of torch or of Undertow; one rank
    of the group calls this and tells the others.

    Gloo puts it in each of its keys in the store, of which there are N^2: so it is short.
    """
    return f"u{default_store().add('undertow/groups', 1)}"


def new_group(
    ranks: Sequence[int], backend: str, timeout: timedelta | None, name: str
) -> dist.ProcessGroup:
    """Creates a process group of these ranks, including this one; a collective call for these ranks
    only, which have the same `name` of `new_name`.

    torch.distributed.new_group names a group by the number of groups that the process has, which
    must be the same on all its ranks. Ranks that release groups at different times, or that are in
    several groups, would wait for each other forever.
    """
    world, default = _c10d._world, _c10d._get_default_group()
    _, store = world.pg_map[default]
    group, _ = _c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        store,
        name,
        timeout=_c10d._get_default_timeout(dist.Backend(backend)) if timeout is None else timeout,
        device_id=default.bound_device_id,
        group_desc="undertow",
    )
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, group)


def interrupt(group: dist.ProcessGroup) -> None:
    """Makes all operations in flight over a group fail, here and then on the other ranks; breaks
    the group.

    When a gloo receive times out, gloo closes all connections of its group. The group is never
    freed then, because freeing it may last until its timeout: if the other rank is gone, a message
    that gloo could not write never fails, its collective never ends, and the destructor waits for
    it.
    """
    inner: Any = getattr(group, "inner", group)  # of an emulated link
    with contextlib.suppress(RuntimeError):
        backend = _backend_of_host(inner)
        if backend is not None and backend.name() == "gloo":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))
            inner.recv_anysource([torch.zeros(1)], _NOBODYS_TAG).wait(timedelta(milliseconds=1))
        else:
            group.abort()


def _backend_of_host(group: Any) -> Any:
    """Returns the backend that sends host memory for this group, or None."""
    with contextlib.suppress(RuntimeError):
        return group._get_backend(torch.device("cpu"))
    return None
