"""The file that torch's Flight Recorder writes on a fault, in the form that `torchfrtrace` reads."""

import pickle
from collections.abc import Sequence

# A collective of this rank: number, kind, elements, dtype, "started" or "completed", and when on the wall clock. Numbers are the
# same on all ranks, which aligns the files.
Collective = tuple[int, str, int, str, str, tuple[int | None, int | None]]


def flight_record(collectives: Sequence[Collective], *, group: str, ranks: Sequence[int], backend: str) -> bytes:
    """Returns the content of a rank's file."""
    shards = {"all_gather": (len(ranks), 1), "reduce_scatter": (1, len(ranks))}  # parts of the sent and of the received tensor
    entries = [
        {
            **dict.fromkeys(("record_id", "collective_seq_id", "op_id"), number),
            **dict.fromkeys(("time_created_ns", "time_discovered_started_ns"), launched_ns),
            "time_discovered_completed_ns": done_ns,
            "duration_ms": (done_ns - launched_ns) / 1e6 if done_ns and launched_ns else None,
            **dict.fromkeys(("pg_id", "p2p_seq_id", "timeout_ms"), 0),
            "process_group": (group, "undertow"),
            "profiling_name": f"{backend}:{kind}",
            **{
                f"{name}_sizes": [[numel // len(ranks) * (len(ranks) // parts) if kind in shards else numel]]
                for name, parts in zip(("input", "output"), shards.get(kind, (1, 1)), strict=True)
            },
            "input_dtypes": [dtype],
            "output_dtypes": [dtype],
            "state": state,
            "retired": state == "completed",
            "is_p2p": False,
            "frames": [],
        }
        for number, kind, numel, dtype, state, (launched_ns, done_ns) in collectives
    ]
    config = {group: {"name": group, "desc": "undertow", "ranks": str(list(ranks))}}
    return pickle.dumps({"version": "2.10", "entries": entries, "pg_config": config}, protocol=2)
