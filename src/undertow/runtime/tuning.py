"""Has all ranks measure the same steps, and take the plan that rank 0 makes of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.plan import GathersBehind, Member, Plan, plan_from_groups
from undertow.runtime.group import OwnGroup
from undertow.runtime.recorder import Recorder
from undertow.schedule import Arrivals
from undertow.tune import Decided, Decision, Outcome, Tuner, array_of_records, decision_from_array, measurement_from_array
from undertow.tune.tuner import NUM_STEPS_BETWEEN_LOOKS

NUM_STEPS_MEASURED = 5
_NUM_STEPS_TO_SETTLE = 1  # under a new plan: memory is touched for the first time
_NUM_KEPT = 32

Groups = tuple[tuple[Member, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The plan of the round that begins."""

    plan: Plan
    generation: int
    has_shards: bool
    is_eager: bool = False  # its buckets are stepped in backward


class Tuning:
    """Looks at one set of parameters, again and again; a look takes some rounds.

    All that communicates is started when a round begins, on every rank in the same one, and waited for in a later round:
    with several models in one backward another rank may be in another one's turn.

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
        self._arrivals = arrivals
        self._recorder = recorder
        self._group = group
        self._may_move = may_move
        self._is_frozen = is_frozen
        self._present: Present | None = None
        self._num_rounds = 0
        self._order: tuple[Groups, GathersBehind] | None = None  # of the plan with these groups
        self._is_measuring = False
        self._looks: Iterator[Groups | None] | None = self._look_again_and_again()

    def round_begins(self, present: Present) -> Groups | None:
        """What the buckets shall hold from this round on, where it is time for another plan. Before anything has arrived."""
        if self._looks is None:
            return None
        self._present = present
        groups = next(self._looks, None)  # for ever, but for one that an error has ended
        self._num_rounds += 1
        return groups

    def gathers_behind(self, plan: Plan) -> GathersBehind | None:
        """The order for the round that has begun; None, all gathers behind the last reduction, also while we measure.

        What either takes is seen only where they do not share the link.
        """
        return self._order[1] if self._order is not None and self._order[0] == plan.groups and not self._is_measuring else None

    def close(self) -> None:
        """Ends it; what was learned stays."""
        self._arrivals.call_at_each(None)
        self._looks = None  # which holds us

    @property
    def _now(self) -> Present:
        assert self._present is not None  # a round has begun
        return self._present

    def _look_again_and_again(self) -> Iterator[Groups | None]:
        num_steps = _NUM_STEPS_TO_SETTLE
        while True:
            for num_left in reversed(range(num_steps)):
                self._is_measuring = num_left == 0  # the gathers of this round lie under the first forward that counts
                yield None
            self._arrivals.call_at_each(self._recorder.gradient_arrives)
            for _ in range(NUM_STEPS_MEASURED):
                yield None
            self._arrivals.call_at_each(None)
            num_steps = NUM_STEPS_BETWEEN_LOOKS
            measured = yield from self._measure()
            if not self._may_move and not measured.is_eager:
                continue
            decision = yield from self._decide(measured)
            self._is_measuring = False
            num_steps = decision.next_look
            if decision.gathers_behind is not None:
                self._order = (decision.groups or measured.plan.groups, decision.gathers_behind)
            if decision.groups is not None and self._now == measured:
                yield decision.groups

    def _measure(self) -> Generator[Groups | None, None, Present]:
        """Brings the times of all ranks together, and learns from them. Returns what was measured."""
        now = self._now
        records = self._recorder.records(generation=now.generation, at_most=NUM_STEPS_MEASURED)
        mine = array_of_records(records, now.plan, num_steps=NUM_STEPS_MEASURED)
        latest = torch.from_numpy(mine).to(self._group.device)
        work = dist.all_reduce(latest, dist.ReduceOp.MAX, group=self._group.process_group, async_op=True)
        yield None
        _wait(work)
        measurement = measurement_from_array(latest.cpu().numpy(), records, now.plan)
        if measurement is not None:
            self.tuner.learn(measurement)
        return now

    def _decide(self, measured: Present) -> Generator[Groups | None, None, Decision]:
        """Rank 0 decides, and the others hear of it."""
        params = measured.plan.params
        decision = Decision(outcome=Outcome.FROZEN, next_look=NUM_STEPS_BETWEEN_LOOKS)
        if self._group.rank == 0:
            if self._may_move and not self._is_frozen():
                decision = self.tuner.decide(measured.plan, has_shards=measured.has_shards, is_eager=measured.is_eager)
            decision = self._with_order(decision, measured)
        numbers: Tensor = torch.from_numpy(decision.to_array(params)).to(self._group.device)
        work = dist.broadcast(numbers, group=self._group.process_group, group_src=0, async_op=True)
        yield None
        _wait(work)
        decision = decision_from_array(numbers.cpu().numpy(), params)
        if self._may_move:
            self.history = [*self.history, Decided(round=self._num_rounds, decision=decision)][-_NUM_KEPT:]
        return decision

    def _with_order(self, decision: Decision, measured: Present) -> Decision:
        if not measured.is_eager:
            return decision
        plan = measured.plan
        if decision.groups is not None:
            plan = plan_from_groups(plan.params, decision.groups, num_ranks=plan.num_ranks)
        return replace(decision, gathers_behind=self.tuner.gathers_behind(plan))


def _wait(work: dist.Work | None) -> None:
    assert work is not None  # async_op on a rank of the group
    work.wait()
