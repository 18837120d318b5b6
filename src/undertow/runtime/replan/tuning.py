"""Makes all ranks measure the same steps, and take the plan that rank 0 decides on."""

from collections.abc import Generator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from undertow.plan import Groups
from undertow.runtime.comm.group import OwnGroup, Pending
from undertow.runtime.comm.recorder import Recorder
from undertow.runtime.execute.compiled_plan import Present
from undertow.schedule import Arrivals
from undertow.tune import Decided, Decision, Outcome, Tuner, array_of_records, decision_from_array, measurement_from_array
from undertow.tune.tuner import NUM_STEPS_BETWEEN_LOOKS

NUM_STEPS_MEASURED = 5
_NUM_KEPT = 32


class Tuning:
    """Improves the plan of one set of parameters, again and again; each look takes some rounds.

    All its messages are started at the end of a round that every rank has found sound. So no rank starts one alone: a rank whose
    parameters have changed since, or that fails, is found out before. They are waited for in a later round, because with several
    models in one backward another rank may be at another model.

    `may_move` is True if the plan may be changed; that must be the same on every rank.
    """

    def __init__(self, arrivals: Arrivals, recorder: Recorder, group: OwnGroup, tuner: Tuner, *, may_move: bool) -> None:
        self.history: list[Decided] = []
        self.is_about_to_communicate = False  # at the end of the next round, if that is sound
        self.sent: tuple[Present, Pending[Tensor]] | None = None  # a decision in flight
        self._arrivals, self._recorder, self._group = arrivals, recorder, group
        self.tuner, self._may_move = tuner, may_move
        self._num_rounds, self._next_look = 0, NUM_STEPS_BETWEEN_LOOKS
        self._looks: Generator[None, Present, None] | None = self._look_again_and_again()
        next(self._looks)

    def take(self, present: Present) -> Groups | None:
        """Called when a round begins; returns new groups of the buckets if they were decided, in the same round on every rank."""
        if self.sent is None:
            return None
        (decided_on, sent), self.sent = self.sent, None
        decision = decision_from_array(sent.take().cpu().numpy(), decided_on.plan.params)
        if decision.groups is not None and decided_on != present:
            decision = replace(decision, outcome=Outcome.OVERTAKEN, groups=None)
        self._next_look = decision.next_look
        self.history = [*self.history, Decided(round=self._num_rounds, decision=decision)][-_NUM_KEPT:]
        return decision.groups

    def round_ends(self, present: Present) -> None:
        """Called after a round under this plan that all ranks have found sound."""
        self._num_rounds += 1
        if self._looks is not None:
            try:
                self._looks.send(present)
            except StopIteration:  # an error has ended it
                self._looks = None

    def close(self) -> None:
        """Ends it; measurements stay, and a decision in flight may be taken."""
        self._arrivals.at_each = None
        self._looks = None  # which holds this object

    def _look_again_and_again(self) -> Generator[None, Present, None]:
        """Continues at the end of every sound round."""
        num_rounds = 0
        yield  # a first round ends
        while True:
            for _ in range(num_rounds):
                yield
            self._arrivals.at_each = self._recorder.gradient_arrives
            for _ in range(NUM_STEPS_MEASURED):
                yield
            self._arrivals.at_each = None
            self.is_about_to_communicate = True
            measured = yield  # the last step is complete when the next one has begun
            yield from self._learn(measured)
            num_rounds = NUM_STEPS_BETWEEN_LOOKS
            if self._may_move:
                self._decide(measured)
                self.is_about_to_communicate = False
                yield
                num_rounds = self._next_look - 1
            self.is_about_to_communicate = False

    def _learn(self, measured: Present) -> Generator[None, Present, None]:
        """Exchanges the times of all ranks, and learns from them in the next round."""
        records = self._recorder.records(generation=measured.generation, at_most=NUM_STEPS_MEASURED)
        latest = torch.from_numpy(array_of_records(records, measured.plan, num_steps=NUM_STEPS_MEASURED)).to(self._group.device)
        handle = self._group.all_reduce_async(latest, dist.ReduceOp.MAX)
        yield
        with self._group.waiting("the times of all ranks"):
            handle.wait()
        measurement = measurement_from_array(latest.cpu().numpy(), records, measured.plan)
        if measurement is not None:
            self.tuner.learn(measurement)

    def _decide(self, measured: Present) -> None:
        decision = Decision(outcome=Outcome.FROZEN, next_look=NUM_STEPS_BETWEEN_LOOKS)
        if self._group.rank == 0 and not torch.are_deterministic_algorithms_enabled():
            decision = self.tuner.decide(measured.plan, has_shards=measured.has_shards)
        numbers = torch.from_numpy(decision.to_array(measured.plan.params))
        self.sent = measured, self._group.broadcast(numbers.to(self._group.device), "rank 0's plan")
