"""The fragments of a model: how layers form them, and the state that a run can be resumed from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from undertow.engine.current_plan import CurrentPlan
from undertow.engine.hooks import ParamHooks
from undertow.errors import CheckpointError, PhaseError, require
from undertow.outer.fragment import Fragment
from undertow.outer.fragment_layout import BufferPlace
from undertow.outer.replicas import Replicas
from undertow.plan.fragments import Turns, layer_of, layers_of, starts_after


class Fragments:
    """The fragments that take `turns`; all of the model is one until these are chosen (None).

    `tensors` are trained parameters, and the places of buffers with a mean, by name. The replica's
    own tensors become the global ones.
    """

    def __init__(
        self, replicas: Replicas, tensors: Mapping[str, Tensor | BufferPlace], turns: Turns | None
    ) -> None:
        self.turns = turns
        # The replica trains from the global values, or they are of a saved state: its own
        # parameters may have other ones.
        self.have_begun = False
        self._replicas, self._tensors = replicas, tensors
        layers = layers_of(list(tensors))
        count = 1 if turns is None else turns.fragments
        turn_of = {layer: place % count for place, layer in enumerate(layers)}
        self._all: list[Fragment] = []
        for index in range(min(count, len(layers))):
            own = {
                name: tensor for name, tensor in tensors.items() if turn_of[layer_of(name)] == index
            }
            self._all.append(Fragment(index, own, replicas))

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._all)

    @property
    def ids(self) -> set[int]:
        """The parameters that are in a fragment, by id."""
        return {key for fragment in self._all for key in fragment.layout.ids}

    def in_turns(self, turns: Turns) -> Fragments:
        """Returns fragments that take other turns, with the same global parameters.

        No exchange is on its way.
        """
        others = Fragments(self._replicas, self._tensors, turns)
        others.have_begun = self.have_begun
        for fragment in others:
            fragment.take(self._named(lambda each: each.values), {}, {}, None)
        return others

    def starting(self, step: int) -> list[Fragment]:
        """Returns the fragments whose exchange starts after this step."""
        every = self._replicas.outer.every
        count = 1 if self.turns is None else self.turns.fragments
        return [
            each
            for each in self._all
            if starts_after(step, each.index, num_fragments=count, every=every)
        ]

    def arrive(self) -> None:
        """Waits for the exchanges on their way."""
        for fragment in self._all:
            fragment.arrive()

    def require_same(self) -> None:
        """Raises the same error on every rank if ranks differ in an exchange."""
        for fragment in self._all:
            fragment.require_same()

    def require_all_of(self, hooks: ParamHooks, *, rank: int) -> None:
        """Raises PhaseError if a trained parameter is in no fragment."""
        known = self.ids
        if not hooks.ids <= known:
            new = next(name for name, param in hooks.named_params if id(param) not in known)
            raise PhaseError(
                f"parameter {new!r} was added or unfrozen after the model was wrapped: it is in no "
                "fragment.",
                where=f"outer synchronization, rank {rank}",
                remedy="Wrap the model again, with all parameters that are to be trained.",
            )

    def are_own(self) -> bool:
        """Returns True if the replica's own parameters have the global values; the host waits."""
        return all(fragment.is_own() for fragment in self._all)

    def follow(self, present: Mapping[str, Tensor]) -> list[Tensor]:
        """Follows parameters that a load has put in the place of others, which it returns."""
        return [param for fragment in self._all for param in fragment.layout.follow(present)]

    @property
    def have_stepped(self) -> bool:
        """True if every fragment has taken an outer step: the global values are trained ones."""
        return all(fragment.has_stepped for fragment in self._all)

    def global_copy(self, key: object) -> Tensor | None:
        """Returns a copy of the global value of a parameter, or of the buffer at a place."""
        copies = (fragment.layout.copy_of(key, fragment.values) for fragment in self._all)
        return next((copy for copy in copies if copy is not None), None)

    # The replica's own tensors.

    def own(self) -> list[Tensor]:
        """Returns a copy of the replica's own tensors."""
        found = [torch.zeros_like(fragment.values) for fragment in self._all]
        for fragment, values in zip(self._all, found, strict=True):
            fragment.layout.read(values)
        return found

    def write(self, values: list[Tensor]) -> None:
        """Writes such a copy, or global values, into the model."""
        for fragment, of_fragment in zip(self._all, values, strict=True):
            fragment.layout.write(of_fragment)

    # The state.

    def state(self) -> dict[str, Any]:
        """Returns a copy. An exchange that has not arrived is not part of it."""
        flights = [fragment.flight for fragment in self._all]
        turns = self.turns
        return {
            "turns": None if turns is None else [turns.fragments, turns.delay],
            "due": [None if flight is None or flight.handle else flight.due for flight in flights],
            "global": self._named(lambda fragment: fragment.values),
            "momentum": self._named(lambda fragment: fragment.momentum),
            "mean": self._named(lambda fragment: fragment.mean),
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Takes over a state, into new fragments.

        Raises CheckpointError if it is of another model, or of other fragments with an exchange on
        its way.
        """
        self.have_begun = True
        turns = turns_of(state)
        has_same = turns == self.turns
        require(
            has_same or not any(due is not None for due in state["due"]),
            f"the state has an unfinished exchange of {turns}, and this model has {self.turns}.",
            where="model.outer.load_state_dict(state)",
            remedy="Give the fragments and the delay of the run that has saved it.",
            error=CheckpointError,
        )
        for place, fragment in enumerate(self._all):
            due = state["due"][place] if has_same else None
            fragment.has_stepped = state["num_synchronizations"] >= len(self._all)
            fragment.take(state["global"], state["momentum"], state["mean"], due)

    def _named(self, flat_of: Callable[[Fragment], Tensor | None]) -> dict[str, Tensor]:
        """Returns copies of the tensors of all fragments, by name."""
        found: dict[str, Tensor] = {}
        for fragment in self._all:
            flat = flat_of(fragment)
            if flat is not None:
                found |= fragment.layout.placed(flat)
        return found


def turns_of(state: Mapping[str, Any]) -> Turns | None:
    """Returns the turns of a state; None if they were not chosen when it was saved."""
    saved = state["turns"]
    return None if saved is None else Turns(fragments=saved[0], delay=saved[1])


def tensors_of(plan: CurrentPlan, *, with_buffers: bool) -> dict[str, Tensor | BufferPlace]:
    """Returns trained parameters, and the places of buffers with a mean, by name."""
    found: dict[str, Tensor | BufferPlace] = dict(plan.hooks.named_params)
    for item in plan.members.common_buffers.buffers if with_buffers else ():
        table, key, name = item.place
        if item.tensor.is_floating_point() or item.tensor.is_complex():
            found[name] = BufferPlace.of(table, key, item.tensor)
    return found
