"""Predicts training whose replicas train alone, and exchange fragments of their differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from undertow.config import Outer
from undertow.errors import require
from undertow.lab.cost import Payload, payloads_us
from undertow.lab.cost.payloads import payload_of
from undertow.lab.what_if import WhatIf
from undertow.plan.fragments import chosen_turns, exposed_us, layer_of, layers_of
from undertow.wire import AUTO

EVERY = (1, 3, 10, 30, 100, 300)  # steps, of a sweep
COLUMNS = {  # of a table of OuterSteps
    "every": ("every", "d"),
    "fragments": ("fragments", "d"),
    "delay": ("delay", "d"),
    "step_ms": ("step, ms", ".1f"),
    "exposed_ms": ("exposed, ms", ".1f"),
    "exchange_ms": ("exchange, ms", ".1f"),
    "sent_mb": ("MB a step", ".2f"),
}
_SMALL = Payload(num_bytes=4096)
_WHERE = "undertow simulate --outer"


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterSteps:
    """A steady period of training with outer synchronization; times in milliseconds."""

    every: int  # steps between two exchanges of a fragment
    fragments: int
    delay: int  # steps that hide an exchange
    step_ms: float  # mean
    compute_ms: float
    exposed_ms: float  # waits of a step, mean
    exchange_ms: float  # of the largest fragment
    sent_mb: float  # 10^6 bytes of messages in a step, mean


def outer_steps(what_if: WhatIf, outer: Outer) -> OuterSteps:
    """Simulates replicas of one rank each over the network of `what_if`.

    The code that makes fragments and their turns in training does so here too. Exchanges follow
    each other over one link.

    Raises ConfigError for a network of nodes, more fragments than layers, and an optimizer that is
    divided.
    """
    require(
        what_if.per_node is None and what_if.num_ranks > 1,
        "--outer predicts replicas of one rank each, and needs two or more.",
        where=_WHERE,
        remedy="Give --ranks 2 or more, and the link between replicas, without --per-node.",
    )
    require(
        what_if.optimizer is None,
        "--optimizer has no effect here: each rank updates everything.",
        where=_WHERE,
        remedy="Leave it out.",
    )
    params = what_if.profile.params
    layers = layers_of([spec.name for spec in params])
    require(
        outer.fragments == AUTO or int(outer.fragments) <= len(layers),
        f"--fragments is {outer.fragments}, and the model has {len(layers)} layers.",
        where=_WHERE,
        remedy=f"Give {len(layers)} or less: a fragment has whole layers.",
    )
    members: dict[str, list[int]] = {layer: [] for layer in layers}
    for index, spec in enumerate(params):
        members[layer_of(spec.name)].append(index)
    of_layers = [payload_of(params, group, outer.wire) for group in members.values()]
    fixed_us, *layers_us = _exchanges_us(what_if, [_SMALL, *of_layers])
    turns = chosen_turns(
        outer,
        step_us=what_if.compute_us,
        fixed_us=fixed_us,
        layers_us=[max(0.0, layer_us - fixed_us) for layer_us in layers_us],
    )
    groups = [list(members.values())[index :: turns.fragments] for index in range(turns.fragments)]
    payloads = [payload_of(params, list(chain(*group)), outer.wire) for group in groups]
    times_us = _exchanges_us(what_if, payloads)
    waits_us = exposed_us(
        times_us, delay=turns.delay, every=outer.every, step_us=what_if.compute_us
    )
    return OuterSteps(
        every=outer.every,
        fragments=turns.fragments,
        delay=turns.delay,
        step_ms=(what_if.compute_us + waits_us) / 1e3,
        compute_ms=what_if.compute_us / 1e3,
        exposed_ms=waits_us / 1e3,
        exchange_ms=max(times_us) / 1e3,
        sent_mb=sum(payload.num_bytes for payload in payloads) / outer.every / 1e6,
    )


def _exchanges_us(what_if: WhatIf, payloads: Sequence[Payload]) -> list[float]:
    return [float(time) for time in payloads_us(what_if.costs, "all_reduce", payloads)]
