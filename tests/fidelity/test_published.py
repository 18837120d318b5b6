"""Steps that others have measured, or described, against what the simulator makes of them; docs/fidelity.md has the figures."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fidelity import bert_large, gpt3, published, resnet50
from support.project import ROOT
from undertow.cost import link_from_text
from undertow.profile import Profile
from undertow.report.comparison import BAND
from undertow.simulate import DEFAULTS, IDEAL, Conditions

PAGE = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")


@pytest.fixture
def resnet() -> Profile:
    """From a measurement that others have published and that is not part of this repository."""
    folder = Path(os.environ.get("UNDERTOW_PUBLISHED_DATA") or ROOT.parent / "shared" / "data")
    if not (folder / "resnet50.bk.log").is_file():
        pytest.skip(f"resnet50.bk.log is not in {folder}; UNDERTOW_PUBLISHED_DATA names another folder")
    return resnet50.profile_from_log(folder / "resnet50.bk.log")


@pytest.mark.parametrize("num_ranks", [8, 16, 32])
@pytest.mark.parametrize("network", bert_large.FUSED_MS)
def test_bandwidths_reproduce_the_rows_that_they_come_from(network: str, num_ranks: int) -> None:
    costs = bert_large.costs_of(network, num_ranks, hop_s=10e-6)
    # The bucket's trailer and its padding are not in the calibration: some kilobytes of 1.34 GB.
    assert bert_large.fused_ms(costs, num_ranks) == pytest.approx(bert_large.FUSED_MS[network][num_ranks], rel=1e-5)


@pytest.mark.parametrize(
    "table",
    [
        bert_large.table,
        bert_large.calibration_table,
        *(pytest.param(it, marks=pytest.mark.slow) for it in (gpt3.inputs_table, gpt3.claim_table)),
    ],
)
def test_the_page_has_the_tables_of_bert_large_and_of_what_the_inputs_of_gpt3_imply(table: Callable[[], str]) -> None:
    assert table() in PAGE


def test_the_page_has_the_worst_errors_in_its_text() -> None:
    worst = {num: max(abs(cell.error) for cell in bert_large.cells() if cell.num_ranks == num) for num in (16, 32)}
    assert f"at most {100 * worst[16]:.1f} % on 16 GPUs and {100 * worst[32]:.1f} % on 32" in PAGE


def test_rows_that_were_kept_out_of_every_fit_are_predicted() -> None:
    found, others = (published.errors(it, is_kept_out=True) for it in (Conditions(), IDEAL))
    assert (found.usual <= 0.05, found.worst <= 0.2, found.usual < others.usual) == (True, True, True)


def test_the_page_has_the_rows_that_were_kept_out_and_the_defaults() -> None:
    num_inside, num = published.num_in_band(BAND)
    assert num_inside >= 0.9 * num
    for text in (published.table(), published.worst_table(), f"kept out it holds {num_inside} of {num}."):
        assert text in PAGE
    for name, value in DEFAULTS.items():
        assert f"| {value:g} | `--{name.replace('_', '-')}` |" in PAGE


@pytest.mark.parametrize(
    ("name", "network"), [("tcp10", "10 GbE"), ("tcp100", "100 GbE"), ("infiniband100", "100 Gb/s InfiniBand")]
)
def test_links_of_the_catalogue_have_the_latency_that_was_fitted(name: str, network: str) -> None:
    assert link_from_text(name).hop_s == pytest.approx(published.HOPS_US[network] * 1e-6)


def test_the_page_has_the_figures_of_gpt3_in_its_text() -> None:
    exposed_s, planned_s = gpt3.exposed_s(), gpt3.planned_exposed_s()
    shortest, *_, longest = (gpt3.compute_s(backward_s=backward_s) for backward_s in gpt3.BACKWARDS_S)
    claimed_s = [gpt3.num_buckets() * milliseconds / 1e3 for milliseconds in gpt3.CLAIMED_BUCKETS_MS]
    for text in (
        f"hides {1 - exposed_s / gpt3.COMMUNICATION_S:.1%}",
        f"the last matrix, {exposed_s * 1e3:.1f} ms,",
        f"are {claimed_s[0]:.0f} to {claimed_s[1]:.0f} s for {gpt3.num_buckets():,} buckets",
        f"in all are {gpt3.given_costs().bucket_us:.0f} us per bucket",
        f"needs {gpt3.needed_compute_s(speedup=1.3):.1f} s of computing",
        f"there are {shortest:.1f} to {longest:.1f} s",
        f"exposes {planned_s * 1e3:.0f} ms (hides {1 - planned_s / gpt3.COMMUNICATION_S:.1%})",
    ):
        assert text in PAGE


def test_buckets_are_those_of_torch(resnet: Profile) -> None:
    # Sizes count, not contents: memory that is never touched.
    tensors = [torch.empty(resnet.params[param].numel) for param in resnet.order]
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, list(resnet50.TORCH_CAPS_BYTES))
    assert [[resnet.order[index] for index in group] for group in groups] == resnet50.torch_groups(resnet)


def test_the_page_has_the_comparison_on_resnet50(resnet: Profile) -> None:
    assert resnet50.table(resnet) in PAGE


def test_plans_expose_at_most_one_percent_more_than_torchs_buckets(resnet: Profile) -> None:
    assert min(resnet50.compare(resnet, link).ratio for link in resnet50.NETWORKS.values()) > 0.99


def test_the_page_has_the_figures_of_resnet50_in_its_text(resnet: Profile) -> None:
    ratios = {name: resnet50.compare(resnet, link).ratio for name, link in resnet50.NETWORKS.items()}
    fast = [ratio for name, ratio in ratios.items() if not name.startswith("10 GbE")]
    slow = [100 * (ratio - 1) for name, ratio in ratios.items() if name.startswith("10 GbE")]
    last_bytes = sum(resnet.params[param].num_bytes for param in resnet50.torch_groups(resnet)[-1])
    for text in (
        f"here {last_bytes / 1e6:.1f} MB",
        f"exposes {min(fast):.0f} to {max(fast):.0f} times as much",
        f"exposes between {-min(slow):.0f} % less and {max(slow):.0f} % more",
    ):
        assert text in PAGE
