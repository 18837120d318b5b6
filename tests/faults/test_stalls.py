"""A rank that keeps others waiting is named, with what it is doing; then the step fails on every rank."""

from __future__ import annotations

import math
import re

import pytest

from faults.conftest import Record
from faults.test_lost_ranks import WITHIN_S
from support.faults import Fault, outcomes

FIRST = "bucket 0 ('last.bias')"
THIRD = "bucket 2 ('norm.weight', 'norm.bias', 'first.bias')"  # those before it have left
HEAD = "rank R has waited N s for {bucket}: rank {faulty} has not come."
WAITS_FOR = {
    "in_backward": THIRD,
    "in_weights": "the sum of all ranks' weights",
    "in_join": "what ranks that have data do next",
}
DOING = {
    "in_data": "in code outside of the model, no training forward since synchronisation 3",
    "in_evaluation": "in the forward of 'norm', no training forward since synchronisation 3",
    "in_forward": "in the forward of 'norm'",
    "in_backward": "in backward",
    "in_weights": "in backward",
    "in_join": "in code outside of the model, no training forward since synchronisation 3",
}


def plain(text: str) -> str:
    """Without what differs from run to run: who asked first, seconds, lines, and frames but the innermost."""
    lines = re.sub(r"rank \d has waited \d+ s", "rank R has waited N s", text).split("\n")
    frames = [line for line in lines if ", line " in line]
    return "\n".join(re.sub(r", line \d+,", ",", line) for line in lines if line not in frames[:-1])


def report(fault: Fault, doing: str, bucket: str = FIRST) -> list[str]:
    waiting = [f"  rank {rank}: synchronisation 3, waits for {bucket}" for rank in range(fault.num_ranks - 1)]
    late = f"  rank {fault.rank}: synchronisation 3, {doing}"
    return [HEAD.format(faulty=fault.rank, bucket=bucket), *waiting, late, "    tests/support/faults.py, in is_late"]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("point", list(DOING))
def test_a_late_rank_is_reported_on_every_rank_and_training_goes_on(point: str, num_ranks: int) -> None:
    settings = {"stall_warning_s": 1.0, "stall_timeout_s": math.inf, "buffers": "off"}
    fault = Fault("is_late", point, rank=num_ranks - 1, num_ranks=num_ranks, settings=settings)
    found = outcomes(fault)
    assert [outcome.kind for outcome in found] == [""] * num_ranks
    for outcome in found:
        assert "\n".join(report(fault, DOING[point], WAITS_FOR.get(point, FIRST))) in [plain(text) for text in outcome.logged]


def test_the_report_comes_again_while_the_rank_is_late() -> None:
    """Every two seconds, or a little later: ranks have one to answer, and may sleep for one between two looks."""
    settings = {"stall_warning_s": 0.5, "stall_timeout_s": math.inf, "buffers": "off"}
    for outcome in outcomes(Fault("is_late_for_long", "in_data", settings=settings)):
        heads = [plain(text).split("\n")[0] for text in outcome.logged]
        assert heads.count(HEAD.format(bucket=FIRST, faulty=1)) >= 2


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_is_too_late_fails_the_step_on_every_rank(num_ranks: int, record: Record) -> None:
    settings = {"stall_warning_s": 0.5, "stall_timeout_s": 1.5, "buffers": "off"}
    fault = Fault("is_late", "in_data", rank=num_ranks - 1, num_ranks=num_ranks, settings=settings)
    found = outcomes(fault)
    for rank, outcome in enumerate(found):
        first, *rest = report(fault, DOING["in_data"])
        remedy = "  Look at what the late ranks are doing, or set stall_timeout_s higher if that is how it must be."
        text = "\n".join([first, f"  synchronisation 3, rank {rank}", *rest, remedy])
        assert (outcome.kind, plain(outcome.text)) == ("StallTimeout", text)
        assert outcome.seconds < WITHIN_S
    record("late, beyond stall_timeout_s=1.5", found[: fault.rank])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("warning_s", [0.5, math.inf])
@pytest.mark.parametrize("group", ["an_impatient_group", "a_group_that_closes"])
def test_a_rank_is_too_late_where_the_timeout_of_the_process_group_is_over(group: str, warning_s: float, num_ranks: int) -> None:
    settings = {"stall_warning_s": warning_s, "stall_timeout_s": math.inf, "buffers": "off"}
    fault = Fault("is_late", f"in_data_of_{group}", rank=num_ranks - 1, num_ranks=num_ranks, settings=settings)
    head, *rest = report(fault, DOING["in_data"]) if warning_s == 0.5 else ("", "")
    told = [f"  {head}", *rest] if head else []
    remedy = (
        "  Look at what the late ranks are doing, or give the process group a longer timeout: "
        "stall_timeout_s above it does nothing."
    )
    for rank, outcome in enumerate(outcomes(fault)):
        assert (outcome.kind, outcome.exit_code) == ("StallTimeout", 1), outcome.text
        first, where, *others = plain(outcome.text).split("\n")
        assert re.fullmatch(r"rank \d has waited for as long as the process group's timeout lets it\.", first)
        assert (where, others) == (f"  synchronisation 3, rank {rank}", [*told, remedy])


def test_a_rank_that_has_not_wrapped_its_model_is_reported() -> None:
    fault = Fault("is_late", "before_construction", settings={"stall_warning_s": 0.5})
    found = outcomes(fault)
    assert [outcome.kind for outcome in found] == ["", ""]
    assert "rank 0 has waited N s for rank 1 to synchronise a model." in [
        re.sub(r"\d+ s", "N s", text) for text in found[0].logged
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_never_makes_a_second_model_is_not_waited_for_for_ever(num_ranks: int) -> None:
    fault = Fault("is_late", "before_another_construction", rank=num_ranks - 1, num_ranks=num_ranks)
    for rank, outcome in enumerate(outcomes(fault)[: fault.rank]):
        assert (outcome.kind, outcome.text) == (
            "StallTimeout",
            f"rank {fault.rank} has made no such wrapper within 2 s, and other ranks wait for it.\n"
            f"  synchronisation 0, rank {rank}\n"
            "  Wrap the model on every rank of the group. "
            "If that takes longer, set stall_timeout_s and the process group's timeout higher.",
        )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_that_is_stopped_is_said_to_be(num_ranks: int, record: Record) -> None:
    settings = {"stall_warning_s": 0.5, "stall_timeout_s": 1.5, "buffers": "off"}
    fault = Fault("is_stopped", "in_forward", rank=num_ranks - 1, num_ranks=num_ranks, settings=settings)
    found = outcomes(fault)[: fault.rank]
    for outcome in found:
        assert outcome.kind == "StallTimeout"
        assert plain(outcome.text).split("\n")[0] == HEAD.format(faulty=fault.rank, bucket=FIRST)
        assert f"\n  rank {fault.rank}: stopped by a signal\n" in outcome.text
        assert outcome.seconds < WITHIN_S
    record("stopped, beyond stall_timeout_s=1.5", found)


@pytest.mark.parametrize("point", ["in_hybrid_backward", "in_expert_backward"])
def test_a_stall_names_the_rank_in_other_rows_and_columns_and_with_other_experts_too(point: str) -> None:
    settings = {"stall_warning_s": 0.5, "stall_timeout_s": 1.5, "buffers": "off"}
    fault = Fault("is_stopped", point, rank=3, num_ranks=4, settings=settings)
    for outcome in outcomes(fault)[: fault.rank]:
        assert (outcome.kind, outcome.exit_code) == ("StallTimeout", 1)
        assert re.match(r"rank \d has waited \d+ s for bucket \d .*: rank 3 has not come\.", outcome.text)
        assert "\n  rank 3: stopped by a signal\n" in outcome.text
