"""`undertow simulate`: the step of a model on a network, printed and drawn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import Undertow, rows_of
from support.gpt2_profile import gpt2_profile
from support.project import ROOT
from undertow.cli.what_if import OPTIMAL

PNG_HEAD = b"\x89PNG"
TABLE = """\
small, ddp: 4 parameters, 37.8 MB, 46.0 ms of computing per step
Network: 8gbit,10us, 4 ranks
┏━━━━━━━━━━━━━━━━━┳━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━┓
┃ gradients sent  ┃ buckets ┃ step, ms ┃ exposed, ms ┃ hidden ┃ achieved / limit ┃ efficiency ┃
┡━━━━━━━━━━━━━━━━━╇━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━┩
"""
SWEEP_TABLE = """\
By data-parallel size
┏━━━━━━━┳━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━┓
┃ ranks ┃ gradients sent  ┃ step, ms ┃ exposed, ms ┃ hidden ┃ efficiency ┃
┡━━━━━━━╇━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━┩
│     2 │ per parameter   │     65.6 │        19.6 │    51% │      70.2% │
│       │ 25 MiB buckets  │     68.0 │        22.0 │    44% │      67.7% │
│       │ 40 MB buckets   │     85.5 │        39.5 │     0% │      53.8% │
│       │ optimal buckets │     65.6 │        19.6 │    51% │      70.2% │
└───────┴─────────────────┴──────────┴─────────────┴────────┴────────────┘
"""


def test_ways_to_send_gradients_are_compared(undertow: Undertow) -> None:
    code, printed, _ = undertow("simulate small.json --link 8gbit,10us --out out", columns=120)
    assert code == 0
    assert printed.startswith(TABLE)
    # A byte takes 1.5 / 0.956 ns and a collective 4 hops of 10 us: from 15 + 10 ms on 0.05 for the bias, 26.37 for each large
    # weight and 6.62 for the stem are 84.41 one after another, and the update 85.4. One bucket leaves at 45: 45 + 59.28 + 1.
    assert [row[:3] for row in rows_of(printed)] == [
        ["per parameter", "4", "85.4"],
        ["25 MiB buckets", "3", "85.4"],
        ["40 MB buckets", "1", "105.3"],
        ["optimal buckets", "2", "85.3"],
    ]
    assert Path("out/simulate.png").read_bytes().startswith(PNG_HEAD)


@pytest.mark.parametrize("sweep", ["ranks", "bandwidth", "bucket"])
def test_a_sweep_is_printed_and_drawn(sweep: str, undertow: Undertow) -> None:
    _, printed, _ = undertow(f"simulate small.json --link 10gbit --sweep {sweep} --out .")
    assert printed.endswith(f"Picture: simulate-{sweep}.png\n")
    assert Path(f"simulate-{sweep}.png").read_bytes().startswith(PNG_HEAD)


def test_a_sweep_says_of_every_method_what_is_exposed_and_hidden_in_80_columns(undertow: Undertow) -> None:
    _, printed, _ = undertow("simulate small.json --ranks 2 --link 8gbit,10us --sweep ranks", columns=80)
    table = printed[printed.index("By ") : printed.index("Picture")]
    assert "".join(f"{line.rstrip()}\n" for line in table.splitlines()) == SWEEP_TABLE


# What a simulation shows, and what it does not.
SHOWN = {
    "small.json --link 8gbit,10us --skew 0.05": ("of it a late rank", "Error"),
    "measured.json": ("Network: as measured over 4 ranks\n", "Error"),
    # Other ranks get the link that explains what was measured.
    "measured.json --ranks 64": (
        "Network: a ring over 64 ranks, each with the link that explains what 4 measured: 12 Gb/s and 167 us a message\n",
        "Error",
    ),
    "linked.json --link 1gbit": ("on top", "Error"),
    "linked.json --link 1gbit --sweep ranks": ("1gbit", "on top"),  # one formula for all of them
    # What was measured on a mesh is of that mesh.
    "mesh.json": ("Network: as measured over 4 ranks", "Error"),
    "mesh.json --strategy zero1 --link 1gbit": ("Network: 1gbit, 4 ranks\n", "Error"),
}


@pytest.mark.parametrize("line", SHOWN)
def test_a_simulation_shows(line: str, undertow: Undertow) -> None:
    code, printed, _ = undertow(f"simulate {line}")
    shown, hidden = SHOWN[line]
    assert (code, shown in printed, hidden in printed) == (0, True, False)


def test_eager_steps_are_simulated_and_end_sooner(undertow: Undertow) -> None:
    line = "simulate small.json --link 8gbit,10us --strategy zero1"
    printed = [undertow(f"{line} {option}").out for option in ("", "--eager")]
    barrier_ms, eager_ms = (float(row[2]) for each in printed for row in rows_of(each) if row[0] == OPTIMAL)
    # 28.3 ms to reduce all, 28.3 to gather it, and the first gradient comes 10 ms after the forward that has to wait for it.
    assert 10 + 2 * 28.3 <= eager_ms < barrier_ms


def test_a_step_on_nodes_takes_what_its_schedule_has_on_each_axis(undertow: Undertow) -> None:
    _, printed, _ = undertow("simulate small.json --link 8gbit,10us --per-node 2 --node-link 8gbit,10us --strategy hybrid")
    (step_ms,) = (float(row[2]) for row in rows_of(printed) if row[0] == "40 MB buckets")
    # In one bucket: 37.75 MB at 1 / 0.956 ns a byte, of which a ring of two sends half, inside twice and across all of a shard
    # once; four hops.
    assert step_ms == pytest.approx(46 + 3 * 37.753 / 2 / 0.956 + 4 * 0.01, abs=0.051)


RATE = '--sweep bandwidth varies the rate of --link.\n  undertow simulate\n  Give a rate, such as --link "100gbit,5us".\n'
NODES = '  Give the network with its nodes, such as --ranks 64 --per-node 8 --link "100gbit,5us".\n'
ELSEWHERE = "  undertow simulate\n  Give another directory for the pictures: --out DIR.\n"
REFUSALS = {
    "small.json": (
        "nothing says what communication over 4 ranks costs.\n  the profile 'small' has no costs\n"
        '  Give the network, such as --ranks 64 --link "100gbit,5us".\n'
    ),
    "small.json --ranks 0": (
        "a step has one rank or more, got --ranks 0.\n  undertow simulate\n  Give one or more, or leave it out.\n"
    ),
    "small.json --link 1gbit --sweep size": (
        "there is no --sweep 'size'.\n  undertow simulate\n  Choose one of: 'ranks', 'bandwidth', 'bucket'.\n"
    ),
    "small.json --link none --sweep bandwidth": RATE,
    "small.json --ranks 8 --link 8xH200-nvlink4 --sweep bandwidth": RATE,
    "small.json --per-node 2": "--per-node says nothing without --link.\n  the network\n  Give --link too.\n",
    "small.json --node-link 1gbit": "--node-link says nothing without --link.\n  the network\n  Give --link too.\n",
    "small.json --link 1gbit --node-link 1gbit": (
        "--node-link says nothing without --per-node.\n  the network\n  Give --per-node too.\n"
    ),
    "small.json --link 1gbit --skew 2": (
        "skew must be 0 to 0.2, got 2.0.\n  conditions of a simulated step\n"
        "  0.05 is a standard deviation of 5 % between ranks.\n"
    ),
    "measured.json --strategy hybrid --link 1gbit": (
        f"nothing says what strategy 'hybrid' costs over 4 ranks.\n  1gbit has no nodes\n{NODES}"
    ),
    "measured.json --strategy hybrid": (
        f"nothing says what strategy 'hybrid' costs over 4 ranks.\n  measured: 'ddp' over 4 ranks\n{NODES}"
    ),
    "mesh.json --strategy zero1": "nothing says what strategy 'zero1' costs over 4 ranks.\n  measured: 'hybrid' over 4 ranks\n",
    "mesh.json --ranks 8": "nothing says what strategy 'hybrid' costs over 8 ranks.\n",
    # Of other parts.
    "small.json --link fast": "there is no link 'fast'.\n",
    "small.json --link 1gbit --per-node 3": "4 ranks cannot be on nodes of 3 ranks each.\n",
    "small.json --link 8xH200-nvlink4": "8xH200-nvlink4 was measured over 8 ranks and says nothing about 4.\n",
    "small.json --link 1gbit --strategy zero3": "there is no strategy 'zero3'.\n",
    "small.json --link 1gbit --contention 1": "contention must be 0 or more and below 1, got 1.0.\n",
    "small.json --link 8gbit --eager": "there are no eager steps with strategy 'ddp'.\n",
    # Places where no picture can be.
    "small.json --link 1gbit --out file": f"nothing can be written to 'file': File exists.\n{ELSEWHERE}",
    "small.json --link 1gbit --out file/below": f"nothing can be written to 'file/below': Not a directory.\n{ELSEWHERE}",
    "small.json --link 1gbit --out file --sweep ranks": f"nothing can be written to 'file': File exists.\n{ELSEWHERE}",
    "small.json --link 1gbit --out full": f"nothing can be written to 'full/simulate.png': Is a directory.\n{ELSEWHERE}",
    "small.json --link 1gbit --out full --sweep ranks": (
        f"nothing can be written to 'full/simulate-ranks.png': Is a directory.\n{ELSEWHERE}"
    ),
}


@pytest.mark.parametrize("line", REFUSALS)
def test_what_cannot_be_simulated_is_refused(line: str, undertow: Undertow) -> None:
    Path("file").write_text("kept")
    for picture in ("simulate", "simulate-ranks"):
        Path("full", f"{picture}.png").mkdir(parents=True)
    code, printed, error = undertow(f"simulate {line}")
    assert (code, printed) == (2, "" if "--out file" in line else printed)
    assert error.startswith(f"Error: {REFUSALS[line]}")


@pytest.mark.slow  # an interpreter of its own
def test_simulating_does_not_import_torch() -> None:
    check = """
import sys
from undertow.cli import main
try:
    main()
except SystemExit as ended:
    sys.exit(ended.code or "torch" in sys.modules)
"""
    command = [sys.executable, "-c", check, "simulate", "small.json", "--link", "1gbit"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_example_is_what_its_arithmetic_says() -> None:
    profile = gpt2_profile()
    assert sum(spec.numel for spec in profile.params) == 124_439_808  # GPT-2 small as published
    assert (ROOT / "examples" / "profiles" / "gpt2.json").read_text(encoding="utf-8") == profile.to_json()
