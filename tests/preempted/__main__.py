"""Ends runs by signals, and measures what a save in the background costs a step.

python -m preempted terms --runs 200     SIGTERM at a drawn moment
python -m preempted kills --runs 100     SIGKILL while a save runs in the background
python -m preempted stall                the step in which such a save begins, and the steps after it
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from preempted.runs import kill, preemption, problems_of_kill, problems_of_preemption
from preempted.stall import measure

KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], list[str]]]] = {
    "terms": (preemption, problems_of_preemption),
    "kills": (kill, problems_of_kill),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m preempted", description=__doc__)
    parser.add_argument("what", choices=[*KINDS, "stall"])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first run (default: %(default)s)")
    options = parser.parse_args()
    if options.what == "stall":
        print(measure())
        return 0
    draw, run = KINDS[options.what]
    num_failed = 0
    for seed in range(options.first, options.first + options.runs):
        drawn = draw(seed)
        problems = run(drawn)
        num_failed += bool(problems)
        print(f"{seed:4} {drawn}: {'FAILED' if problems else 'ok'}", flush=True)
        for problem in problems:
            print(f"     {problem}", flush=True)
    print(f"{options.runs} runs, {num_failed} failed")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
