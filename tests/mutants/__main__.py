"""Changes the source in one line at a time and looks whether the tests notice.

    choose   writes mutants into a file, from a seed
    record   runs the whole suite once and records which test enters which part of the source; goes on where it stopped
    run      runs the tests that enter a mutant's part until one fails, for one mutant after the other; goes on where it stopped
    fork     the same in forks of one process, which takes a second: for tests that start no processes; needs no record
    table    compares the results of suites; the first one is the one that the others are held against

What follows -- is for pytest.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from mutants.forks import Forks
from mutants.places import Mutant, choose
from mutants.running import Row, record, rows, run

EQUIVALENT = Path(__file__).with_name("equivalent.jsonl")  # mutants that change no behavior, each with the reason


def main() -> None:
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["choose", "record", "run", "fork", "table"])
    parser.add_argument("results", nargs="*", type=Path, help="files with the results of a suite: one for run, some for table")
    parser.add_argument("--root", type=Path, default=Path(), help="checkout with the suite (default: this directory)")
    parser.add_argument("--mutants", type=Path, default=Path("out/mutants.jsonl"), help="file (default: %(default)s)")
    parser.add_argument("--reach", type=Path, default=Path("out/reach"), help="directory of the record (default: %(default)s)")
    parser.add_argument("--under", default="", help="folder of the package whose mutants are chosen")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=80, help="of mutants (default: %(default)s)")
    parser.add_argument("--most", type=int, default=40, help="tests for a mutant (default: %(default)s)")
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
            done = {Mutant(**row["mutant"]) for row in rows(it.results[0]) if row["failure"] or not it.retry}
            left = [mutant for row in rows(it.mutants) if (mutant := Mutant(**row)) not in done and mutant.line_in(it.root)]
            if it.verb == "fork":
                pytest.main(["-q", "-s", *pytests], plugins=[Forks(it.root, left, partial(tell, it.results[0]), most=it.most)])
                return
            for row in run(it.root, it.reach, left, pytests, most=it.most, jobs=it.jobs):
                tell(it.results[0], row)
        case "table":
            table(it.results)


def tell(results: Path, row: Row) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(Mutant(**row["mutant"]).place, row["failure"] or "survives", flush=True)


def table(files: list[Path]) -> None:
    reasons = {Mutant(**row["mutant"]): row["reason"] for row in rows(EQUIVALENT)}
    suites = {path.stem: {Mutant(**row["mutant"]): row for row in rows(path)} for path in files}
    caught = {name: {mutant for mutant, row in suite.items() if row["failure"]} for name, suite in suites.items()}
    first = next(iter(suites))
    mutants = [mutant for mutant in suites[first] if mutant not in reasons]
    _print("place", "kind", "before", "after", *suites)
    _print(*["---"] * (4 + len(suites)))
    for it in mutants:
        told = (_told(suite[it]) if it in suite else "" for suite in suites.values())
        _print(it.place, it.kind, _code(it.before), _code(it.after), *told)
    print()
    _print("kind", "mutants", *(f"caught by {name}" for name in suites))
    _print(*["---"] * (2 + len(suites)))
    for kind in [*sorted({it.kind for it in mutants}), "all"]:
        of_kind = {it for it in mutants if kind in (it.kind, "all")}
        _print(kind, str(len(of_kind)), *(str(len(of_kind & caught[name])) for name in suites))
    for name, suite in suites.items():
        lost = [it for it in mutants if it in caught[first] and it in suite and it not in caught[name]]
        print(f"\n{name} loses {len(lost)} of the {len(caught[first] & set(suite))} that it has met and that {first} catches:")
        print(*(f"- {it.place} {_code(it.after)}" for it in lost), sep="\n")
        print(*(f"- not met: {it.place}" for it in mutants if it not in suite), sep="\n")
    print("\nChange nothing:", *(f"- {it.place} {_code(it.after)}: {reason}" for it, reason in reasons.items()), sep="\n")


def _print(*cells: str) -> None:
    print("|", " | ".join(cells), "|")


def _told(row: Row) -> str:
    by = _code(row["test"] or row["failure"]) if row["failure"] else f"**survives {row['tried']} of {row['reaching']} tests**"
    return f"{by}, {row['seconds']:.0f} s"


def _code(text: str) -> str:
    return "`" + text.strip().replace("|", "\\|").replace("`", "'") + "`"


if __name__ == "__main__":
    main()
