"""The cost model that compares plans by the end of their last bucket.

Buckets are launched in order, and the lane carries one collective at a time. A bucket starts when
the previous one ends and its last gradient is ready:

    F = max(F, latest ready) + C(bytes)

With shards a bucket's storage is one allocation, so the same buckets are gathered under the next
forward, in reverse order: the last one first. A parameter read at u waits for its own bucket and
all later ones. That wait delays everything after it by as much. Counted from the first bucket on,
this is the same recursion with -u for the ready time:

    K = max(K, -earliest use) + C(bytes),   stall = max(0, K)

A bucket in a format has fewer bytes, and its values are encoded and decoded: `C` is
`undertow.lab.cost.payloads_us`. A bucket with one owner for each parameter takes as long as its
busiest rank exchanges bytes: `undertow.plan.owners.largest_over_mean`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from undertow.lab.cost import Costs, Payload, payloads_us
from undertow.lab.cost.curves import Floats
from undertow.plan.lane import Lane
from undertow.plan.layout import Groups, ParamSpec, Wires
from undertow.plan.owners import largest_over_mean
from undertow.plan.plan import Bucket, Plan
from undertow.wire import wire_for

_ROUNDING = 1e-9  # of a sum of times


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """When gradients are ready and parameters are read in a step without communication.

    Microseconds, the latest of all ranks.
    """

    ready_us: Sequence[float]  # by parameter: its gradient is ready, since the step began
    # the last bucket is not sent earlier: its trailer carries information known only then
    backward_end_us: float
    # by parameter: first read in forward, since forward began; only for shards
    used_us: Sequence[float] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Predicts the time of a step under any buckets and formats.

    Each bucket delays backward by `bucket_us` of processor time before it is sent, and by its
    format's. With shards, the time is the period of steps without their update: the stall of the
    next forward, which waits for gathers in the format `param_wire`, plus the longer of backward
    and reductions. Bytes are of gradients, without padding and trailers.
    """

    params: Sequence[ParamSpec]
    timing: StepTiming
    costs: Costs
    has_shards: bool = False
    param_wire: str | None = None
    bucket_us: float = 0.0
    num_shards: int = 1  # the ranks that own whole parameters

    def narrowed(self, groups: Groups, wire: str | None) -> Wires:
        """Returns the format of each bucket if gradients travel in `wire` as far as they can."""
        wires = []
        for group in groups:
            first = self.params[group[0]]  # all parameters of a bucket are of its kind
            is_real = not first.is_sparse and wire_for(wire, first.dtype, first.itemsize)
            wires.append(wire if is_real else None)
        return tuple(wires)

    def finish_us(self, groups: Groups, wires: Wires | None = None) -> float:
        """Returns when the last reduction ends, in microseconds since the step began.

        `wires` has the format of each bucket; None: all in full width.
        """
        groups = groups or ((),)  # one empty bucket is sent
        wires = wires or (None,) * len(groups)
        payloads = self._payloads(groups, wires)
        starts_us = self._starts_us(groups, payloads).tolist()
        finish_us = _through_us(starts_us, self._reductions_us(payloads))
        if not self.has_shards:
            return finish_us
        used_us = [
            -min((self.timing.used_us[param] for param in group), default=0.0) for group in groups
        ]
        gathers = self._payloads(groups, (self.param_wire,) * len(groups), is_gather=True)
        gathers_us = payloads_us(self.costs, "all_gather", gathers)
        return max(0.0, _through_us(used_us, gathers_us)) + finish_us

    def wires_if_exposed(self, groups: Groups, wire: str) -> Wires:
        """Returns `wire` for the buckets that need it, and None for the others.

        The last reduction ends as early as if all buckets were in `wire`, or earlier, and later if
        one more were in full width.
        """
        wires = list(self.narrowed(groups, wire))
        payloads = self._payloads(groups, wires)
        times_us = self._reductions_us(payloads)
        in_full = self._payloads(groups, (None,) * len(groups))
        longer_us = self._reductions_us(in_full) - times_us
        # The last reduction ends at the latest sum of a start and all times from there on.
        ends_us = self._starts_us(groups, payloads) + times_us[::-1].cumsum()[::-1]
        # First the buckets that full width makes shorter, then the first ones of the others: full
        # width for a later one makes none of them fit.
        for bucket in sorted(range(len(groups)), key=lambda bucket: longer_us[bucket] > 0):
            in_full_us = ends_us.copy()
            in_full_us[: bucket + 1] += longer_us[bucket]
            in_full_us[bucket:] -= payloads[bucket].host_us
            if in_full_us.max() <= ends_us.max() * (1 + _ROUNDING):
                ends_us = in_full_us
                wires[bucket] = None
        return tuple(wires)

    def _starts_us(self, groups: Groups, payloads: Sequence[Payload]) -> Floats:
        """Returns the earliest start of each bucket."""
        ready_us = [
            max((self.timing.ready_us[param] for param in group), default=0.0) for group in groups
        ]
        ready_us[-1] = max(ready_us[-1], self.timing.backward_end_us)
        delays_us = [self.bucket_us + payload.host_us for payload in payloads]
        return np.cumsum(delays_us) + ready_us

    def _reductions_us(self, payloads: Sequence[Payload]) -> Floats:
        kind = "reduce_scatter" if self.has_shards else "all_reduce"
        return payloads_us(self.costs, kind, payloads)

    def _payloads(
        self, groups: Groups, wires: Sequence[str | None], *, is_gather: bool = False
    ) -> list[Payload]:
        payloads = []
        for group, wire in zip(groups, wires, strict=True):
            factor = largest_over_mean(
                self.params, group, num_ranks=self.num_shards, wire=wire, is_gather=is_gather
            )
            payloads.append(_stretched(payload_of(self.params, group, wire), factor))
        return payloads


def payload_of(
    params: Sequence[ParamSpec], group: Sequence[int], wire: str | None = None
) -> Payload:
    """Returns the gradients of a bucket, or its gathered parameters, in a format."""
    return Payload(
        num_bytes=sum(params[param].sent_bytes(wire) for param in group),
        wire=wire,
        num_encoded=sum(params[param].encoded_numel(wire) for param in group),
        is_host=all(params[param].device == "cpu" for param in group),
    )


def in_equal_parts(
    plan: Plan, bucket: Bucket, payload: Payload, *, is_gather: bool = False
) -> Payload:
    """Returns the payload in equal parts that takes as long as the bucket's gradients do on their
    busiest rank, or with `is_gather` its parameters."""
    factor = largest_over_mean(
        plan.params,
        bucket.params,
        bucket.owners,
        num_ranks=plan.num_shards,
        wire=bucket.wire,
        is_gather=is_gather,
    )
    return _stretched(payload, factor)


def _stretched(payload: Payload, factor: float) -> Payload:
    return replace(payload, num_bytes=math.ceil(payload.num_bytes * factor))


def _through_us(starts_us: Sequence[float], times_us: Floats) -> float:
    """Returns the end of the last of these collectives, which may start at these times."""
    lane = Lane(free_us=-math.inf)
    for start_us, time_us in zip(starts_us, times_us.tolist(), strict=True):
        lane.send(time_us, ready_us=start_us)
    return lane.free_us
