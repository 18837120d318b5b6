"""The wheel has the library and nothing else, and works where only its dependencies are installed, with and without extras."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from support.project import DOCS, ROOT, name_of

pytestmark = pytest.mark.slow

STEP = """
import torch, torch.distributed as dist, undertow
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = undertow.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.tensor([[1.0, 2.0]])).sum().backward()
assert model.module.weight.grad.tolist() == [[1.0, 2.0]]
model.close()
dist.destroy_process_group()
print(undertow.__file__)
"""


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The end of a command that sees no module of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def pip(*arguments: str | Path, cwd: Path | None = None) -> None:
    done = run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy of the checkout, because setuptools writes beside the sources."""
    copy, built = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for folder in ("src", "tests", "benchmarks", "examples", "docs"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", built, copy)
    (path,) = built.iterdir()
    return path


def needed_by(name: str, extras: frozenset[str]) -> set[str]:
    """The installed distributions that `name` needs with these extras, and all that these need."""
    needed: set[str] = set()
    for requirement in map(Requirement, metadata.requires(name) or []):
        contexts = [{"extra": extra} for extra in extras or {""}]
        if requirement.marker is None or any(map(requirement.marker.evaluate, contexts)):
            needed |= {requirement.name} | needed_by(requirement.name, frozenset(requirement.extras))
    return needed


def environment_with(wheel: Path, *extras: str, at: Path) -> Path:
    """The commands of a new environment that has the wheel, and as links the packages that it says it needs."""
    venv.create(at, symlinks=True)
    (site,) = at.glob("lib/*/site-packages")
    for name in needed_by("undertow", frozenset(extras)):
        for entry in {file.parts[0] for file in metadata.files(name) or []} - {"..", "__pycache__"}:
            (site / entry).symlink_to(metadata.distribution(name).locate_file(entry))
    pip("--python", at / "bin" / "python", "install", "--no-index", f"{wheel}[{','.join(extras)}]" if extras else wheel)
    return at / "bin"


def test_the_wheel_has_the_library_and_nothing_else(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = (ROOT / "src" / "undertow").rglob("*")
    known = {str(path.relative_to(ROOT / "src")) for path in sources if path.suffix in (".py", ".typed", ".html")}
    data = {f"docs/{name_of(page)[5:]}" for page in DOCS if page.parent.name != "reference"} | {"profiles/gpt2.json"}
    assert packed == known | {"undertow/py.typed"} | {f"undertow/data/{name}" for name in data}
    assert wheel.name.endswith("-py3-none-any.whl")


def test_without_extras_a_step_runs_and_the_command_says_what_to_install(wheel: Path, tmp_path: Path) -> None:
    bin_ = environment_with(wheel, at=tmp_path)
    step = run(bin_ / "python", "-c", STEP, cwd=tmp_path)
    assert (step.returncode, step.stdout.startswith(f"{tmp_path}/lib")) == (0, True), step.stderr
    command = run(bin_ / "undertow", "demo")
    told = 'The command needs typer, which is not installed.\n  Install it with: pip install "undertow[cli]"\n'
    assert (command.returncode, command.stdout, command.stderr) == (1, "", told)
    page = run(bin_ / "undertow", "docs", "migration/torch-ddp", cwd=tmp_path)
    assert (page.returncode, page.stdout.startswith("# From torch DDP\n")) == (0, True), page.stderr


def test_with_the_extra_the_command_runs_and_draws(wheel: Path, tmp_path: Path) -> None:
    bin_ = environment_with(wheel, "cli", at=tmp_path)
    done = run(bin_ / "undertow", "simulate", "gpt2", "--ranks", "8", "--link", "25gbit", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "simulate.png").stat().st_size > 10_000
