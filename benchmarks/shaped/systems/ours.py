"""Undertow's DistributedDataParallel; options are those of its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress

from benchmarks.shaped.systems import Setting, System
from benchmarks.shaped.systems.plain import PlainSystem
from undertow import DistributedDataParallel, SyncConfig


class Ours(PlainSystem):
    wrapped: DistributedDataParallel

    def is_settled(self) -> bool:
        explained = self.wrapped.explain()
        return getattr(explained, "trials_are_over", True)  # another version of the library may have none

    def told(self) -> Mapping[str, str]:
        texts: dict[str, Callable[[], str]] = {
            "explain": lambda: str(self.wrapped.explain()),
            "report": lambda: str(self.wrapped.report()),
            "profile": lambda: self.wrapped.profile().to_json(),
        }
        found = {}
        for name, text in texts.items():
            with suppress(Exception):  # another version of the library, or a mode without one of them
                found[name] = text()
        return found


def build(setting: Setting) -> System:
    wrapped = DistributedDataParallel(setting.model, process_group=setting.group, config=SyncConfig(**setting.options))
    return Ours(wrapped, setting.model)
