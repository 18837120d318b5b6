"""Savers of models find each parameter in memory of its own, also where a sharded optimizer has moved it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.checkpoints import Setup, case_of, train, trained_by
from support.ranks import Ranks


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _layer(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if next(module.parameters(recurse=False), None) is not None)


# What is saved of a module: of a wrapper what is inside it.
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict()": lambda module: module.state_dict(),
    "the module": lambda module: module,
    "state_dict() of a layer": lambda module: _layer(module).state_dict(),
    "a layer": _layer,
    "a parameter": lambda module: next(module.parameters()),
    "a copy of a layer": lambda module: copy.deepcopy(_layer(module)),
}


def _tensors(value: Any) -> dict[str, Tensor]:
    match value:
        case nn.Module():
            return dict(value.state_dict())
        case Tensor():
            return {"": value}
    return dict(value)


def saved_as_plain_ones(setup: Setup) -> None:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        model.wait()
        plain = case_of(setup).make()
        plain.load_state_dict(model.module.state_dict())
        for name, form in FORMS.items():
            for saves, loads in ((_saved, _loaded), (pickle.dumps, pickle.loads)):
                mine, wanted = (_tensors(loads(saves(form(module)))) for module in (model.module, plain))
                assert mine.keys() == wanted.keys()
                for key, value in mine.items():
                    assert torch.equal(value, wanted[key]), f"{name}: {key}"
                    # What is loaded has the storages that were written.
                    assert value.untyped_storage().nbytes() == wanted[key].untyped_storage().nbytes(), f"{name}: {key}"
                    assert value.stride() == wanted[key].stride(), f"{name}: {key}"


@pytest.mark.parametrize("case", ["mlp", "convolutions", "tied transformer", "oddities", "brain"])
def test_what_is_saved_of_a_model_in_shards_is_what_is_saved_of_a_plain_one(two_ranks: Ranks, case: str) -> None:
    two_ranks.run(saved_as_plain_ones, Setup(case, bucket_cap_mb=None))


def storages(setup: Setup) -> None:
    with trained_by(setup) as (model, optimizer):
        for steps in (range(2), range(2, 4)):
            train(setup, model, optimizer, steps=steps)
            for name, param in model.named_parameters():
                assert param.untyped_storage().nbytes() == param.nbytes, name
                assert param.storage_offset() == 0, name


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_every_parameter_covers_its_storage(two_ranks: Ranks, strategy: str) -> None:
    two_ranks.run(storages, Setup("mlp", strategy, bucket_cap_mb=None))


def references(setup: Setup) -> None:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(1))
        values, kept = model.state_dict(), list(model.module.parameters())
        with torch.no_grad():
            for value in values.values():
                value.fill_(0.5)
        assert all(bool((param == 0.5).all()) for param in kept)
        train(setup, model, optimizer, steps=range(1, 2))
        model.wait()
        assert all(torch.equal(param, value) for param, value in zip(kept, values.values(), strict=True))
        assert not any(bool((param == 0.5).all()) for param in kept)


def test_a_state_dict_goes_on_referring_to_the_parameters(two_ranks: Ranks) -> None:
    two_ranks.run(references, Setup("mlp", bucket_cap_mb=None))
