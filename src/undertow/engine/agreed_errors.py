"""The errors of a round: the same on every rank if its trailers report them."""

import contextlib
import warnings
from collections.abc import Iterable, Iterator

from undertow.engine.round import Round
from undertow.engine.step_settings import settings_differ, text_of, written_unlike
from undertow.errors import (
    ConfigError,
    Desync,
    PeerFailed,
    PhaseError,
    PlanMismatch,
    ReplicaMismatch,
    require,
)
from undertow.plan.facts import Fact
from undertow.ranks.answers import MOST_TEXTS, lines_of, named
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private

CHANGE_ALIKE = (
    "Freeze, unfreeze, add and replace parameters, and register hooks, in the same step on every "
    "rank."
)


def taken_in_backward(ranks: Iterable[int], number: int, *, place: str) -> PhaseError:
    """Returns the error, the same on every rank except for the `place`, of gradients that a hook
    has cleared on these ranks."""
    return PhaseError(
        f"`.grad` was cleared during backward on {named(ranks)}: a "
        "gradient arrived, and was gone before it could be averaged.",
        where=f"{place}, synchronization {number}",
        remedy="Leave `.grad` alone until backward ends. After backward it is the mean: copy it to "
        "another place then, or step.",
    )


@contextlib.contextmanager
def told_to_places(group: OwnGroup) -> Iterator[None]:
    """Context for errors of the data axis `group`: on a mesh, the other places raise them too.

    No rank of the mesh can continue after it. A backward that has failed is not told here, because
    the next step may succeed: `Checks.report_to_places` tells it.
    """
    try:
        yield
    except (Desync, PlanMismatch, ReplicaMismatch) as error:
        group.tell_places(error)
        raise


def _place(ended: Round) -> str:
    op = "" if ended.op is None else f', op="{ended.op}"'
    stepped = {
        None: "",
        0: ", after an optimizer step",
        1: ", without an optimizer step since the one before",
    }
    return f"synchronization {ended.terms.number}{stepped[ended.terms.mode]}{op}"


def require_sound(ended: Round, group: OwnGroup, *, taken: str = "") -> None:
    """Raises, on every rank, the error that some rank has reported.

    `taken` describes a gradient that is gone on this rank.
    """
    number = ended.terms.number
    where = f"synchronization {number}, rank {group.name}"
    takers = set(ended.found.reported(Fact.TAKEN))
    if ended.found.taken:
        takers.add(group.name)  # on a device the ranks read it later
    if takers:
        raise taken_in_backward(takers, number, place=taken or f"rank {group.name}")
    failed = ended.found.reported(Fact.FAILED)
    if any(reading.ranks_differ for reading in ended.found.readings):
        found = group.watch.ask(_place(ended), of=group.names, most=MOST_TEXTS)
        raise Desync(
            "ranks are not in the same step.",
            where="\n  ".join((where, *lines_of(found))),
            remedy="Run the same number of synchronized backwards and steps on every rank. A rank "
            "without a backward calls finish().",
        )
    if any(reading.is_overdue and reading.flags.get(Fact.LATE) for reading in ended.found.readings):
        raise Desync(
            "gradients arrived again after their bucket was sent, and were left out.",
            where=f"{where}, or the one before",
            remedy="Let the first two steps use parameters as often as later ones do, or set "
            "overlap=False.",
        )
    if failed and not ended.has_failed:
        raise backward_failed(failed, where=where)
    unlike = ended.found.unlike_settings
    if unlike is not None and not ended.has_failed:
        settings = group.watch.ask(text_of(unlike), of=group.names)
        raise written_unlike(settings, where=where) or settings_differ(settings, where=where)


_DROP_GRADIENTS = (
    "The gradients of this step are incomplete on every rank: drop them, and see the log of that "
    "rank."
)


def backward_failed(
    ranks: Iterable[int], *, where: str, remedy: str = _DROP_GRADIENTS
) -> PeerFailed:
    """Returns the error of ranks that hear of a backward that has failed on these."""
    return PeerFailed(f"backward failed on {named(ranks)}.", where=where, remedy=remedy)


def not_waited_for(number: int) -> PhaseError:
    return PhaseError(
        "a backward began while gradients are being synchronized.",
        where=f"synchronization {number}",
        remedy="Wait for reduce_gradients_async() before the next backward.",
    )


def changed_unlike(ended: Round, group: OwnGroup, change: str) -> PlanMismatch | None:
    """Returns the error if parameters have changed on some ranks only.

    `change` describes the change on this rank.
    """
    changed = ended.found.reported(Fact.CHANGED)
    if not 0 < len(changed) < group.num_ranks:
        return None
    if any(reading.plans_differ for reading in ended.found.readings):
        return None  # then ranks may have read this flag at different places
    unchanged = [other for other in group.names if other not in changed]
    return PlanMismatch(
        "the parameters, or the communication hook, have changed on "
        f"{named(changed)}, but not on {named(unchanged)}.",
        where=f"synchronization {ended.terms.number}, rank {group.name}{change and f': {change}'}",
        remedy=CHANGE_ALIKE,
    )


def require_outside_of_backward(call: str, *, where: str, remedy: str) -> None:
    """Raises PhaseError if a backward runs in this thread."""
    is_outside = private.graph_task_id() == -1
    require(
        is_outside,
        f"{call} was called inside a backward.",
        where=where,
        remedy=remedy,
        error=PhaseError,
    )


def step_within_backward(where: str) -> PhaseError:
    return PhaseError(
        "an optimizer steps within a backward, on gradients that are not averaged yet.",
        where=where,
        remedy="Step after backward. torch's _apply_optimizer_in_backward is not supported.",
    )


def step_in_accumulation(where: str) -> PhaseError:
    return PhaseError(
        "a sharded optimizer steps inside accumulate() or no_sync(), on gradients that are not "
        "averaged: each shard would move by its rank's own gradient.",
        where=where,
        remedy="Step outside of it, and run the last backward of a step outside too. To train "
        "ranks apart, use a plain optimizer, or SyncConfig(outer=...).",
    )


def step_in_join(where: str) -> PhaseError:
    return PhaseError(
        "an optimizer steps inside join() on gradients that were only accumulated: ranks without "
        "data cannot help to average them now.",
        where=where,
        remedy="Run the last backward of a step outside of accumulate() and no_sync(), with a "
        "forward of the wrapper.",
    )


def warn_of_late_average(where: str, *, follows_forward: bool) -> None:
    """Warns of a step on gradients that are averaged only now; they follow forwards of the wrapper
    inside `accumulate()`, or none."""
    what, remedy = "no training forward of the wrapper preceded their backward", _CALL_THE_WRAPPER
    if follows_forward:
        what, remedy = "all their backwards ran inside accumulate() or no_sync()", _LAST_BACKWARD
    warnings.warn(
        f"an optimizer steps on gradients that were not averaged: {what}. They are averaged now, "
        "before the step, and no backward hides that. A norm that was clipped earlier was this "
        f"rank's own.\n  {where}\n  {remedy}",
        stacklevel=2,
    )


_LAST_BACKWARD = (
    "Run the last backward of a step outside of it, also at the end of an epoch: "
    "is_last = (i + 1) % n == 0 or i + 1 == len(loader). If each rank is to step on its own "
    "gradients, step inside of it, with a plain optimizer."
)
_CALL_THE_WRAPPER = (
    "Call the wrapper, not model.module or a method of it; after attach(), call the module itself."
)


def step_after_failure(where: str) -> PhaseError:
    return PhaseError(
        "the last backward or synchronization failed: these gradients are not the mean over ranks.",
        where=where,
        remedy="Call zero_grad(), and run a backward that succeeds on every rank, before the "
        "next step.",
    )


def warn_of_local_gradients(name: str, where: str) -> None:
    warnings.warn(
        "an optimizer uses gradients that are not averaged: no training forward of the wrapper "
        "preceded their backward.\n"
        f"  parameter {name!r}, {where}\n"
        f"  {_CALL_THE_WRAPPER} To average gradients of other forwards, call "
        "reduce_gradients_async().wait() before the step.",
        stacklevel=2,
    )


def warn_of_replaced(where: str) -> None:
    warnings.warn(
        "an optimizer steps parameters that are not the model's any more: others have their names. "
        "load_state_dict(assign=True) does that, and so does a new layer.\n"
        f"  {where}\n"
        "  Make the optimizer after the load, or load with assign=False.",
        stacklevel=2,
    )


def synchronized_already(number: int) -> PhaseError:
    return PhaseError(
        "gradients are being synchronized already.",
        where=f"synchronization {number}",
        remedy="Call this outside of backward, and wait for the earlier reduction first.",
    )


def nothing_to_reduce(number: int, *, rank: int) -> PhaseError:
    return PhaseError(
        "there is nothing to reduce: no accumulation has run since the last synchronization.",
        where=f"reduce_gradients_async(), synchronization {number}, rank {rank}",
        remedy="Run backward inside accumulate() or no_sync() on every rank, then reduce once.",
    )


def shards_held(number: int, *, rank: int) -> PhaseError:
    return PhaseError(
        "an earlier synchronization has left shards of its result, which another op would count "
        "again.",
        where=f"reduce_gradients_async(), synchronization {number}, rank {rank}",
        remedy="Call zero_grad() before the accumulation, or leave op out.",
    )


def part_of_another(name: str) -> ConfigError:
    return ConfigError(
        "a part of this module is synchronized already.",
        where=f"parameter {name!r} belongs to an earlier attach() or DistributedDataParallel",
        remedy="If the earlier one is no longer trained, call its close(). If two models share a "
        "part, wrap one module that holds both, or name the part in `ignore` of one of them.",
    )


def unfrozen_in_backward(name: str, *, rank: int) -> PhaseError:
    return PhaseError(
        "a parameter was unfrozen while the backward ran that trains it: its gradient cannot be "
        "averaged.",
        where=f"parameter {name!r}, rank {rank}",
        remedy="Unfreeze parameters before their backward, and outside of functional_call.",
    )
