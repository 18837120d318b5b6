"""Has all ranks measure the same steps, and take the plan that rank 0 makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.plan import GathersBehind, Groups, Plan, plan_from_groups
from undertow.runtime.comm.group import OwnGroup, Pending
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.compiled_plan import Present
from undertow.schedule import Arrivals
from undertow.tune import Decided, Decision, Outcome, Tuner, array_of_records, decision_from_array, measurement_from_array
from undertow.tune.tuner import NUM_STEPS_BETWEEN_LOOKS

NUM_STEPS_MEASURED = 5
_NUM_KEPT = 32


class Tuning:
    """Looks at one set of parameters, again and again; a look takes some rounds.

    All that communicates is started at the end of a round that every rank has found sound, so that no rank starts it alone: one
    whose parameters have changed since, or that fails, is found out before. It is waited for in a later round, for with
    several models in one backward another rank may be in another one's turn.

    `may_move` is whether the plan may be changed; that must be the same on every rank. `is_frozen` is asked on rank 0 alone.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        recorder: Recorder,
        group: OwnGroup,
        tuner: Tuner,
        *,
        may_move: bool,
        is_frozen: Callable[[], bool],
    ) -> None:
        self.tuner = tuner
        self.history: list[Decided] = []
        self.is_about_to_communicate = False  # at the end of the next round, if that is sound
        self._arrivals = arrivals
        self._recorder = recorder
        self._group = group
        self._may_move = may_move
        self._is_frozen = is_frozen
        self._num_rounds = 0
        self._order: tuple[Groups, GathersBehind] | None = None  # of the plan with these groups
        self._is_measuring = False
        self._now: Present | None = None
        self.sent: tuple[Present, Pending[Tensor]] | None = None  # a decision on its way
        self._next_look = NUM_STEPS_BETWEEN_LOOKS
        self._looks: Iterator[None] | None = self._look_again_and_again()

    def take(self, present: Present) -> Groups | None:
        """What the buckets shall hold from this round on, which begins, where that was decided: on every rank in the same one."""
        if self.sent is None:
            return None
        (decided_on, sent), self.sent = self.sent, None
        decision = decision_from_array(sent.take().cpu().numpy(), decided_on.plan.params)
        if decision.groups is not None and decided_on != present:
            decision = replace(decision, outcome=Outcome.OVERTAKEN, groups=None, gathers_behind=None)
        if decision.gathers_behind is not None:
            self._order = (decision.groups or decided_on.plan.groups, decision.gathers_behind)
        self._next_look = decision.next_look
        if self._may_move:
            self.history = [*self.history, Decided(round=self._num_rounds, decision=decision)][-_NUM_KEPT:]
        return decision.groups

    def round_ends(self, present: Present) -> None:
        """All ranks have found the round sound, and that it was the same for all of them."""
        self._num_rounds += 1
        if self._looks is not None:
            self._now = present
            next(self._looks, None)  # for ever, but for one that an error has ended

    def gathers_behind(self, plan: Plan) -> GathersBehind | None:
        """The order for the round that has begun; None, all gathers behind the last reduction, also while we measure.

        What either takes is seen only where they do not share the link.
        """
        return self._order[1] if self._order is not None and self._order[0] == plan.groups and not self._is_measuring else None

    def close(self) -> None:
        """Ends it; what was learned stays, and what was decided may be taken."""
        self._arrivals.call_at_each(None)
        self._looks = None  # which holds us

    def _look_again_and_again(self) -> Iterator[None]:
        """Goes on at the end of every sound round."""
        num_rounds = 0
        while True:
            for num_left in reversed(range(num_rounds)):
                self._is_measuring = num_left == 0  # the gathers of the next round lie under the first forward that counts
                yield
            self._arrivals.call_at_each(self._recorder.gradient_arrives)
            for _ in range(NUM_STEPS_MEASURED):
                yield
            self._arrivals.call_at_each(None)
            self.is_about_to_communicate = True
            yield  # the last step is over when the next one has begun
            measured = self._now
            assert measured is not None  # a round has ended
            yield from self._learn(measured)
            num_rounds = NUM_STEPS_BETWEEN_LOOKS
            if self._may_move or measured.steps_in_backward:
                self._decide(measured)
                self.is_about_to_communicate = False
                yield
                num_rounds = self._next_look - 1
            self.is_about_to_communicate = False
            self._is_measuring = num_rounds == 0

    def _learn(self, measured: Present) -> Iterator[None]:
        """Brings the times of all ranks together, and learns from them in the next round."""
        records = self._recorder.records(generation=measured.generation, at_most=NUM_STEPS_MEASURED)
        mine = array_of_records(records, measured.plan, num_steps=NUM_STEPS_MEASURED)
        latest = torch.from_numpy(mine).to(self._group.device)
        handle = self._group.all_reduce_async(latest, dist.ReduceOp.MAX)
        yield
        with self._group.waiting("the times of all ranks"):
            handle.wait()
        measurement = measurement_from_array(latest.cpu().numpy(), records, measured.plan)
        if measurement is not None:
            self.tuner.learn(measurement)

    def _decide(self, measured: Present) -> None:
        """Rank 0 decides, and the others will hear of it."""
        decision = Decision(outcome=Outcome.FROZEN, next_look=NUM_STEPS_BETWEEN_LOOKS)
        if self._group.rank == 0:
            if self._may_move and not self._is_frozen():
                decision = self.tuner.decide(
                    measured.plan, has_shards=measured.has_shards, steps_in_backward=measured.steps_in_backward
                )
            decision = self._with_order(decision, measured)
        numbers: Tensor = torch.from_numpy(decision.to_array(measured.plan.params)).to(self._group.device)
        self.sent = measured, self._group.broadcast(numbers, "rank 0's plan")

    def _with_order(self, decision: Decision, measured: Present) -> Decision:
        if not measured.steps_in_backward:
            return decision
        plan = measured.plan
        if decision.groups is not None:
            plan = plan_from_groups(plan.params, decision.groups, num_ranks=plan.num_ranks)
        return replace(decision, gathers_behind=self.tuner.gathers_behind(plan))
