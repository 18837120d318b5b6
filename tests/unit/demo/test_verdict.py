"""What the demo says of ways to train: whether they are right, and how long they take."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from support.errors import Call, refusal
from undertow.demo import DemoSettings, Way
from undertow.demo.results import WayDone
from undertow.demo.show import comparison_table
from undertow.demo.verdict import Verdict
from undertow.trace import Event, Trace

TRACE = Trace(
    rank=0,
    step=4,
    events=(
        Event(lane="compute", kind="wait", start_us=200_000, stop_us=225_000),
        Event(lane="comm.dp", kind="all_reduce", start_us=100_000, stop_us=225_000),
    ),
)


def results(changes: Mapping[Way, dict[str, Any]], num_ranks: int = 2) -> dict[Way, Sequence[WayDone]]:
    right = {"step_ms": 1234.56, "exposed_ms": 25.0, "overlap": 0.8, "typical": TRACE, "loss": 2.5}
    right |= {"gradients_agree": True, "parameters_agree": True}
    return {way: [WayDone(way=way, rank=rank, **{**right, **changes.get(way, {})}) for rank in range(num_ranks)] for way in Way}


WRONG_LOSS = ["Undertow, defaults: its final loss is not the reference's."]
VERDICTS: dict[str, tuple[dict[Way, dict[str, Any]], int, list[str]]] = {
    "all agree": ({}, 2, []),
    "other gradients": (
        {Way.TORCH_DDP: {"gradients_agree": False}},
        2,
        ["torch DDP, defaults: its gradients are not the reference's."],
    ),
    "other parameters": (
        {Way.ZERO2: {"parameters_agree": False}},
        2,
        ["Undertow, ZeRO-2: its parameters are not the reference's."],
    ),
    "two ranks must have the very same loss": ({Way.UNDERTOW: {"loss": math.nextafter(2.5, 3)}}, 2, WRONG_LOSS),
    "more ranks may differ by rounding": ({Way.UNDERTOW: {"loss": 2.501}}, 3, []),
    "and by no more": ({Way.UNDERTOW: {"loss": 2.6}}, 3, WRONG_LOSS),
    "a loss that is no number": (
        {Way.BUCKETED: {"loss": math.nan}},
        2,
        ["bucketed, after backward: its final loss is not the reference's."],
    ),
}


@pytest.mark.parametrize(("changes", "num_ranks", "complaints"), VERDICTS.values(), ids=VERDICTS)
def test_a_way_that_is_wrong_is_named(changes: dict[Way, dict[str, Any]], num_ranks: int, complaints: list[str]) -> None:
    verdict = Verdict.of(results(changes, num_ranks), num_ranks=num_ranks)
    assert verdict.complaints == complaints
    assert [way for way in Way if not verdict.agrees(way)] == [way for way in changes if "gradients_agree" in changes[way]]
    assert verdict.with_wrong_loss == [way for way in changes if complaints and "loss" in changes[way]]


def test_the_table_fits_a_narrow_terminal() -> None:
    found, console = results({Way.BUCKETED: {"gradients_agree": False}}), Console(file=io.StringIO(), width=80)
    with console.capture() as captured:
        console.print(comparison_table(found, Verdict.of(found, num_ranks=2), num_steps=3))
    lines = [line.strip() for line in captured.get().splitlines()]
    assert "bucketed, after backward   1234.6  1.00x     25.0    80%     1  2.5000     NO" in lines
    assert "Undertow, defaults         1234.6  1.00x     25.0    80%     1  2.5000    yes" in lines


REFUSALS: dict[str, Call] = {
    "--nproc must be 1 to 16, got 0.\n  undertow demo\n  Two show the most on a small machine.": lambda: DemoSettings(
        num_ranks=0
    ),
    "--nproc must be 1 to 16, got 17.\n  undertow demo\n  Two show the most on a small machine.": lambda: DemoSettings(
        num_ranks=17
    ),
    "--steps must be 1 to 10000, got 0.\n  undertow demo\n  Eight are enough for a stable median.": lambda: DemoSettings(
        num_steps=0
    ),
    "--seed must be 0 to 2147483647, got -1.\n  undertow demo\n  Any such number will do.": lambda: DemoSettings(seed=-1),
    "there is no strategy 'zero3'.\n  strategy\n  Use torch.distributed.fsdp.fully_shard to shard parameters.": lambda: (
        DemoSettings(strategy="zero3")
    ),
    'strategy \'hybrid\' is for several nodes, and the demo runs on one.\n  undertow demo\n  Take "zero1" or "zero2".': (
        lambda: DemoSettings(strategy="hybrid")
    ),
    "there is no strategy 'zero'.\n  strategy\n  Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'.": lambda: DemoSettings(
        strategy="zero"
    ),
    "there is no link 'fast'.\n": lambda: DemoSettings(link="fast"),
}


@pytest.mark.parametrize("text", REFUSALS)
def test_impossible_settings_are_refused(text: str) -> None:
    assert refusal(REFUSALS[text]).startswith(text)


def test_a_strategy_with_shards_adds_a_way() -> None:
    assert [len(DemoSettings(strategy=strategy).ways) for strategy in ("ddp", "zero1", "zero2")] == [5, 6, 6]
    assert DemoSettings(strategy="zero1").ways[-1] is Way.ZERO1
