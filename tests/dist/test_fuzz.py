"""Checkpoints, plans, profiles, settings and messages changed at random: our errors or success, and no other file is touched.

More than the few of every day, or those of --thorough: FUZZ_CASES=10000 make test ARGS="tests/dist/test_fuzz.py --timeout 0"
"""

import contextlib
import functools
import io
import json
import logging
import os
import random
import resource
import shutil
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.alike import of_all_ranks
from support.checkpoints import Setup, require_equal, train, trained_by, whole_state
from support.inside import hearing_rank
from support.mutations import mutate_checkpoint, mutated_bytes, mutated_json
from support.ranks import in_ranks
from undertow import CheckpointError, load_checkpoint, save_checkpoint
from undertow.errors import ConfigError
from undertow.lab.cli.plan import show_plan
from undertow.lab.profile import Profile, profile_from_file, profile_from_json
from undertow.lab.what_if import WhatIf
from undertow.plan import ParamSpec, Plan, plan_from_groups

_ACTS = (
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "shutil."),
    *("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "ctypes.", "pty.", "webbrowser."),
)
_PROGRAMS = [Path(folder).resolve() for folder in sys.path if folder]


class Watch:
    """What this thread does while it is watched, besides reading files of one folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._thread = threading.get_ident()
        self.seen: list[str] = []
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def only_reading(self, folder: Path) -> Iterator[None]:
        self._folder = folder
        try:
            yield
        finally:
            self._folder = None

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self._folder is None or threading.get_ident() != self._thread:
            return
        if event == "open" and not isinstance(args[0], int):
            file, mode, flags = args
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            path = Path(os.fsdecode(file)).resolve()
            is_program = path.suffix in (".py", ".pyc", ".so") and any(map(path.is_relative_to, _PROGRAMS))  # imported late
            if writes or not (is_program or path.is_relative_to(self._folder)):
                self.seen.append(f"open{(file, mode, flags)}")
        elif event.startswith(_ACTS):
            self.seen.append(f"{event}{args}")


watch = functools.cache(Watch)  # of this process: a hook stays for ever


class Fuzz:
    """Cases of one kind: how they ended, and which should not have ended so."""

    def __init__(self, error: type[Exception]) -> None:
        # A file of a few bytes that asks for gigabytes is an error, of this process and not of the machine.
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (2 << 30), resource.RLIM_INFINITY))
        self.error = error
        self.seen, self.problems = Counter[str](), list[str]()

    def ends(self, call: Callable[[], object]) -> str:
        """How the call ends, and what it does besides reading."""
        try:
            call()
            found = "success"
        except self.error as error:
            text = str(error)
            found = f"{self.error.__name__}: {text}" if text.replace("\n", "").isprintable() else f"a text that steers: {text!r}"
        except Exception:
            found = traceback.format_exc()
        return found + "".join(f" {watch().seen.pop(0)}" for _ in range(len(watch().seen)))

    def count(self, name: str, found: str, *, is_right: bool, case: object) -> None:
        self.seen[f"{name}: {found.partition(':')[0]}"] += 1
        if not is_right:
            self.problems.append(f"{name}: {found[-900:]} {case!r}"[:3000])


def checkpoints(folder: Path, num_cases: int) -> Fuzz:
    """Two ranks load what the first of them has changed: with one error, or none."""
    fuzz, rank = Fuzz(CheckpointError), dist.get_rank()
    saved, other, case = folder / "saved", folder / "other", folder / "case" / "checkpoint"
    with trained_by(Setup()) as (model, optimizer):
        train(Setup(), model, optimizer, steps=range(1))
        for path in (saved, other):
            save_checkpoint(path, model, optimizer, extra={"step": 1, "of": path.name})
            load_checkpoint(path, model, optimizer)  # which imports what there is to import
        known = states(model, optimizer)
        for number in range(num_cases):
            kind = ""
            if rank == 0:
                shutil.rmtree(case, ignore_errors=True)
                shutil.copytree(saved, case)
                kind = mutate_checkpoint(random.Random(f"0/{number}"), case, other=folder / "other")
            kind = of_all_ranks(kind)[0]
            with watch().only_reading(case):
                found = fuzz.ends(lambda: load_checkpoint(case, model, optimizer))
            if found == "success":
                load_checkpoint(saved, model, optimizer)
            require_equal(states(model, optimizer), known)  # an error has changed nothing
            of_both = of_all_ranks(found)
            is_right = of_both[0] == of_both[1] and found.startswith(("success", "CheckpointError")) and " open" not in found
            fuzz.count(kind, found, is_right=is_right, case=(number, of_both))
    return fuzz


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    """Values of tensors: settings that a changed index added stay in the groups."""
    whole = whole_state(model, optimizer)
    return {"model": whole["model"], "state": whole["optimizer"]["state"]}


SPECS = [
    ParamSpec(name="layer.weight", shape=(64, 3), dtype="float32", itemsize=4),
    ParamSpec(name="layer.bias", shape=(64,), dtype="float32", itemsize=4),
    ParamSpec(name="half", shape=(), dtype="bfloat16", itemsize=2, own_dtype="float32", is_sparse=True),
]
PLAN = plan_from_groups(SPECS, [(1, 0), (2,)], num_ranks=2)
CURVES = '"costs": {"all_reduce": [[1000, 10], [1e6, 500.5]], "all_gather": [[1000, 10]], "reduce_scatter": [[1000, 10]]}, '
PROFILE = Profile(
    name="fuzz",
    params=tuple(SPECS),
    ready_us=(10.5, 20.0, 5.0),
    forward_us=10.0,
    backward_us=20.0,
    num_ranks=2,
    groups=PLAN.groups,
    step_us=60.0,
).to_json()


def shown(text: str, folder: Path) -> None:
    """As `undertow plan` shows it."""
    path = folder / "model.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape" if "\udcff" in text else "surrogatepass"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), watch().only_reading(folder):
        what_if = WhatIf.of(profile_from_file(path))
        show_plan(what_if, bucket_cap_mb=None, is_json=False, has_schedule=False)
    assert printed.getvalue().replace("\n", "").isprintable()


def read_again(text: str, read: Callable[[str], Any]) -> None:
    found = read(text)
    assert read(found.to_json()) == found


JSON: dict[str, tuple[str, Callable[[str, Path], None]]] = {
    "plan": (PLAN.to_json(), lambda text, _: read_again(text, Plan.from_json)),
    "profile": (
        PROFILE.replace('"params"', f'{CURVES}"params"', 1),
        lambda text, _: read_again(text, lambda text: profile_from_json(text, "run.json")),
    ),
    "shown profile": (PROFILE.replace('"params"', f'{CURVES}"params"', 1), shown),
}


def texts(folder: Path, num_cases: int) -> Fuzz:
    """Plans, settings, profiles and tables, in turn."""
    fuzz = Fuzz(ConfigError)
    for text, use in JSON.values():
        use(text, folder)
    for number in range(num_cases):
        kind = list(JSON)[number % len(JSON)]
        text, use = JSON[kind]
        changed = mutated_json(random.Random(f"0/{number}"), text)
        found = fuzz.ends(lambda: use(changed, folder))  # noqa: B023  # called at once
        fuzz.count(kind, found, is_right=found == "success" or found.startswith("ConfigError"), case=(number, changed))
    return fuzz


CALLS = [["bucket 1", [[0, 1, 1]], 3]]
QUERY = {"number": 0, "asker": 0, "query": 0, "depth": 0, "about": CALLS, "is_about_calls": False}
TABLE = {
    "entries": [[3, "bucket 1", "", [[0, 0, 1]], 2.5, 0], [3, "", "in backward\na.py, line 1", [[1, 1, 1]], 0.0, 1]],
    "calls": [["bucket 1", [], 3, [[0, 0, 1]]]],
    "lacked": CALLS,
    "still": [[0, 0, 1]],
}
FAULT = {"error": "PeerFailed", "what": "gone", "remedy": "mend", "told": ""}
MESSAGES: list[dict[str, Any]] = [
    {"kind": "meets", "number": 0},
    {"kind": "fails", **FAULT},
    {"kind": "fails", "number": 0, **FAULT},
    {"kind": "leaves", **FAULT},
    {"kind": "leaves", "number": 0, **FAULT},
    {"kind": "gathers", "number": 0, "count": 1, "step": 3},
    {"kind": "asks", **QUERY},
    {"kind": "stands", "number": 0, "text": "in the optimizer"},
    {"kind": "does", **QUERY, **TABLE},
    {"kind": "answers", **QUERY, **TABLE},
]


def messages(folder: Path, num_cases: int) -> Fuzz:
    """Lines of another rank, each to a rank that has heard nothing before."""
    fuzz = Fuzz(ConfigError)
    logging.getLogger("undertow").propagate = False
    for number in range(num_cases):
        chance = random.Random(f"0/{number}")
        line = mutated_json(chance, json.dumps({"from": 0, "id": 1, **chance.choice(MESSAGES)})).encode(
            "utf-8", "surrogateescape"
        )
        line = mutated_bytes(chance, line) if chance.random() < 0.2 else line
        hear = hearing_rank()
        with watch().only_reading(folder):
            found = fuzz.ends(lambda: hear(line))  # noqa: B023  # called at once
        fuzz.count("message", found, is_right=found == "success", case=(number, line))
    return fuzz


@pytest.fixture
def share(request: pytest.FixtureRequest) -> float:
    """Of the cases of --thorough."""
    return 1.0 if request.config.getoption("thorough") else 0.2


@pytest.mark.slow
@in_ranks(2, is_fresh=True, timeout_s=86_400.0)
@pytest.mark.parametrize(("kind", "num_cases"), [(checkpoints, 125), (texts, 300), (messages, 300)])
def test_whatever_is_changed_is_read_or_is_an_error_of_ours(
    tmp_path: Path, share: float, kind: Callable[[Path, int], Fuzz], num_cases: int
) -> None:
    """A rank alone does what needs no other one, in a process of its own all the same."""
    num_cases = int(os.environ.get("FUZZ_CASES", round(num_cases * share)))
    if dist.get_rank() == 0 or kind is checkpoints:
        fuzz = kind(tmp_path, num_cases)
        print("\n".join(f"{times:6} {name}" for name, times in sorted(fuzz.seen.items())), flush=True)
        assert not fuzz.problems, "\n".join(fuzz.problems[:9])
        assert sum(fuzz.seen.values()) == num_cases
