"""The command `undertow run`."""

import argparse
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from undertow.errors import ConfigError, UndertowError, make_directory, require
from undertow.lab.runner.settings import MARK, RUN, settings_from, variables_of

_SITE = str(Path(__file__).with_name("site"))


def main(arguments: Sequence[str]) -> NoReturn:
    """Becomes the command that the arguments name; exits if it cannot be started."""
    options = _parser().parse_args(arguments)
    command = options.command[options.command[:1] == ["--"] :]
    try:
        require(
            command,
            "no command is given.",
            remedy="Write the command that starts the training: undertow run torchrun "
            "--nproc-per-node=2 train.py",
        )
        environment = _environment(options.out, options.set)
    except UndertowError as error:
        _stop(error, code=2)
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    name = command[0]
    program = shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable)) or name
    sys.stdout.flush()
    try:
        os.execve(program, command, environment)
    except OSError as error:
        what = f"{name} cannot be started: {error.strerror}."
        remedy = "Check the command: it must start without `undertow run` too."
        # Shells have the same exit codes: 127 for a command that is not found.
        code = 127 if isinstance(error, FileNotFoundError) else 126
        _stop(ConfigError(what, remedy=remedy), code=code)


def _stop(error: UndertowError, *, code: int) -> NoReturn:
    print(f"undertow run: {error}", file=sys.stderr)
    sys.exit(code)


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
        "a step's time went, and the reason for the plan. Exit code, signals, standard\n"
        "input and output are the program's own; the report goes to standard error.",
        epilog="examples:\n"
        "  undertow run torchrun --nproc-per-node=2 train.py --lr 0.1\n"
        "  undertow run python train.py    if the script or its framework starts ranks\n"
        "  undertow run --set wire=bfloat16 --out out accelerate launch train.py\n"
        "  torchrun --nproc-per-node=2 -m undertow train.py\n\n"
        "Settings are SyncConfig's fields. They also come from variables,\n"
        "UNDERTOW_BUCKET_CAP_MB=25; --set goes before variables.\n\n"
        "Exit code: the program's. 2: an option cannot work. 126, 127: the command\n"
        "cannot be started, or is not found.",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="write each model's profile and plan, and all ranks' reports and traces, here",
    )
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting; may be repeated",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments"
    )
    return parser


def _environment(out: Path | None, assignments: Sequence[str]) -> dict[str, str]:
    environment = {**os.environ, **variables_of(assignments, os.environ)}
    settings_from(environment)
    if out is not None:
        make_directory(out, where="undertow run")
    # This one may run within another, whose folder holds.
    environment[RUN] = environment.get(RUN, "") if out is None else str(out.absolute())
    mark = os.path.join(tempfile.gettempdir(), f"undertow-run-{uuid.uuid4().hex}")
    environment.setdefault(MARK, f"{os.getpid()}:{mark}")
    others = [
        folder
        for folder in environment.get("PYTHONPATH", "").split(os.pathsep)
        if folder not in ("", _SITE)
    ]
    environment["PYTHONPATH"] = os.pathsep.join([_SITE, *others])
    return environment
