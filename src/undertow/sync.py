"""Gradient synchronization of a module whose class and state dict keys do not change."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from undertow.config import SyncConfig
from undertow.errors import PhaseError
from undertow.plan import Plan
from undertow.profile import Profile
from undertow.runtime.comm.broadcast import broadcast_in_place, synchronize_buffers
from undertow.runtime.comm.comm_hook import CommHook, no_hook_with_sums
from undertow.runtime.comm.group import GroupRef, OwnGroup, chosen_group, other_group, warn_of_lone_rank
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.hooks import is_outermost_forward, is_watched, warn_of_late_backward
from undertow.runtime.gradients.weights import require_weighted
from undertow.runtime.model.ignore import names_to_ignore
from undertow.runtime.model.module_params import AnyOf, ModuleParams
from undertow.runtime.replan.planning import explanation_of, measured_profile
from undertow.runtime.step.dropped import let_go_when_dropped
from undertow.runtime.step.engine import Engine
from undertow.runtime.step.reduction import Reduction, start_reduction
from undertow.runtime.step.rounds import Phase
from undertow.runtime.step.sharded_steps import (
    ShardedSteps,
    full_gradient,
    no_hooks_with_shards,
    watch_steps,
)
from undertow.runtime.step.siblings import SiblingEngines, all_of
from undertow.runtime.step.sweep import sweep
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.compile import cut_graphs
from undertow.runtime.torch_private.module_hook import ModuleHook
from undertow.trace import StepReport, Trace, summarize
from undertow.tune import Explanation


class GradientSync:
    """Synchronizes the gradients of one module.

    `attach` returns one, and `DistributedDataParallel` has one as `model.sync`:

        sync = undertow.attach(model)
        model(batch).backward()  # gradients are averaged over ranks

    Construction is a collective call: every rank takes over rank 0's tensors of the kinds in `shared`. Raises ConfigError if the
    settings are invalid, and PlanMismatch on every rank if ranks hold different parameters or settings.
    """

    experts: tuple[GradientSync, ...] = ()  # one for each group of experts, in the order of the settings

    def __init__(  # noqa: PLR0913  what users choose, and what the caller synchronizes elsewhere
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | GroupRef | None = None,
        device_mesh: DeviceMesh | None = None,
        config: SyncConfig | None = None,
        ignore: Iterable[str | nn.Module | Tensor] = (),
        shared: Collection[str] = ("parameters", "buffers"),
        elsewhere: Container[str] = frozenset(),
        within: OwnGroup | None = None,
    ) -> None:
        # `elsewhere` has the names that another GradientSync handles; ranks may differ in it. Faults of `within` are faults here
        # too.
        config = SyncConfig() if config is None else config
        ignored = {*names_to_ignore(module, config.ignore), *names_to_ignore(module, ignore)}
        self._config = dataclasses.replace(config, ignore=tuple(ignored))
        self._module = module
        self._members = ModuleParams(module, AnyOf((ignored, elsewhere)), reduce_dtype=config.reduce_dtype)
        self._forward_hooks: list[RemovableHandle] = []
        self._is_closed = self._is_compiled = False
        self.steps: ShardedSteps | None = None
        self._set_up(chosen_group(process_group, device_mesh, config.strategy), within)
        if isinstance(process_group, GroupRef):
            return  # a copied or unpickled model: its ranks open the group when they first use it
        try:
            self._engine.current_plan.open()
            self.share(shared)
        except BaseException:
            self.close()
            raise

    def _set_up(self, group: GroupRef, within: OwnGroup | None = None) -> None:
        """Creates everything that belongs to one process group, without communication."""
        own = self._group = OwnGroup(group, device=self._members.device, limits=self._config, within=within)
        own.here.module = weakref.ref(self._module)
        self._engine = Engine(self._members, own, self._config, Recorder(own, level=self._config.record))
        attached, members, engine = contextlib.ExitStack(), self._members, self._engine
        attached.callback(self._group.close)
        attached.callback(
            lambda: None if engine.phase is Phase.HANDED_OVER else members.close()
        )  # a successor has taken the members over
        attached.callback(self._engine.close)
        attached.callback(watch_steps(self, self._engine))
        self._attached = attached
        # The garbage collector does not see through a parameter's hooks: without this, a dropped model is never freed.
        self._let_go = let_go_when_dropped(self, self._engine, attached.close)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The user's process group. Gradients are averaged over its ranks; Undertow itself communicates over a clone of it."""
        group = self._group.user.group
        return self._group.process_group if group is None else group

    @property
    def own_group(self) -> OwnGroup:
        """The clone of the user's group that carries all of Undertow's messages."""
        return self._group

    @property
    def group_reference(self) -> GroupRef:
        """A reference to the user's group that can be copied with the model."""
        return self._group.user

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def num_ranks(self) -> int:
        return self._group.num_ranks

    @property
    def device(self) -> torch.device:
        """The device of the small tensors that ranks exchange."""
        return self._group.device

    @property
    def parts(self) -> tuple[GradientSync, ...]:
        """The synchronization of the dense parameters, and one of each group of experts."""
        return (self, *self.experts)

    @property
    def has_comm_hook(self) -> bool:
        return self._engine.current_plan.now.compiled.reducer.hook is not None

    @property
    def is_synchronizing(self) -> bool:
        """True if a synchronization is in progress: a backward is running, or one has failed."""
        return any(part._engine.is_busy for part in self.parts)

    @property
    def is_training_forward(self) -> bool:
        """True if a forward that starts now is a training forward: the module is in training mode and gradients are enabled."""
        return self._module.training and is_outermost_forward()

    @property
    def rescale(self) -> float:
        """Factor for the mean, and only the mean, if some ranks have run out of data; used from the next synchronization on."""
        return self._engine.progress.rescale

    @rescale.setter
    def rescale(self, value: float) -> None:
        self._engine.progress.rescale = value if self._config.op == "mean" else 1.0

    @property
    def config(self) -> SyncConfig:
        groups = tuple(group for part in self.parts for group in part._config.experts)
        return dataclasses.replace(self._config, experts=groups) if self.experts else self._config

    @property
    def plan(self) -> Plan:
        """The plan of the last synchronization; a new plan takes effect when the next one begins."""
        return self._engine.current_plan.plan

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """Returns all parameters of the module except ignored ones, frozen parameters included."""
        return self._members.named_params()

    def take_part_with_experts(self) -> None:
        """Makes a backward that reaches a parameter of any part a synchronization of all parts."""
        engines = [part._engine for part in self.parts]
        for engine in engines:
            engine.siblings = SiblingEngines(engines)

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that received no gradient on this rank in any micro-batch of the last step, experts last."""
        return tuple(name for part in self.parts for name in part._engine.unused_parameters)

    @property
    def is_accumulating(self) -> bool:
        """True if a backward that runs now only accumulates; `accumulate()` sets it temporarily."""
        return self._engine.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        for part in self.parts:
            part._engine.accumulates(value)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context in which backward only accumulates gradients; the next backward outside of it synchronizes their sum."""
        if self._is_closed:  # checked before the call, which every micro-batch would pay for
            self.require_open("accumulate()")
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    no_sync = accumulate

    @private.untraced
    def loss_weight(self, n: float | Tensor) -> None:
        """Sets the weight of the next backward's loss to `n`, for `SyncConfig(op="weighted")`.

        `n` is the number of tokens or samples of this rank that the loss is summed over, or 0 if the rank has none. Every `.grad`
        becomes the sum over ranks, divided by the sum of the weights of all ranks and micro-batches, even if several backwards of
        a step synchronize. The weights cost one small fp64 all-reduce, sent when the backward begins. Call it before each
        backward; a backward without a call adds no weight. A rank that joins by `finish()` needs no call. Raises ConfigError for
        another `op`, and unless `n` is a number >= 0. Raises PhaseError on every rank at the end of a synchronization to which
        some rank gave no weight or whose weights add up to 0, and at an optimizer step before the backward.
        """
        if self._is_closed:
            self.require_open("loss_weight(n)")
        require_weighted(self._config.op)
        self._engine.earlier.weights.give(n)  # type: ignore[union-attr]  # it has weights

    @private.untraced
    def finish(self, *, buffers_follow: int | None = 0) -> None:
        """Joins the other ranks' synchronization if this rank's backward reached no parameter or if it has no data.

        Does nothing if a synchronization has run since this rank's last training forward or optimizer step. If no forward ran, it
        also synchronizes buffers, because the other ranks' forwards did. After a training forward, an optimizer that holds one of
        the parameters calls it automatically before it steps.
        """
        self.require_open("finish()")
        is_empty = self._engine.is_step_empty and not self._engine.is_accumulating
        if is_empty and buffers_follow is not None and self._config.buffers != "off" and self._module.training:
            self.synchronize_buffers(source=buffers_follow)
        all_of(self._engine.finish, *(partial(expert.finish, buffers_follow=buffers_follow) for expert in self.experts))

    @private.untraced
    def reduce_gradients_async(self, op: Literal["mean", "sum"] | None = None) -> Reduction:
        """Sends the accumulated gradients; call `wait` on the result before the optimizer steps.

        `op` is "mean" or "sum" of the ranks' `.grad`; None takes the `op` of the settings. A different `op` multiplies or divides
        the result by the number of ranks (for experts, by their divisor), and excludes weights and a communication hook.

        Raises PhaseError inside a backward. Raises PhaseError on every rank if some rank has accumulated nothing since the last
        synchronization or has not waited for an earlier reduction; the error comes from this call, from `wait`, or from the next
        synchronization of a rank that does not reduce. Raises Desync if ranks give different ops.
        """
        self.require_open("reduce_gradients_async()")
        engines = [part._engine for part in self.parts]
        has_hook, usual = self.has_comm_hook, self._config.op
        op = None if op == usual and not has_hook else op
        return start_reduction(engines, op=op, has_hook=has_hook, is_weighted=usual == "weighted")

    @private.untraced
    def wait(self) -> None:
        """Waits until every gradient and every parameter has its final value."""
        all_of(*(part._wait for part in self.parts))

    def _wait(self) -> None:
        self._engine.complete()
        if self.steps is not None:
            self.steps.wait()

    def wait_for_parameters(self) -> None:
        """Waits for all parameters that a sharded optimizer updates; PhaseError in a backward that updates them."""
        all_of(*(part.steps.wait for part in self.parts if part.steps is not None))

    def shard(self, stepper: Optimizer, settings: dict[str, Any], *, steps_in_backward: bool = False) -> ShardedSteps:
        """Hands the parameters to `stepper`: from its first step on, only it updates them, and each rank updates one shard.

        A collective call. Raises ConfigError if the settings do not support shards or an earlier stepper is still in use, and
        PlanMismatch on every rank if ranks give different `settings`.
        """
        self.require_open("ShardedOptimizer")
        if self.steps is None:
            self._engine.current_plan.open()
            self.steps = ShardedSteps(
                self._module, self._engine, self._config, is_compiled=self._is_compiled, steps_in_backward=steps_in_backward
            )
            self._attached.callback(self.steps.close)
        self.steps.hand_to(stepper, settings, steps_in_backward=steps_in_backward)
        return self.steps

    @private.untraced
    def full_gradient(self, param: Tensor) -> Tensor | None:
        """Returns the mean gradient of a parameter, or None; under a sharded optimizer a collective call of its group's ranks."""
        owners = (expert for expert in self.experts if any(param is own for _, own in expert._members.named_params()))
        return full_gradient(next(owners, self), param)

    def broadcast_parameters(self) -> None:
        """Copies rank 0's parameters and buffers to every rank; a collective call."""
        self.require_open("broadcast_parameters()")
        self.share(("parameters", "buffers"))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces every bucket with `hook(state, bucket)` instead of an all-reduce. Call it once, and not inside a backward.

        The hook returns a future of the reduced buffer. `bucket` has the methods of torch.distributed.GradBucket, so torch's own
        hooks run unchanged. Its gradients are not divided: the hook computes the mean. On the host, hooks run in a thread, one
        bucket after another. To combine several hooks, use `undertow.chain_comm_hooks`.

        Raises PhaseError inside a backward or on a second call. The next synchronization compares the names of the ranks' hooks,
        and raises PlanMismatch on every rank if they differ.
        """
        self.require_open("register_comm_hook()")
        if self.steps is not None:
            raise no_hooks_with_shards()
        if self._engine.earlier is not None:
            raise no_hook_with_sums()
        self._engine.use_hook(CommHook(state, hook))

    def change_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Averages over the ranks of `process_group` from the next forward on; each of its ranks must call it."""
        self.require_open("_update_process_group")
        if self.experts:
            raise PhaseError(
                "the ranks of a model with experts cannot change.",
                where="_update_process_group",
                remedy="Close the wrapper, and wrap the model anew.",
            )
        if self.steps is not None:
            raise PhaseError(
                "the ranks of a model whose optimizer is sharded over them cannot change.",
                where="_update_process_group",
                remedy="Save a checkpoint, and load it over the other ranks.",
            )
        group = other_group(process_group, self._config.strategy)
        warn_of_lone_rank(process_group, type(self._module).__name__)
        before = self._engine
        accumulated = before.hand_over()
        self._let_go()
        self._set_up(group)
        hook = before.current_plan.now.compiled.reducer.hook
        if hook is not None:
            self._engine.use_hook(hook)
        self._engine.accumulates(before.is_accumulating)
        self._engine.take_from(accumulated)

    def share(self, kinds: Collection[str], *, source: int = 0) -> None:
        """Copies the "parameters" or "buffers" of rank `source`, and of the first rank of experts' groups; a collective call."""
        if self._group.num_ranks == 1:
            return
        self._engine.current_plan.open()
        self.wait_for_parameters()
        if "parameters" in kinds:
            broadcast_in_place([param for _, param in self.named_parameters()], self._group, source=source)
        if "buffers" in kinds:
            broadcast_in_place(self._members.common_buffers.tensors, self._group, source=source)
        for expert in self.experts:
            expert.share(kinds)

    def synchronize_buffers(self, *, source: int = 0) -> None:
        """Copies buffers from rank `source` or averages them, depending on the settings; a collective call."""
        if self._group.num_ranks == 1:
            return
        self._engine.current_plan.open()
        averages = self._config.buffers == "mean"
        synchronize_buffers(self._members.common_buffers, self._group, source=source, averages=averages)

    def shadow(self) -> None:
        """Takes part in one synchronization of the other ranks without contributing gradients."""
        self._engine.shadow()
        self._engine.checks.require_alike()  # no later call on this rank checks

    @property
    def synchronizes(self) -> bool:
        """True if a backward that runs now communicates."""
        return self._engine.synchronizes

    def join_ends(self) -> None:
        """Ends `join`: all ranks are at the same point again and contribute gradients."""
        self._engine.progress.join_ends()

    def wait_after_backward(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Makes the end of the next synchronizing backward, or the next forward, wait for these futures too."""
        self._engine.also_awaited += futures

    def watch_forwards(self) -> None:
        """Registers hooks at the start and the end of every forward of the module, until `close`."""
        begins, ends = (ModuleHook(self._module, then) for then in (self._attached_forward_begins, self.forward_ends))
        self._forward_hooks = [
            self._module.register_forward_pre_hook(begins, prepend=True),
            self._module.register_forward_hook(ends, always_call=True),
            *cut_graphs(self._module, self.cut_bytes),
        ]

    @private.untraced
    def cut_bytes(self) -> int:
        """Returns the bucket size at which torch.compile cuts graphs of the module, or 0 if they stay whole."""
        return self._engine.current_plan.now.compiled.cut_bytes

    def _attached_forward_begins(self) -> None:
        follows = None if self._config.buffers == "off" else 0
        self.forward_begins(buffers_follow=follows, is_compiled=torch.compiler.is_compiling())

    @private.untraced
    def forward_begins(self, *, buffers_follow: int | None = 0, is_compiled: bool = False) -> None:
        """Called before each forward of the module: starts a step and, unless `buffers_follow` is None, synchronizes buffers."""
        if self.experts:
            all_of(*(partial(part._forward_begins, buffers_follow, is_compiled) for part in self.parts))
        else:
            self._forward_begins(buffers_follow, is_compiled)

    def _forward_begins(self, buffers_follow: int | None, is_compiled: bool) -> None:
        self._is_compiled |= is_compiled
        is_outermost = is_outermost_forward()
        is_training = is_outermost and self._module.training
        if self._engine.phase >= Phase.CLOSED:
            if is_training and any(not is_watched(param) for _, param in self._members.trained_now()):
                self.require_open("a training forward")
                if self._engine.phase is Phase.HANDED_OVER:
                    self._engine.current_plan.require_watched()
            return
        if is_outermost:
            self._engine.forward_begins(is_training=is_training)
        if self.steps is not None:  # after the mark of the forward, which this wait belongs to
            self.steps.forward_begins(is_training=is_training, is_compiled=is_compiled)
        if is_training and buffers_follow is not None and not self._engine.is_accumulating:
            self.synchronize_buffers(source=buffers_follow)

    @private.untraced
    def forward_ends(self) -> None:
        """Called after each forward of the module."""
        if self.steps is not None:
            self.steps.forward_ends()
        if self._engine.phase < Phase.CLOSED and is_outermost_forward():
            self._engine.recorder.forward_ends()
        for expert in self.experts:
            expert.forward_ends()

    def report(self) -> StepReport:
        """Returns the times of the last steps on this rank; `print` shows them as tables. Never communicates.

        They are those of the dense parameters; `experts` has the reports of the groups of experts.
        """
        records = self._engine.recorder.records(generation=self._engine.current_plan.now.compiled.generation)
        num_skipped, one_graph = self._engine.checks.numbers.num_skipped, self._is_compiled or private.is_compiled(self._module)
        one_graph = one_graph and self.num_ranks > 1 and not self.cut_bytes()
        report = summarize(records, self.plan, rank=self.rank, num_skipped=num_skipped, is_one_graph=one_graph)
        return dataclasses.replace(report, experts={name: expert.report() for name, expert in self._named_experts()})

    def traces(self) -> tuple[Trace, ...]:
        """Returns the traces of the recorded steps that ran under the current plan, oldest first."""
        generation = self._engine.current_plan.now.compiled.generation
        return tuple(record.trace() for record in self._engine.recorder.records(generation=generation))

    def explain(self) -> Explanation:
        """Returns the reasons for the plan: its time, the limit, other plans, and all decisions; `print` shows them.

        Never communicates: a single rank may call it. The decisions are the same on all ranks.
        """
        now = self._engine.current_plan.now
        explanation = explanation_of(now.hooks, now.compiled, self._config)
        return dataclasses.replace(explanation, experts={name: expert.explain() for name, expert in self._named_experts()})

    def _named_experts(self) -> Iterator[tuple[str, GradientSync]]:
        """Yields the groups of experts, each with its name for users."""
        for expert in self.experts:
            ranks = ", ".join(map(str, expert.group_reference.ranks))
            yield f"{expert._config.experts[0].match!r}, ranks {ranks}", expert

    def profile(self) -> Profile:
        """Returns all measurements that planning and simulation need; never communicates.

        Raises PhaseError until the first steps of the model are measured, which takes about ten.
        """
        now = self._engine.current_plan.now
        return measured_profile(now.hooks, now.compiled, self._config)

    def measure_network(self) -> None:
        """Measures the network with messages of many sizes, for plans and profiles; a collective call between steps.

        Training does not need it: it measures its own messages. Raises PhaseError if nothing is measured.
        """
        self.require_open("measure_network()")
        for part in self.parts:
            sweep(part._engine, part._config)

    def save_profile(self, path: str | Path) -> None:
        """Writes the profile as JSON for `undertow plan` and `undertow simulate`; see `profile`."""
        self.profile().save(path)

    def save_plan(self, path: str | Path) -> None:
        """Writes the current plan as JSON; `SyncConfig(plan=path)` pins it."""
        Path(path).write_text(self.plan.to_json() + "\n", encoding="utf-8")

    def require_open(self, call: str) -> None:
        """Raises PhaseError after `close()`, when `call` would average nothing."""
        if self._is_closed:
            raise PhaseError(
                "this model is closed: its gradients are not averaged any more.",
                where=f"{call}, rank {self.rank}",
                remedy="Train `model.module`, the module itself, without averaging, or wrap it anew.",
            )

    def close(self) -> None:
        """Removes all hooks from the module and destroys Undertow's process group; later calls do nothing.

        A backward whose forward has already run will warn. Raises PhaseError inside a backward.
        """
        if self._is_closed:
            return
        if private.graph_task_id() != -1:
            raise PhaseError(
                "close() was called inside a backward.",
                where=f"rank {self._group.rank}",
                remedy="Call it after backward: gradients of this one may be on their way.",
            )
        all_of(self._close, *(expert.close for expert in self.experts))

    def _close(self) -> None:
        self._is_closed = True
        is_backward_due = self._engine.is_backward_due
        try:
            if self._group.is_alive:
                self._wait()  # gradients in flight would otherwise end up None
        finally:
            self._let_go.detach()  # it would wait again for a synchronization that has failed or was interrupted
            self._attached.close()
            for hook in self._forward_hooks:
                hook.remove()
        if is_backward_due:
            warn_of_late_backward(self._module, [param for _, param in self._members.trained_now()])
