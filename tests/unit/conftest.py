"""The command `undertow`, called inside this process."""

import shlex
import sys

import pytest

from support.cli import Ended, Undertow
from undertow.cli import main


@pytest.fixture
def undertow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Undertow:
    """Calls the command with a line of arguments and more of them, in a terminal that is wide enough for all it prints."""

    def call(line: str, *more: object, columns: int = 200) -> Ended:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["undertow", *shlex.split(line), *map(str, more)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code, *capsys.readouterr())  # type: ignore[arg-type]

    return call
