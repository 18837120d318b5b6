"""Gradients that are not finite: the findings of a synchronization, and the step that follows
them."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.buckets.finite import not_finite
from undertow.config import refused
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.progress import params_of
from undertow.engine.round import Round
from undertow.errors import NonFiniteGradient, listed
from undertow.mesh.local_tensors import local_tensor
from undertow.plan import Plan
from undertow.plan.facts import Fact
from undertow.ranks import faults
from undertow.ranks.agreement import any_rank, gather_json
from undertow.ranks.answers import named
from undertow.ranks.transport import OwnGroup

_NOT_TAKEN = 'No rank has taken the step. Look for the overflow there, or set nonfinite="skip".'
_NOT_TAKEN_HERE = (
    "This rank has not taken the step, which uses its own gradients. Look for the overflow there, "
    'or set nonfinite="skip".'
)
_NOT_BY_ALL = (
    "Ranks with other experts take the step: start from a checkpoint, and look for the "
    "overflow there."
)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Gradients that are not finite; the same on every rank, unless it `is_own`."""

    params: tuple[str, ...]  # in the order of the model
    ranks: tuple[int, ...]  # empty if only the sum is known
    where: str
    is_own: bool = False  # of a step inside `accumulate()`, in one rank's gradients
    hook: str = ""  # the communication hook whose results they are, if no rank has sent such a one

    @property
    def what(self) -> str:
        """The finding in words."""
        params = listed(list(map(repr, self.params)))
        if self.hook:
            of_hook = f"the result of the communication hook {self.hook!r} for {params}"
            return f"{of_hook} is not finite (NaN or Inf)."
        gradients = "the gradient of" if len(self.params) == 1 else "the gradients of"
        verb = "is" if len(self.params) == 1 else "are"
        ranks = named(self.ranks) if self.ranks else "some rank"
        return f"{gradients} {params} {verb} not finite (NaN or Inf) on {ranks}."

    def error(self, *, is_alone: bool) -> NonFiniteGradient:
        """Returns a new error each time; `is_alone` if the other ranks take the step."""
        remedy = _NOT_TAKEN_HERE if is_alone else _NOT_TAKEN
        return NonFiniteGradient(self.what, where=self.where, remedy=remedy)

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
    If an optimizer steps inside `accumulate()` and this rank `has_own` gradients of its parameters,
    `find_own` checks these instead.
    `fails_others` makes the ranks that do not hold these experts raise too, at their next wait.
    `agree` returns the finding of any rank of a mesh: each has other parts of the gradients. It is
    a collective call at each step, also inside `accumulate()`.
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
        has_own: Callable[[Optimizer], bool],
        find_own: Callable[[Optimizer], Finding | None],
    ) -> None:
        self.num_skipped = 0  # steps
        self.is_on = policy != "ignore"
        self._policy = policy
        self._rank = rank
        self._find_alone, self._has_own, self._find_own = find_alone, has_own, find_own
        self._finding: Finding | None = None
        self._is_judged = False  # an optimizer has stepped, or skipped, on it
        # each `.grad` of an optimizer whose step is skipped now
        self._aside: dict[Optimizer, list[tuple[Tensor, Tensor]]] = {}

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
            # Judged again: the next finding may be of another place of a mesh, which brings it.
            self._finding = None
            self._is_judged = False

    def skips(self, optimizer: Optimizer, *, accumulates: bool = False) -> bool:
        """Returns True if the coming step of `optimizer` is to change nothing.

        May raise NonFiniteGradient on every rank. If the step `accumulates`, inside
        `accumulate()`, it may use this rank's own gradients. Then other ranks are told on a mesh
        only.
        """
        # Torch's own kernels skip the step by this.
        if not self.is_on or getattr(optimizer, "found_inf", None) is not None:
            return False
        is_own = accumulates and self._has_own(optimizer)
        finding = self._find_own(optimizer) if is_own else self._find_in_mean()
        if self.agree is not None:
            finding = self.agree(finding)
            is_own |= finding is not None and finding.is_own  # of another rank
            if self.has_rounds and not is_own:
                self._finding = finding
        if finding is None:
            return False
        is_counted = not is_own and self._finding is not None and self._is_judged
        self._is_judged |= not is_own
        is_alone = finding.is_own and self.agree is None
        if self._policy == "raise":
            if self.fails_others is None or finding.is_own:
                raise finding.error(is_alone=is_alone)
            self.fails_others(finding.fault)
            raise finding.fault.error(finding.where)
        if not is_counted:
            self.num_skipped += 1
            self._tell(finding, is_alone=is_alone)
        return True

    def _find_in_mean(self) -> Finding | None:
        return self._finding or self._find_alone()

    def before_step(
        self,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        accumulates: bool = False,
    ) -> Arguments | None:
        """Returns other arguments for a plain optimizer's step, if needed.

        The optimizer itself is the first of `args`. The step `accumulates` inside `accumulate()`.
        """
        if optimizer in self._aside and _are_gone(self._aside[optimizer]):
            self.step_ends(optimizer)  # that step has raised
        self._aside.pop(optimizer, None)  # a backward has followed
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            is_skipped = self._is_within_skipped(optimizer)
            if not is_skipped and not self.skips(optimizer, accumulates=accumulates):
                return None
            # Some optimizers keep their parameters in a list of their own, and step those that have
            # a gradient.
            self._aside[optimizer] = [
                (param, param.grad) for param in params_of(optimizer) if param.grad is not None
            ]
            for param, _ in self._aside[optimizer]:
                param.grad = None
            return (_idle(optimizer), *args[1:]), kwargs
        if self._policy == "skip":
            raise refused("closure", "skip", where=f"{type(optimizer).__name__}, rank {self._rank}")
        then = partial(self.skips, optimizer, accumulates=accumulates)
        return after_closure(args, kwargs, then)

    def step_ends(self, optimizer: Optimizer) -> None:
        """Called after a plain optimizer's step: gradients are as before, if it was skipped."""
        for param, grad in self._aside.pop(optimizer, ()):
            param.grad = grad

    def _is_within_skipped(self, optimizer: Optimizer) -> bool:
        """Returns True if the skipped step of another optimizer, which wraps this one, has put the
        gradients aside. Nothing bad would be found."""
        if not self._aside:
            return False
        ids = set(map(id, params_of(optimizer)))
        return any(
            _are_gone(aside) and any(id(param) in ids for param, _ in aside)
            for aside in self._aside.values()
        )

    def _tell(self, finding: Finding, *, is_alone: bool) -> None:
        """Warns on rank 0, or on the only rank that skips, the first, second, fourth time and so
        on.

        A run that diverges would print nothing else.
        """
        is_told_here = self._rank == 0 or is_alone
        if is_told_here and self.num_skipped.bit_count() == 1:
            times = "" if self.num_skipped == 1 else f" Steps like this so far: {self.num_skipped}."
            by = "this rank only" if is_alone else "every rank"
            faults.tell(f"{finding.what} The step is skipped on {by}.{times}\n  {finding.where}")


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


def _are_gone(aside: list[tuple[Tensor, Tensor]]) -> bool:
    """Returns True if no gradient has arrived since these were put aside."""
    return all(param.grad is None for param, _ in aside)


def _finding_of(ended: Round, plan: Plan) -> Finding:
    buckets = sorted(ended.found.nonfinite)
    slots = [
        plan.buckets[bucket].slots[position]
        for bucket in buckets
        for position in ended.found.nonfinite[bucket]
    ]
    ranks = tuple(ended.found.reported(Fact.NONFINITE, overdue=False))
    return Finding(
        params=tuple(plan.params[index].name for index in sorted({slot.param for slot in slots})),
        ranks=ranks,
        where=f"synchronization {ended.terms.number}, bucket {listed(list(map(str, buckets)))}",
        hook="" if ranks else ended.found.hook,
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


def found_by_any(everyone: OwnGroup, finding: Finding | None) -> Finding | None:
    """Returns the finding of the first rank that has one, on every rank; a collective call."""
    what = "whether all ranks' gradients are finite"
    if not any_rank(everyone, finding is not None, what):
        return None
    mine = None if finding is None else dataclasses.asdict(finding)
    found = next(each for each in gather_json(everyone, mine, waits_for=what) if each is not None)
    return Finding(
        params=tuple(found["params"]),
        ranks=tuple(found["ranks"]),
        where=found["where"],
        is_own=found["is_own"],
        hook=found["hook"],
    )


def found_alone(current_plan: CurrentPlan) -> Finding | None:
    """Checks the gradients of a single rank, which has no rounds. A function.

    A method would hold its owner in a cycle.
    """
    if current_plan.is_active:
        return None
    name, hooks = current_plan.group.name, current_plan.hooks
    params = _not_finite_of(hooks.named_params)
    where = "one rank, when its optimizer steps"
    return Finding(params, ranks=(name,), where=where) if params else None


def has_own(current_plan: CurrentPlan, optimizer: Optimizer) -> bool:
    """Returns True if this rank has accumulated gradients of this optimizer's parameters since the
    last synchronization. A function, as `found_alone`."""
    hooks = current_plan.hooks
    return not hooks.arrived_before.isdisjoint(_indices_of(current_plan, optimizer))


def found_own(current_plan: CurrentPlan, optimizer: Optimizer) -> Finding | None:
    """Checks the gradients of this optimizer's parameters: all of them, because others than the
    accumulated ones may still have the mean of the last synchronization. A function, as
    `found_alone`."""
    named_params = current_plan.hooks.named_params
    indices = sorted(_indices_of(current_plan, optimizer))
    params = _not_finite_of([named_params[index] for index in indices])
    where = "a step inside accumulate() or no_sync()"
    ranks = (current_plan.group.name,)
    return Finding(params, ranks=ranks, where=where, is_own=True) if params else None


def _indices_of(current_plan: CurrentPlan, optimizer: Optimizer) -> set[int]:
    return current_plan.hooks.indices(set(map(id, params_of(optimizer))))


def _not_finite_of(named_params: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
    """Returns the names of parameters whose gradient is not finite."""
    grads = {
        name: local_tensor(param.grad) for name, param in named_params if param.grad is not None
    }
    names = list(grads)
    return tuple(names[place] for place in not_finite(list(grads.values())))
