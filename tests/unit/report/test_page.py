"""The page about a run: what a browser shows of it, and what is refused."""

import importlib.util
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.browser import CHROMIUM, Page, browser
from support.cli import MEASURED, Undertow
from support.errors import refusal
from support.records import GATHERS, record, report
from undertow.cost import CostCurve
from undertow.report.page import save_pages
from undertow.trace import StepReport

NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed")
AGAIN = "Run the training with: undertow run --out DIR ..., and report on that folder."
SHAPES = "[...document.querySelectorAll('#simulated .bars path')].map(it => it.getAttribute('d')).join()"


def of_rank(rank: int, *, busy_ms: tuple[float, ...] = (50.0, 65.0), **changes: Any) -> StepReport:
    return report(*(record(step=step, rank=rank, busy_ms=busy_ms, **changes) for step in range(6)), rank=rank)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run of two ranks has written, whose rank 1 is late."""
    for rank in range(2):
        of_rank(rank, gathers=GATHERS).save(tmp_path / f"report-rank{rank}.json")
    replace(MEASURED, num_ranks=2).save(tmp_path / "profile.json")
    return tmp_path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


def text(page: Page, name: str) -> str:
    return str(page.value(f"document.getElementById('{name}').innerText"))


@NEEDS_CHROMIUM
@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_the_page_without_a_network_or_an_error(run: Path, page: Page, width: int, theme: str) -> None:
    (written,) = save_pages(run, run)
    page.open(written.as_uri(), width=width, theme=theme)
    assert text(page, "advice") == of_rank(0, gathers=GATHERS).advice
    assert "rank 1\nslowest" in page.value(
        "[...document.querySelectorAll('#step .ytick')].map(it => it.textContent).join()"
    ).replace("slowest", "\nslowest")
    assert page.value("document.documentElement.scrollWidth <= innerWidth") is True  # nothing to scroll aside for
    ground = page.value("getComputedStyle(document.body).backgroundColor")
    assert (ground, page.errors) == ("rgb(255, 255, 255)" if theme == "light" else "rgb(13, 17, 23)", [])


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_the_slider_changes_the_picture_by_the_hash(run: Path, page: Page) -> None:
    (written,) = save_pages(run, run)
    seen = []
    for link in (0, 1, 6):
        page.open(f"{written.as_uri()}#link={link}")
        seen.append((text(page, "chosen").split(":")[0], page.value(SHAPES)))
    assert [name for name, _ in seen] == ["the measured link", "1 Gb/s", "400 Gb/s"]
    assert len({shapes for _, shapes in seen}) == 3


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_names_are_text(run: Path, page: Page) -> None:
    made = of_rank(0, busy_ms=())
    evil = "</script><img src=x onerror=alert(1)>\x1b"
    replace(made, buckets=tuple(replace(it, largest=evil) for it in made.buckets)).to_html(run / "it.html")
    page.open((run / "it.html").as_uri())
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.value("document.querySelector('#t-buckets td:last-child').textContent") == evil.replace("\x1b", "\\u{1b}")
    assert page.errors == []


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_one_rank_has_a_page_that_says_that_nothing_is_sent(tmp_path: Path, page: Page) -> None:
    alone = report(*(record(step=step, buckets=(), busy_ms=()) for step in range(6)))
    alone.to_html(tmp_path / "alone.html", profile=replace(MEASURED, num_ranks=1))
    page.open((tmp_path / "alone.html").as_uri())
    assert ("Nothing is sent" in text(page, "about-step"), "Nothing is sent" in text(page, "about-links")) == (True, True)
    hidden = "['of-buckets', 'choose'].map(id => document.getElementById(id).hidden)"
    assert (page.value(hidden), page.errors) == ([True, True], [])


@pytest.mark.parametrize(("sizes", "is_there"), [(1, False), (2, True)])
def test_the_page_has_the_measured_link_if_several_sizes_were_measured(sizes: int, is_there: bool, run: Path) -> None:
    curve = CostCurve(points=((1e6, 2e3), (1e7, 1.1e4))[:sizes])
    replace(MEASURED, num_ranks=2, curves={"all_reduce": curve}).save(run / "profile.json")
    (written,) = save_pages(run, run)
    assert ('"the measured link"' in written.read_text(encoding="utf-8")) == is_there


def test_the_command_prints_all_reports_as_json_and_writes_nothing(run: Path, undertow: Undertow) -> None:
    shutil.copy(run / "report-rank0.json", run / "alone-rank0.json")  # not a report by its name
    before = sorted(run.iterdir())
    code, printed, _ = undertow("report --json", run)
    wanted = {"report": [json.loads((run / f"report-rank{rank}.json").read_text()) for rank in range(2)]}
    assert (code, json.loads(printed), sorted(run.iterdir())) == (0, wanted, before)
    (run / "report-rank1.json").unlink()
    code, printed, error = undertow("report --json", run)
    assert (code, printed, "report-rank1.json is missing." in error) == (2, "", True)


def test_the_command_writes_a_page_for_each_model(run: Path, undertow: Undertow) -> None:
    for rank in range(2):
        shutil.copy(run / f"report-rank{rank}.json", run / f"report-rank{rank}-2.json")
    out = run / "pages"
    out.mkdir()
    code, printed, _ = undertow(f"report {run} --out {out}")
    assert (code, printed) == (0, f"Page: {out / 'report.html'}\nPage: {out / 'report-2.html'}\n")
    first, second = ((out / name).read_text() for name in ("report.html", "report-2.html"))
    # Only the first model has a profile.
    assert ('"name": "25 Gb/s"' in first, '"links": []' in second, "https://cdn" in first.split("plotly.js v")[0]) == (
        True,
        True,
        False,
    )


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# How a folder is damaged, and the error.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no files": (
        lambda run: [path.unlink() for path in run.glob("report*")],
        f"there is no report-rank0.json in {{run}}.\n  undertow report {{run}}\n  {AGAIN}",
    ),
    "a rank is missing": (
        lambda run: (run / "report-rank1.json").unlink(),
        "report-rank1.json is missing.\n  undertow report {run}: the run had 2 ranks\n"
        "  Copy the files of all ranks into one folder; each node writes its own.",
    ),
    "another run's file": (
        lambda run: changed(run / "report-rank1.json", buckets=[]),
        "the reports are of different runs.\n  undertow report {run}: other ranks or buckets than in report-rank0.json\n"
        "  Give each run its own folder.",
    ),
    "two groups of ranks": (
        lambda run: [shutil.copy(run / f"report-rank{rank}.json", run / f"report-rank{rank + 2}.json") for rank in range(2)],
        "the reports are of several groups of ranks, such as pipeline stages.\n"
        "  undertow report {run}: 4 files, and a group has 2 ranks\n"
        "  Copy the files of one group into a separate folder, and report on that.",
    ),
    "no steps": (
        lambda run: (
            [report(rank=rank).save(run / f"report-rank{rank}.json") for rank in range(2)]
            and [changed(run / f"report-rank{rank}.json", busy_ms=[1, 1]) for rank in range(2)]
        ),
        "no step is recorded yet.\n  undertow report {run}\n  Train a few steps first, and leave record on.",
    ),
    "no report": (
        lambda run: (run / "report-rank0.json").write_text('{"rank": 0}'),
        f"{{run}}/report-rank0.json is not a report.\n  it lacks advice, backward_ms, buckets\n  {AGAIN}",
    ),
    "a time that is not finite": (
        lambda run: changed(run / "report-rank0.json", step_ms=math.inf),
        f"a time of the report is not finite (NaN or Inf).\n  undertow report {{run}}\n  {AGAIN}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_and_nothing_is_written(damage: str, run: Path) -> None:
    break_it, error = DAMAGES[damage]
    break_it(run)
    before = sorted(path.name for path in run.iterdir())
    assert refusal(lambda: save_pages(run, run)).replace("    ", "  ") == error.format(run=run)
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_page_that_cannot_be_written_is_refused_and_the_old_one_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "report.html").write_text("old")

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", refuse)  # as in a folder that may not be written to; root may write everywhere
    assert refusal(lambda: save_pages(run, run)) == (
        f"'{run / 'report.html'}' cannot be written: Permission denied.\n  undertow report {run}\n"
        "  Name a folder with space to write."
    )
    monkeypatch.undo()
    assert ((run / "report.html").read_text(), [path.name for path in run.iterdir() if path.name.startswith(".")]) == ("old", [])


def test_a_missing_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert refusal(lambda: of_rank(0).to_html(tmp_path / "it.html")) == (
        'pages need plotly, which is not installed.\n  report.to_html(path)\n  Install it with: pip install "undertow[page]"'
    )
