from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from support.errors import text_of
from undertow.config import ExpertGroup, SyncConfig, bytes_from_mib
from undertow.errors import ConfigError
from undertow.plan import ParamSpec, Plan, plan_from_groups

DEFAULTS = {
    "strategy": None,
    "bucket_cap_mb": None,
    "order": "observed",
    "plan": None,
    "auto_tune": True,
    "overlap": True,
    "reduction": "native",
    "op": "mean",
    "average_in_collective": True,
    "reduce_dtype": None,
    "wire_dtype": None,
    "buffers": "rank0",
    "ignore": (),
    "experts": (),
    "nonfinite": "ignore",
    "check_replicas_every": None,
    "stall_warning_s": 30.0,
    "stall_timeout_s": 300.0,
    "record": "summary",
}


def refusal(**settings: Any) -> str:
    return text_of(ConfigError, lambda: SyncConfig(**settings))


def reading_error(text: Any) -> str:
    return text_of(ConfigError, lambda: SyncConfig.from_json(text))


def test_defaults() -> None:
    assert dataclasses.asdict(SyncConfig()) == DEFAULTS


@pytest.mark.parametrize("name", ["stall_warning_s", "stall_timeout_s"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, True, None, "30"])
def test_times_of_stalls_are_positive_numbers(name: str, value: object) -> None:
    assert refusal(**{name: value}) == (
        f"{name} must be a positive number of seconds, got {value!r}.\n"
        "  SyncConfig\n"
        "  Give a number above zero, or math.inf to switch it off."
    )


def test_settings_cannot_be_changed_later() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SyncConfig().overlap = False  # type: ignore[misc]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "ddp", "bucket_cap_mb": 4.5, "order": "largest_first", "overlap": False},
        {"bucket_cap_mb": math.inf, "order": "reverse", "buffers": "off", "ignore": ("a", "b.c"), "record": "full"},
        {"plan": '{"format": 1}', "average_in_collective": False, "buffers": "mean", "record": "off"},
        {"bucket_cap_mb": (0.5, 2)},
        {"bucket_cap_mb": (math.inf,)},
        {"stall_warning_s": 5, "stall_timeout_s": math.inf},
        {"nonfinite": "raise", "check_replicas_every": 100},
    ],
)
def test_json_round_trip(settings: dict[str, Any]) -> None:
    config = SyncConfig(**settings)
    assert SyncConfig.from_json(config.to_json()) == config


def test_json_may_leave_out_settings() -> None:
    assert SyncConfig.from_json('{"overlap": false}') == SyncConfig(overlap=False)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "100"])
def test_replicas_are_compared_after_a_whole_number_of_synchronisations(value: object) -> None:
    assert refusal(check_replicas_every=value) == (
        f"check_replicas_every must be a whole number of synchronisations from 1 on, got {value!r}.\n"
        "  SyncConfig\n"
        "  Give a number, such as 100, or leave it out for no comparison."
    )


@pytest.mark.parametrize(
    ("settings", "choices"),
    [
        ({"order": "random"}, "'observed', 'reverse', 'largest_first'"),
        ({"overlap": 1}, "True, False"),
        ({"overlap": "yes"}, "True, False"),
        ({"average_in_collective": None}, "True, False"),
        ({"reduction": None}, "'native', 'ordered'"),
        ({"op": "max"}, "'mean', 'sum'"),
        ({"buffers": True}, "'rank0', 'mean', 'off'"),
        ({"auto_tune": None}, "True, False"),
        ({"nonfinite": "panic"}, "'ignore', 'warn', 'skip', 'raise'"),
        ({"record": "some"}, "'summary', 'full', 'off'"),
    ],
)
def test_a_value_that_no_version_will_have_is_refused_with_the_choices(settings: dict[str, Any], choices: str) -> None:
    ((name, value),) = settings.items()
    assert refusal(**settings) == f"{name} cannot be {value!r}.\n  SyncConfig\n  Choose one of: {choices}."


@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, "25", True])
def test_a_bucket_size_must_be_a_positive_number(value: Any) -> None:
    assert refusal(bucket_cap_mb=value) == (
        f"bucket_cap_mb must be a positive number of MiB, got {value!r}.\n"
        "  SyncConfig\n"
        "  Give a size above zero, or leave it out for a planned one."
    )


@pytest.mark.parametrize(("given", "kept"), [((1, 2.5), (1, 2.5)), ([1, 2.5], (1, 2.5)), ([4], (4,))])
def test_several_bucket_sizes_become_a_tuple(given: Any, kept: tuple[float, ...]) -> None:
    assert SyncConfig(bucket_cap_mb=given).bucket_cap_mb == kept


@pytest.mark.parametrize(
    ("sizes", "bad"),
    [((0,), 0), ((1, -1), -1), ([1, math.nan, 2], math.nan), ((1, "2"), "2"), ((True,), True), ((1, None), None), ((), None)],
)
def test_each_of_several_bucket_sizes_must_be_a_positive_number(sizes: Any, bad: Any) -> None:
    assert refusal(bucket_cap_mb=sizes) == (
        f"bucket_cap_mb must be a positive number of MiB, got {bad!r}.\n"
        "  SyncConfig\n"
        "  Give a size above zero, or leave it out for a planned one."
    )


def test_mebibytes_become_bytes() -> None:
    assert bytes_from_mib(0.25, name="bucket_cap_mb") == 262_144


@pytest.mark.parametrize("value", ["embedding.weight", None, 3, ("a", 3)])
def test_ignore_must_be_names(value: Any) -> None:
    assert refusal(ignore=value) == (
        f'ignore must be a tuple of names, got {value!r}.\n  SyncConfig\n  Write ignore=("embedding.weight",).'
    )


@pytest.mark.parametrize("names", [["b", "a"], {"a", "b"}, (name for name in "ba")], ids=["list", "set", "generator"])
def test_ignore_reads_the_same_on_every_rank(names: Any) -> None:
    assert SyncConfig(ignore=names).ignore == ("a", "b")


def test_a_plan_may_be_given_as_text_as_a_path_or_itself(tmp_path: Path) -> None:
    plan = plan_from_groups([ParamSpec(name="w", shape=(3,), dtype="float32", itemsize=4)], [[0]], num_ranks=2)
    path = tmp_path / "plan.json"
    path.write_text(f"\n{plan.to_json()}\n", encoding="utf-8")
    for given in (plan, path, str(path), path.read_text(), plan.to_json()):
        config = SyncConfig(plan=given)
        assert Plan.from_json(str(config.plan)) == plan
        assert SyncConfig.from_json(config.to_json()) == dataclasses.replace(config)


def test_a_plan_that_is_not_there_is_told_where_it_was_looked_for(tmp_path: Path) -> None:
    missing = tmp_path / "plan.json"
    for given in (missing, str(missing)):
        assert refusal(plan=given) == (
            f"the plan cannot be read from '{missing}': No such file or directory.\n  SyncConfig(plan=...)\n"
            "  Give the path of a file that save_plan() has written, its text, or a Plan."
        )
    for given, reason in (("", "Is a directory"), ("plan\0", "embedded null byte"), ("x" * 5000, "File name too long")):
        assert f": {reason}." in refusal(plan=given)


def test_a_plan_must_be_one() -> None:
    assert refusal(plan={"format": 1}) == (
        "plan must be a Plan, the path of a saved one, or its text, got dict.\n  SyncConfig(plan=...)\n"
        "  Give the path of a file that save_plan() has written, its text, or a Plan."
    )


def test_experts_are_groups() -> None:
    group = ExpertGroup(match="*.experts.*", process_group=None, divisor=4)
    assert SyncConfig(experts=[group]).experts == (group,)  # type: ignore[arg-type]
    for value in ("experts.*", ("experts.*",), group):
        assert refusal(experts=value) == (
            f"experts must be a tuple of ExpertGroup, got {value!r}.\n"
            "  SyncConfig\n"
            '  Write experts=(ExpertGroup(match="*.experts.*", process_group=group),).'
        )


def test_a_group_of_experts_has_a_pattern_and_perhaps_a_divisor() -> None:
    def text(**given: Any) -> str:
        return text_of(ConfigError, lambda: ExpertGroup(**{"match": "a.*", "process_group": None, **given}))

    for match in ("", None, ("a.*",)):
        assert text(match=match) == (
            f"match must be a pattern of parameter names, got {match!r}.\n"
            "  ExpertGroup\n"
            '  Write match="*.experts.*"; for several patterns give several groups.'
        )
    for divisor in (0, -1, math.nan, math.inf, "4", True):
        assert text(divisor=divisor) == (
            f"divisor must be a positive number, got {divisor!r}.\n"
            "  ExpertGroup(match='a.*')\n"
            "  Give the number of ranks whose tokens reach the experts, or leave it out for that of the group."
        )


def test_what_does_not_go_with_experts_is_refused() -> None:
    where = "  SyncConfig, ExpertGroup(match='a.*')\n"
    group = ExpertGroup(match="a.*", process_group=None, divisor=2)
    assert refusal(experts=(group,), strategy="hybrid") == (
        f'experts do not go with strategy="hybrid".\n{where}  Use "ddp", "zero1" or "zero2".'
    )
    assert refusal(experts=(group,), op="sum") == (
        f'op="sum" does not divide, and a group of experts has a divisor.\n{where}  Leave op="sum" or the divisor out.'
    )
    assert refusal(experts=(group,), nonfinite="skip") == (
        f'nonfinite="skip" does not go with experts: only some ranks would know that a step is to be skipped.\n{where}'
        '  Use "raise" or "warn".'
    )


def test_the_text_of_settings_names_experts_and_is_not_read_back() -> None:
    text = SyncConfig(experts=(ExpertGroup(match="a.*", process_group=object(), divisor=4),)).to_json()
    assert '"experts": [{"divisor": 4, "match": "a.*"}]' in text
    assert reading_error(text) == (
        "these settings have 1 groups of experts, whose process groups are not in a text.\n"
        "  SyncConfig.from_json\n"
        "  Leave `experts` out of the text, and add it by dataclasses.replace(config, experts=(...))."
    )


def test_a_misspelt_setting_gets_the_right_one() -> None:
    assert reading_error('{"overlapp": true}') == (
        "there is no setting 'overlapp'.\n  SyncConfig.from_json\n  Did you mean 'overlap'?"
    )


def test_a_strange_setting_gets_the_list_of_all() -> None:
    assert reading_error('{"xyzzy": true}') == (
        f"there is no setting 'xyzzy'.\n  SyncConfig.from_json\n  Known settings: {', '.join(sorted(DEFAULTS))}."
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("overlap: true", "these settings are no JSON: Expecting value: line 1 column 1 (char 0)."),
        (None, "these settings are no JSON: the JSON object must be str, bytes or bytearray, not NoneType."),
        ("[1]", "settings are a JSON object, got list."),
    ],
)
def test_text_that_holds_no_settings_is_refused(text: Any, problem: str) -> None:
    assert reading_error(text) == f"{problem}\n  SyncConfig.from_json\n  Use text that to_json() has written."


def test_values_from_json_are_checked_too() -> None:
    assert reading_error('{"op": "max"}') == refusal(op="max")


@pytest.mark.parametrize("name", ["zero3", "fsdp"])
def test_sharded_parameters_are_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"strategy cannot be '{name}'") as caught:
        SyncConfig(strategy=name)
    assert str(caught.value).endswith("Use torch.distributed.fsdp.fully_shard to shard parameters.")
