"""Synchronizes replicas that train alone, fragment by fragment (docs/design/outer.md).

`OuterSync` counts steps and follows loads; `ReplicaExchanges` runs the exchanges of a step.

step       n             n+1    ...     n + delay
fragment   D = G - own   the mean of D over replicas travels   G steps, own = G
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from undertow.config import SyncConfig
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
from undertow.outer.fragments import Fragments
from undertow.outer.loads import OuterLoads, Values, values_of
from undertow.outer.replica_exchanges import ReplicaExchanges
from undertow.outer.state_dicts import StateDicts
from undertow.outer.steps import StepCounter
from undertow.plan.fragments import layers_of
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
        self.all_ranks = all_ranks
        self._engine = engine
        self._exchanges = ReplicaExchanges(all_ranks, engine, config)
        self._is_shown = False  # the model has the global parameters
        # The replica's own tensors, while the model has others in their places.
        self._own: list[Tensor] | None = None
        self._copied: Mapping[str, Any] | None = None  # a state to begin with
        self._has_state = False  # was loaded, and no step has followed
        self._aside = Aside()
        self.is_closed = False
        self._state_dicts: StateDicts | None = None  # of `save_global`
        self._has_warned = False
        self._module = weakref.ref(private.unwrapped(module))
        self._steps = steps = StepCounter(engine)
        self.loads = OuterLoads(engine.current_plan)  # into the module
        _of_modules[private.unwrapped(module)] = weakref.ref(self)
        all_ranks.here.steps = lambda: (steps.num_steps, True)

    # Calls of users.

    @property
    def num_synchronizations(self) -> int:
        """The outer steps of fragments so far."""
        return self._exchanges.num_synchronizations

    def step(self) -> None:
        """Counts a step of an optimizer that does not derive from torch.optim.Optimizer.

        A collective call if an exchange is due. Other optimizers are counted without it.
        """
        self._begins(may_have_stepped=True)
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
        fragments = self._exchanges.fragments
        fragments.require_same()
        own = fragments.own()
        try:
            self._is_shown, self._own = True, own
            fragments.write([fragment.values for fragment in fragments])
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
        step. All ranks have the same state, except for the steps that their scalers have skipped.

        Raises Desync or ReplicaMismatch on every rank, if ranks differ in an exchange.
        """
        self._settle()
        self._exchanges.fragments.arrive()
        self._exchanges.fragments.require_same()
        return self._state()

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a state of `state_dict` from the same step on every rank.

        The replica's own parameters, and the state of its optimizer, are loaded elsewhere, before
        or after: a load into the module belongs to this state until a step follows.

        Raises:
            CheckpointError: If the state is of another model, or of other fragments with an
                exchange on its way.
        """
        self._settle()
        self._exchanges.forget_turns()
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
        exchanges = self._exchanges
        turns, every = exchanges.turns, exchanges.outer.every
        text = "fragments are chosen after the first steps"
        if turns is not None:
            text = f"{turns.fragments} fragments, delay {turns.delay} ({exchanges.timings.reason})"
        num_layers = len(layers_of(list(exchanges.tensors())))
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
        if self._exchanges.replicas is not None:
            return
        self._exchanges.open(self.places, self._steps.settings)
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
        if self._exchanges.fragments is not None:
            self._exchanges.fragments.arrive()
        self._exchanges.restart()

    @torch.inference_mode(False)
    @torch.no_grad()
    def copied_state(self) -> Mapping[str, Any] | None:
        """Returns the state for a copy of the model, or None before the ranks have met or trained.

        No collective call. On a mesh, an exchange that is on its way is left out: the row would
        have to gather it.
        """
        if self._exchanges.replicas is None:
            return self._copied
        if self.loads.are_new and not self._is_shown:
            self._follow_loads()
        if not self._exchanges.fragments.have_begun:
            return None  # a copy begins with its own parameters, whatever is written to them
        if self._exchanges.replicas.row is None and not self.is_closed:
            self._exchanges.fragments.arrive()
        return self._state()

    def begin_with(self, state: Mapping[str, Any] | None) -> None:
        """Begins with the state of the model of which this one's is a copy."""
        self._copied = state

    def report(self) -> OuterReport:
        """Returns the times of the last exchanges on this rank."""
        return self._exchanges.report()

    def close(self) -> None:
        """Waits for exchanges on their way, which other ranks need, and ends the threads."""
        self.is_closed = True
        self._aside.forget()
        if self._state_dicts is not None:
            self._state_dicts.close()
        if self._exchanges.replicas is None:
            return
        with contextlib.suppress(RuntimeError):
            if self.all_ranks.is_alive:
                self._exchanges.fragments.arrive()
        self._exchanges.replicas.close()

    def own_state_dicts(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which state dicts have the replica's own tensors."""
        hooks = self._state_dicts
        return contextlib.nullcontext() if hooks is None else hooks.off()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _global_copy(self, part: nn.Module, key: str, tensor: Tensor) -> Tensor | None:
        """Returns a copy of a global value for a state dict; None if the replica's own is to be
        there. Never communicates."""
        if self._exchanges.replicas is None or self._is_shown or self.loads.are_new:
            return None  # it is global, or was just loaded
        fragments = self._exchanges.fragments
        if not fragments.have_stepped:
            if self._steps.num_steps and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    "state_dict() has only this replica's own parameters: not every fragment was "
                    f"exchanged yet, after {self._steps.num_steps} steps.\n"
                    f"  outer.every={self._exchanges.outer.every}, rank {self.all_ranks.rank}\n"
                    "  Train for more steps before the save, or set a smaller outer.every.",
                    stacklevel=2,
                )
            return None
        fragments.require_same()
        is_param = isinstance(tensor, nn.Parameter)
        return fragments.global_copy(tensor if is_param else (tables.own_buffers(part), key))

    # A step.

    def forward_begins(self) -> None:
        """Called before every training forward of the module."""
        self._begins(may_have_stepped=self._steps.has_forward)
        self._steps.forward_begins()

    def step_begins(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        is_own = self._steps.step_begins(
            optimizer,
            has_closure=has_closure(args, kwargs),
            may_make_state=kwargs == {"closure": None},  # by torch.distributed.checkpoint
        )
        if is_own:
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
        step = self._steps.num_steps
        self._aside.drop()
        self._has_state = False
        require(
            not self._is_shown,
            "an optimizer has stepped inside synchronized(): the step is lost, because the "
            "replica's own parameters come back.",
            where=f"step {step}, rank {self.all_ranks.rank}",
            remedy="Train outside of it.",
            error=PhaseError,
        )
        self._exchanges.run(step, num_forwards=self._steps.num_forwards)

    # Loads, and the state.

    def _begins(self, *, may_have_stepped: bool = False) -> None:
        """Called before a forward or a step: follows parameters that were loaded.

        `may_have_stepped`: an optimizer that is not torch's, whose steps no hook tells of, may have
        stepped since the last step that counted.
        """
        self.open_group()
        if self._own is not None and not self._is_shown:
            self._bring_back()  # synchronized() was interrupted twice
        if self.loads.are_new:
            self._follow_loads()
        if not (may_have_stepped or self._steps.is_begun or self._is_shown):
            self._exchanges.follow_writes()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _follow_loads(self) -> None:
        """Makes loaded parameters the global ones, unless they belong to a state that was loaded,
        or are the same as before the load."""
        self._require_own()
        before = self.loads.follow()
        self._follow_tensors(self._exchanges.fragments)
        if self._has_state:
            return
        now = self.loads.values()
        if now == before or self._are_global(now):
            return
        brought_back = self._aside.take(now)
        if brought_back is not None:
            self._exchanges.bring_back(brought_back)
            self._follow_tensors(brought_back)
            return
        self._aside.keep(before, self._exchanges.fragments)
        self._exchanges.restart()

    def _are_global(self, values: Values) -> bool:
        """Returns True if these are the values of the global parameters, which `save_global` has
        put into a state dict: training continues from there, with the same outer momentum."""
        if self._state_dicts is None or not self._exchanges.fragments.have_stepped:
            return False
        found = map(self._exchanges.fragments.global_copy, self.loads.present().values())
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
            self._exchanges.fragments.write(self._own)
        self._own = None

    def _state(self) -> dict[str, Any]:
        return {
            "step": self._steps.num_steps,
            "num_forwards": self._steps.num_forwards,
            "num_synchronizations": self.num_synchronizations,
            "skips": self._steps.settings.skips,
            **self._exchanges.fragments.state(),
        }

    def _take(self, state: Mapping[str, Any]) -> None:
        """Takes over a state; the fragments are new."""
        self._exchanges.take(state)
        self._steps.num_steps = state["step"]
        self._steps.num_forwards = state["num_forwards"]
        self._steps.settings.restart(skips=state.get("skips", 0))
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
