"""Synchronizes replicas that train alone, fragment by fragment (docs/design/outer.md).

step       n             n+1    ...     n + delay
fragment   D = G - own   the mean of D over replicas travels   G steps, own = G
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from undertow.buckets.fingerprints import fingerprints
from undertow.config import Outer, SyncConfig
from undertow.engine.checks import mismatch
from undertow.engine.engine import Engine
from undertow.errors import CheckpointError, PhaseError, require
from undertow.outer.fragment import BufferPlace, Fragment, Replicas
from undertow.outer.measured import Timings, given_turns, measured_turns
from undertow.outer.steps import StepCounter
from undertow.plan.fragments import Turns, layer_of, layers_of, starts_after
from undertow.ranks.agreement import surroundings
from undertow.ranks.exchanges import exchanges_over
from undertow.ranks.transport import Handle, OwnGroup
from undertow.torch_private import private
from undertow.trace import OuterReport

_WRITES = (
    "Look for what writes to global parameters on some ranks only; broadcast_parameters() makes "
    "them equal again."
)

_of_modules: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OuterSync]] = (
    weakref.WeakKeyDictionary()
)


def outer_of(model: nn.Module) -> OuterSync | None:
    """Returns the outer synchronization of a model, wrapped or bare."""
    weak = _of_modules.get(private.unwrapped(model))
    outer = None if weak is None else weak()
    return None if outer is None or outer.is_closed else outer


class OuterSync:
    """The outer synchronization of a module: `model.outer`, or `sync.outer` after `attach`.

    `all_ranks` has the ranks of all replicas, and `engine` synchronizes within this replica.
    """

    def __init__(
        self, module: nn.Module, all_ranks: OwnGroup, engine: Engine, config: SyncConfig
    ) -> None:
        assert config.outer is not None  # else nobody makes this
        self.num_synchronizations = 0  # outer steps of fragments
        self.all_ranks = all_ranks
        self._engine, self._config = engine, config
        self._fragments: list[Fragment] = []  # none before the ranks have met
        self._replicas: Replicas | None = None
        self._turns: Turns | None = None  # None until they are chosen
        self._timings = Timings(config.outer)
        self._is_shown = False  # the model has the global parameters
        self._compared: deque[tuple[list[str], Handle]] = deque()
        self._steps = steps = StepCounter(
            module,
            engine,
            begins=self._begins,
            ends=self._step_ends,
        )
        _of_modules[private.unwrapped(module)] = weakref.ref(self)
        all_ranks.here.steps = lambda: (steps.num_steps, True)

    # Calls of users.

    def step(self) -> None:
        """Counts a step of an optimizer that does not derive from torch.optim.Optimizer.

        A collective call if an exchange is due. Other optimizers are counted without it.
        """
        self._begins()
        self._steps.count()

    @contextlib.contextmanager
    @torch.no_grad()
    def synchronized(self) -> Iterator[None]:
        """Context that gives the model the global parameters and buffers, for evaluation and
        export.

        Never communicates. The replica's own values come back at the end. An optimizer that steps
        inside raises PhaseError, and so does a save or load of the state. On a device, the ranks'
        differences in the last exchange are errors here: Desync and ReplicaMismatch.
        """
        self._settle()
        self._require_same()
        own = [torch.zeros_like(fragment.values) for fragment in self._fragments]
        for fragment, values in zip(self._fragments, own, strict=True):
            fragment.read(values)
            fragment.write(fragment.values)
        self._is_shown = True
        try:
            yield
        finally:
            self._is_shown = False
            for fragment, values in zip(self._fragments, own, strict=True):
                fragment.write(values)
            was_loaded, self._steps.is_loaded = self._steps.is_loaded, False
        require(
            not was_loaded,
            "parameters were loaded inside synchronized(): they are lost, because the replica's "
            "own parameters come back.",
            where=f"rank {self.all_ranks.rank}",
            remedy="Load outside of it.",
            error=PhaseError,
        )

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the global parameters and buffers, the outer momentum, exchanges that
        are on their way, and the number of the step.

        It waits for those exchanges, which changes no value: call it on all ranks after the same
        step. All ranks have the same state.

        Raises Desync or ReplicaMismatch on every rank, if ranks differ in an exchange.
        """
        self._settle()
        turns = self._turns
        due = [fragment.arrive() for fragment in self._fragments]
        self._require_same()
        return {
            "step": self._steps.num_steps,
            "num_forwards": self._steps.num_forwards,
            "num_synchronizations": self.num_synchronizations,
            "turns": None if turns is None else [turns.fragments, turns.delay],
            "due": due,
            "global": self._named(lambda fragment: fragment.values),
            "momentum": self._named(lambda fragment: fragment.momentum),
            "mean": self._named(lambda fragment: fragment.mean),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state of `state_dict`, the same on every rank.

        The replica's own parameters, and the state of its optimizer, are loaded elsewhere.

        Raises:
            CheckpointError: If the state is of another model, or of other fragments with an
                exchange on its way.
        """
        self._settle()
        self._turns = None
        self.reset()
        saved = state["turns"]
        turns = None if saved is None else Turns(fragments=saved[0], delay=saved[1])
        if turns is not None and self._turns is None:
            self._lay_out(turns)
        has_same = turns == self._turns
        require(
            has_same or not any(due is not None for due in state["due"]),
            f"the state has an exchange on its way of {turns}, and this model has {self._turns}.",
            where="model.outer.load_state_dict(state)",
            remedy="Give the fragments and the delay of the run that has saved it.",
            error=CheckpointError,
        )
        for place, fragment in enumerate(self._fragments):
            due = state["due"][place] if has_same else None
            fragment.take(state["global"], state["momentum"], state["mean"], due)
        self._steps.num_steps = state["step"]
        self._steps.num_forwards = state["num_forwards"]
        self.num_synchronizations = state["num_synchronizations"]

    def __repr__(self) -> str:
        turns = self._turns
        text = "fragments are chosen after the first steps"
        if turns is not None:
            text = f"{turns.fragments} fragments, delay {turns.delay} ({self._timings.reason})"
        every = self._outer.every
        num_layers = len(layers_of(list(self._tensors())))
        return (
            f"<OuterSync every {every} steps: {num_layers} layers, {text}; "
            f"step {self._steps.num_steps}, {self.num_synchronizations} synchronizations>"
        )

    # Calls of the owner.

    @property
    def is_closed(self) -> bool:
        return self._steps.is_closed

    @property
    def places(self) -> list[list[int]]:
        """The ranks of each replica, as places in the group of all ranks."""
        group = self.all_ranks
        return list(map(list, group.user.row_places)) or [[rank] for rank in range(group.num_ranks)]

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return next(at for at, row in enumerate(self.places) if self.all_ranks.rank in row)

    def open_group(self) -> None:
        """Creates the groups and compares the ranks; a collective call the first time."""
        if self._replicas is not None:
            return
        group, engine = self.all_ranks, self._engine
        group.open()
        members, compiled = engine.current_plan.members, engine.current_plan.compiled
        of_outer = {f"outer.{name}": value for name, value in self._outer.to_dict().items()}
        settings = {**surroundings(group), **self._config.to_dict(), "outer": None, **of_outer}
        if group.num_ranks > 1:
            members.compare(
                group, compiled.plan.params, compiled.params, settings, new=()
            ).require()
        # Before more groups open: a rank that raises would close them under the others.
        given_turns(self._outer, self._tensors())
        engine.current_plan.open_group()  # the ranks of the replica
        if engine.current_plan.group.num_ranks == 1:
            members.ranks_agree()  # else the engine has compared them
        *rows, column = group.user.axes()
        own = [
            OwnGroup(axis, device=group.device, limits=self._config, within=group)
            for axis in (column, *(row for row in rows if len(row.ranks) > 1))
        ]
        for axis in own:
            axis.open()
        ordered = dataclasses.replace(self._config, reduction="ordered")
        exchanges = exchanges_over(own[0], ordered, divisor=own[0].num_ranks)
        row = own[1] if len(own) > 1 else None
        self._replicas = Replicas(group, exchanges, row, self._outer)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Makes the replica's own parameters the global ones, and forgets the outer momentum."""
        self._require_own()
        self._engine.current_plan.wait_for_parameters()
        for fragment in self._fragments:
            fragment.arrive()
        self._fragments = []
        given = given_turns(self._outer, self._tensors())
        self._lay_out(given or self._turns)  # a choice holds: ranks would measure again together
        self._steps.is_loaded = False

    def report(self) -> OuterReport:
        """Returns the times of the last exchanges on this rank."""
        every, number = self._outer.every, self.num_synchronizations
        return self._timings.report(self._turns, every=every, num_exchanges=number)

    def close(self) -> None:
        """Waits for exchanges on their way, which other ranks need, and ends the threads."""
        self._steps.close()
        if self._replicas is None:
            return
        with contextlib.suppress(RuntimeError):
            for fragment in self._fragments if self.all_ranks.is_alive else ():
                fragment.arrive()
        self._replicas.close()

    # A step.

    @torch.no_grad()
    def _step_ends(self) -> None:
        """Called after each step of the optimizers."""
        step, group = self._steps.num_steps, self.all_ranks
        require(
            not self._is_shown,
            "an optimizer has stepped inside synchronized(): the step is lost, because the "
            "replica's own parameters come back.",
            where=f"step {step}, rank {group.rank}",
            remedy="Train outside of it.",
            error=PhaseError,
        )
        group.here.thread = threading.get_ident()
        group.watch.check()
        self._require_alike()
        self._require_known()
        if self._turns is None:
            self._timings.note_step()
            if self._timings.has_steps:
                self._choose()
        turns = self._turns
        if turns is None:
            return
        every = self._outer.every
        starting = [
            part
            for part in self._fragments
            if starts_after(step, part.index, num_fragments=turns.fragments, every=every)
        ]
        # After a resume with another `every`, a fragment may start before it is due.
        due = [
            part
            for part in self._fragments
            if part.is_due(step) or (part in starting and part.flight is not None)
        ]
        if due or starting:
            self._engine.current_plan.wait_for_parameters()
        for part in due:
            self._finish(part)
        for part in starting:
            part.start(step, due=step + turns.delay, num_forwards=self._steps.num_forwards)
            if turns.delay == 0:
                self._finish(part)

    def _finish(self, part: Fragment) -> None:
        """Takes the outer step of a fragment."""
        start_s = time.perf_counter()
        part.arrive()
        self._timings.note_exchange(part, exposed_s=time.perf_counter() - start_s)
        part.step()
        self.num_synchronizations += 1
        every = self._config.check_replicas_every
        if every is not None and self.num_synchronizations % every == 0:
            values = part.named(part.values)
            mine = fingerprints(list(values.values()), device=self.all_ranks.device)
            what = "the comparison of all ranks' global parameters"
            self._compared.append((list(values), self.all_ranks.all_gather(mine, what)))

    def _require_same(self) -> None:
        for fragment in self._fragments:
            fragment.require_same()

    def _require_alike(self) -> None:
        """Raises ReplicaMismatch on every rank if global parameters differ."""
        while self._compared:
            names, received = self._compared.popleft()
            of_ranks = received.result().tolist()
            differing = [
                place
                for place, values in enumerate(zip(*of_ranks, strict=True))
                if len(set(values)) > 1
            ]
            if differing:
                raise mismatch(
                    names[differing[0]],
                    {rank: values[differing[0]] for rank, values in enumerate(of_ranks)},
                    where=f"global parameters, step {self._steps.num_steps}",
                    remedy=_WRITES,
                )

    def _require_known(self) -> None:
        """Raises PhaseError if the module has a trained parameter that is in no fragment."""
        hooks = self._engine.current_plan.hooks
        known = {key for part in self._fragments for key in part.ids}
        if not hooks.ids <= known:
            new = next(name for name, param in hooks.named_params if id(param) not in known)
            raise PhaseError(
                f"parameter {new!r} was added or unfrozen after the model was wrapped: it is in no "
                "fragment.",
                where=f"outer synchronization, rank {self.all_ranks.rank}",
                remedy="Wrap the model anew, with all parameters that are to be trained.",
            )

    # Fragments.

    @property
    def _outer(self) -> Outer:
        assert self._config.outer is not None
        return self._config.outer

    def _tensors(self) -> dict[str, Tensor | BufferPlace]:
        """Returns trained parameters, and the places of buffers with a mean, by name."""
        found: dict[str, Tensor | BufferPlace] = dict(self._engine.current_plan.hooks.named_params)
        if self._config.buffers == "off":
            return found
        for item in self._engine.current_plan.members.common_buffers.buffers:
            table, key, name = item.places[0]
            if item.tensor.is_floating_point() or item.tensor.is_complex():
                found[name] = table, key
        return found

    def _lay_out(self, turns: Turns | None) -> None:
        """Makes the fragments; all of the model is one until their number is chosen."""
        assert self._replicas is not None  # the ranks have met
        before = self._named(lambda fragment: fragment.values)
        tensors = self._tensors()
        layers = layers_of(list(tensors))
        count = 1 if turns is None else turns.fragments
        turn_of = {layer: place % count for place, layer in enumerate(layers)}
        self._turns = turns
        self._fragments = []
        for index in range(min(count, len(layers))):
            own = {
                name: tensor for name, tensor in tensors.items() if turn_of[layer_of(name)] == index
            }
            self._fragments.append(Fragment(index, own, self._replicas))
        for fragment in self._fragments if before else ():
            fragment.take(before, {}, {}, None)

    def _choose(self) -> None:
        """Chooses fragments and delay from measurements; a collective call."""
        assert self._replicas is not None  # the ranks have met
        if not self._fragments:
            return
        turns, self._timings.reason = measured_turns(
            self._replicas,
            self._fragments[0],
            step_us=self._timings.step_us,
        )
        self._lay_out(turns)

    def _named(self, flat_of: Callable[[Fragment], Tensor | None]) -> dict[str, Tensor]:
        """Returns copies of the tensors of all fragments, by name."""
        found: dict[str, Tensor] = {}
        for fragment in self._fragments:
            flat = flat_of(fragment)
            if flat is not None:
                found |= {name: view.clone() for name, view in fragment.named(flat).items()}
        return found

    def _begins(self) -> None:
        """Called before a forward or a step: follows parameters that were loaded."""
        self.open_group()
        if self._steps.is_loaded:
            self.reset()

    def _require_own(self) -> None:
        """Raises PhaseError while the model has the global parameters."""
        require(
            not self._is_shown,
            "the model has the global parameters: this call needs the replica's own.",
            where=f"inside synchronized(), rank {self.all_ranks.rank}",
            remedy="Call it outside of synchronized().",
            error=PhaseError,
        )

    def _settle(self) -> None:
        """Called before a user reads or changes the state."""
        self._require_own()
        self._begins()
        self._engine.current_plan.wait_for_parameters()
