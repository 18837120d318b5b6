"""The parameters that are listed for Muon."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from undertow import ConfigError, hidden_matrices
from undertow.lab.demo.model import Gpt

LAYER = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")


def gpt() -> Gpt:
    return Gpt(num_layers=2, num_heads=2, width=8, context=4)


def names_of(model: nn.Module, found: Sequence[nn.Parameter]) -> list[str]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [names[id(param)] for param in found]


def test_matrices_of_the_layers_are_listed_in_order_without_embeddings_and_head() -> None:
    model = gpt()
    wanted = [f"blocks.{layer}.{name}" for layer in range(2) for name in LAYER]
    assert names_of(model, hidden_matrices(model)) == wanted


def test_a_head_that_is_tied_to_the_embedding_is_left_out_once() -> None:
    model = gpt()
    wanted = names_of(model, hidden_matrices(model))
    model.head.weight = model.byte_embedding.weight
    assert names_of(model, hidden_matrices(model)) == wanted
    assert names_of(model, hidden_matrices(model, exclude=())) == wanted


def test_a_wrapped_model_has_the_same() -> None:
    model = gpt()
    wrapped = nn.Sequential(model)
    assert list(map(id, hidden_matrices(wrapped))) == list(map(id, hidden_matrices(model)))


def test_a_shared_matrix_is_listed_once_and_a_frozen_one_not_at_all() -> None:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    layers[1].weight = layers[0].weight
    layers[2].weight.requires_grad = False
    model = nn.Sequential(*layers)
    assert names_of(model, hidden_matrices(model)) == ["0.weight"]


def test_named_parts_are_left_out_instead_of_the_last_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert names_of(model, hidden_matrices(model, exclude=[model[0], model[1].weight])) == ["2.weight"]


def test_kernels_and_embedding_bags_are_not_matrices() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.EmbeddingBag(4, 4), nn.LayerNorm(4))
    assert hidden_matrices(model) == []


@pytest.mark.parametrize("part", [nn.Linear(2, 2), nn.Parameter(torch.zeros(2, 2))], ids=["module", "parameter"])
def test_a_part_of_another_model_is_an_error(part: nn.Module | nn.Parameter) -> None:
    with pytest.raises(ConfigError, match=f"parameters of the model, got {type(part).__name__}"):
        hidden_matrices(gpt(), exclude=[part])
