"""The phase of the step: when a round begins, what ends it, and what all ranks do then.

    idle ──first gradient──> filling ──outermost backward over──> launched ──every engine launched──> idle
                             hooks release ops                    the last bucket has left            waits, binds

A round synchronises or only accumulates; which one is decided when backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.config import SyncConfig
from undertow.errors import Desync, PeerFailed, PhaseError
from undertow.plan import Plan, first_plan, observed, plan_in_order
from undertow.runtime import private
from undertow.runtime.executor import Executor, Round
from undertow.runtime.group import OwnGroup
from undertow.runtime.hooks import OrderObserver, OutermostEnd, watch_parameters
from undertow.runtime.manager import spec_of
from undertow.runtime.recorder import Recorder
from undertow.schedule import Arrivals, Op, Releases, lower_accumulation, lower_data_parallel, verify


@dataclass(frozen=True)
class _Assembly:
    """What a plan becomes: the ops of both kinds of round, and buffers."""

    plan: Plan
    generation: int
    synchronising: Releases
    accumulating: Releases
    make_executor: Callable[[], Executor]

    @cached_property
    def executor(self) -> Executor:
        """Made when it is first asked for: a group of one rank never needs the buffers."""
        return self.make_executor()


@dataclass(frozen=True)
class _Order:
    """Parameters in the order in which rank 0's gradients arrived."""

    params: Tensor  # [number of parameters] int64; to be read when `work` is done
    work: dist.Work


@dataclass(slots=True)
class _Progress:
    """What outlives a round."""

    num_rounds: int = 0  # synchronised ones
    is_observed: bool = False  # one of them has ended well, and ranks have agreed on an order
    is_owed: bool = False  # a training forward ran and no round has followed
    is_step_due: bool = False  # a round has ended and no optimizer has stepped since
    arrived_before: set[int] = field(default_factory=set)  # in micro-batches since the last synchronisation
    unused: tuple[str, ...] = ()
    order: _Order | None = None  # the next plan's


class Engine:
    """Synchronises the gradients of `named_params` over `group`, backward after backward."""

    def __init__(
        self, named_params: Sequence[tuple[str, Tensor]], group: OwnGroup, config: SyncConfig, recorder: Recorder
    ) -> None:
        self._named_params = tuple(named_params)
        self._group = group
        self._config = config
        self._recorder = recorder
        self.is_accumulating = False
        self._progress = _Progress()
        self._round: Round | None = None
        self._assembly = self._assemble(self._first_plan(), generation=0)
        self._releases = self._assembly.synchronising
        self._arrivals = Arrivals(
            _params_of_bucket(self.plan),
            num_params=len(named_params),
            on_full=self._fill,
            traversal=private.graph_task_id,
            on_traversal=self._enter,
        )
        self._end = OutermostEnd(self._launch_rest)
        self._observer = OrderObserver()
        self._hooks: list[RemovableHandle] = []
        if group.num_ranks > 1:
            _ = self._assembly.executor  # what does not fit into memory fails here and not in the first backward
            params = [param for _, param in named_params]
            self._hooks = watch_parameters(params, self._arrivals)
            if self._follows_observed_order():
                self._observer.start(params)

    @property
    def plan(self) -> Plan:
        return self._assembly.plan

    @property
    def generation(self) -> int:
        return self._assembly.generation

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Names of parameters that got no gradient on this rank in the last synchronised step."""
        return self._progress.unused

    def forward_begins(self, *, is_training: bool) -> None:
        """Called before every forward that may be followed by a backward."""
        self._abandon()
        if not is_training:
            return
        if self._group.num_ranks == 1 and not self.is_accumulating:
            self._recorder.round_ends(())  # there are no rounds that would end a step
        self._recorder.forward_begins()
        self._progress.is_owed = not self.is_accumulating

    def finish_before_step(self) -> None:
        """`finish`, unless a round has ended since the last step: then a later forward was not for training."""
        self._abandon()
        if not self._progress.is_step_due:
            self.finish()
        self._progress.is_step_due = False

    def finish(self) -> None:
        """Runs a round if none has run since the last training forward; for a rank whose backward touched nothing."""
        self._abandon()
        if self._progress.is_owed and self._group.num_ranks > 1:
            self.launch()
            self.complete()
        self._progress.is_owed = False

    def launch(self) -> None:
        """Sends everything there is, outside of backward; `complete` waits for it."""
        if self._round is not None:
            raise PhaseError(
                "gradients are being synchronised already.",
                where=f"synchronisation {self._progress.num_rounds}",
                remedy="Call this outside of backward, and wait for the earlier reduction first.",
            )
        self._begin(is_synchronised=True)
        self._launch_rest()

    def complete(self) -> None:
        """Waits for what was launched and binds the gradients. Raises what the ranks have agreed on."""
        this_round = self._round
        if this_round is None:
            return
        if not this_round.is_launched:
            self._abandon()
            return
        self._run(self._releases.join())
        self._round = None
        self._arrivals.forget_traversal()
        self._end.forget()
        if not this_round.is_synchronised:
            self._progress.arrived_before |= self._arrivals.arrived
            return
        self._settle(this_round)

    def close(self) -> None:
        """Takes the hooks off; gradients stay where they are."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._observer.stop()

    def _enter(self, task: int) -> None:
        if self._round is not None and not self._end.is_coming:
            self._leave_behind(self._round)
        if self._round is None:
            self._begin(is_synchronised=not self.is_accumulating)
        self._end.watch(task)

    def _leave_behind(self, this_round: Round) -> None:
        """A new backward has begun, and `this_round` is not its own."""
        if this_round.is_launched:
            raise PhaseError(
                "a backward began while gradients are being synchronised.",
                where=f"synchronisation {this_round.number}",
                remedy="Wait for reduce_gradients_async() before the next backward.",
            )
        self._give_up(this_round)

    def _begin(self, *, is_synchronised: bool) -> None:
        progress = self._progress
        if progress.order is not None and is_synchronised:
            self._adopt(progress.order)
            progress.order = None
        assembly = self._assembly
        self._releases = assembly.synchronising if is_synchronised else assembly.accumulating
        self._releases.reset()
        self._arrivals.reset()
        self._round = Round(
            number=progress.num_rounds,
            generation=assembly.generation,
            is_synchronised=is_synchronised,
            not_arrived=self._not_arrived,
            has_repeats=lambda: self._arrivals.has_repeats,
        )
        assembly.executor.begin(self._round)
        self._recorder.backward_begins(generation=assembly.generation)

    def _fill(self, bucket: int) -> None:
        self._run(self._releases.fill(bucket))

    def _run(self, ops: Sequence[Op]) -> None:
        self._assembly.executor.run(ops)

    def _launch_rest(self) -> None:
        """Backward is over: what is missing is unused here, and everything that is still here leaves."""
        this_round = self._round
        if this_round is None or this_round.is_launched:
            return  # a nested backward has reached the outermost end as well
        this_round.is_launched = True
        self._recorder.backward_ends()
        self._run(self._releases.end_backward())
        if private.graph_task_id() != -1:
            # Behind the callbacks of all other engines: with several models in one backward all launch, then all wait.
            private.call_after_backward(self.complete)

    def _abandon(self) -> None:
        """Ends a round that an exception in backward has left open, and waits for one that was launched by hand."""
        if self._round is None or private.graph_task_id() != -1:
            return
        if self._round.is_launched:
            self.complete()
        else:
            self._give_up(self._round)

    def _give_up(self, this_round: Round) -> None:
        """Ends a round whose backward failed: the other ranks are waiting for our buckets, and drop what they get.

        Every `.grad` is afterwards what it is now: the user may have cleared it, or another backward have begun.
        """
        params = [param for _, param in self._named_params]
        kept = [param.grad for param in params]
        if this_round.is_synchronised:
            this_round.has_failed = True
            for param in params:
                param.grad = None
        this_round.is_launched = True
        self._recorder.backward_ends()
        self._run(self._releases.end_backward())
        try:
            self.complete()
        finally:
            if this_round.is_synchronised:
                for param, grad in zip(params, kept, strict=True):
                    param.grad = grad

    def _not_arrived(self, bucket: int) -> list[int]:
        """Positions in `bucket` of parameters without a gradient since the last synchronisation."""
        missing = self._arrivals.missing(bucket)
        if not missing:
            return []
        missing -= self._progress.arrived_before
        return [position for position, param in enumerate(self.plan.buckets[bucket].params) if param in missing]

    def _settle(self, this_round: Round) -> None:
        """What every rank does alike when a synchronisation is complete."""
        current = [reading for reading in this_round.readings if not reading.is_overdue]
        late = sorted({bucket for reading in current for bucket in reading.late_buckets})
        if late:
            self._assembly.executor.reduce_late_parts(late)
            self._arrivals.learn_repeats()
        self._recorder.round_ends(this_round.busy_ms)
        progress = self._progress
        progress.num_rounds += 1
        progress.is_owed = False
        progress.is_step_due = True
        if not this_round.has_failed:
            progress.arrived_before.clear()
        progress.unused = self._names_of(this_round.unused)
        self._raise_agreed(this_round)
        if not progress.is_observed and not this_round.has_failed:  # a failed one has left the other ranks already
            progress.is_observed = True
            progress.order = self._send_order() if self._follows_observed_order() else None

    def _raise_agreed(self, this_round: Round) -> None:
        where = f"synchronisation {this_round.number}, rank {self._group.rank}"
        if any(reading.ranks_differ for reading in this_round.readings):
            raise Desync(
                "ranks are not in the same step.",
                where=where,
                remedy="Run the same number of synchronised backwards on every rank; a rank that has none calls finish().",
            )
        if any(reading.late_buckets and reading.is_overdue for reading in this_round.readings):
            raise Desync(
                "gradients arrived again after their bucket had left, and were left out.",
                where=f"{where}, or the one before",
                remedy="Let the first two steps use parameters as often as later ones do, or set overlap=False.",
            )
        failed = sorted({rank for reading in this_round.readings for rank in reading.failed_ranks})
        if failed and not this_round.has_failed:
            raise PeerFailed(
                f"backward failed on rank {', '.join(map(str, failed))}.",
                where=where,
                remedy="The gradients of this step are incomplete on every rank: drop them, and see the log of that rank.",
            )

    def _names_of(self, unused: dict[int, list[int]]) -> tuple[str, ...]:
        if not any(unused.values()):
            return ()
        return tuple(
            self._named_params[self.plan.buckets[bucket].params[position]][0]
            for bucket, positions in sorted(unused.items())
            for position in positions
        )

    def _first_plan(self) -> Plan:
        specs = [spec_of(name, param) for name, param in self._named_params]
        return first_plan(specs, self._config, num_ranks=self._group.num_ranks)

    def _assemble(self, plan: Plan, *, generation: int) -> _Assembly:
        num_buckets = len(plan.buckets)
        synchronising, accumulating = (
            Releases(verify(schedule, num_buckets=num_buckets))
            for schedule in (lower_data_parallel(num_buckets, overlap=self._config.overlap), lower_accumulation(num_buckets))
        )

        def executor() -> Executor:
            average = self._config.average_in_collective
            return Executor(plan, self._named_params, self._group, self._recorder, average=average)

        return _Assembly(plan, generation, synchronising=synchronising, accumulating=accumulating, make_executor=executor)

    def _follows_observed_order(self) -> bool:
        # A changed plan changes the rounding of three or more summands: not where the user wants the same bits every time.
        is_free = self._config.plan is None and not torch.are_deterministic_algorithms_enabled()
        return self._config.order == "observed" and is_free and len(self._named_params) > 0

    def _send_order(self) -> _Order:
        """Rank 0's observed order, for all ranks. Not waited for here: with several models in one backward, another
        rank may be in another one's turn."""
        order = torch.tensor(observed(len(self._named_params), self._observer.stop()), dtype=torch.int64)
        order = order.to(self._group.device)
        work = dist.broadcast(order, group=self._group.process_group, group_src=0, async_op=True)
        assert work is not None  # async_op on a rank of the group
        return _Order(order, work)

    def _adopt(self, order: _Order) -> None:
        """Re-plans in that order, if it is another one than the present plan's."""
        order.work.wait()
        plan = plan_in_order(self.plan.params, order.params.tolist(), self._config, num_ranks=self._group.num_ranks)
        if plan.fingerprint != self.plan.fingerprint:
            # The old buckets' storage goes when the last `.grad` has moved into the new ones.
            self._assembly = self._assemble(plan, generation=self._assembly.generation + 1)
            self._arrivals.regroup(_params_of_bucket(plan))


def _params_of_bucket(plan: Plan) -> list[tuple[int, ...]]:
    return [bucket.params for bucket in plan.buckets]
