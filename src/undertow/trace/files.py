"""Files of traces: their names, writing them whole or not at all, and merging the traces of several ranks."""

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from undertow.errors import ConfigError, require
from undertow.foreign import parsed_json
from undertow.trace.chrome import FLOWS, KEY, Json, file_text, us_of

_ENDS = (".json", ".json.gz")


def path_of_rank(path: str | Path, rank: int, number: int = 0) -> Path:
    """Returns the path with the rank in the name of the file, and the number of the model unless it is the first, 0.

    Raises ConfigError for a name that viewers do not open.
    """
    path = Path(path)
    require(
        path.name.endswith(_ENDS),
        f"a trace is a .json or .json.gz file, got {path.name!r}.",
        where=f"save_trace({str(path)!r})",
        remedy='Write save_trace("trace.json.gz"); each rank puts its number into the name.',
    )
    stem, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{stem}{f'-{number + 1}' if number else ''}-rank{rank}{dot}{suffixes}")


def write_whole(path: str | Path, content: bytes, *, where: str) -> None:
    """Writes a file, compressed if its name ends with .gz, under another name and renames it, so that no half of it remains.

    Raises ConfigError if it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be written: {error.strerror or error}.", where=where, remedy="Name a folder with space to write."
        ) from error


def merge(folder: Path, out: Path) -> str:
    """Merges the traces of ranks in `folder` and below it into the file `out`; returns a text of merged and missing traces.

    Clocks are aligned by the ends of a model's synchronizations, which its ranks leave together; without a common one, hosts'
    clocks count.
    Raises ConfigError if there are no traces, if one cannot be read, if they are of different runs, or if OUT cannot be written.
    """
    where = f"undertow trace {folder}"
    found = [(path, _read(path)) for path in sorted(folder.rglob("*-rank*.json*")) if path.name.endswith(_ENDS)]
    ours = ((path, it) for path, it in found if "merged" not in it.get(KEY, ("merged",)))
    traces = sorted(ours, key=lambda it: it[1][KEY]["rank"])
    require(
        traces,
        "there is no trace.",
        where=where,
        remedy="Start the training with UNDERTOW_TRACE=DIR, or call model.save_trace(path) on every rank.",
    )
    (first_path, first), others = traces[0], traces[1:]
    for path, trace in others:
        require(
            trace[KEY]["run"] in (first[KEY]["run"], "") or not first[KEY]["run"],
            "the traces are of different runs.",
            where=f"{path.name} and {first_path.name} in {folder}",
            remedy="Keep the files of each run in a separate folder.",
        )
    offsets_ns = _offsets_ns([trace[KEY] for _, trace in traces])
    begin_ns, events, pids = min(offsets_ns), list[Json](), dict[tuple[int, int], int]()
    for number, ((_, trace), offset_ns) in enumerate(zip(traces, offsets_ns, strict=True)):
        for event in trace["traceEvents"]:  # each trace gets separate processes and flows
            pid = event["pid"] = pids.setdefault((number, event["pid"]), len(pids) + 1)
            event["ts"] = us_of(round(event["ts"] * 1e3) + offset_ns - begin_ns)
            if "id" in event:
                event["id"] = pid * FLOWS + event["id"] % FLOWS
            events.append(event)
    ranks = {trace[KEY]["rank"] for _, trace in traces}
    missing = sorted({rank for _, trace in traces for rank in trace[KEY]["ranks"]} - ranks)
    note = f"{len(traces)} traces of {len(ranks)} ranks" + (
        f"; there are none of ranks {', '.join(map(str, missing))}" if missing else ""
    )
    head = {
        KEY: {**first[KEY], "merged": note},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": first[KEY]["began_ns"] + begin_ns,
    }
    write_whole(out, file_text(head, events).encode(), where=where)
    return note


def _read(path: Path) -> Json:
    """Returns the object in a file of JSON, which has all fields if it is an Undertow trace."""
    try:
        content = path.read_bytes()
        trace: Json = parsed_json(gzip.decompress(content) if path.suffix == ".gz" else content)
        if KEY in trace:
            _ = [trace[KEY][it] for it in ("run", "rank", "ranks", "model", "began_ns", "synchronized_us")], trace["traceEvents"]
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path.name} is not a whole trace: {error}.", where=str(path), remedy="Delete it, or write this rank's trace again."
        ) from error
    return trace


def _offsets_ns(traces: Sequence[Json]) -> list[int]:
    """Returns the time to add to each trace's times, so that all count from the beginning of the first one.

    Traces are in the order of ranks. Each rank's clock is compared with the clock of the lowest rank that has the same model.
    """
    leads, late_ns = dict[tuple[int, ...], Json](), dict[int, int]()
    for it in traces:
        lead = leads.setdefault((it["model"], *it["ranks"]), it)
        here, there = it["synchronized_us"], lead["synchronized_us"]
        if it["rank"] != lead["rank"] and (common := here.keys() & there.keys()):
            apart_ns = round(1e3 * float(median(there[step] - here[step] for step in common)))
            late_ns.setdefault(it["rank"], apart_ns + lead["began_ns"] - it["began_ns"] + late_ns.get(lead["rank"], 0))
    return [it["began_ns"] - traces[0]["began_ns"] + late_ns.get(it["rank"], 0) for it in traces]
