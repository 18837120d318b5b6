"""Traces for viewers: the rules of the format, what they show of a step, and merging those of several ranks."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.cli import Undertow
from support.records import GATHERS, record, row, two_buckets
from undertow.errors import ConfigError
from undertow.lab.traces import merge, path_of_rank, trace_text
from undertow.trace import StepRecord

START_NS = 1_700_000_000_000_000_000


def text_of(records: Sequence[StepRecord], **changes: Any) -> str:
    facts = {"run": "a run", "rank": 0, "ranks": (0, 1), "began_ns": START_NS, "model": 0}
    return trace_text(records, facts | changes)


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
    """Perfetto drops negative times."""
    assert event[field] >= 0, event
    return round(event[field] * 1e3)


def require_rules(trace: dict[str, Any]) -> None:
    """What Perfetto asks of a file: events of a thread lie in each other or apart, threads have names, arrows go forward."""
    threads, flows = spans(trace), defaultdict(list)
    for thread, events in threads.items():
        open_until = [2**63]
        for start, stop, name in sorted(events, key=lambda event: (event[0], -event[1])):
            while open_until[-1] <= start:
                open_until.pop()
            assert stop <= open_until[-1], (thread, name)
            open_until.append(stop)
    named = {(it["pid"], it["tid"]) for it in trace["traceEvents"] if it["name"] == "thread_name"}
    assert threads.keys() <= named
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            flows[event["id"]].append((event["ph"], nanoseconds(event, "ts")))
    for flow in flows.values():
        assert [phase for phase, _ in sorted(flow, key=lambda each: each[1])] in (["s", "t"], ["s", "t", "f"])


def test_a_step_is_shown_as_it_was() -> None:
    trace = trace_of(record(step=7))
    ms = 1_000_000
    assert spans(trace) == {
        (1, 1): [(0, 100 * ms, "step 7")],
        (1, 2): [
            (0, 20 * ms, "forward"),
            (20 * ms, 60 * ms, "backward"),
            (60 * ms, 60 * ms, "wait b0"),  # which had come
            (60 * ms, 80 * ms, "wait b1"),
            (80 * ms, 100 * ms, "optimizer"),
        ],
        (1, 3): [(30 * ms, 50 * ms, "all_reduce b0"), (60 * ms, 80 * ms, "all_reduce b1")],
    }
    (args, _) = (it["args"] for it in trace["traceEvents"] if it["name"].startswith("all_reduce"))
    assert args == {"bytes": two_buckets().buckets[0].num_bytes, "launched_us": 3e4}
    assert [it["ts"] for it in trace["traceEvents"] if it["ph"] == "s"] == [3e4, 6e4]
    require_rules(trace)


def test_gathers_begin_before_their_step_and_have_a_thread() -> None:
    trace = trace_of(record(gathers=GATHERS), record(step=1, gathers=GATHERS))
    require_rules(trace)
    assert {tid for _, tid in spans(trace)} == {1, 2, 3, 4}
    # Buckets whose gradients are on the link one within the other.
    rows = row(0, 10_000, 70_000, (70_000, 70_000)), row(1, 20_000, 40_000, (60_000, 60_000))
    require_rules(trace_of(record(buckets=rows), record(step=1, buckets=rows[::-1])))


def test_codings_that_overlap_have_several_tracks() -> None:
    ms = 1_000_000
    one = row(0, 30_000, 50_000, (60_000, 60_000), codings=(("encode", 30_000, 34_000), ("decode", 46_000, 50_000)))
    other = row(1, 32_000, 80_000, (60_000, 80_000), codings=(("encode", 33_000, 40_000),))
    trace = trace_of(record(buckets=(one, other)), record(step=1))
    require_rules(trace)
    assert spans(trace)[1, 5] == [(30 * ms, 34 * ms, "encode b0"), (46 * ms, 50 * ms, "decode b0")]
    assert spans(trace)[1, 6] == [(33 * ms, 40 * ms, "encode b1")]
    names = [it["args"]["name"] for it in trace["traceEvents"] if it["name"] == "thread_name"]
    assert names == ["steps", "compute", "gradients", "parameters", "coding", "coding 2"]


def saved(folder: Path, trace: dict[str, Any], name: str = "trace.rank{}.json.gz") -> Path:
    path = folder / name.format(trace["undertow_trace"]["rank"])
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    return path


def test_merging_aligns_clocks_by_what_ranks_leave_together(tmp_path: Path) -> None:
    records = [record(step=step) for step in range(3)]
    saved(tmp_path, trace_of(*records))
    # This rank's clock is an hour ahead, and its first recorded step began 5 ms late.
    times = {"step_us": 95_000.0, "forwards": ((0.0, 15_000.0),), "backwards": ((15_000.0, 55_000.0),)}
    late = replace(records[1], **times, buckets=tuple(_earlier(row) for row in records[1].buckets)), records[2]
    saved(tmp_path, trace_of(*late, rank=1, began_ns=START_NS + 3600 * 10**9))
    assert merge(tmp_path, tmp_path / "all.json.gz") == "2 traces of 2 ranks"
    merged = json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))
    require_rules(merged)
    ends = {
        pid: [stop for _, stop, name in events if name == "wait b1"] for (pid, tid), events in spans(merged).items() if tid == 2
    }
    first, second = ends.values()
    assert first[1] == second[0]
    assert merged["undertow_trace"]["began_ns"] == START_NS
    assert {it["args"]["name"] for it in merged["traceEvents"] if it["name"] == "process_name"} == {"rank 0", "rank 1"}


def _earlier(row: Any) -> Any:
    times = {"ready_us": row.ready_us - 5e3, "launched_us": row.launched_us - 5e3, "done_us": row.done_us - 5e3}
    return replace(row, **times, waited=(row.waited[0] - 5e3, row.waited[1] - 5e3))


def test_models_of_a_rank_keep_their_distance_and_ranks_are_aligned_by_the_same_model(tmp_path: Path) -> None:
    clocks_ns = (START_NS, START_NS - 5 * 10**9)  # the second rank's clock is five seconds late
    for rank, began_ns in enumerate(clocks_ns):
        saved(tmp_path, trace_of(rank=rank, began_ns=began_ns))
        later = trace_of(rank=rank, began_ns=began_ns + 10**9, model=1)  # with the same numbers of steps, a second later
        saved(tmp_path, later, "trace.rank{}-2.json.gz")
    merge(tmp_path, tmp_path / "all-rank.json.gz")
    assert merge(tmp_path, tmp_path / "all-rank.json.gz") == "4 traces of 2 ranks"  # the earlier result is not a rank's
    merged = json.loads(gzip.decompress((tmp_path / "all-rank.json.gz").read_bytes()))
    require_rules(merged)
    names = {it["pid"]: it["args"]["name"] for it in merged["traceEvents"] if it["name"] == "process_name"}
    begins = {names[it["pid"]]: it["ts"] for it in merged["traceEvents"] if it["name"] == "step 0"}
    assert begins == {"rank 0": 0.0, "rank 0, model 2": 1e6, "rank 1": 0.0, "rank 1, model 2": 1e6}


def test_without_a_common_step_the_hosts_clocks_count(tmp_path: Path) -> None:
    saved(tmp_path, trace_of(record()))
    saved(tmp_path, trace_of(record(step=9), rank=1, began_ns=START_NS + 10**9))
    merge(tmp_path, tmp_path / "all.json")
    steps = [(it["ts"], it["name"]) for it in json.loads((tmp_path / "all.json").read_text())["traceEvents"] if it["ph"] == "X"]
    assert [it for it in steps if it[1].startswith("step")] == [(0.0, "step 0"), (1e6, "step 9")]


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
    (folder / "trace.rank1.json.gz").unlink()
    found = undertow(f"trace {folder} --out {folder}/it.json")
    assert found == (0, f"1 trace of 1 rank; no traces of rank 1: {folder}/it.json\n", "")
    assert "no traces of rank 1" in json.loads((folder / "it.json").read_text())["undertow_trace"]["merged"]


def cut(folder: Path) -> None:
    path = folder / "trace.rank1.json.gz"
    path.write_bytes(path.read_bytes()[:-50])


def no_gzip(folder: Path) -> None:
    (folder / "trace.rank1.json.gz").write_bytes(b"it is not")


def half(folder: Path) -> None:
    saved(folder, {"undertow_trace": {"run": "a run", "rank": 1}})


def of_another_run(folder: Path) -> None:
    saved(folder, trace_of(rank=1, run="another"))


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


WRONG: dict[Callable[[Path], None], tuple[str, str, str]] = {
    empty: (
        "no trace was found.",
        "undertow trace {folder}",
        "Start the training with UNDERTOW_TRACE=DIR, or call model.save_trace(path) on every rank.",
    ),
    of_another_run: (
        "the traces are of different runs.",
        "trace.rank1.json.gz and trace.rank0.json.gz in {folder}",
        "Keep the files of each run in a separate folder.",
    ),
    **{
        damage: (
            f"trace.rank1.json.gz is not a whole trace: {why}.",
            "{folder}/trace.rank1.json.gz",
            "Delete it, or write this rank's trace again.",
        )
        for damage, why in {
            cut: "Compressed file ended before the end-of-stream marker was reached",
            no_gzip: "Not a gzipped file (b'it')",
            half: "'ranks'",
        }.items()
    },
}


@pytest.mark.parametrize("damage", WRONG, ids=lambda damage: damage.__name__)
def test_what_cannot_be_merged_is_said_in_three_parts(damage: Callable[[Path], None], folder: Path, undertow: Undertow) -> None:
    damage(folder)
    text = "\n  ".join(WRONG[damage]).format(folder=folder)
    assert undertow(f"trace {folder}") == (2, "", f"Error: {text}\n")
    assert not folder.with_name("traces.json.gz").exists()


NAMES = {
    "trace.rank3.json.gz": "trace.rank3.json.gz",
    "trace-rank3.json": "trace-rank3.json",
    "trace.json.gz": "trace.rank3.json.gz",
    "gpt-1.5b.json": "gpt-1.5b.rank3.json",
    "trace.rank31.json": "trace.rank31.rank3.json",  # another rank's
    "a{rank}/it.json": "a3/it.json",
    "{rank}-of-8.json.gz": "3-of-8.json.gz",
}


@pytest.mark.parametrize("path", NAMES)
def test_the_rank_is_once_in_the_name(path: str) -> None:
    assert path_of_rank(f"in/{path}", 3) == Path("in") / NAMES[path]


def test_the_file_of_a_second_model_has_another_name() -> None:
    assert path_of_rank("trace.json", 3, 1) == Path("trace.rank3-2.json")


def test_traces_are_merged_whatever_their_names_are(tmp_path: Path) -> None:
    for rank in range(2):
        path = path_of_rank(tmp_path / "{rank}/it.json", rank)
        path.parent.mkdir()
        path.write_text(text_of([record()], rank=rank))
    assert merge(tmp_path, tmp_path / "all.json") == "2 traces of 2 ranks"


def test_a_file_that_viewers_do_not_open_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        path_of_rank("trace.txt", 0)
    assert str(raised.value) == (
        "a trace is a .json or .json.gz file, got 'trace.txt'.\n  save_trace('trace.txt')\n"
        '  Write save_trace("trace.json.gz"); each rank puts its number into the name.'
    )
