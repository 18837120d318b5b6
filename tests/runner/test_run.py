"""`undertow run`: programs that do not know Undertow train with its class and get the same bits, and all else is theirs."""

import copy
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from frameworks.recipes import require_installed
from support.errors import refusal
from support.outer import NaiveOuter
from support.project import ROOT
from support.strategies import spec
from support.warm import python
from undertow import Outer
from undertow.lab.runner.command import main
from undertow.lab.runner.settings import settings_from, variables_of
from undertow.plan import plan_from_groups

PLAN = plan_from_groups([spec("a", 8)], [[0]], num_ranks=2).to_json()
SCRIPTS = Path(__file__).with_name("scripts")
UNDERTOW = (sys.executable, "-m", "undertow")
NEW, FORKED, WITH_FRAMEWORKS = sys.executable, python(), python("lightning", "transformers", "accelerate")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
WAIT_S = 200.0
REPORTED = "Where a step goes: rank 0"
NOTHING = "undertow run: no process of this program made a DistributedDataParallel: Undertow had nothing to do.\n"


def run(*command: object, stdin: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    known = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    known["RAY_worker_niceness"] = "0"  # by default 15: workers would hardly run beside other tests
    given = {name: text for name, text in os.environ.items() if not name.startswith("UNDERTOW_")}
    env = {**given, **known, **variables}
    return subprocess.run(
        list(map(str, command)), input=stdin, capture_output=True, text=True, env=env, timeout=WAIT_S, check=False
    )


# Packages that a script needs, its file, and the command that starts it; the first one does so in new interpreters.
TRAINED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "torch's tutorial": ("", "plain.py", (NEW, *TORCHRUN)),
    "a subclass of torch's class": ("", "subclass.py", (FORKED, *TORCHRUN)),
    "ranks started by multiprocessing": ("", "spawns.py", (FORKED,)),
    "Lightning": ("lightning", "with_lightning.py", (WITH_FRAMEWORKS,)),
    "HF Trainer": ("transformers accelerate", "with_transformers.py", (WITH_FRAMEWORKS, *TORCHRUN)),
    "Accelerate": (
        "accelerate",
        "with_accelerate.py",
        (WITH_FRAMEWORKS, *ACCELERATE, "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
    ),
    "Ray Train": ("ray", "with_ray.py", (FORKED,)),
}
WITHOUT = dict.fromkeys(("torch's tutorial", "Ray Train"), (FORKED, *TORCHRUN))  # a faster way to the same training


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_a_program_trains_as_without_us_and_reports(name: str, tmp_path: Path) -> None:
    packages, script, command = TRAINED[name]
    require_installed(*packages.split())
    plain, ours = tmp_path / "plain.pt", tmp_path / "ours.pt"
    without = run(*WITHOUT.get(name, command), SCRIPTS / script, plain)
    assert (without.returncode, REPORTED in without.stdout + without.stderr) == (0, False), without.stderr
    done = run(*UNDERTOW, "run", *command, SCRIPTS / script, ours)
    assert done.returncode == 0, done.stderr
    told = done.stdout + done.stderr  # Ray passes on what its workers print
    assert told.count(REPORTED) == 1, told
    wanted, found = torch.load(plain), torch.load(ours)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.slow
def test_settings_arrive_and_files_are_written(tmp_path: Path) -> None:
    out, command = tmp_path / "new" / "out", (FORKED, *TORCHRUN, "-m", "undertow", SCRIPTS / "plain.py", tmp_path / "it.pt")
    options = ("--out", out, "--set", "bucket_cap_mb=0.0001")
    done = run(*UNDERTOW, "run", *options, FORKED, *TORCHRUN, SCRIPTS / "plain.py", tmp_path / "it.pt")
    assert done.returncode == 0, done.stderr
    assert "bucket_cap_mb=0.0001 is set" in done.stderr
    # The last line names the next command.
    assert done.stderr.splitlines()[-1] == f"The files are in {out}. A page about them: undertow report {out}"
    names = ["plan.json", "profile.json", "report-rank0.json", "report-rank1.json", "traces"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert sorted(path.name for path in (out / "traces").iterdir()) == ["trace.rank0.json.gz", "trace.rank1.json.gz"]
    assert [json.loads((out / f"report-rank{rank}.json").read_text())["rank"] for rank in range(2)] == [0, 1]
    # A module of torchrun's in place of the runner, which starts each rank anew; the settings come from variables.
    within = (*UNDERTOW, "run", "--out", tmp_path / "within")
    traces = {"UNDERTOW_TRACE": str(tmp_path / "traces")}
    done = run(*within, *command, UNDERTOW_BUCKET_CAP_MB="7", **traces)
    assert (done.returncode, done.stderr.count(REPORTED), NOTHING in done.stderr) == (0, 1, False), done.stderr
    assert len(list((tmp_path / "within").iterdir())) == 4  # traces are where the variable says
    assert "bucket_cap_mb=7 is set" in done.stderr
    assert len(list((tmp_path / "traces").iterdir())) == 2


LATE = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(20):
    if dist.get_rank() == 0:
        time.sleep(0.05)
    model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.slow
def test_the_last_words_name_the_slow_rank_and_the_plan(tmp_path: Path) -> None:
    """It is rank 0, whose own step has no wait: tests/unit/trace has the words about other ranks."""
    (tmp_path / "late.py").write_text(LATE)
    done = run(*UNDERTOW, "run", FORKED, *TORCHRUN, tmp_path / "late.py")
    assert (done.returncode, done.stderr.count(REPORTED)) == (0, 1), done.stderr
    advice = r"^Another rank waits \d+\.\d ms for rank 0, the slowest in this step: look at its input pipeline"
    assert re.search(advice, done.stderr, re.MULTILINE), done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "The plan: 1 bucket of 0.00 MB, ddp, 2 ranks",
        "  no other plan is worth a trial",
    ]


@pytest.mark.deep
def test_replicas_of_a_program_train_alone_and_exchange_fragments(tmp_path: Path) -> None:
    """The file at the end has the global parameters of the reference: the program does not know of replicas."""
    settings = ("--set", "outer.every=5", "--out", tmp_path / "out")
    done = run(*UNDERTOW, "run", *settings, FORKED, *TORCHRUN, SCRIPTS / "plain.py", tmp_path / "ours.pt")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "Outer synchronization every 5 steps" in done.stderr  # rank 0's report
    assert done.stderr.count("Files of model.state_dict() have the global\nparameters") == 1
    reports = [json.loads((tmp_path / "out" / f"report-rank{rank}.json").read_text())["outer"] for rank in range(2)]
    assert [(each["every"], each["num_exchanges"] >= 2) for each in reports] == [(5, True)] * 2
    ended = reports[0]
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    models = [first, copy.deepcopy(first)]
    layers = [[f"{layer}.{kind}" for kind in ("weight", "bias")] for layer in (0, 2)]
    outer = NaiveOuter(models, layers, Outer(every=5, fragments=ended["fragments"], delay=ended["delay"]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    noises = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for step in range(1, 13):
        for model, optimizer, noise in zip(models, optimizers, noises, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(torch.randn(20, 10, generator=noise)), torch.randn(20, 5, generator=noise))
            loss.backward()
            optimizer.step()
        outer.step(step)
    found = torch.load(tmp_path / "ours.pt")
    assert [name for name in first.state_dict() if not torch.equal(found[name], outer.globals[name])] == []
    assert not any(torch.equal(found[name], value) for name, value in first.state_dict().items())  # steps have followed


@pytest.mark.slow
def test_a_program_that_has_our_class_gets_files_too(tmp_path: Path) -> None:
    done = run(*UNDERTOW, "run", "--out", tmp_path, FORKED, *TORCHRUN, ROOT / "examples" / "train.py")
    assert (done.returncode, done.stderr.count(REPORTED), NOTHING in done.stderr) == (0, 1, False), done.stderr
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "plan.json",
        "profile.json",
        "report-rank0.json",
        "report-rank1.json",
    ]


PRIVATE = """
import torch, torch.distributed as dist
class Mine(torch.nn.parallel.DistributedDataParallel):
    def _pre_forward(self, *inputs, **kwargs):
        return super()._pre_forward(*inputs, **kwargs)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
Mine(torch.nn.Linear(2, 2))
"""
OVERRIDES = """undertow.errors.ConfigError: class Mine overrides _pre_forward, and Undertow does not call torch's private methods.
  __main__.Mine(...) under `undertow run`
  Do the same in forward(), or start the program without `undertow run`.
Read more: undertow docs troubleshooting
Frames of Undertow are left out: UNDERTOW_TRACEBACK=full shows them.
"""


@pytest.mark.slow
def test_a_class_that_overrides_private_methods_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "private.py").write_text(PRIVATE)
    done = run(*UNDERTOW, "run", FORKED, tmp_path / "private.py")
    assert (done.returncode, done.stderr.replace("[rank0]: ", "").endswith(OVERRIDES)) == (1, True), done.stderr


BOUND = """
import sys
from torch.nn.parallel import DistributedDataParallel
sys.path.insert(0, {site!r})
import sitecustomize
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
print(type(model).__module__, type(model).__name__, isinstance(model, DistributedDataParallel))
"""


@pytest.mark.slow
def test_a_name_that_was_bound_before_makes_ours() -> None:
    site = Path(sys.modules["undertow"].__path__[0]) / "lab" / "runner" / "site"
    done = run(FORKED, "-c", BOUND.format(site=str(site)), UNDERTOW_RUN="")
    assert done.stdout == "undertow.lab.runner.replacing DistributedDataParallel True\n", done.stderr


ODD = """
import inspect, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
print("broadcast_buffers" in inspect.signature(DistributedDataParallel).parameters)
for wrong in ({}, {"find_unused": True}):
    try:
        DistributedDataParallel(torch.nn.Linear(2, 2), **wrong)
    except Exception as error:
        print(error if wrong else type(error).__name__, flush=True)
if os.fork() == 0:  # before gloo has threads, which a forked process lacks
    raise SystemExit(0)
os.wait()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed._composable.replicate import replicate
replicate(net := torch.nn.Linear(2, 2))
net(torch.ones(1, 2)).sum().backward()
model = DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
"""
UNEXPECTED = (
    "DistributedDataParallel has no argument 'find_unused'.\n  DistributedDataParallel(...)\n"
    "  Write settings of Undertow as config=SyncConfig(...). The other arguments have torch's names."
)


@pytest.mark.slow
def test_a_program_in_one_process_keeps_its_ways(tmp_path: Path) -> None:
    """The signature, no process group, a wrong keyword, torch's `replicate`, and forked processes, which report nothing."""
    (tmp_path / "odd.py").write_text(ODD)
    done = run(*UNDERTOW, "run", FORKED, tmp_path / "odd.py")
    assert (done.returncode, done.stdout) == (0, f"True\nConfigError\n{UNEXPECTED}\n"), done.stderr
    assert done.stderr.count(REPORTED) == 0, done.stderr


RAISES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
raise ValueError("row 7 has no label")
"""


@pytest.mark.slow
def test_after_an_error_of_the_program_no_report_hides_it(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text(RAISES)
    done = run(*UNDERTOW, "run", "--out", tmp_path / "out", FORKED, tmp_path / "raises.py")
    *_, said, last = done.stderr.splitlines()
    assert (done.returncode, said.endswith("ValueError: row 7 has no label"), REPORTED in done.stderr) == (1, True, False)
    assert last.startswith("The files are in ")


WITHOUT_A_RANK = """
import os, signal, sys, torch, torch.distributed as dist
folder, rank, lost = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-point", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for step in range(100_000):
    model(torch.ones(1, 2)).sum().backward()
    if step == 12 and rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_leaves_the_files_of_the_other_and_is_named(lost: int, tmp_path: Path) -> None:
    """Without torchrun, which would end the other rank by a signal when it has seen that one is lost."""
    (tmp_path / "script.py").write_text(WITHOUT_A_RANK)
    out, other = tmp_path / "out", 1 - lost
    command = (*UNDERTOW, "run", "--out", out, FORKED, tmp_path / "script.py", tmp_path)
    with ThreadPoolExecutor(2) as threads:
        ends = [*threads.map(lambda rank: run(*command, rank, lost), range(2))]
    said = ends[other].stderr
    gone = f"undertow run: rank {lost} is gone: its process exited or was killed without reporting an error.\n"
    assert (ends[other].returncode, said.count(gone), said.count("The files are in ")) == (1, 1, 1), said
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert files == {"plan.json", "profile.json", f"report-rank{other}.json", f"traces/trace.rank{other}.json.gz"}


ECHO = "import sys; print(sys.stdin.read(), sys.argv[1:]); sys.exit(13)"


def test_what_is_the_programs_passes_through(tmp_path: Path) -> None:
    mine = tmp_path / "sitecustomize.py"
    mine.write_text("import sys; print('mine first:', [path for path in sys.path if path.endswith('site')])")
    done = run(*UNDERTOW, "run", sys.executable, "-c", ECHO, "--set", "a b", stdin="in", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (
        13,
        "mine first: []\n" * 2 + "in ['--set', 'a b']\n",
    )  # the runner's Python has it too
    assert done.stderr == NOTHING
    ended = run(*UNDERTOW, "run", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert ended.returncode == -signal.SIGTERM
    (tmp_path / "script.py").write_text(ECHO)
    done = run(*UNDERTOW, tmp_path / "script.py", "1", stdin="x")
    assert (done.returncode, done.stdout) == (13, "x ['1']\n")


BAD: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no command": (
        (),
        2,
        "no command is given.\n  Write the command that starts the training: undertow run torchrun --nproc-per-node=2 train.py\n",
    ),
    "an unknown command": (
        ("torchrunn", "x.py"),
        127,
        "torchrunn cannot be started: No such file or directory.\n"
        "  Check the command: it must start without `undertow run` too.\n",
    ),
    "a file that is no program": (
        ("{folder}/data.txt",),
        126,
        "{folder}/data.txt cannot be started: Permission denied.\n"
        "  Check the command: it must start without `undertow run` too.\n",
    ),
    "an unknown setting": (
        ("--set", "bucket_cap=3", "python", "x.py"),
        2,
        "setting 'bucket_cap' does not exist.\n  undertow run --set\n  Did you mean 'bucket_cap_mb'?\n",
    ),
    "a setting without a value": (
        ("--set", "record", "python", "x.py"),
        2,
        "--set record gives no value.\n  Write --set name=value, without spaces.\n",
    ),
    "a folder that cannot be": (
        ("--out", "{folder}/data.txt", "python", "x.py"),
        2,
        "nothing can be written to '{folder}/data.txt': File exists.\n  undertow run\n  Give another directory: --out DIR.\n",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_started_is_an_error_with_an_exit_code(name: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").touch()
    arguments, code, text = BAD[name]
    done = run(*UNDERTOW, "run", *(argument.format(folder=tmp_path, python=sys.executable) for argument in arguments))
    assert (done.returncode, done.stderr) == (code, "undertow run: " + text.format(folder=tmp_path))


@pytest.mark.parametrize("option", ["--ou", "--se", "--frob"])
def test_an_option_that_is_not_written_out_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main([option, "bucket_cap_mb=25", "python", "train.py"])
    assert (error.value.code, capsys.readouterr().err.splitlines()[1:]) == (
        2,
        [f"undertow run: error: unrecognized arguments: {option}"],
    )


def test_settings_come_from_variables() -> None:
    variables = {"UNDERTOW_OVERLAP": "False", "UNDERTOW_WIRE": "bf16", "A": "1"}
    assert settings_from(variables) == {"overlap": False, "wire": "bf16"}
    assert settings_from({"UNDERTOW_PLAN": PLAN}) == {"plan": PLAN}


def test_settings_of_outer_synchronization_are_one_variable() -> None:
    variables = variables_of(["outer.every=30", "outer.wire=none", "outer.lr=0.5"], {})
    assert settings_from(variables) == {"outer": {"every": 30, "wire": None, "lr": 0.5}}
    assert refusal(lambda: variables_of(["outer.ever=30"], {})) == (
        "setting 'ever' does not exist.\n  Outer\n  Did you mean 'every'?"
    )


@pytest.mark.parametrize(
    ("given", "assignments", "wanted"),
    [
        ('{"every": 30, "lr": 0.6}', ["outer.every=10"], {"every": 10, "lr": 0.6}),
        ('{"every": 30, "lr": 0.6}', ["outer.wire=none"], {"every": 30, "lr": 0.6, "wire": None}),
        ('{"every": 30, "lr": 0.6}', ['outer={"every": 20}', "outer.mix=0.5"], {"every": 20, "mix": 0.5}),
        ("null", ["outer.every=10"], {"every": 10}),
        ("None", ["outer.every=10"], {"every": 10}),
    ],
)
def test_a_single_setting_of_outer_synchronization_keeps_the_others(
    given: str, assignments: list[str], wanted: dict[str, object]
) -> None:
    environment = {"UNDERTOW_OUTER": given, "UNDERTOW_OVERLAP": "false"}
    assert settings_from({**environment, **variables_of(assignments, environment)}) == {"overlap": False, "outer": wanted}


def test_outer_settings_that_are_no_settings_are_refused() -> None:
    assert refusal(lambda: variables_of(["outer.every=10"], {"UNDERTOW_OUTER": "30"})) == (
        "the outer settings are 30, which has no single ones to replace.\n"
        "  undertow run --set outer.NAME, UNDERTOW_OUTER\n"
        "  Give them in JSON, as in UNDERTOW_OUTER='{\"every\": 30}', or leave them out."
    )


GROUPS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
alone = [dist.new_group([each]) for each in range(2)][rank]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=alone)
for _ in range(12):
    model(torch.ones(2, 4)).sum().backward()
"""


@pytest.mark.slow
def test_each_group_has_files_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "groups.py").write_text(GROUPS)
    out = tmp_path / "out"
    done = run(*UNDERTOW, "run", "--out", out, FORKED, *TORCHRUN, tmp_path / "groups.py")
    assert done.returncode == 0, done.stderr
    names = {path.name for path in out.iterdir() if path.suffix == ".json"}
    assert names == {*("plan.json", "plan-rank1.json", "report-rank0.json", "report-rank1.json")}
