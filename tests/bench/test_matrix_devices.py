"""The matrix with models on CUDA devices, as far as it shows without one; namespaces that a runner has left."""

import os
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benchmarks.matrix import calibrate, catalog, links
from benchmarks.matrix.cell import Cell, Effort, kind_of, measure_cell
from benchmarks.matrix.finished import title_of
from benchmarks.matrix.job import Job
from benchmarks.matrix.links import Network


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
    kind = kind_of("none", num_ranks, "cuda", has_namespaces=False)
    place = {"workload": catalog.WORKLOADS["gpt"], "num_ranks": num_ranks, "link": "none", "kind": kind, "device": "cuda"}
    what = {"systems": tuple(catalog.SYSTEMS[name] for name in systems), "effort": Effort(num_turns=1, has_start_up=False)}
    return measure_cell(Cell(**place, **what), lambda _line: None).errors


@pytest.mark.usefixtures("ran")
@pytest.mark.parametrize(
    ("device", "link", "num_ranks", "with_namespaces", "without"),
    [
        ("cpu", "none", 2, "shaped", "emulated"),
        ("cpu", "1gbit", 2, "shaped", "emulated"),
        ("cuda", "1gbit", 2, "shaped", "emulated"),
        ("cuda", "none", 2, "local", "local"),  # a device each
        ("cuda", "none", 4, "shaped", "local"),  # shared ones
    ],
)
def test_devices_with_nothing_to_be_shaped_between_them_need_no_link_of_ours(
    device: str, link: str, num_ranks: int, with_namespaces: str, without: str
) -> None:
    assert kind_of(link, num_ranks, device, has_namespaces=True) == with_namespaces
    assert kind_of(link, num_ranks, device, has_namespaces=False) == without


def test_ranks_with_a_device_each_talk_over_nccl_and_those_that_share_one_over_gloo(ran: list[tuple[Job, Network]]) -> None:
    assert [measure("bare", "ours", num_ranks=num_ranks) for num_ranks in (2, 4)] == [{}, {}]
    assert [job.backend for job, _ in ran] == ["cpu:gloo,cuda:nccl", "gloo"]
    # All of them on the machine's own network, of which nobody's bytes can be told.
    assert [(network.kind, network.interface, network.namespaces) for _, network in ran] == [("local", "lo", ())] * 2
    assert [(job.emulated, job.counted_interface) for job, _ in ran] == [(None, None)] * 2


def test_what_is_set_up_for_processors_alone_says_so(ran: list[tuple[Job, Network]]) -> None:
    peers = ("megatron-ddp", "megatron-distopt", "deepspeed-zero1", "deepspeed-zero2")
    why = "set up for cpu alone, not for cuda: see Peers in docs/benchmarks.md"
    assert measure("bare", "ours", *peers, num_ranks=2) == dict.fromkeys(peers, why)
    assert [[system.name for system in job.systems] for job, _ in ran] == [["bare", "ours"]]


def test_a_train_of_calibration_has_as_many_bytes_as_the_gradients_on_a_device_and_16_mb_elsewhere(
    ran: list[tuple[Job, Network]],
) -> None:
    measure("bare", "ours", num_ranks=2)
    ((job, _),) = ran
    assert calibrate.train_bytes(torch.device("cuda"), job.gradient_bytes) == job.gradient_bytes == 498_000_000
    assert calibrate.train_bytes(torch.device("cuda"), 11_000_000) == 16 << 20
    assert calibrate.train_bytes(torch.device("cpu"), job.gradient_bytes) == 16 << 20


def test_calibration_sends_whole_pieces_and_says_how_many_bytes_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    all_reduce, beat = Mock(), Mock()
    monkeypatch.setattr(calibrate, "train_bytes", lambda _device, gradient_bytes: gradient_bytes)
    monkeypatch.setattr(calibrate.dist, "barrier", lambda group: None)
    monkeypatch.setattr(calibrate.dist, "all_reduce", all_reduce)
    told = calibrate.calibrate(None, torch.device("cpu"), gradient_bytes=38 << 20, beat=beat)  # type: ignore[arg-type]
    sizes = [(train["piece_bytes"], train["bytes"]) for train in told["trains"]]
    assert sizes == [(1 << 20, 38 << 20), (4 << 20, 36 << 20), (16 << 20, 32 << 20)]
    # The first one of each size, and those that count.
    sent = sum(call.args[0].nbytes for call in all_reduce.call_args_list)
    assert sent == 20 * 256 + (1 + calibrate.NUM_TRAINS) * sum(num_bytes for _, num_bytes in sizes)
    assert beat.call_count == 3 * calibrate.NUM_TRAINS


def test_the_link_of_such_a_cell_is_called_the_machine_s_own() -> None:
    place = {"workload": "gpt", "ranks": 2, "link": "none", "kind": "local", "device": "cuda"}
    assert title_of(place) == "gpt, 2 ranks, none (this machine's own), cuda"


NOBODY = 2**22 + 1  # above every process id of Linux
LEFT = [f"{links.PREFIX}{NOBODY}-0-{end}" for end in ("0", "1", "hub")]


# Those of a runner that is no more, one of this process, and somebody else's.
@pytest.fixture
def namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(links, "NAMESPACES", tmp_path)
    for name in (*LEFT, f"{links.PREFIX}{os.getpid()}-0-hub", "mine"):
        (tmp_path / name).touch()
    return tmp_path


def test_the_emulated_link_has_the_bucket_of_the_shaped_one_in_payload() -> None:
    assert links.SHAPES["5gbit"].burst_bytes == 655_360
    assert links.emulated_network("5gbit").burst_bytes == 626_524  # 95.6 %


def test_what_is_gone_is_named(namespaces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (namespaces / command[-1]).unlink()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(links.subprocess, "run", delete)
    assert links.remove_abandoned() == (LEFT, None)
    assert sorted(path.name for path in namespaces.iterdir()) == ["mine", f"{links.PREFIX}{os.getpid()}-0-hub"]
    assert links.remove_abandoned() == ([], None)


def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    why = f'Cannot remove namespace file "{command[-1]}": Operation not permitted\n'
    return subprocess.CompletedProcess(command, 1, "", why)


def absent(*_: Any, **__: Any) -> None:
    raise FileNotFoundError(2, "No such file or directory", "ip")


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("run", "why"),
    [
        (refuse, f'ip netns del {LEFT[-1]}: Cannot remove namespace file "{LEFT[-1]}": Operation not permitted'),
        (absent, "[Errno 2] No such file or directory: 'ip'"),
    ],
    ids=["refused", "without iproute2"],
)
def test_what_could_not_be_removed_is_said_once_and_why(run: Any, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.subprocess, "run", run)
    told = f"a runner that was killed has left {', '.join(LEFT)}, not to be removed now: {why}"
    assert links.remove_abandoned() == ([], told)
