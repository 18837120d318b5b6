"""Our class is torch's in name: what becomes of each of its attributes, and what other libraries do with it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from support.models import mlp, noise
from support.naive import naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks, in_ranks
from undertow import DistributedDataParallel

# Every public attribute that torch's class has and nn.Module has not.
OVERRIDDEN = {
    "bucket_bytes_cap": "our largest bucket",
    "bucket_bytes_cap_default": "whether the library chose it",
    "bucket_bytes_cap_list": "all our buckets",
    "join": "an empty round for a rank without data",
    "join_device": "",
    "join_hook": "",
    "join_process_group": "",
    "modules_buffers": "",
    "named_module_buffers": "",
    "no_sync": "the mode when backward runs counts",
    "parameters_to_ignore": "",
    "process_group": "the user's",
    "register_comm_hook": "",
    "require_backward_grad_sync": "the same switch as no_sync",
    "will_sync_module_buffers": "",
}
INHERITED = {
    "broadcast_buffers": "a property on forward_sync_buffers",
    "gather": "concatenates outputs, as torch's has it",
    "scatter": "splits inputs",
    "to_kwargs": "moves inputs to a device",
}
SET_BY_OUR_CONSTRUCTOR = {
    "batched_grad_copy",
    "device",
    "device_ids",
    "device_type",
    "dim",
    "find_unused_parameters",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "is_multi_device_module",
    "mixed_precision",
    "module",
    "output_device",
    "skip_all_reduce_unused_params",
    "static_graph",
}
CONSTANT = {
    "broadcast_bucket_size",
    "logger",
    "reducer",
    "require_forward_param_sync",
    "use_side_stream_for_tensor_copies",
}


def public_attributes() -> dict[str, set[str]]:
    plain = set(dir(nn.Module()))
    torchs = TorchDistributedDataParallel(mlp())
    names = {name for name in dir(torchs) if not name.startswith("_")} - plain
    with wrapped(mlp()) as ours:
        missing = {name for name in names if not hasattr(ours, name)}
        own = {name for name in vars(ours) if not name.startswith("_")} | {"module"}
    defined = {name for name in names if name in vars(DistributedDataParallel)}
    return {"names": names, "missing": missing, "defined": defined, "own": own & names}


def test_every_public_attribute_of_torchs_class_is_overridden_or_inherited_on_purpose(two_ranks: Ranks) -> None:
    found = two_ranks.run(public_attributes)[0]
    assert found["names"] == OVERRIDDEN.keys() | INHERITED.keys() | SET_BY_OUR_CONSTRUCTOR | CONSTANT
    assert found["defined"] == OVERRIDDEN.keys() | CONSTANT
    assert found["own"] == SET_BY_OUR_CONSTRUCTOR
    assert found["missing"] == set()


def test_the_constructor_has_torchs_arguments_in_torchs_order() -> None:
    torchs = list(inspect.signature(TorchDistributedDataParallel.__init__).parameters)
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    positional = [name for name, it in ours.items() if it.kind is it.POSITIONAL_OR_KEYWORD]
    # An older torch has fewer; newer ones would show here.
    assert positional[: len(torchs)] == torchs


def classes_of_a_wrapper() -> tuple[bool, bool]:
    with wrapped(mlp()) as ddp:
        return isinstance(ddp, TorchDistributedDataParallel), isinstance(ddp, Joinable)


def test_trainers_take_it_for_torchs_class(two_ranks: Ranks) -> None:
    assert two_ranks.run(classes_of_a_wrapper)[0] == (True, True)


@in_ranks(2)
def test_what_frameworks_call_on_the_reducer_changes_nothing() -> None:
    with wrapped_and_bare(mlp()) as (ddp, bare):
        assert ddp.reducer._rebuild_buckets() is False
        outputs = ddp(noise(3, 6))
        ddp.reducer.prepare_for_backward([outputs])
        outputs.sum().backward()
        ddp.reducer._delay_all_reduce()
        bare(noise(3, 6)).sum().backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)


def test_any_other_method_of_the_reducer_is_an_error_that_says_what_to_use() -> None:
    assert not hasattr(DistributedDataParallel.reducer, "_get_backward_stats")
    with pytest.raises(AttributeError) as caught:
        DistributedDataParallel.reducer._push_all_rebuilt_params()
    assert str(caught.value) == (
        "model.reducer has no '_push_all_rebuilt_params': Undertow's DistributedDataParallel has no C++ reducer.\n"
        "  model.reducer only answers frameworks: it has _delay_all_reduce, _rebuild_buckets and prepare_for_backward.\n"
        "  See model.plan for the buckets and model.report() for times; no_sync() and backward() need no preparation."
    )


def checkpointed() -> tuple[list[str], list[str]]:
    with wrapped_and_bare(mlp()) as (ddp, bare):
        optimizer = torch.optim.Adam(ddp.parameters())
        ddp(noise(3, 6)).sum().backward()
        optimizer.step()
        model_state, optimizer_state = get_state_dict(ddp, optimizer)
        set_model_state_dict(ddp, {name: torch.zeros_like(value) for name, value in model_state.items()})
        assert all(not param.any() for param in ddp.parameters())
        assert get_model_state_dict(ddp).keys() == bare.state_dict().keys()
        return list(model_state), list(optimizer_state["state"])


def test_torchs_checkpointing_unwraps_it(two_ranks: Ranks) -> None:
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert two_ranks.run(checkpointed) == [(names, names)] * 2


@in_ranks(2)
def test_torchs_clipping_works_on_it() -> None:
    with wrapped_and_bare(mlp()) as (ddp, bare):
        for model in (ddp, bare):
            model(noise(3, 6)).sum().backward()
        naive_mean(bare)
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (ddp, bare)]
        assert torch.equal(*norms)
        vectors = [torch.nn.utils.parameters_to_vector(param.grad for param in model.parameters()) for model in (ddp, bare)]
        assert torch.equal(*vectors)
