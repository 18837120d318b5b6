"""Every limit that the README states has tests that show it."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.models import step_in_backward
from support.project import ROOT
from support.ranks import in_ranks
from support.sharded import hybrid
from undertow import ConfigError, DistributedDataParallel, PhaseError, PlanMismatch, ShardedOptimizer, StallTimeout, SyncConfig

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## What it does not do yet\n")[1].split("\n## ")[0]
LIMITS = [" ".join(text.split()) for text in re.findall(r"^- (.*?)$(?=\n(?:- |\n|\Z))", SECTION + "\n", re.MULTILINE | re.DOTALL)]

# Words of a limit, and its tests.
SHOWN_BY = {
    "NCCL with two or more GPUs": ["test_training_over_nccl_has_the_reference_s_bits"],
    "ZeRO-3 and tensor parallelism": ["test_what_cannot_be_planned_is_refused", "test_a_sharded_parameter_is_refused"],
    "Eager steps on GPUs": ["test_eager_steps_over_nccl_are_refused_by_name"],
    "With experts": [
        "test_what_cannot_be_is_refused",
        "test_communication_hooks_see_the_dense_parameters_only",
        "test_shards_of_experts_over_their_group_make_the_same_model",
    ],
    "Inside `join()` with a ShardedOptimizer": ["test_what_a_rank_without_data_cannot_follow_is_refused"],
    '`nonfinite="skip"` in eager form': [
        "test_an_eager_step_cannot_be_skipped",
        "test_a_plain_step_with_a_closure_cannot_be_skipped",
    ],
    "With a ShardedOptimizer: sparse gradients": [
        "test_sparse_gradients_are_refused",
        "test_mistakes_are_told",
        "test_what_does_not_go_with_weights_is_refused",
        "test_optimizers_in_backward_do_not_go_with_shards",
    ],
    "What is frozen, added or replaced": ["test_a_change_on_one_rank_is_told", "test_experts_may_change_and_be_late"],
    "Inside `join()` every forward": [
        "test_ranks_that_do_different_things_are_told_so",
        "test_a_rank_that_has_run_out_of_data_makes_no_steps",
    ],
    "torch.func.functional_call": ["test_a_functional_call_trains_what_its_parameters_are_made_from"],
    "Buffers that change": ["test_buffers_that_change_on_all_ranks_follow_rank_0_from_the_next_step_on"],
    "communication hook raises on one rank": ["test_a_hook_that_raises_on_one_rank_ends_the_others_by_the_timeout"],
    "looks at its loss alone": ["test_a_look_after_gradients_were_zeroed_by_hand_is_a_step_of_its_own"],
    "With sums or weights `.grad`": ["test_with_weights_a_gradient_is_new_until_the_next_synchronisation"],
    "is no `torch.optim.Optimizer`": ["test_steps_that_torch_does_not_know_are_not_skipped"],
    "Call `wait()` before C++ code": ["test_after_wait_code_in_cpp_reads_what_was_stepped"],
    "shares a parameter's memory": ["test_a_read_between_steps_sees_what_was_stepped"],
    "is not stepped, whatever its `.grad`": ["test_with_shards_what_is_frozen_is_not_stepped"],
    "`step()` is for all ranks or none": ["test_with_shards_a_step_of_one_rank_is_an_error"],
    "A change of the plan brings": ["test_shards_move_up_to_so_many_bytes"],
    "In eager form weights": ["test_weights_that_are_not_sound_are_an_error_on_every_rank_and_update_nothing"],
    "On a mesh each row": ["test_rows_that_have_drifted_apart_stay_so_until_rank_0_is_followed"],
    "Profiles on GPUs": ["test_a_rank_alone_has_a_profile_too"],
    "Plans do not account": [
        "test_a_step_by_hand",
        "test_a_profile_has_the_times_of_the_slowest_rank",
    ],
}


def test_every_limit_has_a_line_in_the_table() -> None:
    named = {limit: [words for words in SHOWN_BY if words in limit] for limit in LIMITS}
    assert {limit: words for limit, words in named.items() if len(words) != 1} == {}
    assert len(LIMITS) == len(SHOWN_BY) > 20


def test_every_test_of_the_table_exists() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", texts, re.MULTILINE))
    assert {name for names in SHOWN_BY.values() for name in names} - there == set()


STALLS = SyncConfig(stall_warning_s=1.0, stall_timeout_s=2.0, buffers="off")


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


def train(ddp: DistributedDataParallel, optimizer: object, *, num_steps: int = 2, leaves_out: int = -1) -> None:
    """Steps on ones; `leaves_out` is one in which this rank's optimizer does not step."""
    for step in range(num_steps):
        ddp(ones(1, 2)).sum().backward()
        if step != leaves_out:
            optimizer.step()
        optimizer.zero_grad()


def sharded(model: nn.Module, **settings: object) -> tuple[DistributedDataParallel, ShardedOptimizer]:
    ddp = DistributedDataParallel(model, config=SyncConfig(**settings))
    return ddp, ShardedOptimizer(torch.optim.SGD, ddp, lr=0.5)


@in_ranks(2)
@pytest.mark.parametrize("through", ["fully_shard", "a dtensor"])
def test_a_sharded_parameter_is_refused(through: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    model, mesh = nn.Linear(4, 4), init_device_mesh("cpu", (2,))
    if through == "fully_shard":
        fully_shard(model, mesh=mesh)
    else:
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ConfigError, match="is sharded already"):
        DistributedDataParallel(model)


@in_ranks(2)
def test_a_change_on_one_rank_is_told() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    train(ddp, optimizer)
    ddp.module[0].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(PlanMismatch):
        train(ddp, optimizer)
    ddp.close()


@in_ranks(2)
def test_a_rank_that_has_run_out_of_data_makes_no_steps() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(ddp.parameters())
    with ddp.join():
        for _ in range(2 + dist.get_rank()):
            ddp(ones(1, 2)).sum().backward()
            optimizer.step()
    assert [state["step"].item() for state in optimizer.state.values()] == [2 + dist.get_rank()] * 2
    ddp.close()


@in_ranks(2)
def test_optimizers_in_backward_do_not_go_with_shards() -> None:
    model = nn.Linear(2, 1)
    step_in_backward(model, lr=0.5)
    with pytest.raises((ConfigError, PhaseError)):
        train(*sharded(model))


@pytest.mark.waits
@in_ranks(2, is_fresh=True)
def test_a_hook_that_raises_on_one_rank_ends_the_others_by_the_timeout() -> None:
    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if raises:
            raise ValueError("not today")
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda done: done.value()[0])

    raises, store, group = False, dist.distributed_c10d._get_default_store(), dist.new_group([0, 1])
    ddp = DistributedDataParallel(nn.Linear(2, 1), process_group=group, config=STALLS)
    ddp.register_comm_hook(None, hook)
    ddp(ones(1, 2)).sum().backward()
    raises = dist.get_rank() == 0
    with pytest.raises(ValueError if raises else StallTimeout):
        ddp(ones(1, 2)).sum().backward()
    if raises:
        store.wait(["the other one has raised"], timedelta(seconds=30))
    store.set("the other one has raised", "")
    ddp.close()
    dist.destroy_process_group(group)


@in_ranks(2, is_fresh=True)
def test_a_look_after_gradients_were_zeroed_by_hand_is_a_step_of_its_own() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    ddp(ones(1, 2)).sum().backward()
    if dist.get_rank() == 0:
        for param in ddp.parameters():
            param.grad.zero_()
        ddp(ones(1, 2)).sum()
    optimizer.step()
    train(ddp, optimizer, num_steps=2 if dist.get_rank() else 1)  # rank 1 waits for no other rank: rank 0 has one behind it
    ddp.close()


@in_ranks(2)
def test_with_weights_a_gradient_is_new_until_the_next_synchronisation() -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))

    def backward(num_tokens: int) -> float:
        ddp.weight(num_tokens)
        ddp(ones(num_tokens, 1)).sum().backward()
        return ddp.module.weight.grad.item()

    assert backward(2) == 1.0  # the mean over all tokens
    with ddp.no_sync():
        assert backward(3) == 3.0  # this rank's sum of the new ones alone
    assert backward(1) == 1.0
    ddp.close()


class Descent:
    """Steps as an optimizer does, and is none of torch's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def step(self) -> None:
        for param in self.model.parameters():
            param -= param.grad


@in_ranks(2)
@pytest.mark.parametrize("is_torchs", [True, False])
def test_steps_that_torch_does_not_know_are_not_skipped(is_torchs: bool) -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1), config=SyncConfig(nonfinite="skip"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0) if is_torchs else Descent(ddp.module)
    (ddp(ones(1, 1)) * float("inf")).sum().backward()
    optimizer.step()
    assert ddp.module.weight.isfinite().item() == is_torchs
    ddp.close()


@in_ranks(2)
def test_after_wait_code_in_cpp_reads_what_was_stepped() -> None:
    ddp, optimizer = sharded(nn.Linear(3, 3, bias=False))
    weight = ddp.module.weight
    for _ in range(3):
        ddp(ones(1, 3)).sum().backward()
        optimizer.step()
        ddp.wait()
        sent, other = weight, torch.empty(0)
        dist.broadcast(sent, 0)
        other.data = weight
        slopes = torch.func.grad(lambda value: (value * value).sum() / 2)(weight.detach())
        for found in (torch.tensor(weight.tolist()), other, slopes):
            assert torch.equal(found, weight.detach().clone())
    ddp.close()


@in_ranks(2)
def test_with_shards_what_is_frozen_is_not_stepped() -> None:
    ddp, optimizer = sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    frozen = ddp.module[0].weight
    frozen.requires_grad_(False)
    frozen.grad, before = torch.ones_like(frozen), frozen.detach().clone()
    ddp(ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(frozen, before)
    ddp.close()


@pytest.mark.waits
@in_ranks(2, is_fresh=True)
def test_with_shards_a_step_of_one_rank_is_an_error() -> None:
    warm, optimizer = sharded(nn.Linear(2, 2))  # imports what the first step needs, which may take longer than the stall
    train(warm, optimizer)
    warm.close()
    ddp = DistributedDataParallel(nn.Linear(2, 2), config=STALLS)
    optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.5)
    train(ddp, optimizer)
    with pytest.raises(StallTimeout):
        train(ddp, optimizer, leaves_out=0 if dist.get_rank() else -1)
    ddp.close()


@in_ranks(4)
def test_rows_that_have_drifted_apart_stay_so_until_rank_0_is_followed() -> None:
    with hybrid(nn.Linear(2, 2, bias=False), "SGD") as (ddp, optimizer):
        with torch.no_grad():
            ddp.module.weight += dist.get_rank() // 2
        train(ddp, optimizer)
        for num_kinds in (2, 1):
            ddp.wait()
            everywhere: list[Tensor] = [torch.empty(2, 2) for _ in range(4)]
            dist.all_gather(everywhere, ddp.module.weight.detach())
            assert len({str(weight.tolist()) for weight in everywhere}) == num_kinds
            ddp.broadcast_parameters()
