"""Weights of losses that are sums: gradients are divided by the sum of all ranks' weights, not by the number of ranks.

The sum takes one small all-reduce, which leaves when a round begins. The division comes behind the reduction: before it, it would
depend on the speed of the network which ranks have divided already.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from undertow.errors import ConfigError, PhaseError, WrongType
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.gradients.trailer import to_device

_HAS, _HAS_NO_DATA = 1.0, 2.0  # what a rank says of itself; else 0


@dataclass(frozen=True, slots=True)
class Sums:
    """What the weights of a round make of its gradients."""

    divisor: float  # of the mean over ranks
    keep: float  # factor for what earlier synchronizations of the step have brought
    total: float  # the weight of both together; sums over nothing at all are left as they are, for what comes


class RoundWeights:
    """The weights of one round; earlier synchronizations of the step have brought gradients of the weight `before`.

    The `is_last` round of a step must have some.
    """

    def __init__(self, group: OwnGroup, weight: float | None, *, before: float, is_without_data: bool, is_last: bool) -> None:
        self._group = group
        self._before = before
        self._is_last = is_last
        said = [0.0] * (1 + group.num_ranks)
        said[0] = weight or 0.0
        said[1 + group.rank] = _HAS if weight is not None else _HAS_NO_DATA if is_without_data else 0.0
        # Of 64 bits: counts of tokens stay exact.
        self._tensor = to_device(said, torch.float64, group.device)
        self._said: list[float] | None = None  # by all ranks

    def send(self) -> None:
        """Starts the sum over ranks; a collective call."""
        self._handle = self._group.all_reduce_async(self._tensor)

    def sums(self) -> Sums:
        """Waits for the sum over ranks, on devices too, but for nothing else there."""
        total = self._total()
        return Sums((total or 1.0) / self._group.num_ranks, (self._before or 1.0) / (total or 1.0), total)

    def is_sound(self) -> bool:
        """Whether gradients may be divided by it, which all ranks find alike."""
        return self._error("") is None

    def require_sound(self, where: str) -> None:
        """PhaseError, on every rank, where some have given no weight, or all of them add up to 0."""
        error = self._error(where)
        if error is not None:
            raise error

    def _total(self) -> float:
        return self._of_all_ranks()[0] + self._before

    def _of_all_ranks(self) -> list[float]:
        if self._said is None:
            with self._group.waiting("the sum of all ranks' weights"), _apart_from_computation(self._group.device):
                self._handle.wait()
                self._said = self._tensor.tolist()
        return self._said

    def _error(self, where: str) -> PhaseError | None:
        _, *states = self._of_all_ranks()
        lacking = [rank for rank, state in enumerate(states) if state == 0.0]
        if lacking:
            return PhaseError(
                f"no weight was given on rank {', '.join(map(str, lacking))}.",
                where=where,
                remedy="Call loss_weight(n) before every backward on every rank, with 0 where a rank has nothing to learn from.",
            )
        if _HAS in states and self._total() == 0.0 and self._is_last:
            return PhaseError(
                "the weights of all ranks add up to 0, and gradients cannot be divided by that.",
                where=where,
                remedy="Leave out a step in which no rank has anything to learn from.",
            )
        return None


class Weights:
    """What this rank has said of its backwards; nothing where losses are not weighed."""

    def __init__(self, group: OwnGroup, *, is_weighted: bool) -> None:
        self._group = group
        self._is_weighted = is_weighted
        self._next: float | None = None  # of the backwards that come
        self._accumulated: float | None = None  # of those that have only accumulated
        self._brought = 0.0  # by synchronizations, as far as it is there still

    def give(self, weight: object) -> None:
        """The loss of the next backward is a sum over so many; the last call before it counts.

        Of an earlier one no backward has come: its forward has failed, or was for something else.
        """
        self._next = _checked(weight)

    def forget_gradients(self, *, has_accumulated: bool) -> None:
        """The user has thrown them away."""
        self._brought = 0.0
        if has_accumulated:
            self._accumulated = None

    def require_backward(self, where: str) -> None:
        """PhaseError, once, where weights were given of which no backward has come: the next one would take them for its own."""
        weight, self._next = self._next, None
        if weight is not None:
            raise PhaseError(
                f"loss_weight({weight:g}) was given, and no backward has come before the optimizer steps.",
                where=where,
                remedy="Call loss_weight(n) before the backward of the loss that is a sum over n, not behind it.",
            )

    def require_none(self) -> None:
        """ConfigError where weights were given that no synchronization has used yet: who comes after us does not know them."""
        if self._next is not None or self._accumulated is not None:
            raise ConfigError(
                "weights were given for gradients that are not synchronized yet.",
                where=f"another process group, or another wrapper; rank {self._group.rank}",
                remedy="Synchronize what is accumulated first: a backward outside of accumulate(), or reduce_gradients_async().",
            )

    def forget_accumulated(self) -> None:
        """What backwards have accumulated is left out."""
        self._next = self._accumulated = None

    def begins(self, *, is_synchronized: bool, is_without_data: bool, is_last: bool) -> RoundWeights | None:
        """A backward begins, or a round outside of one, on a rank `is_without_data` perhaps; the weights of a round are sent."""
        if self._next is not None:
            self._accumulated, self._next = (self._accumulated or 0.0) + self._next, None
        if not is_synchronized or not self._is_weighted:
            return None
        weight, self._accumulated = self._accumulated, None
        made = RoundWeights(self._group, weight, before=self._brought, is_without_data=is_without_data, is_last=is_last)
        made.send()
        return made

    def ends(self, weighing: RoundWeights) -> None:
        """A round has ended on every rank, well or not."""
        self._brought = weighing.sums().total


def require_weighted(op: str) -> None:
    """ConfigError where gradients are not divided by weights."""
    if op != "weighted":
        raise ConfigError(
            f'op="{op}" does not divide gradients by weights.',
            where="loss_weight(n)",
            remedy='Set SyncConfig(op="weighted") on every rank, or leave the call out.',
        )


def _apart_from_computation(device: torch.device) -> AbstractContextManager[object]:
    """Inside, what the host waits for on a device is not the computation that is under way there."""
    if device.type == "cpu":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _checked(weight: object) -> float:
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise WrongType(
            f"a weight must be a number, got {type(weight).__name__}.",
            where="loss_weight(n)",
            remedy="Give how many tokens, or samples, the loss of the next backward is a sum over.",
        )
    if not math.isfinite(weight) or weight < 0:
        raise ConfigError(
            f"a weight must be a number from 0 on, got {weight}.",
            where="loss_weight(n)",
            remedy="Give how many tokens, or samples, the loss of the next backward is a sum over.",
        )
    return float(weight)
