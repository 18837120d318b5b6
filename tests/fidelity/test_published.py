"""Steps that others have measured, or described, against what the simulator makes of them; docs/fidelity.md has the figures."""

import pytest
import torch
import torch.distributed as dist

from fidelity import bert_large, published, resnet50
from support.project import ROOT
from undertow.lab.cost import link_from_text
from undertow.lab.report.comparison import BAND
from undertow.lab.simulate import DEFAULTS, IDEAL, Conditions

RESNET = resnet50.profile()
PAGE = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("num_ranks", [8, 16, 32])
@pytest.mark.parametrize("network", bert_large.FUSED_MS)
def test_bandwidths_reproduce_the_rows_that_they_come_from(network: str, num_ranks: int) -> None:
    costs = bert_large.costs_of(network, num_ranks, hop_s=10e-6)
    # The bucket's trailer and its padding are not in the calibration: some kilobytes of 1.34 GB.
    assert bert_large.fused_ms(costs, num_ranks) == pytest.approx(bert_large.FUSED_MS[network][num_ranks], rel=1e-5)


@pytest.mark.deep
def test_the_page_has_the_worst_errors_in_its_text() -> None:
    worst = {num: max(abs(cell.error) for cell in bert_large.cells() if cell.num_ranks == num) for num in (16, 32)}
    assert f"at most {100 * worst[16]:.1f} % on 16 GPUs and {100 * worst[32]:.1f} % on 32" in PAGE


@pytest.mark.deep
def test_rows_that_were_kept_out_of_every_fit_are_predicted() -> None:
    found, others = (published.errors(it, is_kept_out=True) for it in (Conditions(), IDEAL))
    assert (found.usual <= 0.05, found.worst <= 0.2, found.usual < others.usual) == (True, True, True)


@pytest.mark.deep
def test_the_page_has_the_rows_that_were_kept_out_and_the_defaults() -> None:
    num_inside, num = published.num_in_band(BAND)
    assert num_inside >= 0.9 * num
    for text in (published.table(), published.worst(), f"and {num_inside} of the {num} rows that were kept out."):
        assert text in PAGE
    for name, value in DEFAULTS.items():
        assert f"| {value:g} | `--{name.replace('_', '-')}` |" in PAGE


@pytest.mark.parametrize(
    ("name", "network"), [("tcp10", "10 GbE"), ("tcp100", "100 GbE"), ("infiniband100", "100 Gb/s InfiniBand")]
)
def test_links_of_the_catalogue_have_the_latency_that_was_fitted(name: str, network: str) -> None:
    assert link_from_text(name).hop_s == pytest.approx(published.HOPS_US[network] * 1e-6)


def test_buckets_are_those_of_torch() -> None:
    # Sizes count, not contents: memory that is never touched.
    tensors = [torch.empty(RESNET.params[param].numel) for param in RESNET.order]
    groups, _ = dist._compute_bucket_assignment_by_size(tensors, list(resnet50.TORCH_CAPS_BYTES))
    assert [[RESNET.order[index] for index in group] for group in groups] == resnet50.torch_groups(RESNET)


def test_plans_expose_at_most_one_percent_more_than_torchs_buckets() -> None:
    assert min(resnet50.torch_over_planned(RESNET, link) for link in resnet50.NETWORKS) > 0.99
