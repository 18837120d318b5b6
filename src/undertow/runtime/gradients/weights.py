"""Weights of summed losses: gradients are divided by the sum of all ranks' weights instead of the number of ranks.

The sum takes one small all-reduce, sent when a synchronization begins. The division comes after the reduction. Before it, the
network's speed would decide which ranks have divided already.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from undertow.errors import ConfigError, PhaseError, WrongType, require
from undertow.runtime.comm.group import OwnGroup
from undertow.runtime.gradients.trailer import to_device

_HAS, _HAS_NO_DATA = 1.0, 2.0  # a rank's own status; otherwise 0


@dataclass(frozen=True, slots=True)
class Sums:
    """The factors that the weights of a synchronization give its gradients."""

    divisor: float  # of the mean over ranks
    keep: float  # factor for the results of earlier synchronizations of the step
    total: float  # the weight of both together; if it is 0, sums stay as they are, for later weights


class RoundWeights:
    """The weights of one synchronization; earlier ones of the step have brought gradients of total weight `before`.

    If it `is_last` in the step, the total must not be 0.
    """

    def __init__(self, group: OwnGroup, weight: float | None, *, before: float, is_without_data: bool, is_last: bool) -> None:
        self._group = group
        self._before = before
        self._is_last = is_last
        said = [0.0] * (1 + group.num_ranks)
        said[0] = weight or 0.0
        said[1 + group.rank] = _HAS if weight is not None else _HAS_NO_DATA if is_without_data else 0.0
        # fp64 keeps counts of tokens exact.
        self._tensor = to_device(said, torch.float64, group.device)
        self._said: list[float] | None = None  # of all ranks

    def send(self) -> None:
        """Starts the sum over ranks; a collective call."""
        self._handle = self._group.all_reduce_async(self._tensor)

    def sums(self) -> Sums:
        """Waits for the sum over ranks, also on a device, but not for other work there."""
        total = self._total()
        return Sums((total or 1.0) / self._group.num_ranks, (self._before or 1.0) / (total or 1.0), total)

    def require_sound(self, where: str) -> None:
        """Raises PhaseError on every rank if some gave no weight or all weights add up to 0."""
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
                remedy="Leave out a step if no rank has data for it.",
            )
        return None


class Weights:
    """This rank's weights of its backwards; empty unless losses are weighted."""

    def __init__(self, group: OwnGroup, *, is_weighted: bool) -> None:
        self._group = group
        self._is_weighted = is_weighted
        self._next: float | None = None  # of the next backward
        self._accumulated: float | None = None  # of backwards that have only accumulated
        self._brought = 0.0  # of synchronizations whose gradients still exist

    def give(self, weight: object) -> None:
        """Sets the weight of the next backward's loss; the last call before the backward counts.

        An earlier weight had no backward: its forward failed or served another purpose.
        """
        self._next = _checked(weight)

    def forget_gradients(self, *, has_accumulated: bool) -> None:
        """Forgets the weights of gradients that the user has cleared."""
        self._brought = 0.0
        if has_accumulated:
            self._accumulated = None

    def require_backward(self, where: str) -> None:
        """Raises PhaseError, once, if a weight was given and no backward followed: the next backward would use it."""
        weight, self._next = self._next, None
        if weight is not None:
            raise PhaseError(
                f"loss_weight({weight:g}) was called, and no backward ran before the optimizer step.",
                where=where,
                remedy="Call loss_weight(n) before the backward of the loss that is a sum over n, not after it.",
            )

    def require_none(self) -> None:
        """Raises ConfigError if weights are not synchronized yet, because a successor does not know them."""
        require(
            self._next is None and self._accumulated is None,
            "weights were given for gradients that are not synchronized yet.",
            where=f"another process group, or another wrapper; rank {self._group.rank}",
            remedy="Synchronize accumulated gradients first: run backward outside of accumulate(), or reduce_gradients_async().",
        )

    def forget_accumulated(self) -> None:
        """Forgets the weights of accumulated gradients, which are left out."""
        self._next = self._accumulated = None

    def begins(self, *, is_synchronized: bool, is_without_data: bool, is_last: bool) -> RoundWeights | None:
        """Called when a backward, or a synchronization outside of one, begins; sends the weights of a synchronization."""
        if self._next is not None:
            self._accumulated, self._next = (self._accumulated or 0.0) + self._next, None
        if not is_synchronized or not self._is_weighted:
            return None
        weight, self._accumulated = self._accumulated, None
        made = RoundWeights(self._group, weight, before=self._brought, is_without_data=is_without_data, is_last=is_last)
        made.send()
        return made

    def ends(self, weighing: RoundWeights) -> None:
        """Called after a synchronization has ended on every rank, successfully or not."""
        self._brought = weighing.sums().total


def require_weighted(op: str) -> None:
    """Raises ConfigError unless gradients are divided by weights."""
    require(
        op == "weighted",
        f'op="{op}" does not divide gradients by weights.',
        where="loss_weight(n)",
        remedy='Set SyncConfig(op="weighted") on every rank, or leave the call out.',
    )


def _apart_from_computation(device: torch.device) -> AbstractContextManager[object]:
    """Context that lets the host wait on a device without the computation in progress."""
    return nullcontext() if device.type == "cpu" else torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


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
