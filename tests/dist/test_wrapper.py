"""What the wrapper has of torch's besides the training step: hooks, switches, and names that trainers ask for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _BufferCommHookLocation

from support.errors import text_of
from support.models import CASES, mlp, noise
from support.naive import naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks
from undertow import ConfigError, PhaseError, WrongType


def errors_of_hooks() -> dict[str, str]:
    texts = {}
    with wrapped(mlp()) as ddp:
        texts["no buffer hook"] = text_of(WrongType, lambda: ddp._register_buffer_comm_hook(None, 3))
        texts["no hook"] = text_of(WrongType, lambda: ddp.register_comm_hook(None, "allreduce"))
        texts["sample rate"] = text_of(ConfigError, lambda: ddp._set_ddp_runtime_logging_sample_rate(0))
        in_backward = next(ddp.parameters()).register_hook(lambda _: ddp.register_comm_hook(None, allreduce_hook))
        texts["in backward"] = text_of(PhaseError, ddp(noise(1, 6)).sum().backward)
        in_backward.remove()
        texts["not finished"] = text_of(PhaseError, ddp._check_reducer_finalized)
        ddp(noise(1, 6)).sum().backward()
        ddp._check_reducer_finalized()
        ddp.register_comm_hook(None, allreduce_hook)
        texts["twice"] = text_of(PhaseError, lambda: ddp.register_comm_hook(None, allreduce_hook))
    return texts


ONCE = "register_comm_hook can only be called once, and not within a backward.\n"
BEFORE = "  Compose hooks with undertow.chain((state, hook), ...), and register that before training."


def test_what_hooks_and_switches_refuse(ranks: Ranks) -> None:
    for rank, texts in enumerate(ranks.run(errors_of_hooks)):
        assert texts == {
            "no buffer hook": "hook must be callable, got int.\n"
            "  _register_buffer_comm_hook\n"
            "  Pass a function hook(state, named_buffers).",
            "no hook": "Communication hook must be callable, got str.\n"
            "  register_comm_hook(state, hook)\n"
            "  Pass a function hook(state, bucket) that returns a torch.futures.Future.",
            "sample rate": "DDP runtime logging sample rate should be equal or greater than 1, got 0.\n"
            "  _set_ddp_runtime_logging_sample_rate\n"
            "  Leave it out: every step is recorded, and report() shows them.",
            "in backward": f"{ONCE}  gradients are being synchronised\n{BEFORE}",
            "not finished": "Expect to have finished reduction in the prior iteration before starting a new one.\n"
            f"  rank {rank}\n"
            "  Look for an exception in backward; the next forward ends the round.",
            "twice": f"{ONCE}  allreduce_hook is registered\n{BEFORE}",
        }


def no_future(_state, bucket):
    return bucket.buffer()


def too_short(_state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer()[1:])
    return future


def errors_in_backward() -> list[str]:
    texts = []
    for hook in (no_future, too_short):
        with wrapped(mlp()) as ddp:
            ddp.register_comm_hook(None, hook)
            texts.append(text_of(WrongType, ddp(noise(1, 6)).sum().backward))
    return texts


def test_a_hook_that_breaks_its_promise_is_told_so_in_backward(ranks: Ranks) -> None:
    assert (
        ranks.run(errors_in_backward)
        == [
            [
                "expected the communication hook to return a torch.futures.Future, got Tensor.\n"
                "  no_future, bucket 0\n"
                "  Return torch.distributed.all_reduce(..., async_op=True).get_future(), or a Future with set_result().",
                "expected the communication hook's future to hold a tensor of 92 elements, got (91,).\n"
                "  too_short\n"
                "  Let the future hold a tensor with the shape of bucket.buffer().",
            ]
        ]
        * ranks.num_ranks
    )


def builtin_hook(name: str) -> bool:
    with wrapped_and_bare(mlp()) as (ddp, bare):
        ddp._register_builtin_comm_hook(getattr(BuiltinCommHookType, name))
        for model in (ddp, bare):
            model(noise(2, 6)).sum().backward()
        largest = [param.grad.abs().max() for param in bare.parameters()]
        naive_mean(bare)
        if name == "ALLREDUCE":
            require_same_gradients(ddp, bare)
        for ours, wanted, most in zip(ddp.parameters(), bare.parameters(), largest, strict=True):
            dist.all_reduce(most, dist.ReduceOp.MAX)
            # What each rank has is cast and divided, and then added up, 4 roundings of 3 ranks' to half an ulp of the largest.
            tolerance = 2 * torch.finfo(torch.half).eps * float(most)
            torch.testing.assert_close(ours.grad, wanted.grad, rtol=0.0, atol=tolerance)
        return all(torch.equal(param.grad, param.grad.half().float()) for param in ddp.parameters())


def test_torchs_builtin_hooks_go_by_their_names(ranks: Ranks) -> None:
    assert not any(ranks.run(builtin_hook, "ALLREDUCE"))
    assert all(ranks.run(builtin_hook, "FP16_COMPRESS"))


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


def summed_by_a_hook(location: _BufferCommHookLocation | None) -> tuple[list[float], list[float], list[Any]]:
    """What a forward finds in the buffer, what is there after the step, and what the hook was given."""
    model, seen, after = Counting(), [], []

    def hook(state: object, named_buffers: dict[str, Tensor]) -> list[torch.futures.Future[Any]]:
        seen.append((state, list(named_buffers), torch.is_grad_enabled()))
        works = [dist.all_reduce(buffer, async_op=True) for buffer in named_buffers.values()]
        if location is not _BufferCommHookLocation.PRE_FORWARD:
            return [work.get_future() for work in works]
        for work in works:  # futures are for the end of backward, and this forward needs the result
            work.wait()
        return []

    with wrapped(model, ignore=("left_alone",)) as ddp:
        arguments = () if location is None else (location,)
        ddp._register_buffer_comm_hook("state", hook, *arguments)
        for _ in range(2):
            loss = ddp(noise(1, 2)).sum()
            loss.backward()
            after.append(model.table.item())
        with ddp.no_sync():
            ddp(noise(1, 2)).sum().backward()
        ddp.eval()
        ddp(noise(1, 2)).sum().backward()
        with torch.no_grad():
            ddp.train()(noise(1, 2))
        ddp.forward_sync_buffers = False
        ddp(noise(1, 2)).sum().backward()
    return model.found, after, seen


@pytest.mark.parametrize("location", [None, *_BufferCommHookLocation], ids=str)
def test_a_hook_of_the_users_may_synchronise_buffers(ranks: Ranks, location: _BufferCommHookLocation | None) -> None:
    total = sum(range(1, ranks.num_ranks + 1))
    for rank, (found, after, seen) in enumerate(ranks.run(summed_by_a_hook, location)):
        mine = rank + 1
        is_before = location is _BufferCommHookLocation.PRE_FORWARD
        assert found[:2] == [0.0, total]
        assert after == ([mine, total + mine] if is_before else [total, total * ranks.num_ranks + total])
        assert found[3:] == [found[2] + step * mine for step in (1, 2, 3)]  # in none of these is the hook called
        assert seen == [("state", ["table"], False)] * 2


def without_futures() -> list[float]:
    """Torch's usual buffer hook returns nothing."""
    model = Counting()
    with wrapped(model) as ddp:
        ddp._register_buffer_comm_hook(None, lambda _, named_buffers: dist.all_reduce(named_buffers["table"]))
        for _ in range(2):
            ddp(noise(1, 2)).sum().backward()
    return [model.table.item(), *model.found]


def test_a_buffer_hook_need_not_return_futures(ranks: Ranks) -> None:
    total = sum(range(1, ranks.num_ranks + 1))
    assert ranks.run(without_futures) == [[total * ranks.num_ranks + total, 0.0, total]] * ranks.num_ranks


def buffers_by_name() -> dict[str, Any]:
    case = CASES["convolutions"]
    with wrapped(case.model(), ignore=("0.1.running_mean",)) as ddp:
        names = list(ddp.named_module_buffers)
        same = all(buffer is ddp.module.get_buffer(name) for name, buffer in ddp.named_module_buffers.items())
        are_those = [id(buffer) for buffer in ddp.modules_buffers] == [id(it) for it in ddp.named_module_buffers.values()]
        will_sync = [ddp.will_sync_module_buffers()]
        ddp.require_forward_param_sync = False
        will_sync.append(ddp.will_sync_module_buffers())
    with wrapped(mlp()) as ddp:
        will_sync.append(ddp.will_sync_module_buffers())
    with wrapped(case.model(), buffers="off") as ddp:
        will_sync.append(ddp.will_sync_module_buffers())
    return {"names": names, "same": same and are_those, "will sync": will_sync}


def test_buffers_have_their_names_without_the_ignored_ones(two_ranks: Ranks) -> None:
    names = ["0.1.running_var", "0.1.num_batches_tracked", "0.4.running_mean", "0.4.running_var", "0.4.num_batches_tracked"]
    for answer in two_ranks.run(buffers_by_name):
        assert answer == {"names": names, "same": True, "will sync": [True, False, False, False]}


def buffers_while_switched_off() -> list[float]:
    model = Counting()
    with wrapped(model) as ddp:
        ddp.require_forward_param_sync = False
        for _ in range(2):
            ddp(noise(1, 2)).sum().backward()
        ddp.require_forward_param_sync = True
        ddp(noise(1, 2)).sum().backward()
    return model.found


def test_buffers_stay_each_ranks_own_while_that_is_switched_off(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(buffers_while_switched_off)):
        assert found == [0.0, rank + 1, 2.0]  # rank 0 has added 1 twice


def switches() -> dict[str, Any]:
    model = mlp()
    with wrapped_and_bare(model, bucket_cap_mb=1e-6) as (ddp, bare), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp._set_static_graph()
        ddp._set_static_graph()
        ddp._set_ddp_sink_clone(False)
        ddp._set_ddp_runtime_logging_sample_rate(1)
        ddp._set_sparse_metadata({})
        for each in (ddp, bare):
            each(noise(2, 6)).sum().backward()
        naive_mean(bare)
        require_same_gradients(ddp, bare)
        logged = ddp._get_ddp_logging_data()
        ddp._remove_autograd_hooks()
        assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    return {"said": [(str(each.message), each.filename == __file__) for each in caught], "logged": logged}


def test_switches_of_torchs_are_accepted(ranks: Ranks) -> None:
    for rank, answer in enumerate(ranks.run(switches)):
        assert answer["said"] == [("You've set static_graph to be True, no need to set it again.", True)]
        assert answer["logged"] == {
            "module_name": "Sequential",
            "world_size": ranks.num_ranks,
            "rank": rank,
            "num_parameter_tensors": 4,
            "bucket_sizes": "16, 128, 32, 192",
            "broadcast_buffers": True,
            "find_unused_parameters": False,
            "gradient_as_bucket_view": False,
            "can_set_static_graph": False,
        }


def attributes() -> dict[str, Any]:
    with wrapped(mlp()) as ddp:
        names = ("dim", "device_ids", "output_device", "device_type", "is_multi_device_module", "device_mesh", "static_graph")
        return {name: getattr(ddp, name) for name in names} | {
            "device": str(ddp.device),
            "process group": ddp.process_group is dist.group.WORLD,
            "join": (ddp.join_process_group is dist.group.WORLD, str(ddp.join_device)),
        }


def test_the_wrapper_has_torchs_attributes(two_ranks: Ranks) -> None:
    for answer in two_ranks.run(attributes):
        assert answer == {
            "dim": 0,
            "device_ids": None,
            "output_device": None,
            "device_type": "cpu",
            "is_multi_device_module": False,
            "device_mesh": None,
            "static_graph": False,
            "device": "cpu",
            "process group": True,
            "join": (True, "cpu"),
        }
