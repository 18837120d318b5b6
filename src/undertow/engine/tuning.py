"""Makes all ranks measure the same steps early in training, and take the plan that rank 0 chooses,
once.

Reasons: docs/design/tuning.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.recorder import Recorder
from undertow.buckets.reducer import Reducer
from undertow.plan import Plan, observed, plan_from_groups, plan_in_order
from undertow.ranks.transport import Handle
from undertow.schedule import Arrivals
from undertow.trace import StepRecord
from undertow.tune import (
    Decision,
    Outcome,
    Tuner,
    array_of_records,
    decision_from_array,
    measurement_from_array,
)
from undertow.wire import AUTO

NUM_STEPS_MEASURED = 5
# The first step allocates memory, and a sharded optimizer lays shards out after it. The second
# takes the order of arrival.
NUM_STEPS_BEFORE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A plan in force, as a value."""

    plan: Plan
    generation: int
    has_shards: bool


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The times of all ranks, on their way."""

    measured: Present
    records: tuple[StepRecord, ...]  # this rank's
    latest: Tensor
    handle: Handle


class Tuning:
    """Moves all ranks to rank 0's order of arrival, and once to a better plan, for one set of
    parameters.

        round   1         2     | 3 ... 7 | 8                  9                        10
                order ──> taken | measure | exchange times ──> rank 0 decides ──> all take the plan

    All its messages are started at the end of a synchronization that every rank has found sound. So
    no rank starts one alone: a rank whose parameters have changed since, or that fails, is found
    out before. They are waited for in a later synchronization, because with several models in one
    backward another rank may be at another model.

    `order` is the order of plans if it is not the observed one.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        recorder: Recorder,
        reducer: Reducer,
        order: Sequence[int] | None,
    ) -> None:
        config = reducer.config
        self.decision: Decision | None = None
        self.sent: Handle | None = None  # a message of rank 0 in flight: its order, or its decision
        self.tuner: Tuner | None = None  # if steps are measured
        self._arrivals, self._recorder, self._reducer = arrivals, recorder, reducer
        self._seen: list[int] = []  # parameters, as their gradients arrive
        self._keeps_owners = False  # of whole parameters
        self._num_rounds = 0  # of those that count down to the next act
        self._exchange: _Exchange | None = None  # the last one; None while there is only the order
        # at the end of the next sound round
        self.act: Callable[[Present], None] | None = None
        if recorder.is_on:
            self.tuner = Tuner(
                order,
                wire=AUTO if config.wire == AUTO else config.plan_wire,
                param_wire=config.param_wire,
                keeps_buckets=config.bucket_cap_mb is not None,
            )
            self.act = self._wait_for_settled_steps
        if _follows_order(reducer):
            arrivals.at_each = self._seen.append
            self.act = self._send_order

    @property
    def is_about_to_communicate(self) -> bool:
        """True if the end of the next round, if that is sound, starts a message about times."""
        return self.act in (self._exchange_times, self._decide)

    def order(self) -> list[int] | None:
        """Returns rank 0's order if it is on its way, once; waits for it."""
        if self.sent is None or self._exchange is not None:
            return None
        sent, self.sent = self.sent, None
        return sent.result().tolist()

    def plan(self, present: Present) -> Plan | None:
        """Called when a round begins. Returns the plan that rank 0 has sent, in the same round on
        every rank.

        None if every bucket would hold the same gradients as now, in the same format: their order
        within a bucket changes nothing.
        """
        now, config = present.plan, self._reducer.config
        order = self.order()
        decision = None if self.sent is None else self._receive(self.sent, present)
        if order is not None:
            plan = plan_in_order(now.params, order, config, num_ranks=now.num_ranks)
        elif decision is not None and decision.groups is not None:
            plan = plan_from_groups(
                now.params,
                decision.groups,
                num_ranks=now.num_ranks,
                num_shards=now.num_shards,
                wires=decision.wires if config.wire == AUTO else config.plan_wire,
                block=config.block,
            )
        else:
            return None
        return None if now.is_alike(plan.groups, plan.wires) else plan

    def _receive(self, sent: Handle, present: Present) -> Decision:
        assert self._exchange is not None  # a decision follows one
        self.sent = None
        decision = decision_from_array(sent.result().cpu().numpy())
        if self._exchange.measured != present:
            decision = Decision(outcome=Outcome.INCOMPLETE)
        self.decision = decision
        if decision.outcome is Outcome.INCOMPLETE:
            self._measure()
        return decision

    def lays_out(self, *, keeps_owners: bool) -> None:
        """Called when a sharded optimizer lays parameters out: another order would come too late.

        Measures again if the collectives of shards were not measured. With `keeps_owners` the plan
        does not move.
        """
        self._keeps_owners = keeps_owners
        if self.act == self._send_order:
            self._end_order()
        exchange = self._exchange
        has_ended = self.act is None and self.sent is None
        if has_ended and exchange is not None and not exchange.measured.has_shards:
            assert self.tuner is not None  # it has measured
            self.tuner.forget()
            self.decision = None
            self._num_rounds = 0
            self.act = self._wait_for_settled_steps

    def close(self) -> None:
        """Ends it; measurements stay, and a decision in flight may be taken."""
        self._arrivals.at_each = None
        self.act = None  # which holds this object

    def _send_order(self, _present: Present) -> None:
        self._end_order()
        self._num_rounds = 1
        group, params = self._reducer.group, self._arrivals.index_of
        order = torch.tensor(observed(len(params), self._seen), dtype=torch.int64)
        # [number of parameters]
        self.sent = group.broadcast(order.to(group.device), "the order of rank 0's gradients")

    def _end_order(self) -> None:
        self._arrivals.at_each = None
        self.act = None if self.tuner is None else self._wait_for_settled_steps

    def _wait_for_settled_steps(self, _present: Present) -> None:
        self._num_rounds += 1
        if self._num_rounds == NUM_STEPS_BEFORE:
            self._measure()

    def _measure(self) -> None:
        """Times every gradient from the next round on."""
        self._num_rounds = 0
        self._arrivals.at_each = self._recorder.gradient_arrives
        self.act = self._count_measured

    def _count_measured(self, _present: Present) -> None:
        self._num_rounds += 1
        if self._num_rounds == NUM_STEPS_MEASURED:
            self._arrivals.at_each = None
            self.act = self._exchange_times

    def _exchange_times(self, present: Present) -> None:
        """Starts the exchange: the last measured step is complete, because the next one has
        begun."""
        group = self._reducer.group
        records = self._recorder.records(generation=present.generation, at_most=NUM_STEPS_MEASURED)
        latest = torch.from_numpy(
            array_of_records(records, present.plan, num_steps=NUM_STEPS_MEASURED)
        ).to(group.device)
        handle = group.all_reduce(latest, "the times of all ranks", dist.ReduceOp.MAX)
        self._exchange = _Exchange(present, records, latest, handle)
        self.act = self._decide

    def _decide(self, _present: Present) -> None:
        """Learns from the times of all ranks. If the plan may move, rank 0 decides."""
        exchange, self.act = self._exchange, None
        # it was started in the round before
        assert exchange is not None
        assert self.tuner is not None
        exchange.handle.wait()
        measured = exchange.measured
        measurement = measurement_from_array(
            exchange.latest.cpu().numpy(), exchange.records, measured.plan
        )
        if measurement is not None:
            self.tuner.learn(measurement)
        group = self._reducer.group
        if not may_move(self._reducer):
            return
        if torch.are_deterministic_algorithms_enabled():
            decision = Decision(outcome=Outcome.FROZEN)
        elif self._keeps_owners:
            decision = Decision(outcome=Outcome.OWNED)
        elif measurement is None:
            decision = Decision(outcome=Outcome.INCOMPLETE)
        elif group.rank == 0:
            decision = self.tuner.decide(measured.plan, has_shards=measured.has_shards)
        else:
            decision = Decision(outcome=Outcome.UNKNOWN)  # rank 0's takes its place
        numbers = torch.from_numpy(decision.to_array(measured.plan.params))
        self.sent = group.broadcast(numbers.to(group.device), "rank 0's plan")


def _follows_order(reducer: Reducer) -> bool:
    """Returns True if the plan takes over rank 0's order of arrival; the same on every rank."""
    # A changed plan changes the rounding of three or more summands, which a user who wants the same
    # bits does not expect. A hook may keep state for every bucket.
    is_free = reducer.config.plan is None and reducer.hook is None
    is_observed = is_free and reducer.config.order == "observed"
    return is_observed and not torch.are_deterministic_algorithms_enabled()


def may_move(reducer: Reducer) -> bool:
    """Returns True if measurements may change the plan: its buckets, or with a given
    `bucket_cap_mb` their formats only; the same on every rank."""
    return not why_fixed(reducer, counts_cap=reducer.config.wire != AUTO)


def why_fixed(reducer: Reducer, *, counts_cap: bool = True) -> str:
    """Returns why the plan does not follow measurements, or "" if it does; the same on every
    rank."""
    config = reducer.config
    cap = config.bucket_cap_mb if counts_cap else None
    reasons = (
        (reducer.group.num_ranks == 1, "a single rank has nothing to communicate"),
        (config.plan is not None, "it is pinned: SyncConfig(plan=...)"),
        (cap is not None, f"bucket_cap_mb={cap} was asked for"),
        (reducer.hook is not None, "a communication hook may keep state for every bucket"),
        (config.record == "off", "record='off': nothing is measured"),
        (not config.overlap, "overlap=False: nothing is to be hidden"),
        (not config.auto_tune, "auto_tune=False: sizes follow from the size of the model"),
    )
    return next((reason for applies, reason in reasons if applies), "")
