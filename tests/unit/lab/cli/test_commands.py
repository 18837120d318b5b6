"""The commands: their help and exit codes, what they show, what they refuse, and the questions that they ask the simulator."""

import ast
import importlib.util
import inspect
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import undertow as library
from support.cli import EXAMPLE, MEASURED, MIB, SMALL, Undertow, rows_of, what_if
from support.levels import some
from support.project import DOCS, ROOT, SOURCES, name_of
from support.strategies import spec
from undertow import errors
from undertow.config import SyncConfig
from undertow.errors import ConfigError
from undertow.lab import demo
from undertow.lab.cli import main
from undertow.lab.cost import LINKS, CostCurve
from undertow.lab.demo import DemoSettings
from undertow.lab.profile import profile_from_file
from undertow.lab.report import timeline
from undertow.lab.report.comparison import compared
from undertow.lab.what_if import MEASURED as OWN
from undertow.lab.what_if import WhatIf
from undertow.plan import Plan, plan_in_order


@pytest.fixture
def draws() -> None:
    """A test that uses this draws what a command draws."""


@pytest.fixture(autouse=True)
def empty_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture would take most of a command's time."""
    if "draws" not in request.fixturenames:
        monkeypatch.setattr(timeline, "_timeline", lambda *_: Figure(figsize=(1, 1)))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    curve = MEASURED.curves["all_reduce"]
    for name, profile in {
        "small": SMALL,
        "sharded": replace(SMALL, strategy="zero1"),
        "measured": MEASURED,
        "skewed": replace(MEASURED, skew=0.157),
        "mesh": replace(MEASURED, strategy="hybrid", curves={"reduce_scatter": curve, "all_gather": curve}),
    }.items():
        profile.save(f"{name}.json")
    return tmp_path


@pytest.mark.parametrize("command", some(["plan", "simulate"], most=1))
def test_the_example_of_the_help_runs(command: str, undertow: Undertow) -> None:
    example = re.search(rf"Example: undertow ({command} .*)", undertow(f"{command} --help").out)
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
    assert (undertow("demo --nproc 3 --link 5gbit --steps 4 --out b --strategy zero1 --outer 30").code, seen) == (
        1,
        [DemoSettings(num_ranks=3, link="5gbit", num_steps=4, out=Path("b"), strategy="zero1", outer=30)],
    )


def test_a_missing_typer_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["undertow", "links"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == (
        'The command needs typer, which is not installed.\n  Install it with: pip install "undertow[cli]"'
    )


def test_a_plan_is_written_and_settings_read_it(undertow: Undertow, folder: Path) -> None:
    profile = ROOT / "examples" / "profiles" / "gpt2.json"
    code, text, _ = undertow(f"plan {profile} --link 25gbit -o plan.json")
    assert (code, text.splitlines()[-1]) == (0, "The plan is in plan.json: SyncConfig(plan='plan.json') trains with it.")
    assert library.SyncConfig(plan=folder / "plan.json").plan == undertow(f"plan {profile} --link 25gbit --json").out
    code, _, error = undertow(f"plan {profile} --link 25gbit -o plan.json.gz")
    assert (code, error.splitlines()[0]) == (2, "Error: a plan is plain text, and 'plan.json.gz' would be compressed.")


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_folder_that_does_not_exist_is_named(command: str, undertow: Undertow) -> None:
    assert undertow(f"{command} nowhere") == (
        2,
        "",
        f"Error: the folder 'nowhere' does not exist.\n  undertow {command} nowhere\n"
        "  Give the folder that the run wrote its files to.\n",
    )


def test_a_page_is_printed_without_typer(undertow: Undertow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    wanted = (ROOT / "docs" / "reliability.md").read_text()
    assert undertow("docs reliability") == undertow("docs docs/reliability.md") == (0, wanted, "")


def test_all_pages_are_listed_with_their_titles(undertow: Undertow) -> None:
    code, listed, _ = undertow("docs")
    rows = dict(re.split(" {2,}", line, maxsplit=1) for line in listed.splitlines())
    assert (code, rows["reliability"], rows["migration/torch-ddp"]) == (0, "Faults and restart", "From torch DDP")
    assert set(rows) == {name_of(path)[5:-3] for path in DOCS}


def test_a_page_of_the_reference_has_signatures_and_docstrings(undertow: Undertow) -> None:
    """On the site they are in the place of the page's directives."""
    code, page, _ = undertow("docs reference/settings")
    assert code == 0
    assert "## undertow.Outer\n\n    (*, every: int" in page
    assert "stall_timeout_s: float = 300.0" in page
    assert inspect.getdoc(errors.Desync) in page
    assert not any(line.startswith(":::") for line in page.splitlines())
    assert "### undertow.GradientSync.report\n\n    (self) -> " in undertow("docs reference/training").out


def test_a_page_that_does_not_exist_is_refused(undertow: Undertow) -> None:
    assert undertow("docs reliabilty") == (2, "", "Error: there is no page 'reliabilty'.\n  Did you mean 'reliability'?\n")
    assert undertow("docs x") == (2, "", "Error: there is no page 'x'.\n  `undertow docs` lists all pages.\n")


def test_every_page_that_a_text_of_the_library_names_exists(undertow: Undertow) -> None:
    """A pip user has no checkout: no text for users names a file of one."""
    sources = [text for path in SOURCES if "docs" in (text := path.read_text())]  # to parse all takes seconds
    texts = [node.value for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    named = {name for text in texts if isinstance(text, str) for name in re.findall(r"undertow docs ([a-z][\w/-]+)", text)}
    assert named >= {"profiles", "fidelity", "slow-networks"}
    named |= {getattr(errors, name).page for name in errors.__all__}
    assert [name for name in sorted(named) if undertow(f"docs {name}").code] == []


def test_a_file_of_an_example_s_name_wins(undertow: Undertow) -> None:
    missing = undertow("plan gpt3 --link 1gbit")
    assert (missing.code, "gpt3 cannot be read" in missing.err) == (2, True)
    assert "GPT-2" in undertow("simulate gpt2 --link 1gbit --json").out
    SMALL.save("gpt2")
    assert '"model": "small"' in undertow("simulate gpt2 --link 1gbit --json").out


@pytest.mark.parametrize(("options", "golden"), [("", "data_parallel_3_buckets"), ("--strategy zero1", "zero1_3_buckets")])
def test_options_choose_the_schedule(options: str, golden: str, undertow: Undertow) -> None:
    equal = replace(SMALL, params=tuple(spec(name, MIB) for name in "abc"), ready_us=(3.0, 2.0, 1.0))
    equal.save("equal.json")
    code, printed, _ = undertow(f"plan equal.json --link 1gbit --bucket-cap-mb 4 --schedule {options}")
    assert (code, printed.endswith(f"\n\n{(ROOT / 'tests' / 'golden' / f'{golden}.txt').read_text()}")) == (0, True)


def test_a_plan_is_printed_as_json_that_settings_take(undertow: Undertow) -> None:
    printed = undertow("plan small.json --link 10gbit,20us --json").out
    assert Plan.from_json(printed) == what_if().planned


def test_buckets_of_a_given_size_on_a_mesh_are_those_that_training_begins_with(undertow: Undertow) -> None:
    whole = tuple(replace(spec(name, MIB // 8), is_whole=True) for name in "abcd")
    replace(SMALL, params=whole, ready_us=(4.0, 3.0, 2.0, 1.0)).save("matrices.json")
    printed = undertow(
        "plan matrices.json --strategy hybrid --link 1gbit --per-node 2 --node-link 100gbit --bucket-cap-mb 1 --json"
    ).out
    config = SyncConfig(bucket_cap_mb=1)
    trained = plan_in_order(whole, (3, 2, 1, 0), config, num_ranks=4, num_shards=2, has_shards=True)
    assert Plan.from_json(printed) == trained


# What a command shows, and what it does not.
SHOWN = {
    # A profile has a strategy; a size overrides its plan.
    "plan sharded.json --link 10gbit": ("zero1, ranks: 4, ", "Error"),
    "plan sharded.json --link 10gbit --strategy ddp": ("ddp, ranks: 4, ", "Error"),
    "plan small.json --link 10gbit --bucket-cap-mb 17": ("buckets: 3\n", "The fastest plans"),
    "simulate small.json --link 8gbit,10us --skew 0.05": ("late", "The profile's skew"),
    "simulate skewed.json": (
        "The skew is the profile's: the computing times of its ranks had a standard deviation of 15.7%. If something "
        "disturbed a rank in that run, give another, such as --skew 0.02.\n",
        "Error",
    ),
    "simulate skewed.json --skew 0.02": ("The profile's skew of 15.7% is not used: --skew 0.02 is given.\n", "Error"),
    "simulate skewed.json --ranks 1 --link 1gbit": ("skew 0.157", "The profile's skew"),
    "simulate measured.json --skew 0.06": ("skew 0.06", "The profile's skew"),
    "simulate measured.json": ("Network: as measured over 4 ranks\n", "Error"),
    "simulate small.json --link 10gbit --skew 0": (
        "Conditions (given, measured or assumed): skew 0, contention 0.12, launch_us 90, copy_us_per_mb 25\n",
        "Error",
    ),
    # What was measured on a mesh is of that mesh.
    "simulate mesh.json": ("Network: as measured over 4 ranks", "Error"),
    "simulate mesh.json --strategy zero1 --link 1gbit": ("Network: 1gbit, 4 ranks\n", "Error"),
}


@pytest.mark.parametrize("line", some(SHOWN, most=4))
def test_a_command_says_which_network_strategy_and_skew_it_has_predicted_with(line: str, undertow: Undertow) -> None:
    code, printed, _ = undertow(line)
    shown, hidden = SHOWN[line]
    assert (code, shown in printed, hidden in printed) == (0, True, False)


def test_the_plan_of_a_profile_is_the_fastest_that_the_model_predicts_and_the_others_are_listed(undertow: Undertow) -> None:
    _, printed, _ = undertow("plan small.json --link 10gbit,20us")
    choice = what_if().choice
    assert printed.splitlines()[0] == f"ddp, ranks: 4, parameters: 4, MB: 37.75, buckets: {len(choice.best.plan.buckets)}"
    assert "Network: 10gbit,20us, 4 ranks\n" in printed
    rows = re.findall(r"  (\S+) ms: (\d+) buckets?", printed)
    assert rows == [(f"{it.step_us / 1e3:.2f}", str(len(it.plan.buckets))) for it in choice.candidates]
    (present,) = (line for line in printed.splitlines() if line.endswith("(this plan)"))
    assert f" {choice.best.step_us / 1e3:.2f} ms: " in present


NODES = '  Give the network, such as --ranks 64 --per-node 8 --link "100gbit,5us".\n'
REFUSALS = {
    "plan small.json --strategy zero3": (
        "strategy 'zero3' does not exist.\n  strategy\n  Choose one of: 'ddp', 'zero1', 'zero2', 'hybrid'.\n"
    ),
    "plan absent.json": "absent.json cannot be read.\n  No such file or directory\n  Give a file that save_profile() has ",
    "plan broken.json": "broken.json is not JSON.\n  Expecting ',' delimiter: line 1 column",  # told from a plan
    "simulate small.json": (
        f"the costs of 'ddp' over 4 ranks are unknown.\n  the profile 'small' has costs of nothing, 'ddp' over 4 ranks\n{NODES}"
    ),
    "simulate small.json --per-node 2": "--per-node has no effect without --link.\n  the network\n  Give --link too.\n",
    "simulate small.json --link 1gbit --node-link 1gbit": (
        "--node-link has no effect without --per-node.\n  the network\n  Give --per-node too.\n"
    ),
    "simulate measured.json --strategy hybrid --link 1gbit": (
        "the strategy 'hybrid' needs a network of nodes.\n  --link 1gbit\n  Give --per-node too.\n"
    ),
    "simulate measured.json --strategy hybrid": (
        "the costs of 'hybrid' over 4 ranks are unknown.\n  the profile 'small' has costs of all_reduce, 'ddp' over 4 ranks\n"
    ),
    "simulate small.json --link 1gbit --param-wire int8": (
        "--param-wire has no effect without shards.\n  --strategy ddp\n  Give --strategy zero1, zero2 or hybrid too.\n"
    ),
    "simulate small.json --sweep bandwidth --wire int8": (
        "--wire and --param-wire have no effect with --sweep.\n  undertow simulate\n"
        "  Leave them out: a sweep shows full width, bfloat16 and int8.\n"
    ),
    "simulate small.json --optimizer mun": (
        "optimizer 'mun' cannot be simulated.\n  --optimizer\n  Did you mean 'muon'? Choose one of: 'muon', 'adamw', 'sgd'.\n"
    ),
    "simulate small.json --outer 3 --optimizer adamw": (
        "--optimizer has no effect here: each rank updates everything.\n  undertow simulate --outer\n  Leave it out.\n"
    ),
    "simulate small.json --delay 2": (
        "--delay and --fragments have no effect without --outer.\n  undertow simulate\n"
        "  Give --outer too, the steps between two exchanges.\n"
    ),
    "simulate small.json --outer 3 --fragments 5 --link 1gbit": "--fragments is 5, and the model has 3 layers.\n",
    "simulate small.json --outer 3 --ranks 1": "--outer predicts replicas of one rank each, and needs two or more.\n",
    "simulate small.json --sweep bandwidth --ranks 1": (
        "--sweep has no effect on a single rank: it sends nothing.\n  undertow simulate --sweep bandwidth\n"
        "  Give --ranks 2 or more.\n"
    ),
    "simulate small.json --link 1gbit --contention 1": "contention must be 0 to 0.99, got 1.0.\n",
    # Places where no picture can be.
    "simulate small.json --link 1gbit --out file": "'file/simulate.png' cannot be written: File exists.\n",
    "simulate small.json --link 1gbit --out file/below": "'file/below/simulate.png' cannot be written: Not a directory.\n",
    "simulate small.json --link 1gbit --out full": "'full/simulate.png' cannot be written: Is a directory.\n",
}


@pytest.mark.parametrize("line", REFUSALS)
def test_what_a_command_cannot_do_is_refused(line: str, undertow: Undertow) -> None:
    Path("file").write_text("kept")
    Path("full", "simulate.png").mkdir(parents=True)
    Path("broken.json").write_text('{"undertow_profile": 1, "forward_us": 10')
    code, printed, error = undertow(line)
    prints_first = "--out f" in line
    assert (code, printed, error.startswith(f"Error: {REFUSALS[line]}")) == (2, printed if prints_first else "", True)


PNG_HEAD = b"\x89PNG"
PLAIN = "--skew 0 --contention 0 --launch-us 0 --copy-us-per-mb 0"
SIMULATED = """\
small, ddp: 4 parameters, 37.8 MB, 46.0 ms of computing per step
Network: 8gbit,10us, 4 ranks
"""


@pytest.mark.usefixtures("draws")
def test_ways_to_send_gradients_are_compared(undertow: Undertow) -> None:
    code, printed, _ = undertow(f"simulate small.json --link 8gbit,10us --out out {PLAIN}", columns=80)
    assert (code, printed.startswith(SIMULATED)) == (0, True)
    # A byte takes 1.5 / 0.956 ns and a collective 6 hops of 10 us: from 15 + 10 ms on 0.07 for the bias, 26.38 for each large
    # weight and 6.64 for the stem are 84.47 one after another, and the update 85.5.
    assert [row[:4] for row in rows_of(printed)] == [
        ["per parameter", "4", "37.8", "85.5"],
        ["25 MiB buckets", "3", "37.8", "85.4"],
        ["planned buckets", "2", "37.8", "85.4"],
    ]
    assert Path("out/simulate.png").read_bytes().startswith(PNG_HEAD)


@pytest.mark.parametrize(
    "options", some(["skewed.json", "small.json --link 1gbit --skew 0.1", "sharded.json --link 1gbit --skew 0.1"], most=1)
)
def test_the_parts_of_a_step_add_up_on_one_rank(options: str, undertow: Undertow) -> None:
    for row in rows_of(undertow(f"simulate {options}").out):
        step_ms, *parts_ms = map(float, row[3:7])
        assert step_ms == pytest.approx(sum(parts_ms), abs=0.21)  # each of four is rounded to a tenth
        assert min(parts_ms) > 0
    for step in json.loads(undertow(f"simulate {options} --json").out)["steps"]:
        assert step["step_ms"] == pytest.approx(step["computing_ms"] + step["network_ms"] + step["late_rank_ms"])
        assert step["exposed_ms"] == pytest.approx(step["network_ms"] + step["late_rank_ms"])


def test_a_step_on_nodes_takes_what_its_schedule_has_on_each_axis(undertow: Undertow) -> None:
    replace(SMALL, strategy="hybrid", groups=((3, 2, 1, 0),)).save("whole.json")
    _, printed, _ = undertow(f"simulate whole.json --link 8gbit,10us --per-node 2 --node-link 8gbit,10us {PLAIN}")
    (step_ms,) = (float(row[3]) for row in rows_of(printed) if row[0] == OWN)
    # In one bucket: 37.75 MB at 1 / 0.956 ns a byte, of which a ring of two sends half, inside twice and across all of a shard
    # once; four hops.
    assert step_ms == pytest.approx(46 + 3 * 37.753 / 2 / 0.956 + 4 * 0.01, abs=0.051)


def test_a_single_rank_encodes_nothing() -> None:
    formats = [{"wire": wire, "param_wire": wire} for wire in ("none", "int8")]
    full, narrow = (compared(WhatIf.of(SMALL, num_ranks=1, link="1gbit", strategy="zero1", **each)) for each in formats)
    assert [step.record.step_us for step in narrow] == [step.record.step_us for step in full]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"num_ranks": 1}, "as measured over 1 rank"),
        ({"num_ranks": 1, "link": "1gbit"}, "1gbit, 1 rank"),
        (
            {"num_ranks": 4, "link": "1gbit", "per_node": 1, "node_link": "8gbit"},
            "1gbit between nodes of 1 rank, 8gbit inside; 4 ranks",
        ),
    ],
)
def test_the_network_of_one_rank_is_told(settings: dict[str, object], told: str) -> None:
    assert WhatIf.of(SMALL, **settings).network == told


def test_fewer_ranks_than_a_node_has_are_on_one() -> None:
    costs = what_if(link="1gbit", per_node=8, node_link="80gbit,1us").costs
    assert costs.collective_us("all_reduce", 1e6) == pytest.approx(
        what_if(link="80gbit,1us").costs.collective_us("all_reduce", 1e6)
    )


def test_without_overlap_a_step_takes_longer(undertow: Undertow) -> None:
    steps = [
        json.loads(undertow(f"simulate small.json --link 10gbit --json {option}").out)["steps"][0]["step_ms"]
        for option in ("", "--no-overlap")
    ]
    assert steps[0] < steps[1]


# 37.75 MB of fp32, with a bias of 1,000 elements: a quarter and a scale of 4 bytes for each 512, or half.
@pytest.mark.parametrize(
    ("wire", "sent"),
    [
        ("none", 9 * 4 * MIB + 4000),
        ("bf16", 9 * 2 * MIB + 2000),
        ("int8", 9 * (MIB + MIB // 128) + 1024 + 8),
        ("auto", 9 * (MIB + MIB // 128) + 1024 + 8),
    ],
)
def test_fewer_bytes_are_sent_in_a_format(wire: str, sent: int, undertow: Undertow) -> None:
    told = json.loads(undertow(f"simulate small.json --link 100mbit --json --wire {wire}").out)
    of_params = 1e6 * told["steps"][-1]["sent_mb"]
    assert of_params == pytest.approx(sent, abs=1000)  # with the trailer
    full = json.loads(undertow("simulate small.json --link 100mbit --json").out)
    times_ms = [run["steps"][-1]["step_ms"] for run in (told, full)]
    assert (times_ms[0] < times_ms[1]) == (wire != "none")


def test_gathers_are_narrow_too(undertow: Undertow) -> None:
    sent = [
        json.loads(undertow(f"simulate sharded.json --link 1gbit --json {options}").out)["steps"][-1]["sent_mb"]
        for options in ("", "--wire int8", "--param-wire int8", "--wire int8 --param-wire int8")
    ]
    assert sent == pytest.approx([75.5, 37.75 + 9.51, 37.75 + 9.51, 2 * 9.51], abs=0.02)


@pytest.mark.deep
def test_formats_are_those_of_the_profile_unless_others_are_given(undertow: Undertow) -> None:
    replace(MEASURED, wire="int8", groups=((3, 2, 1), (0,)), wires=("int8", None)).save("narrow.json")
    own, *_, planned = (row[2] for row in rows_of(undertow("simulate narrow.json").out))
    assert (own, planned) == ("12.7", "9.5")  # the first of two buckets, and all
    assert {row[2] for row in rows_of(undertow("simulate narrow.json --wire none").out)} == {"37.8"}


def test_a_plan_shows_the_format_of_each_bucket(undertow: Undertow) -> None:
    assert "sent, MB" not in undertow("plan small.json --link 100mbit").out
    printed = undertow("plan small.json --link 100mbit --wire auto").out
    assert all(row[-1].endswith(" int8") for row in rows_of(printed))
    assert re.search(r" ms: .*, all in int8 \(this plan\)\n", printed)
    sized = undertow("plan small.json --link 100mbit --wire int8 --bucket-cap-mb 17 --json").out
    assert Plan.from_json(sized).wires == ("int8",) * 3
    assert set(Plan.from_json(undertow("plan small.json --link 400gbit,1us --wire auto --json").out).wires) == {None}


def require_narrow(printed: str) -> None:
    wide = [text for text in printed.splitlines() if len(text) > 80 and text[0] in "┏┃┡│├└ "]
    assert (wide, "…" in printed) == ([], False)


@pytest.mark.deep
def test_a_sweep_shows_a_step_over_every_link_in_every_format(undertow: Undertow) -> None:
    code, printed, _ = undertow(f"simulate small.json --sweep bandwidth --link 8gbit,10us {PLAIN}", columns=80)
    require_narrow(printed)
    rows = rows_of(printed)
    assert (code, [row[0] for row in rows]) == (0, ["0.1", "0.2", "0.5", "1", "2", "5", "10", "20", "50", "100"])
    assert "Network: 0.1 to 100 Gb/s, 10us a message, 4 ranks\n" in printed
    full, half, quarter, alone = zip(*(map(float, row[1:]) for row in rows), strict=True)
    assert all(list(times) == sorted(times, reverse=True) for times in (full, half, quarter))
    assert full[0] > half[0] > quarter[0] > alone[0] == 46.0
    assert Path("out/sweep.png").read_bytes().startswith(PNG_HEAD)
    told = json.loads(undertow(f"simulate small.json --sweep bandwidth --link 8gbit,10us --json {PLAIN}").out)
    assert [round(link["step_ms"]["int8"], 1) for link in told["links"]] == list(quarter)
    assert (told["network"], told["compute_ms"]) == ("0.1 to 100 Gb/s, 10us a message, 4 ranks", 46.0)


def test_outer_synchronization_hides_what_the_link_carries_in_a_period(undertow: Undertow) -> None:
    told = json.loads(undertow("simulate small.json --sweep every --link 100mbit,1ms --json").out)
    rows = told["outer"]
    assert [row["every"] for row in rows] == [1, 3, 10, 30, 100, 300]
    assert all(earlier["step_ms"] >= later["step_ms"] for earlier, later in pairwise(rows))
    assert rows[0]["exposed_ms"] == pytest.approx(rows[0]["exchange_ms"])  # with every=1 nothing hides it
    assert (rows[-1]["exposed_ms"], rows[-1]["step_ms"]) == (0.0, rows[-1]["compute_ms"])
    fixed = json.loads(undertow("simulate small.json --outer 8 --delay 2 --fragments 2 --link 100mbit,1ms --json").out)["outer"][
        0
    ]
    assert (fixed["every"], fixed["fragments"], fixed["delay"]) == (8, 2, 2)
    assert rows_of(undertow("simulate small.json --outer 8 --delay 2 --fragments 2 --link 100mbit,1ms").out)[0][:3] == [
        "8",
        "2",
        "2",
    ]


@pytest.mark.parametrize("optimizer", some(["adamw", "sgd", "muon"], most=1))
def test_an_update_is_divided_by_the_work_of_ranks(optimizer: str, undertow: Undertow) -> None:
    found = json.loads(
        undertow(f"simulate {EXAMPLE} --ranks 8 --link 25gbit --strategy zero1 --optimizer {optimizer} --json").out
    )
    # Owners of GPT-2's matrices are balanced within a tenth; 48 are as good as equal for 8 ranks.
    assert (found["optimizer"], found["update_ms"]) == (optimizer, pytest.approx(3.484 / 8, rel=0.1))


def test_the_divided_update_is_printed(undertow: Undertow) -> None:
    replace(SMALL, update_us=2000.0).save("slow.json")
    _, printed, _ = undertow("simulate slow.json --link 1gbit --strategy zero1 --optimizer adamw --out out")
    assert "Update by adamw: 2.00 ms in the profile, 0.50 ms on the rank with the most work\n" in printed


def test_muon_has_whole_matrices_without_embeddings() -> None:
    found = WhatIf.of(profile_from_file(EXAMPLE), strategy="zero1", num_ranks=8, optimizer="muon")
    whole = [spec for spec in found.profile.params if spec.is_whole]
    assert len(whole) == 4 * 12  # four matrices in each of twelve layers
    assert WhatIf.of(found.profile, strategy="zero1", optimizer="muon").profile == found.profile
    for strategy, optimizer in (("ddp", "muon"), ("zero1", "adamw")):
        cut = WhatIf.of(found.profile, strategy=strategy, optimizer=optimizer).profile.params
        assert not any(spec.is_whole for spec in cut)


@pytest.mark.parametrize(
    ("points", "link", "warns"), some([((), "", True), (((1e7, 1.1e4),), "", False), ((), "--link 1gbit", False)], most=1)
)
def test_costs_of_one_size_are_named(points: tuple[tuple[float, float], ...], link: str, warns: bool, undertow: Undertow) -> None:
    replace(SMALL, curves={"all_reduce": CostCurve(points=((1e6, 2e3), *points))}).save("one.json")
    assert ("Warning: messages of one size were measured" in undertow(f"simulate one.json {link}").out) == warns


def test_links_are_listed(undertow: Undertow) -> None:
    assert all(name in undertow("links").out for name in LINKS)


TABLES = [
    "plan small.json --link 1gbit --strategy hybrid --per-node 2",
    "simulate small.json --link 1gbit",
    "simulate measured.json --wire int8",
    "plan sharded.json --link 1gbit --wire auto --param-wire int8",
]


@pytest.mark.parametrize("line", some(TABLES, most=1))
def test_a_table_fits_into_80_columns(line: str, undertow: Undertow) -> None:
    code, printed, _ = undertow(line, columns=80)
    assert code == 0
    require_narrow(printed)


COMMANDS = ["", "demo", "report", "plan", "simulate", "links", "trace", "run"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_80_columns(command: str, undertow: Undertow) -> None:
    code, printed, _ = undertow(f"{command} --help", columns=80)
    assert (code, max(map(len, printed.splitlines())) <= 80, "…" in printed) == (0, True, False)


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "undertow", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"undertow {library.__version__}\n")


def test_the_buckets_of_a_profile_are_a_row() -> None:
    measured = replace(SMALL, groups=((3, 2), (1, 0)))
    assert len(what_if(measured).plans()[OWN].buckets) == 2
    assert OWN not in what_if(measured, "zero1").plans()


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="a model without parameters communicates nothing"):
        WhatIf.of(replace(SMALL, params=(), ready_us=()))


def test_no_character_ends_a_command_whatever_the_encoding_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["undertow", "--version"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit):
        main()
    print("слой…", flush=True)
