"""The list of skipped tests at the end of a run, and with --no-unexpected-skips the failure of a run that skips others.

A skip is expected where this machine lacks what its reason names; CI must not lose tests for another reason.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

OPTION = "--no-unexpected-skips"


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
    Expected(reason=".* UNDERTOW_PUBLISHED_DATA.*", holds=lambda: True),  # files of others, not in the repository
    Expected(reason=".*; make bench-peers makes it", holds=lambda: True),  # gigabytes that nothing here installs by itself
    Expected(reason="the machine is busy, load .*", holds=lambda: True),  # the test has looked at the load itself
)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="store_true", help="fail a run that skips tests for a reason that support/skips.py does not have"
    )


def reasons(config: pytest.Config) -> Counter[str]:
    """How many tests were skipped for each reason; empty in a worker of pytest-xdist, which has no list."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = [] if reporter is None else reporter.stats.get("skipped", [])
    return Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)


def unexpected(config: pytest.Config) -> list[str]:
    return [reason for reason in reasons(config) if not any(re.fullmatch(it.reason, reason) and it.holds() for it in EXPECTED)]


def fail_if_unexpected(session: pytest.Session) -> None:
    if session.config.getoption(OPTION) and unexpected(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def summarize(terminalreporter: pytest.TerminalReporter) -> None:
    found, wrong = reasons(terminalreporter.config), unexpected(terminalreporter.config)
    if found:
        terminalreporter.section("skipped")
    for reason, count in found.most_common():
        terminalreporter.write_line(f"{count:5}  {reason}{'  (UNEXPECTED)' if reason in wrong else ''}")
