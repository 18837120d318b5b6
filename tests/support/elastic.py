"""examples/elastic_train.py on forked ranks and under torchrun, and what it has trained on.

Run as a script it is the example, whose ranks do not hear torchrun end them: it may do so before they can say which rank they
miss.
"""

import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from support.processes import Ended, Rank, example, free_port, run_ranks
from support.project import ROOT
from support.warm import python

EXAMPLE, DEAF_EXAMPLE, PATIENCE_S = ROOT / "examples" / "elastic_train.py", Path(__file__), 240.0


@dataclass(frozen=True)
class Step:
    number: int
    attempt: int
    num_ranks: int
    samples: tuple[int, ...]  # in the order of the global batch


def run(
    folder: Path, *options: str, num_ranks: int, max_restarts: int = 0, spoils: Callable[[Rank], object] | None = None
) -> list[Ended]:
    """How the ranks of all attempts have ended in `folder`, where their checkpoint is; all start anew when one has failed.

    They log to `folder/<num_ranks>`. `spoils` is called on each rank of the first attempt.
    """
    found: list[Ended] = []
    for attempt in range(max_restarts + 1):
        how = {"folder": folder, "arguments": [*options, "--sample-log", str(num_ranks)], "attempt": attempt}
        found += run_ranks(
            partial(_attempt, None if attempt else spoils, {**how, "port": free_port()}), num_ranks, is_script=True
        )
        if all(rank.exit_code == 0 for rank in found[-num_ranks:]):
            break
    return found


def _attempt(spoils: Callable[[Rank], object] | None, how: dict[str, Any], rank: Rank) -> None:
    if spoils is not None:
        spoils(rank)
    example(EXAMPLE, rank, **how)


def torchrun(
    path: Path, *options: str, num_ranks: int, folder: Path, max_restarts: int = 0, interpreter: str = ""
) -> dict[str, Any]:
    """How to start it, in forked processes if no interpreter is named."""
    command = [interpreter or python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", ROOT / "tests"))
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    return {
        "args": [*command, f"--max-restarts={max_restarts}", str(path), *options],
        "env": {**os.environ, **variables},
        "cwd": folder,
        "text": True,
    }


def run_under_torchrun(path: Path, *options: str, num_ranks: int, folder: Path, max_restarts: int = 0) -> Ended:
    how = torchrun(path, *options, num_ranks=num_ranks, folder=folder, max_restarts=max_restarts)
    with subprocess.Popen(**how, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        try:
            out, log = job.communicate(timeout=PATIENCE_S)
        finally:
            job.terminate()  # where the tests are interrupted it ends its ranks; killed it would leave them
    return Ended(exit_code=job.returncode, out=out, log=log)


def losses_in(text: str, num_losses: int) -> tuple[float, float]:
    losses = [float(loss) for loss in re.findall(r"^step +\d+ .*\bloss (\S+)", text, re.MULTILINE)]
    assert len(losses) == num_losses
    return losses[0], losses[-1]


def steps_of(folder: Path) -> list[Step]:
    lines = [json.loads(line) for path in sorted(folder.glob("rank*.jsonl")) for line in path.read_text().splitlines()]
    found = []
    for attempt, number in sorted({(line["attempt"], line["step"]) for line in lines}):
        shares = {line["rank"]: line["samples"] for line in lines if (line["attempt"], line["step"]) == (attempt, number)}
        num_ranks = lines[0]["num_ranks"]
        if shares.keys() == set(range(num_ranks)):  # the last step of an attempt may have begun on some ranks only
            turns = itertools.zip_longest(*(shares[rank] for rank in range(num_ranks)))
            found.append(
                Step(number, attempt, num_ranks, tuple(sample for turn in turns for sample in turn if sample is not None))
            )
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.argv[0] = str(EXAMPLE)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
