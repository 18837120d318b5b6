"""python -m benchmarks.shaped.install [NAME ...]: makes the virtual environments of peers, by default all (make bench-peers).

One that cannot be made is reported and does not stop the others; `python -m benchmarks.shaped` then says so for its systems.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.errors import UnknownName, require_known
from benchmarks.shaped import environments

_LOG_LINES = 12
# DeepSpeed compiles extensions for the accelerator that it finds; the benchmark needs none of them.
_SETTINGS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def main(names: Sequence[str]) -> int:
    """Returns 0; 1 if an environment could not be made, 2 for a name that does not exist."""
    try:
        for name in names:
            require_known("peer", name, environments.peers())
    except UnknownName as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 2
    failed = [name for name in names or environments.peers() if not _is_there_or_made(name)]
    if failed:
        print(f"Not made: {', '.join(failed)}. Their systems cannot be timed.", file=sys.stderr)
    return 1 if failed else 0


def _is_there_or_made(name: str) -> bool:
    place = environments.FOLDER / name
    if environments.python_of(name) is not None:
        print(f"{name}: {place} is up to date")
        return True
    print(f"{name}: making {place} (about 1 GB, minutes) ...", flush=True)
    began_s = time.monotonic()
    log = environments.log_of(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    try:
        _run(commands_for(name), log)
    except (OSError, subprocess.CalledProcessError) as error:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        print(f"{name}: could not be made: {error}\nThe end of {log}:", *lines, sep="\n  ", file=sys.stderr)
        return False
    log.unlink()
    shutil.copyfile(environments.pins_of(name), environments.installed_of(name))
    print(f"{name}: made in {time.monotonic() - began_s:.0f} s")
    return True


def _run(commands: Sequence[Sequence[str]], log: Path) -> None:
    """Runs all of them, in order; raises at the first that fails."""
    with log.open("w", encoding="utf-8") as output:
        for command in commands:
            print("$", *command, file=output, flush=True)
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=os.environ | _SETTINGS, check=True
            )


def commands_for(name: str) -> list[list[str]]:
    """Returns the commands that make an environment, in this order.

    torch goes in first and alone, as in the Makefile: then nothing can choose another build of it.
    """
    pins = environments.pins_of(name)
    pip = [str(environments.interpreter_of(name)), "-m", "pip"]
    install = [*pip, "install", "--quiet"]
    return [
        [sys.executable, "-m", "venv", "--clear", str(environments.FOLDER / name)],
        [*install, "--constraint", str(pins), torch_pin(pins)],
        [*install, "--no-deps", "--requirement", str(pins)],
        [*pip, "check"],
    ]


def torch_pin(pins: Path) -> str:
    """Returns the line of a file of pins that names torch."""
    return next(line for line in pins.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
