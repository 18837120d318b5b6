"""Settings: their defaults, as JSON, and what is refused."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from support.errors import Call, refusal
from support.strategies import spec
from undertow.config import ExpertGroup, Outer, SyncConfig, replaced
from undertow.plan import Plan, plan_from_groups

ANY_WIRE = "Choose one of: None, 'bfloat16', 'float16', 'int8', 'auto'."
ANY_PARAM_WIRE = "Choose one of: None, 'bfloat16', 'int8'."
DEFAULTS = {
    "strategy": None,
    "bucket_cap_mb": None,
    "order": "observed",
    "plan": None,
    "auto_tune": True,
    "overlap": True,
    "reduction": "native",
    "average_in_collective": True,
    "reduce_dtype": None,
    "wire": None,
    "param_wire": None,
    "buffers": "rank0",
    "ignore": (),
    "experts": (),
    "nonfinite": "ignore",
    "check_replicas_every": None,
    "stall_warning_s": 30.0,
    "stall_timeout_s": 300.0,
    "record": "summary",
    "outer": None,
}
PLAN = plan_from_groups([spec("w", 3)], [[0]], num_ranks=2)


def experts(**given: Any) -> ExpertGroup:
    return ExpertGroup(**{"match": "a.*", "process_group": None, **given})


def test_settings_have_the_defaults_of_the_reference() -> None:
    assert dataclasses.asdict(SyncConfig()) == DEFAULTS


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "ddp", "bucket_cap_mb": 4.5, "order": "reverse", "overlap": False},
        {"bucket_cap_mb": math.inf, "order": "reverse", "buffers": "off", "ignore": ("a", "b.c"), "record": "full"},
        {"plan": '{"format": 1}', "average_in_collective": False, "buffers": "rank0", "record": "off"},
        {"stall_warning_s": 5, "stall_timeout_s": math.inf},
    ],
)
def test_settings_pass_through_json(settings: dict[str, Any]) -> None:
    config = SyncConfig(**settings)
    assert SyncConfig(**json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (SyncConfig(bucket_cap_mb=(1, 2.5)).bucket_cap_mb, (1, 2.5)),
        (SyncConfig(bucket_cap_mb=[1, 2.5]).bucket_cap_mb, (1, 2.5)),
        *((SyncConfig(wire=dtype).wire, "bfloat16") for dtype in ("bfloat16", "bf16", torch.bfloat16)),
        *((SyncConfig(reduce_dtype=dtype).reduce_dtype, "float32") for dtype in ("float32", "fp32", torch.float32)),
        *((SyncConfig(ignore=names).ignore, ("a", "b")) for names in (["b", "a"], {"a", "b"}, (name for name in "ba"))),
        (SyncConfig(experts=[experts(divisor=4)]).experts, (experts(divisor=4),)),
        (json.loads(json.dumps(SyncConfig(experts=[experts(divisor=4)]).to_dict()))["experts"], [{"divisor": 4, "match": "a.*"}]),
    ],
    ids=[
        *("a tuple", "a list becomes a tuple"),
        *(f"{kind} of {setting}" for setting in ("wire", "reduce_dtype") for kind in ("a name", "a short name", "a dtype")),
        *("names of a list", "of a set", "of a generator", "experts", "experts as text"),
    ],
)
def test_a_setting_has_one_form_however_it_is_given(found: object, expected: object) -> None:
    assert found == expected


def test_a_plan_may_be_given_as_text_as_a_path_or_itself(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(f"\n{PLAN.to_json()}\n", encoding="utf-8")
    for given in (PLAN, path, str(path), path.read_text(), PLAN.to_json()):
        config = SyncConfig(plan=given)
        assert (Plan.from_json(str(config.plan)), dataclasses.replace(config)) == (PLAN, config)


FILE = "SyncConfig(plan=...)\n  Give the path of a file that save_plan() has written, its text, or a Plan."
EXPERTS = 'SyncConfig\n  Write experts=(ExpertGroup(match="*.experts.*", process_group=group),).'
HERE = "SyncConfig, ExpertGroup(match='a.*')"
DIVISOR = "Give the number of ranks whose tokens reach the experts, or leave it out for the size of the group."
CHOICES = {
    "strategy": (["horovod"], "None, 'ddp', 'zero1', 'zero2', 'hybrid'"),
    "reduce_dtype": (["half"], "None, 'float32'"),
    "wire": ([16, True], "None, 'bfloat16', 'float16', 'int8', 'auto'"),
    "param_wire": ([8, 0.5], "None, 'bfloat16', 'int8'"),
    "order": (["random"], "'observed', 'reverse'"),
    "overlap": ([1, "yes"], "True, False"),
    "average_in_collective": ([None], "True, False"),
    "auto_tune": ([None], "True, False"),
    "reduction": ([None], "'native', 'ordered'"),
    "buffers": ([True, "mean"], "'rank0', 'off'"),
    "nonfinite": (["panic"], "'ignore', 'skip', 'raise'"),
    "record": (["some"], "'summary', 'full', 'off'"),
}
# A setting, a value, and the text of the error.


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        *(
            (
                name,
                value,
                f"{name} must be a positive number of seconds, got {value!r}.\n"
                "  SyncConfig\n  Give a number above zero, or math.inf to switch it off.",
            )
            for name in ("stall_warning_s", "stall_timeout_s")
            for value in (0, -1.0, math.nan, True, None, "30")
        ),
        *(
            (
                "check_replicas_every",
                value,
                f"check_replicas_every must be a whole number of synchronizations, at least 1, got {value!r}.\n"
                "  SyncConfig\n  Give a number, such as 100, or leave it out for no comparison.",
            )
            for value in (0, -1, 1.5, True, "100")
        ),
        *(
            (name, value, f"{name} cannot be {value!r}.\n  SyncConfig\n  Choose one of: {choices}.")
            for name, (values, choices) in CHOICES.items()
            for value in values
        ),
        *(
            (
                "bucket_cap_mb",
                sizes,
                f"bucket_cap_mb must be a positive number of MiB, got {bad!r}.\n"
                "  SyncConfig\n  Give a number above zero, such as 25, or leave it out for a planned size.",
            )
            for sizes, bad in (
                *((value, value) for value in (0, -1, -0.5, math.nan, "25", True)),
                *(
                    ((0,), 0),
                    ((1, -1), -1),
                    ([1, math.nan, 2], math.nan),
                    ((1, "2"), "2"),
                    ((True,), True),
                    ((1, None), None),
                    ((), None),
                ),
            )
        ),
        *(
            (
                "ignore",
                value,
                f'ignore must be a tuple of names, got {value!r}.\n  SyncConfig\n  Write ignore=("embedding.weight",).',
            )
            for value in ("embedding.weight", None, 3, ("a", 3))
        ),
        *(
            ("experts", value, f"experts must be a tuple of ExpertGroup, got {value!r}.\n  {EXPERTS}")
            for value in ("experts.*", ("experts.*",), experts())
        ),
        ("plan", {"format": 1}, f"plan must be a Plan, the path of a saved one, or its text, got dict.\n  {FILE}"),
        *(
            ("plan", path, f"the plan cannot be read from '{path}': No such file or directory.\n  {FILE}")
            for path in (Path("no", "plan.json"), "no/plan.json")
        ),
        *(
            (
                "strategy",
                name,
                f"strategy cannot be '{name}'.\n  SyncConfig\n  Use torch.distributed.fsdp.fully_shard to shard parameters.",
            )
            for name in ("zero3", "fsdp")
        ),
    ],
)
def test_a_value_of_a_setting_is_refused(name: str, value: Any, text: str) -> None:
    assert refusal(lambda: SyncConfig(**{name: value})) == text


@pytest.mark.parametrize(
    ("plan", "reason"), [("", "Is a directory"), ("plan\0", "embedded null byte"), ("x" * 5000, "File name too long")]
)
def test_a_plan_that_no_file_holds_is_told_why(plan: str, reason: str) -> None:
    assert f": {reason}.\n" in refusal(lambda: SyncConfig(plan=plan))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        *(
            pytest.param(
                lambda match=match: experts(match=match),
                f"match must be a pattern of parameter names, got {match!r}.\n  ExpertGroup\n"
                '  Write match="*.experts.*"; for several patterns give several groups.',
                id=f"a group of experts of {match!r}",
            )
            for match in ("", None, ("a.*",))
        ),
        *(
            pytest.param(
                lambda divisor=divisor: experts(divisor=divisor),
                f"divisor must be a positive number, got {divisor!r}.\n  ExpertGroup(match='a.*')\n  {DIVISOR}",
                id=f"experts divided by {divisor!r}",
            )
            for divisor in (0, -1, math.nan, math.inf, "4", True)
        ),
        pytest.param(
            lambda: SyncConfig(experts=(experts(),), strategy="hybrid"),
            f'experts do not work with strategy="hybrid".\n  {HERE}\n  Use "ddp", "zero1" or "zero2".',
            id="experts on a mesh",
        ),
        pytest.param(
            lambda: SyncConfig(experts=(experts(),), nonfinite="skip"),
            'nonfinite="skip" cannot be used with experts: only some ranks would know that a step is to be skipped.\n'
            f'  {HERE}\n  Use "raise".',
            id="skipping with experts",
        ),
        *(
            pytest.param(call, f"setting {name!r} does not exist.\n  {where}\n  {remedy}", id=f"{name}, {where}")
            for name, remedy in (
                ("overlapp", "Did you mean 'overlap'?"),
                ("xyzzy", f"Known settings: {', '.join(sorted(DEFAULTS))}."),
            )
            for call, where in (
                (lambda name=name: SyncConfig(**{name: True}), "SyncConfig"),
                (lambda name=name: dataclasses.replace(SyncConfig(), **{name: True}), "SyncConfig"),
            )
        ),
        *(
            pytest.param(call, f"{what}\n  SyncConfig\n  {remedy}", id=what)
            for call, what, remedy in (
                (lambda: SyncConfig(wire="int9"), "wire cannot be 'int9'.", f"Did you mean 'int8'? {ANY_WIRE}"),
                (
                    lambda: SyncConfig(strategy="ddp2"),
                    "strategy cannot be 'ddp2'.",
                    "Did you mean 'ddp'? Choose one of: None, 'ddp', 'zero1', 'zero2', 'hybrid'.",
                ),
                (lambda: SyncConfig(wire="fp4"), "wire cannot be 'fp4'.", ANY_WIRE),
                (
                    lambda: SyncConfig(param_wire="float16"),
                    "param_wire cannot be 'float16'.",
                    f"Did you mean 'bfloat16'? {ANY_PARAM_WIRE}",
                ),
                (lambda: SyncConfig(wire_dtype="bfloat16"), "setting 'wire_dtype' does not exist.", 'Write wire="bfloat16".'),
                (
                    lambda: SyncConfig(wire=(None, "int8")),
                    "wire must be one format, got (None, 'int8').",
                    'Only strategy="hybrid" takes two: within rows of the mesh, and across them.',
                ),
                (
                    lambda: SyncConfig(strategy="hybrid", wire=("int8", "auto")),
                    "wire cannot be ('int8', 'auto').",
                    "Each of the two is one of: None, 'bfloat16', 'float16', 'int8'.",
                ),
            )
        ),
        pytest.param(
            lambda: SyncConfig(op="sum"),
            "setting 'op' does not exist.\n  SyncConfig\n"
            "  Gradients are always averaged. For the mean over all tokens, divide the loss by "
            "model.mean_over_ranks(num_tokens).wait(); for a sum, multiply it by the number of ranks.",
            id="an op",
        ),
    ],
)
def test_what_cannot_be_set_is_refused(call: Call, text: str) -> None:
    assert refusal(call) == text


OUTER: dict[str, tuple[dict[str, Any], str]] = {
    "every=0": ({"every": 0}, "every must be a whole number of steps, at least 1, got 0.\n  Outer\n  Write every=30."),
    "no every": ({}, "every must be a whole number of steps, at least 1, got 0.\n  Outer\n  Write every=30."),
    "lr=0": ({"every": 2, "lr": 0}, "lr must be a positive number, got 0.\n  Outer\n  Write lr=0.7."),
    "momentum=1": (
        {"every": 2, "momentum": 1.0},
        "momentum must be from 0 to less than 1, got 1.0.\n  Outer\n  Write momentum=0.9.",
    ),
    "nesterov": ({"every": 2, "nesterov": 1}, "nesterov must be True or False, got 1.\n  Outer\n  Write nesterov=True."),
    "fragments=0": (
        {"every": 2, "fragments": 0},
        'fragments must be a whole number of at least 1, or "auto", got 0.\n  Outer\n  Write fragments=4.',
    ),
    "delay": (
        {"every": 2, "delay": -1},
        'delay must be a whole number of steps, at least 0, or "auto", got -1.\n  Outer\n  Write delay=1.',
    ),
    "delay >= every": (
        {"every": 2, "delay": 2},
        "delay must be less than every=2, got 2.\n  Outer\n"
        "  An exchange of a fragment ends before its next one begins: give a smaller delay.",
    ),
    "mix": ({"every": 2, "mix": 1.0}, "mix must be from 0 to less than 1, got 1.0.\n  Outer\n  Write mix=0.0."),
    "wire": (
        {"every": 2, "wire": "int4"},
        f"wire cannot be 'int4'.\n  Outer\n  Did you mean 'int8'? {ANY_PARAM_WIRE}",
    ),
    "float16": (
        {"every": 2, "wire": "fp16"},
        f"wire cannot be 'float16'.\n  Outer\n  Did you mean 'bfloat16'? {ANY_PARAM_WIRE}",
    ),
    "name": ({"every": 2, "fragment": 3}, "setting 'fragment' does not exist.\n  Outer\n  Did you mean 'fragments'?"),
}


@pytest.mark.parametrize("name", OUTER)
def test_a_value_of_outer_synchronization_is_refused(name: str) -> None:
    settings, text = OUTER[name]
    assert refusal(lambda: Outer(**settings)) == text


def test_outer_is_a_value_or_a_dict() -> None:
    config = SyncConfig(outer=Outer(every=3, wire="bf16"))
    assert SyncConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert config.outer.wire == "bfloat16"
    assert (
        refusal(lambda: SyncConfig(outer=30)) == "outer must be an Outer, got 30.\n  SyncConfig\n  Write outer=Outer(every=30)."
    )


def test_single_outer_settings_replace_those_of_a_config() -> None:
    config = SyncConfig(outer=Outer(every=30, lr=0.6), overlap=False)
    assert replaced(config, {"outer": {"every": 10}}) == SyncConfig(outer=Outer(every=10, lr=0.6), overlap=False)
    assert replaced(config, {"outer": None}) == SyncConfig(overlap=False)
    assert replaced(SyncConfig(), {"outer": {"every": 10}}) == SyncConfig(outer=Outer(every=10))
