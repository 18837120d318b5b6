"""The matrix with models on CUDA devices, as far as it shows without one; namespaces that a runner has left."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.matrix import catalog, environments, install, links
from benchmarks.matrix.catalog import MAIN, SYSTEMS
from benchmarks.matrix.cell import Cell, Effort, kind_of, max_systems, measure_cell, runs_of
from benchmarks.matrix.job import Job
from benchmarks.matrix.links import Network
from benchmarks.matrix.profile import PROFILES, scaled
from benchmarks.matrix.run import main

from support.project import ROOT


# What would have run, on a machine with two devices.
@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, Network]]:
    found: list[tuple[Job, Network]] = []

    def run_job(job: Job, network: Network, **_: Any) -> list[dict[str, Any]]:
        found.append((job, network))
        return []

    monkeypatch.setattr("benchmarks.matrix.cell.run_job", run_job)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    return found


def measure(*systems: str, num_ranks: int) -> dict[str, str]:
    place = {
        "workload": catalog.WORKLOADS["gpt"],
        "num_ranks": num_ranks,
        "link": "none",
        "kind": kind_of("none", num_ranks, "cuda", has_namespaces=False),
        "device": "cuda",
    }
    what = {"systems": tuple(catalog.SYSTEMS[name] for name in systems), "effort": Effort(num_turns=1)}
    return measure_cell(Cell(**place, **what), lambda _line: None).errors


@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize(
    ("device", "link", "num_ranks", "with_namespaces", "without"),
    [
        ("cpu", "none", 2, "shaped", "local"),
        ("cuda", "1gbit", 2, "shaped", "local"),
        ("cuda", "none", 2, "local", "local"),  # a device each
        ("cuda", "none", 4, "shaped", "local"),  # shared ones
    ],
)
def test_links_are_shaped_where_they_can_be_and_nccl_finds_its_ranks(
    device: str, link: str, num_ranks: int, with_namespaces: str, without: str
) -> None:
    assert [kind_of(link, num_ranks, device, has_namespaces=has_namespaces) for has_namespaces in (True, False)] == [
        with_namespaces,
        without,
    ]


def test_ranks_with_a_device_each_talk_over_nccl_and_those_that_share_one_over_gloo(ran: list[tuple[Job, Network]]) -> None:
    assert [measure("bare", "ours", num_ranks=num_ranks) for num_ranks in (2, 4)] == [{}, {}]
    # All of them on the machine's own network, of which nobody's bytes can be told.
    on_machine = ("local", "lo", (), None)
    assert [
        (job.backend, network.kind, network.interface, network.namespaces, job.counted_interface) for job, network in ran
    ] == [("cpu:gloo,cuda:nccl", *on_machine), ("gloo", *on_machine)]


NOBODY = 2**22 + 1  # above every process id of Linux
LEFT = [f"{links.PREFIX}{NOBODY}-0-{end}" for end in ("0", "1", "hub")]


# Those of a runner that is no more, one of this process, and somebody else's.
@pytest.fixture
def namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(links, "NAMESPACES", tmp_path)
    for name in (*LEFT, f"{links.PREFIX}{os.getpid()}-0-hub", "mine"):
        (tmp_path / name).touch()
    return tmp_path


def test_what_is_gone_is_named(namespaces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (namespaces / command[-1]).unlink()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(links.subprocess, "run", delete)
    assert (links.remove_abandoned(), sorted(path.name for path in namespaces.iterdir()), links.remove_abandoned()) == (
        (LEFT, None),
        ["mine", f"{links.PREFIX}{os.getpid()}-0-hub"],
        ([], None),
    )


def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(command, 1, "", f'Cannot remove namespace file "{command[-1]}": Operation not permitted\n')


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("run", "why"),
    [
        (refuse, f'ip netns del {LEFT[-1]}: Cannot remove namespace file "{LEFT[-1]}": Operation not permitted'),
    ],
    ids=[
        "refused",
    ],
)
def test_what_could_not_be_removed_is_said_once_and_why(run: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.subprocess, "run", run)
    assert links.remove_abandoned() == ([], f"a runner that was killed has left {', '.join(LEFT)}, not to be removed now: {why}")


# Names that the command of the matrix knows, and the systems that run together.


LINKS = "links: 100mbit, 1gbit, 5gbit, none"
ANSWERS = {
    "--system torch-dpd": "there is no system 'torch-dpd'. Did you mean 'torch-ddp'?",
    "--workload replya": "there is no workload 'replya'. Did you mean 'replay'?",
    "--workload gpt@2": "workload 'gpt@2': gpt computes for real and has one size.",
    "--link 1gbt": f"there is no link '1gbt'. Did you mean '1gbit'?\n  {LINKS}",
    **({} if torch.cuda.is_available() else {"--device cuda": "there is no CUDA device here"}),
}


@pytest.mark.parametrize("line", ANSWERS)
def test_the_command_names_what_exists(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (main(line.split()), f"benchmarks matrix: {ANSWERS[line]}" in capsys.readouterr().err) == (2, True)


def test_a_workload_may_be_asked_for_at_another_scale() -> None:
    assert catalog.workload_from_text("gpt2").label == "gpt2@0.125"
    full = catalog.workload_from_text("gpt2@1")
    assert (full.label, full.gradient_bytes()) == ("gpt2@1", 4 * 124_438_272)


def test_every_profile_has_the_size_that_its_model_has() -> None:
    assert {name: (make().numel, make().num_params) for name, make in PROFILES.items()} == {
        "replay": (12_000_000, 48),
        "gpt2": (124_438_272, 146),
        "resnet50": (25_557_032, 161),
        "bert_large": (334_090_240, 290),
        "moe": (12_845_056, 3_104),
    }


def test_scaling_keeps_the_relation_of_wire_and_compute() -> None:
    full, half = PROFILES["bert_large"](), scaled(PROFILES["bert_large"](), 0.5)
    assert ((half.numel / full.numel, half.compute_ms / full.compute_ms), half.num_params) == (
        pytest.approx((0.5, 0.5)),
        full.num_params,
    )


def test_a_sweep_is_all_of_its_variants() -> None:
    (run,) = runs_of([catalog.SYSTEMS["torch-ddp-best"]], max_systems=10)
    assert [job.options for job in run.systems] == [{}, *({"bucket_cap_mb": size} for size in catalog.SWEEP_MB)]


PEER = catalog.SystemSpec(name="peer", title="a peer", module="peer", environment="elsewhere")


@pytest.mark.parametrize(
    ("names", "others", "most", "expected"),
    [
        (("bare", "ours", "torch-ddp"), [PEER], 10, {"main": ["bare ours torch-ddp"], "elsewhere": ["bare peer"]}),
        (("bare", "ours", "torch-ddp", "fsdp2"), [], 3, {"main": ["bare ours torch-ddp", "bare fsdp2"]}),
    ],
    ids=["of one environment", "that do not fit into memory together"],
)
def test_systems_share_processes_with_the_bare_model(
    names: tuple[str, ...], others: list[catalog.SystemSpec], most: int, expected: dict[str, list[str]]
) -> None:
    runs = runs_of([*(catalog.SYSTEMS[name] for name in names), *others], max_systems=most)
    assert [(run.environment, " ".join(job.name for job in run.systems)) for run in runs] == [
        (environment, systems) for environment, each in expected.items() for systems in each
    ]


def test_as_many_systems_run_together_as_fit_into_memory() -> None:
    assert max_systems(num_bytes=10**9, num_ranks=4, available_bytes=10**9) == 2


@pytest.mark.slow  # an interpreter of its own
def test_what_a_worker_imports_before_its_system_is_there_in_every_environment() -> None:
    imports = ", ".join(f"benchmarks.matrix.{name}" for name in ("worker", "turns", "truth", "workloads", "systems.bare"))
    check = f"import sys, {imports}; sys.exit(bool({{'undertow', 'rich', 'psutil', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, cwd=ROOT).returncode == 0


# Environments of peers: what is pinned, made, stale and absent.


PEERS = environments.peers()


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    return dict(line.split("==") for line in lines)


def fake_commands(name: str) -> list[list[str]]:
    place = str(environments.FOLDER / name)
    python = (sys.executable, str(environments.interpreter_of(name)))
    failing = "print('no wheel for this machine'); raise SystemExit(3)"
    return [
        [sys.executable, "-c", "import os, sys; os.makedirs(f'{sys.argv[1]}/bin'); os.symlink(*sys.argv[2:])", place, *python],
        [sys.executable, "-c", failing if name == "bad" else "pass"],
    ]


# Environments of two peers that are nothing yet; one of them cannot be made.
@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(install, "commands_for", fake_commands)
    monkeypatch.setattr(environments, "FOLDER", tmp_path / ".venv-peers")
    monkeypatch.setattr(environments, "PINS", tmp_path / "peers")
    (tmp_path / "peers").mkdir()
    for name in ("bad", "good"):
        (tmp_path / "peers" / f"{name}.txt").write_text("torch==1.0\n")
    return tmp_path / ".venv-peers"


def test_the_peers_of_the_catalog_are_those_that_can_be_made() -> None:
    assert {spec.environment for spec in SYSTEMS.values()} - {MAIN} == set(PEERS)


@pytest.mark.parametrize("peer", PEERS)
def test_every_peer_has_the_torch_of_the_project_and_names_it_first(peer: str) -> None:
    of_peer, of_project = pins(environments.pins_of(peer)), pins(ROOT / "constraints.txt")
    assert next(iter(of_peer)) == "torch"
    # Shared packages too: what is compared differs in the peer alone.
    assert {name: of_peer[name] for name in of_peer.keys() & of_project.keys()}.items() <= of_project.items()


def test_a_peer_that_cannot_be_made_does_not_stop_the_others(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main([]) == 1
    told = capsys.readouterr().err
    expected = (
        "bad: could not be made: ",
        "no wheel for this machine",
        "Not made: bad. The matrix goes on without, its rows say so.",
    )
    assert ([text for text in expected if text not in told], environments.python_of("bad")) == ([], None)
    why = "the virtual environment .venv-peers/bad could not be made; .venv-peers/bad.log says why"
    assert (environments.why_absent("bad"), environments.python_of("good"), environments.log_of("good").exists()) == (
        why,
        elsewhere / "good" / "bin" / "python",
        False,
    )


def half_made() -> None:
    environments.interpreter_of("good").parent.mkdir(parents=True)
    environments.interpreter_of("good").touch()


def without_its_interpreter() -> None:
    install.main(["good"])
    environments.interpreter_of("good").unlink()
    environments.interpreter_of("good").symlink_to("/no/such/python")


def of_other_pins() -> None:
    install.main(["good"])
    environments.pins_of("good").write_text("torch==2.0\n")


STALE = ".venv-peers/good is not whole, or not of the versions in peers/good.txt; make bench-peers makes it anew"
ABSENT = {
    half_made: "no virtual environment .venv-peers/good; make bench-peers makes it",
    without_its_interpreter: None,
    of_other_pins: STALE,
}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("make", ABSENT)
def test_an_environment_that_is_not_whole_is_absent(make: Callable[[], None]) -> None:
    make()
    assert (environments.python_of("good"), ABSENT[make] in (None, environments.why_absent("good"))) == (None, True)
