"""Runs a short set of tests with the oldest versions that pyproject.toml admits: `make
test-oldest`.

The environment is out/oldest. What is older there than in .venv is installed there; the rest is
that of .venv. A version that cannot be had on this machine is named in one line, and the oldest at
hand is tested in its place.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AT = ROOT / "out" / "oldest"
TESTS = [
    "tests/unit/lab/report",  # rich
    "tests/unit/lab/cli",  # typer, matplotlib
    "tests/unit/torch_private/test_private.py",
    "tests/dist/test_gradients.py",
    "tests/dist/test_buffers.py",
    "tests/dist/test_checkpoints.py",  # numpy, safetensors
    "tests/dist/test_sharded_steps.py",
]


VERSIONS = """
import sys, numpy, torch
versions = sys.version.split()[0], "torch", torch.__version__, "numpy", numpy.__version__
print("Tested: Python", *versions, flush=True)
"""


def main() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    oldest_python = project["requires-python"].removeprefix(">=")
    if f"{sys.version_info.major}.{sys.version_info.minor}" != oldest_python:
        print(
            f"Python {oldest_python} is not that of .venv: Python {sys.version.split()[0]} is "
            "tested in its place.",
            flush=True,
        )
    pins = [
        pin(requirement)
        for requirement in project["dependencies"] + project["optional-dependencies"]["cli"]
    ]
    python = make_environment()
    for each in pins:
        if each.startswith("torch=="):
            # Other builds for Linux have gigabytes of CUDA with them.
            each += "+cpu" * (sys.platform == "linux")
        install(python, each)
    subprocess.run([python, "-c", VERSIONS], check=True)
    # Old releases use old names of what they need, which are deprecated there.
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-W",
        "ignore::DeprecationWarning",
        "-m",
        "not (slow or deep or waits or alone)",
        *TESTS,
    ]
    path = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests", "."))
    os.chdir(ROOT)
    os.execve(python, [*command, *sys.argv[1:]], {**os.environ, "PYTHONPATH": path})


def pin(requirement: str) -> str:
    """The oldest version that a requirement such as "numpy>=1.26" admits."""
    name, oldest = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
    return f"{name}=={oldest}"


def make_environment() -> Path:
    """The interpreter of a new environment, in which all packages of this one are there as well."""
    shutil.rmtree(AT, ignore_errors=True)
    venv.create(AT, symlinks=True, with_pip=True)
    (site,) = AT.glob("lib/*/site-packages")
    (site / "of-venv.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return AT / "bin" / "python"


def install(python: Path, wanted: str) -> None:
    command = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-warn-conflicts",
        wanted,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = re.findall(
            r"^ERROR: (No matching .*|Could not .*?)(?: \(from|$)", done.stderr, re.M
        ) or [done.stderr[-500:]]
        print(
            f"{wanted} cannot be had here, that of .venv is tested in its place: {reason[-1]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
