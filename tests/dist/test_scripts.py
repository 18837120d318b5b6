"""Scripts of users end with exit code 0, examples print what they promise, and the demo ends with its ranks."""

import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console
from torch import nn

from support.elastic import losses_in
from support.inside import demo_ranks
from support.processes import Rank, example, free_port, run_ranks, script
from support.project import ROOT
from support.warm import python
from undertow.lab.demo import DemoSettings, run_demo
from undertow.lab.demo.settings import OURS

PATIENCE_S = 120.0
SCRIPT = """
import sys, torch, torch.distributed as dist
import undertow

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{at}", rank=number, world_size=2)
model = undertow.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
IN_SHARDS = SCRIPT.replace("torch.optim.SGD(model.parameters(), ", "undertow.ShardedOptimizer(torch.optim.SGD, model, ")
WELL = [(0, ""), (0, "")]  # both exit codes, and what is on stderr


@pytest.mark.slow
def test_a_script_in_a_new_interpreter_ends_with_exit_code_0_with_gathers_in_flight(tmp_path: Path) -> None:
    """A module that is imported when there is a group may keep it, where forked ranks have it before."""
    texts = [f"at, number = {str(tmp_path / 'meeting-point')!r}, {number}\n{IN_SHARDS}" for number in range(2)]
    how = {"env": {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-W", "error", "-c", text], **how) for text in texts]
    try:
        complaints = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert list(zip([rank.returncode for rank in ranks], complaints, strict=True)) == WELL


class Forked:
    """A script in a forked rank, with a warning as an error."""

    def __init__(self, source: str, **variables: str) -> None:
        self.source, self.variables = source, variables

    def __call__(self, rank: Rank) -> None:
        warnings.simplefilter("error")
        os.environ |= self.variables
        script(self.source, rank, at=rank.directory / "meeting-point", number=rank.number)

    @property
    def ends(self) -> list[tuple[int | None, str]]:
        return [(rank.exit_code, rank.log) for rank in run_ranks(self, 2, is_script=True)]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("source", "ending"),
    [(SCRIPT, "dist.destroy_process_group()"), (IN_SHARDS, "model.close()"), (SCRIPT, "")],
    ids=["destroyed with the model alive", "closed with gathers in flight", "left open"],
)
def test_a_script_ends_with_exit_code_0(source: str, ending: str) -> None:
    assert Forked(source + ending).ends == WELL


@pytest.mark.deep
def test_a_script_ends_with_exit_code_0_where_gloo_connects_lazily() -> None:
    assert Forked(IN_SHARDS, TORCH_GLOO_LAZY_INIT="1").ends == WELL


AFTERWARDS = """
import threading
dist.destroy_process_group()
assert [thread.name for thread in threading.enumerate() if thread.name.startswith("undertow")] in ([], ["undertow-guard"])
"""
# As where something that is never freed refers to them: modules lose their names, ours before the default group is gone.
HELD = """
import ctypes
for module in list(sys.modules.values()):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
"""


@pytest.mark.deep
@pytest.mark.parametrize("ending", [AFTERWARDS, HELD], ids=["pairs are let go with the groups", "modules are taken apart"])
def test_nothing_is_left_and_nothing_is_said_at_the_end(ending: str) -> None:
    """Or a script could not start again at the same address."""
    assert Forked(SCRIPT + ending).ends == WELL


# The late rank steps last, when the other one has nothing left to do but to end.
ENDS_LATE = """
import time
before = [param.detach().clone() for param in model.parameters()]
if number == late:
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0.3))
optimizer.zero_grad()
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
dist.destroy_process_group()
if number == reads:
    assert all((old != new).all() for old, new in zip(before, model.parameters()))
"""


@pytest.mark.deep
@pytest.mark.parametrize(("late", "reads"), [(0, 0), (0, 1)], ids=["the other one", "the late one"])
def test_a_rank_that_ends_at_once_has_sent_its_shards(late: int, reads: int) -> None:
    source = IN_SHARDS.replace("torch.nn.BatchNorm1d(4)", "torch.nn.Tanh()")
    assert Forked(f"late, reads = {late}, {reads}\n{source}{ENDS_LATE}").ends == WELL


@pytest.mark.deep
@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise KeyError(number)", 1),
        ("try:\n    raise KeyError(number)\nfinally:\n    dist.destroy_process_group()", 1),
    ],
    ids=["exit code", "exception", "exception, groups destroyed"],
)
def test_a_script_ends_with_its_own_exit_code(ending: str, code: int) -> None:
    """Both ranks at once, each while it hears of the other."""
    assert [found for found, _ in Forked(SCRIPT + ending).ends] == [code, code]


def output_of(name: str, folder: Path, *arguments: str, num_ranks: int) -> str:
    """What rank 0 of an example prints that runs in `folder`, where it may write; no rank may cause a warning."""
    found = run_ranks(
        partial(example, ROOT / "examples" / name, port=free_port(), folder=folder, arguments=arguments),
        num_ranks,
        is_script=True,
        patience_s=240,
    )
    for rank in found:
        assert (rank.exit_code, "Warning" in rank.log) == (0, False), rank.log
    return found[0].out


@pytest.mark.slow
def test_the_example_of_torchs_asynchronous_saves_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    text = output_of("train_async_save.py", tmp_path, num_ranks=2)
    assert "steps 0 to 29 are saved" in text
    first, last = losses_in(text, 3)
    assert last < first
    text = output_of("train_async_save.py", tmp_path, "--steps", "35", num_ranks=3)
    assert text.splitlines()[-1] == "steps 30 to 34 are saved"
    (of_rest,) = re.findall(r"loss (\S+)", text)
    assert float(of_rest) < 2 * last  # it has not begun anew


@pytest.mark.slow
def test_the_sharded_example_learns_and_saves_what_a_plain_optimizer_can_load(tmp_path: Path) -> None:
    text = output_of("train_sharded.py", tmp_path, num_ranks=2)
    first, last = losses_in(text, 3)
    assert last < first
    (of_new_data,) = re.findall(r"^loss of new data: (\S+)$", text, re.MULTILINE)
    assert float(of_new_data) < 8.0  # the variance of a sum of 8: the loss of whoever always says zero
    assert "of it gathers" in text
    saved = torch.load(tmp_path / "checkpoint.pt")
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())), nn.Linear(512, 1))
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    assert [optimizer.state[param]["exp_avg"].shape for param in model.parameters()] == [it.shape for it in model.parameters()]
    assert {state["step"].item() for state in optimizer.state.values()} == {30}


@pytest.mark.slow
def test_two_sites_learn_one_model_and_save_it(tmp_path: Path) -> None:
    text = output_of("train_two_sites.py", tmp_path, num_ranks=2)
    first, last = losses_in(text, 4)
    assert last < first
    (of_new_data,) = re.findall(r"^loss of new data: (\S+)$", text, re.MULTILINE)
    assert float(of_new_data) < 8.0  # the variance of a sum of 8: the loss of whoever always says zero
    assert "Outer synchronization every 30 steps" in text
    assert {path.name for path in (tmp_path / "two_sites").iterdir()} >= {"model.safetensors", "replica-1.safetensors"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensor_parallel.py", "up.weight: (256, 64), here (128, 64)"),
        ("outer_axis.py", "<OuterAxis of 2 replicas, int8: 150 reductions, "),  # of five modules, in 30 steps
    ],
)
def test_an_example_on_two_axes_learns_and_tells_what_it_has(name: str, words: str, tmp_path: Path) -> None:
    text = output_of(name, tmp_path, num_ranks=4)
    first, last = losses_in(text, 3)
    assert last < first
    assert words in text


@pytest.mark.slow
def test_the_residual_network_learns_and_is_evaluated_by_one_rank(tmp_path: Path) -> None:
    text = output_of("resnet.py", tmp_path, num_ranks=2)
    first, last = losses_in(text, 6)
    assert last < 0.2 * first
    (accuracy,) = re.findall(r"^right on (\d+)% of new images$", text, re.MULTILINE)
    assert int(accuracy) > 80  # in evaluation mode: the running statistics are right too; guessing gives 25
    assert "Where a step goes" in text


@pytest.mark.slow
def test_the_gpt_learns_to_repeat(tmp_path: Path) -> None:
    text = output_of("gpt.py", tmp_path, num_ranks=2)
    first, last = losses_in(text, 5)
    # Whoever does not look back can do no better than guess one of 16 tokens: a loss of log 16, 2.8.
    assert last < 0.5 < 1.5 < first
    assert min(map(float, re.findall(r"gradient norm (\S+)", text))) > 0.0  # clipping saw gradients, and not None
    assert "Where a step goes" in text


@pytest.mark.slow
def test_branches_are_used_as_each_rank_likes(tmp_path: Path) -> None:
    text = output_of("branches.py", tmp_path, num_ranks=3)
    first, last = losses_in(text, 12)
    assert last < 0.2 * first
    unused = [set(names.split(", ")) for names in re.findall(r"unused here: (.*)$", text, re.MULTILINE)]
    names = {f"branches.{branch}.{kind}" for branch in range(3) for kind in ("weight", "bias")}
    assert len(unused) == 12
    assert all(len(each) in (2, 4, 6) and each <= names for each in unused)  # a branch is used as a whole
    # In every tenth step one rank has nothing to do, each in its turn.
    assert [step for step in range(10, 70, 10) if unused[step // 5 - 1] == names] == [30, 60]
    assert "Where a step goes" in text


@pytest.mark.slow
def test_the_bucketing_example_sends_less_often_and_gets_the_same(tmp_path: Path) -> None:
    lines = output_of("demo_bucketing.py", tmp_path, num_ranks=2).splitlines()
    one_by_one, in_buckets = (int(line.split()[-2]) for line in lines[1:3])
    assert in_buckets < one_by_one == 48
    assert lines[-1] == "gradients equal: yes"


@pytest.mark.slow
def test_the_muon_example_learns_with_muon_and_adamw_and_saves_a_picture(tmp_path: Path) -> None:
    lines = output_of("train_muon.py", tmp_path, "--steps", "20", num_ranks=2).splitlines()
    assert all(loss < 4.6 for loss in map(float, lines[1].split()[-2:]))  # of all steps; a guess has log 256, 5.5
    assert (tmp_path / "muon.png").stat().st_size > 0


@pytest.mark.slow
def test_the_mixture_of_experts_learns_and_reports_its_experts(tmp_path: Path) -> None:
    text = output_of("experts.py", tmp_path, num_ranks=4)
    first, last = losses_in(text, 6)
    assert last < 0.5 * first
    assert min(map(float, re.findall(r"gradient norm (\S+)", text))) > 0.0  # clipping saw gradients, and not None
    assert "Experts '*.experts.*', ranks 0, 2:" in text


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the demo's ranks forked off what the tests have loaded, where it would start an interpreter for each."""
    forkserver = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: forkserver)


def run_and_read(settings: DemoSettings) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as captured:
        code = run_demo(settings, console)
    return code, captured.get()


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_all_ways_agree_and_the_picture_is_there(tmp_path: Path) -> None:
    settings = DemoSettings(num_ranks=2, link="none", num_steps=1, out=tmp_path, strategy="zero1", outer=3)
    code, text = run_and_read(settings)
    assert "; gradients, parameters and loss are equal, and with int8 the loss is within " in text
    assert code == 0
    ours = [way for way in settings.ways if way in OURS and way != "outer"]  # whose replicas have a profile of one rank
    profiles = [f"profile-{way}.json" for way in ours]
    assert {path.name for path in tmp_path.iterdir()} == {"demo.png", "demo-dark.png", *profiles}
    rows = [line.split() for line in text.splitlines() if line.rstrip().endswith((" yes", " close", " own"))]
    assert (len(rows), len({row[-2] for row in rows if row[-1] == "yes"})) == (len(settings.ways), 1)  # and one loss
    (sharded,) = (row for row in rows if row[:2] == ["Undertow,", "ZeRO-1"])
    assert int(sharded[-3]) > 0  # the messages that this rank has received


def fail_in_rank_1(rank: int, *arguments: object) -> None:
    if rank == 1:
        os._exit(3)
    threading.Event().wait()


@pytest.mark.usefixtures("forked")
def test_a_failed_rank_is_exit_code_1(tmp_path: Path) -> None:
    with demo_ranks(fail_in_rank_1):
        code, text = run_and_read(DemoSettings(out=tmp_path))
    assert (code, "rank 1 has failed.\n  process 1 terminated with exit code 3" in text) == (1, True)


TELLS_ITS_NUMBER = "import os, sys; open(sys.argv.pop(1), 'w').write(str(os.getpid())); from undertow.lab.cli import main; main()"


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, whose number is in the folder."""
    started = subprocess.Popen(
        [python(), "-c", TELLS_ITS_NUMBER, str(tmp_path / "number"), "demo", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with started:
        yield started
        started.kill()


@pytest.mark.slow
@pytest.mark.parametrize("is_interrupted", [True, False], ids=["Ctrl-C", "killed"])
def test_ranks_do_not_outlive_the_process_that_started_them(
    demo: subprocess.Popen[str], is_interrupted: bool, tmp_path: Path
) -> None:
    ranks, until_s, number = [], time.monotonic() + PATIENCE_S, tmp_path / "number"
    while len(ranks) < 2:
        assert time.monotonic() < until_s, "the ranks did not start"
        time.sleep(0.02)
        children = psutil.Process(int(number.read_text())).children() if number.exists() and number.read_text() else []
        ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    if is_interrupted:
        for process in (demo, *ranks):  # as a terminal does
            process.send_signal(signal.SIGINT)
    else:
        os.kill(int(number.read_text()), signal.SIGKILL)
    text, _ = demo.communicate(timeout=PATIENCE_S)
    assert psutil.wait_procs(ranks, timeout=PATIENCE_S)[1] == []
    if is_interrupted:
        assert (demo.returncode, text.endswith("Interrupted; all ranks have ended.\n")) == (130, True)
        assert "Traceback" not in text
