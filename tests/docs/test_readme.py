"""Every snippet and command of the README is run, or checked differently if a run takes long; every limit has its tests."""

import contextlib
import re
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.pages import snippets
from support.project import ROOT
from support.ranks import in_ranks
from support.records import record, report
from undertow import (
    DistributedDataParallel,
    ReplicaMismatch,
    ShardedOptimizer,
    StallTimeout,
    SyncConfig,
    attach,
)

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
# The figures of the quickstart's example.
SHOWN = {
    "num_steps": 63,
    "step": 151,
    "step_p50_ms": 101.2,
    "step_p95_ms": 162.0,
    "step_ms": 100.5,
    "forward_ms": 29.4,
    "backward_ms": 60.5,
    "exposed_ms": 5.6,
    "late_rank_ms": 0.0,
    "rest_ms": 5.0,
    "communication_ms": 11.5,
    "overlap": 0.51,
    "synchronized_ms": 96.1,
    "limit_ms": 95.8,
}
SNIPPETS = list(snippets(ROOT / "README.md"))
PYTHON = [snippet for snippet in SNIPPETS if snippet.language == "python"]
(FIRST,) = PYTHON  # test_as_printed.py runs it
NAMED = re.findall(r"`((?:make|pip|torchrun|undertow|python) [^`]+)`", TEXT)
# These take minutes, a network, or processes: each has a check below or in the file that is named. tests/docs/test_guides.py
# knows targets of make and extras of pip.
MADE, INSTALLED = (
    ["make demo", "make test", "make docs"],
    ["pip install '.[cli,page]'", "pip install 'undertow[cli,page] @ git+ADDRESS'"],
)
# test_as_printed.py, tests/runner and tests/dist run these.
ELSEWHERE = [
    "torchrun --nproc-per-node=2 script.py",
    "undertow run --out DIR torchrun --nproc-per-node=2 train.py",
    "undertow report DIR",
    "undertow simulate",
    "undertow docs",
]


def test_every_command_and_snippet_is_run_or_in_a_list() -> None:
    assert set(NAMED) == {*MADE, *INSTALLED, *ELSEWHERE}
    assert [snippet.language for snippet in SNIPPETS] == ["diff", "python", "text"]


def test_the_diff_names_what_the_script_imports() -> None:
    before, after = SNIPPETS[0].code.splitlines()
    assert after.removeprefix("+") in FIRST.code
    exec(f"{before.removeprefix('-')}\n{after.removeprefix('+')}", {})


# Every limit that docs/limits.md states has tests that show it.


PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
LIMITS = [" ".join(text.split()) for text in re.findall(r"^- (.*?)$(?=\n(?:- |\n|\Z))", PAGE + "\n", re.MULTILINE | re.DOTALL)]

# Words of a limit, and its tests.
SHOWN_BY = {
    "NCCL with two or more GPUs": ["test_training_over_nccl_has_the_reference_s_bits"],
    "**Not supported:** ZeRO-3": ["test_a_value_of_a_setting_is_refused", "test_each_mistake_is_an_error_that_says_what_to_do"],
    "With parameters that are DTensors": ["test_each_mistake_is_the_same_error_on_every_rank"],
    "With experts": ["test_what_cannot_be_is_refused"],
    "With a ShardedOptimizer: `join()`": [
        "test_sparse_gradients_are_refused",
        "test_mistakes_are_told",
        "test_join_does_not_go_with_shards",
    ],
    "With outer synchronization": [
        "test_two_features_work_together_or_their_refusal_is_in_the_table",
        "test_a_step_within_synchronized_and_a_new_parameter_are_refused",
    ],
    "in a context of `torch.distributed.rpc`": ["test_a_training_forward_in_a_context_of_rpc_is_refused"],
    "`mean_over_ranks()` inside": [
        "test_a_plain_step_with_a_closure_cannot_be_skipped",
        "test_it_is_refused_inside_a_backward_and_inside_join",
        "test_an_op_that_cannot_be_right_is_refused_on_every_rank",
    ],
    "Freeze, unfreeze, add or replace": [
        "test_a_change_on_one_rank_is_an_error_on_all_while_ranks_compare_their_times",
        "test_experts_may_change_and_their_gradients_may_come_late",
        "test_new_parameters_with_other_values_are_an_error_on_all_ranks",
        "test_parameters_that_are_broadcast_before_the_forward_are_no_error",
    ],
    "On a device, a rank that has changed alone": [
        "test_a_change_that_is_read_a_step_later_is_an_error_then",
        "test_parameters_that_changed_on_some_ranks_only_are_a_mismatch",
    ],
    "reaches two wrapped models": ["test_ranks_that_reach_two_models_in_different_backwards_wait_for_a_change"],
    "taken out of `.grad` in backward": ["test_a_gradient_that_a_hook_takes_away_is_an_error_on_every_rank"],
    "fails before the first gradient": [
        "test_a_loss_that_fails_before_the_first_gradient_counts_as_none",
        "test_a_closure_that_catches_an_error_of_backward_steps_on_the_old_gradients",
    ],
    "leaves out a whole step": ["test_a_rank_that_has_finished_early_is_named_with_its_steps"],
    "one rank alone begins to train": ["test_a_rank_starts_to_train_while_the_others_train_nothing"],
    "whose loss reaches no parameter": [
        "test_a_window_on_top_of_a_mean_that_reaches_nothing_on_one_rank_is_averaged_by_hand",
        "test_a_rank_steps_without_a_window_on_top_of_a_mean_that_reaches_nothing_there",
    ],
    "steps twice on the gradients": ["test_a_rank_that_steps_twice_is_found_by_the_check_of_replicas"],
    "looks at its loss alone": ["test_a_look_after_gradients_were_zeroed_by_hand_is_a_step_of_its_own"],
}


def test_every_limit_has_a_line_in_the_table() -> None:
    named = {limit: [words for words in SHOWN_BY if words in limit] for limit in LIMITS}
    assert {limit: words for limit, words in named.items() if len(words) != 1} == {}
    assert len(SHOWN_BY) == len(LIMITS) <= 20


def test_every_test_of_the_table_exists() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert {name for names in SHOWN_BY.values() for name in names} - set(
        re.findall(r"^def (test_\w+)\(", texts, re.MULTILINE)
    ) == set()


ones = torch.ones
STALLS = SyncConfig(stall_warning_s=1.0, stall_timeout_s=2.0, buffers="off")


# Steps on ones; `leaves_out` is one in which this rank's optimizer does not step.
def train(ddp: DistributedDataParallel, optimizer: object, *, num_steps: int = 2, leaves_out: int = -1) -> None:
    for step in range(num_steps):
        ddp(ones(1, 2)).sum().backward()
        if step != leaves_out:
            optimizer.step()
        optimizer.zero_grad()


def sharded(model: nn.Module, **settings: object) -> tuple[DistributedDataParallel, ShardedOptimizer]:
    ddp = DistributedDataParallel(model, config=SyncConfig(**settings))
    return ddp, ShardedOptimizer(torch.optim.SGD, ddp, lr=0.5)


@in_ranks(2)
def test_a_loss_that_fails_before_the_first_gradient_counts_as_none() -> None:
    model = nn.Linear(2, 1, bias=False)
    with contextlib.closing(DistributedDataParallel(model)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        loss = ddp(ones(1, 2)).sum()
        if dist.get_rank() == 0:
            loss.register_hook(lambda _: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            loss.backward()
        optimizer.step()
        assert model.weight.grad.tolist() == [[0.5, 0.5]]


@in_ranks(2)
def test_a_rank_that_steps_twice_is_found_by_the_check_of_replicas() -> None:
    config = SyncConfig(check_replicas_every=2)
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 1), config=config)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        train(ddp, optimizer, num_steps=1)
        ddp(ones(1, 2)).sum().backward()
        optimizer.step()
        if dist.get_rank() == 1:
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(ReplicaMismatch):
            train(ddp, optimizer, num_steps=3)


@pytest.mark.waits
@in_ranks(2, is_fresh=True)
def test_a_hook_that_raises_on_one_rank_ends_the_others_by_the_timeout() -> None:
    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if raises:
            raise ValueError("not today")
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda done: done.value()[0])

    raises, store, group = False, dist.distributed_c10d._get_default_store(), dist.new_group([0, 1])
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 1), process_group=group, config=STALLS)) as ddp:
        ddp.register_comm_hook(None, hook)
        ddp(ones(1, 2)).sum().backward()
        raises = dist.get_rank() == 0
        with pytest.raises(ValueError if raises else StallTimeout):
            ddp(ones(1, 2)).sum().backward()
        if raises:
            store.wait(["the other one has raised"], timedelta(seconds=30))
        store.set("the other one has raised", "")
    dist.destroy_process_group(group)


@in_ranks(2)
def test_a_closure_that_catches_an_error_of_backward_steps_on_the_old_gradients() -> None:
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 1))) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        ddp(ones(1, 2)).sum().backward()

        def closure() -> Tensor:
            loss = ddp(ones(1, 2)).sum()
            loss.register_hook(lambda _: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                loss.backward()
            return loss

        nn.init.zeros_(ddp.module.bias)
        optimizer.step(closure)
        assert ddp.module.bias.item() == -0.5


@in_ranks(2, is_fresh=True)
def test_a_look_after_gradients_were_zeroed_by_hand_is_a_step_of_its_own() -> None:
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 1))) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
        ddp(ones(1, 2)).sum().backward()
        if dist.get_rank() == 0:
            for param in ddp.parameters():
                param.grad.zero_()
            ddp(ones(1, 2)).sum()
        optimizer.step()
        train(ddp, optimizer, num_steps=2 if dist.get_rank() else 1)  # rank 1 waits for no other rank: rank 0 has one behind it


@in_ranks(2)
def test_after_wait_code_in_cpp_reads_what_was_stepped() -> None:
    ddp, optimizer = sharded(nn.Linear(3, 3, bias=False))
    weight = ddp.module.weight
    for _ in range(3):
        ddp(ones(1, 3)).sum().backward()
        optimizer.step()
        ddp.wait()
        sent, other = weight, torch.empty(0)
        with torch.no_grad():
            dist.broadcast(sent, 0)
        other.data = weight
        for found in (
            torch.tensor(weight.tolist()),
            other,
            torch.func.grad(lambda value: (value * value).sum() / 2)(weight.detach()),
        ):
            assert torch.equal(found, weight.detach().clone())
    ddp.close()


@pytest.mark.slow
@in_ranks(2)
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, attach])
def test_a_module_is_exported_between_steps_and_scripted_after_close(wrap: Any, is_strict: bool) -> None:
    net, inputs = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), (ones(1, 2),)
    with warnings.catch_warnings(), contextlib.closing(wrap(net)) as wrapped:
        warnings.simplefilter("ignore")  # torch announces the end of torch.jit
        model = net if wrap is attach else wrapped
        optimizer = ShardedOptimizer(torch.optim.SGD, wrapped, lr=0.5)
        train(model, optimizer, num_steps=3)
        exported = torch.export.export(net, inputs, strict=is_strict).module()
        assert torch.equal(exported(*inputs), net(*inputs))
        assert torch.equal(torch.jit.trace(net, inputs)(*inputs), net(*inputs))
        train(model, optimizer, num_steps=2)
        wrapped.close()
        assert torch.equal(torch.jit.script(net)(*inputs), net(*inputs))


@in_ranks(2)
def test_the_exact_class_of_a_parameter_is_back_after_wait() -> None:
    ddp, optimizer = sharded(nn.Linear(2, 2, bias=False))
    weight = ddp.module.weight
    train(ddp, optimizer, num_steps=2)
    assert isinstance(weight, nn.Parameter)
    assert type(weight) is not nn.Parameter
    ddp.wait()
    assert type(weight) is nn.Parameter
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
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 2), config=STALLS)) as ddp:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.5)
        train(ddp, optimizer)
        with pytest.raises(StallTimeout):
            train(ddp, optimizer, leaves_out=0 if dist.get_rank() else -1)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_example_of_a_report_is_printed_so(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (example,) = re.findall(r"```text\n(Where a step goes.*?)```", text, re.DOTALL)
    words = str(replace(report(record()), **SHOWN)).split()
    assert example.split() == words[: len(example.split())]
