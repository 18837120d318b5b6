"""The command `undertow run`."""

import argparse
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from undertow.errors import ConfigError, UndertowError, make_directory, require, suggestion
from undertow.runner.settings import RUN, settings_from, variables_of, with_absolute_paths

_SITE = str(Path(__file__).with_name("site"))
_COMMANDS = ("accelerate", "python", "python3", "torchrun", "ray", "fabric", "deepspeed")  # that start training
_EXECUTABLE = "Make it executable, or name its interpreter."


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes the command that the arguments name; exits if it cannot be started."""
    options = _parser().parse_args(arguments)
    try:
        _become(options.command[options.command[:1] == ["--"] :], options.out, options.set)
    except UndertowError as error:
        print(f"undertow run: {error}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))


class _NotStarted(ConfigError):
    exit_code = 126  # as of shells


class _NotFound(_NotStarted):
    exit_code = 127


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="undertow run",
        allow_abbrev=False,
        usage="undertow run [--out DIR] [--set NAME=VALUE]... COMMAND [ARGUMENT]...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a training program as it is, with Undertow's DistributedDataParallel\n"
        "instead of torch's.\n\n"
        "Every process of the program, however it is started, makes Undertow's class\n"
        "where its script or its framework makes torch's. At the end rank 0 prints where\n"
        "a step's time went, the reason for the plan, and the gain of a sharded\n"
        "optimizer if the simulator expects one. Exit code, signals, standard input\n"
        "and output are the program's own; the report goes to standard error.",
        epilog="examples:\n"
        "  undertow run torchrun --nproc-per-node=2 train.py --lr 0.1\n"
        "  undertow run python train.py    if the script or its framework starts ranks\n"
        "  undertow run --set wire_dtype=bfloat16 --out out accelerate launch train.py\n"
        "  torchrun --nproc-per-node=2 -m undertow train.py\n\n"
        "Settings are SyncConfig's fields. They also come from variables,\n"
        "UNDERTOW_BUCKET_CAP_MB=25; --set goes before variables.\n\n"
        "Exit code: the program's. 2: an option cannot work. 126, 127: the command\n"
        "cannot be started, or is not found.",
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="write each model's profile and plan, and all ranks' reports and traces, here"
    )
    parser.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a setting; may be repeated")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments")
    return parser


def _become(command: Sequence[str], out: Path | None, assignments: Sequence[str]) -> NoReturn:
    require(
        command,
        "no command is given.",
        where="undertow run",
        remedy="Write the command that starts the training after it: undertow run torchrun --nproc-per-node=2 train.py",
    )
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    program = _found(command[0])
    environment = {**os.environ, **variables_of(assignments)}
    environment |= with_absolute_paths(environment)
    settings_from(environment)
    outer = json.loads(environment.get(RUN, "{}"))  # this one may run within another
    if out is not None:
        make_directory(out, where=f"undertow run --out {out}", to="there", remedy="Name another folder.")
        outer["out"] = str(out.absolute())
    # A process makes this file when a wrapper is made; the program removes it when it ends.
    mark = os.path.join(tempfile.gettempdir(), f"undertow-run-{uuid.uuid4().hex}")
    environment[RUN] = json.dumps({"pid": os.getpid(), "mark": mark, "out": None, **outer})
    others = [folder for folder in (environment.get("PYTHONPATH") or _SITE).split(os.pathsep) if folder != _SITE]
    environment["PYTHONPATH"] = os.pathsep.join([_SITE, *others])
    sys.stdout.flush()
    try:
        os.execve(program, [*command], environment)
    except OSError as error:
        what = f"{command[0]} cannot be started: {error.strerror}."
        raise _NotStarted(what, where=program, remedy=_EXECUTABLE) from error


def _found(name: str) -> str:
    program = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
    if program is not None:
        return program
    if os.path.exists(name):
        where = os.path.abspath(name)
        raise _NotStarted(f"{name} is not a program.", where=where, remedy=_EXECUTABLE)
    others = [command for command in _COMMANDS if command != name]
    instead = "Give the command as you would without `undertow run`."
    raise _NotFound(
        f"command {name!r} is not found.",
        where="in the folders of PATH",
        remedy=suggestion(name, others, instead=instead),
    )
