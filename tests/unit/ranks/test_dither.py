"""Offsets before rounding: spread evenly over steps, the same for the same parameters, and unlike between stages."""

import pytest
import torch
from torch import Tensor

from undertow.ranks.dither import Rotation, Rounding

CPU = torch.device("cpu")


def offsets_of(turns: Rotation, stage: Rounding, *, rank: int = 0) -> Tensor:
    return turns.now.offsets(512, stage, rank=rank, device=CPU)


def over_steps(number: int, *, has_optimizer: bool) -> dict[Rounding, Tensor]:
    """Returns the offsets of each stage. [number, 512]"""
    turns, params = Rotation(is_host=True), [torch.ones(3, 4), torch.zeros(5)]
    found: dict[Rounding, list[Tensor]] = {stage: [] for stage in Rounding}
    for _ in range(number):
        turns.advance(params)
        for stage in Rounding:
            found[stage].append(offsets_of(turns, stage))
        if has_optimizer:
            params[0] -= 1e-3
    return {stage: torch.stack(rows) for stage, rows in found.items()}


@pytest.mark.deep
def test_offsets_are_spread_evenly_in_a_step_and_over_steps() -> None:
    for has_optimizer in (False, True):
        for rows in over_steps(512, has_optimizer=has_optimizer).values():
            assert bool((rows.abs() < 0.5).all())
            assert bool((rows.mean(1).abs() < 0.01).all())
            # A mean of 512 independent ones has a deviation of 0.013.
            assert bool((rows.mean(0).abs() < 0.06).all())
            quarters = torch.stack([((rows >= low / 4) & (rows < (low + 1) / 4)).float().mean(0) for low in range(-2, 2)])
            assert bool(((quarters - 0.25).abs() < 0.09).all())  # deviation: 0.019


@pytest.mark.deep
def test_the_stages_of_a_step_do_not_depend_on_each_other() -> None:
    for has_optimizer in (False, True):
        rows = over_steps(1024, has_optimizer=has_optimizer)
        for one, other in ((Rounding.OWN, Rounding.MEAN), (Rounding.OWN, Rounding.ACROSS), (Rounding.ACROSS, Rounding.MEAN)):
            are_up = rows[one][:, 7] > 0, rows[other][:, 7] > 0
            both = (are_up[0] & are_up[1]).float().mean()
            assert abs(both - 0.25) < 0.06  # deviation: 0.014


def test_offsets_follow_from_the_parameters_alone() -> None:
    params = [torch.randn(600, 3), torch.randn(7, dtype=torch.float64), torch.randn(4, dtype=torch.complex64)]
    resumed, before = Rotation(is_host=True), Rotation(is_host=True)
    before.advance([torch.ones(2)])
    for turns in (resumed, before):
        turns.advance(params)
    assert torch.equal(offsets_of(resumed, Rounding.OWN), offsets_of(before, Rounding.OWN))
    first = offsets_of(resumed, Rounding.OWN)
    for param in params:
        resumed.advance(params)
        param.view(-1)[0] += 0.5
        resumed.advance(params)
        assert not torch.equal(offsets_of(resumed, Rounding.OWN), first)


def test_synchronizations_without_a_step_between_them_have_other_offsets_and_so_have_ranks() -> None:
    turns, params = Rotation(is_host=True), [torch.randn(8)]
    seen = []
    for _ in range(3):
        turns.advance(params)
        seen += [offsets_of(turns, Rounding.OWN, rank=rank) for rank in range(3)]
    assert all(not torch.equal(one, other) for place, one in enumerate(seen) for other in seen[:place])


def test_a_digest_on_a_device_is_the_same_as_on_the_host() -> None:
    params = [torch.randn(100)]
    turns = Rotation(is_host=True)
    turns.advance(params)
    host, digest = offsets_of(turns, Rounding.MEAN), turns.now.digest
    device = Rotation(is_host=False)
    for number in range(2):
        device.advance(params)
        assert (int(device.now.digest), int(device.now.repeats)) == (digest, number)
        if number == 0:
            assert torch.equal(offsets_of(device, Rounding.MEAN), host)
