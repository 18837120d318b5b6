"""JSON that nobody's program writes: settings, plans, profiles and messages are refused by our own errors."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from undertow import SyncConfig
from undertow.errors import ConfigError
from undertow.foreign import MOST_LEVELS, parsed_json
from undertow.plan import ParamSpec, Plan, plan_from_groups
from undertow.plan.table import source_from_file
from undertow.profile import Profile, profile_from_file, profile_from_json
from undertow.runtime import private
from undertow.runtime.guard import Ring
from undertow.runtime.ring import Neighbour

SPEC = ParamSpec(name="a", shape=(2, 3), dtype="float32", itemsize=4)
PLAN = plan_from_groups([SPEC], [(0,)], num_ranks=2).to_json()
PROFILE = Profile(params=(SPEC,), ready_us=(1.0,), forward_us=1.0, backward_us=2.0).to_json()
TABLE = '{"params": [{"name": "a", "shape": [2, 3], "dtype": "float32"}]}'
SETTINGS = SyncConfig().to_json()


def from_file(read: Callable[[Path], Any]) -> Callable[[str, Path], Any]:
    def reads(text: str, folder: Path) -> Any:
        path = folder / "file.json"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        return read(path)

    return reads


READERS: dict[str, tuple[str, Callable[[str, Path], Any]]] = {
    "Plan.from_json": (PLAN, lambda text, _: Plan.from_json(text)),
    "SyncConfig.from_json": (SETTINGS, lambda text, _: SyncConfig.from_json(text)),
    "profile_from_json": (PROFILE, lambda text, _: profile_from_json(text, "run.json")),
    "a file of a plan": (PLAN, from_file(source_from_file)),
    "a file of a table": (TABLE, from_file(source_from_file)),
    "a file of a profile": (PROFILE, from_file(profile_from_file)),
}


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def outcome(call: Callable[[], object]) -> str:
    try:
        return repr(call())
    except ConfigError as error:
        return str(error)


# In place of each value of a text.
VALUES = {
    "nested without end": nested(100_000),
    "nested as deep as Python reads": nested(900),
    "an object nested deeply": '{"a":' * 5000 + "1" + "}" * 5000,
    "a number of too many digits": "1" * 5000,
    "a number of many digits": "1" * 4000,
    "a number beyond all floats": "1e999",
    "a number of 2000 digits, with a point": "1" * 2000 + ".5",
    "not a number": "NaN",
    "infinite": "-Infinity",
    "true": "true",
    "half": "0.5",
    "a text": '"3"',
    "half a character": '"\\ud800"',
    "nothing": "null",
    "an object": '{"a": {}}',
}


def with_value(text: str, value: str) -> Iterator[str]:
    """The text with each of its plain values replaced, one at a time."""
    data = json.loads(text)

    def places(part: Any) -> Iterator[tuple[Any, Any]]:
        for key in part if isinstance(part, dict) else range(len(part)):
            yield part, key
            if isinstance(part[key], dict | list):
                yield from places(part[key])

    for part, key in list(places(data)):
        before, part[key] = part[key], "<here>"
        yield json.dumps(data).replace('"<here>"', value)
        part[key] = before


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("value", VALUES)
def test_any_value_anywhere_is_read_or_a_config_error(reader: str, value: str, tmp_path: Path) -> None:
    text, read = READERS[reader]
    for changed in with_value(text, VALUES[value]):
        assert outcome(lambda: read(changed, tmp_path)).replace("\n", "").isprintable()  # noqa: B023  # called at once


TEXTS = {
    "nested without end": nested(100_000),
    "nothing": "",
    "bytes that are no text": "\udcff\udcfe{",
    "a byte order mark": "\ufeff{}",
    "a zero": "\0",
    "half a character": '"\\ud800',
    "the wrong kind": '"\\ud800"',
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_any_other_text_is_a_config_error(reader: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        READERS[reader][1](text, tmp_path)
    assert str(caught.value).replace("\n", "").isprintable()


@pytest.mark.parametrize("reader", READERS)
def test_a_key_that_is_given_twice_is_a_config_error(reader: str, tmp_path: Path) -> None:
    text, read = READERS[reader]
    (key, value), *_ = json.loads(text).items()
    with pytest.raises(ConfigError, match="is given twice"):
        read(text.replace("{", "{" + f'"{key}": {json.dumps(value)}, ', 1), tmp_path)


NOT_WHOLE = {
    "a shape with a point": ("[2, 3]", "[2, 3.0]"),
    "a shape that is true": ("[2, 3]", "[true, 3]"),
    "a shape that is a text": ("[2, 3]", '"23"'),
    "a shape that nothing can count": ("[2, 3]", "[4294967296, 4294967296]"),
    "half a rank": ('"num_ranks": 2', '"num_ranks": 2.5'),
    "ranks in quotes": ('"num_ranks": 2', '"num_ranks": "2"'),
    "a bucket with a point": ("[[0]]", "[[0.7]]"),
    "a bucket in quotes": ("[[0]]", '[["0"]]'),
    "a bucket that is false": ("[[0]]", "[[false]]"),
    "a format that is true": ('"format": 1', '"format": true'),
    "a name that is a number": ('"name": "a"', '"name": 1'),
    "a dtype that is a number": ('"dtype": "float32"', '"dtype": 1'),
}


@pytest.mark.parametrize(("good", "bad"), NOT_WHOLE.values(), ids=NOT_WHOLE)
def test_a_value_of_another_type_in_a_plan_is_not_rounded_or_guessed(good: str, bad: str) -> None:
    assert good in PLAN
    with pytest.raises(ConfigError):
        Plan.from_json(PLAN.replace(good, bad))


def test_experts_in_settings_that_are_no_list_are_a_config_error() -> None:
    with pytest.raises(ConfigError):
        SyncConfig.from_json('{"experts": 5}')


@pytest.mark.parametrize(("levels", "is_read"), [(MOST_LEVELS, True), (MOST_LEVELS + 1, False)])
def test_json_is_read_to_a_depth(levels: int, is_read: bool) -> None:
    if is_read:
        assert parsed_json(nested(levels)) == json.loads(nested(levels))
    else:
        with pytest.raises(ValueError, match="nested too deeply"):
            parsed_json(nested(levels))


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Neighbour, Neighbour]]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        make = lambda place: private.pair(store, "pair", place, private.gloo_device(), timedelta(seconds=30))  # noqa: E731
        groups = list(threads.map(make, range(2)))
    neighbours = Neighbour(groups[0], 0, 1), Neighbour(groups[1], 1, 0, os.getpid())
    yield neighbours
    for neighbour in neighbours:
        neighbour.close()


@pytest.mark.parametrize("line", [nested(1500), '{"a":' * 600, "1" * 4400, '{"a": 1, "a": 2}', "[1]", "\udcff{}", "\ufeff{}"])
def test_a_message_that_cannot_be_read_is_dropped_with_a_word(
    line: str, pair: tuple[Neighbour, Neighbour], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = pair
    data = line.encode("utf-8", "surrogateescape") + b'\n{"a": 1}\n'
    for start in range(0, len(data), 4000):
        first._send(data[start : start + 4000])
    messages: list[Any] = []
    with caplog.at_level(logging.WARNING, "undertow"):
        while not messages:
            messages += second.read()[0]
    assert messages == [{"a": 1}]
    (word,) = caplog.messages
    assert word.startswith("a message of rank 0 cannot be read and is dropped: ")


GOOD = {"kind": "opens", "from": 0, "id": "0/1", "number": 3, "meeting": 0}
MESSAGES = {
    "without a kind": {"kind": None},
    "from no rank": {"from": None},
    "from a rank that is not there": {"from": 2},
    "from a rank below all": {"from": -1},
    "from infinity": {"from": float("inf")},
    "of a number that is a list": {"number": [1]},
    "of an infinite number": {"number": float("inf")},
    "with links that are a list": {"kind": "sends", "at": [], "to": []},
    "with links of a speed beyond floats": {"kind": "sends", "at": [], "to": {"x": [10**400, 1, True]}},
    "of a lost rank that is not there": {"kind": "lost", "rank": 7},
    "of lost ranks that are one": {"kind": "unreachable", "ranks": 1, "seconds": 1.0},
}


@pytest.mark.parametrize("change", MESSAGES.values(), ids=MESSAGES)
def test_a_message_that_makes_no_sense_is_dropped_with_a_word(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    ring = Ring([], rank=1, num_ranks=2, world=dist.HashStore())
    source = Neighbour.__new__(Neighbour)
    with caplog.at_level(logging.WARNING, "undertow"):
        ring.receive({**GOOD, **change}, source)
        assert ring.fault is None
        assert not ring.opened
        if change != {"kind": None}:  # of a later version, which says more than this one knows
            assert "made no sense" in caplog.messages[0]
    ring.receive({**GOOD, "id": "0/2"}, source)
    assert ring.opened == {(3, 0): {0}}
