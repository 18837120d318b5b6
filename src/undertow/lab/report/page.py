"""Writes a page about a run that a browser shows without a network: advice, the step as a timeline,
buckets, and other links.

`page.html` in this folder draws it, from the reports as JSON and from steps that are simulated
here.
"""

import importlib.util
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from undertow.errors import ConfigError, require
from undertow.foreign import parsed_json
from undertow.lab.profile import Profile, profile_from_file
from undertow.lab.what_if import WhatIf
from undertow.schedule import strategy_named
from undertow.trace import StepReport
from undertow.whole_file import require_folder, write_whole

_RATES = ("1gbit", "2.5gbit", "10gbit", "25gbit", "100gbit", "400gbit")
_NAME = re.compile(r"report-rank(\d+)(-\d+)?\.json")
_FIELDS = {field.name for field in fields(StepReport)} | {"advice"}
_RUN_AGAIN = "Run the training with: undertow run --out DIR ..., and report on that folder."


def page_of(reports: Sequence[Mapping[str, Any]], profile: Profile | None, *, where: str) -> str:
    """Returns the page of reports of one model, as `to_dict` gives them, one per rank; `where` is
    for errors.

    Raises ConfigError if there is nothing to show.
    """
    require(
        importlib.util.find_spec("plotly") is not None,
        "pages need plotly, which is not installed.",
        where=where,
        remedy='Install it with: pip install "undertow[page]"',
    )
    require(
        all(report["num_steps"] for report in reports),
        "no step is recorded yet.",
        where=where,
        remedy="Train a few steps first, and leave record on.",
    )
    data = json.dumps({"reports": reports, "links": _links(profile)}).replace("<", "\\u003c")
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    begin, middle, end = (
        resources.files(__package__)
        .joinpath("page.html")
        .read_text(encoding="utf-8")
        .split("<!--insert-->")
    )
    return f"{begin}{get_plotlyjs()}{middle}{data}{end}"


def _links(profile: Profile | None) -> list[dict[str, Any]]:
    """Returns simulated steps on the measured link and on others.

    None if nothing is sent, or if the link has nodes.
    """
    if (
        profile is None
        or profile.num_ranks == 1
        or strategy_named(profile.strategy).crossing is not None
    ):
        return []
    return [
        _link(profile, rate)
        for rate in (*((None,) if profile.curves and not profile.is_of_one_size else ()), *_RATES)
    ]


def _link(profile: Profile, rate: str | None) -> dict[str, Any]:
    what_if = replace(WhatIf.of(profile), link=rate)
    record = what_if.step(what_if.planned)
    return {
        "name": "the measured link" if rate is None else rate.replace("gbit", " Gb/s"),
        "step_ms": record.step_us / 1e3,
        "exposed_ms": record.overlap().exposed_us / 1e3,
        "mb": [bucket.num_bytes / 1e6 for bucket in what_if.planned.buckets],
        "events": record.trace().to_dict()["events"],
    }


def save_pages(folder: Path, out: Path) -> list[Path]:
    """Writes a page into `out` for each model whose reports are in `folder`, and returns their
    paths.

    Raises ConfigError if files are missing, damaged, or of different runs.
    """
    pages = {
        out / f"report{suffix}.html": page_of(
            reports,
            profile_from_file(path)
            if (path := folder / f"profile{suffix}.json").exists()
            else None,
            where=f"undertow report {folder}",
        )
        for suffix, reports in _reports_of(folder).items()
    }
    # Written only now: a damaged file of one model must not leave the pages of others.
    for path, page in pages.items():
        write_whole(path, page.encode(), where=f"undertow report {folder}")
    return [*pages]


def _reports_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the reports of each model, by the suffix of its files and in the order of ranks."""
    models: dict[str, dict[str, Path]] = defaultdict(dict)
    for path in sorted(folder.glob("report-rank*.json")):
        if match := _NAME.fullmatch(path.name):
            models[match[2] or ""][match[1]] = path
    where = f"undertow report {folder}"
    require_folder(folder, where=where)
    require(models, f"report-rank0.json is missing in {folder}.", where=where, remedy=_RUN_AGAIN)
    found = {
        suffix: [_report(paths[rank]) for rank in sorted(paths, key=int)]
        for suffix, paths in sorted(models.items())
    }
    for suffix, reports in found.items():
        _require_one_run(reports, suffix, where)
    return found


def _report(path: Path) -> dict[str, Any]:
    try:
        report = parsed_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON.", where=str(error), remedy=_RUN_AGAIN
        ) from error
    missing = sorted(_FIELDS - set(report)) if isinstance(report, dict) else ["anything"]
    require(
        not missing,
        f"{path} is not a report.",
        where=f"it lacks {', '.join(missing[:3])}",
        remedy=_RUN_AGAIN,
    )
    return dict(report)


def _require_one_run(reports: Sequence[Mapping[str, Any]], suffix: str, where: str) -> None:
    num_ranks = max(1, *(len(report["busy_ms"]) for report in reports))
    missing = sorted(set(range(num_ranks)) - {report["rank"] for report in reports})
    require(
        not missing,
        f"report-rank{next(iter(missing), 0)}{suffix}.json is missing.",
        where=f"{where}: the run had {num_ranks} ranks",
        remedy="Copy the files of all ranks into one folder; each node writes its own.",
    )
    first, *others = (
        [
            report.get("run"),
            len(report["busy_ms"]),
            [bucket["params"] for bucket in report["buckets"]],
        ]
        for report in reports
    )
    require(
        all(other == first for other in others),
        "the reports are of different runs or groups of ranks.",
        where=f"{where}: other ranks or buckets than in report-rank0{suffix}.json",
        remedy="Give each run, and each group of ranks such as a pipeline stage, its own folder.",
    )
