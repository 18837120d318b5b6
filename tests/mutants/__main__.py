"""Changes the source in one line at a time and looks whether the tests notice.

    choose   writes mutants into a file, from a seed
    record   runs the whole suite once and records which test enters which part of the source; goes on where it stopped
    run      runs the tests that enter a mutant's part until one fails, for one mutant after the other; goes on where it stopped
    fork     the same in forks of one process, which takes a second: for tests that start no processes; needs no record
    table    tells which have survived, and which of them change nothing

What follows -- is for pytest.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from mutants.forks import Forks
from mutants.places import Mutant, choose
from mutants.running import Row, record, rows, run

EQUIVALENT = Path(__file__).with_name("equivalent.jsonl")  # mutants that change no behavior, each with the reason


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["choose", "record", "run", "fork", "table"])
    parser.add_argument("results", nargs="?", type=Path, help="file with the results of a suite")
    parser.add_argument("--root", type=Path, default=Path(), help="checkout with the suite (default: this directory)")
    parser.add_argument("--mutants", type=Path, default=Path("out/mutants.jsonl"), help="file (default: %(default)s)")
    parser.add_argument("--reach", type=Path, default=Path("out/reach"), help="directory of the record (default: %(default)s)")
    parser.add_argument("--under", default="", help="folder of the package whose mutants are chosen")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=80, help="of mutants (default: %(default)s)")
    parser.add_argument("--most", type=int, default=40, help="tests for a mutant (default: %(default)s)")
    parser.add_argument("--count", action="store_true", help="fork: run all tests that reach a mutant, and count those that fail")
    parser.add_argument("--retry", action="store_true", help="run those again that have survived")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    it, pytests = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    match it.verb:
        case "choose":
            chosen = choose(it.root, it.seed, it.number, it.under)
            it.mutants.write_text("".join(json.dumps(mutant._asdict()) + "\n" for mutant in chosen))
        case "record":
            record(it.root, it.reach, pytests)
        case "run" | "fork":
            done = {Mutant(**row["mutant"]) for row in rows(it.results) if row["failure"] or not it.retry}
            left = [mutant for row in rows(it.mutants) if (mutant := Mutant(**row)) not in done and mutant.line_in(it.root)]
            if it.verb == "fork":
                forks = Forks(it.root, left, partial(tell, it.results), most=it.most, jobs=it.jobs, counts=it.count)
                pytest.main(["-q", "-s", *pytests], plugins=[forks])
                return
            for row in run(it.root, it.reach, left, pytests, most=it.most, jobs=it.jobs):
                tell(it.results, row)
        case "table":
            table(it.results)


def tell(results: Path, row: Row) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(Mutant(**row["mutant"]).place, row["failure"] or "survives", flush=True)


def table(results: Path) -> None:
    reasons = {Mutant(**row["mutant"]).change: row["reason"] for row in rows(EQUIVALENT)}
    of_suite = {Mutant(**row["mutant"]): row for row in rows(results)}  # the last one counts
    uncaught = {mutant: row for mutant, row in of_suite.items() if not row["failure"]}
    num_alike = sum(mutant.change in reasons for mutant in uncaught)
    print(f"{len(of_suite)} mutants: {len(of_suite) - len(uncaught)} caught, {num_alike} change nothing,", end=" ")
    print(f"{len(uncaught) - num_alike} survive")
    counts = [(len(row["failing"]), row["tried"]) for row in of_suite.values() if row.get("failing")]
    if counts:
        failing, tried = (median(numbers) for numbers in zip(*counts, strict=True))
        print(f"In the median {failing:g} of {tried:g} tests fail for a mutant that is caught.")
    for mutant, row in uncaught.items():
        why = reasons.get(mutant.change, f"survives {row['tried']} of {row['reaching']} tests")
        print(f"- {mutant.place}, `{mutant.before.strip()}` -> `{mutant.after.strip()}`: {why}")


if __name__ == "__main__":
    main()
