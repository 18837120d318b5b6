"""Weights of losses that are sums: gradients are divided by the sum of all ranks' weights, not by the number of ranks.

The sum takes one small all-reduce, which leaves when a round begins. The first time a rank does not know whether the others
have weights too. It says so in the signature of its buckets, and the sum is sent when the first of those has come back and
says the same of all; from then on it is sent in every round. The division comes behind the reduction: before it, it would
depend on the speed of the network which ranks have divided already.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from undertow.errors import ConfigError, PhaseError, WrongType
from undertow.runtime.collectives import ReductionHandle
from undertow.runtime.group import OwnGroup

_HAS, _HAS_NO_DATA = 1.0, 2.0  # what a rank says of itself; else 0


@dataclass(frozen=True, slots=True)
class Sums:
    """What the weights of a round make of its gradients: numbers on the host, tensors without dimensions on a device."""

    divisor: float | Tensor  # of the mean over ranks
    keep: float | Tensor  # factor for what earlier synchronisations of the step have brought
    total: float | Tensor  # the weight of both together; sums over nothing at all are left as they are, for what comes
    is_weighted: bool | Tensor = True  # on a device a plain mean has sums as well


class Weighing:
    """The weights of one round; `before` is what earlier synchronisations of the step have brought, if anything.

    Where it cannot wait until it is known whether all ranks have weights, the first ones come too late. The `is_last` round of a
    step must have some.
    """

    def __init__(
        self,
        group: OwnGroup,
        weight: float | None,
        *,
        before: Sums | None,
        is_without_data: bool,
        can_wait: bool,
        is_last: bool,
    ) -> None:
        self.can_wait = can_wait
        self._group = group
        self._weight = weight
        self._before = before
        self._is_without_data = is_without_data
        self._is_last = is_last
        self._handle: ReductionHandle | None = None
        self._tensor = torch.empty(0)
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None  # on its way from a device to the host
        self._sums: Sums | None = None
        self._is_known = False

    @property
    def says(self) -> bool | None:
        """In the signature: whether this rank has weights; None, which goes by the others, where nobody asks."""
        return None if self.is_sent or self._is_without_data else self._weight is not None

    @property
    def is_sent(self) -> bool:
        return self._handle is not None

    @property
    def is_too_late(self) -> bool:
        """Whether this rank has weights of which nothing is known in time."""
        return self._weight is not None and not self.can_wait and not self.is_sent

    def send(self) -> None:
        """Starts the sum over ranks; a collective call."""
        group = self._group
        said = [0.0] * (1 + group.num_ranks)
        said[0] = self._weight or 0.0
        said[1 + group.rank] = _HAS if self._weight is not None else _HAS_NO_DATA if self._is_without_data else 0.0
        # Of 64 bits: counts of tokens stay exact.
        on_host = torch.tensor(said, dtype=torch.float64)
        self._tensor = on_host if group.device.type == "cpu" else on_host.pin_memory().to(group.device, non_blocking=True)
        self._handle = group.all_reduce_async(self._tensor)

    def sums(self) -> Sums | None:
        """None where the round is a plain mean. On a device the host does not wait, and a plain mean divides by 1."""
        if self._handle is None:
            return None
        if not self._is_known:
            with self._group.waiting("the sum of all ranks' weights"):
                self._handle.wait()
            self._sums = self._on_host() if self._group.device.type == "cpu" else self._on_device()
            self._is_known = True
        return self._sums

    def is_sound(self) -> bool:
        """Whether gradients may be divided by it: what `require_sound` says later, alike on all ranks. The host waits for it."""
        self.sums()
        return self._error("") is None

    def copy_to_host(self) -> None:
        """Of a device: starts to bring there what `require_sound` reads; nobody waits for it now."""
        if self._handle is None or self._group.device.type == "cpu":
            return
        said = self._tensor.clone()
        if self._before is not None:
            said[0] += self._before.total
        on_host = torch.empty_like(said, device="cpu", pin_memory=True).copy_(said, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._copy = on_host, copied

    def require_sound(self, where: str) -> None:
        """PhaseError, on every rank, where some have weights and others not, or all of them add up to 0."""
        error = self._error(where)
        if error is not None:
            raise error

    def _error(self, where: str) -> PhaseError | None:
        if self._handle is None:
            return None
        if self._copy is not None:
            on_host, copied = self._copy
            copied.synchronize()  # of a copy that began a step ago
            total, *said = on_host.tolist()
        else:
            total, *said = self._tensor.tolist()
            total += 0.0 if self._before is None else float(self._before.total)
        having = [rank for rank, state in enumerate(said) if state == _HAS]
        lacking = [rank for rank, state in enumerate(said) if state == 0.0]
        if having and lacking:
            return weights_differ(f"{where}: with {_listed(having)}, without {_listed(lacking)}")
        if having and total == 0.0 and self._is_last:
            return PhaseError(
                "the weights of all ranks add up to 0, and gradients cannot be divided by that.",
                where=where,
                remedy="Leave out a step in which no rank has anything to learn from.",
            )
        return None

    def _on_host(self) -> Sums | None:
        new, *said = self._tensor.tolist()
        if _HAS not in said or 0.0 in said:  # of no rank, or not sound
            return None
        before = self._before
        total = new + (0.0 if before is None else float(before.total))
        keep = 1.0 if before is None else (float(before.total) or 1.0) / (total or 1.0)
        return Sums((total or 1.0) / self._group.num_ranks, keep, total)

    def _on_device(self) -> Sums:
        new, said = self._tensor[0], self._tensor[1:]
        one, before = torch.ones_like(new), self._before
        is_weighted = (said == _HAS).any() & (said != 0).all()
        total = torch.where(is_weighted, new if before is None else new + before.total, 0.0)
        divisor = torch.where(total > 0, total, one)
        keep = one
        if before is not None:
            earlier = torch.as_tensor(before.total, dtype=new.dtype, device=new.device)
            is_kept_apart = is_weighted & torch.as_tensor(before.is_weighted, device=new.device)
            keep = torch.where(is_kept_apart, torch.where(earlier > 0, earlier, one) / divisor, one)
        return Sums(torch.where(is_weighted, divisor / self._group.num_ranks, one), keep, total, is_weighted)


class Weights:
    """What this rank has said of its backwards."""

    def __init__(self, group: OwnGroup) -> None:
        self._group = group
        self._next: float | None = None  # of the backwards that come
        self._accumulated: float | None = None  # of those that have only accumulated
        self._brought: Sums | None = None  # by synchronisations, as far as it is there still
        self._are_sent = False  # in every round: all ranks have had weights
        self._unchecked: tuple[Weighing, str] | None = None

    def give(self, weight: object) -> None:
        """The loss of the next backward is a sum over so many; the last call before it counts.

        Of an earlier one no backward has come: its forward has failed, or was for something else.
        """
        self._next = _checked(weight)

    @property
    def are_given(self) -> bool:
        """Whether this rank has some for what comes next, or all ranks have had some."""
        return self._are_sent or self._next is not None or self._accumulated is not None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, none are given; afterwards those that were."""
        kept = self._next, self._accumulated
        self._next = self._accumulated = None
        try:
            yield
        finally:
            self._next, self._accumulated = kept

    def forget_gradients(self, *, has_accumulated: bool) -> None:
        """The user has thrown them away."""
        self._brought = None
        if has_accumulated:
            self._accumulated = None

    def require_backward(self, where: str) -> None:
        """PhaseError, once, where weights were given of which no backward has come: the next one would take them for its own."""
        weight, self._next = self._next, None
        if weight is not None:
            raise PhaseError(
                f"weight({weight:g}) was given, and no backward has come before the optimizer steps.",
                where=where,
                remedy="Call weight(n) before the backward of the loss that is a sum over n, not behind it.",
            )

    def require_none(self) -> None:
        """ConfigError where weights were given that no synchronisation has used yet: who comes after us does not know them."""
        if self._next is not None or self._accumulated is not None:
            raise ConfigError(
                "weights were given for gradients that are not synchronised yet.",
                where=f"another process group, or another wrapper; rank {self._group.rank}",
                remedy="Synchronise what is accumulated first: a backward outside of accumulate(), or reduce_gradients_async().",
            )

    def forget_accumulated(self) -> None:
        """What backwards have accumulated is left out."""
        self._next = self._accumulated = None

    def begins(self, *, is_synchronised: bool, is_without_data: bool, can_wait: bool, is_last: bool) -> Weighing | None:
        """A backward begins, or a round outside of one, on a rank `is_without_data` perhaps; None where nothing is to be said."""
        self.require_sound()
        if self._next is not None:
            self._accumulated, self._next = (self._accumulated or 0.0) + self._next, None
        if not is_synchronised:
            return None
        weight, self._accumulated = self._accumulated, None
        is_without_data = is_without_data and weight is None
        if not self._are_sent and weight is None and not is_without_data:
            return None
        how = {"is_without_data": is_without_data, "can_wait": can_wait, "is_last": is_last}
        made = Weighing(self._group, weight, before=self._brought, **how)
        if self._are_sent:
            made.send()
        return made

    def ends(self, weighing: Weighing | None, *, where: str, has_failed: bool) -> None:
        """A round has ended on every rank; where it has failed on one there is another error to raise."""
        self._are_sent |= weighing is not None and weighing.is_sent
        sums = None if weighing is None else weighing.sums()
        if weighing is not None:
            weighing.copy_to_host()
        self._brought = sums
        self._unchecked = None if weighing is None or has_failed else (weighing, where)

    def require_sound(self) -> None:
        """PhaseError, on every rank, where the weights of the last round were not; on a device the host waits for it."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is not None:
            weighing, where = unchecked
            weighing.require_sound(where)


def require_means(op: str, *, has_hook: bool, is_alone_with_shards: bool) -> None:
    """ConfigError where there is no mean for weights to change."""
    if op == "sum":
        what, remedy = 'weights divide gradients, and op="sum" does not.', 'Leave op="sum" or the weights out.'
    elif has_hook:
        what = "with a communication hook it is the hook that divides gradients."
        remedy = "Divide the loss by the number of tokens of all ranks, or leave the hook out."
    elif is_alone_with_shards:
        what = "weights with a ShardedOptimizer are not built for a rank alone."
        remedy = "Divide the loss by the weight, or use a plain optimizer there."
    else:
        return
    raise ConfigError(what, where="weight(n)", remedy=remedy)


def weights_too_late(where: str) -> PhaseError:
    """The error of the first weights, where nobody can wait until it is known whether all ranks have some."""
    return PhaseError(
        "weights come for the first time in a step of eager form, which divides before all ranks are known to have some.",
        where=where,
        remedy="The parameters are as they were: drop the gradients. Give weights from the first step on, or leave eager=True "
        "out.",
    )


def weights_differ(where: str) -> PhaseError:
    """The error of ranks of which only some have weights."""
    return PhaseError(
        "weights were given on some ranks and not on others.",
        where=where,
        remedy="Call weight(n) before every backward on every rank, with 0 where a rank has nothing to learn from.",
    )


def _checked(weight: object) -> float:
    if isinstance(weight, Tensor) and weight.numel() == 1:
        weight = weight.item()
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise WrongType(
            f"a weight must be a number, got {type(weight).__name__}.",
            where="weight(n)",
            remedy="Give how many tokens, or samples, the loss of the next backward is a sum over.",
        )
    if not math.isfinite(weight) or weight < 0:
        raise ConfigError(
            f"a weight must be a number from 0 on, got {weight}.",
            where="weight(n)",
            remedy="Give how many tokens, or samples, the loss of the next backward is a sum over.",
        )
    return float(weight)


def _listed(ranks: list[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
