"""The exchanges between replicas: which fragments start and end after a step, and their times."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from undertow.config import SyncConfig
from undertow.engine.engine import Engine
from undertow.errors import ConfigError
from undertow.mesh.local_tensors import in_same_memory
from undertow.outer.comparisons import Comparisons
from undertow.outer.fragment import Fragment
from undertow.outer.fragment_layout import BufferPlace
from undertow.outer.fragments import Fragments, tensors_of, turns_of
from undertow.outer.frozen import Frozen
from undertow.outer.measured import Timings, given_turns, measured_turns
from undertow.outer.replicas import Replicas, open_replicas
from undertow.outer.step_settings import StepSettings
from undertow.plan.fragments import Turns
from undertow.ranks.agreement import any_rank, surroundings
from undertow.ranks.transport import OwnGroup
from undertow.trace import OuterReport


class ReplicaExchanges:
    """The fragments of a model and their exchanges; before `open` there are none."""

    def __init__(self, all_ranks: OwnGroup, engine: Engine, config: SyncConfig) -> None:
        assert config.outer is not None  # else this is not made
        self.num_synchronizations = 0  # outer steps of fragments
        self.replicas: Replicas | None = None  # until the ranks have met
        self.fragments: Fragments = None  # type: ignore[assignment]
        self.turns: Turns | None = None  # None until they are chosen
        self.outer = config.outer
        self.timings = Timings(config.outer)
        self._all_ranks, self._engine, self._config = all_ranks, engine, config
        self._stop = engine.checks.stop
        self._comparisons = Comparisons(all_ranks, engine.current_plan.members)
        self._frozen = Frozen(
            engine.current_plan.members, is_needed=config.check_replicas_every is None
        )

    def tensors(self) -> dict[str, Tensor | BufferPlace]:
        """Returns the tensors that fragments exchange, by name."""
        return tensors_of(self._engine.current_plan, with_buffers=self._config.buffers != "off")

    def open(self, places: list[list[int]], step_settings: StepSettings) -> None:
        """Creates the groups and compares the ranks; a collective call."""
        group, engine = self._all_ranks, self._engine
        group.open()
        members, compiled = engine.current_plan.members, engine.current_plan.compiled
        of_outer = {f"outer.{name}": value for name, value in self.outer.to_dict().items()}
        settings = {**surroundings(group), **self._config.to_dict(), "outer": None, **of_outer}
        if group.num_ranks > 1:
            members.require_alike(group, compiled.plan.params, compiled.params, settings, new=())
        # Before more groups open: a rank that raises would close them under the others.
        given_turns(self.outer, self.tensors())
        _require_apart(engine.current_plan.hooks.named_params)
        engine.current_plan.open_group()  # the ranks of the replica
        if engine.current_plan.group.num_ranks == 1:
            members.read_again()  # else the engine has compared them
        self.replicas = open_replicas(
            group,
            self._config,
            places=places,
            settings=step_settings,
            frozen=self._frozen,
            parts=engine.current_plan.group.everyone if group.is_on_mesh else None,
        )

    def restart(self) -> None:
        """Makes new fragments, of the replica's own parameters."""
        assert self.replicas is not None  # the ranks have met
        tensors = self.tensors()
        # A choice holds: ranks would measure again together.
        self.turns = given_turns(self.outer, tensors) or self.turns
        self.fragments = Fragments(self.replicas, tensors, self.turns)

    @torch.inference_mode(False)
    @torch.no_grad()
    def follow_writes(self) -> None:
        """Restarts if the replica's own parameters were written in place before training, as by
        `dcp.load` or `module.apply`: no hook tells of it."""
        if self.fragments.have_begun:
            return
        self._engine.current_plan.wait_for_parameters()
        if not self.fragments.are_own():
            self.restart()

    def forget_turns(self) -> None:
        """Has the turns chosen again."""
        self.turns = None

    def bring_back(self, fragments: Fragments) -> None:
        """Goes on with fragments that were put aside."""
        self.fragments = fragments

    def take(self, state: Mapping[str, Any]) -> None:
        """Takes over a state; the fragments are new."""
        turns = turns_of(state)
        if turns is not None and self.turns is None:
            self._take_turns(turns)
        self.fragments.take(state)
        self.num_synchronizations = state["num_synchronizations"]

    def _take_turns(self, turns: Turns) -> None:
        """Has fragments take other turns, with the same global parameters."""
        self.turns = turns
        self.fragments = self.fragments.in_turns(turns)

    def run(self, step: int, *, num_forwards: int) -> None:
        """Starts and ends the exchanges that are due after a step."""
        group = self._all_ranks
        group.here.thread = threading.get_ident()
        group.watch.check()
        self._comparisons.require_alike(step)
        self.fragments.require_all_of(self._engine.current_plan.hooks, rank=group.rank)
        self.fragments.have_begun = True
        if self.turns is None:
            self.timings.note_step()
            if self.timings.has_steps:
                self._choose()
        turns = self.turns
        if turns is None:
            return
        starting = self.fragments.starting(step)
        # After a resume with another `every`, a fragment may start before it is due.
        due = [
            part
            for part in self.fragments
            if part.is_due(step) or (part in starting and part.flight is not None)
        ]
        if due or starting:
            self._engine.current_plan.wait_for_parameters()
        for part in due:
            self._finish(part)
        self._frozen.known = self.fragments.ids
        for part in starting:
            part.start(
                step,
                due=step + turns.delay,
                num_forwards=num_forwards,
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
        self.timings.note_exchange(part, exposed_s=time.perf_counter() - start_s)
        part.step()
        if part.is_read_at_end:
            self._stop.told_elsewhere(is_told=self._is_told(part))
        self.num_synchronizations += 1
        every = self._config.check_replicas_every
        if every is not None and self.num_synchronizations % every == 0:
            self._comparisons.start(part.layout.named(part.values), self.fragments.ids)

    def _is_told(self, part: Fragment) -> bool:
        """Returns True if a rank has asked all to stop in this exchange: on a mesh at any place."""
        group = self._all_ranks
        if not group.is_on_mesh:
            return part.is_stopping
        return any_rank(group.everyone, part.is_stopping, "the requests to stop")

    def _choose(self) -> None:
        """Chooses fragments and delay from measurements; a collective call."""
        assert self.replicas is not None  # the ranks have met
        whole = next(iter(self.fragments), None)
        if whole is None:
            return
        turns, self.timings.reason = measured_turns(
            self.replicas, whole, step_us=self.timings.step_us
        )
        self._take_turns(turns)

    def report(self) -> OuterReport:
        """Returns the times of the last exchanges on this rank."""
        return self.timings.report(
            self.turns,
            every=self.outer.every,
            num_exchanges=self.num_synchronizations,
            num_left_out=0 if self.replicas is None else self.replicas.num_left_out,
        )


def _require_apart(named_params: Sequence[tuple[str, Tensor]]) -> None:
    """Raises ConfigError if two parameters share memory: each would take an outer step."""
    shared = in_same_memory(param for _, param in named_params)
    if shared is not None:
        names = " and ".join(repr(named_params[index][0]) for index in shared)
        raise ConfigError(
            f"parameters {names} lie in the same memory: outer synchronization would update each "
            "by itself.",
            where="SyncConfig(outer=...)",
            remedy="Make them one parameter (second.weight = first.weight).",
        )
