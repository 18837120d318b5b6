"""Measures the first steps of one set of parameters, and finds their plan: rank 0's order of
arrival first, then plans that are tried on real steps.

Reasons: docs/design/tuning.md.
"""

from collections.abc import Sequence

import torch

from undertow.buckets.recorder import Recorder
from undertow.buckets.transfer import Reducer
from undertow.engine.arrivals import Arrivals
from undertow.engine.measuring import Measuring, Present
from undertow.engine.trying import MOST_DROPS, Trying
from undertow.plan import Plan, observed, plan_in_order
from undertow.ranks.handle import Handle
from undertow.trace.measured import Measurements
from undertow.tune import Trial, Trials, progress_text
from undertow.wire import AUTO


class Tuning:
    """Moves all ranks to rank 0's order of arrival, measures steps, and tries plans.

        round   1         2     | 3 ... 7 | 8 9                  | 10 ...
                order ──> taken | measure | times of all ranks   | windows under plans in turn

    Its messages are started at the end of a synchronization that every rank has found sound. So
    no rank starts one alone: a rank whose parameters have changed since, or that fails, is found
    out before. They are waited for in the next synchronization, because with several models in one
    backward another rank may be at another model. So is the vote on a plan that is new
    (`Moves.round_was_sound`).

    `order` is the order of plans if it is not the observed one. `number` is the model's, in the
    order of construction. `earlier` had the parameters before these.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        recorder: Recorder,
        reducer: Reducer,
        order: Sequence[int] | None,
        *,
        number: int,
        earlier: "Tuning | None" = None,
    ) -> None:
        self.measured = Measurements()
        self.measuring: Measuring | None = None  # if steps are measured
        self.trying: Trying | None = None  # from the first window on
        self._arrivals, self._recorder, self._reducer = arrivals, recorder, reducer
        self._order = order
        self._number = number
        self._seen: list[int] | None = None  # parameters, as their gradients arrive in round 1
        self._order_sent: Handle | None = None  # on its way from rank 0
        self.has_settled = False  # rounds need not ask any more: it is over, and nothing is sent
        if recorder.is_on:
            self.measuring = Measuring(arrivals, recorder, reducer.group.deciding, self.measured)
        self.num_drops: int = 0 if earlier is None else earlier.num_drops
        self.will_try = may_move(reducer) and self.num_drops < MOST_DROPS  # until trials are over
        if _follows_order(reducer):
            self._seen = []
            arrivals.at_each = self._seen.append

    @property
    def is_over(self) -> bool:
        """True if the end of a round has nothing to do."""
        return (
            self._seen is None
            and (self.measuring is None or self.measuring.is_over)
            and not self.will_try
        )

    @property
    def is_quiet(self) -> bool:
        """True if no message is on its way that the next round begins with."""
        return self._order_sent is None

    @property
    def communicates_next(self) -> bool:
        """True if the end of the next sound round starts a message about times, or awaits one."""
        if self.measuring is not None and not self.measuring.is_over:
            return self.measuring.communicates_next
        return self.trying is not None and self.trying.communicates_next

    def round_ends(self, present: Present, *, num_forwards: int) -> Plan | None:
        """Called at the end of a sound round under this plan, after so many training forwards.

        Returns the plan to be tried next, or to return to, in the same round on every rank. None
        if every bucket would hold the same gradients as now, in the same format.
        """
        if self._seen is not None:
            self._send_order(self._seen)
        if self.measuring is not None and not self.measuring.is_over:
            self.measuring.round_ends(present)
        elif self.will_try:
            if self.trying is None:
                self.trying = self._begin(present.plan)
            plan = self.trying.round_ends(num_forwards)
            self.will_try = not self.trying.trials.are_over
            if plan is not None and not present.plan.is_alike(plan.groups, plan.wires):
                return plan
        return None

    def order(self) -> list[int] | None:
        """Returns rank 0's order if it is on its way, once; waits for it."""
        if self._order_sent is None:
            return None
        sent, self._order_sent = self._order_sent, None
        self._order = sent.result().tolist()
        return list(self._order)

    def planned(self, now: Plan) -> Plan | None:
        """Called when a round begins. Returns the plan in rank 0's order, in the same round on
        every rank.

        None if every bucket would hold the same gradients as now: their order within a bucket
        changes nothing.
        """
        order = self.order()
        if order is None:
            return None
        plan = plan_in_order(now.params, order, self._reducer.config, num_ranks=now.num_ranks)
        return None if now.is_alike(plan.groups, plan.wires) else plan

    @property
    def is_new(self) -> bool:
        """True if the plan that `round_ends` has returned is a candidate whose first window
        begins."""
        return self.trying is not None and self.trying.trials.is_new

    def forget_window(self) -> None:
        """Called when a round has failed: its window begins again."""
        if self.trying is not None:
            self.trying.forget_window()

    def cannot_try(self, rank: int) -> None:
        """Called if `rank` cannot make the buckets of the plan that was to be tried."""
        assert self.trying is not None  # it has named the plan
        self.trying.trials.fail(f"rank {rank} could not make its buckets")
        self.will_try = not self.trying.trials.are_over

    def lays_out(self) -> None:
        """Called when a sharded optimizer lays parameters out: another plan would come too late,
        because its state would have to move. Rank 0's order comes before the first step."""
        self.has_settled = False
        if self.measuring is not None:
            self.measuring.lays_out()
        if self.trying is not None:
            self.trying.close()
        self.trying, self.will_try = None, False

    def close(self) -> None:
        """Ends it; measurements stay."""
        self._seen = None
        self._arrivals.at_each = None
        self.measuring, self.will_try = None, False
        if self.trying is not None:
            self.trying.close()
            self.num_drops = self.trying.num_drops

    def told(self) -> str:
        """Returns the progress of the trials in words, or "" if there are none."""
        if self.trying is not None:
            return progress_text(self.trying.trials, num_steps=self.trying.num_steps)
        told = "sizes follow from the size of the model; others will be tried"
        return told if self.will_try else ""

    @property
    def tried(self) -> Sequence[Trial]:
        """The trials so far."""
        return () if self.trying is None else self.trying.trials.tried

    def _send_order(self, seen: Sequence[int]) -> None:
        self._seen = None
        self._arrivals.at_each = None
        group, params = self._reducer.group.deciding, self._arrivals.index_of
        order = torch.tensor(observed(len(params), seen), dtype=torch.int64)
        # [number of parameters]
        self._order_sent = group.broadcast(
            order.to(group.device), "the order of rank 0's gradients"
        )

    def _begin(self, present: Plan) -> Trying:
        config = self._reducer.config
        trials = Trials(
            present,
            order_of(present) if self._order is None else self._order,
            tries_formats=config.wire == AUTO,
            keeps_buckets=config.bucket_cap_mb is not None,
            block=config.block,
        )
        group = self._reducer.group.deciding
        return Trying(trials, self._recorder, group, number=self._number, num_drops=self.num_drops)


def order_of(plan: Plan) -> list[int]:
    """Returns the parameters in the order of the buckets."""
    return [param for bucket in plan.buckets for param in bucket.params]


def _follows_order(reducer: Reducer) -> bool:
    """Returns True if the plan takes over rank 0's order of arrival; the same on every rank."""
    # A changed plan changes the rounding of three or more summands, which a user who wants the same
    # bits does not expect. A hook may keep state for every bucket.
    is_free = reducer.config.plan is None and reducer.hook is None
    is_observed = is_free and reducer.config.order == "observed"
    return is_observed and not torch.are_deterministic_algorithms_enabled()


def may_move(reducer: Reducer) -> bool:
    """Returns True if trials may change the plan: its buckets, or with a given `bucket_cap_mb`
    their formats only; the same on every rank."""
    return not why_fixed(reducer, counts_cap=reducer.config.wire != AUTO)


def why_fixed(reducer: Reducer, *, counts_cap: bool = True) -> str:
    """Returns why no other plan is tried, or "" if some are; the same on every rank."""
    config = reducer.config
    cap = config.bucket_cap_mb if counts_cap else None
    reasons = (
        (reducer.group.num_ranks == 1, "a single rank has nothing to communicate"),
        (config.plan is not None, "it is pinned: SyncConfig(plan=...)"),
        (cap is not None, f"bucket_cap_mb={cap} is set"),
        (reducer.hook is not None, "a communication hook may keep state for every bucket"),
        (config.record == "off", "record='off': nothing is measured"),
        (not config.overlap, "overlap=False: no communication is hidden"),
        (not config.auto_tune, "auto_tune=False: sizes follow from the size of the model"),
    )
    return next((reason for applies, reason in reasons if applies), "")
