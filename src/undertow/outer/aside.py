"""The state from before a load, until a step shows that training continues from that load."""

from __future__ import annotations

from undertow.outer.fragments import Fragments
from undertow.outer.loads import Values


class Aside:
    """The fragments from before the first of several loads between two steps, and the values that
    the replica's own parameters had then: a later load may bring them back."""

    def __init__(self) -> None:
        self._fragments: Fragments | None = None
        self._values: Values | None = None  # None: they are not known

    def keep(self, values: Values | None, fragments: Fragments) -> None:
        """Called when a load has changed the parameters."""
        if self._fragments is None:
            self._fragments, self._values = fragments, values

    def take(self, values: Values) -> Fragments | None:
        """Returns the fragments if a load has brought these values back, and forgets them."""
        fragments = self._fragments
        if fragments is None or self._values != values:
            return None
        self.forget()
        return fragments

    def drop(self) -> None:
        """Called when training continues from the load."""
        fragments = self._fragments
        self.forget()
        if fragments is not None:
            fragments.arrive()  # other ranks may need what this one sends

    def forget(self) -> None:
        self._fragments = self._values = None
