"""Runs torch's own tests of DistributedDataParallel with Undertow's class: `make test-torch ARGS="no_sync|join"`.

Exit code 0 if every result is the recorded one (expected.txt), 1 if one differs, 2 if the tests cannot be loaded.
"""

import argparse
import importlib.util
import re
import sys
import time
from collections import Counter

import torch

from torch_suite import record


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-torch", description=__doc__)
    parser.add_argument("pattern", nargs="?", default="", help="a regular expression: only tests whose name it matches")
    pattern = re.compile(parser.parse_args().pattern)
    if importlib.util.find_spec("expecttest") is None:
        print("torch's tests need the package expecttest: pip install 'undertow[test]'", file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}; {record.RECORD.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}", flush=True)
    began_s = time.monotonic()
    counts, differences = _run(pattern)
    took_s = time.monotonic() - began_s
    print(
        f"\n{counts['pass']} of {sum(counts.values())} tests of torch's passed in {took_s:.0f} s, {len(differences)} unexpected"
    )
    for line in differences:
        print(f"  {line}")
    return int(bool(differences))


def _run(pattern: re.Pattern[str]) -> tuple[Counter[str], list[str]]:
    from torch_suite import wheel  # it needs expecttest

    expected, counts = record.read(), Counter[str]()
    cases = {case.id().rsplit(".", 1)[-1]: case for case in wheel.cases()}
    differences = record.missing(set(cases), expected)
    for name, case in cases.items():
        if not pattern.search(name) or (name in expected and expected[name].result == record.LEFT_OUT):
            continue
        began_s = time.monotonic()
        result, why = wheel.outcome(case)
        counts[result] += 1
        print(f"{result} {time.monotonic() - began_s:5.1f} s  {name}", flush=True)
        if difference := record.difference(name, result, expected):
            print(why, flush=True)
            differences.append(difference)
    return counts, differences


if __name__ == "__main__":
    sys.exit(main())
