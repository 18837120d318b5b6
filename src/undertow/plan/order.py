"""In which order gradients become ready: a permutation of the parameters' indices."""

from __future__ import annotations

from collections.abc import Sequence

from undertow.plan.spec import ParamSpec


def reverse_registration(num_params: int) -> tuple[int, ...]:
    """The order without a profile: backward runs through the layers from the last to the first."""
    return tuple(range(num_params - 1, -1, -1))


def observed(num_params: int, arrivals: Sequence[int]) -> tuple[int, ...]:
    """The order in which gradients arrived; what never arrived follows in reverse order of registration."""
    first_seen = dict.fromkeys(arrivals)
    return (*first_seen, *(i for i in reverse_registration(num_params) if i not in first_seen))


def largest_first(params: Sequence[ParamSpec]) -> tuple[int, ...]:
    """By size in bytes, largest first; equal sizes in order of registration."""
    return tuple(sorted(range(len(params)), key=lambda i: -params[i].num_bytes))
