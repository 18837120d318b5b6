"""The values that collectives carry, and the time they take: in a format they have fewer bytes, but
are encoded and decoded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from undertow.lab.cost.costs import Costs, MeasuredCosts
from undertow.lab.cost.curves import Floats
from undertow.plan import Bucket, ParamSpec, Plan
from undertow.plan.owners import largest_over_mean
from undertow.wire import WIRES

_FP32_MB = 4e-6  # of an element


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The values that one collective carries."""

    num_bytes: int  # as they travel
    wire: str | None = None
    num_encoded: int = 0  # elements in the format; the others travel in full width
    is_host: bool = True  # processors encode and decode it; the time of a stream is not counted

    @property
    def host_us(self) -> float:
        """Microseconds of a processor for its format, beyond those for its bytes."""
        return WIRES[self.wire].bucket_us if self.wire and self.is_host else 0.0

    def is_direct(self, kind: str) -> bool:
        """Returns True if ranks on processors send it to each other, instead of in a collective of
        gloo."""
        return self.is_host and (self.wire is not None or kind != "all_reduce")


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
    return replace(payload, num_bytes=math.ceil(payload.num_bytes * factor))


def payloads_us(costs: Costs, kind: str, payloads: Sequence[Payload]) -> Floats:
    """Returns the microseconds of one collective for each payload.

    To the costs of its bytes it adds the time of processors to encode, add and decode, unless the
    costs were measured in the same format and contain it. Half of an all-reduce takes half of that
    time.
    """
    contained = costs.wires.get(kind) if isinstance(costs, MeasuredCosts) else None
    share = 1.0 if kind == "all_reduce" else 0.5
    coding_us = np.zeros(len(payloads))
    for index, payload in enumerate(payloads):
        if payload.wire is not None and payload.is_host and payload.wire != contained:
            per_element_us = WIRES[payload.wire].coding_us_per_mb * _FP32_MB
            coding_us[index] = share * per_element_us * payload.num_encoded
    sizes = [payload.num_bytes for payload in payloads]
    times_us = np.where(
        [payload.is_direct(kind) for payload in payloads],
        costs.direct_us(kind, sizes),
        costs.collective_us(kind, sizes),
    )
    return times_us + coding_us
