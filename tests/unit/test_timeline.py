from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support.errors import text_of
from undertow.errors import ConfigError
from undertow.report.timeline import save_timeline
from undertow.trace import Event, Trace

PNG = b"\x89PNG\r\n\x1a\n"
EMPTY = Trace(rank=0, step=0, events=())
OVERLAPPED = Trace(
    rank=0,
    step=0,
    events=(
        Event(lane="compute", kind="forward", start_us=0, stop_us=40_000),
        Event(lane="compute", kind="backward", start_us=40_000, stop_us=120_000),
        Event(lane="compute", kind="wait", start_us=120_000, stop_us=130_000),
        Event(lane="compute", kind="optimizer", start_us=130_000, stop_us=133_000),
        Event(lane="comm.dp", kind="all_reduce", start_us=60_000, stop_us=130_000, bucket=0, num_bytes=8),
    ),
)


def width_and_height(picture: bytes) -> tuple[int, int]:
    """From the header of a PNG (RFC 2083, 11.2.1)."""
    assert picture.startswith(PNG)
    return int.from_bytes(picture[16:20]), int.from_bytes(picture[20:24])


def test_one_trace_makes_a_picture(tmp_path: Path) -> None:
    save_timeline({"one way": OVERLAPPED}, tmp_path / "one.png")
    assert width_and_height((tmp_path / "one.png").read_bytes())[0] > 1000


def test_more_traces_make_a_higher_picture(tmp_path: Path) -> None:
    for num_ways in (1, 3):
        save_timeline({f"way {i}": OVERLAPPED for i in range(num_ways)}, tmp_path / f"{num_ways}.png")
    (width, low), (same_width, high) = (width_and_height((tmp_path / f"{n}.png").read_bytes()) for n in (1, 3))
    assert width == same_width
    assert high > low


def test_steps_without_communication_or_without_anything_can_be_drawn(tmp_path: Path) -> None:
    silent = Trace(rank=0, step=0, events=tuple(OVERLAPPED.on_lane("compute")))
    save_timeline({"silent": silent, "empty": EMPTY}, tmp_path / "silent.png")
    assert (tmp_path / "silent.png").read_bytes().startswith(PNG)


def test_no_traces_are_refused(tmp_path: Path) -> None:
    text = text_of(ConfigError, lambda: save_timeline({}, tmp_path / "none.png"))
    assert text == "a timeline needs at least one trace.\n  save_timeline"


def test_a_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert text_of(ConfigError, lambda: save_timeline({"one way": OVERLAPPED}, tmp_path / "one.png")) == (
        "pictures need matplotlib, which is not installed.\n"
        "  undertow.report.timeline\n"
        '  Install it with: pip install "undertow[cli]"'
    )
