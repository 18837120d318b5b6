"""What weights make of a round: the same on the host and on a device, where it is computed without waiting."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from undertow.runtime.weights import Sums, Weighing

HAS, NO_DATA, NONE = 1.0, 2.0, 0.0


def weighing(said: tuple[float, ...], before: Sums | None) -> Weighing:
    group: Any = SimpleNamespace(num_ranks=2, device=torch.device("cpu"))  # as much of one as is asked for
    made = Weighing(group, 1.0, before=before, is_without_data=False, can_wait=True, is_last=True)
    made._tensor = torch.tensor(said, dtype=torch.float64)
    return made


def on_device(sums: Sums | None) -> Sums:
    """The same as the device has it, where a plain mean has sums too."""
    numbers = (1.0, 1.0, 0.0) if sums is None else (sums.divisor, sums.keep, sums.total)
    return Sums(*(torch.tensor(number, dtype=torch.float64) for number in numbers), torch.tensor(sums is not None))


@pytest.mark.parametrize(
    ("said", "totals", "divisor", "keep"),
    [
        ((6.0, HAS, HAS), (), 3.0, 1.0),
        ((6.0, HAS, HAS), (2.0,), 4.0, 0.25),
        ((0.0, HAS, HAS), (2.0,), 1.0, 1.0),  # nothing new: the total is what it was
        ((0.0, HAS, NO_DATA), (), 0.5, 1.0),  # nothing at all: the mean becomes the sum again
        ((6.0, HAS, HAS), (0.0,), 3.0, 1 / 6),  # which is divided now
    ],
)
def test_the_result_is_the_sum_over_the_total(
    said: tuple[float, ...], totals: tuple[float, ...], divisor: float, keep: float
) -> None:
    sums = weighing(said, next((Sums(1.0, 1.0, total) for total in totals), None))._on_host()
    assert sums is not None
    assert (sums.divisor, sums.keep, sums.total) == (divisor, keep, said[0] + sum(totals))


@pytest.mark.parametrize("flags", list(itertools.product((HAS, NO_DATA, NONE), repeat=2)))
@pytest.mark.parametrize("new", [0.0, 6.0])
@pytest.mark.parametrize("before", [None, Sums(1.0, 1.0, 0.0), Sums(1.0, 1.0, 2.0)], ids=["nothing", "0", "2"])
def test_a_device_computes_what_the_host_does(flags: tuple[float, float], new: float, before: Sums | None) -> None:
    wanted = on_device(weighing((new, *flags), before)._on_host())
    for earlier in (before, on_device(before)):  # on a device there are sums from the second round on
        got = weighing((new, *flags), earlier)._on_device()
        for name in ("divisor", "keep", "total", "is_weighted"):
            assert torch.equal(torch.as_tensor(getattr(got, name)), torch.as_tensor(getattr(wanted, name))), name
