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
from support.records import GATHERS, record, report, row
from undertow.lab.cost import CostCurve
from undertow.lab.profile import Profile
from undertow.lab.report.page import page_of, save_pages
from undertow.trace import StepReport

NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which is not installed")
AGAIN = "Run the training with: undertow run --out DIR ..., and report on that folder."
SHAPES = "[...document.querySelectorAll('#simulated .bars path')].map(it => it.getAttribute('d')).join()"

# The bars of messages: start and duration in ms, and height.
BARS = (
    "(it => it.base.map((base, at) => [base, +it.x[at].toFixed(6), it.width[at]]))"
    "(document.getElementById('step').data.find(it => it.name === 'gradients sent'))"
)


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


def write_page(made: StepReport, path: Path, profile: Profile | None = None) -> None:
    path.write_text(page_of([json.loads(json.dumps(made.to_dict()))], profile, where="here"), encoding="utf-8")


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
    assert len(page.picture()) > 20_000


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_the_slider_changes_the_picture_by_the_hash_and_by_keys(run: Path, page: Page) -> None:
    (written,) = save_pages(run, run)
    seen = []
    for link in (0, 1, 6):
        page.open(f"{written.as_uri()}#link={link}")
        seen.append((text(page, "chosen").split(":")[0], page.value(SHAPES)))
    assert [name for name, _ in seen] == ["the measured link", "1 Gb/s", "400 Gb/s"]
    assert len({shapes for _, shapes in seen}) == 3
    page.value("document.getElementById('link').focus()")
    page.press("ArrowLeft")
    page.value("0")
    assert (page.value("location.hash"), text(page, "chosen").split(":")[0]) == ("#link=5", "100 Gb/s")
    assert page.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert page.value("document.querySelector('label[for=link]').innerText") == "Link of each rank"
    assert page.errors == []


@NEEDS_CHROMIUM
@pytest.mark.slow
@pytest.mark.parametrize(("update_us", "is_said"), [(1_000, True), (26_000, False)])
def test_the_page_says_if_the_simulated_step_is_far_from_the_measured_one(
    update_us: float, is_said: bool, run: Path, page: Page
) -> None:
    replace(MEASURED, num_ranks=2, update_us=update_us).save(run / "profile.json")
    (written,) = save_pages(run, run)
    page.open(written.as_uri())
    said = (
        " On the measured link the simulated step takes 66.8 ms and the measured step 100.0 ms: unless their buckets differ, "
        "steps on other links may be as far off."
    )
    assert ((said in text(page, "about-links")), page.errors) == (is_said, [])


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_a_bucket_that_overtakes_another_has_a_lower_bar_and_nothing_is_below_zero(tmp_path: Path, page: Page) -> None:
    rows = row(0, 30_000, 95_000, (60_000, 95_000)), row(1, 60_000, 80_000, (95_000, 95_000), ready_us=-1)
    write_page(of_rank(0, busy_ms=(), buckets=rows), tmp_path / "it.html")
    page.open((tmp_path / "it.html").as_uri())
    cells = "[...document.querySelectorAll('#t-buckets td')].map(it => it.textContent).join()"
    assert (page.value(BARS), page.value(cells)) == (
        [[30, 65, 0.3], [60, 20, 0.21]],
        "0,0.01,0.01,30.0,30.0,95.0,45.0,35.0,head,1,0.00,0.00,0.0,60.0,80.0,20.0,0.0,stem",
    )


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_buckets_in_flight_together_have_bars_one_after_the_other_and_no_bar_is_too_thin_to_see(
    tmp_path: Path, page: Page
) -> None:
    ends_us = (50_000, 60_000, 60_001, 80_000)
    rows = [row(at % 2, 21_000 + at, end_us, (60_000, 60_000)) for at, end_us in enumerate(ends_us)]
    write_page(of_rank(0, busy_ms=(), buckets=tuple(rows)), tmp_path / "it.html")
    page.open((tmp_path / "it.html").as_uri())
    assert page.value(BARS) == [[21, 29, 0.3], [50, 10, 0.3], [60, 0.2, 0.3], [60.001, 19.999, 0.3]]


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_the_timeline_zooms_by_keys(run: Path, page: Page) -> None:
    (written,) = save_pages(run, run)
    page.open(written.as_uri())
    shown = "document.getElementById('step').layout.xaxis.range"
    low, high = page.value(shown)
    page.press("Tab")
    page.press("Enter")
    narrow = page.value(shown)
    assert narrow[1] - narrow[0] == pytest.approx((high - low) / 2)
    for _ in range(4):
        page.press("Tab")
    page.press("Enter")
    assert page.value(shown) == [low, high]


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_names_are_text(run: Path, page: Page) -> None:
    made = of_rank(0, busy_ms=())
    evil = "</script><img src=x onerror=alert(1)>\x1b"
    write_page(replace(made, buckets=tuple(replace(it, largest=evil) for it in made.buckets)), run / "it.html")
    page.open((run / "it.html").as_uri())
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.value("document.querySelector('#t-buckets td:last-child').textContent") == evil.replace("\x1b", "\\u{1b}")
    assert page.errors == []


@NEEDS_CHROMIUM
@pytest.mark.slow
def test_one_rank_has_a_page_that_says_that_nothing_is_sent(tmp_path: Path, page: Page) -> None:
    alone = report(*(record(step=step, buckets=(), busy_ms=()) for step in range(6)))
    write_page(alone, tmp_path / "alone.html", replace(MEASURED, num_ranks=1))
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


def test_a_damaged_second_model_leaves_no_page_of_the_first(run: Path) -> None:
    for rank in range(2):
        shutil.copy(run / f"report-rank{rank}.json", run / f"report-rank{rank}-2.json")
    (run / "report-rank1-2.json").write_text("{")
    assert "report-rank1-2.json cannot be read as JSON" in refusal(lambda: save_pages(run, run))
    assert [*run.glob("*.html")] == []


def changed(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# How a folder is damaged, and the error.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no files": (
        lambda run: [path.unlink() for path in run.glob("report*")],
        f"report-rank0.json is missing in {{run}}.\n  undertow report {{run}}\n  {AGAIN}",
    ),
    "a rank is missing": (
        lambda run: (run / "report-rank1.json").unlink(),
        "report-rank1.json is missing.\n  undertow report {run}: the run had 2 ranks\n"
        "  Copy the files of all ranks into one folder; each node writes its own.",
    ),
    "another run's file": (
        lambda run: changed(run / "report-rank1.json", buckets=[]),
        "the reports are of different runs or groups of ranks.\n"
        "  undertow report {run}: other ranks or buckets than in report-rank0.json\n"
        "  Give each run, and each group of ranks such as a pipeline stage, its own folder.",
    ),
    "a run at another port": (
        lambda run: changed(run / "report-rank1.json", run=["none", "29500"]),
        "the reports are of different runs or groups of ranks.\n"
        "  undertow report {run}: other ranks or buckets than in report-rank0.json\n"
        "  Give each run, and each group of ranks such as a pipeline stage, its own folder.",
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
    "no JSON": (
        lambda run: (run / "report-rank0.json").write_text("{"),
        "{run}/report-rank0.json cannot be read as JSON.\n  Expecting property name enclosed in double quotes: line 1 column 2 "
        f"(char 1)\n  {AGAIN}",
    ),
    "a profile's time that is not finite": (
        lambda run: changed(run / "profile.json", forward_us=math.nan),
        "{run}/profile.json is not a profile.\n  forward_us must be a number, zero or more, got nan.\n"
        "  The command `undertow docs profiles` shows the format and an example.",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_and_nothing_is_written(damage: str, run: Path) -> None:
    break_it, error = DAMAGES[damage]
    break_it(run)
    before = sorted(path.name for path in run.iterdir())
    assert refusal(lambda: save_pages(run, run)).replace("    ", "  ") == error.format(run=run)
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_missing_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert refusal(lambda: write_page(of_rank(0), tmp_path / "it.html")) == (
        'pages need plotly, which is not installed.\n  here\n  Install it with: pip install "undertow[page]"'
    )
