"""Which ops of a schedule may run next."""

from undertow.schedule.op import COMPUTE, EXTERNAL, Op, OpKind, Schedule


class Releases:
    """Decides which ops of a schedule may be issued after others have happened.

    The simulator runs schedules by it. The engine sends buckets by a counter, in the same order.

    An op is released when every op that it follows has been released (or, for an external op, has
    happened). An op of a communication lane also follows the one before it on the lane: ranks whose
    gradients arrive in different orders still issue the same collectives in the same order.
    Released does not mean complete: the issuer of an op must ensure that its inputs are complete,
    as a stream does.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._ops = schedule.ops
        self._successors: list[list[int]] = [[] for _ in schedule.ops]
        self._num_awaited: list[int] = []  # of each op: the ops that it follows
        fills: dict[int, int] = {}  # by bucket
        last_of_lane: dict[str, set[int]] = {}
        for op in schedule.ops:
            awaited = set(op.after)
            if op.lane != COMPUTE:
                awaited.update(last_of_lane.get(op.lane, ()))
                last_of_lane[op.lane] = {op.id}
            for earlier in awaited:
                self._successors[earlier].append(op.id)
            # An external op is never released: it happens.
            self._num_awaited.append(-1 if op.kind in EXTERNAL else len(awaited))
            match op.kind:
                case OpKind.FILL:
                    fills[op.bucket or 0] = op.id
                case OpKind.END:
                    end = op.id
                case OpKind.JOIN:
                    self.join = (op.id,)
        # Possible events: all gradients of a bucket have arrived; backward ends, so that gradients
        # that have not arrived are unused on this rank and all remaining buckets are launched; and
        # every engine of this process has launched.
        self.fills = [(fills[bucket],) for bucket in sorted(fills)]
        self.end = (*fills.values(), end)
        self.reset()

    def reset(self) -> None:
        """Starts the next synchronization: nothing has happened."""
        self._happened: set[int] = set()
        self._num_blockers = self._num_awaited.copy()

    def happen(self, op_ids: tuple[int, ...]) -> list[Op]:
        """Marks one of `fills`, `end` or `join` as happened.

        Returns the ops that this releases, in the order to issue them.
        """
        num_blockers = self._num_blockers
        # No comprehensions: each would be a frame in every step.
        waiting: list[int] = []
        for op_id in op_ids:
            if op_id not in self._happened:
                self._happened.add(op_id)
                waiting.append(op_id)
        released: list[int] = []
        while waiting:
            for successor in self._successors[waiting.pop()]:
                num_blockers[successor] -= 1
                if num_blockers[successor] == 0:
                    waiting.append(successor)
                    released.append(successor)
        # By id, so that a bucket is launched before the next one is packed.
        released.sort()
        return list(map(self._ops.__getitem__, released))
