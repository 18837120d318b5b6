"""Which tests run: markers that are known, products of fewer parameters, and the list of skipped tests at the end of a run.

The id of a parameter may name several values, as "an infinity, zero1" does. With --no-unexpected-skips a run fails that skips
other tests: a skip is expected if this machine lacks what its reason names, and CI must not lose tests for another reason.
"""

import difflib
import importlib.util
import itertools
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch

from support.browser import CHROMIUM

OPTION = "--no-unexpected-skips"
_RANKS = re.compile(r"\d+ ranks")  # as conftest.py names them
_Value = tuple[int, int, str]  # number of the parameter, place in its id, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    reason: str  # a regular expression, which the whole reason matches
    holds: Callable[[], bool]


def _lacks_namespaces() -> bool:
    return os.geteuid() != 0 or None in map(shutil.which, ("ip", "tc"))


EXPECTED = (
    Expected(reason="needs a CUDA device", holds=lambda: not torch.cuda.is_available()),
    Expected(reason="there is a CUDA device", holds=torch.cuda.is_available),
    Expected(reason="needs a torch with NCCL", holds=lambda: not torch.distributed.is_nccl_available()),
    Expected(reason="NCCL does not connect two ranks here: .*", holds=lambda: torch.cuda.device_count() < 2),
    Expected(reason="this torch has no grad_dtype", holds=lambda: not hasattr(torch.Tensor, "grad_dtype")),
    Expected(
        reason="shaped links cannot be made here: .* is not installed .*|.*: this user is not root", holds=_lacks_namespaces
    ),
    Expected(reason="shaped links .*: they are refused .*", holds=lambda: True),  # by the kernel
    Expected(reason="torchft is not installed: .*", holds=lambda: importlib.util.find_spec("torchft") is None),
    Expected(reason=".*; make bench-peers makes it", holds=lambda: True),  # gigabytes that nothing here installs by itself
    Expected(reason="needs chromium, which is not installed", holds=lambda: CHROMIUM is None),
    Expected(reason="the machine is busy, load .*", holds=lambda: True),  # the test has looked at the load itself
)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="store_true", help="fail a run that skips tests for a reason that support/selection.py does not have"
    )


def reasons(config: pytest.Config) -> Counter[str]:
    """How many tests were skipped for each reason; empty in a worker of pytest-xdist, which has no list."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    return Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)


def unexpected(config: pytest.Config) -> list[str]:
    """Reasons that a run with the option fails for; none without it."""
    if not config.getoption(OPTION):
        return []
    return [reason for reason in reasons(config) if not any(re.fullmatch(it.reason, reason) and it.holds() for it in EXPECTED)]


def fail_if_unexpected(session: pytest.Session) -> None:
    if unexpected(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def summarize(terminalreporter: pytest.TerminalReporter) -> None:
    found, wrong = reasons(terminalreporter.config), unexpected(terminalreporter.config)
    if found:
        terminalreporter.section("skipped")
    for reason, count in found.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}{'  (UNEXPECTED)' if reason in wrong else ''}")


def require_known(config: pytest.Config) -> None:
    """UsageError, which is exit code 4, where -m names a marker that is not registered."""
    known = {re.split(r"[:(]", line)[0] for line in config.getini("markers")}
    for name in re.findall(r"[A-Za-z_]\w*(?!\w*\s*=)", re.sub(r"\([^()]*=[^()]*\)", "", config.getoption("markexpr"))):
        if name not in known | {"and", "or", "not", "True", "False"}:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "pytest --markers lists them."
            raise pytest.UsageError(f"-m names {name!r}, and no marker is called so. {hint}")


def without_products(items: Iterable[pytest.Item], *, together: int = 1) -> set[pytest.Item]:
    """Those with which so many values of different parameters meet in every way; first those whose meetings are all new.

    The number of ranks is met by some values of the others: what depends on both has a test that says so.

    Of those, cases that the default runs come first: values that they have together need no case that it leaves out.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.get_closest_marker("deep") is not None):
        functions[item.nodeid.split("[")[0]].append(item)
    return {item for of_one in functions.values() for item in _covering(of_one, together)}


def _covering(items: list[pytest.Item], together: int) -> list[pytest.Item]:
    """Each time the one with which most meetings are new; of those that the default leaves out, what is then still new."""
    meetings_of = {item: _meetings(item, together) for item in items}
    seen: set[tuple[_Value, ...]] = set()
    chosen = []
    for is_deep in (False, True):
        left = [item for item in items if is_deep == (item.get_closest_marker("deep") is not None)]
        while left:
            best = max(left, key=lambda item: len(meetings_of[item] - seen))
            if not meetings_of[best] - seen:
                break
            chosen.append(best)
            seen |= meetings_of[best]
            left.remove(best)
    return chosen


def _meetings(item: pytest.Item, together: int) -> set[tuple[_Value, ...]]:
    """What meets in a case; a test without parameters meets itself."""
    values = _values(item)
    met = set(itertools.combinations(values, min(together, len(values))))
    return met | {(it,) for it in _num_ranks(item)}


def _values(item: pytest.Item) -> list[_Value]:
    """The values that each parametrize mark has named: `callspec.indices` has the number of the product instead."""
    ids = [it for it in _ids(item) if not _RANKS.fullmatch(it)]
    return [(number, place, value) for number, named in enumerate(ids) for place, value in enumerate(named.split(", "))]


def _num_ranks(item: pytest.Item) -> list[_Value]:
    return [(-1, 0, it) for it in _ids(item) if _RANKS.fullmatch(it)]


def _ids(item: pytest.Item) -> list[str]:
    return [] if (callspec := getattr(item, "callspec", None)) is None else callspec._idlist
