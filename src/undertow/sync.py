"""Gradient synchronization of a module whose class and state dict keys do not change."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.config import refused
from undertow.errors import WrongType
from undertow.model_sync import ModelSync
from undertow.profile import Profile
from undertow.runtime.comm.comm_hook import CommHook
from undertow.runtime.replan.planning import explanation_of, measured_profile, why_fixed
from undertow.runtime.step.mean_over_ranks import MeanOverRanks, start_mean
from undertow.runtime.step.reduction import Reduction, name_of_op, start_reduction, sweep
from undertow.runtime.step.sharded_steps import full_gradient
from undertow.runtime.step.siblings import all_of
from undertow.runtime.step.tracing import save_trace
from undertow.runtime.torch_private import private
from undertow.trace import StepReport, Trace, summarize
from undertow.tune import Explanation


class ZeroesWithoutReading:
    """Gives a module or an optimizer a `zero_grad` that waits for no parameter, because None needs none of their values."""

    @private.untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        with private.as_plain_tensors() if set_to_none else contextlib.nullcontext():
            super().zero_grad(set_to_none)  # type: ignore[misc]  # of the module or optimizer


class GradientSync(ModelSync):
    """Synchronizes the gradients of one module.

    `attach` returns one, and `DistributedDataParallel` has one as `model.sync`:

        sync = undertow.attach(model)
        model(batch).backward()  # gradients are averaged over ranks

    Construction is a collective call: every rank takes over rank 0's tensors of the kinds in `shared`.

    Raises:
        ConfigError: If the settings are invalid.
        PlanMismatch: On every rank, if ranks hold different parameters or settings.
    """

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of the parameters that received no gradient on this rank in any micro-batch of the last step, experts last."""
        return tuple(name for part in self._parts for name in part._engine.unused_parameters)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Context that makes backward only accumulate gradients; the next backward outside of it synchronizes their sum."""
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
        """Starts the mean of a number over all ranks, such as the number of tokens in this rank's batch.

        A collective call of 8 bytes: every rank calls it before its first forward or `finish()` of a step, also
        a rank without data. The forward hides it. If a loss is a sum over tokens, `loss_sum / mean.wait()`
        makes the mean over ranks of its gradients the mean over all tokens.

        Args:
            number: A finite number, or a tensor of one element. A tensor on an accelerator stays there, and is
                not checked.

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

        Call it also if this rank has no data. It does nothing if a synchronization has run since this
        rank's last training forward or optimizer step. After a training forward, an optimizer that holds
        one of the parameters calls it automatically before it steps.

        Args:
            buffers_follow: The rank whose buffers are copied if no forward ran here, because the other
                ranks' forwards copied them; None copies none.
        """
        self._require_open("finish()")
        is_due = self._engine.is_step_empty and self._engine.progress.are_buffers_due
        if is_due and buffers_follow is not None and self._config.buffers != "off" and self._module.training:
            self._synchronize_buffers(source=buffers_follow)
        all_of(self._engine.finish, *(partial(expert.finish, buffers_follow=buffers_follow) for expert in self.experts))

    @private.untraced
    def reduce_gradients_async(self, op: Literal["mean", "sum"] | dist.ReduceOp.RedOpType | None = None) -> Reduction:
        """Sends the accumulated gradients; call `wait` on the result before the optimizer steps.

        Args:
            op: "mean" or "sum" of the ranks' `.grad`, or torch's ReduceOp AVG or SUM. None is the
                mean, or the result of a communication hook, which excludes an `op`. "sum" multiplies
                the mean by the number of ranks.

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
        owners = (expert for expert in self.experts if any(param is own for _, own in expert._members.named_params()))
        owner = next(owners, self)
        return full_gradient(owner._engine, owner._steps, param)

    def broadcast_parameters(self) -> None:
        """Copies rank 0's parameters and buffers to every rank; a collective call."""
        self._require_open("broadcast_parameters()")
        self._share(("parameters", "buffers"))

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduces every bucket with `hook(state, bucket)` instead of an all-reduce.

        Call it once, and not inside a backward. The next synchronization compares the names of the ranks'
        hooks. On the host, hooks run in a thread, one bucket after another.

        Args:
            state: The first argument of the hook.
            hook: It returns a future of the reduced buffer. `bucket` has the methods of
                torch.distributed.GradBucket, so torch's own hooks run unchanged. Its gradients are not
                divided: the hook computes the mean.

        Raises:
            PhaseError: Inside a backward or on a second call.
            PlanMismatch: On every rank, in the next synchronization, if the names of the hooks differ.
        """
        self._require_open("register_comm_hook()")
        if self._steps is not None:
            raise refused("hook", "shards", where="ShardedOptimizer")
        self._engine.use_hook(CommHook(state, hook))
        self._watch_forwards()

    def report(self) -> StepReport:
        """Returns the times of the last steps on this rank; `print` shows them as tables. Never communicates.

        They cover the dense parameters; `experts` has the reports of the groups of experts.
        """
        engine, compiled = self._engine, self._engine.current_plan.now.compiled
        is_one_graph = self.num_ranks > 1 and (self._is_compiled or private.is_compiled(self._module)) and not self._cut_bytes()
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
            num_threads=torch.get_num_threads(),
            why_fixed=why_fixed(self._config, compiled.reducer),
            experts=self._of_experts(GradientSync.report),
        )

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
        return dataclasses.replace(explanation, experts=self._of_experts(GradientSync.explain))

    def _of_experts(self, ask: Callable[[Any], Any]) -> dict[str, Any]:
        """Asks every group of experts, and returns the answers by their names for users."""
        return {
            f"{expert._config.experts[0].match!r}, ranks {', '.join(map(str, expert._group.user.ranks))}": ask(expert)
            for expert in self.experts
        }

    def profile(self) -> Profile:
        """Returns all measurements that planning and simulation need; never communicates.

        Raises:
            PhaseError: Until the first steps of the model are measured, which takes about ten.
        """
        now = self._engine.current_plan.now
        return measured_profile(now.hooks, now.compiled, self._config)

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
        """Writes the recorded steps of this rank as a trace for Perfetto and HTA; never communicates.

        Beside the measured steps are those that the simulator expects. `undertow trace` merges the
        traces of all ranks.

        Args:
            path: A file whose name ends with .json or .json.gz. The rank is added to the name:
                trace.json.gz becomes trace-rank0.json.gz. Experts have separate files.
            steps: The last so many steps; None takes all that are recorded.

        Returns:
            The path of the file.

        Raises:
            PhaseError: If no step is recorded.
            ConfigError: If the file cannot be written.
        """
        paths = [save_trace(it._engine, it._config, path, steps=steps, number=at) for at, it in enumerate(self._parts)]
        return paths[0]

    def save_plan(self, path: str | Path) -> None:
        """Writes the current plan as JSON.

        Args:
            path: The file to write; `SyncConfig(plan=path)` pins it.
        """
        Path(path).write_text(self.plan.to_json() + "\n", encoding="utf-8")


def sync_of(target: object, *, where: str, remedy: str) -> GradientSync:
    """Returns the GradientSync of a wrapper, or `target` itself if it is one; raises WrongType for anything else."""
    sync = getattr(target, "sync", target)
    if isinstance(sync, GradientSync):
        return sync
    raise WrongType(
        f"target must be the result of attach() or DistributedDataParallel, got {type(target).__name__}.",
        where=where,
        remedy=remedy,
    )
