"""Reports, traces and saved plans of a wrapped model, and the names that it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.alike import train
from support.models import CASES, Branches, mlp, noise
from support.naive import wrapped
from support.ranks import in_ranks
from undertow import ShardedOptimizer, attach

MLP = CASES["mlp"]


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("num_steps", "settings", "num_traces"),
    [
        (0, {}, 0),
        (1, {}, 1),  # although the next has not begun
        (3, {}, 2),  # the third is complete when the next one begins
        (3, {"record": "off"}, 0),
        (70, {"record": "summary"}, 63),
        (70, {"record": "full"}, 69),
    ],
    ids=str,
)
def test_one_rank_may_ask_for_the_report(num_steps: int, settings: dict[str, Any], num_traces: int) -> None:
    with wrapped(MLP.model(), bucket_cap_mb=1e-6, order="reverse", **settings) as ddp:
        for step in range(num_steps):
            MLP.loss(ddp, step).backward()
        if dist.get_rank() != 0:
            return
        report = json.loads(json.dumps(ddp.report().to_dict()))
        text = str(ddp.report(show=False))
        assert report["num_steps"] == len(ddp.traces()) == num_traces
    assert "\n" not in text
    if num_traces == 0:
        assert text == "no step recorded yet"
        return
    exposed = f"hidden; exposed {report['exposed_ms']:.1f} ms of {report['step_ms']:.1f} ms"
    assert text.endswith(exposed) or "; worst: bucket " in text
    assert (report["rank"], len(report["busy_ms"])) == (0, dist.get_world_size())
    assert [bucket["params"] for bucket in report["buckets"]] == [["2.bias"], ["2.weight"], ["0.bias"], ["0.weight"]]
    assert report["communication_ms"] > 0
    assert report["exposed_ms"] == pytest.approx(report["wire_ms"] + report["late_rank_ms"])


@in_ranks(2, 3)
def test_a_sharded_model_reports_the_gathers_of_all_its_parameters() -> None:
    with wrapped(MLP.model(), bucket_cap_mb=1e-4, strategy="zero2") as ddp:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
        train(ddp, optimizer, MLP.loss, steps=range(4))
        report, buckets = ddp.report(show=False), [bucket.index for bucket in ddp.plan.buckets]
    assert report.num_steps == 2  # the first had whole gradients, the last is not complete
    assert sorted(gather.bucket for gather in report.gathers) == buckets
    assert all(gather.launched_ms < 0 for gather in report.gathers)  # by the optimizer, before the forward
    assert 0 < report.gather_ms <= report.communication_ms
    assert report.gather_exposed_ms <= report.exposed_ms


@in_ranks(2, 3)
def test_a_step_of_two_micro_batches_is_one_trace() -> None:
    with wrapped(MLP.model(), order="reverse") as ddp:
        for _ in range(2):
            with ddp.no_sync():
                MLP.loss(ddp, 0).backward()
            MLP.loss(ddp, 1).backward()
        MLP.loss(ddp, 0)
        traces = [sorted(f"{event.lane} {event.kind}" for event in trace.events) for trace in ddp.traces()]
    compute = ["backward", "backward", "forward", "forward", "optimizer", "wait"]
    assert traces == [["comm.dp all_reduce", *(f"compute {kind}" for kind in compute)]] * 2


@in_ranks(2, 3)
def test_a_plan_that_was_saved_can_be_pinned(tmp_path: Path) -> None:
    path = tmp_path / f"plan-{dist.get_rank()}.json"
    with wrapped(Branches(), bucket_cap_mb=1e-6) as ddp:
        for _ in range(2):
            ddp(noise(2, 4), (2, 0, 1)).sum().backward()
        ddp.save_plan(path)
        text = ddp.plan.to_json()
    with wrapped(Branches(), plan=path.read_text()) as ddp:
        ddp(noise(2, 4)).sum().backward()
        assert ddp.plan.to_json() == text
        assert {param for bucket in ddp.plan.buckets[:2] for param in bucket.params} == {2, 3}  # layer 1 ran last


@in_ranks(2)
def test_keys_are_the_modules_own_or_those_of_torchs_wrapper() -> None:
    model = mlp()
    bare = list(model.state_dict())
    sync = attach(model)
    assert list(model.state_dict()) == bare
    sync.close()
    with wrapped(model) as ddp:
        assert list(ddp.state_dict()) == [f"module.{key}" for key in bare]


class Talkative(torch.nn.Linear):
    """A model with an attribute and a method of its own."""

    greeting = "hello"

    def greet(self, name: str) -> str:
        return f"{self.greeting} {name}"


@in_ranks(2)
def test_what_the_wrapper_does_not_have_the_module_may() -> None:
    with wrapped(Talkative(2, 2)) as ddp:
        assert (ddp.greet("you"), ddp.greeting, ddp.in_features) == ("hello you", "hello", 2)
        assert isinstance(ddp, torch.nn.parallel.DistributedDataParallel)
        assert not hasattr(ddp, "nonsense")
        assert [name for name, _ in ddp.named_parameters()] == ["module.weight", "module.bias"]
        assert (ddp.eval().module.training, ddp.train().module.training) == (False, True)
