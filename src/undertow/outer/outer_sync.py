"""Synchronizes replicas that train alone, fragment by fragment (docs/design/outer.md).

step       n             n+1    ...     n + delay
fragment   D = G - own   the mean of D over replicas travels   G steps, own = G
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from undertow.config import Outer, SyncConfig
from undertow.engine.engine import Engine
from undertow.engine.step_events import StepListener, has_closure
from undertow.errors import (
    Desync,
    NonFiniteGradient,
    PhaseError,
    PlanMismatch,
    ReplicaMismatch,
    require,
)
from undertow.outer.aside import Aside
from undertow.outer.comparisons import Comparisons
from undertow.outer.fragment import Fragment
from undertow.outer.fragment_layout import BufferPlace
from undertow.outer.fragments import Fragments, tensors_of, turns_of
from undertow.outer.frozen import Frozen
from undertow.outer.loads import OuterLoads, Values, values_of
from undertow.outer.measured import Timings, given_turns, measured_turns
from undertow.outer.replicas import Replicas, open_replicas
from undertow.outer.state_dicts import StateDicts
from undertow.outer.steps import StepCounter
from undertow.plan.fragments import Turns, layers_of
from undertow.ranks.agreement import any_rank, surroundings
from undertow.ranks.transport import OwnGroup
from undertow.torch_private import private, tables, unscaling
from undertow.trace import OuterReport

_of_modules: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OuterSync]] = (
    weakref.WeakKeyDictionary()
)


def outer_of(model: nn.Module) -> OuterSync | None:
    """Returns the outer synchronization of a model, wrapped or bare."""
    weak = _of_modules.get(private.unwrapped(model))
    outer = None if weak is None else weak()
    return None if outer is None or outer.is_closed else outer


class OuterSync(StepListener):
    """The outer synchronization of a module: `model.outer`, or `sync.outer` after `attach`.

    `all_ranks` has the ranks of all replicas, and `engine` synchronizes within this replica.
    """

    def __init__(
        self, module: nn.Module, all_ranks: OwnGroup, engine: Engine, config: SyncConfig
    ) -> None:
        assert config.outer is not None  # else this is not made
        self.num_synchronizations = 0  # outer steps of fragments
        self.all_ranks = all_ranks
        self._engine, self._config = engine, config
        self._replicas: Replicas | None = None  # until the ranks have met
        self._fragments: Fragments = None  # type: ignore[assignment]
        self._turns: Turns | None = None  # None until they are chosen
        self._timings = Timings(config.outer)
        self._is_shown = False  # the model has the global parameters
        # The replica's own tensors, while the model has others in their places.
        self._own: list[Tensor] | None = None
        self._copied: Mapping[str, Any] | None = None  # a state to begin with
        self._has_state = False  # was loaded, and no step has followed
        self._aside = Aside()
        self._stop = engine.checks.stop
        self._comparisons = Comparisons(all_ranks, engine.current_plan.members)
        self._frozen = Frozen(
            engine.current_plan.members, is_needed=config.check_replicas_every is None
        )
        self.is_closed = False
        self._state_dicts: StateDicts | None = None  # of `save_global`
        self._has_warned = False
        self._module = weakref.ref(private.unwrapped(module))
        self._steps = steps = StepCounter(engine)
        self.loads = OuterLoads(engine.current_plan)  # into the module
        _of_modules[private.unwrapped(module)] = weakref.ref(self)
        all_ranks.here.steps = lambda: (steps.num_steps, True)

    # Calls of users.

    def step(self) -> None:
        """Counts a step of an optimizer that does not derive from torch.optim.Optimizer.

        A collective call if an exchange is due. Other optimizers are counted without it.
        """
        self._begins()
        self._steps.count()
        self._has_stepped()

    @contextlib.contextmanager
    @torch.inference_mode(False)  # else fragments that are made here could not be trained
    @torch.no_grad()
    def synchronized(self) -> Iterator[None]:
        """Context that gives the model the global parameters and buffers, for evaluation and
        export.

        Never communicates. The replica's own values come back at the end. An optimizer that steps
        inside raises PhaseError, and so does a save or load of the state. On a device, the ranks'
        differences in the last exchange are errors here: Desync and ReplicaMismatch.
        """
        self._settle()
        self._fragments.require_same()
        own = self._fragments.own()
        try:
            self._is_shown, self._own = True, own
            self._fragments.write([fragment.values for fragment in self._fragments])
            yield
        finally:
            self._is_shown = False
            was_loaded = self.loads.are_new
            self.loads.follow()
            try:
                self._bring_back()
            except BaseException:  # such as Ctrl-C: the model must not stay as it is
                self._bring_back()
                raise
        require(
            not was_loaded,
            "parameters were loaded inside synchronized(): they are lost, because the replica's "
            "own parameters come back.",
            where=f"rank {self.all_ranks.rank}",
            remedy="Load outside of it.",
            error=PhaseError,
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the global parameters and buffers, the outer momentum, exchanges that
        are on their way, and the number of the step.

        It waits for those exchanges, which changes no value: call it on all ranks after the same
        step. All ranks have the same state.

        Raises Desync or ReplicaMismatch on every rank, if ranks differ in an exchange.
        """
        self._settle()
        self._fragments.arrive()
        self._fragments.require_same()
        return self._state()

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state of `state_dict`, the same on every rank.

        The replica's own parameters, and the state of its optimizer, are loaded elsewhere, before
        or after: a load into the module belongs to this state until a step follows.

        Raises:
            CheckpointError: If the state is of another model, or of other fragments with an
                exchange on its way.
        """
        self._settle()
        self._turns = None
        self.reset()
        self._take(state)

    def save_global(self) -> None:
        """Gives `state_dict()` of the module, of its parts and of the wrapper copies of the global
        parameters from now on, so that a file that one rank writes has them.

        Until every fragment was exchanged once, and after a load until then, state dicts have the
        replica's own parameters; a warning says so. `undertow run` calls it.
        """
        module = self._module()
        if self._state_dicts is None and module is not None:
            self._state_dicts = StateDicts(module, self._global_copy)

    @property
    def saves_global(self) -> bool:
        """True after `save_global`."""
        return self._state_dicts is not None

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
            members.require_alike(group, compiled.plan.params, compiled.params, settings, new=())
        # Before more groups open: a rank that raises would close them under the others.
        given_turns(self._outer, self._tensors())
        engine.current_plan.open_group()  # the ranks of the replica
        if engine.current_plan.group.num_ranks == 1:
            members.read_again()  # else the engine has compared them
        self._replicas = open_replicas(
            group,
            self._config,
            places=self.places,
            settings=self._steps.settings,
            frozen=self._frozen,
            parts=engine.current_plan.group.everyone if group.is_on_mesh else None,
        )
        is_of_copy = self._copied is not None and self.loads.follow() in (
            None,
            self.loads.values(),
        )
        self.reset()
        if self._copied is not None and is_of_copy:
            self._take(self._copied)
        self._copied, self._has_state = None, False

    @torch.inference_mode(False)
    @torch.no_grad()
    def reset(self) -> None:
        """Makes the replica's own parameters the global ones, and forgets the outer momentum."""
        self._require_own()
        self._engine.current_plan.wait_for_parameters()
        self.loads.follow()
        self._aside.drop()
        self._has_state = False
        if self._fragments is not None:
            self._fragments.arrive()
        self._restart()

    @torch.inference_mode(False)
    @torch.no_grad()
    def copied_state(self) -> Mapping[str, Any] | None:
        """Returns the state for a copy of the model, or None before the ranks have met.

        No collective call. On a mesh, an exchange that is on its way is left out: the row would
        have to gather it.
        """
        if self._replicas is None:
            return self._copied
        if self.loads.are_new and not self._is_shown:
            self._follow_loads()
        if self._replicas.row is None and not self.is_closed:
            self._fragments.arrive()
        return self._state()

    def begin_with(self, state: Mapping[str, Any] | None) -> None:
        """Begins with the state of the model of which this one's is a copy."""
        self._copied = state

    def _restart(self) -> None:
        assert self._replicas is not None  # the ranks have met
        tensors = self._tensors()
        # A choice holds: ranks would measure again together.
        self._turns = given_turns(self._outer, tensors) or self._turns
        self._fragments = Fragments(self._replicas, tensors, self._turns)

    def report(self) -> OuterReport:
        """Returns the times of the last exchanges on this rank."""
        return self._timings.report(
            self._turns,
            every=self._outer.every,
            num_exchanges=self.num_synchronizations,
            num_left_out=0 if self._replicas is None else self._replicas.num_left_out,
        )

    def close(self) -> None:
        """Waits for exchanges on their way, which other ranks need, and ends the threads."""
        self.is_closed = True
        self._aside.forget()
        if self._state_dicts is not None:
            self._state_dicts.close()
        if self._replicas is None:
            return
        with contextlib.suppress(RuntimeError):
            if self.all_ranks.is_alive:
                self._fragments.arrive()
        self._replicas.close()

    def own_state_dicts(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which state dicts have the replica's own tensors."""
        hooks = self._state_dicts
        return contextlib.nullcontext() if hooks is None else hooks.off()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _global_copy(self, part: nn.Module, key: str, tensor: Tensor) -> Tensor | None:
        """Returns a copy of a global value for a state dict; None if the replica's own is to be
        there. Never communicates."""
        if self._replicas is None or self._is_shown or self.loads.are_new:
            return None  # it is global, or was just loaded
        if not self._fragments.have_stepped:
            if self._steps.num_steps and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    "state_dict() has only this replica's own parameters: not every fragment was "
                    f"exchanged yet, after {self._steps.num_steps} steps.\n"
                    f"  outer.every={self._outer.every}, rank {self.all_ranks.rank}\n"
                    "  Train for more steps before the save, or set a smaller outer.every.",
                    stacklevel=2,
                )
            return None
        self._fragments.require_same()
        is_param = isinstance(tensor, nn.Parameter)
        return self._fragments.global_copy(tensor if is_param else (tables.own_buffers(part), key))

    # A step.

    def forward_begins(self, *, is_training: bool, is_compiled: bool) -> None:
        if is_training:
            self._begins()
            self._steps.forward_begins()

    def step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._steps.step_begins(optimizer, has_closure=has_closure(args, kwargs)):
            self._begins()

    def step_ends(self, optimizer: Optimizer) -> None:
        if self._steps.step_ends(optimizer):
            self._has_stepped()

    def unscaling_ends(self, optimizer: Optimizer, found: unscaling.Found) -> unscaling.Found:
        if self._steps.is_skipped(optimizer, found):
            self._begins()
            if self._steps.skip(optimizer):
                self._has_stepped()
        return found

    def _has_stepped(self) -> None:
        """Called after each step that counts."""
        try:
            self._exchange()
        except (Desync, NonFiniteGradient, PlanMismatch, ReplicaMismatch) as error:
            self.all_ranks.tell_places(error)
            raise

    @torch.inference_mode(False)
    @torch.no_grad()
    def _exchange(self) -> None:
        """Starts and ends the exchanges that are due."""
        step, group = self._steps.num_steps, self.all_ranks
        self._aside.drop()
        self._has_state = False
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
        self._comparisons.require_alike(step)
        self._fragments.require_all_of(self._engine.current_plan.hooks, rank=group.rank)
        if self._turns is None:
            self._timings.note_step()
            if self._timings.has_steps:
                self._choose()
        turns = self._turns
        if turns is None:
            return
        starting = self._fragments.starting(step)
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
        self._frozen.known = self._fragments.ids
        for part in starting:
            part.start(
                step,
                due=step + turns.delay,
                num_forwards=self._steps.num_forwards,
                is_stopping=self._stop.is_pending,
            )
            if not part.is_read_at_end:  # it has just read the exchange before
                self._stop.told_elsewhere(is_told=self._is_told(part))
            if turns.delay == 0:
                self._finish(part)

    def _finish(self, part: Fragment) -> None:
        """Takes the outer step of a fragment."""
        start_s = time.perf_counter()
        part.arrive()
        self._timings.note_exchange(part, exposed_s=time.perf_counter() - start_s)
        part.step()
        if part.is_read_at_end:
            self._stop.told_elsewhere(is_told=self._is_told(part))
        self.num_synchronizations += 1
        every = self._config.check_replicas_every
        if every is not None and self.num_synchronizations % every == 0:
            self._comparisons.start(part.layout.named(part.values), self._fragments.ids)

    def _is_told(self, part: Fragment) -> bool:
        """Returns True if a rank has asked all to stop in this exchange: on a mesh at any place."""
        group = self.all_ranks
        if not group.is_on_mesh:
            return part.is_stopping
        return any_rank(group.everyone, part.is_stopping, "the requests to stop")

    # Fragments.

    @property
    def _outer(self) -> Outer:
        assert self._config.outer is not None
        return self._config.outer

    def _tensors(self) -> dict[str, Tensor | BufferPlace]:
        return tensors_of(self._engine.current_plan, with_buffers=self._config.buffers != "off")

    def _choose(self) -> None:
        """Chooses fragments and delay from measurements; a collective call."""
        assert self._replicas is not None  # the ranks have met
        whole = next(iter(self._fragments), None)
        if whole is None:
            return
        self._turns, self._timings.reason = measured_turns(
            self._replicas, whole, step_us=self._timings.step_us
        )
        self._fragments = self._fragments.in_turns(self._turns)

    def _begins(self) -> None:
        """Called before a forward or a step: follows parameters that were loaded."""
        self.open_group()
        if self._own is not None and not self._is_shown:
            self._bring_back()  # synchronized() was interrupted twice
        if self.loads.are_new:
            self._follow_loads()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _follow_loads(self) -> None:
        """Makes loaded parameters the global ones, unless they belong to a state that was loaded,
        or are the same as before the load."""
        self._require_own()
        before = self.loads.follow()
        self._follow_tensors(self._fragments)
        if self._has_state:
            return
        now = self.loads.values()
        if now == before or self._are_global(now):
            return
        brought_back = self._aside.take(now)
        if brought_back is not None:
            self._fragments = brought_back
            self._follow_tensors(self._fragments)
            return
        self._aside.keep(before, self._fragments)
        self._restart()

    def _are_global(self, values: Values) -> bool:
        """Returns True if these are the values of the global parameters, which `save_global` has
        put into a state dict: training continues from there, with the same outer momentum."""
        if self._state_dicts is None or not self._fragments.have_stepped:
            return False
        found = map(self._fragments.global_copy, self.loads.present().values())
        copies = [copy for copy in found if copy is not None]
        return len(copies) == len(values) and values == values_of(copies)

    def _follow_tensors(self, fragments: Fragments) -> None:
        """Follows a load that has put other tensors in the place of parameters."""
        plan = self._engine.current_plan
        plan.is_stale = True
        plan.find_change()
        for param in fragments.follow(self.loads.present()):
            self._steps.replaced[id(param)] = weakref.ref(param)

    @torch.no_grad()
    def _bring_back(self) -> None:
        """Gives the model the replica's own tensors again."""
        if self._own is not None:
            self._fragments.write(self._own)
        self._own = None

    def _state(self) -> dict[str, Any]:
        return {
            "step": self._steps.num_steps,
            "num_forwards": self._steps.num_forwards,
            "num_synchronizations": self.num_synchronizations,
            **self._fragments.state(),
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        """Takes over a state; the fragments are new."""
        turns = turns_of(state)
        if turns is not None and self._turns is None:
            self._turns = turns
            self._fragments = self._fragments.in_turns(turns)
        self._fragments.take(state)
        self._steps.num_steps = state["step"]
        self._steps.num_forwards = state["num_forwards"]
        self._steps.settings.restart()
        self.num_synchronizations = state["num_synchronizations"]
        self._has_state = True

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
