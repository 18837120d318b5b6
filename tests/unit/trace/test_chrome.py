"""Traces for viewers: the rules of the format, what they show of a step, and merging those of several ranks."""

import gzip
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.cli import Undertow
from support.records import GATHERS, record, row, two_buckets
from undertow.errors import ConfigError
from undertow.trace import StepRecord
from undertow.trace.chrome import trace_text
from undertow.trace.files import merge, path_of_rank, write_whole

START_NS = 1_700_000_000_000_000_000


def text_of(
    records: Sequence[StepRecord], predicted: StepRecord | None = None, wire_dtype: str | None = None, **changes: Any
) -> str:
    facts = {"run": "a run", "rank": 0, "ranks": (0, 1), "backend": "gloo", "began_ns": START_NS, "prediction": "a note"}
    return trace_text(records, facts | {"model": 0} | changes, two_buckets(), predicted, wire_dtype=wire_dtype)


def trace_of(*records: StepRecord, **changes: Any) -> dict[str, Any]:
    return json.loads(text_of(records or (record(),), **changes))


def spans(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """The events of each thread by process and thread: start, end in nanoseconds, and name; in order."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start, stop = (nanoseconds(event, "ts"), nanoseconds(event, "ts") + nanoseconds(event, "dur"))
            found[event["pid"], event["tid"]].append((start, stop, event["name"]))
    return {thread: sorted(events) for thread, events in found.items()}


def nanoseconds(event: dict[str, Any], field: str) -> int:
    """As Perfetto reads it: early versions cut off, later ones round. Negative times are dropped by all."""
    assert int(event[field] * 1e3) == round(event[field] * 1e3) >= 0, event
    return round(event[field] * 1e3)


def require_rules(trace: dict[str, Any]) -> None:
    """What Perfetto asks of a file: no overlap on a thread, names, and flows both ends of which lie in an event."""
    threads, flows = spans(trace), defaultdict(list)
    for thread, events in threads.items():
        for (start, stop, name), (following, *_) in zip(events, [*events[1:], (2**63, 0, "")], strict=True):
            assert start < stop <= following, (thread, name)
    named = {(it["pid"], it["tid"]) for it in trace["traceEvents"] if it["name"] == "thread_name"}
    assert threads.keys() <= named
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            at = nanoseconds(event, "ts")
            flows[event["id"]].append((event["ph"], at))
            assert any(start <= at < stop for start, stop, _ in threads[event["pid"], event["tid"]]), event
    for flow in flows.values():
        assert [phase for phase, _ in flow] == ["s", "t", "f"]
        assert [at for _, at in flow] == sorted(at for _, at in flow)


def test_a_step_is_shown_as_it_was() -> None:
    trace = trace_of(record(step=7))
    ms = 1_000_000
    assert spans(trace) == {
        (1, 1): [(0, 100 * ms, "ProfilerStep#7")],
        (1, 2): [
            (0, 20 * ms, "forward"),
            (20 * ms, 60 * ms, "backward"),
            (60 * ms, 60 * ms + 1, "wait b0"),  # which had come
            (60 * ms + 1, 80 * ms, "wait b1"),
            (80 * ms, 100 * ms, "optimizer and rest"),
        ],
        (1, 10): [(30 * ms, 50 * ms, "ncclKernel_all_reduce b0"), (60 * ms, 80 * ms, "ncclKernel_all_reduce b1")],
    }
    (args, _) = (it["args"] for it in trace["traceEvents"] if it["name"].startswith("nccl"))
    assert args == {
        "Collective name": "all_reduce",
        "In msg nelems": two_buckets().buckets[0].numel,
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "undertow",
        "Rank": 0,
        "Seq": 700_001,
        "stream": 10,
        "correlation": 2**20 + 7,
    }
    assert [it["ts"] for it in trace["traceEvents"] if it["ph"] == "i"] == [3e4, 6e4]
    require_rules(trace)


def test_collectives_in_flight_at_a_time_have_threads_of_their_own() -> None:
    trace = trace_of(record(gathers=GATHERS), record(step=1, gathers=GATHERS))
    require_rules(trace)
    assert {tid for _, tid in spans(trace)} == {1, 2, 10, 11}


def test_a_wire_dtype_is_what_is_sent() -> None:
    (args, *_) = (it["args"] for it in trace_of(wire_dtype="bfloat16")["traceEvents"] if it["name"].startswith("nccl"))
    assert (args["dtype"], args["In msg nelems"]) == ("BFloat16", 2 * two_buckets().buckets[0].numel)


def test_a_predicted_step_lies_beside_the_last_measured_one() -> None:
    records = [record(step=step, generation=int(step > 0)) for step in range(4)]
    trace = trace_of(*records, predicted=record(step_us=120_000.0))
    require_rules(trace)
    assert [start // 1_000_000 for start, *_ in spans(trace)[2, 1]] == [300]
    assert all("stream" not in it.get("args", {}) for it in trace["traceEvents"] if it["pid"] == 2)  # HTA counts none of it
    assert (trace["undertow_trace"]["prediction"], trace_of()["undertow_trace"]["prediction"]) == ("a note", "a note")


times_us = st.floats(-5e3, 1e5)


@given(st.lists(st.tuples(times_us, times_us, times_us, times_us, times_us), min_size=1, max_size=6), st.booleans())
def test_the_rules_hold_whatever_the_times_are(rows: list[tuple[float, ...]], are_gathers: bool) -> None:
    """Marks of other threads and devices may be in any order, except that nothing is done before it began."""
    made = []
    for index, times in enumerate(rows):
        ready, launched, done, *_ = sorted(times if are_gathers else map(abs, times))
        waited = sorted(times[3:] if are_gathers else map(abs, times[3:]))
        kind = "all_gather" if are_gathers else "all_reduce"
        made.append(replace(row(index % 2, launched, done, tuple(waited), kind=kind), ready_us=min(ready, waited[0])))
    steps = [record(step=step, step_us=1e5 + 1.0, **{"gathers" if are_gathers else "buckets": tuple(made)}) for step in range(3)]
    trace = trace_of(*steps)
    for thread, events in spans(trace).items():
        for (start, stop, name), (following, *_) in zip(events, [*events[1:], (2**63, 0, "")], strict=True):
            assert start < stop <= following, (thread, name)
    flows = Counter(it["id"] for it in trace["traceEvents"] if it["ph"] in "stf")
    assert set(flows.values()) == {3}


def test_four_ranks_fifty_steps_and_twenty_buckets_are_a_small_file(tmp_path: Path) -> None:
    many = tuple(row(index % 2, 1_000.0 * index, 1_000.0 * index + 900, (6e4 + index, 6e4 + index + 0.5)) for index in range(20))
    for rank in range(4):
        records = [record(step=step, buckets=many) for step in range(50)]
        text = text_of(records, record(buckets=many), rank=rank, ranks=(0, 1, 2, 3))
        (tmp_path / f"t-rank{rank}.json").write_text(text)
    merge(tmp_path, tmp_path / "out.json")
    assert (tmp_path / "out.json").stat().st_size < 20e6  # uncompressed


def saved(folder: Path, trace: dict[str, Any], name: str = "trace-rank{}.json.gz") -> Path:
    path = folder / name.format(trace["distributedInfo"]["rank"])
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def test_merging_aligns_clocks_by_what_ranks_leave_together(tmp_path: Path) -> None:
    records = [record(step=step) for step in range(3)]
    saved(tmp_path, trace_of(*records))
    # This rank's clock is an hour ahead, and its first recorded step began 5 ms late.
    late = replace(records[1], step_us=95_000.0, buckets=tuple(_earlier(row) for row in records[1].buckets)), records[2]
    saved(tmp_path, trace_of(*late, rank=1, began_ns=START_NS + 3600 * 10**9))
    assert merge(tmp_path, tmp_path / "all.json.gz") == "2 traces of 2 ranks"
    merged = json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))
    require_rules(merged)
    ends = {
        pid: [stop for _, stop, name in events if name == "wait b1"] for (pid, tid), events in spans(merged).items() if tid == 2
    }
    first, second = ends.values()
    assert first[1] == second[0]
    assert merged["baseTimeNanoseconds"] == START_NS
    assert {it["args"]["name"] for it in merged["traceEvents"] if it["name"] == "process_name"} == {"rank 0", "rank 1"}


def _earlier(row: Any) -> Any:
    times = {"ready_us": row.ready_us - 5e3, "launched_us": row.launched_us - 5e3, "done_us": row.done_us - 5e3}
    return replace(row, **times, waited=(row.waited[0] - 5e3, row.waited[1] - 5e3))


def test_models_of_a_rank_keep_their_distance_and_ranks_are_aligned_by_the_same_model(tmp_path: Path) -> None:
    clocks_ns = (START_NS, START_NS - 5 * 10**9)  # the second rank's clock is five seconds late
    for rank, began_ns in enumerate(clocks_ns):
        saved(tmp_path, trace_of(rank=rank, began_ns=began_ns))
        later = trace_of(rank=rank, began_ns=began_ns + 10**9, model=1)  # with the same numbers of steps, a second later
        saved(tmp_path, later, "trace-2-rank{}.json.gz")
    merge(tmp_path, tmp_path / "all-rank.json.gz")
    assert merge(tmp_path, tmp_path / "all-rank.json.gz") == "4 traces of 2 ranks"  # the earlier result is not a rank's
    merged = json.loads(gzip.decompress((tmp_path / "all-rank.json.gz").read_bytes()))
    require_rules(merged)
    names = {it["pid"]: it["args"]["name"] for it in merged["traceEvents"] if it["name"] == "process_name"}
    begins = {names[it["pid"]]: it["ts"] for it in merged["traceEvents"] if it["name"] == "ProfilerStep#0"}
    assert begins == {"rank 0": 0.0, "rank 0, model 2": 1e6, "rank 1": 0.0, "rank 1, model 2": 1e6}


def test_without_a_common_step_the_hosts_clocks_count(tmp_path: Path) -> None:
    saved(tmp_path, trace_of(record()))
    saved(tmp_path, trace_of(record(step=9), rank=1, began_ns=START_NS + 10**9))
    merge(tmp_path, tmp_path / "all.json")
    steps = [(it["ts"], it["name"]) for it in json.loads((tmp_path / "all.json").read_text())["traceEvents"] if it["tid"] == 1]
    assert [it for it in steps if it[1].startswith("Profiler")] == [(0.0, "ProfilerStep#0"), (1e6, "ProfilerStep#9")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "traces"
    path.mkdir()
    for rank in range(2):
        saved(path, trace_of(rank=rank))
    return path


def test_the_command_merges_and_tells_of_missing_ranks(folder: Path, undertow: Undertow) -> None:
    (folder / "report-rank0.json").write_text('{"rank": 0}')  # no trace
    assert undertow(f"trace {folder}") == (0, f"2 traces of 2 ranks: {folder}.json.gz\n", "")
    (folder / "trace-rank1.json.gz").unlink()
    found = undertow(f"trace {folder} --out {folder}/it.json")
    assert found == (0, f"1 traces of 1 ranks; there are none of ranks 1: {folder}/it.json\n", "")
    assert "none of ranks 1" in json.loads((folder / "it.json").read_text())["undertow_trace"]["merged"]


def cut(folder: Path) -> None:
    path = folder / "trace-rank1.json.gz"
    path.write_bytes(path.read_bytes()[:-50])


def no_gzip(folder: Path) -> None:
    (folder / "trace-rank1.json.gz").write_bytes(b"it is not")


def half(folder: Path) -> None:
    saved(folder, {"undertow_trace": {"run": "a run"}, "distributedInfo": {"rank": 1}})


def of_another_run(folder: Path) -> None:
    saved(folder, trace_of(rank=1, run="another"))


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


WRONG: dict[Callable[[Path], None], tuple[str, str, str]] = {
    empty: (
        "there is no trace.",
        "undertow trace {folder}",
        "Start the training with UNDERTOW_TRACE=DIR, or call model.save_trace(path) on every rank.",
    ),
    of_another_run: (
        "the traces are of different runs.",
        "trace-rank1.json.gz and trace-rank0.json.gz in {folder}",
        "Keep the files of each run in a separate folder.",
    ),
    **{
        damage: (
            f"trace-rank1.json.gz is not a whole trace: {why}.",
            "{folder}/trace-rank1.json.gz",
            "Delete it, or write this rank's trace again.",
        )
        for damage, why in {
            cut: "Compressed file ended before the end-of-stream marker was reached",
            no_gzip: "Not a gzipped file (b'it')",
            half: "'rank'",
        }.items()
    },
}


@pytest.mark.parametrize("damage", WRONG, ids=lambda damage: damage.__name__)
def test_what_cannot_be_merged_is_said_in_three_parts(damage: Callable[[Path], None], folder: Path, undertow: Undertow) -> None:
    damage(folder)
    text = "\n  ".join(WRONG[damage]).format(folder=folder)
    assert undertow(f"trace {folder}") == (2, "", f"Error: {text}\n")
    assert not folder.with_name("traces.json.gz").exists()


@pytest.mark.parametrize("out", ["file/x.json", "/dev/full/x.json", "traces"])
def test_a_place_that_cannot_be_written_is_an_error(out: str, folder: Path, undertow: Undertow) -> None:
    (folder.parent / "file").write_text("")
    found = undertow(f"trace {folder} --out {folder.parent / out}")
    assert (found.code, found.err.count("\n")) == (2, 3)
    assert f"'{folder.parent / out}' cannot be written: " in found.err
    assert found.err.endswith("  Name a folder with space to write.\n")


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "it.json"
    path.write_text("earlier")

    def full(partial: Path, content: bytes) -> None:
        with partial.open("wb") as file:
            file.write(content[:2])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"cannot be written: No space left on device.\n  here\n  Name"):
        write_whole(path, b"content", where="here")
    assert ([it.name for it in tmp_path.iterdir()], path.read_text()) == (["it.json"], "earlier")


def test_the_rank_is_part_of_the_name() -> None:
    assert path_of_rank("a/trace.json.gz", 3) == Path("a/trace-rank3.json.gz")
    assert path_of_rank("trace.json", 3, 1) == Path("trace-2-rank3.json")
    with pytest.raises(ConfigError) as raised:
        path_of_rank("trace.txt", 0)
    assert str(raised.value) == (
        "a trace is a .json or .json.gz file, got 'trace.txt'.\n  save_trace('trace.txt')\n"
        '  Write save_trace("trace.json.gz"); each rank puts its number into the name.'
    )
