"""Systems in turn: which ones, what counts of their steps, the tables; runs that take a moment, with root over shaped links."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks import fidelity, figures
from benchmarks.links import LOOPBACK, PREFIX, sent_bytes
from benchmarks.ranks import run_ranks
from benchmarks.shaped import __main__ as command
from benchmarks.shaped import part
from benchmarks.shaped.contenders import CONTENDERS, OUTER, Contender, chosen
from benchmarks.shaped.environments import peers, python_of, why_absent
from benchmarks.shaped.rounds import Course, Timed, run
from benchmarks.shaped.session import HERE

pytestmark = pytest.mark.bench


def timed(name: str, *rounds: Sequence[Sequence[float]]) -> Timed:
    return Timed(contender=CONTENDERS[name], rounds_ms=[list(map(list, ranks)) for ranks in rounds], cpu_ms=[1.0] * len(rounds))


def course(contenders: Sequence[Contender], *, link: str, workload: str = "replay@0.01") -> Course:
    return Course(
        workload=workload,
        link=link,
        num_ranks=2,
        contenders=contenders,
        num_rounds=2,
        num_steps=3,
        sources={"": HERE},
    )


def soon(*names: str) -> list[Contender]:
    """The contenders, which settle within few steps."""
    return [replace(each, most_settling=5) for each in chosen(",".join(names), {})]


def bad(how: str, **changes: object) -> Contender:
    contender = Contender(name=how, title=how, module="tests.bench.bad_systems", options={"how": how})
    return replace(contender, **changes)


def test_a_step_is_as_long_as_on_its_slowest_rank_and_the_median_round_counts() -> None:
    found = timed("ours", ([1, 2, 9], [3, 1, 1]), ([7, 7, 7], [6, 6, 6]), ([5, 5, 5], [0, 0, 0]))
    assert (found.of_rounds_ms, found.step_ms) == ([3, 7, 5], 5)


def test_steps_with_an_exchange_now_and_then_count_by_their_mean() -> None:
    assert timed(OUTER, ([1, 1, 10], [2, 2, 2])).step_ms == 4


def test_the_table_has_ratios_to_the_first_system_that_was_measured() -> None:
    failed = timed("bare")
    failed.error = "rank 1 has ended"
    one = timed("ours", ([100.0], [90.0]), ([110.0], [90.0]))
    other = timed("ddp", ([50.0], [40.0]), ([60.0], [40.0]))
    lines = [line.split() for line in command.table([failed, one, other]).splitlines()[1:]]
    assert lines == [
        ["bare", "failed"],
        ["ours", "105.0", *["100.0", "to", "110.0"], "1.0", "1.000", *["1.000", "to", "1.000"]],
        ["ddp", "55.0", *["50.0", "to", "60.0"], "1.0", "0.524", *["0.500", "to", "0.545"]],
    ]


def rows(workload: str = "gpt") -> list[dict[str, object]]:
    steps = {"ours": 120.0, "ours-untuned": 100.0, "ours-auto": 80.0, "ddp": 150.0, "ddp-1mb": 110.0, "ddp-4mb": 90.0}
    steps |= {"ddp-fp16": 70.0, "bare": 50.0}
    return part.rows_of(
        course((), workload=workload, link="1gbit"), [timed(name, ([step], [0.0])) for name, step in steps.items()]
    )


def test_the_best_bucket_size_is_a_row_and_single_sizes_are_in_no_table() -> None:
    (best,) = (row for row in rows() if row["system"] == "ddp-best")
    assert (best["variant"], best["step_ms"], best["title"]) == ("ddp-4mb", 90.0, "torch DDP, best of 2 bucket sizes")
    assert {row["source"] for row in rows()} == {"shaped"}
    assert part.table(rows())[:4] == [
        ["ms of a step", "GPT, 1 Gb/s"],
        ["compute alone", "50"],
        ["torch DDP, defaults", "150"],
        ["torch DDP, best of 2 bucket sizes", "90"],
    ]


def test_the_first_row_of_the_readme_is_the_changed_import_alone_whatever_it_says() -> None:
    _, *lines = figures._readme(rows("replay"))
    assert lines == [
        ["24 timed layers, 1 Gb/s", "the import alone", "150", "90 (bucket size)", "120", "1.33"],
        ["24 timed layers, 1 Gb/s", '`SyncConfig(wire="auto")`', "150", "70 (fp16 hook)", "80", "1.14"],
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    {
        ("--workload", "gtp"): "there is no workload 'gtp'. Did you mean 'gpt'?",
        ("--workload", "replay@0"): "workload 'replay@0': a scale is a positive number, as in 'replay@0.5'.",
        ("--workload", "gpt@2"): "workload 'gpt@2': gpt computes and has one size.",
        ("--systems", "ours,fdsp2"): "there is no system 'fdsp2'. Did you mean 'fsdp2'?",
        ("--systems", "old:ours"): "there is no tree 'old'.",
    }.items(),
    ids=lambda it: ",".join(it) if isinstance(it, tuple) else "",
)
def test_a_name_that_does_not_exist_is_an_error(
    arguments: tuple[str, str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"benchmarks shaped: {error}")


# Runs on this machine's loopback.

# Of systems that differ in settings of ours only, one with each kind of setting.
RIGHT = (
    *("bare", "ddp", "ddp-fp16", "ddp-powersgd", "averager", "torch-zero", "fsdp2"),
    *("ours", "ours-auto", "ours-zero1-int8", OUTER),
)
FAILING = {
    "forgets to average": "trains wrongly: blocks.0.params.0, blocks.0.params.1, blocks.1.params.0 and 48 in all are not",
    "dies": "dies: rank 1 was killed by SIGKILL. The end of its log:\nthe last line of rank 1",
    "cannot be imported": "ModuleNotFoundError: No module named 'no_such_package'",
    "has no environment": "no virtual environment .venv-peers/never-made; make bench-peers makes it",
}


@pytest.mark.usefixtures("forked")
def test_every_system_trains_right_and_those_that_fail_are_lost_alone() -> None:
    changes = {"cannot be imported": {"module": "no_such_package"}, "has no environment": {"environment": "never-made"}}
    failing = [bad(how, **changes.get(how, {})) for how in FAILING]
    once = replace(course([*soon(*RIGHT), *failing], link=LOOPBACK), num_rounds=1)
    found = {each.contender.name: each for each in run(once, lambda _line: None)}
    assert {name: found[name].error for name in RIGHT} == dict.fromkeys(RIGHT)
    for name, error in FAILING.items():
        assert error in (found[name].error or ""), name
    # Steps by rank; of systems that exchange now and then, a whole period.
    of_periods = {name: 30 if CONTENDERS[name].period > 1 else 3 for name in RIGHT}
    numbers = {name: [len(rank) for ranks in found[name].rounds_ms for rank in ranks] for name in RIGHT}
    assert numbers == {name: [number] * 2 for name, number in of_periods.items()}


@pytest.mark.parametrize("environment", peers())
def test_every_system_of_a_peer_trains_right(environment: str) -> None:
    if python_of(environment) is None:
        pytest.skip(why_absent(environment))
    names = [name for name, each in CONTENDERS.items() if each.environment == environment and not name.endswith("mb")]
    found = run(course(soon(*names), link=LOOPBACK), lambda _line: None)
    assert {each.contender.name: each.error for each in found} == dict.fromkeys(names)


@pytest.mark.usefixtures("forked")
def test_the_simulator_is_compared_with_a_run_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "steps.json"
    monkeypatch.setattr(command, "chosen", lambda names, _trees: [replace(it, most_settling=30) for it in chosen(names, {})])
    asked = ["--workload", "replay@0.05", "--link", LOOPBACK, "--systems", "ours-untuned,ddp-4mb", "--rounds", "1"]
    assert command.main([*asked, "--steps", "10", "--json", str(written)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["system", "ours-untuned", "ddp-4mb"]
    assert fidelity.main([str(written)]) in (0, 1)
    assert "From their own profile: of 1 predictions" in capsys.readouterr().out


# Over networks of namespaces.


@pytest.mark.root
@pytest.mark.usefixtures("needs_namespaces", "forked")
def test_systems_take_turns_over_a_shaped_link() -> None:
    told: list[str] = []
    one, other = run(course(soon("ours-untuned", "ddp-4mb"), link="1gbit"), told.append)
    assert [[len(rank) for ranks in each.rounds_ms for rank in ranks] for each in (one, other)] == [[3, 3, 3, 3]] * 2
    assert one.told["explain"]
    turns = [line.split(": ")[1] for line in told if " round " in line]
    assert turns == ["ours-untuned", "ddp-4mb", "ddp-4mb", "ours-untuned"]
    assert list(Path("/run/netns").glob(f"{PREFIX}{os.getpid()}-*")) == []


def _sent_by_an_all_reduce(_rank: int) -> float:
    numel, number, before = 1_000_000, 10, sent_bytes()
    for _ in range(number):
        dist.all_reduce(torch.ones(numel))
    dist.barrier()
    return (sent_bytes() - before) / number / (4 * numel)


@pytest.mark.root
@pytest.mark.usefixtures("needs_namespaces", "forked")
def test_a_shaped_link_counts_the_bytes_of_each_rank() -> None:
    """An all-reduce between two ranks sends the tensor once each; headers and acknowledgements come on top."""
    assert 1.0 <= run_ranks(_sent_by_an_all_reduce, 2, link="1gbit") <= 1.1
