"""Makes all ranks measure the same steps early in training, and take the plan that rank 0 chooses,
once."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.buckets.recorder import Recorder
from undertow.buckets.reducer import Reducer
from undertow.config import SyncConfig
from undertow.plan import Plan, observed
from undertow.ranks.transport import Handle, OwnGroup
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


class ObservedOrder:
    """Rank 0's order of arrival: watched for one round, sent to all, and then taken by all."""

    def __init__(self, arrivals: Arrivals, num_params: int, group: OwnGroup) -> None:
        self._arrivals, self._num_params, self._group = arrivals, num_params, group
        self._seen: list[int] = []
        arrivals.at_each = self._seen.append
        self.sent: Handle | None = None

    def send(self) -> None:
        """Ends the watch and sends what rank 0 has seen; a second call does nothing.

        Not waited for: with several models in one backward, another rank may be in another one's
        turn.
        """
        if self.sent is None:
            self.close()
            order = torch.tensor(observed(self._num_params, self._seen), dtype=torch.int64)
            # [number of parameters]
            self.sent = self._group.broadcast(
                order.to(self._group.device), "the order of rank 0's gradients"
            )

    def receive(self) -> list[int] | None:
        """Waits for the order that was sent and returns it, once."""
        pending, self.sent = self.sent, None
        return None if pending is None else pending.result().tolist()

    def close(self) -> None:
        """Ends the watch."""
        if self._arrivals.at_each == self._seen.append:  # not yet another's
            self._arrivals.at_each = None


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The times of all ranks, on their way."""

    measured: Present
    records: tuple[StepRecord, ...]  # this rank's
    latest: Tensor
    handle: Handle


class Tuning:
    """Measures some steps under the plan of one set of parameters, and moves to a better one, once.

        synchronization   1 2 | 3 ... 7 | 8                  9                        10
                              | measure | exchange times ──> rank 0 decides ──> all take the plan

    All its messages are started at the end of a synchronization that every rank has found sound. So
    no rank starts one alone: a rank whose parameters have changed since, or that fails, is found
    out before. They are waited for in a later synchronization, because with several models in one
    backward another rank may be at another model.

    `may_move` is True if the plan may be changed; that must be the same on every rank.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        recorder: Recorder,
        group: OwnGroup,
        tuner: Tuner,
        *,
        may_move: bool,
    ) -> None:
        self.decision: Decision | None = None
        self.sent: tuple[Present, Handle] | None = None  # a decision in flight
        self.tuner = tuner
        self._arrivals, self._recorder, self._group = arrivals, recorder, group
        self._may_move = may_move
        self._has_measured_whole = False  # gradients, which all ranks have
        self._num_rounds = 0  # of those that count down to the next act
        self._exchange: _Exchange | None = None
        # at the end of the next sound round
        self.act: Callable[[Present], None] | None = self._wait_for_settled_steps

    @property
    def is_about_to_communicate(self) -> bool:
        """True if the end of the next round, if that is sound, starts a message."""
        return self.act in (self._exchange_times, self._decide)

    @property
    def has_ended_without_shards(self) -> bool:
        """True if nothing is left to do, and the collectives of shards were not measured."""
        return self.act is None and self.sent is None and self._has_measured_whole

    def receive(self, present: Present) -> Decision | None:
        """Called when a round begins.

        Returns the decision if it has other buckets, in the same round on every rank.
        """
        if self.sent is None:
            return None
        (decided_on, sent), self.sent = self.sent, None
        decision = decision_from_array(sent.result().cpu().numpy())
        if decided_on != present:
            decision = Decision(outcome=Outcome.INCOMPLETE)
        self.decision = decision
        if decision.outcome is Outcome.INCOMPLETE:
            self._measure()
        return None if decision.groups is None else decision

    def close(self) -> None:
        """Ends it; measurements stay, and a decision in flight may be taken."""
        self._arrivals.at_each = None
        self.act = None  # which holds this object

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
        records = self._recorder.records(generation=present.generation, at_most=NUM_STEPS_MEASURED)
        latest = torch.from_numpy(
            array_of_records(records, present.plan, num_steps=NUM_STEPS_MEASURED)
        ).to(self._group.device)
        handle = self._group.all_reduce(latest, "the times of all ranks", dist.ReduceOp.MAX)
        self._exchange = _Exchange(present, records, latest, handle)
        self.act = self._decide

    def _decide(self, _present: Present) -> None:
        """Learns from the times of all ranks. If the plan may move, rank 0 decides."""
        exchange, self._exchange, self.act = self._exchange, None, None
        assert exchange is not None  # it was started in the round before
        exchange.handle.wait()
        measured = exchange.measured
        self._has_measured_whole = not measured.has_shards
        measurement = measurement_from_array(
            exchange.latest.cpu().numpy(), exchange.records, measured.plan
        )
        if measurement is not None:
            self.tuner.learn(measurement)
        if not self._may_move:
            return
        if torch.are_deterministic_algorithms_enabled():
            decision = Decision(outcome=Outcome.FROZEN)
        elif measurement is None:
            decision = Decision(outcome=Outcome.INCOMPLETE)
        elif self._group.rank == 0:
            decision = self.tuner.decide(measured.plan, has_shards=measured.has_shards)
        else:
            decision = Decision(outcome=Outcome.UNKNOWN)  # rank 0's takes its place
        numbers = torch.from_numpy(decision.to_array(measured.plan.params))
        self.sent = measured, self._group.broadcast(numbers.to(self._group.device), "rank 0's plan")


def may_move(config: SyncConfig, reducer: Reducer) -> bool:
    """Returns True if measurements may change the plan: its buckets, or with a given
    `bucket_cap_mb` their formats only."""
    if config.wire == AUTO:
        config = replace(config, bucket_cap_mb=None)
    return not why_fixed(config, reducer)


def why_fixed(config: SyncConfig, reducer: Reducer) -> str:
    """Returns why the plan does not follow measurements, or "" if it does; the same on every
    rank."""
    reasons = (
        (reducer.group.num_ranks == 1, "a single rank has nothing to communicate"),
        (config.plan is not None, "it is pinned: SyncConfig(plan=...)"),
        (config.bucket_cap_mb is not None, f"bucket_cap_mb={config.bucket_cap_mb} was asked for"),
        (reducer.hook is not None, "a communication hook may keep state for every bucket"),
        (config.record == "off", "record='off': nothing is measured"),
        (not config.overlap, "overlap=False: nothing is to be hidden"),
        (not config.auto_tune, "auto_tune=False: sizes follow from the size of the model"),
    )
    return next((reason for applies, reason in reasons if applies), "")
