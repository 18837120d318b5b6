"""The command `undertow run`."""

import argparse
import contextlib
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
_NOT_FOUND, _NOT_STARTED = 127, 126  # as shells exit


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes the command that the arguments name; exits if it cannot be started."""
    options = _parser().parse_args(arguments)
    try:
        _become(options.command[options.command[:1] == ["--"] :], options.out, options.set)
    except UndertowError as error:
        print(f"undertow run: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, _NotStarted) else 2)


class _NotStarted(ConfigError):
    def __init__(
        self, what: str, where: str, exit_code: int, remedy: str = "Make it executable, or name its interpreter."
    ) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.exit_code = exit_code


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
        "UNDERTOW_BUCKET_CAP_MB=25, and from a JSON file, UNDERTOW_CONFIG=settings.json;\n"
        "--set goes before variables, and variables before the file.\n\n"
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
    if Path(program).parent == Path(sys.executable).parent:  # another Python may read another syntax
        _require_syntax(command)
    environment = {**os.environ, **variables_of(assignments)}
    environment |= with_absolute_paths(environment)
    settings_from(environment)
    outer = json.loads(environment.get(RUN, "{}"))  # this one may run within another
    if out is not None:
        make_directory(out, where=f"undertow run --out {out}", to="there", remedy="Name another folder.")
        outer["out"] = str(out.absolute())
    environment[RUN] = json.dumps({"pid": os.getpid(), "mark": _mark(), "out": None, **outer})
    others = [folder for folder in (environment.get("PYTHONPATH") or _SITE).split(os.pathsep) if folder != _SITE]
    environment["PYTHONPATH"] = os.pathsep.join([_SITE, *others])
    sys.stdout.flush()
    try:
        os.execve(program, [*command], environment)
    except OSError as error:
        raise _NotStarted(f"{command[0]} cannot be started: {error.strerror}.", program, _NOT_STARTED) from error


def _mark() -> str:
    """Returns the path of this run's mark, a file that says that a wrapper was made; removes the marks of runs that are gone.

    A Python program removes its own when it ends. One that is killed, or is not Python, does not.
    """
    folder = Path(tempfile.gettempdir())
    for old in folder.glob("undertow-run-[0-9]*-*") if os.path.exists("/proc/self") else ():
        with contextlib.suppress(OSError):  # of another user
            if not os.path.exists(f"/proc/{old.name.split('-')[2]}"):
                old.unlink()
    return str(folder / f"undertow-run-{os.getpid()}-{uuid.uuid4().hex}")


def _found(name: str) -> str:
    if program := shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable)):
        return program
    if os.path.exists(name):
        raise _NotStarted(f"{name} is not a program.", os.path.abspath(name), _NOT_STARTED)
    raise _NotStarted(
        f"command {name!r} is not found.",
        "in the folders of PATH",
        _NOT_FOUND,
        suggestion(name, [it for it in _COMMANDS if it != name], instead="Give the command as you would without `undertow run`."),
    )


def _require_syntax(command: Sequence[str]) -> None:
    """Compiles the script, the first argument that is a Python file: better one error here than one of each rank."""
    script = next((Path(it) for it in command if it.endswith(".py") and os.path.isfile(it)), None)
    try:
        if script is not None:
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{script}, line {line}: {(getattr(error, 'text', None) or '').strip()}" if line else str(script)
        raise _NotStarted(f"{script} is not Python: {getattr(error, 'msg', error)}.", where, 1, "Nothing was started.") from error
