"""What the wrapper has of torch's besides the training step: its class and attributes, hooks, switches, what trainers ask for."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from support.alike import backward_alike
from support.errors import text_of
from support.models import CASES, mlp, noise
from support.naive import require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from undertow import ConfigError, DistributedDataParallel, PhaseError, WrongType

MLP = CASES["mlp"]
BEFORE = _BufferCommHookLocation.PRE_FORWARD

# Every public attribute that torch's class has and nn.Module has not: defined by ours, inherited, or set by the constructor.
DEFINED = {
    "broadcast_bucket_size",
    "bucket_bytes_cap",
    "bucket_bytes_cap_default",
    "bucket_bytes_cap_list",
    "join",
    "join_device",
    "join_hook",
    "join_process_group",
    "logger",
    "modules_buffers",
    "named_module_buffers",
    "no_sync",
    "parameters_to_ignore",
    "process_group",
    "reducer",
    "register_comm_hook",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "use_side_stream_for_tensor_copies",
    "will_sync_module_buffers",
}
INHERITED = {"broadcast_buffers", "gather", "scatter", "to_kwargs"}
SET = {
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


@in_ranks(2)
def test_every_public_attribute_of_torchs_class_is_overridden_or_inherited_on_purpose() -> None:
    names = {name for name in dir(TorchDistributedDataParallel(mlp())) if not name.startswith("_")} - set(dir(nn.Module()))
    assert names == DEFINED | INHERITED | SET
    assert {name for name in names if name in vars(DistributedDataParallel)} == DEFINED
    with wrapped(mlp()) as ddp:
        assert ({*vars(ddp), "module"}) & names == SET
        assert [name for name in names if not hasattr(ddp, name)] == []
        assert isinstance(ddp, TorchDistributedDataParallel)
        assert isinstance(ddp, Joinable)


def test_the_constructor_has_torchs_arguments_in_torchs_order() -> None:
    torchs = list(inspect.signature(TorchDistributedDataParallel.__init__).parameters)
    ours = inspect.signature(DistributedDataParallel.__init__).parameters
    positional = [name for name, it in ours.items() if it.kind is it.POSITIONAL_OR_KEYWORD]
    # An older torch has fewer; newer ones would show here.
    assert positional[: len(torchs)] == torchs


@in_ranks(2)
def test_what_frameworks_call_on_the_reducer_changes_nothing() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        ddp.reducer.prepare_for_backward([])
        value = MLP.loss(model, step)
        ddp.reducer._delay_all_reduce()
        return value

    with wrapped_and_bare(mlp()) as (ddp, bare):
        assert ddp.reducer._rebuild_buckets() is False
        backward_alike(ddp, bare, loss)


def test_any_other_method_of_the_reducer_is_an_error_that_says_what_to_use() -> None:
    assert not hasattr(DistributedDataParallel.reducer, "_get_backward_stats")
    assert text_of(AttributeError, lambda: DistributedDataParallel.reducer._push_all_rebuilt_params()) == (
        "model.reducer has no '_push_all_rebuilt_params': Undertow's DistributedDataParallel has no C++ reducer.\n"
        "  model.reducer only answers frameworks: it has _delay_all_reduce, _rebuild_buckets and prepare_for_backward.\n"
        "  See model.plan for the buckets and model.report() for times; no_sync() and backward() need no preparation."
    )


ONCE = (
    "register_comm_hook can only be called once, and not within a backward.\n"
    "  {}\n"
    "  Compose hooks with undertow.chain((state, hook), ...), and register that before training."
)


@in_ranks(2, 3)
def test_what_hooks_and_switches_refuse() -> None:
    with wrapped(mlp()) as ddp:
        assert text_of(WrongType, lambda: ddp._register_buffer_comm_hook(None, 3)) == (
            "hook must be callable, got int.\n  _register_buffer_comm_hook\n  Pass a function hook(state, named_buffers)."
        )
        assert text_of(WrongType, lambda: ddp.register_comm_hook(None, "allreduce")) == (
            "Communication hook must be callable, got str.\n"
            "  register_comm_hook(state, hook)\n"
            "  Pass a function hook(state, bucket) that returns a torch.futures.Future."
        )
        assert text_of(ConfigError, lambda: ddp._set_ddp_runtime_logging_sample_rate(0)) == (
            "DDP runtime logging sample rate should be equal or greater than 1, got 0.\n"
            "  _set_ddp_runtime_logging_sample_rate\n"
            "  Leave it out: every step is recorded, and report() shows them."
        )
        in_backward = next(ddp.parameters()).register_hook(lambda _: ddp.register_comm_hook(None, allreduce_hook))
        assert text_of(PhaseError, MLP.loss(ddp, 0).backward) == ONCE.format("gradients are being synchronised")
        in_backward.remove()
        assert text_of(PhaseError, ddp._check_reducer_finalized) == (
            "Expect to have finished reduction in the prior iteration before starting a new one.\n"
            f"  rank {dist.get_rank()}\n"
            "  Look for an exception in backward; the next forward ends the round."
        )
        MLP.loss(ddp, 0).backward()
        ddp._check_reducer_finalized()
        ddp.register_comm_hook(None, allreduce_hook)
        again = text_of(PhaseError, lambda: ddp.register_comm_hook(None, allreduce_hook))
        assert again == ONCE.format("allreduce_hook is registered")


def no_future(_state, bucket):
    return bucket.buffer()


def too_short(_state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[1:])
    return future


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (
            no_future,
            "expected the communication hook to return a torch.futures.Future, got Tensor.\n"
            "  no_future, bucket 0\n"
            "  Return torch.distributed.all_reduce(..., async_op=True).get_future(), or a Future with set_result().",
        ),
        (
            too_short,
            "expected the communication hook's future to hold a tensor of 92 elements, got (91,).\n"
            "  too_short\n"
            "  Let the future hold a tensor with the shape of bucket.buffer().",
        ),
    ],
)
def test_a_hook_that_breaks_its_promise_is_told_so_in_backward(hook: Callable[..., Any], text: str) -> None:
    with wrapped(mlp()) as ddp:
        ddp.register_comm_hook(None, hook)
        assert text_of(WrongType, MLP.loss(ddp, 0).backward) == text


@in_ranks(2)
@pytest.mark.parametrize(("name", "hook"), [("ALLREDUCE", allreduce_hook), ("FP16_COMPRESS", fp16_compress_hook)])
def test_torchs_builtin_hooks_go_by_their_names(name: str, hook: Callable[..., Any]) -> None:
    with wrapped(MLP.model()) as ddp, wrapped(MLP.model()) as other:
        ddp._register_builtin_comm_hook(getattr(BuiltinCommHookType, name))
        other.register_comm_hook(None, hook)
        for model in (ddp, other):
            MLP.loss(model, 0).backward()
        require_same_gradients(ddp, other)


class Counting(nn.Module):
    """Two buffers, of which a forward adds to one; the forward remembers what it found."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(1))
        self.register_buffer("left_alone", torch.zeros(1))
        self.found: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.found.append(self.table.item())
        self.table += dist.get_rank() + 1
        return self.layer(x)


@in_ranks(2, 3)
@pytest.mark.parametrize("location", [None, *_BufferCommHookLocation], ids=str)
def test_a_hook_of_the_users_may_synchronise_buffers(location: _BufferCommHookLocation | None) -> None:
    model, seen, after = Counting(), [], []

    def hook(state: object, named_buffers: dict[str, Tensor]) -> list[torch.futures.Future[Any]] | None:
        seen.append((state, list(named_buffers), torch.is_grad_enabled()))
        works = [dist.all_reduce(buffer, async_op=True) for buffer in named_buffers.values()]
        if location is not BEFORE:
            return [work.get_future() for work in works]
        for work in works:  # futures are for the end of backward, and this forward needs the result
            work.wait()
        return None  # as torch's usual one does

    with wrapped(model, ignore=("left_alone",)) as ddp:
        ddp._register_buffer_comm_hook("state", hook, *(() if location is None else (location,)))
        for _ in range(2):
            ddp(noise(1, 2)).sum().backward()
            after.append(model.table.item())
        with ddp.no_sync():
            ddp(noise(1, 2)).sum().backward()
        ddp.eval()
        ddp(noise(1, 2)).sum().backward()
        with torch.no_grad():
            ddp.train()(noise(1, 2))
        ddp.forward_sync_buffers = False
        ddp(noise(1, 2)).sum().backward()
    num_ranks, mine = dist.get_world_size(), dist.get_rank() + 1
    total = sum(range(1, num_ranks + 1))
    assert model.found[:2] == [0.0, total]
    assert after == ([mine, total + mine] if location is BEFORE else [total, total * num_ranks + total])
    assert model.found[3:] == [model.found[2] + step * mine for step in (1, 2, 3)]  # in none of these is the hook called
    assert seen == [("state", ["table"], False)] * 2


@in_ranks(2)
def test_buffers_have_their_names_without_the_ignored_ones() -> None:
    case = CASES["convolutions"]
    with wrapped(case.model(), ignore=("0.1.running_mean",)) as ddp:
        names = [name for name, _ in ddp.module.named_buffers() if name != "0.1.running_mean"]
        assert list(ddp.named_module_buffers) == names
        assert len(names) == 5
        assert [id(it) for it in ddp.named_module_buffers.values()] == [id(ddp.module.get_buffer(name)) for name in names]
        assert list(map(id, ddp.modules_buffers)) == list(map(id, ddp.named_module_buffers.values()))
        assert ddp.will_sync_module_buffers()
        ddp.require_forward_param_sync = False
        assert not ddp.will_sync_module_buffers()
    with wrapped(mlp()) as ddp:
        assert not ddp.will_sync_module_buffers()
    with wrapped(case.model(), buffers="off") as ddp:
        assert not ddp.will_sync_module_buffers()


@in_ranks(2, 3)
def test_switches_of_torchs_are_accepted() -> None:
    model = mlp()
    with wrapped_and_bare(model, bucket_cap_mb=1e-6) as (ddp, bare), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            ddp._set_static_graph()
        ddp._set_ddp_sink_clone(False)
        ddp._set_ddp_runtime_logging_sample_rate(1)
        ddp._set_sparse_metadata({})
        backward_alike(ddp, bare, MLP.loss, steps=[0])
        assert ddp._get_ddp_logging_data() == {
            "module_name": "Sequential",
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "num_parameter_tensors": 4,
            "bucket_sizes": "16, 128, 32, 192",
            "broadcast_buffers": True,
            "find_unused_parameters": False,
            "gradient_as_bucket_view": False,
            "can_set_static_graph": False,
        }
        ddp._remove_autograd_hooks()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    said = [(str(each.message), each.filename == __file__) for each in caught]
    assert said == [("You've set static_graph to be True, no need to set it again.", True)]


@in_ranks(2)
def test_the_wrapper_has_torchs_attributes() -> None:
    attributes = {
        "dim": 0,
        "device_ids": None,
        "output_device": None,
        "device_type": "cpu",
        "is_multi_device_module": False,
        "device_mesh": None,
        "static_graph": False,
        "device": torch.device("cpu"),
        "process_group": dist.group.WORLD,
        "join_process_group": dist.group.WORLD,
        "join_device": torch.device("cpu"),
    }
    with wrapped(mlp()) as ddp:
        assert {name: getattr(ddp, name) for name in attributes} == attributes
