"""What a rank writes for torch's Flight Recorder when a step fails, as `torchfrtrace` reads it."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from faults.places import PLACES
from support.faults import Fault, run_rank
from support.processes import Ended, Rank, run_ranks

pytestmark = pytest.mark.waits
analyzer = pytest.importorskip("torch.distributed.flight_recorder.fr_trace", reason="torch before 2.13 has no torchfrtrace")


def _with(variables: dict[str, str], fault: Fault, rank: Rank) -> list[str]:
    os.environ.update(variables)
    return run_rank(fault, None, rank)


def ended(fault: Fault, **variables: object) -> list[Ended]:
    return run_ranks(partial(_with, {name: str(value) for name, value in variables.items()}, fault), fault.num_ranks)


def read(folder: Path, *options: str) -> tuple[dict[int, list[dict[str, Any]]], Any]:
    """The entries of each rank, and the database that torch's analyzer makes of them."""
    arguments = analyzer.JobConfig().parse_args([str(folder), *options])
    details, version = analyzer.read_dir(arguments)
    assert version == "2.10"
    entries = {dump["rank"]: list(dump["entries"]) for dump in details.values()}
    return entries, analyzer.build_db(details, arguments, version)


@pytest.mark.parametrize("way", ["ddp", "zero1"])
def test_a_stall_names_the_collective_that_a_rank_has_not_joined(way: str, tmp_path: Path) -> None:
    # Neither buffers nor the exchange under an old plan are recorded.
    settings = {"stall_timeout_s": 1.0, "buffers": "off", "order": "reverse"}
    fault = replace(PLACES["in data"].fault("late for good", 2, way=way, settings=settings), step=5)
    assert [rank.kind for rank in ended(fault, UNDERTOW_TRACE=tmp_path)] == ["StallTimeout", "StallTimeout"]
    entries, database = read(tmp_path)
    alike = [it for it in database.collectives if it.pass_check and not it.missing_ranks]
    assert len(alike) >= 3  # of the steps before
    assert {it.collective_state for it in alike} == {"completed"}
    (stuck, *_) = (it for it in entries[0] if it["state"] != "completed")
    assert stuck["collective_seq_id"] not in {it["collective_seq_id"] for it in entries[1]}
    unmatched = next(it for it in database.collectives if it.missing_ranks)
    assert (unmatched.collective_seq_id, unmatched.missing_ranks) == (stuck["collective_seq_id"], {1})


def test_a_lost_rank_leaves_the_files_of_the_others(tmp_path: Path) -> None:
    fault = PLACES["in forward"].fault("killed", 3)
    found = ended(fault, TORCH_FR_DUMP_TEMP_FILE=tmp_path / "rank_")
    assert [found[rank].kind for rank in fault.others] == ["RankLost", "RankLost"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rank_{rank}" for rank in fault.others]
    entries, database = read(tmp_path, "--allow-incomplete-ranks")
    assert (sorted(entries), [it.desc for it in database.groups], database.groups[0].size) == (fault.others, ["undertow"], 3)


@pytest.mark.parametrize("is_writable", [True, False])
def test_without_a_place_nothing_is_written_and_the_error_is_the_same(
    is_writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    variables: Any = {} if is_writable else {"UNDERTOW_TRACE": tmp_path / "file" / "below"}
    found = ended(PLACES["in forward"].fault("killed", 2), **variables)
    assert (found[0].kind, [path.name for path in tmp_path.iterdir()]) == ("RankLost", ["file"])
