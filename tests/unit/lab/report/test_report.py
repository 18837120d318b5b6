"""Reports of steps as a terminal shows them, and as pictures."""

import importlib.util
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from support.errors import refusal
from support.records import GATHERS, printed, record, report
from undertow.lab.report.timeline import require_matplotlib, save_timeline
from undertow.trace import Event, StepReport, Trace


def sent(*num_bytes: int) -> StepReport:
    return report(record(buckets=tuple(replace(it, num_bytes=num) for it, num in zip(record().buckets, num_bytes, strict=True))))


SKIPPED = "Optimizer steps skipped because of non-finite gradients: 3\n"
ONE_GRAPH = "because no bucket reaches 1 MiB: its gradients arrive all at once.\n"


@pytest.mark.parametrize(
    ("made", "parts", "others"),
    [
        pytest.param(
            report(record()),
            (
                "head +1",
                "stem",
                "50% hidden",
                "longest for bucket 1",
                "Too few steps to judge",
                "p50 100.0, p95 100.0; steps counted: 1",
            ),
            (SKIPPED, ONE_GRAPH, "in this step rank", "the plan changed"),
            id="every bucket with its parameters",
        ),
        pytest.param(report(), ("No step is recorded yet",), (), id="no steps"),
        pytest.param(report(record()), (), ("gather", "Gather"), id="no gathers"),
        pytest.param(
            report(record(gathers=GATHERS)),
            (
                "80.0  limit 80.0, the earliest with these buckets",
                "12.0 MB; 5.0 ms exposed",
                "Gathers of parameters in this step, ms",
            ),
            ("achieved",),
            id="the limit of these buckets, and gathers",
        ),
        pytest.param(report(record(busy_ms=(50.0, 65.0))), ("15.0  in this step rank 1",), (), id="a late rank"),
        pytest.param(
            report(record(), plan_since=57),
            ("Only steps under this plan count, since step 57: the others ran under other plans.",),
            (),
            id="why few steps count",
        ),
        pytest.param(report(record(), num_skipped=3), (SKIPPED,), (), id="skipped steps"),
        pytest.param(report(record(), is_one_graph=True), (ONE_GRAPH,), (), id="a model that is compiled as one graph"),
    ],
)
def test_a_printed_report_says_what_happened_in_the_step(
    made: StepReport, parts: tuple[str, ...], others: tuple[str, ...]
) -> None:
    text = printed(made)
    assert ([part for part in parts if part not in text], [other for other in others if other in text]) == ([], [])


def test_a_value_shows_itself_where_it_is_printed_and_in_a_notebook() -> None:
    made = replace(report(record()), experts={"'[a].*', ranks 0, 2": report()})
    of_experts = "\n\nExperts '[a].*', ranks 0, 2:\nNo step is recorded yet: run a training step, and leave record on."
    assert (str(made).startswith("Where a step goes"), str(made).endswith(of_experts), "\x1b" in str(made)) == (True, True, False)
    assert made._repr_html_().startswith("<pre ")
    assert "Where a step goes" in made._repr_html_()


def test_tables_fit_80_columns_and_add_up() -> None:
    name = "module.transformer.h.11.mlp.c_proj.weight"
    long = replace(report(record()).buckets[0], largest=name, num_bytes=345_678_901)
    made = replace(report(*(record(step=step, gathers=GATHERS) for step in range(6))), buckets=(long, replace(long, index=1)))
    lines = str(made).splitlines()
    assert max(len(line) for line in lines if "explain()" not in line and "network is" not in line) <= 80
    ends = [line.rstrip()[-15:] for line in lines if "..." in line]
    assert ends == ["_proj.weight +1"] * 2
    shown = {line[:20].strip(): float(line[20:26]) for line in lines[3:11]}
    assert shown["step"] == pytest.approx(sum(shown[name] for name in ("forward", "backward", "exposed", "rest")), abs=0.2)
    assert shown["exposed"] >= shown["a late rank"]


def test_the_bytes_that_are_sent_in_a_format_have_a_column() -> None:
    made = replace(sent(2_000, 1_000), wire="int8")
    name = "module.transformer.h.11.mlp.c_proj.weight"
    long = replace(made.buckets[0], largest=name, num_bytes=345_678_901, sent_bytes=87_654_321, params=("a",) * 23)
    lines = [line.rstrip() for line in str(replace(made, buckets=(long, *made.buckets[1:]))).splitlines()]
    assert lines[-4:] == [
        "bucket      MB   sent  ready  launched  done  wire  waited  largest +others",
        "────────────────────────────────────────────────────────────────────────────────",
        "0       345.68  87.65   30.0      30.0  50.0  20.0     0.0  ..._proj.weight +22",
        "1         4.00   0.00   60.0      60.0  80.0  20.0    20.0  stem",
    ]
    assert max(map(len, lines)) <= 80


PNG = b"\x89PNG\r\n\x1a\n"
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

SHARDED = Trace(
    rank=0,
    step=0,
    events=(
        *OVERLAPPED.events[:3],
        Event(lane="compute", kind="wait", start_us=1_000, stop_us=9_000),
        Event(lane="compute", kind="optimizer", start_us=-6_000, stop_us=-1_000),
        Event(lane="comm.dp", kind="all_gather", start_us=-2_000, stop_us=9_000, bucket=1, num_bytes=8),
        Event(lane="comm.dp", kind="all_gather", start_us=9_000, stop_us=30_000, bucket=0, num_bytes=8),
        Event(lane="comm.dp", kind="reduce_scatter", start_us=60_000, stop_us=130_000, bucket=0, num_bytes=8),
    ),
)


@pytest.mark.deep
def test_traces_make_a_picture_that_is_higher_the_more_there_are(tmp_path: Path) -> None:
    pictures = []
    for num_ways in (1, 3):
        save_timeline({f"way {i}": OVERLAPPED for i in range(num_ways)}, tmp_path / "it.png")
        pictures.append((tmp_path / "it.png").read_bytes())
    # Width and height, from the header of a PNG (RFC 2083, 11.2.1).
    (width, low), (same_width, high) = ((it[16:20], it[20:24]) for it in pictures if it.startswith(PNG))
    assert (width, low < high, int.from_bytes(width) > 1000) == (same_width, True, True)


def test_steps_without_communication_or_without_anything_can_be_drawn(tmp_path: Path) -> None:
    save_timeline(
        {"silent": Trace(rank=0, step=0, events=tuple(OVERLAPPED.on_lane("compute"))), "empty": Trace(rank=0, step=0, events=())},
        tmp_path / "silent.png",
    )
    assert (tmp_path / "silent.png").read_bytes().startswith(PNG)


def drawn(traces: dict[str, Trace], monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr("undertow.lab.report.timeline.save_themes", lambda draw, _path: figures.append(draw()))
    save_timeline(traces, "unused.png")
    return figures[0]


def test_what_began_before_the_forward_is_inside_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    (axes,) = drawn({"plain": OVERLAPPED, "sharded": SHARDED}, monkeypatch).axes
    left, right = axes.get_xlim()
    assert (left, right > 133, [text.get_text() for text in axes.texts]) == (
        -6,
        True,
        ["136 ms", "82% hidden", "133 ms", "86% hidden"],  # the slowest is on top
    )


def test_codings_are_drawn_below_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    coded = Event(lane="coding", kind="encode", start_us=60_000, stop_us=64_000, bucket=0)
    labels = []
    for events in (OVERLAPPED.events, (*OVERLAPPED.events, coded)):
        (axes,) = drawn({"one": replace(OVERLAPPED, events=events)}, monkeypatch).axes
        labels.append([label.get_text() for label in axes.get_legend().get_texts()])
    assert labels[1] == [*labels[0], "encoded or decoded"]


def test_a_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert refusal(require_matplotlib) == (
        "pictures need matplotlib, which is not installed.\n"
        "  undertow.lab.report.timeline\n"
        '  Install it with: pip install "undertow[cli]"'
    )


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_report_can_be_printed_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines become ASCII, and other characters escapes."""
    long = replace(report(record()).buckets[0], largest="слой." * 3 + "transformer.h.11.mlp.c_proj.weight")
    made = replace(report(record()), buckets=(long, replace(long, largest="слой")))
    printed_bytes = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed_bytes, encoding=encoding))
    print(made, flush=True)
    text = printed_bytes.getvalue().decode(encoding)
    assert (text.isascii(), "---" in text, "..." in text, r"\u0441\u043b\u043e\u0439" in text) == (True, True, True, True)
