"""Foreign text is refused by undertow's errors and shown without effect; the tree of these errors."""

import inspect
import json
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cli import Undertow
from support.errors import refusal
from support.project import ROOT
from support.records import record
from support.strategies import spec
from undertow import ConfigError, UndertowError, errors
from undertow.foreign import MOST_LEVELS, parsed_json, printable, printable_lines
from undertow.lab.cost import CostCurve
from undertow.lab.profile import Profile, profile_from_file, profile_from_json
from undertow.lab.report.timeline import save_timeline
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.trace import Event, Trace, summarize
from undertow.tune import Explanation

SPEC = ParamSpec(name="a", shape=(2, 3), dtype="float32", itemsize=4)
PLAN = plan_from_groups([SPEC], [(0,)], num_ranks=2).to_json()
PROFILE = Profile(params=(SPEC,), ready_us=(1.0,), forward_us=1.0, backward_us=2.0).to_json()


def from_file(read: Callable[[Path], Any]) -> Callable[[str, Path], Any]:
    def reads(text: str, folder: Path) -> Any:
        (folder / "file.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        return read(folder / "file.json")

    return reads


READERS: dict[str, tuple[str, Callable[[str, Path], Any]]] = {
    "Plan.from_json": (PLAN, lambda text, _: Plan.from_json(text)),
    "profile_from_json": (PROFILE, lambda text, _: profile_from_json(text, "run.json")),
    "a file of a profile": (PROFILE, from_file(profile_from_file)),
}
each_reader = pytest.mark.parametrize(("good", "read"), READERS.values(), ids=READERS)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


# In place of each value of a text.


def places(part: Any) -> Iterator[tuple[Any, Any]]:
    for key in part if isinstance(part, dict) else range(len(part)):
        yield part, key
        if isinstance(part[key], dict | list):
            yield from places(part[key])


def with_value(text: str, value: str) -> Iterator[str]:
    """The text with each of its plain values replaced, one at a time."""
    data = json.loads(text)
    for part, key in list(places(data)):
        before, part[key] = part[key], "<here>"
        yield json.dumps(data).replace('"<here>"', value)
        part[key] = before


@each_reader
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(nested(100_000), id="nested without end"),
        pytest.param(nested(900), id="nested as deep as Python reads"),
        pytest.param("1" * 5000, id="a number of too many digits"),
        pytest.param("1e999", id="a number beyond all floats"),
        pytest.param("NaN", id="not a number"),
        pytest.param("true", id="true"),
        pytest.param('"3"', id="a text"),
        pytest.param('"\\ud800"', id="half a character"),
        pytest.param("null", id="nothing"),
        pytest.param('{"a": {}}', id="an object"),
    ],
)
def test_any_value_anywhere_is_read_or_a_config_error(
    value: str, good: str, read: Callable[[str, Path], Any], tmp_path: Path
) -> None:
    for text in with_value(good, value):
        try:
            outcome = repr(read(text, tmp_path))
        except ConfigError as error:
            outcome = str(error)
        assert outcome.replace("\n", "").isprintable()


@each_reader
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(nested(100_000), id="nested without end"),
        pytest.param("", id="nothing"),
        pytest.param("\udcff\udcfe{", id="bytes that are no text"),
        pytest.param('"\\ud800', id="half a character"),
        pytest.param('"\\ud800"', id="the wrong kind"),
    ],
)
def test_any_other_text_is_a_config_error(text: str, good: str, read: Callable[[str, Path], Any], tmp_path: Path) -> None:
    assert refusal(lambda: read(text, tmp_path)).replace("\n", "").isprintable()


@each_reader
def test_a_key_that_is_given_twice_is_a_config_error(good: str, read: Callable[[str, Path], Any], tmp_path: Path) -> None:
    (key, value), *_ = json.loads(good).items()
    with pytest.raises(ConfigError, match="is given twice"):
        read(good.replace("{", "{" + f'"{key}": {json.dumps(value)}, ', 1), tmp_path)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        pytest.param(PLAN, "[2, 3]", "[2, 3.0]", id="a shape with a point"),
        pytest.param(PLAN, "[2, 3]", "[true, 3]", id="a shape that is true"),
        pytest.param(PLAN, "[2, 3]", "[4294967296, 4294967296]", id="a shape that nothing can count"),
        pytest.param(PLAN, '"num_ranks": 2', '"num_ranks": 2.5', id="half a rank"),
        pytest.param(PLAN, "[[0]]", "[[0.7]]", id="a bucket with a point"),
        pytest.param(PLAN, '"name": "a"', '"name": 1', id="a name that is a number"),
    ],
)
def test_a_value_of_another_type_is_not_rounded_or_guessed(text: str, good: str, bad: str) -> None:
    assert good in text
    with pytest.raises(ConfigError):
        Plan.from_json(text.replace(good, bad))


def test_json_is_read_to_a_depth() -> None:
    assert parsed_json(nested(MOST_LEVELS)) == json.loads(nested(MOST_LEVELS))
    with pytest.raises(ValueError, match="nested too deeply"):
        parsed_json(nested(MOST_LEVELS + 1))


NAMES = {
    "an end of markup": "[/bold]",
    "a link": "[link=//x]y[/link]",
    "a style with a backslash": "\\[red]z",
    "a title of the window": "\x1b]0;t\x07",
    "another direction": "\u202ea",
    "a second line": "a\nb\rc",
    "half of a character": "\ud800",
}
each_name = pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer.0.weight", "layer.0.weight"),
        ("zwei Übungen, 三", "zwei Übungen, 三"),
        ("1\u00a0234\u3000m", "1\u00a0234\u3000m"),
        ("\x1b[31m\x00\x7f\x85", "\\x1b[31m\\x00\\x7f\\x85"),
        ("a\nb\tc\r", "a\\nb\\tc\\r"),
        ("\u202e\u2028\u2066\ufeff", "\\u202e\\u2028\\u2066\\ufeff"),
        ("\ud800\U000e0001", "\\ud800\\U000e0001"),
    ],
)
def test_a_character_that_could_steer_a_terminal_is_shown_as_its_escape(text: str, expected: str) -> None:
    assert (printable(text), printable_lines(f"{text}\n{text}")) == (expected, "\n".join([expected.replace("\\n", "\n")] * 2))


def plan_of(name: str, **changes: Any) -> Plan:
    given = {"name": name, "shape": (3,), "dtype": "float32", "itemsize": 4}
    return plan_from_groups([ParamSpec(**{**given, **changes})], [(0,)], num_ranks=2)


def profile_of(name: str) -> Profile:
    curves, times = {"all_reduce": CostCurve(points=((1e3, 10.0), (1e6, 100.0)))}, {"forward_us": 10.0, "backward_us": 20.0}
    return Profile(name=name, params=(spec(name, 1000),), ready_us=(10.0,), **times, num_ranks=2, curves=curves)


# What shows a name, or the file that has it and the command that shows that.


@pytest.mark.parametrize(
    "show",
    [
        pytest.param(
            lambda name: str(summarize([record(buckets=record().buckets[:1])], plan_of(name), rank=0)),
            id="a report",
        ),
        pytest.param(
            lambda name: str(Explanation(num_ranks=2, strategy="ddp", bucket_mb=(1.0,), why=name)),
            id="an explanation",
        ),
        pytest.param(lambda name: ("plan", profile_of(name).to_json()), id="a planned profile"),
        pytest.param(lambda name: ("simulate", profile_of(name).to_json()), id="a profile that is simulated"),
    ],
)
@each_name
def test_a_name_is_shown_as_it_is(
    name: str, show: Callable[[str], Any], undertow: Undertow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, out = show(name), name.replace("/", "").replace("\ud800", "") or "out"
    monkeypatch.chdir(tmp_path)
    if isinstance(shown, tuple):
        (tmp_path / "model.json").write_text(shown[1])
        code, shown, _ = undertow(shown[0], "model.json", *(("--out", out) if shown[0] == "simulate" else ()))
        assert code == 0
        assert printable(out) in shown or "Picture" not in shown, shown  # where a picture is written
    assert (printable(name) in shown, shown.replace("\n", "").isprintable()) == (True, True), shown


@each_name
def test_an_error_shows_names_as_they_are(name: str, undertow: Undertow, tmp_path: Path) -> None:
    error, expected = UndertowError(f"{name} is wrong.", where=name, remedy=f"Mend {name}."), printable_lines(name)
    assert str(error) == f"{expected} is wrong.\n  {expected}\n  Mend {expected}."
    (tmp_path / "profile.json").write_text(profile_of("a").to_json().replace('"float32"', json.dumps(name)))
    code, _, shown = undertow("plan", tmp_path / "profile.json")
    assert (code, expected.split("\n")[0] in shown, shown.replace("\n", "").isprintable()) == (2, True, True)


@pytest.mark.deep
def test_a_picture_draws_names_as_they_are(tmp_path: Path) -> None:
    trace = Trace(rank=0, step=0, events=(Event(lane="compute", kind="forward", start_us=0, stop_us=40_000),))
    names = [*NAMES.values(), "$x^$", "a$b", "\\$", "$\\frac{$", "_hidden"]
    save_timeline(dict.fromkeys(names, trace), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


# The bases of each: the built-in that it resembles catches it too.
TREE = {
    "CheckpointError": (UndertowError,),
    "ConfigError": (UndertowError, ValueError),
    "Desync": (UndertowError,),
    "NonFiniteGradient": (UndertowError,),
    "PeerFailed": (UndertowError,),
    "PhaseError": (UndertowError,),
    "PlanMismatch": (UndertowError,),
    "RankLost": (UndertowError,),
    "ReplicaMismatch": (UndertowError,),
    "ShardedGradientError": (UndertowError,),
    "StallTimeout": (UndertowError, TimeoutError),
    "UndertowError": (RuntimeError,),
    "WrongType": (ConfigError, TypeError),
}


def test_what_is_not_given_has_no_line() -> None:
    assert str(UndertowError("it broke.", remedy="Mend it.")) == "it broke.\n  Mend it."


@pytest.mark.parametrize("name", TREE)
def test_an_error_has_its_bases_is_drawn_can_be_pickled_and_ends_with_a_page_that_exists(name: str) -> None:
    kind: type[UndertowError] = getattr(errors, name)
    assert (kind.__bases__, f" {name} " in errors.__doc__.replace("\n", " ")) == (TREE[name], True)
    copy = pickle.loads(pickle.dumps(kind("it broke.", where="rank 2", remedy="Mend it.")))
    lines = "".join(traceback.format_exception_only(copy)).splitlines()
    assert (type(copy), str(copy)) == (kind, "it broke.\n  rank 2\n  Mend it.")
    assert lines[1:] == ["  rank 2", "  Mend it.", f"Read more: undertow docs {kind.page}"]
    assert (ROOT / "docs" / f"{kind.page}.md").exists()


def test_exports_are_the_tree() -> None:
    assert (
        {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
        == set(errors.__all__)
        == set(TREE)
    )
