"""The average across replicas of a model whose parameters torch's `fully_shard` shards.

ranks 0 1    shards of replica 0      torch reduces gradients to shards within a row
ranks 2 3    shards of replica 1      Undertow averages each shard within a column

Reasons: docs/design/meshes.md.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from undertow.config import Outer, SyncConfig
from undertow.ddp.fully_shard import WHERE, group_of_replicas, refuse_divisor, require_managed
from undertow.ddp.outer_messages import Message, sent_bytes
from undertow.device import Accelerator
from undertow.engine.checks import unlike_values
from undertow.errors import Desync, ReplicaMismatch, WrongType, require
from undertow.mesh.axes import everyone, is_cut_over_others
from undertow.mesh.local_tensors import local_tensor, local_tensors
from undertow.outer.outer_sync import OuterSync
from undertow.ranks.agreement import gather_json, require_agreement, surroundings
from undertow.ranks.answers import MOST_TEXTS, lines_of
from undertow.ranks.dither import Rotation, Rounding
from undertow.ranks.exchanges import Exchanges, exchanges_over
from undertow.ranks.group import GroupRef
from undertow.ranks.parcels import FullWidth, Parcel
from undertow.ranks.transport import OwnGroup
from undertow.sync.gradient_sync import GradientSync
from undertow.torch_private import fsdp, private, tables

# A message's number of elements is compared modulo this, so that sums of squares are exact.
_SIZES_TOLD_APART = 1 << 20


def outer_axis(
    module: nn.Module,
    *,
    wire: str | None = None,
    device_mesh: DeviceMesh | None = None,
    outer: Outer | None = None,
) -> OuterAxis:
    """Averages gradients of an FSDP2 model across replicas, in a format if one is asked for.

    Call it after `fully_shard`, before the first forward, on every rank: a collective call.

    Args:
        module: A model with torch's `fully_shard` on it or on its parts. With a mesh of two
            dimensions, `mesh["dp_replicate", "dp_shard"]`, torch would average across replicas; it
            leaves that to Undertow from now on.
        wire: The format of gradients across replicas, "int8" or "bfloat16"; None is full width,
            whose results with two replicas are torch's, bit for bit.
        device_mesh: The dimension across replicas, if `fully_shard` got the other dimension only.
        outer: An Outer lets replicas train alone, and exchange fragments of the shards every few
            steps; nothing is sent across replicas in other steps. Its `wire` is the format.

    Returns:
        The OuterAxis, which counts messages; `close()` gives the average back to torch. With
        `outer` its `outer` is the OuterSync.

    Raises:
        ConfigError: If the model or the mesh does not fit.
        PlanMismatch: On every rank, if replicas differ.
        ReplicaMismatch: On every rank, if parameters of replicas differ.

    ```python
    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("dp_replicate", "dp_shard"))
    fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
    axis = undertow.outer_axis(model, wire="int8")
    ```
    """
    require(
        isinstance(module, nn.Module),
        f"module must be a torch.nn.Module, got {type(module).__name__}.",
        where=f"{WHERE}, first argument",
        remedy="Pass the model itself.",
        error=WrongType,
    )
    config = SyncConfig(wire=wire, outer=outer, buffers="off")
    require(
        wire is None or outer is None,
        "wire and outer are both given: with outer, no gradients are sent across replicas.",
        where=WHERE,
        remedy='Write outer=Outer(every=30, wire="int8").',
    )
    require(
        config.wire != "auto",
        'wire="auto" is not supported: no other format is tried on this axis.',
        where=WHERE,
        remedy='Give a format, such as "int8", or none.',
    )
    require(
        config.wire != "float16",
        'wire="float16" is not supported: it loses small values, and nothing counts them here.',
        where=WHERE,
        remedy='Write wire="int8" or wire="bfloat16".',
    )
    managed = [(name, part) for name, part in tables.named_modules(module) if fsdp.is_managed(part)]
    require_managed(module, managed)
    return OuterAxis(module, managed, group_of_replicas(managed, device_mesh), config)


class OuterAxis:
    """Averages each shard of gradients with the other replicas' shard; `outer_axis` returns one."""

    def __init__(
        self,
        module: nn.Module,
        managed: Sequence[tuple[str, nn.Module]],
        replicas: dist.ProcessGroup,
        config: SyncConfig,
    ) -> None:
        self.num_reductions = 0
        self.num_bytes = 0  # of gradients, that this rank has sent across replicas
        self.outer: OuterSync | None = None
        self._sync: GradientSync | None = None  # with `outer`
        self.waited_s = 0.0
        groups = [group for _, part in managed for group in fsdp.param_groups(part)]
        self._params = [param for group in groups for param in fsdp.params_of(group)]
        self._names = [name or "the root" for name, part in managed]
        self._config, self._wire = config, config.wires[1]
        self._whole, self._group = _own_groups(replicas, groups, self._params, config)
        weak = weakref.ref(self)  # the finalizer holds the groups
        self._whole.here.steps = lambda: _progress_of(weak())
        self._exchanges: Exchanges = exchanges_over(
            self._group,
            dataclasses.replace(config, reduction="ordered"),
            divisor=self._group.num_ranks,
        )
        self._messages: dict[tuple[int, int, torch.dtype, tuple[int, ...]], Message] = {}
        self._told: deque[_ReducedNumbers] = deque()  # of earlier reductions, on a device
        # of each module, its parameters and their elements in a message
        self._numels = [_numels_of(part) for _, part in managed]
        self._turns = Rotation(is_host=self._group.hardware.is_host)
        self._uncut = [param for group in groups for param in _uncut(group)]
        self._reduced: set[int] = set()  # modules in this backward
        self._partial: dict[int, Tensor] = {}  # sums that torch was told not to average yet
        self._undo = [self._taken_over(index, part) for index, (_, part) in enumerate(managed)]
        # torch holds the hooks, and they hold this object, as long as the model exists
        ends = self._exchanges.close, self._group.close, self._whole.close
        self._finalizer = weakref.finalize(module, _call_all, ends)
        self._finalizer.atexit = False  # other ranks may have ended
        try:
            named_params: dict[str, Tensor] = dict(tables.named_parameters(module))
            self._require_alike(named_params)
            if config.outer is not None:
                self._sync = self._synchronized(module, named_params, replicas)
                self.outer = self._sync.outer
                assert self.outer is not None
                self.outer.open_group()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        if self.outer is not None:
            return f"<OuterAxis of {self._group.num_ranks} replicas, {self.outer!r}>"
        mib = self.num_bytes / 2**20
        return (
            f"<OuterAxis of {self._group.num_ranks} replicas, {self._wire or 'full width'}: "
            f"{self.num_reductions} reductions, {mib:.1f} MiB sent, {self.waited_s:.1f} s waited>"
        )

    def close(self) -> None:
        """Gives the average across replicas back to torch; a mesh of one dimension has none."""
        for undo in self._undo:
            undo()
        self._undo = []
        if self._sync is not None:
            self._sync.close()
        self._finalizer()

    def _taken_over(self, index: int, part: nn.Module) -> Callable[[], None]:
        """Has torch give the shards of a module's gradients to this object; returns a function
        that undoes this."""
        reduce: Callable[[Tensor], None] = partial(self._reduce, index, fsdp.param_groups(part))
        if self._config.outer is not None:
            reduce = self._keep
        refuse = partial(refuse_divisor, f"module {self._names[index]!r}")
        return fsdp.take_over(part, reduce, refuse=refuse)

    def _synchronized(
        self, module: nn.Module, named_params: dict[str, Tensor], replicas: dist.ProcessGroup
    ) -> GradientSync:
        """Returns the synchronization by which replicas exchange their shards."""
        own = set(map(id, self._params))
        others = [name for name, param in named_params.items() if id(param) not in own]
        return GradientSync(
            module, process_group=replicas, config=self._config, ignore=others, shared=()
        )

    def _require_alike(self, named_params: dict[str, Tensor]) -> None:
        """Compares the replicas; a collective call."""
        group = self._group
        if group.num_ranks == 1:
            return
        names = {id(param): name for name, param in named_params.items()}
        labels = [names.get(id(param), str(at)) for at, param in enumerate(self._params)]
        group.open()
        require_agreement(
            group,
            settings={**surroundings(group), "wire": self._wire, "modules": self._names},
            params=[
                {
                    "name": label,
                    "shape": list(local_tensor(param).shape),
                    "dtype": str(param.dtype),
                }
                for label, param in zip(labels, self._params, strict=True)
            ],
        )
        params = {
            label: param
            for label, param in zip(labels, self._params, strict=True)
            if not param.is_meta
        }
        what = "the comparison of the replicas' parameters"
        error = unlike_values(
            group,
            params,
            what,
            where=WHERE,
            remedy="Initialize all replicas with the same seed, or load the same weights.",
        )
        # Ranks with other shards would wait for these in the first forward.
        told = gather_json(group.everyone, "" if error is None else str(error), waits_for=what)
        if any(told):
            raise error or ReplicaMismatch(next(filter(None, told)))

    def _keep(self, values: Tensor) -> None:
        """Called by torch as `_reduce` is: leaves the shards as they are, because replicas train
        alone. A method, so that the module holds this object."""

    @private.untraced
    @torch.no_grad()
    def _reduce(self, index: int, groups: Sequence[Any], values: Tensor) -> None:
        """Called by torch in a backward, with this rank's shards of the gradients of a module, and
        replaces them by the mean over replicas.

        values: [numel of the shards]
        """
        if index in self._partial:
            values.add_(self._partial.pop(index))
        if not all(map(fsdp.all_reduces, groups)):
            self._partial[index] = values.clone()
            values.zero_()  # torch adds it to `.grad`
            fsdp.leave_without_gradient(groups)
            return
        if self._group.num_ranks == 1:
            return
        group, began_s = self._group, time.perf_counter()
        group.watch.check()
        self._compare_earlier()
        if index in self._reduced or not self._reduced:  # a backward begins
            self._reduced.clear()
            self._turns.advance(self._alike_at_places())
        self._reduced.add(index)
        message = self._message(index, values)
        parcel = self._parcel(message, values.device)
        sent = message.packed(values)
        numbers = _numbers_of(index, values.numel())
        trailer = group.hardware.to_device(numbers, torch.float64)
        name = f"the gradients of {self._names[index]!r}, across replicas"
        with group.waiting(name):
            is_alike = partial(self._is_alike, numbers)
            handle = self._exchanges.all_reduce(sent, parcel, trailer=trailer, is_alike=is_alike)
            group.makes_call(name)
            handle.wait()
        group.hardware.keep(values)  # torch may drop them when this returns
        if isinstance(group.hardware, Accelerator):
            reduced, copied = group.hardware.to_host(trailer), group.hardware.record()
            self._told.append(_ReducedNumbers(index, values.numel(), reduced, copied))
        elif not self._is_alike(numbers, trailer):
            raise self._in_another_order(index, values.numel())
        message.unpack(sent, values)
        self.num_reductions += 1
        self.num_bytes += sent_bytes(parcel, group, values)
        self.num_bytes += (group.num_ranks - 1) * trailer.nbytes
        self.waited_s += time.perf_counter() - began_s

    def _alike_at_places(self) -> list[Tensor]:
        """Returns shards that are the same at all places of a tensor-parallel axis: if the dither
        differed there, a parameter that tensor parallelism has not cut would drift apart."""
        trained = [param for param in self._uncut if param.requires_grad]
        return local_tensors(trained or self._params)

    def _message(self, index: int, values: Tensor) -> Message:
        """Returns how the shards of a module travel."""
        numel = values.numel()
        params, wire = self._numels[index], self._wire
        numels = [numel for param, numel in params if param.requires_grad]
        key = index, numel, values.dtype, tuple(numels)
        if key not in self._messages:
            if sum(numels) != numel:
                # Torch leaves parameters without a gradient out, and does not tell which.
                numels = [numel]
                uncut = set(map(id, self._uncut))
                if len({id(param) in uncut for param, _ in params}) == 2:
                    # A block of cut and of whole parameters would be rounded differently at each
                    # place of a tensor-parallel axis.
                    wire = None
            self._messages[key] = Message.of(numels, values.dtype, wire, self._group)
        return self._messages[key]

    def _parcel(self, message: Message, device: torch.device) -> Parcel:
        """Returns the parcel of a message in this backward."""
        parcel = message.parcel
        if isinstance(parcel, FullWidth):
            return parcel
        parcel.codings.clear()
        return parcel.dithered(self._turns.now, Rounding.OWN, rank=self._group.rank, device=device)

    def _is_alike(self, numbers: Sequence[float], reduced: Tensor) -> bool:
        """Returns True if all replicas have sent these numbers. `reduced` is on the host."""
        num_ranks = self._group.num_ranks
        return bool(reduced.tolist() == [number * num_ranks for number in numbers])

    def _compare_earlier(self) -> None:
        """Raises Desync if replicas have reduced different modules earlier, as far as this host
        knows: it does not wait for a device."""
        while self._told and self._told[0].copied.query():
            told = self._told.popleft()
            if not self._is_alike(_numbers_of(told.index, told.numel), told.reduced):
                raise self._in_another_order(told.index, told.numel)

    def _in_another_order(self, index: int, numel: int) -> Desync:
        name = self._names[index]
        text = f"{name!r}, {numel} elements"
        found = self._group.watch.ask(text, of=self._group.names, most=MOST_TEXTS)
        listed = "".join(f"\n  {line}" for line in lines_of(found))
        return Desync(
            "replicas reduce gradients of different modules, or of different parameters of one.",
            where=f"a backward, reduction {self.num_reductions}, rank {self._group.name}{listed}",
            remedy="Use the same modules in the same order on every replica. If parts stay unused "
            "on some, call set_reduce_scatter_unused_params() of FSDPModule.",
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _ReducedNumbers:
    """The numbers of a reduction on their way from a device to the host."""

    index: int  # of the module
    numel: int
    reduced: Tensor  # pinned
    copied: torch.Event


def _numbers_of(index: int, numel: int) -> list[float]:
    """Returns the numbers by which replicas find that they reduce the same module: sums of numbers
    and of their squares fit together only if all numbers are equal."""
    numbers = [float(index), float(numel % _SIZES_TOLD_APART)]
    return [*numbers, *(number * number for number in numbers)]


def _own_groups(
    replicas: dist.ProcessGroup,
    groups: Sequence[Any],
    params: Sequence[Tensor],
    config: SyncConfig,
) -> tuple[OwnGroup, OwnGroup]:
    """Returns the group of all ranks of both dimensions, and the group across replicas in it."""
    reference = GroupRef.of(replicas)
    device = local_tensor(params[0]).device if params else torch.device("cpu")
    together = everyone(params, reference.ranks)
    whole = OwnGroup(
        GroupRef(together, reference.backend, reference.timeout), device=device, limits=config
    )
    whole.torch_group.others = [weakref.ref(fsdp.shards_of(group)) for group in groups]
    return whole, OwnGroup(reference, device=device, limits=config, within=whole, is_axis=True)


def _numels_of(part: nn.Module) -> list[tuple[Tensor, int]]:
    """Returns the parameters of a module, and their elements in a message."""
    return [
        pair
        for group in fsdp.param_groups(part)
        for pair in zip(fsdp.params_of(group), fsdp.numels_of(group), strict=True)
    ]


def _uncut(group: Any) -> list[Tensor]:
    """Returns the parameters of a group of torch's that are cut into its shards only."""
    shards = dist.get_process_group_ranks(fsdp.shards_of(group))
    return [param for param in fsdp.params_of(group) if not is_cut_over_others(param, shards)]


def _progress_of(axis: OuterAxis | None) -> tuple[int, bool]:
    return (0 if axis is None else axis.num_reductions), True


def _call_all(functions: Sequence[Any]) -> None:
    for function in functions:
        function()
