"""Runs of the harness: the entry and ranks of `make bench`, cells of the matrix, and with root what shaped links carry."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from benchmarks.matrix.catalog import SYSTEMS, SystemSpec
from benchmarks.matrix.environments import peers, python_of, why_absent
from benchmarks.matrix.links import PREFIX
from benchmarks.ranks import run_ranks

pytestmark = pytest.mark.bench
Measure, PATIENCE_S = Callable[..., dict[str, dict[str, Any]]], 120.0


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("not on this rank")
    dist.barrier()


def test_a_rank_that_raises_ends_the_others() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1:\n(.|\n)*ValueError: not on this rank"):
        run_ranks(_one_raises, 2)
    assert _ranks() == []


def _ranks() -> list[int]:
    processes = [it.info for it in psutil.process_iter(["pid", "ppid", "cmdline"])]
    return [it["pid"] for it in processes if it["ppid"] == os.getpid() and "spawn_main" in " ".join(it["cmdline"] or ())]


def bad(how: str) -> SystemSpec:
    return SystemSpec(name=how, title=how, module="tests.bench.bad_systems", variants={"": {"how": how}})


@pytest.mark.usefixtures("forked")
def test_every_system_of_the_main_environment_trains_right(measure: Measure) -> None:
    ours = ("ours", "ours-ordered", "ours-zero1", "ours-zero2")
    names = ("bare", "per-parameter", *ours, "torch-ddp", "torch-ddp-best", "torch-zero", "fsdp2")
    rows = measure(*names, kind="local", link="none")
    # Two of the four steps of a turn count.
    assert {name: (row["error"], row["num_steps"]) for name, row in rows.items()} == dict.fromkeys(names, (None, 2))
    # The sweep shows the best of its variants. Ranks share the interface: nobody's bytes can be told.
    assert rows["torch-ddp-best"]["variant"] is not None
    assert (rows["ours"]["sent_mb"], rows["per-parameter"]["collectives"]) == (None, 48)
    # Half of the momentum of 480,000 elements; torch's gives whole parameters away.
    whole = rows["per-parameter"]["state_mb"]
    for name in ("ours-zero1", "ours-zero2"):
        assert rows[name]["state_mb"] == pytest.approx(whole / 2, rel=0.02), name


@pytest.mark.parametrize("environment", peers())
def test_every_system_of_a_peer_trains_right(environment: str, measure: Measure) -> None:
    if python_of(environment) is None:
        pytest.skip(why_absent(environment))
    names = [name for name, spec in SYSTEMS.items() if spec.environment == environment]
    rows = measure("bare", *names, kind="local", link="none")
    assert {name: rows[name]["error"] for name in names} == dict.fromkeys(names)


FAILING = {
    "forgets to average": "trains wrongly: blocks.0.params.0, blocks.0.params.1, blocks.1.params.0 and 48 in all are not",
    "dies": "rank 1 was killed by SIGKILL. The end of rank 1's log:\nthe last line of rank 1",
}
ABSENT = {
    "cannot be imported": ({"module": "no_such_package"}, "ModuleNotFoundError: No module named 'no_such_package'"),
    "has no environment": (
        {"module": "x", "environment": "never-made"},
        "no virtual environment .venv-peers/never-made; make bench-peers makes it",
    ),
}


@pytest.mark.usefixtures("forked")
def test_systems_that_fail_are_lost_alone(measure: Measure) -> None:
    systems = [bad(how) for how in FAILING]
    systems += [SystemSpec(name=name, title=name, **given) for name, (given, _) in ABSENT.items()]
    rows = measure("bare", *systems, "per-parameter", kind="local", link="none")
    for name, error in FAILING.items():
        assert error in rows[name]["error"], name
    others = {name: error for name, (_, error) in ABSENT.items()} | {"bare": None, "per-parameter": None}
    assert {name: rows[name]["error"] for name in others} == others


# Over networks of namespaces.


def namespaces_of(process_id: int) -> list[str]:
    return sorted(path.name for path in Path("/run/netns").glob(f"{PREFIX}{process_id}-*"))


@pytest.mark.root
@pytest.mark.usefixtures("needs_namespaces", "forked")
def test_a_shaped_link_counts_what_each_rank_sends(measure: Measure) -> None:
    rows = measure("bare", "per-parameter", "ours", kind="shaped")
    assert ({row["error"] for row in rows.values()}, namespaces_of(os.getpid())) == ({None}, [])
    # An all-reduce of 0.48 MB between two ranks sends it once each; headers and acknowledgements come on top.
    assert rows["bare"]["sent_mb"] <= 0.01 < 0.48 <= rows["ours"]["sent_mb"] <= 0.60
