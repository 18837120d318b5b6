"""Checks that gradients are finite when an optimizer steps, and that parameters stay the same on
every rank."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from undertow.buckets.fingerprints import fingerprints
from undertow.buckets.finite import not_finite
from undertow.config import SyncConfig, refused
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.round import Round, RoundKind
from undertow.engine.stop import StopRequest
from undertow.errors import (
    Desync,
    NonFiniteGradient,
    ReplicaMismatch,
    UndertowError,
    listed,
)
from undertow.mesh.local_tensors import local_tensor, local_tensors
from undertow.plan import Plan
from undertow.ranks import faults
from undertow.ranks.agreement import Extremes, gather_json
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private

_NOT_TAKEN = 'No rank has taken the step. Look for the overflow there, or set nonfinite="skip".'
_NOT_BY_ALL = (
    "Ranks with other experts take the step: start from a checkpoint, and look for the "
    "overflow there."
)
_LOADS = (
    "Load the same values on every rank, or call broadcast_parameters() on every rank after "
    "a load on rank 0."
)
_WRITES = (
    "Look for what writes to parameters, or steps, on some ranks only; "
    "broadcast_parameters() makes them equal again."
)
_NUM_FIRST_ORDERS, _ORDERS_EVERY = 3, 100  # synchronizations, on a device
_ORDERS = "the comparison of the orders of redistributed gradients"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Waits for a comparison, and returns its error.
_Sent = Callable[[], UndertowError | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Gradients that are not finite; the same on every rank."""

    params: tuple[str, ...]  # in the order of the model
    ranks: tuple[int, ...]  # empty if only the sum is known
    where: str

    @property
    def what(self) -> str:
        """The finding in words."""
        gradients = "the gradient of" if len(self.params) == 1 else "the gradients of"
        verb = "is" if len(self.params) == 1 else "are"
        ranks = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else "some rank"
        return (
            f"{gradients} {listed(list(map(repr, self.params)))} {verb} not finite (NaN or "
            f"Inf) on {ranks}."
        )

    def error(self) -> NonFiniteGradient:
        """Returns a new error each time."""
        return NonFiniteGradient(self.what, where=self.where, remedy=_NOT_TAKEN)

    @property
    def fault(self) -> faults.Fault:
        """The fault for ranks that do not know about these gradients, and step.

        No rank can continue.
        """
        return faults.Fault(NonFiniteGradient, self.what, _NOT_BY_ALL)


class NonFinite:
    """Keeps the finding of the last synchronization, and acts on it by `policy`: "raise", "skip" or
    "ignore".

    It acts at the optimizer's step, because a GradScaler makes gradients overflow on purpose and
    does not step on them. `find_alone` checks there the gradients that no synchronization has seen.
    `fails_others` makes the ranks that do not hold these experts raise too, at their next wait.
    `agree` returns the finding of any rank of a mesh: each has other parts of the gradients.
    """

    fails_others: Callable[[faults.Fault], object] | None = None
    agree: Callable[[Finding | None], Finding | None] | None = None
    has_rounds = True  # else a finding is of one step only

    def __init__(
        self,
        policy: str,
        *,
        rank: int,
        find_alone: Callable[[], Finding | None],
    ) -> None:
        self.num_skipped = 0  # steps
        self.is_on = policy != "ignore"
        self._policy = policy
        self._rank = rank
        self._find_alone = find_alone
        self._finding: Finding | None = None
        self._is_judged = False  # an optimizer has stepped, or skipped, on it

    def round_ends(self, ended: Round, plan: Plan) -> None:
        """Takes over a synchronization's findings.

        Earlier findings count as long as they are part of the sum.
        """
        if ended.found.keeps_earlier and self._finding is not None and not self._is_judged:
            # the first finding comes back from every rank, with the mean of the earlier
            # synchronization
            return
        if ended.found.nonfinite and not ended.has_failed:
            self._finding = _finding_of(ended, plan)
            self._is_judged = False
        elif not ended.found.keeps_earlier:
            self._finding = None

    def skips(self, optimizer: Optimizer) -> bool:
        """Returns True if the coming step of `optimizer` is to change nothing.

        May raise NonFiniteGradient on every rank.
        """
        # Torch's own kernels skip the step by this.
        if not self.is_on or getattr(optimizer, "found_inf", None) is not None:
            return False
        finding = self._finding or self._find_alone()
        if self.agree is not None:
            finding = self.agree(finding)
            if self.has_rounds:
                self._finding = finding
        if finding is None:
            return False
        is_counted = self._finding is not None and self._is_judged
        self._is_judged = True
        if self._policy == "raise":
            if self.fails_others is None:
                raise finding.error()
            self.fails_others(finding.fault)
            raise finding.fault.error(finding.where)
        if not is_counted:
            self.num_skipped += 1
            self._tell(finding)
        return True

    def before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        """Returns other arguments for a plain optimizer's step, if needed.

        The optimizer itself is the first of `args`.
        """
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return ((_idle(optimizer), *args[1:]), kwargs) if self.skips(optimizer) else None
        if self._policy == "skip":
            raise refused("closure", "skip", where=f"{type(optimizer).__name__}, rank {self._rank}")
        return after_closure(args, kwargs, partial(self.skips, optimizer))

    def _tell(self, finding: Finding) -> None:
        """Warns on rank 0, the first, second, fourth time and so on.

        A run that diverges would print nothing else.
        """
        if self._rank == 0 and self.num_skipped.bit_count() == 1:
            times = "" if self.num_skipped == 1 else f" Steps like this so far: {self.num_skipped}."
            faults.tell(
                f"{finding.what} The step is skipped on every rank.{times}\n  {finding.where}"
            )


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], object]
) -> Arguments:
    """Returns the arguments of an optimizer's step with a closure that calls `then` at its end."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs

    def closed() -> Any:
        loss = closure()
        then()
        return loss

    if len(args) > 1:
        return (args[0], closed, *args[2:]), kwargs
    return args, {**kwargs, "closure": closed}


def _finding_of(ended: Round, plan: Plan) -> Finding:
    buckets = sorted(ended.found.nonfinite)
    slots = [
        plan.buckets[bucket].slots[position]
        for bucket in buckets
        for position in ended.found.nonfinite[bucket]
    ]
    return Finding(
        params=tuple(plan.params[index].name for index in sorted({slot.param for slot in slots})),
        ranks=tuple(ended.found.reported("nonfinite", overdue=False)),
        where=f"synchronization {ended.terms.number}, bucket {listed(list(map(str, buckets)))}",
    )


def _idle(optimizer: Optimizer) -> Optimizer:
    """Stands in for `optimizer` in one call of its `step`.

    The same, with no parameters and no state to change.
    """
    stand_in: Optimizer = object.__new__(type(optimizer))
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    # A copy, because some optimizers count steps in their groups.
    groups = [{**group, "params": []} for group in copy.deepcopy(settings)]
    vars(stand_in).update({**vars(optimizer), "param_groups": groups, "state": defaultdict(dict)})
    return stand_in


def mismatch(name: str, values: Mapping[int, int], *, where: str, remedy: str) -> ReplicaMismatch:
    """Returns the error.

    The value of most ranks counts as right, and in a tie the value of the first rank among them.
    """
    (common, _), *_ = Counter(values.values()).most_common()
    others = [rank for rank, value in values.items() if value != common]
    alike = [rank for rank, value in values.items() if value == common]
    return ReplicaMismatch(
        f"parameter {name!r} has other values on rank {', '.join(map(str, others))} than on rank "
        f"{', '.join(map(str, alike))}.",
        where=where,
        remedy=remedy,
    )


def unlike_values(
    group: OwnGroup, params: Mapping[str, Tensor], what: str, *, where: str, remedy: str
) -> ReplicaMismatch | None:
    """Compares the values of parameters, and returns the error of the first one that differs, the
    same on every rank; a collective call. Reports call the wait for it `what`."""
    values = fingerprints(local_tensors(params.values()), device=group.device)
    extremes = Extremes(group, values, what)
    differing = extremes.differing()
    if not differing:
        return None
    of_ranks = [value for _, value, _ in extremes.of_ranks(differing[0])]
    return mismatch(
        list(params)[differing[0]],
        dict(zip(group.names, of_ranks, strict=True)),
        where=where,
        remedy=remedy,
    )


class Loads:
    """The loads by `load_state_dict` since all ranks have compared their parameters.

    Each rank tells all others in its next synchronization. On the host, all read that when it ends,
    and compare parameters. On a device the others read it later; they tell it too then, and all
    compare at the end of the first synchronization in which every rank has told it.
    """

    def __init__(self, group: OwnGroup) -> None:
        self.are_here = False  # on this rank
        self.are_known = False  # on any rank, as far as this one has read
        self._group = group
        self._settled_in: int | None = None  # the synchronization after which all have compared

    def begins(self) -> None:
        """Called before a load."""
        self.are_here = self.are_known = True

    def are_told_by_all(self, ended: Round) -> bool:
        """Returns True if the parameters are to be compared now; the same on every rank."""
        # Reports of the loads that were compared last may be read once more on a device.
        is_repeated = self._settled_in is not None and ended.terms.number <= self._settled_in + 1
        if not ended.found.reported("loaded", overdue=not is_repeated):
            return False
        self.are_known = True
        if self._group.hardware.is_host:
            return True
        return ended.found.reported("loaded", overdue=False) == sorted(self._group.names)

    def settle(self, number: int | None = None) -> None:
        """Called when all ranks have the same parameters, or compare them at the end of
        synchronization `number`."""
        self.are_here = self.are_known = False
        self._settled_in = number


def has_bits(param: Tensor) -> bool:
    """Returns False for parameters that are more, or less, than their elements: quantized and
    uninitialized ones.
    """
    is_dense = param.layout is torch.strided and not param.is_meta
    is_part = local_tensor(param) is not param
    return (type(param) is nn.Parameter or is_part) and is_dense


class Checks:
    """The checks of one engine: its numbers, and the parameters of all ranks after every few
    synchronizations.

    Fingerprints of parameters are sent when a synchronization ends and compared when the next step
    begins. With several models in one backward, another rank may be at another model in between.
    """

    def __init__(self, current_plan: CurrentPlan, config: SyncConfig) -> None:
        group = current_plan.group
        self.numbers = NonFinite(
            config.nonfinite,
            rank=group.rank,
            find_alone=partial(_found_alone, current_plan),
        )
        if group.is_on_mesh:
            self.numbers.agree = partial(_found_by_any, group.everyone)
            self.numbers.has_rounds = group.num_ranks > 1
        # Synchronizations between two comparisons of parameters; None if there is nothing to
        # compare.
        self.every = None if group.num_ranks == 1 else config.check_replicas_every
        self.loads = Loads(group)
        is_told_elsewhere = config.outer is not None or group.is_on_mesh
        self.stop = StopRequest(group, is_told_elsewhere=is_told_elsewhere)
        self._current_plan = current_plan
        self.sent: list[_Sent] = []  # comparisons in flight

    def are_compared(self, number: int) -> bool:
        """Returns True if parameters are compared at the end of synchronization `number`."""
        return self.every is not None and (number + 1) % self.every == 0

    def must_be_read(self, number: int) -> bool:
        """Returns True if the end of synchronization `number` waits for its trailers, on devices
        too."""
        # A synchronization that changes the parameters counts as two.
        return self.numbers.is_on or self.are_compared(number) or self.are_compared(number + 1)

    def round_was_sound(self, ended: Round) -> None:
        """Called after a synchronization that all ranks have found sound.

        Starts a comparison of parameters if one is due.
        """
        if self.loads.are_told_by_all(ended) or self.are_compared(ended.terms.number):
            self.sent.append(self._send(ended))
            self.loads.settle(ended.terms.number)
        order = self._current_plan.placements.take_order()
        if self._are_places_told(ended.terms.number):
            self.sent.append(self._tell_places(order, ended.terms.number))

    @torch.no_grad()
    def _send(self, ended: Round) -> _Sent:
        current_plan, group = self._current_plan, self._current_plan.group
        present = (*current_plan.hooks.named_params, *current_plan.members.common_frozen)
        params = {name: param for name, param in present if has_bits(param)}
        values = fingerprints(local_tensors(params.values()), device=group.device)
        extremes = Extremes(
            group,
            values,
            "the comparison of all ranks' parameters",
            # The parameters of a rank that shadows the others may differ.
            is_counted=ended.kind is not RoundKind.SHADOW,
        )
        return partial(
            self._difference,
            ended.terms.number,
            list(params),
            extremes,
            was_loaded=self.loads.are_here,
        )

    def _are_places_told(self, number: int) -> bool:
        """Returns True if the places of a mesh tell each other the orders of redistributed
        gradients, and requests to stop, after this synchronization: on a device rarely, because the
        host waits for the result."""
        group = self._current_plan.group
        if not group.is_on_mesh:
            return False
        return group.hardware.is_host or number < _NUM_FIRST_ORDERS or number % _ORDERS_EVERY == 0

    def _tell_places(self, order: Sequence[str], number: int) -> _Sent:
        """Starts to compare the order of the gradients that are redistributed over another axis,
        and tells if a signal has asked this rank to stop."""
        axis, everyone = self._current_plan.placements.axis, self._current_plan.group.everyone
        told = [digest_of_names(order), digest_of_names(map(str, axis)), self.stop.is_pending]
        received = everyone.all_gather(
            torch.tensor(told, dtype=torch.int64, device=everyone.device), _ORDERS
        )
        return partial(self._hear_places, everyone, order, received, number)

    def _hear_places(
        self, everyone: OwnGroup, order: Sequence[str], received: Handle, number: int
    ) -> Desync | None:
        rows = received.result().tolist()
        self.stop.places_end(is_told=any(is_stopping for *_, is_stopping in rows))
        return _other_order(everyone, order, [row[:2] for row in rows], number)

    def require_alike(self) -> None:
        """Waits for comparisons; raises, on every rank, ReplicaMismatch if parameters differ, and
        Desync if ranks of a tensor-parallel axis redistribute gradients in different orders.

        Does nothing inside a backward, where ranks may wait for each other in different models.
        """
        while self.sent and private.graph_task_id() == -1:
            error = self.sent.pop(0)()
            if isinstance(error, ReplicaMismatch):
                self._current_plan.group.tell_places(error)
            if error is not None:
                raise error

    def _difference(
        self, number: int, names: Sequence[str], extremes: Extremes, was_loaded: bool
    ) -> ReplicaMismatch | None:
        differing = extremes.differing()
        if not differing:
            return None
        ranks = self._current_plan.group.names
        rows = extremes.of_ranks(differing[0], flag=was_loaded)
        of_ranks = {
            rank: value for rank, (counts, value, _) in zip(ranks, rows, strict=True) if counts
        }
        loaded = [str(rank) for rank, (_, _, is_set) in zip(ranks, rows, strict=True) if is_set]
        after = f", load_state_dict on rank {', '.join(loaded)}" if loaded else ""
        if loaded:  # the error comes again until the parameters are the same
            self.loads.are_here = was_loaded
            self.loads.are_known = True
        return mismatch(
            names[differing[0]],
            of_ranks,
            where=f"synchronization {number}{after}; {len(differing)} of {len(names)} parameters "
            "differ",
            remedy=_LOADS if loaded else _WRITES,
        )


def digest_of_names(names: Iterable[str]) -> int:
    """Returns a number that is the same in all processes."""
    return zlib.crc32("\n".join(names).encode())


def _other_order(
    everyone: OwnGroup, order: Sequence[str], rows: Sequence[Sequence[int]], number: int
) -> Desync | None:
    """Returns the error if gradients have arrived in different orders on ranks of one axis: the
    same on every rank of the mesh."""
    orders: dict[int, set[int]] = defaultdict(set)
    for of_order, of_axis in rows:
        orders[of_axis].add(of_order)
    unlike = [axis for axis, found in orders.items() if len(found) > 1]
    if not unlike:
        return None
    described = gather_json(everyone, order, waits_for=_ORDERS)
    listed_by_rank = "".join(
        f"\n  rank {rank}: {', '.join(map(repr, described[rank])) or 'none'}"
        for rank, (_, axis) in enumerate(rows)
        if axis == unlike[0]
    )
    return Desync(
        "gradients have arrived in different orders on ranks of a tensor-parallel axis: partial "
        "sums among them are mixed up.",
        where=f"synchronization {number}{listed_by_rank}",
        remedy="Run the same layers in the same order on these ranks, with the same batch.",
    )


def _found_by_any(everyone: OwnGroup, finding: Finding | None) -> Finding | None:
    """Returns the finding of the first rank that has one, on every rank; a collective call."""
    what = "whether all ranks' gradients are finite"
    is_found = torch.tensor(float(finding is not None), device=everyone.device)
    everyone.all_reduce(is_found, what, dist.ReduceOp.MAX).wait()
    if not is_found:
        return None
    mine = None if finding is None else dataclasses.asdict(finding)
    found = next(each for each in gather_json(everyone, mine, waits_for=what) if each is not None)
    return Finding(tuple(found["params"]), tuple(found["ranks"]), found["where"])


def _found_alone(current_plan: CurrentPlan) -> Finding | None:
    """Checks the gradients of a single rank, which has no rounds. A function.

    A method would hold its owner in a cycle.
    """
    if current_plan.is_active:
        return None
    grads = {
        name: local_tensor(param.grad)
        for name, param in current_plan.hooks.named_params
        if param.grad is not None
    }
    names = list(grads)
    params = tuple(names[place] for place in not_finite(list(grads.values())))
    return (
        Finding(
            params, ranks=(current_plan.group.name,), where="one rank, when its optimizer steps"
        )
        if params
        else None
    )
