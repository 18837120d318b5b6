"""Measures the first steps and the link between replicas, and chooses fragments and delay."""

import time
from collections import Counter, deque
from collections.abc import Iterable
from itertools import pairwise
from statistics import mean, median

import torch

from undertow.config import Outer
from undertow.errors import require
from undertow.outer.fragment import Fragment
from undertow.outer.replicas import Replicas
from undertow.plan.fragments import Turns, chosen_turns, fixed_turns, layer_of, layers_of
from undertow.ranks.agreement import gather_json
from undertow.trace import OuterReport
from undertow.wire import AUTO

_NUM_STEPS = 10  # that are measured, or all until the first exchange
_SMALL = 4096  # bytes; the time of a message so small does not depend on its size
_LARGE = 1 << 20
_NUM_KEPT = 64  # exchanges that a report covers


class Timings:
    """The times of the first steps, and of the last exchanges."""

    def __init__(self, outer: Outer) -> None:
        self.reason = "as given"
        self._num_steps = min(outer.every, _NUM_STEPS)
        self._ends_s: list[float] = []
        # Bytes, seconds from the start until the end, and seconds that the step waited.
        self._exchanges: deque[tuple[int, float, float]] = deque(maxlen=_NUM_KEPT)

    def note_step(self) -> None:
        self._ends_s.append(time.perf_counter())

    @property
    def has_steps(self) -> bool:
        """True if enough steps are noted."""
        return len(self._ends_s) >= self._num_steps

    @property
    def step_us(self) -> float:
        """The median time of a step; 0 if a single one is noted."""
        times = [stop - start for start, stop in pairwise(self._ends_s)]
        return median(times) * 1e6 if times else 0.0

    def note_exchange(self, part: Fragment, *, exposed_s: float) -> None:
        """Called when an exchange has arrived, for which the step has waited so long."""
        flight = part.flight
        assert flight is not None  # its outer step follows
        self._exchanges.append((part.num_bytes, flight.done_s - flight.started_s, exposed_s))

    def report(
        self, turns: Turns | None, *, every: int, num_exchanges: int, num_left_out: int
    ) -> OuterReport:
        """Returns the times of the last exchanges."""
        rows = [*self._exchanges] or [(0, 0.0, 0.0)]
        num_bytes, times_s, exposed_s = zip(*rows, strict=True)
        return OuterReport(
            every=every,
            fragments=0 if turns is None else turns.fragments,
            delay=0 if turns is None else turns.delay,
            reason=self.reason,
            num_exchanges=num_exchanges,
            sent_bytes=max(num_bytes),
            exchange_ms=median(times_s) * 1e3,
            exposed_ms=mean(exposed_s) * 1e3,
            num_left_out=num_left_out,
        )


def given_turns(outer: Outer, names: Iterable[str]) -> Turns | None:
    """Returns the fragments and the delay of the settings, or None if they are to be measured.

    `names` are of the model's tensors. Raises ConfigError if there are more fragments than layers.
    """
    num_layers = len(layers_of([*names]))
    if isinstance(outer.fragments, int):
        require(
            outer.fragments <= num_layers,
            f"fragments is {outer.fragments}, and the model has {num_layers} layers.",
            where="SyncConfig(outer=Outer(fragments=...))",
            remedy=f"Give {num_layers} or less: a fragment has whole layers.",
        )
    if AUTO in (outer.fragments, outer.delay):
        return None
    return Turns(fragments=int(outer.fragments), delay=int(outer.delay))


def measured_turns(replicas: Replicas, whole: Fragment, *, step_us: float) -> tuple[Turns, str]:
    """Returns fragments and delay, the same on all ranks, and the reason; a collective call.

    `whole` is the model as one fragment. Nothing is measured if torch is to be deterministic.
    """
    sizes: Counter[str] = Counter()
    for name, view in whole.layout.named(whole.values).items():
        sizes[layer_of(name)] += view.numel()
    # It may have been switched on after the ranks have met, and first on one of them.
    is_mine = torch.are_deterministic_algorithms_enabled()
    # On a mesh all places choose alike: they step on some parameters together.
    everyone, what = replicas.all_ranks.everyone, "the choice of fragments"
    if any(gather_json(everyone, is_mine, waits_for=what)):
        reason = "fixed, because torch.use_deterministic_algorithms is on"
        return fixed_turns(replicas.outer, num_layers=len(sizes)), reason
    small_us, large_us = _exchange_us(replicas, _SMALL), _exchange_us(replicas, _LARGE)
    mine = [step_us, small_us, large_us, whole.num_bytes, *sizes.values()]
    found = gather_json(everyone, mine, waits_for=what)
    # The fastest replica, which has the least time, and the slowest link.
    step_us = min(of_rank[0] for of_rank in found)
    small_us = max(of_rank[1] for of_rank in found)
    per_byte_us = max(0.0, max(of_rank[2] for of_rank in found) - small_us) / (_LARGE - _SMALL)
    num_bytes, *numels = (max(of_all) for of_all in zip(*(row[3:] for row in found), strict=True))
    all_us = num_bytes * per_byte_us
    share_us = all_us / max(1, sum(numels))
    turns = chosen_turns(
        replicas.outer,
        step_us=step_us,
        fixed_us=small_us,
        layers_us=[numel * share_us for numel in numels],
    )
    reason = (
        f"a step takes {step_us / 1e3:.1f} ms, and an exchange of all parameters "
        f"{(small_us + all_us) / 1e3:.1f} ms"
    )
    return turns, reason


def _exchange_us(replicas: Replicas, num_bytes: int) -> float:
    """Returns the time of an exchange of so many bytes: the second one, when all are there."""
    message = torch.zeros(num_bytes // 4, device=replicas.column.device)
    for _ in range(2):
        start_s = time.perf_counter()
        with replicas.column.waiting("the measurement of the link"):
            replicas.exchanges.all_reduce(message).wait()
        replicas.column.hardware.synchronize()
    return (time.perf_counter() - start_s) * 1e6
