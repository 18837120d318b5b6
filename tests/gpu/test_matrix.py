"""The benchmark matrix with models that compute on a CUDA device."""

import pytest
import torch
from benchmarks.matrix import catalog
from benchmarks.matrix.cell import Cell, Effort, kind_of, measure_cell
from benchmarks.matrix.clock import DeviceClock
from benchmarks.matrix.links import what_is_missing
from benchmarks.matrix.rows import rows_of_cell

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_clock_of_the_device_sees_what_the_host_does_not_wait_for() -> None:
    clock, x = DeviceClock(), torch.randn(4096, 4096, device="cuda")
    _ = x @ x  # loads what the first product needs
    torch.cuda.synchronize()
    begin = clock.now()
    for _ in range(20):
        x @ x
    end = clock.now()
    clock.settle()
    # 2 x 4096^3 operations each: no device does 10^15 of them in a second in fp32.
    assert clock.seconds(begin, end) > 20 * 2 * 4096**3 / 1e15


@pytest.mark.parametrize("workload", ["gpt", "resnet"])
def test_systems_train_right_on_a_device(workload: str) -> None:
    kind = kind_of("none", 2, "cuda", has_namespaces=what_is_missing() is None)
    specs = tuple(catalog.SYSTEMS[name] for name in ("bare", "ours", "torch-ddp"))
    spec = catalog.workload_from_text(workload)
    cell = Cell(
        workload=spec,
        num_ranks=2,
        link="none",
        kind=kind,
        systems=specs,
        effort=Effort(num_turns=2, has_start_up=False),
        device="cuda",
    )
    result = measure_cell(cell, lambda _line: None)
    rows = rows_of_cell(specs, result.timed, result.start_up, result.errors)
    assert {row["system"]: row["error"] for row in rows} == {"bare": None, "ours": None, "torch-ddp": None}
    assert sum(numel for numel, _ in result.timed[0][0]["params"]) * 4 == pytest.approx(spec.gradient_bytes("cuda"), rel=0.01)
