"""Experts: parameters whose gradients are reduced over a subset of the ranks.

ranks          0        1        2        3
dense         same     same     same     same       one Sync, over all four
experts        A        B        A        B         one Sync over 0 and 2, one over 1 and 3

Each Sync has a separate process group, buckets, plan and lane, and all of them take part in every backward.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer

from undertow.config import ExpertGroup, SyncConfig
from undertow.errors import ConfigError, PhaseError, WrongType
from undertow.runtime.comm.group import GroupRef, OwnGroup, chosen_group, warn_of_lone_rank
from undertow.runtime.model.ignore import names_to_ignore
from undertow.runtime.model.module_params import AnyOf
from undertow.runtime.peers.faults import Fault
from undertow.runtime.step.siblings import all_of
from undertow.runtime.torch_private import amp as private_scaling
from undertow.runtime.torch_private import private
from undertow.sync import GradientSync
from undertow.trace import StepReport
from undertow.tune import Explanation


def synchronized(module: nn.Module, *, config: SyncConfig | None = None, **how: Any) -> GradientSync:
    """Returns the synchronization of the module; `how` has the other arguments of `GradientSync`. A collective call."""
    warn_of_lone_rank(how.get("process_group"), type(module).__name__)
    if config is None or not config.experts:
        return GradientSync(module, config=config, **how)
    return SyncWithExperts(module, config=config, **how)


class SyncWithExperts(GradientSync):
    """A `GradientSync` of everything that no group of experts matches, and in `experts` one for each group.

    Every call applies to all of them. A backward that reaches a parameter of one is a synchronization of all, because possibly
    none of this rank's tokens reach its experts. Plan, traces and profile show the dense parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: SyncConfig,
        process_group: dist.ProcessGroup | GroupRef | None = None,
        mesh: DeviceMesh | None = None,
        ignore: Iterable[str | nn.Module | Tensor] = (),
        shared: Collection[str] = ("parameters", "buffers"),
    ) -> None:
        ignored = {*names_to_ignore(module, config.ignore), *names_to_ignore(module, ignore)}
        _require_one_group_each(module, config.experts, ignored)
        everybody = chosen_group(process_group, mesh, config.strategy).ranks
        groups = [_with_reference(group, everybody) for group in config.experts]
        dense = dataclasses.replace(config, ignore=tuple(ignored), experts=())
        elsewhere = AnyOf([_Matching(group.match) for group in groups])
        super().__init__(module, process_group=process_group, mesh=mesh, config=dense, shared=shared, elsewhere=elsewhere)
        self._groups = tuple(groups)
        try:
            for group, given in zip(groups, config.experts, strict=True):
                own = dataclasses.replace(dense, experts=(group,), plan=None)
                others = _AllBut(group.match)
                where = {"process_group": given.process_group, "within": self.own_group}
                sync = GradientSync(module, **where, config=own, shared=shared, elsewhere=others)
                self.experts = (*self.experts, sync)
        except BaseException:
            self.close()
            raise
        self.take_part_with(self.experts)
        for expert in self.experts:
            expert._engine.checks.numbers.fails_others = partial(_fail, weakref.ref(self.own_group))
        self._attached.callback(private_scaling.around_unscaling(partial(_alike_on_all_ranks, weakref.ref(self))))

    @property
    def config(self) -> SyncConfig:
        return dataclasses.replace(self._config, experts=self._groups)

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that got no gradient on this rank, experts last."""
        return tuple(
            name for names in (super().unused_parameters, *(it.unused_parameters for it in self.experts)) for name in names
        )

    @property
    def is_synchronizing(self) -> bool:
        """True while a synchronization is running."""
        return super().is_synchronizing or any(expert.is_synchronizing for expert in self.experts)

    @property
    def is_accumulating(self) -> bool:
        """True if a backward that runs now would only accumulate."""
        return self._engine.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        self._engine.accumulates(value)
        for expert in self.experts:
            expert.is_accumulating = value

    @private.untraced
    def finish(self, *, buffers_follow: int | None = 0) -> None:
        """Joins the other ranks if this rank's backward reached no parameter, or if it has no data at all."""
        follow = None if buffers_follow is None else 0
        all_of(
            partial(super().finish, buffers_follow=buffers_follow),
            *(partial(expert.finish, buffers_follow=follow) for expert in self.experts),
        )

    @private.untraced
    def wait(self) -> None:
        """Waits until nothing is in flight."""
        all_of(super().wait, *(expert.wait for expert in self.experts))

    def wait_for_parameters(self) -> None:
        """Waits until every parameter has its update from a sharded optimizer."""
        all_of(super().wait_for_parameters, *(expert.wait_for_parameters for expert in self.experts))

    @private.untraced
    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter; with a sharded optimizer a collective call of the ranks of its group."""
        for expert in self.experts:
            if any(param is it for _, it in expert._members.named_params()):
                return expert.full_gradient(param)
        return super().full_gradient(param)

    def share(self, kinds: Collection[str], *, source: int = 0) -> None:
        """Copies the "parameters" or "buffers" of rank `source` to every rank; experts follow their group's first rank."""
        super().share(kinds, source=source)
        for expert in self.experts:
            expert.share(kinds)

    def change_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Raises PhaseError: the groups of experts would have to change too."""
        raise PhaseError(
            "the ranks of a model with experts cannot change.",
            where="_update_process_group",
            remedy="Close the wrapper, and wrap the model anew.",
        )

    @private.untraced
    def forward_begins(self, *, buffers_follow: int | None = 0, is_compiled: bool = False) -> None:
        """Runs before each forward of the module."""
        follow = None if buffers_follow is None else 0
        all_of(
            partial(super().forward_begins, buffers_follow=buffers_follow, is_compiled=is_compiled),
            *(partial(expert.forward_begins, buffers_follow=follow, is_compiled=is_compiled) for expert in self.experts),
        )

    @private.untraced
    def forward_ends(self) -> None:
        """Runs after each forward of the module."""
        super().forward_ends()
        for expert in self.experts:
            expert.forward_ends()

    def report(self, *, show: bool = True) -> StepReport:
        """Reports where the time of the last steps went; prints it for the dense parameters and each group of experts.

        The returned report is for the dense parameters; `experts[0].report()` returns the first group's.
        """
        report = super().report(show=show)
        if show:
            self._show_each_group(lambda expert: expert.report())
        return report

    def explain(self, *, show: bool = True) -> Explanation:
        """Explains the plans; prints the dense parameters' first, and returns it."""
        explanation = super().explain(show=show)
        if show:
            self._show_each_group(lambda expert: expert.explain())
        return explanation

    def measure_network(self) -> None:
        """Sends messages of many sizes over each group in turn; a collective call between steps."""
        super().measure_network()
        for expert in self.experts:
            expert.measure_network()

    def close(self) -> None:
        """Removes everything from the module and destroys Undertow's process groups, once."""
        all_of(super().close, *(expert.close for expert in self.experts))

    def _show_each_group(self, show: Callable[[GradientSync], object]) -> None:
        for group, expert in zip(self._groups, self.experts, strict=True):
            print(f"\nExperts {group.match!r}, ranks {', '.join(map(str, group.process_group.ranks))}:")
            show(expert)


class _Matching:
    """The names that a pattern matches."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and fnmatchcase(name, self._pattern)


class _AllBut(_Matching):
    """The names that the pattern does not match."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


def _fail(everybody: weakref.ref[OwnGroup], fault: Fault) -> None:
    """Makes all ranks raise, at their next wait, an error that only the ranks with some experts know about."""
    group = everybody()
    if group is not None and group.member is not None:
        group.member.fails(fault)


def _alike_on_all_ranks(
    weak_sync: weakref.ref[SyncWithExperts], optimizer: Optimizer, look: private_scaling.Look
) -> private_scaling.Found:
    """Returns a scaler's finding over all ranks: each has checked only its own experts, and all must skip the same steps.

    Costs one all-reduce of one number, for every optimizer that holds a parameter of the model, an expert or not: which experts
    are trained may differ from group to group.
    """
    found, sync = look(), weak_sync()
    parts = () if sync is None else (sync, *sync.experts)
    ours = {id(param) for part in parts for _, param in part._members.named_params()}  # accessing these waits for no gather
    is_ours = any(id(param) in ours for group in optimizer.param_groups for param in group["params"])
    if sync is None or not is_ours or sync.num_ranks == 1:
        return found
    on_any = torch.zeros((), device=sync.device)
    for on_device in found.values():
        on_any = torch.maximum(on_any, on_device.to(sync.device))
    with sync.waiting("whether all ranks' gradients are finite"):
        sync.own_group.all_reduce(on_any, dist.ReduceOp.MAX)
    # If none of a rank's experts was used it has checked nothing, which scalers reject.
    return {device: on_any.to(device, copy=True) for device in found or (sync.device,)}


def _with_reference(group: ExpertGroup, everybody: Sequence[int]) -> ExpertGroup:
    """Returns the group with a reference to its process group.

    Raises ConfigError if this rank is not in it, or if it has ranks that do not train the model.
    """
    given, where = group.process_group, f"ExpertGroup(match={group.match!r})"
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in the process group of its experts.",
            where=where,
            remedy="Give each rank the group of the ranks that hold the same experts as it does.",
        )
    if not isinstance(given, dist.ProcessGroup | GroupRef):
        raise WrongType(
            f"process_group must be a torch.distributed.ProcessGroup, got {type(given).__name__}.",
            where=where,
            remedy="Pass what torch.distributed.new_group() returned for the ranks that hold the same experts.",
        )
    reference = given if isinstance(given, GroupRef) else GroupRef.of(given)
    strangers = sorted(set(reference.ranks).difference(everybody))
    if strangers:
        raise ConfigError(
            f"experts are on ranks that do not train this model: {', '.join(map(str, strangers))}.",
            where=f"{where}, the model is on ranks {', '.join(map(str, everybody))}",
            remedy="Give a group of ranks of the model.",
        )
    return dataclasses.replace(group, process_group=reference)


def _require_one_group_each(module: nn.Module, groups: Sequence[ExpertGroup], ignored: Collection[str]) -> None:
    """Raises ConfigError for a pattern without a parameter, and for a parameter with two patterns."""
    names = [name for name, _ in module.named_parameters() if name not in ignored]
    for group in groups:
        if not any(name in _Matching(group.match) for name in names):
            raise ConfigError(
                f"no parameter matches {group.match!r}.",
                where=f"ExpertGroup, for a model of type {type(module).__name__}",
                remedy=f"Match names of named_parameters(), such as {names[-1]!r}." if names else "Leave `experts` out.",
            )
    for name in names:
        matching = [group.match for group in groups if name in _Matching(group.match)]
        if len(matching) > 1:
            raise ConfigError(
                f"parameter {name!r} is in several groups of experts.",
                where=f"it matches {' and '.join(map(repr, matching))}",
                remedy="Write patterns of which each parameter matches one.",
            )
