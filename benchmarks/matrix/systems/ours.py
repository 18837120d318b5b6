"""Undertow's DistributedDataParallel; options are those of its config."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from benchmarks.matrix.systems import Setting, System
from benchmarks.matrix.systems.plain import PlainSystem
from undertow import DistributedDataParallel, PhaseError, SyncConfig


class Ours(PlainSystem):
    wrapped: DistributedDataParallel

    def facts(self) -> Mapping[str, Any]:
        report = self.wrapped.report()
        return {
            **super().facts(),
            "collectives": len(report.buckets),
            "version": version("undertow"),
            "decision": str(self.wrapped.explain()),
            "profile": self._profile(),
            "buckets": [
                [b.num_bytes, round(b.ready_ms, 2), round(b.launched_ms, 2), round(b.done_ms, 2)] for b in report.buckets
            ],
        }

    def close(self) -> None:
        self.wrapped.close()

    def _profile(self) -> str | None:
        try:
            return self.wrapped.profile().to_json()
        except PhaseError:
            return None


def build(setting: Setting) -> System:
    wrapped = DistributedDataParallel(setting.model, process_group=setting.group, config=SyncConfig(**setting.options))
    return Ours(wrapped, setting.model)
