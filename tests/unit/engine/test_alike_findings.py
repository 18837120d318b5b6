"""Findings of a gradient scaler that are the same on all ranks."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from undertow.engine.alike_findings import AlikeFindings
from undertow.engine.params import ModuleParams

CPU = torch.device("cpu")


def infinite_elsewhere(found: Tensor, *_: object) -> Any:
    found.fill_(1.0)
    return Mock()


@pytest.mark.parametrize(("name", "is_told"), [("weight", True), ("added", True), ("of another model", False)])
def test_ranks_tell_each_other_a_finding_about_the_models_parameters_without_a_walk_through_it(name: str, is_told: bool) -> None:
    """It runs in every step of every optimizer."""
    module = nn.Linear(2, 2)
    members = ModuleParams(module, ())
    members.trained()
    if name == "added":
        module.added = nn.Parameter(torch.zeros(1))
    else:
        members.named_params = Mock(side_effect=AssertionError)  # type: ignore[method-assign]
    stepped = getattr(module, name, nn.Parameter(torch.zeros(1)))
    group: Any = SimpleNamespace(num_ranks=2, device=CPU, all_reduce=infinite_elsewhere)
    found = AlikeFindings(group, [members]).unscaling_ends(torch.optim.SGD([stepped]), {CPU: torch.zeros(())})
    assert found[CPU].item() == is_told
