"""Gradient synchronization of a module whose class and state dict keys do not change.

Reasons: docs/design/experts.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from undertow.buckets.comm_hook import CommHook
from undertow.buckets.recorder import Recorder
from undertow.config import SyncConfig, refused
from undertow.engine.agreed_errors import require_outside_of_backward
from undertow.engine.engine import Engine, SiblingEngines
from undertow.engine.hooks import earlier_watchers, is_outermost_forward, is_watched
from undertow.engine.params import ModuleParams
from undertow.engine.progress import Forward
from undertow.engine.step_events import StepEvents
from undertow.engine.steps import EngineSteps
from undertow.engine.tuning import why_fixed
from undertow.errors import PhaseError, WrongType, all_of, require
from undertow.outer.outer_sync import OuterSync
from undertow.plan import Plan
from undertow.profile import Profile
from undertow.ranks.agreement import broadcast_in_place, synchronize_buffers
from undertow.ranks.group import GroupRef, chosen_group
from undertow.ranks.transport import OwnGroup
from undertow.sharded.steps import ShardedSteps
from undertow.sync.handles import MeanOverRanks, Reduction, name_of_op, start_mean, start_reduction
from undertow.sync.ignore import names_to_ignore
from undertow.sync.late_backward import warn_of_late_backward
from undertow.sync.measurements import (
    explanation_of,
    measured_profile,
    plans_not_tried,
    sweep,
)
from undertow.sync.tracing import save_trace, trace_at_end
from undertow.torch_private import private
from undertow.torch_private.module_hook import ModuleHook, cut_graphs
from undertow.trace import StepReport, Trace, summarize
from undertow.tune import Explanation

T = TypeVar("T")
# Names of Undertow's threads, and of threads that Python has not started.
_NOT_THE_USERS = ("undertow-", "Dummy-")


class GradientSync:
    """Synchronizes the gradients of one module.

    `attach` returns one, and `DistributedDataParallel` has one as `model.sync`:

        sync = undertow.attach(model)
        model(batch).backward()  # gradients are averaged over ranks

    It owns the module's engine, process group and hooks, from construction to `close`. Construction
    is a collective call: every rank takes over rank 0's tensors of the kinds in `shared`.
    `elsewhere` has the names that another GradientSync handles; ranks may differ in it. Faults of
    `within` are faults here too.

    Raises:
        ConfigError: If the settings are invalid.
        PlanMismatch: On every rank, if ranks hold different parameters or settings.
    """

    # one for each group of experts, in the order of the settings
    experts: tuple[GradientSync, ...] = ()
    outer: OuterSync | None = None  # with SyncConfig(outer=...)
    _is_attached = False  # True if the module's own forwards are watched

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
        self._module = module
        self._members = ModuleParams(
            module, ignored, elsewhere=elsewhere, reduce_dtype=config.reduce_dtype
        )
        self._forward_hooks: list[RemovableHandle] = []  # of an attached module
        self._is_closed = self._is_compiled = False
        self._steps: ShardedSteps | None = None
        group = chosen_group(
            process_group, device_mesh, config.strategy, has_replicas=config.outer is not None
        )
        self._set_up(group, within)
        if isinstance(process_group, GroupRef):
            return  # a copied or unpickled model: its ranks open the group when they first use it
        try:
            self._share(shared)
        except BaseException:
            self.close()
            raise

    def _set_up(self, group: GroupRef, within: OwnGroup | None = None) -> None:
        """Creates everything that belongs to one process group, without communication."""
        device, attached = self._members.device, contextlib.ExitStack()
        all_ranks: OwnGroup | None = None
        if self._config.outer is not None:  # the engine synchronizes within a replica
            within = all_ranks = OwnGroup(group, device=device, limits=self._config)
            attached.callback(all_ranks.close)
            group = group.replica()
        own = self._group = OwnGroup(group, device=device, limits=self._config, within=within)
        own.here.module = weakref.ref(self._module)
        members = self._members
        engine = self._engine = Engine(
            members, own, self._config, Recorder(own, level=self._config.record)
        )
        if getattr(self._module.forward, "__func__", None) is nn.Module.forward:
            # a container: it has no forward to wait for
            engine.progress.forward = Forward.RUNNING
        engine.siblings = SiblingEngines([engine], close=weakref.WeakMethod(self.close))
        attached.callback(own.close)
        attached.callback(members.close)
        attached.callback(engine.close)
        events = self._events = StepEvents()
        attached.callback(events.close)
        self._engine_steps = EngineSteps(engine, self._config)
        events.subscribe(self._engine_steps)
        if all_ranks is not None:
            attached.callback(_add_outer(self, all_ranks).close)
        if engine.current_plan.is_active:
            events.follow_loads(self._module)
        write_trace = trace_at_end(engine)
        if write_trace is not None:
            attached.callback(write_trace)
        self._attached = attached
        # The garbage collector does not see through a parameter's hooks: without this, a dropped
        # model is never freed.
        self._finalizer = weakref.finalize(
            self, _close_dropped, engine, attached.close, os.getpid()
        )
        self._finalizer.atexit = False  # other ranks may have ended

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The user's process group. Gradients are averaged over its ranks.

        Undertow itself communicates over a clone of it.
        """
        group = self._all_ranks.user.group
        return self._all_ranks.process_group if group is None else group

    @property
    def rank(self) -> int:
        return self._all_ranks.rank

    @property
    def num_ranks(self) -> int:
        return self._all_ranks.num_ranks

    @property
    def _all_ranks(self) -> OwnGroup:
        """The group of all ranks that train the model; with `outer`, of all replicas."""
        return self._group if self.outer is None else self.outer.all_ranks

    @property
    def _parts(self) -> tuple[GradientSync, ...]:
        """The synchronization of the dense parameters, and one of each group of experts."""
        return (self, *self.experts)

    @property
    def _has_comm_hook(self) -> bool:
        return self._engine.current_plan.comm_hook is not None

    @property
    def _is_training_forward(self) -> bool:
        """True if a forward that starts now is a training forward.

        The module is in training mode and gradients are enabled.
        """
        return self._module.training and is_outermost_forward()

    @property
    def config(self) -> SyncConfig:
        groups = tuple(group for part in self._parts for group in part._config.experts)
        return dataclasses.replace(self._config, experts=groups) if self.experts else self._config

    @property
    def plan(self) -> Plan:
        """The plan of the last synchronization; a new plan takes effect when the next one
        begins."""
        return self._engine.current_plan.compiled.plan

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Returns all parameters of the module except ignored ones, frozen parameters included."""
        return self._members.named_params()

    def _take_part_with_experts(self) -> None:
        """Makes a backward that reaches a parameter of any part a synchronization of all parts."""
        engines = [part._engine for part in self._parts]
        for engine in engines:
            engine.siblings = SiblingEngines(engines, close=weakref.WeakMethod(self.close))

    @property
    def is_accumulating(self) -> bool:
        """True if a backward that runs now only accumulates; `accumulate()` sets it temporarily."""
        return self._engine.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        for part in self._parts:
            part._engine.is_accumulating = value

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that received no gradient on this rank in any micro-batch of the
        last step, experts last."""
        return tuple(name for part in self._parts for name in part._engine.unused_parameters)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context that makes backward only accumulate gradients.

        The next backward outside of it synchronizes their sum. If none follows, a step outside of
        it does. A step inside of it is on this rank's own gradients; with a sharded optimizer it
        raises PhaseError.
        """
        if self._is_closed:  # checked before the call, which every micro-batch would pay for
            self._require_open("accumulate()")
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
        a step, also a rank without data. The forward hides it. If a loss is a sum over tokens,
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
        self._require_open("mean_over_ranks(number)")
        return start_mean([part._engine for part in self._parts], number)

    @private.untraced
    def finish(self, *, buffers_follow: int | None = 0) -> None:
        """Joins the other ranks' synchronization if this rank's backward reached no parameter.

        Call it also if this rank has no data. It does nothing if a synchronization has run since
        this rank's last training forward or optimizer step, nor where backwards only accumulate.
        After a training forward, an optimizer that holds one of the parameters calls it
        automatically before it steps.

        Args:
            buffers_follow: The rank whose buffers are copied if no forward ran here, because the
                other ranks' forwards copied them; None copies none.
        """
        self._require_open("finish()")
        engine = self._engine
        if (
            engine.synchronizes
            and engine.is_step_empty
            and engine.progress.are_buffers_due
            and buffers_follow is not None
            and self._config.buffers != "off"
            and self._module.training
        ):
            self._synchronize_buffers(source=buffers_follow)
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
            A handle that can be waited for, asked by `is_completed()`, and awaited.

        Raises:
            PhaseError: Inside a backward, if this rank has accumulated nothing since the last
                synchronization, or if it has not waited for an earlier reduction.
            Desync: If ranks give different ops.
        """
        self._require_open("reduce_gradients_async()")
        engines = [part._engine for part in self._parts]
        return start_reduction(engines, op=name_of_op(op), has_hook=self._has_comm_hook)

    @private.untraced
    def wait(self) -> None:
        """Waits until every gradient and every parameter has its final value."""
        all_of(*(part._wait for part in self._parts))

    @private.untraced
    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter, whole on this rank.

        Under a sharded optimizer it is a collective call of its group's ranks.

        Args:
            param: A parameter of the module.

        Returns:
            A tensor of the parameter's shape, or None if it has no gradient.
        """
        owners = (
            expert
            for expert in self.experts
            if any(param is own for _, own in expert._members.named_params())
        )
        owner = next(owners, self)
        owner._engine_steps.finish_before_look([param], reader="full_gradient")
        sharding = None if owner._steps is None else owner._steps.sharding
        return param.grad if sharding is None else sharding.full_gradient(param)

    def broadcast_parameters(self) -> None:
        """Copies rank 0's parameters and buffers to every rank; a collective call."""
        self._require_open("broadcast_parameters()")
        self._share(("parameters", "buffers"))

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
        self._require_open("register_comm_hook()")
        if self._steps is not None:
            raise refused("hook", "shards", where="ShardedOptimizer")
        self._engine.current_plan.use_hook(CommHook(state, hook), is_in_round=self._engine.is_busy)
        self._watch_forwards()

    def report(self) -> StepReport:
        """Returns the times of the last steps on this rank; `print` shows them as tables. Never
        communicates.

        They cover the dense parameters; `experts` has the reports of the groups of experts.
        """
        engine, compiled = self._engine, self._engine.current_plan.compiled
        is_one_graph = (
            self.num_ranks > 1
            and (self._is_compiled or private.is_compiled(self._module))
            and not self._cut_bytes()
        )
        report = summarize(
            engine.recorder.records(generation=compiled.generation),
            self.plan,
            rank=self.rank,
            num_skipped=engine.checks.numbers.num_skipped,
            is_one_graph=is_one_graph,
            plan_since=engine.recorder.changed_at(compiled.generation),
        )
        return dataclasses.replace(
            report,
            why_fixed=why_fixed(compiled.reducer),
            not_tried=plans_not_tried(engine.current_plan.hooks),
            wire=self._config.wire,
            param_wire=self._config.param_wire,
            zeroed=compiled.reducer.lost.share,
            experts=self._of_experts(GradientSync.report),
            outer=None if self.outer is None else self.outer.report(),
        )

    def traces(self) -> tuple[Trace, ...]:
        """Returns the traces of the recorded steps that ran under the current plan, oldest
        first."""
        generation = self._engine.current_plan.compiled.generation
        return tuple(
            record.trace() for record in self._engine.recorder.records(generation=generation)
        )

    def explain(self) -> Explanation:
        """Returns the reasons for the plan, and every plan that was tried, with its times; `print`
        shows them.

        Never communicates: a single rank may call it. The answer is the same on all ranks.
        """
        current_plan = self._engine.current_plan
        explanation = explanation_of(current_plan.hooks, current_plan.compiled, self._config)
        experts = self._of_experts(GradientSync.explain)
        outer = "" if self.outer is None else self.outer.report().text
        return dataclasses.replace(explanation, experts=experts, outer=outer)

    def _of_experts(self, ask: Callable[[GradientSync], T]) -> dict[str, T]:
        """Asks every group of experts, and returns the answers by their names for users."""
        return {
            f"{expert._config.experts[0].match!r}, ranks "
            f"{', '.join(map(str, expert._group.user.ranks))}": ask(expert)
            for expert in self.experts
        }

    def profile(self) -> Profile:
        """Returns all measurements that planning and simulation need; never communicates.

        Raises:
            PhaseError: Until the first steps of the model are measured, which takes about ten.
        """
        current_plan = self._engine.current_plan
        return measured_profile(current_plan.hooks, current_plan.compiled, self._config)

    def measure_network(self) -> None:
        """Measures the network with messages of many sizes, for plans and profiles.

        A collective call between steps. Training does not need it: it measures its own messages.

        Raises:
            PhaseError: If nothing is measured.
        """
        self._require_open("measure_network()")
        for part in self._parts:
            sweep(part._engine, part._config)

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
            steps: The last so many steps; None takes all that are recorded.

        Returns:
            The path of the file.

        Raises:
            PhaseError: If no step is recorded.
            ConfigError: If the file cannot be written.
        """
        paths = [
            save_trace(part._engine, path, steps=steps, number=at)
            for at, part in enumerate(self._parts)
        ]
        return paths[0]

    def save_plan(self, path: str | Path) -> None:
        """Writes the current plan as JSON.

        Args:
            path: The file to write; `SyncConfig(plan=path)` pins it.
        """
        Path(path).write_text(self.plan.to_json() + "\n", encoding="utf-8")

    def _wait(self) -> None:
        # In a backward, a hook or a signal handler calls this: its end waits for the gradients.
        if private.graph_task_id() == -1:
            self._engine.rounds.finish()
        self._engine.current_plan.wait_for_parameters()

    @private.untraced
    def _wait_for_parameters(self) -> None:
        """Waits for all parameters that a sharded optimizer updates."""
        all_of(*(part._engine.current_plan.wait_for_parameters for part in self._parts))

    def _shard(self, stepper: Optimizer, settings: dict[str, Any], *, whole: bool) -> ShardedSteps:
        """Hands the parameters to `stepper`: only it updates them, and each rank updates one shard.

        A collective call, which lays the parameters out. Raises ConfigError if the settings do not
        support shards or an earlier stepper is still in use, and PlanMismatch on every rank if
        ranks give different `settings`.
        """
        self._require_open("ShardedOptimizer")
        require_outside_of_backward(
            "ShardedOptimizer()",
            where=f"rank {self.rank}",
            remedy="Make the optimizer before or after it.",
        )
        self._wait()
        if self._steps is None:
            self._engine.current_plan.open_group()
            self._steps = ShardedSteps(
                self._module, self._engine, self._config, is_compiled=self._is_compiled
            )
            self._attached.callback(self._steps.close)
            self._events.subscribe(self._steps)
        self._steps.hand_to(stepper, settings, is_whole=whole)
        return self._steps

    def _share(self, kinds: Collection[str], *, source: int = 0) -> None:
        """Copies the "parameters" or "buffers" of rank `source`, and of the first rank of experts'
        groups; a collective call."""
        (self._engine.current_plan if self.outer is None else self.outer).open_group()
        group = self._all_ranks
        if group.num_ranks == 1:
            return
        self._wait_for_parameters()
        if "parameters" in kinds:
            broadcast_in_place(
                [param for _, param in self.named_parameters()], group, source=source
            )
            self._engine.checks.loads.settle()
        if "buffers" in kinds:
            tensors = [buffer.tensor for buffer in self._members.common_buffers.now()]
            broadcast_in_place(tensors, group, source=source)
        if self.outer is not None:
            self.outer.reset()
        for expert in self.experts:
            expert._share(kinds)

    def _synchronize_buffers(self, *, source: int = 0) -> None:
        """Copies the buffers of rank `source`; a collective call."""
        if self._group.num_ranks == 1:
            return
        self._engine.current_plan.open_group()
        if self._members.common_buffers.buffers:
            synchronize_buffers(self._members.common_buffers, self._group, source=source)

    def _shadow(self) -> None:
        """Takes part in one synchronization of the other ranks without contributing gradients."""
        self._engine.shadow()
        self._engine.checks.require_alike()  # no later call on this rank checks

    def _watch_forwards(self) -> None:
        """Registers hooks at the start and the end of every forward of an attached module, until
        `close`.

        A single rank has none until a communication hook needs them.
        """
        is_active = any(part._engine.current_plan.is_active for part in self._parts)
        if not is_active or not self._is_attached or self._forward_hooks:
            return
        begins, ends = (
            ModuleHook(self._module, then)
            for then in (self._attached_forward_begins, self._forward_ends)
        )
        self._forward_hooks = [
            self._module.register_forward_pre_hook(begins, prepend=True),
            self._module.register_forward_hook(ends, always_call=True),
            *cut_graphs(self._module, self._cut_bytes),
        ]

    def _cut_bytes(self) -> int:
        """Returns the bucket size at which torch.compile cuts graphs of the module, or 0 if they
        stay whole."""
        return self._engine.current_plan.compiled.cut_bytes

    def _attached_forward_begins(self) -> None:
        follows = self._config.buffers != "off" and self._engine.progress.are_buffers_due
        self._forward_begins(
            buffers_follow=0 if follows else None, is_compiled=torch.compiler.is_compiling()
        )

    @private.untraced
    def _forward_begins(self, *, buffers_follow: int | None = 0, is_compiled: bool = False) -> None:
        """Called before each forward of the module.

        Starts a step and, unless `buffers_follow` is None, synchronizes buffers.
        """
        if self.experts:
            all_of(
                *(
                    partial(part._one_forward_begins, buffers_follow, is_compiled)
                    for part in self._parts
                )
            )
        else:
            self._one_forward_begins(buffers_follow, is_compiled)

    def _one_forward_begins(self, buffers_follow: int | None, is_compiled: bool) -> None:
        self._is_compiled |= is_compiled
        is_outermost = is_outermost_forward()
        is_training = is_outermost and self._module.training
        if self._engine.is_closed:
            if is_training and not self._is_averaged_elsewhere():
                self._require_open("a training forward")
            return
        if not self._engine.current_plan.is_active:
            return
        if is_training and private.is_in_rpc_context():
            raise PhaseError(
                "gradients of torch.distributed.rpc are not averaged: a context of distributed "
                "autograd keeps them instead of `.grad`.",
                where=f"a training forward in dist_autograd.context(), rank {self.rank}",
                remedy="Run the forward outside of the context, or use torch's "
                "DistributedDataParallel.",
            )
        if is_outermost:
            self._engine.forward_begins(is_training=is_training, is_compiled=is_compiled)
        if self._steps is not None:  # after the mark of the forward, which this wait belongs to
            self._steps.forward_begins(is_training=is_training, is_compiled=is_compiled)
        if not is_training:
            return
        if buffers_follow is not None and (
            self._members.common_buffers.buffers or not self._group.is_open
        ):
            self._synchronize_buffers(source=buffers_follow)

    def _is_averaged_elsewhere(self) -> bool:
        """Returns True in a step that a forward of a newer wrapper of all trained parameters has
        begun."""
        trained = self._members.trained_now()
        newer = earlier_watchers(trained).values()
        has_begun = all(engine.progress.forward is not Forward.NONE for engine in newer)
        return has_begun and all(is_watched(param) for _, param in trained)

    @private.untraced
    def _forward_ends(self) -> None:
        if self._steps is not None:
            self._steps.forward_ends()
        if not self._engine.is_closed and is_outermost_forward():
            self._engine.forward_ends()
        for expert in self.experts:
            expert._forward_ends()

    def _require_open(self, call: str) -> None:
        """Raises PhaseError after `close()`, when `call` would average nothing."""
        require(
            not self._is_closed,
            "this model is closed: its gradients are not averaged any more.",
            where=f"{call}, rank {self.rank}",
            remedy="Train `model.module`, the module itself, without averaging, or wrap it again.",
            error=PhaseError,
        )

    def close(self) -> None:
        """Removes all hooks from the module and destroys Undertow's process group; later calls do
        nothing.

        A backward whose forward has already run will warn. Raises PhaseError inside a backward.
        """
        if all(part._is_closed for part in self._parts):
            return
        require_outside_of_backward(
            "close()",
            where=f"rank {self._group.rank}",
            remedy="Call it after backward: gradients of this one may be on their way.",
        )
        # This object last: its group watches the ranks for the experts too.
        all_of(*(expert.close for expert in self.experts), self._close)

    def _close(self) -> None:
        if self._is_closed:  # by a call that was interrupted before it closed the experts
            return
        self._is_closed = True
        is_backward_due = self._engine.is_backward_due
        try:
            if self._group.is_alive:
                self._wait()  # gradients in flight would otherwise end up None
            elif self._group.existing() is None:
                # Without the group: gathers hold theirs.
                self._engine.current_plan.wait_for_parameters()
        finally:
            # The finalizer would wait again for a round that has failed or was interrupted.
            self._finalizer.detach()
            self._attached.close()
            for hook in self._forward_hooks:
                hook.remove()
        if is_backward_due:
            warn_of_late_backward(self._module, [param for _, param in self._members.trained_now()])


def _close_dropped(engine: Engine, close: Callable[[], object], process: int) -> None:
    """Closes a model that nothing refers to any more; drops errors of waits.

    It waits for gradients and parameters on their way, because other ranks wait for them too. It
    does not wait in a child process, or if the garbage collector runs in one of Undertow's threads,
    which may be the one that gathers.
    """
    try:
        thread = threading.current_thread().name
        if os.getpid() == process and not thread.startswith(_NOT_THE_USERS):
            if private.graph_task_id() == -1:
                engine.siblings.wait_for_reductions()
            engine.siblings.wait_for_parameters()
    finally:
        close()


def _add_outer(sync: GradientSync, all_ranks: OwnGroup) -> OuterSync:
    """Adds the outer synchronization over the ranks of all replicas."""
    all_ranks.here.module = sync._group.here.module
    sync.outer = OuterSync(sync._module, all_ranks, sync._engine, sync._config)
    return sync.outer


def sync_of(target: object, *, where: str, remedy: str) -> GradientSync:
    """Returns the GradientSync of a wrapper, or `target` itself if it is one.

    Raises WrongType for anything else.
    """
    sync = getattr(target, "sync", target)
    if isinstance(sync, GradientSync):
        return sync
    raise WrongType(
        "target must be the result of attach() or DistributedDataParallel, got "
        f"{type(target).__name__}.",
        where=where,
        remedy=remedy,
    )
