"""Undertow as another checkout has it, beside this one in the same processes; `benchmarks.older` makes the packages."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

from benchmarks.matrix.systems import Setting, System


def build(setting: Setting) -> System:
    """Builds the system of the module `module` in the folder `folder`; all other options are those of its config."""
    options = dict(setting.options)
    sys.path.insert(0, options.pop("folder"))
    module = importlib.import_module(options.pop("module"))
    system: System = module.build(replace(setting, options=options))
    return system
