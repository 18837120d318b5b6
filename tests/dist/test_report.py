from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.models import CASES, Branches, mlp, noise
from support.naive import wrapped
from support.ranks import Ranks
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig, attach
from undertow.trace import StepReport

CASE = CASES["mlp"]


def report_after(num_steps: int, settings: dict[str, Any]) -> tuple[str, str, int]:
    """The report as text and as JSON, asked for on rank 0 alone, and the number of traces."""
    with wrapped(CASE.model(), **{"bucket_cap_mb": 1e-6, "order": "reverse", **settings}) as ddp:
        for step in range(num_steps):
            CASE.loss(ddp, step).backward()
        if dist.get_rank() != 0:
            return "", "", 0
        report = ddp.report()
        return str(report), json.dumps(report.to_dict()), len(ddp.traces())


def test_one_rank_may_ask_for_the_report(ranks: Ranks) -> None:
    (text, as_json, num_traces), *_ = ranks.run(report_after, 3, {})
    report = json.loads(as_json)
    assert "\n" not in text
    assert (
        text.endswith(f"hidden; exposed {report['exposed_ms']:.1f} ms of {report['step_ms']:.1f} ms")
        or "; worst: bucket " in text
    )
    assert report["num_steps"] == num_traces == 2  # the third is complete when the next one begins
    assert report["rank"] == 0
    assert len(report["busy_ms"]) == ranks.num_ranks
    assert [bucket["params"] for bucket in report["buckets"]] == [["2.bias"], ["2.weight"], ["0.bias"], ["0.weight"]]
    assert report["communication_ms"] > 0
    assert report["exposed_ms"] == pytest.approx(report["wire_ms"] + report["late_rank_ms"])


def gathers_after(num_steps: int) -> tuple[list[int], StepReport]:
    """The buckets of the plan, and the report of a model whose optimizer is sharded."""
    with wrapped(CASE.model(), bucket_cap_mb=1e-4, strategy="zero2") as ddp:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
        for step in range(num_steps):
            optimizer.zero_grad()
            CASE.loss(ddp, step).backward()
            optimizer.step()
        return [bucket.index for bucket in ddp.plan.buckets], ddp.report(show=False)


def test_a_sharded_model_reports_the_gathers_of_all_its_parameters(ranks: Ranks) -> None:
    for buckets, report in ranks.run(gathers_after, 4):
        assert report.num_steps == 2  # the first had whole gradients, the last is not complete
        assert sorted(gather.bucket for gather in report.gathers) == buckets
        assert all(gather.launched_ms < 0 for gather in report.gathers)  # by the optimizer, before the forward
        assert 0 < report.gather_ms <= report.communication_ms
        assert report.gather_exposed_ms <= report.exposed_ms


def test_there_is_a_report_before_the_first_step(two_ranks: Ranks) -> None:
    (text, as_json, num_traces), _ = two_ranks.run(report_after, 0, {})
    assert text == "no step recorded yet"
    assert json.loads(as_json)["num_steps"] == num_traces == 0


def test_the_first_step_is_reported_although_the_next_has_not_begun(two_ranks: Ranks) -> None:
    (_, as_json, num_traces), _ = two_ranks.run(report_after, 1, {})
    assert json.loads(as_json)["num_steps"] == num_traces == 1


def test_nothing_is_recorded_when_switched_off(two_ranks: Ranks) -> None:
    (text, _, num_traces), _ = two_ranks.run(report_after, 3, {"record": "off"})
    assert (text, num_traces) == ("no step recorded yet", 0)


@pytest.mark.parametrize(("record", "num_kept"), [("summary", 63), ("full", 69)])
def test_a_summary_keeps_the_last_64_steps(two_ranks: Ranks, record: str, num_kept: int) -> None:
    (_, _, num_traces), _ = two_ranks.run(report_after, 70, {"record": record})
    assert num_traces == num_kept


def trace_of_accumulation() -> list[list[str]]:
    with wrapped(CASE.model(), order="reverse") as ddp:
        for _ in range(2):
            with ddp.no_sync():
                CASE.loss(ddp, 0).backward()
            CASE.loss(ddp, 1).backward()
        CASE.loss(ddp, 0)
        return [[f"{event.lane} {event.kind}" for event in trace.events] for trace in ddp.traces()]


def test_a_step_of_two_micro_batches_is_one_trace(ranks: Ranks) -> None:
    for traces in ranks.run(trace_of_accumulation):
        assert [sorted(events) for events in traces] == [
            sorted(
                [
                    *["compute forward", "compute backward"] * 2,
                    "compute wait",
                    "compute optimizer",
                    "comm.dp all_reduce",
                ]
            )
        ] * 2


def saved_plan(directory: str) -> tuple[str, str, list[list[int]]]:
    path = Path(directory) / f"plan-{dist.get_rank()}.json"
    with wrapped(Branches(), bucket_cap_mb=1e-6) as ddp:
        for _ in range(2):
            ddp(noise(2, 4), (2, 0, 1)).sum().backward()
        ddp.save_plan(path)
        text = ddp.plan.to_json()
    model = Branches()
    with wrapped(model, plan=path.read_text()) as ddp:
        ddp(noise(2, 4)).sum().backward()
        return text, ddp.plan.to_json(), [list(bucket.params) for bucket in ddp.plan.buckets]


def test_a_plan_that_was_saved_can_be_pinned(ranks: Ranks, tmp_path: Path) -> None:
    for text, pinned, buckets in ranks.run(saved_plan, str(tmp_path)):
        assert pinned == text
        assert {param for bucket in buckets[:2] for param in bucket} == {2, 3}  # layer 1 ran last


def keys() -> tuple[list[str], list[str], list[str]]:
    model = mlp()
    bare = list(model.state_dict())
    sync = attach(model)
    attached = list(model.state_dict())
    sync.close()
    with wrapped(model) as ddp:
        return bare, attached, list(ddp.state_dict())


def test_keys_are_the_modules_own_or_those_of_torchs_wrapper(two_ranks: Ranks) -> None:
    for bare, attached, of_wrapper in two_ranks.run(keys):
        assert attached == bare
        assert of_wrapper == [f"module.{key}" for key in bare]


class Talkative(torch.nn.Linear):
    """A model with an attribute and a method of its own."""

    greeting = "hello"

    def greet(self, name: str) -> str:
        return f"{self.greeting} {name}"


def delegated() -> dict[str, Any]:
    with wrapped(Talkative(2, 2)) as ddp:
        return {
            "greet": ddp.greet("you"),
            "greeting": ddp.greeting,
            "in_features": ddp.in_features,
            "is torch's": isinstance(ddp, torch.nn.parallel.DistributedDataParallel),
            "unknown": hasattr(ddp, "nonsense"),
            "names": [name for name, _ in ddp.named_parameters()],
            "training": (ddp.eval().module.training, ddp.train().module.training),
        }


def test_what_the_wrapper_does_not_have_the_module_may(two_ranks: Ranks) -> None:
    assert two_ranks.run(delegated)[0] == {
        "greet": "hello you",
        "greeting": "hello",
        "in_features": 2,
        "is torch's": True,
        "unknown": False,
        "names": ["module.weight", "module.bias"],
        "training": (False, True),
    }


def settings_of(arguments: dict[str, Any]) -> SyncConfig:
    model = mlp()
    if "ignored by torch's name" in arguments:
        model._ddp_params_and_buffers_to_ignore = arguments.pop("ignored by torch's name")
    ddp = DistributedDataParallel(model, **arguments)
    config = ddp.sync.config
    assert ddp.parameters_to_ignore == set(config.ignore)
    ddp.close()
    return config


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({}, {}),
        ({"bucket_cap_mb": 3, "forward_sync_buffers": False}, {"bucket_cap_mb": 3, "buffers": "off"}),
        ({"bucket_cap_mb": 3, "bucket_cap_mb_list": [1, 2]}, {"bucket_cap_mb": (1, 2)}),
        ({"bucket_cap_mb": 3, "bucket_cap_mb_list": []}, {"bucket_cap_mb": 3}),
        ({"forward_sync_buffers": True}, {}),
        ({"ignore": ["2.weight", "0.bias"]}, {"ignore": ("0.bias", "2.weight")}),
        ({"ignored by torch's name": ["2.bias"], "ignore": ["0.bias"]}, {"ignore": ("0.bias", "2.bias")}),
        (
            {"config": SyncConfig(overlap=False, ignore=("2.bias",)), "ignore": ["0"]},
            {"overlap": False, "ignore": ("0.bias", "0.weight", "2.bias")},
        ),
    ],
    ids=str,
)
def test_torchs_arguments_become_settings(two_ranks: Ranks, arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    assert two_ranks.run(settings_of, arguments) == [SyncConfig(**settings)] * 2
