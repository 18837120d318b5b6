"""Parameters as the planner sees them."""

import gc

import pytest
import torch
from torch import Tensor, nn

from support.strategies import spec
from undertow.engine.params import ModuleParams, first_change, sparse_params, spec_of
from undertow.errors import PhaseError
from undertow.plan import ParamSpec


def wide(tensor: Tensor) -> Tensor:
    tensor.grad_dtype = torch.float32  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    ("tensor", "dtype", "itemsize", "own_dtype"),
    [
        (torch.zeros(2, 3), "float32", 4, None),
        (nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16)), "bfloat16", 2, None),
        (wide(nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))), "float32", 4, "bfloat16"),
    ],
    ids=["wide", "narrow", "narrow with wide gradients"],
)
def test_a_parameter_is_described_by_its_gradient(tensor: Tensor, dtype: str, itemsize: int, own_dtype: str | None) -> None:
    wanted = ParamSpec(name="a", shape=(2, 3), dtype=dtype, itemsize=itemsize, device="cpu", own_dtype=own_dtype)
    assert spec_of("a", tensor) == wanted


def test_layers_that_are_declared_to_be_sparse_are() -> None:
    layers = [nn.Embedding(3, 2), nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(3, 2, sparse=True), nn.Linear(2, 2)]
    assert sparse_params(nn.ModuleList(layers)) == {id(layers[1].weight), id(layers[2].weight)}


def test_the_first_difference_is_told() -> None:
    before = [spec("a", 6), spec("b", 6)]
    assert first_change(before, before[1:]) == "parameter 'a' is no longer trained"
    assert first_change(before[1:], before) == "parameter 'a' is trained now"
    assert first_change(before, [spec("a", 4), spec("b", 6)]) == (
        "parameter 'a' was (6,) float32 on cpu and is (4,) float32 on cpu"
    )
    assert first_change(before, before) == "a parameter was replaced, or a frozen one has changed"


def test_a_model_that_is_gone_follows_no_change() -> None:
    """The end of a dropped model hears only errors that it drops, in a round that was about to follow a change."""
    net = nn.Linear(2, 2)
    members = ModuleParams(net, ())
    del net
    gc.collect()
    with pytest.raises(PhaseError, match=r"^nothing refers to the model any more"):
        members.read_again()
