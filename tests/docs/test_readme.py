"""Every snippet and every command of the README is run, or checked in another way where a run takes long."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import undertow
from support.command import call
from support.pages import execute, snippets
from support.project import ROOT
from support.ranks import in_ranks
from undertow import DistributedDataParallel, demo

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = list(snippets(ROOT / "README.md"))
PYTHON = [snippet for snippet in SNIPPETS if snippet.language == "python"]
ONE_SCRIPT = "\n".join(snippet.code for snippet in PYTHON if snippet.mark == "two ranks")
EXPLAIN, CHANGE, HOOK = (snippet for snippet in PYTHON if snippet.mark == "")


# Without the words that some lines have behind two spaces, or all to themselves.
def commands(block: str) -> list[str]:
    return [line.split("  ")[0] for line in block.splitlines() if not line.startswith(" ")]


BLOCKS = [commands(snippet.code) for snippet in SNIPPETS if snippet.language == ""]
NAMED = re.findall(r"`((?:make|pip|torchrun|undertow|python) [^`]+)`", TEXT)
# These take minutes, a network, or processes: how each is checked stands beside its list.
MADE = ["make demo", "make test", "make docs", "make bench"]
INSTALLED = ["pip install .", "pip install '.[cli]'"]
DEMOS = ["undertow demo --strategy zero2"]
LAUNCHED = ["torchrun --nproc-per-node=2 script.py"]
RUN = [block for block in BLOCKS if not set(block) & set(MADE)]


# The end of a script in `directory`, with the commands of this environment.
def shell(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Not torchrun's default port: other tests may be using it.
    environment = {
        **os.environ,
        "PATH": path,
        "PET_STANDALONE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        ["sh", "-ec", script], cwd=directory, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


# This rank in its folder of `directory`, its output in the value.
@contextlib.contextmanager
def quiet(directory: Path) -> Iterator[io.StringIO]:
    here = directory / str(dist.get_rank())
    here.mkdir()
    with contextlib.chdir(here), contextlib.redirect_stdout(io.StringIO()) as printed:
        yield printed


def test_every_command_is_run_or_in_a_list() -> None:
    listed = {*MADE, *INSTALLED, *DEMOS, *LAUNCHED}
    found = {*NAMED, *(command for block in BLOCKS if block not in RUN for command in block)}
    assert found == listed
    assert {command.split()[0] for block in RUN for command in block} == {".venv/bin/undertow", "echo"}
    assert TEXT.count("```") == 2 * len(SNIPPETS) == 2 * len(PYTHON) + 2 * len(BLOCKS)


@pytest.mark.slow
@pytest.mark.parametrize("block", RUN, ids=lambda block: " ".join(block[0].split()[1:3]))
def test_commands_run(block: list[str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    script = "\n".join(block).replace(".venv/bin/", "").replace("/tmp/", f"{tmp_path}/")
    done = shell(script, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", LAUNCHED)
def test_torchrun_runs_the_first_snippets_as_one_script(command: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ONE_SCRIPT + "dist.destroy_process_group()\n")
    done = shell(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Where a step goes") == 4  # two reports on two ranks


@pytest.mark.parametrize("command", MADE)
def test_make_knows_its_targets(command: str) -> None:
    done = shell(command.replace("make", "make -n"), ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout


# The wheel itself is installed by tests/arch/test_wheel.py.
@pytest.mark.parametrize("command", INSTALLED)
def test_pip_installs_extras_that_there_are(command: str) -> None:
    path, _, extras = shlex.split(command)[2].partition("[")
    with (ROOT / path / "pyproject.toml").open("rb") as file:
        known = tomllib.load(file)["project"]["optional-dependencies"]
    assert [extra for extra in extras.rstrip("]").split(",") if extra and extra not in known] == []


# The ways themselves are run by tests/dist/test_demo.py.
@pytest.mark.parametrize("command", DEMOS)
def test_the_demo_takes_the_options(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[demo.DemoSettings] = []
    monkeypatch.setattr(demo, "run_demo", lambda settings: seen.append(settings) or 0)
    assert call(*command.split()[1:], monkeypatch=monkeypatch) == 0
    assert [settings.strategy for settings in seen] == ["zero2"]


@in_ranks(2)
def test_the_first_snippets_make_one_script(tmp_path: Path) -> None:
    names = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch, quiet(tmp_path) as printed:
        patch.setattr(dist, "init_process_group", lambda _backend: None)
        exec(ONE_SCRIPT, names)
    names["sync"].close()
    assert printed.getvalue().count("Where a step goes") == 2


@in_ranks(2)
def test_a_plan_is_explained_and_saved(tmp_path: Path) -> None:
    model = DistributedDataParallel(nn.Linear(8, 1))
    for _ in range(11):
        model(torch.ones(2, 8)).sum().backward()
    with quiet(tmp_path) as printed:
        execute(EXPLAIN, model=model)
        assert sorted(path.name for path in Path.cwd().iterdir()) == ["plan.json", "profile.json"]
    assert printed.getvalue().startswith("The plan: ")
    model.close()


# A model with a head, which is frozen when the model is wrapped.
class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.head.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens)))


@in_ranks(2)
def test_a_model_is_changed_and_weighted() -> None:
    num_tokens = dist.get_rank() + 1
    params = [torch.ones(2, requires_grad=True)]
    names = {"undertow": undertow, "torch": torch, "DistributedDataParallel": DistributedDataParallel, "model": Tokens()}
    model = execute(CHANGE, **names, params=params, loss=params[0].sum(), num_tokens=num_tokens)["model"]
    model(torch.zeros(num_tokens, dtype=torch.int64)).sum().backward()
    assert model.module.head.bias.grad.item() == 1.0  # the mean over the tokens of both ranks, each of which adds 1
    left_alone = model.module.embedding.weight.grad[0]
    torch.testing.assert_close(
        left_alone, num_tokens * (model.module.head.weight @ model.module.body.weight)[0]
    )  # rounds otherwise
    model.close()


def clip_values(limit: float, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done = torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer().clamp_(-limit, limit))
    return done


@in_ranks(2)
def test_a_hook_clips_before_another_one_sends() -> None:
    model = DistributedDataParallel(nn.Linear(8, 1, bias=False))
    execute(
        HOOK, undertow=undertow, model=model, clip_values=clip_values, PowerSGDState=PowerSGDState, powerSGD_hook=powerSGD_hook
    )
    model(torch.full((1, 8), 100.0)).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.ones(1, 8))
    model.close()
