"""Synchronizes a module, and its experts: parameters whose gradients are reduced over a subset of
the ranks.

ranks          0        1        2        3
dense         same     same     same     same       one GradientSync, over all four
experts        A        B        A        B         one GradientSync over 0 and 2, one over 1 and 3

Each has a separate process group, buckets, plan and lane, and all of them take part in every
backward.
"""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parameter import is_lazy

from undertow.config import ExpertGroup, SyncConfig, require_settings
from undertow.engine.agreed_errors import part_of_another
from undertow.engine.alike_findings import AlikeFindings
from undertow.engine.hooks import earlier_watchers
from undertow.errors import WrongType, require
from undertow.mesh.axes import data_mesh, require_unmanaged
from undertow.mesh.local_tensors import local_tensor
from undertow.ranks.faults import Fault
from undertow.ranks.group import GroupRef, chosen_group, warn_of_lone_rank
from undertow.ranks.transport import OwnGroup
from undertow.sync.gradient_sync import GradientSync
from undertow.sync.ignore import names_to_ignore
from undertow.torch_private import private, tables

# The reasons why a parameter cannot be synchronized, with the way out. The order counts.
_REFUSED: tuple[tuple[Callable[[Tensor], bool], str, str], ...] = (
    (
        lambda param: not private.has_memory(local_tensor(param)),
        "is a {kind} without its own memory: it cannot be sent to other ranks",
        "Exclude it with ignore=[{name!r}], and give it the same values on every rank.",
    ),
    (
        lambda param: param.is_meta,
        "is on the meta device, and has no values",
        "Give the module memory by module.to_empty(device=...), and initialize it, before.",
    ),
    (
        lambda param: param.layout is not torch.strided,
        "has the layout {layout}, and only dense parameters are synchronized",
        "Make it dense by to_dense(); or name it in `ignore`, and every rank has its own gradient.",
    ),
    (
        lambda param: not param.is_leaf,
        "is the result of an operation, and no optimizer can update it",
        "Make it a leaf by detach().requires_grad_(). A module of TorchScript is copied by "
        "saving and loading it.",
    ),
    (
        private.has_shared_elements,
        "is an expanded tensor: several of its elements share memory",
        "Make the parameter of a clone() of it, or expand it in forward.",
    ),
    (
        lambda param: param.requires_grad and param.is_inference(),
        "was made under torch.inference_mode(): it never gets a gradient",
        "Make the model outside of inference mode, or freeze the parameter: requires_grad_(False).",
    ),
)


def attach(
    module: nn.Module,
    *,
    device_mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    config: SyncConfig | None = None,
    ignore: Iterable[str | nn.Module | Tensor] = (),
    dp_mesh_dims: object | None = None,
) -> GradientSync:
    """Synchronizes `module`'s gradients from now on: after a backward every `.grad` is the mean.

    Call the module itself: a backward of a part or a method of it is this rank's own, unless a
    forward of the module has run since the last optimizer step. The module keeps its class and its
    `state_dict` keys. All ranks copy rank 0's parameters and buffers; a collective call.

    Args:
        module: The model.
        device_mesh: A mesh of one dimension, such as `mesh["dp"]` of a larger one. With
            `strategy="hybrid"` it has two: the first replicates and the second shards. Parameters
            may be DTensors over other dimensions.
        process_group: The ranks to synchronize; the default group if neither it nor `device_mesh`
            is given.
        config: Settings; None is `SyncConfig()`.
        ignore: Parameters, buffers and submodules to leave alone, as names or objects.
        dp_mesh_dims: A torch.distributed.fsdp.DataParallelMeshDims that names the data-parallel
            dimensions of `device_mesh`; None if all are.

    Returns:
        The GradientSync of the module.

    Raises:
        ConfigError: If the module or the settings cannot be synchronized.

    ```python
    sync = undertow.attach(model)
    loss_fn(model(inputs), targets).backward()  # gradients are averaged
    ```
    """
    ignored = checked(module, ignore, config, caller="attach")
    sync = synchronized(
        module,
        device_mesh=data_mesh(device_mesh, dp_mesh_dims),
        process_group=process_group,
        config=config,
        ignore=ignored,
    )
    sync._whole.is_attached = True
    sync._whole.watch_forwards()
    return sync


class BucketedDDPHooks:
    """Attaches the overlapped mean reduction to a bare model, until `close()`.

    Args:
        model: The model; it keeps its class.
        process_group: The ranks; the default group if None.
        bucket_size_mb: Largest bucket in MiB.

    ```python
    hooks = BucketedDDPHooks(model, bucket_size_mb=25.0)
    model(batch).sum().backward()  # every .grad is the mean over ranks
    hooks.close()
    ```
    """

    def __init__(
        self,
        model: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_size_mb: float = 25.0,
    ) -> None:
        self.sync = attach(
            model, process_group=process_group, config=SyncConfig(bucket_cap_mb=bucket_size_mb)
        )

    def close(self) -> None:
        """Removes the hooks from the model; gradients are no longer averaged."""
        self.sync.close()


def checked(
    module: nn.Module,
    ignore: Iterable[str | nn.Module | Tensor],
    config: SyncConfig | None,
    *,
    caller: str,
) -> tuple[str, ...]:
    """Returns the names that the argument, the settings and torch's helper exclude from
    synchronization.

    Warns if no other parameter requires a gradient. Raises WrongType or ConfigError, which names
    `caller`, if `module` cannot be synchronized or `config` is not a SyncConfig.
    """
    require(
        isinstance(module, nn.Module),
        f"module must be a torch.nn.Module, got {type(module).__name__}.",
        where=f"{caller}, first argument",
        remedy="Pass the model itself.",
        error=WrongType,
    )
    require(
        type(module) is not TorchDistributedDataParallel,
        "this module is wrapped already, by torch's own DistributedDataParallel.",
        where=f"{caller}(torch.nn.parallel.DistributedDataParallel(...))",
        remedy="Wrap the bare module once, without torch's class.",
    )
    require(
        not (
            isinstance(module, TorchDistributedDataParallel)
            and isinstance(getattr(module, "sync", None), GradientSync)
        ),
        "this module is wrapped already, by undertow.DistributedDataParallel.",
        where=f"{caller}(undertow.DistributedDataParallel(...))",
        remedy="Wrap the bare module once: it is `module` of the wrapper.",
    )
    require_settings(config)
    require_unmanaged(module, caller=caller)
    ignored = [
        *names_to_ignore(module, ignore),
        *names_to_ignore(module, () if config is None else config.ignore),
    ]
    marked = private.ignored_by_ddp(module)
    if marked and caller == "DistributedDataParallel":
        ignored += {
            name for name, _ in (*tables.named_parameters(module), *tables.named_buffers(module))
        }.intersection(marked)
    params = {name: param for name, param in tables.named_parameters(module) if name not in ignored}
    _check_parameters(module, params, caller)
    if not any(param.requires_grad for param in params.values()):
        warnings.warn(
            f"{type(module).__name__} has no parameter that requires a gradient: nothing is "
            "averaged until it has one.\n"
            f"  {caller}(...)\n"
            "  Look at requires_grad, and at what `ignore` names. If parameters are unfrozen "
            "later, filter this warning.",
            stacklevel=3,
        )
    return tuple(ignored)


def _check_parameters(module: nn.Module, params: dict[str, nn.Parameter], caller: str) -> None:
    where = f"{caller}(...)"
    shapeless = next((name for name, param in params.items() if is_lazy(param)), None)
    require(
        shapeless is None,
        f"Modules with uninitialized parameters can't be used with `{caller}`.",
        where=f"parameter {shapeless!r} has no shape yet",
        remedy="Run a dummy forward pass to correctly initialize the modules.",
    )
    types = sorted({param.device.type for param in params.values()})
    require(
        len(types) <= 1,
        f"{caller}'s input module must be on the same type of devices, but input module "
        f"parameters locate in {types}.",
        where=where,
        remedy="Move the whole module with module.to(device) before.",
    )
    for name, param in params.items():
        for is_refused, what, remedy in _REFUSED:
            require(
                not is_refused(param),
                f"parameter {name!r} "
                f"{what.format(kind=type(param).__name__, layout=param.layout)}.",
                where=where,
                remedy=remedy.format(name=name),
            )
    require(
        types != ["cpu"]
        or not any(
            isinstance(layer, nn.SyncBatchNorm) for _, layer in tables.named_modules(module)
        ),
        "SyncBatchNorm layers only work with GPU modules.",
        where=where,
        remedy="Keep the BatchNorm layers on CPU: their running statistics follow rank 0.",
    )


def synchronized(
    module: nn.Module, *, config: SyncConfig | None, ignore: Sequence[str] = (), **how: Any
) -> GradientSync:
    """Returns the synchronization of the module, and in its `experts` one for each group of
    experts; a collective call.

    `ignore` has names of parameters and buffers, and `how` the other arguments of `GradientSync`. A
    backward that reaches a parameter of one part is a synchronization of all, because possibly none
    of this rank's tokens reach its experts.
    """
    warn_of_lone_rank(how.get("process_group"), type(module).__name__)
    _close_earlier(module, ignore)
    if config is None or not config.experts:
        return GradientSync(module, config=config, ignore=ignore, **how)
    _require_one_group_each(module, config.experts, {*config.ignore, *ignore})
    everybody = chosen_group(
        how.get("process_group"), how.get("device_mesh"), config.strategy
    ).ranks
    groups = [_with_reference(group, everybody) for group in config.experts]
    dense = dataclasses.replace(config, experts=())
    of_experts = _Matching(tuple(group.match for group in groups))
    sync = GradientSync(module, config=dense, ignore=ignore, elsewhere=of_experts, **how)
    try:
        for group, given in zip(groups, config.experts, strict=True):
            expert = GradientSync(
                module,
                process_group=given.process_group,
                config=dataclasses.replace(dense, experts=(group,), plan=None),
                ignore=ignore,
                shared=how.get("shared", ("parameters", "buffers")),
                elsewhere=_Matching((group.match,), is_inverted=True),
                within=sync._group,
            )
            expert._engine.checks.numbers.fails_others = partial(_fail, sync._group)
            sync._add_expert(expert)
    except BaseException:
        sync.close()
        raise
    sync._whole.take_part_together()
    # Not the parts: the synchronization ends when nothing else holds it.
    members = [part.members for part in sync._parts]
    sync._own.events.subscribe(AlikeFindings(sync._group, members))
    return sync


def _close_earlier(module: nn.Module, ignored: Collection[str]) -> None:
    """Closes earlier wrappers of these parameters: the newest one averages gradients, once.

    Raises ConfigError if an earlier one also has parameters that this one leaves alone.
    """
    named_params = [
        (name, param) for name, param in tables.named_parameters(module) if name not in ignored
    ]
    ids = {id(param) for _, param in named_params}
    earlier = earlier_watchers(named_params)
    for name, engine in earlier.items():
        if not engine.siblings.watched_ids <= ids:
            raise part_of_another(name)
    for engine in earlier.values():
        engine.siblings.close_model()


@dataclasses.dataclass(frozen=True, slots=True)
class _Matching:
    """The names that one of the patterns matches, or all others."""

    patterns: tuple[str, ...]
    is_inverted: bool = False

    def __contains__(self, name: object) -> bool:
        return any(fnmatchcase(str(name), pattern) for pattern in self.patterns) != self.is_inverted


def _fail(everybody: OwnGroup, fault: Fault) -> None:
    """Makes all ranks raise, at their next wait, an error that only the ranks with some experts
    know about."""
    everybody.watch.fail(fault)


def _with_reference(group: ExpertGroup, everybody: Sequence[int]) -> ExpertGroup:
    """Returns the group with a reference to its process group.

    Raises ConfigError if this rank is not in it, or if it has ranks that do not train the model.
    """
    given, where = group.process_group, f"ExpertGroup(match={group.match!r})"
    require(
        given != dist.GroupMember.NON_GROUP_MEMBER,
        f"rank {dist.get_rank()} is not in the process group of its experts.",
        where=where,
        remedy="Give each rank the group of the ranks that hold the same experts as it does.",
    )
    require(
        isinstance(given, dist.ProcessGroup | GroupRef),
        f"process_group must be a torch.distributed.ProcessGroup, got {type(given).__name__}.",
        where=where,
        remedy="Pass what torch.distributed.new_group() returned for the ranks that hold the "
        "same experts.",
        error=WrongType,
    )
    reference = given if isinstance(given, GroupRef) else GroupRef.of(given)
    strangers = sorted(set(reference.ranks).difference(everybody))
    require(
        not strangers,
        f"experts are on ranks that do not train this model: {', '.join(map(str, strangers))}.",
        where=f"{where}, the model is on ranks {', '.join(map(str, everybody))}",
        remedy="Give a group of ranks of the model.",
    )
    return dataclasses.replace(group, process_group=reference)


def _require_one_group_each(
    module: nn.Module, groups: Sequence[ExpertGroup], ignored: Collection[str]
) -> None:
    names = [name for name, _ in tables.named_parameters(module) if name not in ignored]
    for group in groups:
        require(
            any(fnmatchcase(name, group.match) for name in names),
            f"no parameter matches {group.match!r}.",
            where=f"ExpertGroup, for a model of type {type(module).__name__}",
            remedy=f"Match names of named_parameters(), such as {names[-1]!r}."
            if names
            else "Leave `experts` out.",
        )
    for name in names:
        matching = [group.match for group in groups if fnmatchcase(name, group.match)]
        require(
            len(matching) <= 1,
            f"parameter {name!r} is in several groups of experts.",
            where=f"it matches {' and '.join(map(repr, matching))}",
            remedy="Write patterns so that no parameter matches two of them.",
        )
