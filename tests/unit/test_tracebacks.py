"""The frames of the library in a traceback that ends a program, and the text for torchrun's summary."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.levels import some
from support.project import ROOT

HINT = "Frames of Undertow are left out: UNDERTOW_TRACEBACK=full shows them."
SCRIPT = """
import undertow
def configured():
    return undertow.SyncConfig(wire="int9")
configured()
"""
CHAINED = """
import undertow
try:
    undertow.SyncConfig(wire="int9")
except undertow.ConfigError as error:
    {ending}
"""


def told(script: str, folder: Path, **variables: str) -> list[str]:
    """What a script prints that ends with an error."""
    (folder / "script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr.splitlines()


def places(lines: list[str]) -> list[str]:
    return [line.split('"')[1].rsplit("/", 1)[-1] for line in lines if line.startswith("  File ")]


def test_an_error_shows_the_lines_of_the_script_only(tmp_path: Path) -> None:
    lines = told(SCRIPT, tmp_path)
    assert places(lines) == ["script.py", "script.py"]
    assert lines[-2:] == ["Read more: undertow docs troubleshooting", HINT]


def test_a_variable_brings_the_frames_back(tmp_path: Path) -> None:
    lines = told(SCRIPT, tmp_path, UNDERTOW_TRACEBACK="full")
    assert {"script.py", "sync_config.py"} <= set(places(lines))
    assert HINT not in lines


@pytest.mark.parametrize("ending", ["raise undertow.ConfigError('mine.')", "raise undertow.ConfigError('mine.') from error"])
def test_errors_before_it_are_shortened_too(ending: str, tmp_path: Path) -> None:
    assert set(places(told(CHAINED.format(ending=ending), tmp_path))) == {"script.py"}


@pytest.mark.parametrize("ending", ["raise KeyError(1)", "raise KeyError(1) from error"])
def test_another_error_keeps_all_frames(ending: str, tmp_path: Path) -> None:
    lines = told(CHAINED.format(ending=ending), tmp_path)
    assert ("sync_config.py" in places(lines), HINT in lines) == (True, False)


def test_errors_that_are_each_other_s_reason_are_printed(tmp_path: Path) -> None:
    script = """
import undertow
try:
    try:
        undertow.SyncConfig(wire="int9")
    except undertow.ConfigError as error:
        first = error
        raise KeyError(1) from error
except KeyError:
    raise first
"""
    assert told(script, tmp_path)[-1] == HINT


def for_torchrun(script: str, folder: Path) -> tuple[str, str, int]:
    """The message, the text of the summary, and the time that a script with an error leaves for torchrun."""
    told(script, folder, TORCHELASTIC_ERROR_FILE=str(folder / "error.json"))
    message = json.loads((folder / "error.json").read_text())["message"]
    return message["message"], message["extraInfo"]["py_callstack"], int(message["extraInfo"]["timestamp"])


@pytest.mark.parametrize("ending", ["configured()", "raise ValueError('row 7 has no label')", "import json; json.loads('')"])
def test_torchrun_gets_the_error_with_the_lines_of_the_script(ending: str, tmp_path: Path) -> None:
    message, text, _ = for_torchrun(SCRIPT.replace("\nconfigured()", f"\n{ending}"), tmp_path)
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert set(places(lines)) == {"script.py"}
    assert message.partition("\n")[0] in text
    assert HINT not in text


@pytest.mark.parametrize("kind", ["PeerFailed", "RankLost"])
def test_torchrun_takes_the_rank_that_failed_first_for_the_cause(kind: str, tmp_path: Path) -> None:
    message, text, time_s = for_torchrun(f"import undertow\nraise undertow.{kind}('rank 1 is gone.', remedy='Look.')", tmp_path)
    assert message == f"{kind}: rank 1 is gone.\n  Look."
    assert text == f"{message}\n  (The time above is an hour ahead: so torchrun takes the other rank for the cause.)"
    assert time_s > time.time() + 60  # torchrun finds a killed rank when it looks, and may look rarely


@pytest.mark.deep
def test_an_error_that_torch_has_recorded_stays(tmp_path: Path) -> None:
    script = """
import undertow
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    undertow.SyncConfig(wire="int9")

main()
"""
    _, text, _ = for_torchrun(script, tmp_path)
    assert "sync_config.py" in places(text.splitlines())  # torch leaves no frame out


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    assert told(SCRIPT, tmp_path, TORCHELASTIC_ERROR_FILE=str(tmp_path / "nowhere" / "error.json"))[-1] == HINT


def test_a_file_that_can_be_written_in_part_only_is_not_left(tmp_path: Path) -> None:
    script = """
import pathlib
import undertow
write = pathlib.Path.write_text
def fill(path, text, **how):
    write(path, text[:9], **how)
    raise OSError("No space left on device")
pathlib.Path.write_text = fill
undertow.SyncConfig(wire="int9")
"""
    told(script, tmp_path, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


CHILDREN = {
    "started": "subprocess.run([sys.executable, '-c', child], stderr=subprocess.DEVNULL)",
    "forked": "os.waitpid(os.fork() or end(), 0)",
}


@pytest.mark.parametrize("child", some(CHILDREN.values(), most=1), ids=CHILDREN.keys())
def test_a_process_of_the_script_does_not_write_the_error_of_the_rank(child: str, tmp_path: Path) -> None:
    script = f"""
import os, subprocess, sys
import undertow
child = "import undertow; raise KeyError('of the child')"
def end():
    sys.excepthook(KeyError, KeyError("of the child"), None)
    os._exit(1)
{child}
raise ValueError("of the rank")
"""
    assert for_torchrun(script, tmp_path)[0] == "ValueError: of the rank"
