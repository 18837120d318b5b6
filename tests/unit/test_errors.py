"""Errors: the page that a traceback names."""

import pickle
import traceback

import pytest

from support.project import ROOT
from undertow import errors

CLASSES = [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("cls", CLASSES)
def test_a_traceback_ends_with_a_page_that_exists(cls: type[errors.UndertowError]) -> None:
    error = pickle.loads(pickle.dumps(cls("a", where="b", remedy="c")))  # an error may come from another process
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    assert (str(error), lines[1:]) == ("a\n  b\n  c", ["  b", "  c", f"See {cls.page}."])
    assert (ROOT / cls.page).exists()
