"""Files of traces in Chrome's JSON format, for Perfetto: their names and events, writing them, and
merging the files of ranks.

Each rank is a process of the picture. Threads of a process:

    steps         one event per step
    compute       forward, backward and the optimizer, with the waits
    gradients     reductions, while the link works on them
    parameters    gathers, while the link works on them
    coding        encoding and decoding by threads of the host, if a format is set; codings that
    coding 2      overlap have several tracks
    ...

An arrow leads from the moment when a bucket is ready to its collective, and on to the wait for it.
Two events of a thread are nested or do not overlap. No time is negative:
Perfetto drops such events.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from undertow.errors import ConfigError, require
from undertow.foreign import parsed_json
from undertow.shown import counted
from undertow.trace.record import CODING, COMPUTE, Event, StepRecord, wires_of
from undertow.whole_file import require_folder, write_whole

Json = dict[str, Any]

_MOST_RANKS = 1 << 20
KEY = "undertow_trace"  # the field that only Undertow's files have
_FACTS = ("run", "rank", "ranks", "model", "began_ns", "synchronized_us")
_ENDS = (".json", ".json.gz")
_THREADS = {
    "steps": 1,
    COMPUTE: 2,
    "gradients": 3,
    "parameters": 4,
}  # Perfetto takes thread 0 for an idle processor


def trace_text(records: Sequence[StepRecord], about: Json) -> str:
    """Returns the trace of consecutive steps, at least one, as JSON.

    Args:
        records: The steps of one rank.
        about: Facts of the run for the file: "run", "model" (a number), "rank" (in the world),
            "ranks", "began_ns".
    """
    # Gathers begin before their step.
    begins_us = [0.0]
    for row in records[0].gathers:
        begins_us += [row.ready_us, row.launched_us, row.waited[0]]
    at_us = lead_us = -min(begins_us)
    # another one for each rank and model; 0 is the idle process
    pid = 1 + about["rank"] + _MOST_RANKS * about["model"]
    name = f"rank {about['rank']}"
    if about["model"]:
        name += f", model {about['model'] + 1}"
    events: list[Json] = []
    threads = dict(_THREADS)
    synchronized_us = {}
    for record in records:
        events += _step(record, pid=pid, threads=threads, at_us=at_us)
        if record.buckets:
            # All ranks leave a synchronization together: these times align the clocks of different
            # hosts.
            synchronized_us[record.step] = at_us + max(row.waited[1] for row in record.buckets)
        at_us += record.step_us
    began_ns = about["began_ns"] - round(lead_us * 1e3)
    head = {**about, "format": 1, "synchronized_us": synchronized_us, "began_ns": began_ns}
    return _file_text(head, _names(pid, name, threads) + events)


def _names(pid: int, process: str, threads: Mapping[str, int]) -> list[Json]:
    events: list[Json] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
    ]
    for name, thread in threads.items():
        events.append(
            {"ph": "M", "pid": pid, "tid": thread, "name": "thread_name", "args": {"name": name}}
        )
    return events


def _step(record: StepRecord, *, pid: int, threads: dict[str, int], at_us: float) -> list[Json]:
    """Returns the events of a step that begins at `at_us`, and adds its threads to `threads`."""
    events: list[Json] = []

    def add(phase: str, thread: str, name: str, start_us: float, **more: Any) -> None:
        time_us = round(at_us + start_us, 3)
        number = threads.setdefault(thread, len(threads) + 1)
        event = {"ph": phase, "pid": pid, "tid": number, "name": name, "ts": time_us}
        events.append(event | more)

    def add_span(thread: str, name: str, start_us: float, stop_us: float, **args: Any) -> None:
        dur = round(at_us + stop_us, 3) - round(at_us + start_us, 3)
        add("X", thread, name, start_us, dur=round(dur, 3), args=args)

    add_span("steps", f"step {record.step}", 0.0, record.step_us, plan=record.generation)
    for event in record.trace().on_lane(COMPUTE):
        label = event.kind if event.bucket is None else f"{event.kind} b{event.bucket}"
        add_span(COMPUTE, label, event.start_us, event.stop_us)
    for thread, rows in (("parameters", record.gathers), ("gradients", record.buckets)):
        for row, ((start_us, stop_us), _) in zip(rows, wires_of(rows), strict=True):
            label = f"{row.kind} b{row.bucket}"
            launched_us = round(at_us + row.launched_us, 3)
            add_span(thread, label, start_us, stop_us, bytes=row.num_bytes, launched_us=launched_us)
            flow = {"cat": "bucket", "id": f"{pid}.{record.step}.{label}"}
            add("s", COMPUTE, "bucket", row.ready_us, **flow)
            add("t", thread, "bucket", start_us, **flow)
            if row.waited[0] < row.waited[1]:
                add("f", COMPUTE, "bucket", row.waited[0], bp="e", **flow)
    for number, track in enumerate(_tracks(record.codings()), 1):
        name = CODING if number == 1 else f"{CODING} {number}"
        for event in track:
            add_span(name, f"{event.kind} b{event.bucket}", event.start_us, event.stop_us)
    return events


def _tracks(events: Iterable[Event]) -> list[list[Event]]:
    """Distributes events over as few tracks as possible; events of a track do not overlap."""
    tracks: list[list[Event]] = []
    for event in sorted(events, key=attrgetter("start_us")):
        track = next((each for each in tracks if each[-1].stop_us <= event.start_us), None)
        if track is None:
            track = []
            tracks.append(track)
        track.append(event)
    return tracks


def _file_text(about: Json, events: Iterable[Json]) -> str:
    """Returns JSON with one event per line, each event before those within it."""
    ordered = sorted(events, key=lambda event: (event.get("ts", 0.0), -event.get("dur", 0.0)))
    lines = ",\n".join(map(json.dumps, ordered))
    head = f'"{KEY}": {json.dumps(about)},\n"displayTimeUnit": "ms"'
    return f'{{\n{head},\n"traceEvents": [\n{lines}\n]}}\n'


def path_of_rank(path: str | Path, rank: int, number: int = 0) -> Path:
    """Returns the path of this rank's file, and the number of the model unless it is the first, 0.

    The rank replaces `{rank}`. Without that, .rankN is added to a name that does not have rankN.

    Raises ConfigError for a name that viewers do not open.
    """
    path = Path(path)
    require(
        path.name.endswith(_ENDS),
        f"a trace is a .json or .json.gz file, got {path.name!r}.",
        where=f"save_trace({str(path)!r})",
        remedy='Write save_trace("trace.json.gz"); each rank puts its number into the name.',
    )
    named = Path(str(path).replace("{rank}", str(rank)))
    end = next(end for end in _ENDS if named.name.endswith(end))
    stem = named.name.removesuffix(end)
    if named == path and not re.search(rf"rank{rank}(?!\d)", stem):
        stem += f".rank{rank}"
    if number:
        stem += f"-{number + 1}"
    return named.with_name(stem + end)


def _may_be_trace(path: Path) -> bool:
    """Returns False for other JSON, which has no key of a trace at its beginning."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return KEY.encode() in file.read(4096)
    except (OSError, EOFError, zlib.error):
        return True  # reading it tells why


def merge(folder: Path, out: Path) -> str:
    """Merges the traces of ranks in `folder` and below it into the file `out`; returns a text of
    merged and missing traces.

    Clocks are aligned by the ends of a model's synchronizations, which its ranks leave together;
    without a common one, hosts' clocks count. Raises ConfigError if no trace is found, if one
    cannot be read, if they are of different runs, or if OUT cannot be written.
    """
    where = f"undertow trace {folder}"
    require_folder(folder, where=where)
    traces: list[tuple[Path, Json]] = []
    for path in sorted(folder.rglob("*.json*")):
        if path.name.endswith(_ENDS) and _may_be_trace(path):
            trace = _read(path)
            if KEY in trace and "merged" not in trace[KEY]:
                traces.append((path, trace))
    require(
        traces,
        "no trace was found.",
        where=where,
        remedy="Start the training with UNDERTOW_TRACE=DIR, or call model.save_trace(path) on "
        "every rank.",
    )
    traces.sort(key=lambda found: found[1][KEY]["rank"])
    first_path, first = traces[0]
    for path, trace in traces:
        runs = {trace[KEY]["run"], first[KEY]["run"]} - {""}
        require(
            len(runs) <= 1,
            "the traces are of different runs.",
            where=f"{path.name} and {first_path.name} in {folder}",
            remedy="Keep the files of each run in a separate folder.",
        )
    offsets_us = _offsets_us([trace[KEY] for _, trace in traces])
    begin_us = min(offsets_us)
    events: list[Json] = []
    for (_, trace), offset_us in zip(traces, offsets_us, strict=True):
        for event in trace["traceEvents"]:
            if "ts" in event:
                event["ts"] = round(event["ts"] + offset_us - begin_us, 3)
            events.append(event)
    ranks = {trace[KEY]["rank"] for _, trace in traces}
    missing = sorted({rank for _, trace in traces for rank in trace[KEY]["ranks"]} - ranks)
    note = f"{counted(len(traces), 'trace')} of {counted(len(ranks), 'rank')}"
    if missing:
        of_ranks = "rank" if len(missing) == 1 else "ranks"
        note += f"; no traces of {of_ranks} {', '.join(map(str, missing))}"
    began_ns = first[KEY]["began_ns"] + round(begin_us * 1e3)
    write_whole(
        out,
        _file_text({**first[KEY], "began_ns": began_ns, "merged": note}, events).encode(),
        where=where,
    )
    return note


def _read(path: Path) -> Json:
    """Returns the object in a file of JSON, which has all fields if it is an Undertow trace."""
    try:
        content = path.read_bytes()
        trace: Json = parsed_json(gzip.decompress(content) if path.suffix == ".gz" else content)
        if KEY in trace:
            _ = [trace[KEY][name] for name in _FACTS], trace["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path.name} is not a whole trace: {error}.",
            where=str(path),
            remedy="Delete it, or write this rank's trace again.",
        ) from error
    return trace


def _offsets_us(traces: Sequence[Json]) -> list[float]:
    """Returns the time to add to each trace's times, so that all count from the beginning of the
    first one.

    Traces are in the order of ranks. Each rank's clock is compared with the clock of the lowest
    rank that has the same model.
    """
    leads: dict[tuple[int, ...], Json] = {}  # by model and its ranks
    late_us: dict[int, float] = {}  # by rank
    offsets_us = []
    for about in traces:
        lead = leads.setdefault((about["model"], *about["ranks"]), about)
        rank, here, there = about["rank"], about["synchronized_us"], lead["synchronized_us"]
        common = here.keys() & there.keys()
        if rank != lead["rank"] and rank not in late_us and common:
            apart_us = median(there[step] - here[step] for step in common)
            clocks_us = (lead["began_ns"] - about["began_ns"]) / 1e3
            late_us[rank] = apart_us + clocks_us + late_us.get(lead["rank"], 0.0)
        began_us = (about["began_ns"] - traces[0]["began_ns"]) / 1e3
        offsets_us.append(began_us + late_us.get(rank, 0.0))
    return offsets_us
