"""Gradient synchronization of a module that keeps its class and its keys."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
from undertow.report.explain import print_explanation
from undertow.report.terminal import print_report
from undertow.runtime.comm.broadcast import average_buffers, broadcast_buffers, broadcast_in_place
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.comm.group import GroupRef, OwnGroup
from undertow.runtime.comm.mesh import chosen_group, other_group, warn_of_lone_rank
from undertow.runtime.comm.recorder import Recorder, clock_for
from undertow.runtime.execute.hooks import is_outermost_forward, warn_of_late_backward
from undertow.runtime.gradients.weights import require_weighted
from undertow.runtime.model.ignore import names_to_ignore
from undertow.runtime.model.module_params import AnyOf, ModuleParams
from undertow.runtime.replan.planning import explanation_of, measured_profile
from undertow.runtime.step.dropped import let_go_when_dropped
from undertow.runtime.step.engine import Engine
from undertow.runtime.step.reduction import Reduction, start_reduction
from undertow.runtime.step.sharded_steps import (
    ShardedSteps,
    full_gradient,
    no_hooks_with_shards,
    require_plain_strategy,
    watch_steps,
)
from undertow.runtime.step.siblings import SiblingEngines
from undertow.runtime.step.sweep import sweep
from undertow.runtime.torch_private import private
from undertow.runtime.torch_private.compile import cut_bytes, cut_graphs
from undertow.runtime.torch_private.module_hook import ModuleHook
from undertow.trace import StepReport, Trace, summarize
from undertow.tune import Explanation


class GradientSync:
    """Synchronizes the gradients of one module; made by `attach` and by `DistributedDataParallel`.

    Making one is a collective call, in which every rank takes over rank 0's tensors of the kinds in `shared`. Raises
    ConfigError, and PlanMismatch on every rank if ranks hold different parameters or settings.
    """

    experts: Sequence[GradientSync] = ()  # what synchronizes each group of experts, in the order of the settings

    def __init__(  # noqa: PLR0913  the choices of its users, and what is not its affair
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | GroupRef | None = None,
        mesh: DeviceMesh | None = None,
        config: SyncConfig | None = None,
        ignore: Iterable[str | nn.Module | Tensor] = (),
        shared: Collection[str] = ("parameters", "buffers"),
        elsewhere: Container[str] = frozenset(),
        within: OwnGroup | None = None,
    ) -> None:
        # What somebody else synchronizes is `elsewhere`, maybe not the same on all ranks; what fails `within` it, fails here.
        config = SyncConfig() if config is None else config
        ignored = {*names_to_ignore(module, config.ignore), *names_to_ignore(module, ignore)}
        self._config = dataclasses.replace(config, ignore=tuple(ignored))
        self._module, self._within = module, within
        self._members = ModuleParams(module, AnyOf((ignored, elsewhere)), reduce_dtype=config.reduce_dtype)
        self._forward_hooks: list[RemovableHandle] = []
        self._is_closed = self._is_compiled = False
        self._hook: CommHook | None = None
        self.steps: ShardedSteps | None = None
        self._set_up(chosen_group(process_group, mesh, config.strategy))
        if isinstance(process_group, GroupRef):
            return  # a copy: the ranks that hold it open it when they first use it
        try:
            self._engine.open()
            self.share(shared)
        except BaseException:
            self.close()
            raise

    def _set_up(self, group: GroupRef) -> None:
        """Makes everything that belongs to one process group; communicates nothing."""
        own = self._group = OwnGroup(group, device=self._members.device, limits=self._config, within=self._within)
        own.module, self.waiting = weakref.ref(self._module), own.waiting
        self._recorder = Recorder(clock_for(own.device, own.backend), rank=own.rank, level=self._config.record)
        self._engine = Engine(self._members, own, self._config, self._recorder)
        if self._hook is not None:
            self._engine.use_hook(self._hook)
        attached, members, engine = contextlib.ExitStack(), self._members, self._engine
        attached.callback(self._group.close)
        attached.callback(lambda: None if engine.is_passed_on else members.close())  # who came later has them
        attached.callback(self._engine.close)
        attached.callback(watch_steps(self, self._engine))
        self._attached = attached
        # The garbage collector does not see through a parameter's hooks: without this a dropped model stays for ever.
        self._let_go = let_go_when_dropped(self, self._engine, attached.close)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The user's group, over whose ranks gradients are averaged; what we send travels over a clone of it."""
        group = self._group.user.group
        return self._group.process_group if group is None else group

    @property
    def own_group(self) -> OwnGroup:
        """The clone of the user's group, over which everything of ours travels."""
        return self._group

    @property
    def group_reference(self) -> GroupRef:
        """The user's group, as far as it can be copied."""
        return self._group.user

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def num_ranks(self) -> int:
        return self._group.num_ranks

    @property
    def device(self) -> torch.device:
        """Where small tensors of exchanges between ranks live."""
        return self._group.device

    @property
    def has_comm_hook(self) -> bool:
        return self._hook is not None

    @property
    def is_synchronizing(self) -> bool:
        """Whether a round is under way: a backward runs, or has not ended well."""
        return self._engine.is_busy

    @property
    def is_training_forward(self) -> bool:
        """Whether a forward that begins now is one that all ranks run: in training mode, and to be differentiated."""
        return self._module.training and is_outermost_forward()

    @property
    def rescale(self) -> float:
        """Factor for the mean, and for nothing else, where some ranks have run out of data; from the next round on."""
        return self._engine.rescale

    @rescale.setter
    def rescale(self, value: float) -> None:
        self._engine.rescale = value if self._config.op == "mean" else 1.0

    @property
    def config(self) -> SyncConfig:
        return self._config

    @property
    def plan(self) -> Plan:
        """The plan of the last round; a re-plan takes effect when the next one begins."""
        return self._engine.plan

    def named_parameters(self) -> list[tuple[str, Tensor]]:
        """All parameters of the module that are not left alone, trained or not."""
        return self._members.named_params()

    def take_part_with(self, others: Iterable[GradientSync]) -> None:
        """From now on a backward that reaches a parameter of one of us is a synchronization of all."""
        engines = [self._engine, *(other._engine for other in others)]
        for engine in engines:
            engine.siblings = SiblingEngines(engines)

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that got no gradient on this rank, over the micro-batches of the last step."""
        return self._engine.unused_parameters

    @property
    def is_accumulating(self) -> bool:
        """Whether a backward that runs now would only accumulate; `accumulate()` sets it for a while."""
        return self._engine.is_accumulating

    @is_accumulating.setter
    def is_accumulating(self, value: bool) -> None:
        self._engine.accumulates(value)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside only accumulate; the next one outside synchronizes the sum."""
        if self._is_closed:  # asked here: this is called for every micro-batch
            self.require_open("accumulate()")
        before, self.is_accumulating = self.is_accumulating, True
        try:
            yield
        finally:
            self.is_accumulating = before

    no_sync = accumulate

    @private.untraced
    def loss_weight(self, n: float | Tensor) -> None:
        """Says, before each backward, that its loss is the sum over `n` tokens or samples of this rank; 0 where it has none.

        For `SyncConfig(op="weighted")`: every `.grad` becomes the sum over ranks divided by the sum of all weights, those of all
        ranks and micro-batches, also where several backwards of a step synchronize. One more small all-reduce, of fp64, leaves
        when the backward begins; a backward without a call adds no weight. PhaseError on every rank at the end of a
        synchronization to which some rank gave no weight, or whose weights add up to 0, and at a step before the backward; a rank
        that joins by `finish()` needs none. ConfigError for another op, and unless `n` is a number >= 0.
        """
        if self._is_closed:
            self.require_open("loss_weight(n)")
        require_weighted(self._config.op)
        self._engine.combination.weigh(n)

    @private.untraced
    def finish(self, *, buffers_follow: int | None = 0) -> None:
        """Joins the other ranks where this rank's backward reached no parameter, or where it has no data at all.

        Runs a round if none has run since this rank's last training forward or step, else does nothing. Where no
        forward ran, buffers are synchronized as well, as the other ranks' forwards have done. After a training
        forward it is called by itself before an optimizer steps that holds one of the parameters.
        """
        self.require_open("finish()")
        is_empty = self._engine.is_step_empty and not self._engine.is_accumulating
        if is_empty and buffers_follow is not None and self._config.buffers != "off" and self._module.training:
            self.synchronize_buffers(source=buffers_follow)
        self._engine.finish()

    @private.untraced
    def reduce_gradients_async(self, op: str | None = None) -> Reduction:
        """Sends the gradients that were accumulated; wait for the result before the optimizer steps.

        `op` is "mean" or "sum", of what each rank's `.grad` holds; None is that of the settings. Another one than that multiplies
        or divides the result by the number of ranks (of experts by their divisor), and goes neither with weights nor with a hook.

        PhaseError inside a backward, and on every rank where some rank has accumulated nothing since the last synchronization or
        has not waited for an earlier reduction: here, in `wait`, or in the next synchronization of a rank that does not reduce.
        Desync where ranks give different ops.
        """
        self.require_open("reduce_gradients_async()")
        engines = [self._engine, *(expert._engine for expert in self.experts)]
        has_hook, usual = self.has_comm_hook, self._config.op
        op = None if op == usual and not has_hook else op
        return start_reduction(engines, op=op, has_hook=has_hook, is_weighted=usual == "weighted")

    @private.untraced
    def wait(self) -> None:
        """Returns when nothing is in flight: every gradient and every parameter is what it will be."""
        self._engine.complete()
        self.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Returns when every parameter is what a sharded optimizer has made of it; PhaseError beside an eager backward."""
        if self.steps is not None:
            self.steps.wait()

    def shard(self, stepper: Optimizer, settings: dict[str, Any], *, is_eager: bool = False) -> ShardedSteps:
        """From its first step on, only `stepper` updates the parameters, each rank a shard of them.

        A collective call. ConfigError where the settings do not go with shards, and while an earlier stepper is there.
        PlanMismatch on every rank where ranks give different `settings`.
        """
        self.require_open("ShardedOptimizer")
        if self.steps is None:
            self._engine.open()
            self.steps = ShardedSteps(self._module, self._engine, self._config, is_compiled=self._is_compiled, is_eager=is_eager)
            self._attached.callback(self.steps.close)
        self.steps.hand_to(stepper, settings, is_eager=is_eager)
        return self.steps

    def require_stepper(self, optimizer: Optimizer) -> None:
        """PhaseError for an optimizer that is not the one to update our parameters."""
        if self.steps is None:
            require_plain_strategy(self._config, optimizer)
        else:
            self.steps.require_stepper(optimizer)

    @private.untraced
    def full_gradient(self, param: Tensor) -> Tensor | None:
        """The mean gradient of a parameter, None where it has none; a collective call under a sharded optimizer."""
        return full_gradient(self, param)

    def broadcast_parameters(self) -> None:
        """Gives every rank rank 0's; a collective call."""
        self.require_open("broadcast_parameters()")
        self.share(("parameters", "buffers"))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces every bucket by `hook(state, bucket)`, which returns a future of the reduced buffer.

        `bucket` has the methods of torch.distributed.GradBucket, so that torch's own hooks run unchanged. What the
        hook sees is not divided: the mean is the hook's affair. On the host it runs in a thread, one bucket after another. Once,
        and not within a backward (PhaseError); `undertow.chain_comm_hooks` makes one of several. The next synchronization
        compares the names of the ranks' hooks: PlanMismatch on every rank where they differ.
        """
        self.require_open("register_comm_hook()")
        if self.steps is not None:
            raise no_hooks_with_shards()
        self._engine.combination.require_plain_mean()
        chosen = CommHook(state, hook)
        self._engine.use_hook(chosen)
        self._hook = chosen

    def change_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Averages over the ranks of `process_group` from the next forward on; a call for each of its ranks."""
        self.require_open("_update_process_group")
        if self.steps is not None:
            raise PhaseError(
                "the ranks of a model whose optimizer is sharded over them cannot change.",
                where="_update_process_group",
                remedy="Save a checkpoint, and load it over the other ranks.",
            )
        group = other_group(process_group, self._config.strategy)
        warn_of_lone_rank(process_group, type(self._module).__name__)
        before = self._engine
        accumulated = before.pass_on()
        self._let_go()
        self._set_up(group)
        self._engine.accumulates(before.is_accumulating)
        self._engine.inherit(accumulated)

    def share(self, kinds: Collection[str], *, source: int = 0) -> None:
        """Gives every rank that rank's "parameters" or "buffers"; a collective call."""
        if self._group.num_ranks == 1:
            return
        self._engine.open()
        self.wait_for_parameters()
        if "parameters" in kinds:
            broadcast_in_place([param for _, param in self.named_parameters()], self._group, source=source)
        if "buffers" in kinds:
            broadcast_in_place(self._members.common_buffers.tensors, self._group, source=source)

    def synchronize_buffers(self, *, source: int = 0) -> None:
        """Buffers follow that rank's, or become the mean over ranks, as the settings say; a collective call."""
        if self._group.num_ranks == 1:
            return
        self._engine.open()
        follow = average_buffers if self._config.buffers == "mean" else broadcast_buffers
        follow(self._members.common_buffers, self._group, source=source)

    def shadow(self) -> None:
        """Keeps the other ranks company in one synchronization, without gradients of our own."""
        self._engine.shadow()
        self._engine.checks.require_alike()  # nothing else of this rank's asks

    @property
    def synchronizes(self) -> bool:
        """Whether a backward that runs now communicates."""
        return self._engine.synchronizes

    def join_ends(self) -> None:
        """All ranks are in the same place again, and all of them count."""
        self._engine.join_ends()

    def wait_after_backward(self, futures: Iterable[torch.futures.Future[Any]]) -> None:
        """Has the end of the next synchronizing backward, or the next forward, wait for these too."""
        self._engine.also_awaited += futures

    def watch_forwards(self) -> None:
        """Has every forward of the module report its begin and end, until `close`."""
        begins, ends = (ModuleHook(self._module, then) for then in (self._attached_forward_begins, self.forward_ends))
        self._forward_hooks = [
            self._module.register_forward_pre_hook(begins, prepend=True),
            self._module.register_forward_hook(ends, always_call=True),
            *cut_graphs(self._module, lambda: cut_bytes(self.plan, num_ranks=self.num_ranks)),
        ]

    def _attached_forward_begins(self) -> None:
        follows = None if self._config.buffers == "off" else 0
        self.forward_begins(buffers_follow=follows, is_compiled=torch.compiler.is_compiling())

    @private.untraced
    def forward_begins(self, *, buffers_follow: int | None = 0, is_compiled: bool = False) -> None:
        """Called before each forward of the module: a step begins, and buffers follow a rank, if not None."""
        self._is_compiled |= is_compiled
        if self._engine.is_closed:
            if self.is_training_forward and self._engine.current_plan.has_unwatched():
                self.require_open("a training forward")
                self._engine.require_successor()
            return
        if is_outermost_forward():
            self._engine.forward_begins(is_training=self._module.training)
        if self.steps is not None:  # behind the mark of the forward, to which this wait belongs
            self.steps.forward_begins(is_training=self.is_training_forward, is_compiled=is_compiled)
        if not is_outermost_forward():
            return
        if buffers_follow is not None and self.is_training_forward and not self._engine.is_accumulating:
            self.synchronize_buffers(source=buffers_follow)

    @private.untraced
    def forward_ends(self) -> None:
        """Called after each forward of the module."""
        if self.steps is not None:
            self.steps.forward_ends()
        if not self._engine.is_closed and is_outermost_forward():
            self._recorder.forward_ends()

    def report(self, *, show: bool = True) -> StepReport:
        """Where the time of the last steps went on this rank; prints it as tables unless `show` is false.

        Never communicates: a single rank may ask.
        """
        records = self._recorder.records(generation=self._engine.generation)
        num_skipped, one_graph = self._engine.checks.numbers.num_skipped, self._is_compiled or private.is_compiled(self._module)
        one_graph = one_graph and self.num_ranks > 1 and not cut_bytes(self.plan, num_ranks=self.num_ranks)
        report = summarize(records, self.plan, rank=self.rank, num_skipped=num_skipped, is_one_graph=one_graph)
        if show:
            print_report(report)
        return report

    def traces(self) -> tuple[Trace, ...]:
        """What happened in the recorded steps, oldest first, as far as they ran under the present plan."""
        return tuple(record.trace() for record in self._recorder.records(generation=self._engine.generation))

    def explain(self, *, show: bool = True) -> Explanation:
        """Why the plan is as it is: what it takes, the limit, what other plans would take, what was decided when.

        Prints it unless `show` is false. Never communicates: a single rank may ask. Which decisions there are every rank knows.
        """
        current_plan = self._engine.current_plan
        explanation = explanation_of(current_plan.watch, current_plan.compiled, self._config)
        if show:
            print_explanation(explanation)
        return explanation

    def profile(self) -> Profile:
        """What was measured of the model and of the network: all that planning and simulating other networks need.

        Never communicates. PhaseError before the first steps are measured, which takes about ten.
        """
        current_plan = self._engine.current_plan
        return measured_profile(current_plan.watch, current_plan.compiled, self._config)

    def measure_network(self) -> None:
        """Sends messages of many sizes, for plans and profiles that know what those take; a collective call between steps.

        Not needed for training: what the run sends is measured anyway. PhaseError where nothing is measured.
        """
        self.require_open("measure_network()")
        sweep(self._engine, self._config)

    def save_profile(self, path: str | Path) -> None:
        """Writes the profile as JSON, for `undertow plan` and `undertow simulate`; see `profile`."""
        self.profile().save(path)

    def save_plan(self, path: str | Path) -> None:
        """Writes the present plan as JSON; `SyncConfig(plan=path)` pins it."""
        Path(path).write_text(self.plan.to_json() + "\n", encoding="utf-8")

    def require_open(self, call: str) -> None:
        """PhaseError after `close()`, when `call` would average nothing."""
        if self._is_closed:
            raise PhaseError(
                "this model is closed: its gradients are not averaged any more.",
                where=f"{call}, rank {self.rank}",
                remedy="Train `model.module`, the module itself, without averaging, or wrap it anew.",
            )

    def close(self) -> None:
        """Takes everything off the module and destroys our process group, once.

        A backward whose forward has run before is warned of when it comes.
        """
        if self._is_closed:
            return
        if private.graph_task_id() != -1:
            raise PhaseError(
                "close() was called inside a backward.",
                where=f"rank {self._group.rank}",
                remedy="Call it after backward: gradients of this one may be on their way.",
            )
        self._is_closed = True
        is_backward_due = self._engine.is_backward_due
        try:
            if self._group.is_alive:
                self.wait()  # else what is in flight would leave its gradients None
        finally:
            self._let_go.detach()  # which would wait once more for what has failed, or was interrupted
            self._attached.close()
            for hook in self._forward_hooks:
                hook.remove()
        if is_backward_due:
            warn_of_late_backward(self._module, [param for _, param in self._members.trained_now()])
