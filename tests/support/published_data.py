"""Measurements that others have published and that are not part of this repository."""

import os
from pathlib import Path

import pytest

from support.project import ROOT

_VARIABLE = "UNDERTOW_PUBLISHED_DATA"


def published_file(name: str) -> Path:
    named = os.environ.get(_VARIABLE)
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not (folder / name).is_file():
        pytest.skip(f"{name} is not in {folder}; {_VARIABLE} names another folder")
    return folder / name
