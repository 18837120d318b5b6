"""The settings that optimizers step with. Replicas compare them in their exchanges."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from undertow.engine.params import ModuleParams
from undertow.engine.step_settings import Settings, digest_of, settings_differ, text_of
from undertow.errors import PlanMismatch
from undertow.ranks.transport import OwnGroup


class StepSettings:
    """The settings of each step that has counted.

    `digest` is the same on ranks whose steps had the same settings, in whatever order several
    optimizers have stepped. It is 0, which is not compared, on a replica whose scaler has skipped a
    step: schedulers often wait then, so its learning rate comes a step later.
    """

    def __init__(self, members: ModuleParams) -> None:
        self.digest = 0
        self._members = members  # which name the parameters
        self._has_skipped = False
        self._now: Settings = ()  # since the last step that has counted
        self._of_steps: dict[int, Settings] = {}  # that the ranks have not compared yet

    @property
    def names(self) -> Mapping[int, str]:
        """The names of parameters, by id."""
        return self._members.names

    def add(self, settings: Settings) -> None:
        """Adds the settings of an optimizer that has stepped."""
        self._now += settings

    def skip(self) -> None:
        """Called when a scaler skips a step of this replica."""
        self._has_skipped = True
        self.digest = 0

    def step_ends(self, number: int) -> None:
        """Called when a step counts, with its number."""
        if self._has_skipped:
            self._now = ()
            return
        self._of_steps[number] = self._now
        self.digest = zlib.crc32(b"%d" % digest_of(self._now), self.digest)
        self._now = ()

    def are_same_until(self, number: int) -> None:
        """Called when the ranks have compared the steps up to this one."""
        for step in [step for step in self._of_steps if step <= number]:
            del self._of_steps[step]

    def restart(self) -> None:
        """Forgets all steps: every rank continues from a saved state."""
        self.digest = 0
        self._of_steps.clear()

    def difference(self, group: OwnGroup, *, where: str) -> PlanMismatch:
        """Returns the error of ranks whose digests differ; every rank calls this."""
        compared = {} if self._has_skipped else self._of_steps
        mine = {f"{step}:{digest_of(found)}" for step, found in compared.items()}
        steps = sorted(int(text.partition(":")[0]) for text in not_on_all(group, mine))
        if steps:
            where = f"{where}, step {steps[0]}"
        first = self._of_steps.get(steps[0], ()) if steps else ()
        found = group.watch.ask(text_of(first), of=group.names)
        self.restart()
        return settings_differ(found, where=where)


def not_on_all(group: OwnGroup, mine: set[str]) -> set[str]:
    """Returns the lines that one of two ranks has and the other has not, the lowest ones that
    differ; every rank calls this, and is not compared if it has no lines."""
    found = group.watch.ask("\n".join(sorted(mine)), of=group.names)
    of_ranks = [set(one.text.splitlines()) for one in found if one.text is not None]
    return of_ranks[0] ^ of_ranks[1] if len(of_ranks) > 1 else set()
