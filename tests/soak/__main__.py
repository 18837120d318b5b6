"""Injects faults into trainings, one after the other: `make soak ARGS="--seed 7 --injections 20"`."""

import argparse
import sys
import time
from collections import defaultdict
from statistics import median

from soak.injections import Injection, Verdict, inject, injection


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--injections", type=int, default=200, help="how many; numbers from 0 on (default: %(default)s)")
    parser.add_argument("--only", type=int, help="just the one with this number")
    options = parser.parse_args()
    numbers = range(options.injections) if options.only is None else range(options.only, options.only + 1)
    verdicts: list[tuple[Injection, Verdict]] = []
    began_s = time.monotonic()
    for number in numbers:
        one = injection(options.seed, number)
        verdict = inject(one)
        verdicts.append((one, verdict))
        took = f" after {max(verdict.seconds):.2f} s" if verdict.seconds else ""
        print(f"{number:4} {one} -> {verdict.outcome or '?'}{took}", flush=True)
        for problem in verdict.problems:
            print(f"     FAILED {problem}", flush=True)
        if verdict.problems:
            print(f"     again: {one.command}", flush=True)
    _summarize(verdicts, time.monotonic() - began_s)
    return int(any(verdict.problems for _, verdict in verdicts))


def _summarize(verdicts: list[tuple[Injection, Verdict]], took_s: float) -> None:
    of_kind: dict[str, list[Verdict]] = defaultdict(list)
    for one, verdict in verdicts:
        of_kind[one.kind].append(verdict)
    print(f"\n{'fault':22} {'times':>6} {'failed':>7} {'median s':>9} {'worst s':>8}")
    for kind, found in sorted(of_kind.items()):
        seconds = [second for verdict in found for second in verdict.seconds]
        told = f"{median(seconds):9.2f} {max(seconds):8.2f}" if seconds else ""
        print(f"{kind:22} {len(found):6} {sum(bool(verdict.problems) for verdict in found):7} {told}")
    failed = [one for one, verdict in verdicts if verdict.problems]
    print(f"{len(verdicts)} injections in {took_s:.0f} s, {len(failed)} failed")
    for one in failed:
        print(f"  {one.command}    # {one}")


if __name__ == "__main__":
    sys.exit(main())
