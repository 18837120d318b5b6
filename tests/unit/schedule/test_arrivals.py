"""The hook in C does what the one in Python does."""

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.project import ROOT
from undertow.schedule.tracker import Hook, PythonHook

pytestmark = pytest.mark.skipif(Hook is PythonHook, reason="the hook in C is not compiled: it needs cc and Python.h")
KINDS = {"in C": Hook, "in Python": PythonHook}


class Log:
    """Stands for Arrivals: notes every look, and what the hook has seen until then."""

    def __init__(self, then: Callable[[Any], object] = lambda _hook: None) -> None:
        self.looks: list[tuple[object, int, int]] = []
        self._then = then

    def look(self, param: object, hooks: tuple[Any, ...]) -> object:
        (hook,) = hooks
        self.looks.append((param, len(hook.seen), hook.looks_at))
        self._then(hook)
        return "not to be returned by the hook"


@given(st.lists(st.one_of(st.integers(-1, 4), st.tuples(st.integers()), st.just("reset"))))
def test_both_list_the_same_and_look_at_the_same(program: list[Any]) -> None:
    """Integers set `looks_at`, tuples arrive: an argument that is a tuple stays one."""
    found = []
    for kind in (Hook, PythonHook):
        log: Any = Log()
        hook = kind(log)
        for what in program:
            if what == "reset":
                hook.seen.clear()
            elif isinstance(what, int):
                hook.looks_at = what
            else:
                assert hook.arrive(what) is None  # type: ignore[func-returns-value]  # torch would refuse another value
        found.append((log.looks, hook.seen, hook.looks_at, hook.arrivals is log))
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_hook_tells_its_bucket_passes_errors_on_and_is_freed(kind: Any) -> None:
    def fail(_hook: Any) -> None:
        raise KeyError("look")

    log = Log(fail)
    hook = type("Bucket", (kind,), {})(log)
    assert hook.arrive.__self__ is hook
    with pytest.raises(KeyError, match="look"):
        hook.arrive("param")
    assert hook.seen == ["param"]
    log.hook = hook  # type: ignore[attr-defined]  # a circle
    hook.seen.append(hook.arrive)  # and another
    freed = weakref.ref(log)
    del log, hook
    gc.collect()
    assert freed() is None


def test_the_hook_in_c_refuses_a_second_start_and_does_nothing_without_one() -> None:
    made: Any = Hook.__new__(Hook)
    assert made.arrive(1) is None
    with pytest.raises(AttributeError):
        _ = made.seen
    hook: Any = Hook(Log())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="before"):
        hook.__init__(Log())
    with pytest.raises(TypeError):
        Hook()  # type: ignore[call-arg]


WITHOUT = "import sys; sys.modules['undertow.schedule._arrivals'] = None"
CHECK = "from undertow.schedule import tracker; assert tracker.Hook is tracker.PythonHook"


@pytest.mark.slow
def test_without_the_hook_in_c_tests_of_gradients_pass(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)  # for ranks too
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    tests = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        ROOT / "tests/unit/schedule",
        ROOT / "tests/dist/test_programs.py",
    )
    for arguments in (("-c", CHECK), tests):
        done = subprocess.run(
            (sys.executable, *arguments), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
