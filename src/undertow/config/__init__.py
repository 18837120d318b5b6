"""Settings: frozen and validated."""

from undertow.config.experts import ExpertGroup
from undertow.config.outer import Outer
from undertow.config.refusals import REFUSED, refused
from undertow.config.sync_config import SyncConfig, replaced, require_settings

__all__ = [
    "REFUSED",
    "ExpertGroup",
    "Outer",
    "SyncConfig",
    "refused",
    "replaced",
    "require_settings",
]
