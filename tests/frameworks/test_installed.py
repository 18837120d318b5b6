"""Tests of frameworks are skipped visibly, and never in CI."""

from __future__ import annotations

import pytest

from support.frameworks import require_installed

REASON = "not installed: no_such_framework. Install the extra: pip install 'undertow[integrations]'"


def test_a_missing_framework_skips_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception) as caught:
        require_installed("torch", "no_such_framework")
    assert caught.value.msg == REASON


def test_a_missing_framework_is_a_failure_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must not skip tests of frameworks"):
        require_installed("no_such_framework")
