"""Gradient synchronization of a module whose class and state dict keys do not change.

Reasons: docs/design/experts.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from undertow.buckets.comm_hook import CommHook
from undertow.config import SyncConfig, refused
from undertow.engine.params import ModuleParams
from undertow.errors import WrongType, all_of
from undertow.outer.outer_sync import OuterSync
from undertow.plan import Plan
from undertow.ranks.group import GroupRef, chosen_group
from undertow.ranks.transport import OwnGroup
from undertow.sync.group_sync import GroupSync
from undertow.sync.handles import MeanOverRanks, Reduction, name_of_op, start_mean, start_reduction
from undertow.sync.ignore import names_to_ignore
from undertow.sync.measurements import explanation_of, measured_profile, sweep
from undertow.sync.module_sync import ModuleSync
from undertow.sync.reports import plan_of_last_steps, report_of
from undertow.sync.tracing import save_trace
from undertow.torch_private import private
from undertow.trace import StepReport, Trace
from undertow.tune import Explanation

if TYPE_CHECKING:
    from undertow.lab.profile import Profile

T = TypeVar("T")


class GradientSync:
    """Synchronizes the gradients of one module.

    `attach` returns one, and `DistributedDataParallel` has one as `model.sync`:

        sync = undertow.attach(model)
        model(batch).backward()  # gradients are averaged over ranks

    It has the calls of users, and its ModuleSync the engine, process group and hooks, from
    construction to `close`. Construction is a collective call: every rank takes over rank 0's
    tensors of the kinds in `shared`. `elsewhere` has the names that another GradientSync handles;
    ranks may differ in it. Faults of `within` are faults here too.

    Raises:
        ConfigError: If the settings are invalid.
        PlanMismatch: On every rank, if ranks hold different parameters or settings.
    """

    # one for each group of experts, in the order of the settings
    experts: tuple[GradientSync, ...] = ()
    outer: OuterSync | None  # with SyncConfig(outer=...)

    # Settings of users, and the parts that the caller synchronizes elsewhere.
    def __init__(  # noqa: PLR0913
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | GroupRef | None = None,
        device_mesh: DeviceMesh | None = None,
        config: SyncConfig | None = None,
        ignore: Iterable[str | nn.Module | Tensor] = (),
        shared: Collection[str] = ("parameters", "buffers"),
        elsewhere: Container[str] = (),
        within: OwnGroup | None = None,
    ) -> None:
        config = SyncConfig() if config is None else config
        ignored = {*names_to_ignore(module, config.ignore), *names_to_ignore(module, ignore)}
        self._config = dataclasses.replace(config, ignore=tuple(ignored))
        members = ModuleParams(
            module, ignored, elsewhere=elsewhere, reduce_dtype=config.reduce_dtype
        )
        group = chosen_group(
            process_group, device_mesh, config.strategy, has_replicas=config.outer is not None
        )
        own = self._own = GroupSync(module, members, group, self._config, within=within)
        self._engine, self._group, self.outer = own.engine, own.group, own.outer
        self._whole = ModuleSync(own)  # with experts
        if isinstance(process_group, GroupRef):
            return  # a copied or unpickled model: its ranks open the group when they first use it
        try:
            self._whole.share(shared)
        except BaseException:
            self.close()
            raise

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The user's process group. Gradients are averaged over its ranks.

        Undertow itself communicates over a clone of it.
        """
        group = self._all_ranks.user.group
        return self._all_ranks.process_group if group is None else group

    @property
    def rank(self) -> int:
        """This rank's number, among all ranks that train the model."""
        return self._all_ranks.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks that train the model."""
        return self._all_ranks.num_ranks

    @property
    def _all_ranks(self) -> OwnGroup:
        """The group of all ranks that train the model; with `outer`, of all replicas."""
        return self._own.all_ranks

    @property
    def _parts(self) -> tuple[GroupSync, ...]:
        """The synchronization of the dense parameters, and one of each group of experts."""
        return self._whole.parts

    @property
    def _has_comm_hook(self) -> bool:
        return self._engine.current_plan.comm_hook is not None

    @property
    def config(self) -> SyncConfig:
        """The settings in use, including the settings of experts."""
        groups = tuple(group for part in self._parts for group in part.config.experts)
        return dataclasses.replace(self._config, experts=groups) if self.experts else self._config

    @property
    def plan(self) -> Plan:
        """The plan of the last synchronization; a new plan takes effect when the next one
        begins."""
        return self._engine.current_plan.compiled.plan

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Returns all parameters of the module except ignored ones, frozen parameters included."""
        return self._own.members.named_params()

    def _add_expert(self, expert: GradientSync) -> None:
        self.experts = (*self.experts, expert)
        self._whole.experts.append(expert._whole)

    @property
    def is_accumulating(self) -> bool:
        """True if a backward that runs now only accumulates; `accumulate()` sets it temporarily."""
        return self._engine.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        for engine in self._whole.engines:
            engine.is_accumulating = value

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that received no gradient on this rank in any micro-batch of the
        last step, experts last."""
        return tuple(name for engine in self._whole.engines for name in engine.unused_parameters)

    @property
    def stop_requested(self) -> bool:
        """True from the same step on every rank, after a signal of `stop_on_signal` on any rank."""
        return self._own.stop.is_requested

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context that makes backward only accumulate gradients.

        The next backward outside of it synchronizes their sum. If none follows, a step outside of
        it does. A step inside of it is on this rank's own gradients; with a sharded optimizer it
        raises PhaseError.
        """
        if self._own.is_closed:  # checked before the call, which every micro-batch would pay for
            self._own.require_open("accumulate()")
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    no_sync = accumulate

    @private.untraced
    def mean_over_ranks(self, number: float | Tensor) -> MeanOverRanks:
        """Starts the mean of a number over all ranks, such as the number of tokens in this rank's
        batch.

        A collective call of 8 bytes: every rank calls it before its first forward or `finish()` of
        a step, even a rank without data. The forward hides it. If a loss is a sum over tokens,
        `loss_sum / mean.wait()` makes the mean over ranks of its gradients the mean over all
        tokens.

        Args:
            number: A finite number, or a tensor of one element. A tensor on an accelerator stays
                there, and is not checked.

        Returns:
            A handle. Its `wait()` returns the mean, a 0-dimensional float64 tensor on the model's
            device. Only on the host does it wait for the other ranks. The mean may be 0.

        Raises:
            WrongType: If it is not a number.
            ConfigError: If it is not finite.
            PhaseError: Inside a backward, inside `join()`, and after `close()`.
        """
        self._own.require_open("mean_over_ranks(number)")
        return start_mean(self._whole.engines, number)

    @private.untraced
    def finish(self, *, buffers_follow: int | None = 0) -> None:
        """Joins the other ranks' synchronization if this rank's backward reached no parameter.

        Call it also if this rank has no data. It does nothing if a synchronization has run since
        this rank's last training forward or optimizer step, or if backwards only accumulate.
        After a training forward, an optimizer that holds one of the parameters calls it
        automatically before it steps.

        Args:
            buffers_follow: The rank whose buffers are copied if no forward ran here, because the
                other ranks' forwards copied them; None copies none.
        """
        self._own.require_open("finish()")
        if buffers_follow is not None:
            self._own.synchronize_buffers_without_forward(source=buffers_follow)
        all_of(
            self._engine.finish,
            *(partial(expert.finish, buffers_follow=buffers_follow) for expert in self.experts),
        )

    @private.untraced
    def reduce_gradients_async(
        self, op: Literal["mean", "sum"] | dist.ReduceOp.RedOpType | None = None
    ) -> Reduction:
        """Sends the accumulated gradients; call `wait` on the result before the optimizer steps.

        Args:
            op: "mean" or "sum" of the ranks' `.grad`, or torch's ReduceOp AVG or SUM. None is the
                mean, or the result of a communication hook, which excludes an `op`. "sum"
                multiplies the mean by the number of ranks.

        Returns:
            A handle with `wait()` and `is_completed()`; code with asyncio can await it.

        Raises:
            PhaseError: Inside a backward, if this rank has accumulated nothing since the last
                synchronization, or if it has not waited for an earlier reduction.
            Desync: If ranks give different ops.
        """
        self._own.require_open("reduce_gradients_async()")
        engines = self._whole.engines
        return start_reduction(engines, op=name_of_op(op), has_hook=self._has_comm_hook)

    @private.untraced
    def wait(self) -> None:
        """Waits until every gradient and every parameter has its final value."""
        all_of(*(part.wait for part in self._parts))

    @private.untraced
    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter, whole on this rank.

        Under a sharded optimizer it is a collective call of all ranks of the model.

        Args:
            param: A parameter of the module.

        Returns:
            A tensor of the parameter's shape, or None if it has no gradient.
        """
        owners = (part for part in self._parts if part.has(param))
        return next(owners, self._own).full_gradient(param)

    def broadcast_parameters(self) -> None:
        """Copies rank 0's parameters and buffers to every rank; a collective call.

        Raises:
            PlanMismatch: If ranks have different parameters: on every rank, and for experts on the
                ranks of their group.
        """
        self._own.require_open("broadcast_parameters()")
        self._whole.share(("parameters", "buffers"))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces every bucket with `hook(state, bucket)` instead of an all-reduce.

        Call it once, and not inside a backward. The next synchronization compares the names of the
        ranks' hooks. On the host, hooks run in a thread, one bucket after another.

        Args:
            state: The first argument of the hook.
            hook: It returns a future of the reduced buffer. `bucket` has the methods of
                torch.distributed.GradBucket, so torch's own hooks run unchanged. Its gradients are
                not divided: the hook computes the mean.

        Raises:
            PhaseError: Inside a backward or on a second call.
            PlanMismatch: On every rank, in the next synchronization, if the names of the hooks
                differ.
        """
        self._own.require_open("register_comm_hook()")
        if self._own.sharded_steps is not None:
            raise refused("hook", "shards", where="ShardedOptimizer")
        self._engine.current_plan.use_hook(CommHook(state, hook), is_in_round=self._engine.is_busy)
        self._whole.watch_forwards()

    def report(self) -> StepReport:
        """Returns the times of the last steps on this rank; `print` shows them as tables. Never
        communicates.

        They cover the dense parameters; `experts` has the reports of the groups of experts.
        """
        return dataclasses.replace(
            report_of(self._own),
            experts=self._of_experts(GradientSync.report),
            outer=None if self.outer is None else self.outer.report(),
        )

    def traces(self) -> tuple[Trace, ...]:
        """Returns the traces of the recorded steps that ran under the plan of the last one, oldest
        first."""
        generation = plan_of_last_steps(self._engine).generation
        return tuple(
            record.trace() for record in self._engine.recorder.records(generation=generation)
        )

    def explain(self) -> Explanation:
        """Returns the reasons for the plan, and every plan that was tried, with its times; `print`
        shows them.

        Never communicates: a single rank may call it. The answer is the same on all ranks.
        """
        explanation = explanation_of(self._engine.current_plan, self._config)
        experts = self._of_experts(GradientSync.explain)
        outer = "" if self.outer is None else self.outer.report().text
        return dataclasses.replace(explanation, experts=experts, outer=outer)

    def _of_experts(self, ask: Callable[[GradientSync], T]) -> dict[str, T]:
        """Asks every group of experts, and returns the answers by their names for users."""
        return {
            f"{expert._own.config.experts[0].match!r}, ranks "
            f"{', '.join(map(str, expert._group.user.ranks))}": ask(expert)
            for expert in self.experts
        }

    def profile(self) -> Profile:
        """Returns all measurements that planning and simulation need; never communicates.

        Raises:
            PhaseError: Until the first steps of the model are measured, which takes about ten.
        """
        return measured_profile(self._engine.current_plan, self._config)

    def measure_network(self) -> None:
        """Measures the network with messages of many sizes, for plans and profiles.

        A collective call between steps. Training does not need it: it measures its own messages.

        Raises:
            PhaseError: If nothing is measured.
        """
        self._own.require_open("measure_network()")
        for part in self._parts:
            sweep(part.engine, part.config)

    def save_profile(self, path: str | Path) -> None:
        """Writes the profile as JSON for `undertow plan` and `undertow simulate`; see `profile`.

        Args:
            path: The file to write.
        """
        self.profile().save(path)

    def save_trace(self, path: str | Path, *, steps: int | None = None) -> Path:
        """Writes the recorded steps of this rank as a trace for Perfetto; never
        communicates.

        `undertow trace` merges the traces of all ranks.

        Args:
            path: A file whose name ends with .json or .json.gz. The rank replaces `{rank}`; a name
                without it gets the rank once: trace.json.gz becomes trace.rank0.json.gz. Experts
                have separate files.
            steps: The number of steps, the last ones; None takes all that are recorded.

        Returns:
            The path of the file.

        Raises:
            PhaseError: If no step is recorded.
            ConfigError: If the file cannot be written.
        """
        paths = [
            save_trace(part.engine, path, steps=steps, number=at)
            for at, part in enumerate(self._parts)
        ]
        return paths[0]

    def save_plan(self, path: str | Path) -> None:
        """Writes the current plan as JSON.

        Args:
            path: The file to write; `SyncConfig(plan=path)` pins it.
        """
        Path(path).write_text(self.plan.to_json() + "\n", encoding="utf-8")

    def close(self) -> None:
        """Removes all hooks from the module and destroys Undertow's process group; later calls do
        nothing.

        A backward whose forward has already run will warn. Raises PhaseError inside a backward.
        """
        self._whole.close()


def sync_of(target: object, *, where: str, remedy: str) -> GradientSync:
    """Returns the GradientSync of a wrapper, or `target` itself if it is one.

    Raises WrongType for anything else.
    """
    sync = getattr(target, "sync", target)
    if isinstance(sync, GradientSync):
        return sync
    name = type(target).__name__
    if isinstance(target, nn.parallel.DistributedDataParallel):
        name = "torch's class of that name: import it from undertow"
    raise WrongType(
        f"target must be the result of attach() or DistributedDataParallel, got {name}.",
        where=where,
        remedy=remedy,
    )
