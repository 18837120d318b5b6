"""Names that the command of the matrix knows, and the systems that run together."""

import subprocess
import sys

import pytest
import torch
from benchmarks.matrix import catalog
from benchmarks.matrix.cell import max_systems, runs_of
from benchmarks.matrix.profile import PROFILES, Layer, scaled
from benchmarks.matrix.run import main

from support.project import ROOT

LINKS = "links: 1gbit, 5gbit, none"
ANSWERS = {
    "--system torch-dpd": "there is no system 'torch-dpd'. Did you mean 'torch-ddp'?",
    "--workload replya": "there is no workload 'replya'. Did you mean 'replay'?",
    "--workload xyz": "there is no workload 'xyz'.\n  workloads: replay, gpt,",
    "--workload gpt@2": "workload 'gpt@2': gpt computes for real and has one size.",
    "--workload gpt2@x": "workload 'gpt2@x': a scale is a positive number, as in 'gpt2@0.5'.",
    "--device tpu": "there is no device 'tpu'. Did you mean 'cpu'?\n  devices: cpu, cuda",
    "--link infiniband": f"there is no link 'infiniband'.\n  {LINKS}",
    "--link 1gbt": f"there is no link '1gbt'. Did you mean '1gbit'?\n  {LINKS}",
    **({} if torch.cuda.is_available() else {"--device cuda": "there is no CUDA device here"}),
}


@pytest.mark.parametrize("line", ANSWERS)
def test_the_command_names_what_exists(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert f"benchmarks matrix: {ANSWERS[line]}" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["--ranks 1", "--ranks x", "--steps 0"])
def test_impossible_numbers_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert line.split()[0] in capsys.readouterr().err


def test_a_workload_may_be_asked_for_at_another_scale() -> None:
    assert catalog.workload_from_text("gpt2").label == "gpt2@0.125"
    full = catalog.workload_from_text("gpt2@1")
    assert (full.label, full.gradient_bytes()) == ("gpt2@1", 4 * 124_438_272)


def test_every_profile_has_the_size_that_its_model_has() -> None:
    assert {name: (make().numel, make().num_params) for name, make in PROFILES.items()} == {
        "replay": (12_000_000, 48),
        "gpt2": (124_438_272, 146),
        "resnet50": (25_557_032, 161),
        "bert_large": (334_090_240, 290),
        "moe": (12_845_056, 3_104),
    }


def test_the_profile_of_resnet50_is_that_of_its_source() -> None:
    profile = PROFILES["resnet50"]()
    assert profile.numel * 4 == 102_228_128
    assert sum(layer.backward_us for layer in profile.layers) == pytest.approx(64_800, abs=100)
    assert profile.compute_ms == pytest.approx(128.1, abs=0.1)
    # In the order of the forward: the classifier comes last.
    assert profile.layers[-1].numels == (1_000,)
    assert "netx-repo/training-bottleneck" in profile.source


def test_scaling_keeps_the_relation_of_wire_and_compute() -> None:
    full, half = PROFILES["bert_large"](), scaled(PROFILES["bert_large"](), 0.5)
    assert (half.numel / full.numel, half.compute_ms / full.compute_ms) == pytest.approx((0.5, 0.5))
    assert half.num_params == full.num_params


def test_a_layer_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="a layer needs parameters"):
        Layer(numels=(), forward_us=1, backward_us=1)


def test_a_sweep_is_all_of_its_variants() -> None:
    (run,) = runs_of([catalog.SYSTEMS["torch-ddp-best"]], max_systems=10)
    assert [job.options for job in run.systems] == [{}, *({"bucket_cap_mb": size} for size in catalog.SWEEP_MB)]


PEER = catalog.SystemSpec(name="peer", title="a peer", module="peer", environment="elsewhere")


@pytest.mark.parametrize(
    ("names", "others", "most", "expected"),
    [
        (("bare", "ours", "torch-ddp"), [PEER], 10, {"main": ["bare ours torch-ddp"], "elsewhere": ["bare peer"]}),
        (("bare", "ours", "torch-ddp", "fsdp2"), [], 3, {"main": ["bare ours torch-ddp", "bare fsdp2"]}),
    ],
    ids=["of one environment", "that do not fit into memory together"],
)
def test_systems_share_processes_with_the_bare_model(
    names: tuple[str, ...], others: list[catalog.SystemSpec], most: int, expected: dict[str, list[str]]
) -> None:
    runs = runs_of([*(catalog.SYSTEMS[name] for name in names), *others], max_systems=most)
    found = [(run.environment, " ".join(job.name for job in run.systems)) for run in runs]
    assert found == [(environment, systems) for environment, each in expected.items() for systems in each]


def test_as_many_systems_run_together_as_fit_into_memory() -> None:
    assert max_systems(num_bytes=10**9, num_ranks=4, available_bytes=10**9) == 2


@pytest.mark.slow  # an interpreter of its own
def test_what_a_worker_imports_before_its_system_is_there_in_every_environment() -> None:
    modules = ("worker", "turns", "truth", "calibrate", "workloads", "systems.bare")
    imports = ", ".join(f"benchmarks.matrix.{name}" for name in modules)
    check = f"import sys, {imports}; sys.exit(bool({{'undertow', 'rich', 'psutil', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, cwd=ROOT).returncode == 0


def test_a_full_run_leaves_out_what_is_a_study_of_its_own() -> None:
    assert catalog.SYSTEMS.keys() - catalog.FULL == {"ours-fixed-best"}
