"""The checks of an engine: that gradients are finite when an optimizer steps (`nonfinite`), that
parameters stay the same on every rank, and that a request to stop reaches all."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from undertow.buckets.facts import majority
from undertow.buckets.fingerprints import fingerprints
from undertow.config import SyncConfig
from undertow.engine.agreed_errors import CHANGE_ALIKE, backward_failed
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.nonfinite import (
    NonFinite,
    found_alone,
    found_by_any,
    found_own,
    has_own,
)
from undertow.engine.round import Round, RoundKind
from undertow.engine.stop import StopRequest
from undertow.errors import (
    Desync,
    PlanMismatch,
    ReplicaMismatch,
    UndertowError,
)
from undertow.mesh.local_tensors import local_tensor, local_tensors
from undertow.plan.facts import Fact
from undertow.ranks.agreement import Extremes, gather_json, unlike_places
from undertow.ranks.handle import Handle
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private

_LOADS = (
    "Load the same values on every rank, or call broadcast_parameters() on every rank after "
    "a load on rank 0."
)
_WRITES = (
    "Look for what writes to parameters, or steps, on some ranks only; "
    "broadcast_parameters() makes them equal again."
)
_NUM_FIRST_ORDERS, _ORDERS_EVERY = 3, 100  # synchronizations, on a device
_PLACES = "the reports of all places of the mesh about a synchronization"
_PLACES_MAY_HAVE_STEPPED = (
    "Ranks at other places of the mesh may have made the step. Find the cause in the log of that "
    "rank, and restart from a checkpoint."
)
# Waits for a comparison, and returns its error. Ranks that find a difference gather its cause.
_Sent = Callable[[], UndertowError | None]


def mismatch(name: str, values: Mapping[int, int], *, where: str, remedy: str) -> ReplicaMismatch:
    """Returns the error.

    The value of most ranks counts as right, and in a tie the value of the first rank among them.
    """
    common = majority(values.values())
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

    def round_ends(self, ended: Round) -> None:
        """Called after every synchronization."""
        # Reports of the loads that were compared last may be read once more on a device.
        is_repeated = self._settled_in is not None and ended.terms.number <= self._settled_in + 1
        if ended.found.reported(Fact.LOADED, overdue=not is_repeated):
            self.are_known = True

    def are_told_by_all(self, ended: Round) -> bool:
        """Returns True if the parameters are to be compared now; the same on every rank."""
        told_by = ended.found.reported(Fact.LOADED, overdue=False)
        if self._group.hardware.is_host:
            return bool(told_by)
        return told_by == sorted(self._group.names)

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


class _PlaceReport(NamedTuple):
    """A rank's message to all places of a mesh about a synchronization."""

    order: int  # digest of the names of redistributed gradients, as they arrived
    axis: int  # digest of the ranks over which they are redistributed
    params: int  # digest of the parameters in force, and of frozen ones
    is_stopping: int  # a signal has asked it to stop, unless exchanges of replicas tell that
    has_failed: int  # its backward


class _Reported(NamedTuple):
    """A synchronization whose report this rank has sent, and what the report has digests of."""

    number: int
    is_sound: bool
    order: Sequence[str]
    params: Sequence[dict[str, Any]]  # in force, as all places must have them
    frozen: Sequence[dict[str, Any]]


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
            find_alone=partial(found_alone, current_plan),
            has_own=partial(has_own, current_plan),
            find_own=partial(found_own, current_plan),
        )
        if group.is_on_mesh:
            self.numbers.agree = partial(found_by_any, group.everyone)
            self.numbers.has_rounds = group.num_ranks > 1
        # Synchronizations between two comparisons of parameters; None if there is nothing to
        # compare.
        self.every = None if group.num_ranks == 1 else config.check_replicas_every
        self.loads = Loads(group)
        has_replicas = config.outer is not None
        self.stop = StopRequest(group, is_told_elsewhere=has_replicas or group.is_on_mesh)
        # Places of one replica must not stop without the other replicas, whose exchanges tell it.
        self._do_places_stop = not has_replicas
        self._current_plan = current_plan
        self.sent: list[_Sent] = []  # comparisons whose errors are not raised yet
        # waits for the last reports of all places of a mesh; None once they are heard
        self._hear_last: Callable[[], object] | None = None

    def are_compared(self, number: int) -> bool:
        """Returns True if parameters are compared at the end of synchronization `number`."""
        return self.every is not None and (number + 1) % self.every == 0

    def must_be_read(self, number: int) -> bool:
        """Returns True if the end of synchronization `number` waits for its trailers, on devices
        too."""
        # A synchronization that changes the parameters counts as two.
        return self.numbers.is_on or self.are_compared(number) or self.are_compared(number + 1)

    def round_ends(self, ended: Round) -> None:
        """Called after every synchronization, before its errors are raised: also after one that has
        failed, and after one that tells of a change of the plan.

        The objects that keep an answer take it from the findings.
        """
        self.stop.round_ends(ended)
        self.loads.round_ends(ended)

    def round_was_sound(self, ended: Round) -> None:
        """Called after a synchronization that all ranks have found sound.

        Starts a comparison of parameters if one is due.
        """
        if self.loads.are_told_by_all(ended) or self.are_compared(ended.terms.number):
            self.sent.append(self._send(ended))
            self.loads.settle(ended.terms.number)

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

    def report_to_places(
        self, ended: Round, *, is_sound: bool, then: Callable[..., object] | None
    ) -> None:
        """Called on a mesh after every synchronization, also one that has failed: ranks at all
        places start to tell each other how theirs has ended, the order of the gradients that were
        redistributed over another axis, and requests to stop.

        `then` is called with `is_sound` of all places when that is known. On a device ranks tell it
        rarely, because the host waits for the result: a backward that has failed is a fault there.
        """
        group, number = self._current_plan.group, ended.terms.number
        placements, compiled = self._current_plan.placements, self._current_plan.compiled
        members = self._current_plan.members
        mine = _Reported(
            number,
            is_sound,
            placements.take_order(),
            compiled.at_all_places,
            members.frozen_at_all_places,
        )
        has_failed = ended.has_failed or bool(ended.found.taken)
        if has_failed and not group.hardware.is_host:
            group.tell_places(
                backward_failed(
                    [group.name], where=f"synchronization {number}", remedy=_PLACES_MAY_HAVE_STEPPED
                )
            )
        is_told = group.hardware.is_host or number < _NUM_FIRST_ORDERS
        if group.is_broken or not (is_told or number % _ORDERS_EVERY == 0):
            return
        told = _PlaceReport(
            order=digest_of_names(mine.order),
            axis=digest_of_names(map(str, placements.axis)),
            params=compiled.digest_at_all_places ^ members.digest_of_frozen,
            is_stopping=self._do_places_stop and self.stop.is_pending,
            has_failed=has_failed,
        )
        device = group.everyone.device
        received = group.everyone.all_gather(
            torch.tensor(told, dtype=torch.int64, device=device), _PLACES
        )
        heard = cache(partial(self._hear_places, received, then))
        self._hear_last = heard
        self.sent.append(partial(self._error_of_places, heard, then, mine))

    def _hear_places(
        self, received: Handle, then: Callable[..., object] | None
    ) -> list[_PlaceReport]:
        """Waits for the reports of all places, and tells if they are sound.

        Sends nothing: it runs inside a backward too.
        """
        rows = [_PlaceReport(*row) for row in received.result().tolist()]
        self._hear_last = None
        if self._do_places_stop:
            self.stop.told_elsewhere(is_told=any(row.is_stopping for row in rows))
        if then is not None:
            then(is_sound=_are_sound(rows))
        return rows

    def _error_of_places(
        self,
        heard: Callable[[], Sequence[_PlaceReport]],
        then: Callable[..., object] | None,
        mine: _Reported,
    ) -> UndertowError | None:
        """Returns the error of the reports of all places; a collective call if parameters or orders
        differ."""
        group, rows = self._current_plan.group, heard()
        failed = [rank for rank, row in enumerate(rows) if row.has_failed]
        if failed:
            if then is not None:
                # Again: a later synchronization, which was sound, does not mend this step.
                then(is_sound=False)
            where = f"synchronization {mine.number}, rank {group.name}"
            return backward_failed(failed, where=where) if mine.is_sound else None
        if _have_other_params(rows):
            digests = [f"{row.params:08x}" for row in rows]
            described = [*mine.params, *mine.frozen]
            return unlike_places(group.everyone, described, digests, remedy=CHANGE_ALIKE)
        return _other_order(group.everyone, mine.order, rows, mine.number)

    def hear(self) -> None:
        """Waits for the last reports of all places of a mesh, also inside a backward.

        `require_alike` raises their errors. Ranks gather what differs, and inside a backward they
        may be in different models.
        """
        if self._hear_last is not None:
            self._hear_last()

    def require_alike(self) -> None:
        """Waits for comparisons; raises, on every rank, ReplicaMismatch if parameters differ.

        On a mesh raises PlanMismatch if parameters have changed at some places only, and Desync if
        ranks of a tensor-parallel axis redistribute gradients in different orders. Raises
        PeerFailed if a backward has failed at another place only.

        Does nothing inside a backward, where ranks may wait for each other in different models.
        """
        while self.sent and private.graph_task_id() == -1:
            error = self.sent.pop(0)()
            if isinstance(error, PlanMismatch | ReplicaMismatch):
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


def _have_other_params(rows: Sequence[_PlaceReport]) -> bool:
    return len({row.params for row in rows}) > 1


def _axis_in_other_order(rows: Sequence[_PlaceReport]) -> int | None:
    """Returns the first axis on whose ranks gradients have arrived in different orders."""
    orders: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        orders[row.axis].add(row.order)
    return next((axis for axis, found in orders.items() if len(found) > 1), None)


def _are_sound(rows: Sequence[_PlaceReport]) -> bool:
    """Returns True if none of these reports causes an error; the same on every rank."""
    has_failed = any(row.has_failed for row in rows)
    return not has_failed and not _have_other_params(rows) and _axis_in_other_order(rows) is None


def _other_order(
    everyone: OwnGroup, order: Sequence[str], rows: Sequence[_PlaceReport], number: int
) -> Desync | None:
    """Returns the error if gradients have arrived in different orders on ranks of one axis: the
    same on every rank of the mesh. A collective call if they have."""
    axis = _axis_in_other_order(rows)
    if axis is None:
        return None
    described = gather_json(everyone, order, waits_for=_PLACES)
    listed_by_rank = "".join(
        f"\n  rank {rank}: {', '.join(map(repr, described[rank])) or 'none'}"
        for rank, row in enumerate(rows)
        if row.axis == axis
    )
    return Desync(
        "gradients have arrived in different orders on ranks of a tensor-parallel axis: partial "
        "sums among them are mixed up.",
        where=f"synchronization {number}{listed_by_rank}",
        remedy="Run the same layers in the same order on these ranks, with the same batch.",
    )
