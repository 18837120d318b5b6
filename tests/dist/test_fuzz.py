"""Checkpoints, plans, profiles, settings and messages changed at random: our errors or success, and no other file is touched.

More than the few of every day: FUZZ_CASES=10000 make test ARGS="tests/dist/test_fuzz.py --timeout 0"
"""

from __future__ import annotations

import contextlib
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

from support.checkpoints import Setup, require_equal, train, trained_by, whole_state
from support.mutations import mutate_checkpoint, mutated_bytes, mutated_json
from support.ranks import Ranks
from undertow import CheckpointError, SyncConfig, load_checkpoint, save_checkpoint
from undertow.cli.network import NetworkOptions
from undertow.cli.plan import PlanRequest, show_plan
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Piece, Plan, plan_from_groups
from undertow.profile import Profile, profile_from_json
from undertow.runtime.guard import Ring
from undertow.runtime.ring import Neighbour

_CASES = int(os.environ.get("FUZZ_CASES", "0"))
_AT_ONCE = 250
_MOST_MEMORY = 2 << 30  # bytes
_WRITES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod", "shutil.")
_RUNS = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "ctypes.", "pty.", "webbrowser.")
_PROGRAMS = [Path(folder).resolve() for folder in sys.path if folder]

Problems = list[str]


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
        elif event.startswith((*_WRITES, *_RUNS)):
            self.seen.append(f"{event}{args}")


_watch: list[Watch] = []  # of this process: a hook stays for ever


def watch() -> Watch:
    if not _watch:
        _watch.append(Watch())
    return _watch[0]


def checkpoints(folder: Path, seed: int, numbers: range) -> tuple[Counter[str], Problems]:
    """Two ranks load what the first of them has changed: with one error, or none."""
    limit_memory()
    seen, problems, rank = Counter[str](), [], dist.get_rank()
    saved, other, case = folder / "saved", folder / "other", folder / "case" / "checkpoint"
    with trained_by(Setup()) as (model, optimizer):
        train(Setup(), model, optimizer, steps=range(1))
        for path in (saved, other):
            save_checkpoint(path, model, optimizer, extra={"step": 1, "of": path.name})
            load_checkpoint(path, model, optimizer)  # which imports what there is to import
        known = whole_state(model, optimizer)
        for number in numbers:
            kind = [""]
            if rank == 0:
                shutil.rmtree(case, ignore_errors=True)
                shutil.copytree(saved, case)
                kind = [mutate_checkpoint(random.Random(f"{seed}/{number}"), case, other=folder / "other")]
            dist.broadcast_object_list(kind)
            with watch().only_reading(case):
                found = outcome(lambda: load_checkpoint(case, model, optimizer), CheckpointError)
            found += "".join(f" {it}" for it in watch().seen)
            watch().seen.clear()
            if found == "success" and kind[0] != "bytes of the tensors":  # whatever describes them, they are the same
                require_equal(whole_state(model, optimizer), known)
            both: list[str] = ["", ""]
            dist.all_gather_object(both, found)
            seen[f"{kind[0]}: {found.partition(':')[0]}"] += 1
            if both[0] != both[1] or not found.startswith(("success", "CheckpointError")) or " open" in found:
                problems.append(f"{seed}/{number}, {kind[0]}: {[it[-900:] for it in both]}")
    return seen, problems


def outcome(call: Callable[[], object], error_of_ours: type[Exception]) -> str:
    try:
        call()
    except error_of_ours as error:
        text = str(error)
        is_printable = text.replace("\n", "").isprintable()
        return f"{error_of_ours.__name__}: {text}" if is_printable else f"a text that steers: {text!r}"
    except Exception:
        return traceback.format_exc()
    return "success"


SPECS = [
    ParamSpec(name="layer.weight", shape=(64, 3), dtype="float32", itemsize=4),
    ParamSpec(name="layer.bias", shape=(64,), dtype="float32", itemsize=4),
    ParamSpec(name="half", shape=(), dtype="bfloat16", itemsize=2, own_dtype="float32", is_sparse=True),
]
PLAN = plan_from_groups(SPECS, [(1, Piece(param=0, first=0, stop=64)), (Piece(param=0, first=64, stop=192),), (2,)], num_ranks=2)
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
TABLE = json.dumps({"params": [{"name": "layer.weight", "shape": [64, 3], "dtype": "float32"}] * 2})
SETTINGS = SyncConfig(bucket_cap_mb=(1, 25.0), ignore=("a", "b"), check_replicas_every=100).to_json()


def shown(text: str, folder: Path) -> None:
    """As `undertow plan` shows it."""
    path = folder / "model.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape" if "\udcff" in text else "surrogatepass"))
    network = NetworkOptions()
    request = PlanRequest(
        file=path, strategy=None, num_ranks=None, bucket_cap_mb=None, has_overlap=True, is_accumulation=False, network=network
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), watch().only_reading(folder):
        show_plan(request)
    assert printed.getvalue().replace("\n", "").isprintable()


def read_again(text: str, read: Callable[[str], Any]) -> None:
    found = read(text)
    assert read(found.to_json()) == found


def described(text: str, folder: Path) -> None:
    read_again(text, lambda text: profile_from_json(text, "run.json"))


JSON: dict[str, tuple[str, Callable[[str, Path], None]]] = {
    "plan": (PLAN.to_json(), lambda text, _: read_again(text, Plan.from_json)),
    "settings": (SETTINGS, lambda text, _: read_again(text, SyncConfig.from_json)),
    "profile": (PROFILE.replace('"params"', f'{CURVES}"params"', 1), described),
    "shown plan": (PLAN.to_json(), shown),
    "shown table": (TABLE, shown),
    "shown profile": (PROFILE.replace('"params"', f'{CURVES}"params"', 1), shown),
}


def limit_memory() -> None:
    """A file of a few bytes that asks for gigabytes is an error, of this process and not of the machine."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MOST_MEMORY, resource.RLIM_INFINITY))


def texts(folder: Path, seed: int, numbers: range) -> tuple[Counter[str], Problems]:
    """Plans, settings, profiles and tables, in turn."""
    limit_memory()
    seen, problems = Counter[str](), []
    for text, use in JSON.values():
        use(text, folder)
    for number in numbers:
        kind = list(JSON)[number % len(JSON)]
        text, use = JSON[kind]
        changed = mutated_json(random.Random(f"{seed}/{number}"), text)
        found = outcome(lambda: use(changed, folder), ConfigError)  # noqa: B023  # called at once
        seen[f"{kind}: {found.partition(':')[0]}"] += 1
        if not found.startswith(("success", "ConfigError")) or watch().seen:
            problems.append(f"{seed}/{number}, {kind}: {found[-900:]} {watch().seen} {changed[:600]!r}")
        watch().seen.clear()
    return seen, problems


STATE = {"rank": 0, "step": 3, "doing": "in backward", "waits_for": "bucket 1", "waited_s": 2.5, "stack": ["a.py, line 1"]}
MESSAGES: list[dict[str, Any]] = [
    {"kind": "opens", "number": 0},
    {"kind": "failed", "text": "ValueError: x"},
    {"kind": "lost", "rank": 0},
    {"kind": "unreachable", "ranks": [0], "seconds": 5.5},
    {"kind": "sends", "at": ["10.0.0.1"], "to": {"10.0.0.2": [100.0, 200.0, True]}},
    {"kind": "ended", "steps": 3, "text": ""},
    {"kind": "left", "number": 0, "steps": 3, "text": "ValueError: x"},
    {"kind": "stops", "number": 0, "error": "RankLost", "what": "gone", "remedy": "mend", "told": ""},
    {"kind": "asks", "number": 0, **STATE},
    {"kind": "stands", "number": 0, "text": "in the optimizer"},
    {"kind": "does", "number": 0, **STATE},
    {"kind": "ping"},
]


def messages(folder: Path, seed: int, numbers: range) -> tuple[Counter[str], Problems]:
    """Lines of another rank, each to a rank that has heard nothing before."""
    limit_memory()
    logging.getLogger("undertow").propagate = False
    seen, problems = Counter[str](), []
    source = Neighbour.__new__(Neighbour)
    source.rank = 0
    for number in numbers:
        chance = random.Random(f"{seed}/{number}")
        message = {"from": 0, "id": "0/1", **chance.choice(MESSAGES)}
        line = mutated_json(chance, json.dumps(message)).encode("utf-8", "surrogateescape")
        line = mutated_bytes(chance, line) if chance.random() < 0.2 else line
        ring = Ring([], rank=1, num_ranks=2, world=dist.group.WORLD)
        member = ring.join(SyncConfig(stall_warning_s=0.001))

        def hear() -> None:
            with watch().only_reading(folder):
                for part in line.split(b"\n"):  # noqa: B023  # called at once
                    if (found := source._message(part)) is not None:
                        ring.receive(found, source)  # noqa: B023
                ring.links.table.warning()  # noqa: B023
                if member.asking is not None:  # noqa: B023
                    ring.report(member, member.asking)  # noqa: B023

        found = outcome(hear, ConfigError)
        seen[found.partition(":")[0]] += 1
        if found != "success" or watch().seen:
            problems.append(f"{seed}/{number}: {found} {watch().seen} {line[:2000]!r}")
        watch().seen.clear()
    return seen, problems


@pytest.mark.parametrize(("kind", "default"), [(checkpoints, 60), (texts, 300), (messages, 300)])
def test_whatever_is_changed_is_read_or_is_an_error_of_ours(
    fresh_pair: Ranks, tmp_path: Path, kind: Callable[..., tuple[Counter[str], Problems]], default: int
) -> None:
    count, seen = _CASES or default, Counter[str]()
    for first in range(0, count, _AT_ONCE):
        numbers = range(first, min(count, first + _AT_ONCE))
        folder = tmp_path / str(first)
        folder.mkdir()
        of_first, *_ = fresh_pair.run(kind_of(kind), kind, folder, numbers, timeout_s=600.0)
        seen += of_first[0]
        assert not of_first[1], "\n".join(of_first[1][:9])
        shutil.rmtree(folder)
    for name, times in sorted(seen.items()):
        print(f"{times:6} {name}")
    assert sum(seen.values()) == count


def kind_of(kind: Callable[..., Any]) -> Callable[..., Any]:
    return checkpoints_of_both if kind is checkpoints else on_the_first


def checkpoints_of_both(kind: Callable[..., Any], folder: Path, numbers: range) -> Any:
    return kind(folder, 0, numbers)


def on_the_first(kind: Callable[..., Any], folder: Path, numbers: range) -> Any:
    """What needs no other rank runs on the first, in a process of its own all the same."""
    return kind(folder, 0, numbers) if dist.get_rank() == 0 else None
