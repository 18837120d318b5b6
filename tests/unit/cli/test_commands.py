"""The commands: their help and exit codes, what they show, what they refuse, and the questions that they ask the simulator."""

import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

import undertow as library
from support.cli import MEASURED, SMALL, TABLE, Undertow, rows_of, what_if
from support.project import ROOT
from support.schedules import schedule_from_text
from support.strategies import spec
from undertow import demo
from undertow.cli import main
from undertow.cli.simulate import SWEEPS, swept_ranks
from undertow.cost import LINKS, CostCurve
from undertow.demo import DemoSettings
from undertow.errors import ConfigError
from undertow.plan import plan_from_groups
from undertow.profile import Profile, source_from_file
from undertow.report.comparison import Outcome
from undertow.report.what_if import MEASURED as OWN
from undertow.report.what_if import PLANNED, NetworkOptions, WhatIf
from undertow.simulate import Conditions


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("table.json").write_text(TABLE)
    curve = MEASURED.curves["all_reduce"]
    for name, profile in {
        "small": SMALL,
        "sharded": replace(SMALL, strategy="zero1"),
        "measured": MEASURED,
        "mesh": replace(MEASURED, strategy="hybrid", curves={"reduce_scatter": curve, "all_gather": curve}),
    }.items():
        profile.save(f"{name}.json")
    return tmp_path


HELP = {
    "demo": ("--nproc", "--link", "--steps", "--out", "--strategy", "Exit code"),
    "simulate": (
        *("--ranks", "--link", "--per-node", "--node-link", "--strategy", "--skew", "--contention", "--sweep", "--out"),
        *("Exit code", "Example: undertow simulate"),
    ),
}


def test_the_version_is_printed(undertow: Undertow) -> None:
    assert undertow("--version") == (0, f"undertow {library.__version__}\n", "")


@pytest.mark.parametrize("command", HELP)
def test_help_names_every_option_and_the_exit_codes(command: str, undertow: Undertow) -> None:
    code, text, _ = undertow(f"{command} --help")
    assert (code, [name for name in HELP[command] if name not in text]) == (0, [])


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_example_of_the_help_runs(command: str, undertow: Undertow, folder: Path) -> None:
    example = re.search(rf"Example: undertow ({command} .*)", undertow(f"{command} --help").out)
    shutil.copytree(ROOT / "examples" / "profiles", folder / "examples" / "profiles")
    assert undertow(example[1]).code == 0


def test_an_error_of_ours_is_text_on_stderr_and_exit_code_2(undertow: Undertow) -> None:
    assert undertow("demo --link fast") == (
        2,
        "",
        "Error: link 'fast' is not known.\n"
        '  Write a rate such as "1gbit", "2.5gbit" or "200mbit", a rate and a latency such as "100gbit,5us", or "none" for the '
        "bare loopback.\n",
    )


def test_options_become_settings(undertow: Undertow, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DemoSettings] = []
    monkeypatch.setattr(demo, "run_demo", lambda settings: seen.append(settings) or 1)
    assert (undertow("demo --nproc 3 --link 5gbit --steps 4 --out b --strategy zero1").code, seen) == (
        1,
        [DemoSettings(num_ranks=3, link="5gbit", num_steps=4, out=Path("b"), strategy="zero1")],
    )


def test_a_missing_typer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        'The command needs typer, which is not installed.\n  Install it with: pip install "undertow[cli]"'
    )


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


def test_a_plan_is_shown_as_buckets_and_if_asked_for_a_schedule(undertow: Undertow) -> None:
    line, (buckets, _, _) = "plan table.json --strategy zero2 --ranks 3", ZERO2.partition("\n\n")
    assert undertow(f"{line} --schedule", columns=80) == (0, ZERO2, "")
    assert undertow(line, columns=80) == (0, f"{buckets}\n", "")


@pytest.mark.parametrize(
    ("options", "golden"),
    [
        ("--no-overlap", "data_parallel_3_buckets_no_overlap"),
        ("--strategy zero1", "zero1_3_buckets"),
    ],
)
def test_options_choose_the_schedule(options: str, golden: str, undertow: Undertow) -> None:
    params = source_from_file(Path("table.json"))
    # Each parameter in a bucket of its own, whatever the strategy.
    Path("plan.json").write_text(plan_from_groups(params, [[2], [1], [0]], num_ranks=2).to_json())
    code, printed, _ = undertow(f"plan plan.json --schedule {options}")
    assert (code, printed.endswith(f"\n\n{(ROOT / 'tests' / 'golden' / f'{golden}.txt').read_text()}")) == (0, True)


def test_without_a_file_the_demos_model_is_planned(undertow: Undertow) -> None:
    sizes, _, rest = undertow("plan --schedule").out.partition("\n")
    assert (sizes, schedule_from_text(rest.partition("\n\n")[2]).to_text().count(" all_reduce ")) == (
        "ddp, ranks: 2, parameters: 77, MB: 5.09, buckets: 5",
        5,
    )


# What a command shows, and what it does not.
SHOWN = {
    "plan table.json": ("", "shard"),  # only if there are some
    "plan table.json --bucket-cap-mb 0.5 --strategy zero1": ("buckets: 3\n", "no shards"),
    # A profile has a strategy; a size overrides its plan.
    "plan sharded.json --link 10gbit": ("zero1, ranks: 4, ", "no shards"),
    "plan small.json --link 10gbit --bucket-cap-mb 17": ("buckets: 4\n", "shard"),
    "simulate measured.json": ("Network: as measured over 4 ranks\n", "Error"),
    # Other ranks get costs like those that were measured.
    "simulate measured.json --ranks 64": (
        "Network: as measured over 4 ranks, scaled to 64 ranks\n",
        "Error",
    ),
    "simulate mesh.json --strategy zero1 --link 1gbit": ("Network: 1gbit, 4 ranks\n", "Error"),
}


@pytest.mark.parametrize("line", SHOWN)
def test_a_command_shows(line: str, undertow: Undertow) -> None:
    code, printed, _ = undertow(line)
    shown, hidden = SHOWN[line]
    assert (code, shown in printed, hidden in printed) == (0, True, False)


def test_the_plan_of_a_profile_is_the_one_that_training_would_choose(undertow: Undertow) -> None:
    _, printed, _ = undertow("plan small.json --link 10gbit,20us")
    small = what_if()
    assert printed.splitlines()[0] == f"ddp, ranks: 4, parameters: 4, MB: 37.75, buckets: {len(small.planned.buckets)}"
    step_us = small.outcome("", small.planned).step_us
    assert f"│ {step_us / 1e3:.1f} │".replace(" ", "") in printed.replace(" ", "")
    assert "Network: 10gbit,20us, 4 ranks\n" in printed


RATE = '--sweep bandwidth varies the rate of --link.\n  undertow simulate\n  Give a rate, such as --link "100gbit,5us".\n'
NODES = '  Give the network with its nodes, such as --ranks 64 --per-node 8 --link "100gbit,5us".\n'
ELSEWHERE = "  undertow simulate\n  Give another directory for the pictures: --out DIR.\n"
REFUSALS = {
    "plan table.json --ranks 0": (
        "a plan is for one rank or more, got --ranks 0.\n  undertow plan\n  Give one or more, or leave it out.\n"
    ),
    "plan --link 1gbit": (
        "--link predicts the time of a step, which needs a profile.\n  the model of undertow demo has no times\n"
        "  Give a profile that save_profile() has written, or leave --link, --per-node and --node-link out.\n"
    ),
    "plan absent.json": "absent.json cannot be read.\n  No such file or directory\n  docs/profiles.md has",
    "plan broken.json": "broken.json is not JSON.\n  Expecting ',' delimiter: line 1 column",  # told from a plan
    "simulate small.json": (
        "the costs of communication over 4 ranks are unknown.\n  the profile 'small' has no costs\n"
        '  Give the network, such as --ranks 64 --link "100gbit,5us".\n'
    ),
    "simulate small.json --link 1gbit --sweep size": (
        "there is no --sweep 'size'.\n  undertow simulate\n  Choose one of: 'ranks', 'bandwidth'.\n"
    ),
    "simulate small.json --link none --sweep bandwidth": RATE,
    "simulate small.json --per-node 2": "--per-node has no effect without --link.\n  the network\n  Give --link too.\n",
    "simulate small.json --link 1gbit --skew 2": (
        "skew must be 0 to 0.2, got 2.0.\n  conditions of a simulated step\n"
        "  skew and contention are shares, 0.1 is 10 %; the others are microseconds.\n"
    ),
    "simulate measured.json --strategy hybrid": (
        f"the costs of strategy 'hybrid' over 4 ranks are unknown.\n  measured: 'ddp' over 4 ranks\n{NODES}"
    ),
    "simulate small.json --link 1gbit --per-node 3": "4 ranks cannot be on nodes of 3 ranks each.\n",
    # Places where no picture can be.
    "simulate small.json --link 1gbit --out file": f"nothing can be written to 'file': File exists.\n{ELSEWHERE}",
    "simulate small.json --link 1gbit --out full": f"nothing can be written to 'full/simulate.png': Is a directory.\n{ELSEWHERE}",
    "simulate small.json --ranks 0": (
        "a step has one rank or more, got --ranks 0.\n  undertow simulate\n  Give one or more, or leave it out.\n"
    ),
}


@pytest.mark.parametrize("line", REFUSALS)
def test_what_a_command_cannot_do_is_refused(line: str, undertow: Undertow) -> None:
    Path("file").write_text("kept")
    Path("full", "simulate.png").mkdir(parents=True)
    Path("broken.json").write_text('{"undertow_profile": 1, "forward_us": 10')
    code, printed, error = undertow(line)
    prints_first = any(option in line for option in ("--sweep bandwidth", "--out full"))
    assert (code, printed, error.startswith(f"Error: {REFUSALS[line]}")) == (2, printed if prints_first else "", True)


PNG_HEAD = b"\x89PNG"
PLAIN = "--skew 0 --contention 0 --launch-us 0 --copy-us-per-mb 0"
SIMULATED = """\
small, ddp: 4 parameters, 37.8 MB, 46.0 ms of computing per step
Network: 8gbit,10us, 4 ranks
┏━━━━━━━━━━━━━━━┳━━━━━┳━━━━━┳━━━━━━━━━━┳━━━━━━━┳━━━━┳━━━━━┳━━━━━━┓
┃               ┃buck-┃ step┃   p10-p90┃exposed┃hid-┃x the┃ effi-┃
┃gradients sent ┃  ets┃   ms┃        ms┃     ms┃ den┃limit┃ciency┃
┡━━━━━━━━━━━━━━━╇━━━━━╇━━━━━╇━━━━━━━━━━╇━━━━━━━╇━━━━╇━━━━━╇━━━━━━┩
"""
SWEEP_TABLE = """\
By data-parallel size
┏━━━━━━━┳━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━━━━┓
┃ ranks ┃ gradients sent  ┃ step, ms ┃ exposed, ms ┃ hidden ┃ efficiency ┃
┡━━━━━━━╇━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━━━━┩
│     2 │ per parameter   │     65.6 │        19.6 │    51% │ 64% to 70% │
│       │ 25 MiB buckets  │     68.0 │        22.0 │    44% │ 62% to 70% │
│       │ 40 MB buckets   │     85.5 │        39.5 │     0% │ 49% to 61% │
│       │ planned buckets │     65.6 │        19.6 │    51% │ 64% to 70% │
└───────┴─────────────────┴──────────┴─────────────┴────────┴────────────┘
"""


def test_ways_to_send_gradients_are_compared(undertow: Undertow) -> None:
    code, printed, _ = undertow(f"simulate small.json --link 8gbit,10us --out out {PLAIN}", columns=80)
    assert (code, printed.startswith(SIMULATED)) == (0, True)
    # A byte takes 1.5 / 0.956 ns and a collective 6 hops of 10 us: from 15 + 10 ms on 0.07 for the bias, 26.38 for each large
    # weight and 6.64 for the stem are 84.47 one after another, and the update 85.5. One bucket leaves at 45: 45 + 59.30 + 1.
    assert [row[:3] for row in rows_of(printed)] == [
        ["per parameter", "4", "85.5"],
        ["25 MiB buckets", "3", "85.4"],
        ["40 MB buckets", "1", "105.3"],
        ["planned buckets", "2", "85.4"],
    ]
    assert Path("out/simulate.png").read_bytes().startswith(PNG_HEAD)


def test_a_sweep_says_of_every_method_what_is_exposed_and_hidden_in_80_columns(undertow: Undertow) -> None:
    _, printed, _ = undertow(f"simulate small.json --ranks 2 --link 8gbit,10us --sweep ranks {PLAIN}", columns=80)
    table = printed[printed.index("By ") :]
    assert "".join(f"{line.rstrip()}\n" for line in table.splitlines()) == SWEEP_TABLE


def test_fewer_ranks_than_a_node_has_are_on_one() -> None:
    costs = what_if(link="1gbit", per_node=8, node_link="80gbit,1us").network.costs
    assert costs.collective_us("all_reduce", 1e6) == pytest.approx(
        what_if(link="80gbit,1us").network.costs.collective_us("all_reduce", 1e6)
    )


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "expected"),
    [
        (64, None, [2, 4, 8, 16, 32, 64]),
        (24, 6, [2, 4, 6, 12, 24]),
        (16, 8, [2, 4, 8, 16]),
    ],
)
def test_ranks_are_swept_over_full_nodes(num_ranks: int, per_node: int | None, expected: list[int]) -> None:
    assert swept_ranks(num_ranks, per_node) == expected


def test_rates_are_swept_around_that_of_the_link() -> None:
    sweep = SWEEPS["bandwidth"](what_if(link="2.5gbit,20us"))
    assert ([*sweep.points], sweep.points["2.5"]) == (
        ["0.3125", "0.625", "1.25", "2.5", "5", "10", "20"],
        what_if(link="2.5gbit,20us").outcomes(),
    )


@pytest.mark.alone  # processor time, which other processes on the same core inflate
def test_the_time_to_compare_ways_grows_with_the_number_of_parameters() -> None:
    """10,000 parameters took 2.0 to 2.8 s, by the state of the machine; work that grows with the square takes 150 s."""

    def seconds(num: int) -> float:
        params = tuple(spec(f"p{i}", 1000) for i in range(num))
        profile = replace(SMALL, params=params, ready_us=tuple(3.0 * (num - i) for i in range(num)))
        start = time.process_time()
        assert len(what_if(profile).outcomes()) == 4
        return time.process_time() - start

    few, many = seconds(2_500), seconds(10_000)
    assert many < 8 * few  # linear work: 4 times; work that grows with the square: 16 times


def test_plan_and_simulate_given_the_same_words_answer_the_same(undertow: Undertow) -> None:
    words = "small.json --ranks 8 --link 25Gb/s,5us --strategy zero1 --skew 0.01 --json"
    planned, simulated = (json.loads(undertow(f"{command} {words}").out) for command in ("plan", "simulate"))
    assert planned["network"] == simulated["network"] == "25Gb/s,5us, 8 ranks"
    (plan,), optimal = planned["outcomes"]["8"], simulated["outcomes"]["8"][-1]
    assert {**plan, "gradients_sent": PLANNED} == optimal
    assert not Path("out").exists()  # no picture


def test_without_overlap_a_step_takes_longer(undertow: Undertow) -> None:
    steps = [
        json.loads(undertow(f"simulate small.json --link 10gbit --json {option}").out)["outcomes"]["4"][0]["step_ms"]
        for option in ("", "--no-overlap")
    ]
    assert steps[0] < steps[1]


def test_assumptions_are_printed(undertow: Undertow) -> None:
    text = Path("small.json").read_text().replace('"forward_us": 15000,', "")
    Path("guessed.json").write_text(text)
    printed = undertow("simulate guessed.json --link 10gbit --skew 0").out
    assert "Assumed, not measured: contention" in printed
    assert "skew" not in printed
    assert "Warning: the share of forward is a guess" in printed


@pytest.mark.parametrize(("points", "link", "warns"), [((), "", True), (((1e7, 1.1e4),), "", False), ((), "--link 1gbit", False)])
def test_costs_of_one_size_are_named(points: tuple[tuple[float, float], ...], link: str, warns: bool, undertow: Undertow) -> None:
    replace(SMALL, curves={"all_reduce": CostCurve(points=((1e6, 2e3), *points))}).save("one.json")
    for command in ("plan", "simulate"):
        assert ("Warning: messages of one size were measured" in undertow(f"{command} one.json {link}").out) == warns


def test_links_are_listed(undertow: Undertow) -> None:
    assert all(name in undertow("links").out for name in LINKS)


TABLES = [
    "plan",
    "plan small.json --link 1gbit --strategy hybrid --per-node 2",
    "simulate small.json --link 1gbit",
    "simulate small.json --link 10gbit --sweep ranks",
    "env",
]


@pytest.mark.parametrize("line", TABLES)
def test_a_table_fits_into_80_columns(line: str, undertow: Undertow) -> None:
    code, printed, _ = undertow(line, columns=80)
    wide = [text for text in printed.splitlines() if len(text) > 80 and text[0] in "┏┃┡│├└ "]
    assert (code, wide, "…" in printed) == (0, [], False)


COMMANDS = ["", "demo", "report", "plan", "simulate", "env", "links", "trace", "run"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_80_columns(command: str, undertow: Undertow) -> None:
    code, printed, _ = undertow(f"{command} --help", columns=80)
    assert (code, max(map(len, printed.splitlines())) <= 80, "…" in printed) == (0, True, False)


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "undertow", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"undertow {library.__version__}\n")


FACTS = ["undertow", "python", "packages", "torch", "machine", "interfaces", "variables"]


def test_the_environment_has_what_a_bug_report_needs_and_no_secrets(undertow: Undertow, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("UNDERTOW_", "NCCL_"))]:
        monkeypatch.delenv(name)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "UNDERTOW_RECORD", "HF_TOKEN", "MY_NCCL_DEBUG", "nccl_x"):
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("UNDERTOW_PLAN", "x" * 1000)
    facts = json.loads(undertow("env --json").out)
    assert list(facts) == FACTS
    assert (facts["undertow"]["version"], facts["python"]["version"]) == (library.__version__, platform.python_version())
    assert facts["packages"]["torch"] == metadata.version("torch")
    assert facts["torch"]["gloo"] is torch.distributed.is_gloo_available()
    assert facts["machine"]["cores"] >= facts["machine"]["usable cores"] >= 1
    assert float(facts["machine"]["memory"].removesuffix(" GB")) > 0
    assert set(facts["interfaces"].values()) <= {"up", "down", "unknown", "dormant", "lowerlayerdown", "notpresent", "testing"}
    assert ("lo" in facts["interfaces"]) == Path("/sys/class/net/lo").exists()
    given = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "UNDERTOW_RECORD")
    values = {name: value for name, value in facts["variables"].items() if name in given}
    assert values == {name: f"value of {name}" for name in given}
    assert facts["variables"]["UNDERTOW_PLAN"] == "x" * 200 + "..."
    told = undertow("env").out
    assert "value of NCCL_DEBUG" in told
    for text in (json.dumps(facts), told):
        assert "value of HF_TOKEN" not in text
        assert "MY_NCCL" not in text
        assert "nccl_x" not in text


def test_the_environment_is_shown_if_torch_cannot_be_imported(undertow: Undertow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, printed, _ = undertow("env --json")
    assert code == 0
    (reason,) = json.loads(printed)["torch"].values()
    assert reason.startswith("ModuleNotFoundError: import of torch halted")


def test_the_buckets_of_a_profile_are_a_row() -> None:
    measured = replace(SMALL, groups=((3, 2), (1, 0)))
    assert [it.num_buckets for it in what_if(measured).outcomes() if it.method == OWN] == [2]
    assert OWN not in [it.method for it in what_if(measured, "zero1").outcomes()]


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="a model without parameters communicates nothing"):
        WhatIf.of(replace(SMALL, params=(), ready_us=()), None, None, NetworkOptions(link="1gbit"), Conditions())


def test_no_character_ends_a_command_whatever_the_encoding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["undertow", "--version"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit):
        main()
    print("слой…", flush=True)


@pytest.mark.parametrize("profile", [SMALL, replace(MEASURED, spread=0.02, groups=((3, 2), (1, 0)))])
def test_a_step_has_a_band_and_no_step_is_all_efficient_for_sure(profile: Profile) -> None:
    for it in what_if(profile, link="none").outcomes():
        assert it.limit_us <= it.band_us[0] <= it.step_us < it.band_us[1]
        assert it.efficiency_band[0] < it.efficiency_band[1] <= 1


def test_a_band_is_narrow_only_for_the_network_on_which_it_was_measured() -> None:
    measured = replace(MEASURED, spread=0.001, groups=((3, 2), (1, 0)))

    def own(profile: Profile, link: str | None = None) -> Outcome:
        return WhatIf.of(profile, None, None, NetworkOptions(link=link), Conditions()).outcomes()[0]

    def width(of: Outcome) -> float:
        return of.band_us[1] / of.step_us - 1

    assert width(own(measured)) < 0.05 < width(own(measured, "10gbit"))
    slower = replace(measured, step_us=1.2 * own(measured).step_us)
    assert width(own(slower)) == pytest.approx(1.2816 * 0.2, rel=1e-3)  # p90 of an error as large as that of its own step
