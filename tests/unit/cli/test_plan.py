"""`undertow plan`: the buckets of a model, and the schedule of its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cli import Undertow, question, rows_of
from support.project import ROOT
from undertow.plan import Plan, plan_from_groups
from undertow.plan.table import source_from_file
from undertow.schedule import STRATEGIES, Strategy, schedule_from_text

ZERO2 = """\
zero2, ranks: 3, parameters: 3, MB: 1.80, buckets: 2
┏━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━┳━━━━━━━━━━┳━━━━━━┳━━━━━━━━━━━━━━┓
┃ bucket ┃ parameters                ┃ count ┃ dtype    ┃   MB ┃ MB per shard ┃
┡━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━╇━━━━━━━━━━╇━━━━━━╇━━━━━━━━━━━━━━┩
│      0 │ head.bias ... head.weight │     2 │ float32  │ 0.80 │         0.27 │
│      1 │ stem.weight               │     1 │ bfloat16 │ 1.00 │         0.33 │
└────────┴───────────────────────────┴───────┴──────────┴──────┴──────────────┘

id  lane     kind            bucket  reads      writes     after
00  compute  fill            b0      -          grad[b0]   -
01  compute  pack            b0      grad[b0]   grad[b0]   00
02  comm.dp  reduce_scatter  b0      grad[b0]   shard[b0]  01
03  compute  fill            b1      -          grad[b1]   -
04  compute  end             *       -          -          00 03
05  compute  pack            b1      grad[b1]   grad[b1]   04
06  comm.dp  reduce_scatter  b1      grad[b1]   shard[b1]  05
07  compute  join            *       -          -          04
08  compute  bind            b0      shard[b0]  -          02 07
09  compute  bind            b1      shard[b1]  -          06 07
10  compute  step            *       shard[*]   own[*]     08 09
11  comm.dp  all_gather      b1      own[b1]    param[b1]  10
12  comm.dp  all_gather      b0      own[b0]    param[b0]  10
13  compute  use             b1      param[b1]  -          11
14  compute  use             b0      param[b0]  -          12
"""


def test_a_plan_is_shown_as_buckets_and_a_schedule(undertow: Undertow) -> None:
    assert undertow("plan table.json --strategy zero2 --ranks 3", columns=100) == (0, ZERO2, "")


@pytest.mark.parametrize(
    ("options", "golden"),
    [
        ("", "data_parallel_3_buckets"),
        ("--no-overlap", "data_parallel_3_buckets_no_overlap"),
        ("--accumulation", "accumulation_3_buckets"),
        ("--strategy zero1", "zero1_3_buckets"),
        ("--strategy zero2 --accumulation", "zero2_accumulation_3_buckets"),
    ],
)
def test_options_choose_the_schedule(options: str, golden: str, undertow: Undertow) -> None:
    params = source_from_file(Path("table.json"))
    assert not isinstance(params, Plan)
    # Each parameter in a bucket of its own, whatever the strategy.
    Path("plan.json").write_text(plan_from_groups(params, [[2], [1], [0]], num_ranks=2).to_json())
    code, printed, _ = undertow(f"plan plan.json {options}")
    assert code == 0
    assert printed.endswith(f"\n\n{(ROOT / 'tests' / 'golden' / f'{golden}.txt').read_text()}")


def test_without_a_file_the_demos_model_is_planned(undertow: Undertow) -> None:
    sizes, _, rest = undertow("plan").out.partition("\n")
    assert sizes == "ddp, ranks: 2, parameters: 77, MB: 19.61, buckets: 10"
    assert len(schedule_from_text(rest.partition("\n\n")[2]).collectives) == 10


# What a plan shows, and what it does not.
SHOWN = {
    "plan table.json": ("", "shard"),  # only if there are some
    # Only strategies with shards cut parameters.
    "plan table.json --bucket-cap-mb 0.5 --strategy ddp": ("buckets: 3\n", "shard"),
    "plan table.json --bucket-cap-mb 0.5 --strategy zero1": ("buckets: 4\n", "no shards"),
    # A profile has a strategy; a size overrides its optimal plan.
    "plan sharded.json --link 10gbit": ("zero1, ranks: 4, ", "no shards"),
    "plan sharded.json --link 10gbit --strategy ddp": ("ddp, ranks: 4, ", "shard"),
    "plan small.json --link 10gbit --bucket-cap-mb 17": ("buckets: 4\n", "shard"),
    "plan small.json --link 10gbit --accumulation": ("ddp", "step, ms"),  # takes no step
    # Without a profile nothing is said of the shards of a node.
    "plan --strategy hybrid --ranks 4": ("comm.across", "MB per shard"),
}


@pytest.mark.parametrize("line", SHOWN)
def test_a_plan_shows(line: str, undertow: Undertow) -> None:
    code, printed, _ = undertow(line)
    shown, hidden = SHOWN[line]
    assert (code, shown in printed, hidden in printed) == (0, True, False)


def test_a_plan_for_nodes_shows_what_crosses_and_the_shards_of_a_node(undertow: Undertow) -> None:
    _, printed, _ = undertow("plan small.json --link 1gbit --per-node 2 --bucket-cap-mb 40 --strategy hybrid")
    assert "comm.across" in printed
    of_buckets = [row for row in rows_of(printed.split("\n\n")[0]) if row[0].isdigit()]
    assert len(of_buckets) > 1
    for row in of_buckets:  # of the two ranks of a node
        assert float(row[-1]) == pytest.approx(float(row[-2]) / 2, abs=0.011)
    assert "Network: 1gbit between nodes of 2 ranks, 2400gbit,3us inside; 4 ranks" in printed


def test_the_plan_of_a_profile_is_the_optimal_one(undertow: Undertow) -> None:
    _, printed, _ = undertow("plan small.json --link 10gbit,20us")
    what_if = question().at(4)
    assert printed.splitlines()[0] == f"ddp, ranks: 4, parameters: 4, MB: 37.75, buckets: {len(what_if.optimal_plan.buckets)}"
    step_us = what_if.outcome("", what_if.optimal_plan).step_us
    assert f"│ {step_us / 1e3:.1f} │".replace(" ", "") in printed.replace(" ", "")
    assert printed.endswith("Network: 10gbit,20us, 4 ranks\n")


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_the_schedule_shown_is_the_one_that_is_simulated(strategy: Strategy, undertow: Undertow) -> None:
    nodes = "" if strategy.crossing is None else "--per-node 2 --node-link 100gbit,1us"
    _, printed, _ = undertow(f"plan small.json --link 10gbit,20us --strategy {strategy.name} {nodes}")
    schedule = schedule_from_text(printed.split("\n\n")[1])
    what_if = question(strategy=strategy.name).at(4)
    simulated = [(event.kind, event.bucket) for event in what_if.outcome("", what_if.optimal_plan).trace.communication]
    gathers_last = sorted(simulated, key=lambda sent: sent[0] == "all_gather")
    assert [(op.kind, op.bucket) for op in schedule.collectives if op.kind is not strategy.crossing] == gathers_last


REFUSALS = {
    "plan table.json --strategy zero3": (
        "there is no strategy 'zero3'.\n  strategy\n  Use torch.distributed.fsdp.fully_shard to shard parameters.\n"
    ),
    "plan table.json --accumulation --no-overlap": (
        "--accumulation and --no-overlap cannot go together.\n  undertow plan\n"
        "  Leave one of them out: a backward that only accumulates has one schedule.\n"
    ),
    "plan table.json --ranks 0": (
        "a plan is for one rank or more, got --ranks 0.\n  undertow plan\n  Give one or more, or leave it out.\n"
    ),
    "plan --link 1gbit": (
        "--link says what a step takes, which needs a profile.\n  the model of undertow demo has no times\n"
        "  Give a profile that save_profile() has written, or leave --link, --per-node and --node-link out.\n"
    ),
    "plan absent.json": "absent.json cannot be read.\n  No such file or directory\n  Give a file",
    "plan broken.json": "broken.json is no JSON.\n  line 1, column",  # told from a plan
}


@pytest.mark.parametrize("line", REFUSALS)
def test_what_cannot_be_planned_is_refused(line: str, undertow: Undertow) -> None:
    Path("broken.json").write_text('{"undertow_profile": 1, "forward_us": 10')
    code, printed, error = undertow(line)
    assert (code, printed) == (2, "")
    assert error.startswith(f"Error: {REFUSALS[line]}")
