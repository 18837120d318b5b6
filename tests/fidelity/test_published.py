"""Steps that others have measured, or described, against what the simulator makes of them; docs/fidelity.md has the figures."""

import pytest

from fidelity import published
from support.project import ROOT
from undertow.lab.cost import link_from_text
from undertow.lab.report.comparison import BAND
from undertow.lab.simulate import DEFAULTS, IDEAL, Conditions

PAGE = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")


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
