"""Where gradients lie, what happens in a step, in which order, and what reports, traces and saved plans say of it."""

import copy
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.alike import backwards, train
from support.inside import issued_ops
from support.levels import some
from support.models import CASES, Branches, mlp, noise
from support.naive import collectives, naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from undertow import DistributedDataParallel, ShardedOptimizer, attach


@in_ranks(2, 3)
@pytest.mark.parametrize("case_name", some(CASES, most=1))
def test_gradients_are_views_of_buckets_at_the_same_place_in_every_step(case_name: str) -> None:
    """Each lies in a storage that is larger than itself: a trailer follows it at least."""
    case, places = CASES[case_name], []
    with wrapped_and_bare(case.model(), order="reverse", bucket_cap_mb=3e-4, buffers="off") as (ddp, bare):
        for step in range(5):
            for model in (ddp, bare):
                model.zero_grad(set_to_none=step < 3)
                case.loss(model, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
            assert all(param.grad.untyped_storage().nbytes() > param.grad.nbytes for param in ddp.parameters())
            places.append([param.grad.data_ptr() for param in ddp.parameters()])
    assert places == places[:1] * 5


@in_ranks(2, 3)
def test_ignored_parameters_keep_their_local_gradient() -> None:
    with wrapped_and_bare(Branches(2), ignore=("layers.0.weight",)) as (ddp, bare):
        local = copy.deepcopy(bare)
        for model in (ddp, bare, local):
            model(noise(2, 4), (0, 1)).sum().backward()
        naive_mean(bare)
        bare.layers[0].weight.grad = local.layers[0].weight.grad
        require_same_gradients(ddp, bare)


@in_ranks(2)
def test_settings_of_torchs_class_that_we_do_not_need_are_accepted() -> None:
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True)
    ddp(noise(2, 4), (0,)).sum().backward()
    assert ddp.module.layers[1].weight.grad is None
    ddp.close()


MLP = CASES["mlp"]
LATE_S = 0.2  # far above what a busy machine keeps another rank waiting in most of four steps
OVERLAPPED = ["pack b0", "all_reduce b0", "pack b1", "all_reduce b1", "pack b2", "all_reduce b2"]
ACCUMULATED = ["pack b0", "bind b0", "pack b1", "bind b1", "pack b2", "bind b2"]
IN_ORDER, REVERSED, ROTATED = ORDERS = [(0, 1, 2), (2, 1, 0), (1, 2, 0)]


@in_ranks(2, 3)
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "afterwards"])
@pytest.mark.parametrize("differs", [True, False], ids=["other orders", "in order"])
def test_a_bucket_is_packed_and_sent_before_the_next_one(differs: bool, overlap: bool) -> None:
    """Three layers, a bucket for each; also where gradients arrive in another order on every rank."""
    order = ORDERS[dist.get_rank() if differs else 0]
    with wrapped(Branches(), bucket_cap_mb=8e-5, order="reverse", overlap=overlap) as ddp:
        assert [bucket.params for bucket in ddp.plan.buckets] == [(5, 4), (3, 2), (1, 0)]
        ops = issued_ops(ddp)
        ddp(noise(2, 4), order).sum().backward()
        if differs:
            assert [op for op in ops if op.startswith("all_reduce")] == OVERLAPPED[1::2]
            ops[:6] = sorted(ops[:6], key=OVERLAPPED.index)
        assert ops == [*OVERLAPPED, "bind b0", "bind b1", "bind b2"]
        ops.clear()
        with ddp.no_sync():
            ddp(noise(2, 4), order).sum().backward()
        assert (sorted(ops, key=ACCUMULATED.index) if differs else ops) == ACCUMULATED


@in_ranks(2, 3)
@pytest.mark.parametrize(("order", "first"), [("reverse", []), ("observed", ["broadcast"])])
def test_a_step_has_a_collective_per_bucket_and_the_first_one_agrees_on_the_observed_order(order: str, first: list[str]) -> None:
    with wrapped(MLP.model(), bucket_cap_mb=1e-6, order=order) as ddp, collectives() as called:
        for step in range(4):
            called.clear()
            MLP.loss(ddp, step).backward()
            assert called == ["all_reduce"] * 4 + (first if step == 0 else [])
        assert len(ddp.plan.buckets) == 4
        called.clear()
        with ddp.no_sync():
            MLP.loss(ddp, 0).backward()
        ddp.report()
        assert called == []


REGISTERED = [(4, 5), (2, 3), (0, 1)]


def require_orders(*wanted: list[tuple[int, ...]], uses: list[tuple[int, ...]], **settings: Any) -> str:
    """The plan's buckets after each of three steps; returns the last plan."""
    with wrapped(Branches(), bucket_cap_mb=8e-5, **settings) as ddp:
        for step, buckets in enumerate(wanted):
            ddp(noise(2, 4, step=step), uses[dist.get_rank()]).sum().backward()
            assert [tuple(sorted(bucket.params)) for bucket in ddp.plan.buckets] == buckets
        return ddp.plan.to_json()


@in_ranks(2, 3)
@pytest.mark.parametrize("order", ["reverse", "observed, with deterministic algorithms"])
def test_an_order_that_was_asked_for_stays(order: str) -> None:
    name, _, is_deterministic = order.partition(", ")
    torch.use_deterministic_algorithms(is_deterministic != "")
    try:
        require_orders(*[REGISTERED] * 3, uses=[REVERSED] * 3, order=name)
    finally:
        torch.use_deterministic_algorithms(False)


@in_ranks(2, 3)
def test_a_pinned_plan_stays() -> None:
    rotated = [(0, 1), (4, 5), (2, 3)]
    saved = require_orders(REGISTERED, rotated, uses=[ROTATED] * 3)
    assert require_orders(*[rotated] * 3, uses=[REVERSED] * 3, plan=saved) == saved


@in_ranks(2, 3)
@pytest.mark.parametrize("average_in_collective", some([True, False], most=1))
def test_the_report_names_the_late_rank(average_in_collective: bool) -> None:
    with wrapped(MLP.model(), order="reverse", average_in_collective=average_in_collective) as ddp:
        for step in range(4):
            loss = MLP.loss(ddp, step)
            if dist.get_rank() == 1:
                time.sleep(LATE_S)
            loss.backward()
        report = ddp.report().to_dict()
    assert (report["slowest_rank"], len(report["busy_ms"])) == (1, dist.get_world_size())
    assert report["busy_ms"][1] >= LATE_S * 1e3
    if dist.get_rank() != 1:
        assert report["late_rank_ms"] > 0.5 * LATE_S * 1e3
        assert report["exposed_ms"] >= report["late_rank_ms"]


@in_ranks(2)
@pytest.mark.parametrize(
    ("num_steps", "settings", "num_traces"),
    some(
        [
            (0, {}, 0),
            (1, {}, 1),  # although the next has not begun
            (3, {}, 2),  # the third is complete when the next one begins
            (3, {"record": "off"}, 0),
            (70, {"record": "summary"}, 63),
            (70, {"record": "full"}, 69),
        ],
        most=2,
    ),
    ids=str,
)
def test_one_rank_may_ask_for_the_report(num_steps: int, settings: dict[str, Any], num_traces: int) -> None:
    with wrapped(MLP.model(), bucket_cap_mb=1e-6, order="reverse", **settings) as ddp:
        backwards(ddp, MLP.loss, range(num_steps))
        if dist.get_rank() != 0:
            return
        made = ddp.report()
        report, text = json.loads(json.dumps(made.to_dict())), str(made)
        assert report["num_steps"] == len(ddp.traces()) == num_traces
    if num_traces == 0:
        assert text == "No step is recorded yet: run a training step, and leave record on."
        return
    exposed = re.search(r"^  exposed +([\d.]+) ", text, re.MULTILINE)
    assert exposed is not None
    assert float(exposed[1]) == pytest.approx(report["exposed_ms"], abs=0.1)  # rounded so that parts add up
    step_ms = report["forward_ms"] + report["backward_ms"] + report["exposed_ms"] + report["rest_ms"]
    assert step_ms == pytest.approx(report["step_ms"])
    since = [bucket["launched_ms"] for bucket in report["buckets"]]
    assert all(it["wire_ms"] <= it["done_ms"] - at + 1e-9 for it, at in zip(report["buckets"], since, strict=True))
    assert (report["rank"], [bucket["params"] for bucket in report["buckets"]]) == (
        0,
        [["2.bias"], ["2.weight"], ["0.bias"], ["0.weight"]],
    )
    assert report["communication_ms"] > 0
    assert report["exposed_ms"] >= report["late_rank_ms"]


@in_ranks(2, 3)
def test_a_sharded_model_reports_the_gathers_of_all_its_parameters() -> None:
    with wrapped(MLP.model(), bucket_cap_mb=1e-4, strategy="zero2") as ddp:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1)
        train(ddp, optimizer, MLP.loss, steps=range(4))
        report, buckets = ddp.report(), [bucket.index for bucket in ddp.plan.buckets]
    assert report.num_steps == 3  # the last is not complete
    assert sorted(gather.index for gather in report.gathers) == buckets
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
    bare, sync = list(model.state_dict()), attach(model)
    assert list(model.state_dict()) == bare
    sync.close()
    with wrapped(model) as ddp:
        assert list(ddp.state_dict()) == [f"module.{key}" for key in bare]


class Talkative(torch.nn.Linear):
    greeting = "hello"

    def greet(self, name: str) -> str:
        return f"{self.greeting} {name}"


@in_ranks(2)
def test_what_the_wrapper_does_not_have_the_module_may() -> None:
    with wrapped(Talkative(2, 2)) as ddp:
        assert (
            ddp.greet("you"),
            ddp.greeting,
            ddp.in_features,
            isinstance(ddp, torch.nn.parallel.DistributedDataParallel),
            hasattr(ddp, "nonsense"),
            [name for name, _ in ddp.named_parameters()],
            ddp.eval().module.training,
            ddp.train().module.training,
        ) == ("hello you", "hello", 2, True, False, ["module.weight", "module.bias"], False, True)
