"""Reports of steps as a terminal shows them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from support.records import GATHERS, record, report
from undertow.report.terminal import print_report
from undertow.trace import StepReport


def shown(made: StepReport, *, width: int = 120) -> str:
    file = io.StringIO()
    print_report(made, Console(file=file, width=width))
    return file.getvalue()


def sent(*num_bytes: int) -> StepReport:
    """What a hook has really sent of each bucket."""
    rows = (replace(it, num_bytes=num) for it, num in zip(record().buckets, num_bytes, strict=True))
    return report(record(buckets=tuple(rows)))


SKIPPED = "Optimizer steps skipped so far, for gradients were not finite: 3\n"
ONE_GRAPH = "none of its buckets has 1 MiB: its gradients come all at once.\n"
SHOWN = {
    "every bucket with its parameters": (
        report(record()),
        ("head, body", "stem", "50% hidden", "slowest is rank"),
        (SKIPPED, ONE_GRAPH),
    ),
    "no steps": (report(), ("no step recorded yet",), ()),
    "as much as was sent, with trailers": (sent(8100, 4200), (), ("sent",)),
    "less than that": (sent(4050, 2100), ("sent",), ()),
    "no gathers": (report(record()), (), ("gather", "Gather")),
    "a limit of the step": (report(record(gathers=GATHERS)), ("limit of the step", "achieved / limit 1.111"), ()),
    "skipped steps": (report(record(), num_skipped=3), (SKIPPED,), ()),
    "a model that is compiled as one graph": (report(record(), is_one_graph=True), (ONE_GRAPH,), ()),
}


@pytest.mark.parametrize(("made", "parts", "others"), SHOWN.values(), ids=SHOWN)
def test_a_report_shows(made: StepReport, parts: tuple[str, ...], others: tuple[str, ...]) -> None:
    text = shown(made)
    assert [part for part in parts if part not in text] == []
    assert [other for other in others if other in text] == []


def test_bytes_that_were_really_sent_are_added_up() -> None:
    assert [sent(*num_bytes).sent_bytes for num_bytes in ((8100, 4200), (4050, 2100))] == [12_300, 6150]


def test_gathers_have_a_table() -> None:
    lines = [line.rstrip() for line in shown(report(record(gathers=GATHERS)), width=80).splitlines()]
    (line,) = (line for line in lines if "of it gathers" in line)
    assert [cell.strip() for cell in line.split("│")[1:-1]] == ["of it gathers", "20.0", "0.0 MB, 75% hidden"]
    assert lines[-7:] == [
        "Gathers of parameters, ms since the step began",
        "┏━━━━━━━━┳━━━━━━┳━━━━━━━━━━┳━━━━━━┳━━━━━━┳━━━━━━━━┓",
        "┃ bucket ┃   MB ┃ launched ┃ done ┃ wire ┃ waited ┃",
        "┡━━━━━━━━╇━━━━━━╇━━━━━━━━━━╇━━━━━━╇━━━━━━╇━━━━━━━━┩",
        "│      1 │ 0.00 │    -10.0 │  5.0 │ 15.0 │    5.0 │",
        "│      0 │ 0.01 │     -9.0 │ 10.0 │  5.0 │    0.0 │",
        "└────────┴──────┴──────────┴──────┴──────┴────────┘",
    ]
