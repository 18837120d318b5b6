"""The settings that optimizers step with. Replicas compare them in their exchanges."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from undertow.engine.params import ModuleParams
from undertow.engine.step_settings import Settings, digest_of, settings_differ, text_of
from undertow.errors import PlanMismatch
from undertow.ranks.answers import MOST_TEXTS
from undertow.ranks.transport import OwnGroup

_OWN_NUMBERS = (
    "If the optimizer itself changes this number, take it out of those that are compared: "
    "del optimizer.defaults[NAME], on every rank."
)


class StepSettings:
    """The settings of each step that has counted.

    `digest` is the same on ranks whose steps since the last exchange had the same settings, in
    whatever order several optimizers have stepped. It is 0, which is not compared, if a scaler has
    skipped one of these steps.

    `skips` is the same on ranks whose scalers have skipped the same number of steps of each
    optimizer. Only these ranks are compared: schedulers often wait for a skipped step, so the
    schedule of the others stays some steps behind.
    """

    def __init__(self, members: ModuleParams) -> None:
        self.digest = 0
        self.skips = 0
        self._members = members  # which name the parameters
        self._has_skipped = False  # since the last exchange
        self._now: Settings = ()  # since the last step that has counted
        # By the number of a step, and the skips until then; the ranks have not compared them yet.
        self._of_steps: dict[tuple[int, int], Settings] = {}

    @property
    def names(self) -> Mapping[int, str]:
        """The names of parameters, by id."""
        return self._members.names

    def add(self, settings: Settings) -> None:
        """Adds the settings of an optimizer that has stepped."""
        self._now += settings

    def skip(self, params: Collection[int]) -> None:
        """Called when a scaler skips a step of an optimizer with these parameters, by id."""
        self.skips += zlib.crc32(min(self.names[param] for param in params).encode())
        self._has_skipped = True
        self.digest = 0

    def step_ends(self, number: int) -> None:
        """Called when a step counts, with its number."""
        self._of_steps[number, self.skips] = self._now
        if not self._has_skipped:
            self.digest = zlib.crc32(b"%d" % digest_of(self._now), self.digest)
        self._now = ()

    def exchange_begins(self) -> None:
        """Called when the ranks have been told the digest."""
        self.digest = 0
        self._has_skipped = False

    def are_same_until(self, number: int) -> None:
        """Called when the ranks have compared the steps up to this one."""
        for step in [step for step in self._of_steps if step[0] <= number]:
            del self._of_steps[step]

    def restart(self, *, skips: int) -> None:
        """Forgets all steps: every rank continues from a saved state, with the skips until then."""
        self.exchange_begins()
        self.skips = skips
        self._of_steps.clear()

    def difference(self, group: OwnGroup, *, where: str) -> PlanMismatch:
        """Returns the error of ranks whose digests differ; every rank calls this."""
        mine = {step: digest_of(found) for step, found in self._of_steps.items()}
        lines = [f"{number} {skips} {digest}" for (number, skips), digest in mine.items()]
        # Replicas that have skipped different steps have different texts.
        told = group.watch.ask("\n".join(lines), of=group.names, most=MOST_TEXTS)
        step = _first_that_differs([one.text for one in told if one.text is not None])
        if step is not None:
            where = f"{where}, step {step[0]}"
        first = () if step is None else self._of_steps.get(step, ())
        # A rank without this step has no settings to tell, and is not compared.
        found = group.watch.ask(text_of(first), of=group.names)
        # The skips stay: a caller may catch the error and train on.
        self.digest = 0
        self._of_steps.clear()
        return settings_differ(found, where=where, remedy=_OWN_NUMBERS)


def _first_that_differs(texts: Iterable[str]) -> tuple[int, int] | None:
    """Returns the first step with different digests.

    Each text has lines: the number of a step, the skips until then, and the digest.
    """
    of_steps: dict[tuple[int, int], set[int]] = defaultdict(set)
    for line in chain.from_iterable(text.splitlines() for text in texts):
        number, skips, digest = map(int, line.split())
        of_steps[number, skips].add(digest)
    differing = [step for step, digests in of_steps.items() if len(digests) > 1]
    return min(differing, default=None)
