"""torch's communication hooks beside torch's own class, chains of hooks, and what the recorder says that hooks send."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import undertow
from support.drop_in import TIMEOUT_S, groups_of
from support.errors import text_of
from support.models import CASES, mlp, noise
from support.naive import gradients, naive_mean, require_same, wrapped
from support.ranks import Ranks, in_ranks
from undertow.demo.corpus import load_corpus
from undertow.demo.model import Gpt, GptShape
from undertow.errors import PlanMismatch
from undertow.runtime.comm_hook import HookedBucket

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compiles scripts, which is deprecated
    from torch.distributed.optim import PostLocalSGDOptimizer

TorchsClass = nn.parallel.DistributedDataParallel
NUM_STEPS = 4


@contextlib.contextmanager
def both_classes(make: Callable[[], nn.Module], **settings: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The same model under our class and under torch's."""
    model = make()
    theirs = TorchsClass(copy.deepcopy(model))
    with wrapped(model, **settings) as ours:
        yield ours, theirs


Hooks = Callable[[], tuple[Any, Callable[..., Any]]]
HOOKS: dict[str, Hooks] = {
    "allreduce": lambda: (None, default.allreduce_hook),
    "allreduce of a group": lambda: (dist.group.WORLD, default.allreduce_hook),
    "fp16": lambda: (None, default.fp16_compress_hook),
    "fp16, wrapped": lambda: (None, default.fp16_compress_wrapper(default.allreduce_hook)),
    "a chain": lambda: (None, undertow.chain((2.0, scale), (None, default.fp16_compress_hook), (0.25, scale))),
}


def scale(factor, bucket):
    """A hook that does not communicate."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer().mul_(factor))
    return done


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, None], ids=["many buckets", "default plan"])
@pytest.mark.parametrize("case", ["mlp", "convolutions", "tied transformer"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_does_what_it_does_under_torchs_class(name: str, case: str, bucket_cap_mb: float | None) -> None:
    case_ = CASES[case]
    with both_classes(case_.model, bucket_cap_mb=bucket_cap_mb) as models:
        for model in models:
            model.register_comm_hook(*HOOKS[name]())
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
        for step in range(NUM_STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                with model.no_sync():
                    case_.loss(model, 2 * step).backward()
                case_.loss(model, 2 * step + 1).backward()
            require_same(*map(gradients, models))
            for optimizer in optimizers:
                optimizer.step()


def bfloat16_mean(hook: Callable[..., Any]) -> None:
    bare = mlp()
    with wrapped(copy.deepcopy(bare)) as ddp:
        ddp.register_comm_hook(None, hook)
        for model in (ddp, bare):
            model(noise(5, 6)).square().mean().backward()
        for param in bare.parameters():
            brain = param.grad.bfloat16() / dist.get_world_size()
            dist.all_reduce(brain)
            param.grad.copy_(brain)
        require_same(*map(gradients, (ddp, bare)))


@pytest.mark.parametrize("hook", [default.bf16_compress_hook, default.bf16_compress_wrapper(default.allreduce_hook)])
def test_bfloat16_hooks_reduce_on_the_cpu_where_torch_refuses_them(two_ranks: Ranks, hook: Callable[..., Any]) -> None:
    two_ranks.run(bfloat16_mean, Unpickled(hook.__name__), timeout_s=TIMEOUT_S)


class Unpickled:
    """One of torch's hooks by name: what a wrapper has made cannot be sent to a rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, state, bucket):
        if self.name == "bf16_compress_hook":
            return default.bf16_compress_hook(state, bucket)
        return default.bf16_compress_wrapper(default.allreduce_hook)(state, bucket)


def power_state(rank: int = 1, *, start: int = 2) -> PowerSGDState:
    return PowerSGDState(None, rank, start_powerSGD_iter=start, min_compression_rate=1)


POWER_HOOKS: dict[str, Callable[..., Any]] = {
    "PowerSGD": powerSGD_hook,
    "PowerSGD in fp16": default.fp16_compress_wrapper(powerSGD_hook),
    "PowerSGD in a chain": lambda state, bucket: undertow.chain((0.5, scale), (state, powerSGD_hook), (2.0, scale))(None, bucket),
}


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("bucket_cap_mb", [1e-4, None], ids=["many buckets", "default plan"])
@pytest.mark.parametrize("name", POWER_HOOKS)
def test_power_sgd_makes_of_our_buckets_what_it_makes_of_the_same_values_by_hand(name: str, bucket_cap_mb: float | None) -> None:
    """Torch's own class orders a bucket otherwise, so that its random start is another one: so the hook is called by hand."""
    hook = POWER_HOOKS[name]
    bare = CASES["convolutions"].model()
    with wrapped(copy.deepcopy(bare), bucket_cap_mb=bucket_cap_mb, order="reverse", buffers="off") as ddp:
        ddp.register_comm_hook(power_state(), hook)
        state, params = power_state(), list(bare.parameters())
        for step in range(NUM_STEPS + 2):
            for model in (ddp, bare):
                model.zero_grad()
                CASES["convolutions"].loss(model, step).backward()
            for bucket in ddp.plan.buckets:
                own = [params[index] for index in bucket.params]
                # In memory order, as they lie in a bucket.
                flat = torch.cat([param.grad.as_strided((param.numel(),), (1,)) for param in own])
                is_last = bucket.index == len(ddp.plan.buckets) - 1
                result = hook(state, HookedBucket(bucket.index, flat, own, is_last=is_last)).wait()
                for param, piece in zip(own, result.split([param.numel() for param in own]), strict=True):
                    param.grad.as_strided((param.numel(),), (1,)).copy_(piece)
            require_same(*map(gradients, (ddp, bare)))
        assert len(state.error_dict) > 0  # it has compressed something


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("post_local_gradient_allreduce", [True, False])
def test_post_local_sgd_trains_as_under_torchs_class(post_local_gradient_allreduce: bool) -> None:
    """Global steps first, then steps of pairs or of each rank, with an average of models in every second one."""
    subgroup = groups_of(*[[rank] for rank in range(dist.get_world_size())])[0]
    case = CASES["mlp"]
    with both_classes(case.model) as models:
        optimizers = []
        for model in models:
            state = PostLocalSGDState(None, subgroup, 2, post_local_gradient_allreduce)
            model.register_comm_hook(state, post_localSGD_hook)
            inner = torch.optim.SGD(model.parameters(), lr=0.01)
            optimizers.append(PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=2)))
        for step in range(8):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                case.loss(model, step).backward()
            require_same(*map(gradients, models))
            for optimizer in optimizers:
                optimizer.step()
            require_same(*({name: param.detach() for name, param in model.named_parameters()} for model in models))
    dist.destroy_process_group(subgroup)


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_a_hook_reduces_sparse_gradients_too() -> None:
    """Rows travel beside the bucket, through the same hook: each sparse gradient is a bucket of its own to it."""
    words = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    bare = copy.deepcopy(words)
    seen = []

    def note(_state, bucket):
        seen.append((bucket.buffer().is_sparse, len(bucket.gradients()), bucket.is_last()))
        return default.allreduce_hook(None, bucket)

    with wrapped(words) as ddp:
        ddp.register_comm_hook(None, note)
        for step in range(NUM_STEPS):
            seen.clear()
            for model in (ddp, bare):
                model.zero_grad()
                model(torch.tensor([step, dist.get_rank(), 6])).square().sum().backward()
            for param in bare.parameters():
                grad = param.grad.to_dense() / dist.get_world_size()
                dist.all_reduce(grad)
                param.grad = grad
            assert words[0].weight.grad.is_sparse
            ours = {name: grad if grad is None else grad.to_dense() for name, grad in gradients(ddp).items()}
            require_same(ours, gradients(bare))
            assert sorted(seen, key=str) == [(False, 2, not seen[-1][0]), (True, 1, seen[-1][0])]
        assert ddp.report(show=False).sent_bytes > 0


def fails_in_the_second_call(make: Callable[[], nn.Module], inputs: Callable[[int], torch.Tensor]) -> list[str]:
    calls = []

    def hook(_state, bucket):
        calls.append(bucket.index())
        if len(calls) == 2:
            raise ZeroDivisionError
        return default.allreduce_hook(None, bucket)

    with wrapped(make()) as ddp:
        ddp.register_comm_hook(None, hook)
        outcomes = []
        for step in range(4):
            ddp.zero_grad()
            try:
                ddp(inputs(step)).square().mean().backward()
                outcomes.append("")
            except ZeroDivisionError as error:
                outcomes.append(type(error).__name__)
        return outcomes


def rows(step: int) -> torch.Tensor:
    return torch.tensor([step, dist.get_rank()])


def only_rows() -> nn.Module:
    return nn.Embedding(7, 4, sparse=True)


def inputs_of_mlp(step: int) -> torch.Tensor:
    return noise(5, 6, step=step)


@pytest.mark.parametrize(("make", "inputs"), [(mlp, inputs_of_mlp), (only_rows, rows)], ids=["dense", "sparse"])
def test_a_hook_that_failed_on_all_ranks_is_called_again_in_the_next_round(
    two_ranks: Ranks, make: Callable[[], nn.Module], inputs: Callable[[int], torch.Tensor]
) -> None:
    assert two_ranks.run(fails_in_the_second_call, make, inputs) == [["", "ZeroDivisionError", "", ""]] * 2


@in_ranks(2)
def test_a_hook_goes_on_in_another_group() -> None:
    bare = mlp()
    with wrapped(copy.deepcopy(bare)) as ddp:
        ddp.register_comm_hook(None, default.allreduce_hook)
        ddp(noise(5, 6)).square().mean().backward()
        ddp._update_process_group(dist.group.WORLD)
        for step in range(1, 3):
            for model in (ddp, bare):
                model.zero_grad()
                model(noise(5, 6, step=step)).square().mean().backward()
            naive_mean(bare)
            require_same(*map(gradients, (ddp, bare)))


@in_ranks(2)
def test_hooks_of_two_models_take_turns() -> None:
    """One backward through both, whose hooks send over the same group: in one order on every rank."""
    first, second = mlp(), nn.Linear(4, 2)
    bare = copy.deepcopy(nn.Sequential(first, second))
    with wrapped(first, bucket_cap_mb=1e-6) as before, wrapped(second, bucket_cap_mb=1e-6) as behind:
        for model in (before, behind):
            model.register_comm_hook(None, default.allreduce_hook)
        for step in range(20):
            for model in (before, behind, bare):
                model.zero_grad()
            behind(before(noise(5, 6, step=step))).square().mean().backward()
            bare(noise(5, 6, step=step)).square().mean().backward()
            naive_mean(bare)
            require_same(gradients(nn.Sequential(first, second)), gradients(bare))


Hook = Callable[..., Any] | None


def unlike_hooks(first: Hook, second: Hook, num_steps_before: int) -> str:
    """`first` on rank 0 and `second` on rank 1, which expect messages of other sizes."""
    hook = first if dist.get_rank() == 0 else second
    with wrapped(mlp()) as ddp:
        for step in range(num_steps_before):
            ddp.zero_grad()
            ddp(noise(5, 6, step=step)).square().mean().backward()
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        return text_of(PlanMismatch, lambda: ddp(noise(5, 6)).square().mean().backward())


@pytest.mark.parametrize("num_steps_before", [0, 1, 4])
@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        (default.allreduce_hook, None, "'allreduce_hook' on rank 0 and None on rank 1"),
        (None, default.allreduce_hook, "None on rank 0 and 'allreduce_hook' on rank 1"),
        (default.allreduce_hook, default.fp16_compress_hook, "'allreduce_hook' on rank 0 and 'fp16_compress_hook' on rank 1"),
    ],
    ids=["on rank 0", "on rank 1", "two"],
)
def test_hooks_that_differ_are_told_on_every_rank(
    two_ranks: Ranks, first: Hook, second: Hook, names: str, num_steps_before: int
) -> None:
    """Such messages of two sizes would end a process."""
    for text in two_ranks.run(unlike_hooks, first, second, num_steps_before):
        assert text.startswith("ranks disagree on the settings.\n")
        assert f"first difference: communication hook is {names}\n" in text


@in_ranks(2)
@pytest.mark.parametrize("is_accumulating", [False, True])
def test_a_hook_may_be_registered_between_micro_batches(is_accumulating: bool) -> None:
    """What was accumulated before is reduced by the hook too."""
    bare = mlp()
    with wrapped(copy.deepcopy(bare)) as ddp:
        for step in range(6):
            for model in (ddp, bare):
                model.zero_grad()
                with ddp.no_sync():
                    model(noise(5, 6, step=2 * step)).square().mean().backward()
            if step == 3:
                ddp.register_comm_hook(None, default.allreduce_hook)
            for model in (ddp, bare):
                with ddp.no_sync() if is_accumulating else contextlib.nullcontext():
                    model(noise(5, 6, step=2 * step + 1)).square().mean().backward()
            if is_accumulating:
                ddp.reduce_gradients_async().wait()
            naive_mean(bare)
            require_same(*map(gradients, (ddp, bare)))


def plans_under_a_hook() -> list[str]:
    with wrapped(mlp()) as ddp:
        ddp.register_comm_hook(None, default.allreduce_hook)
        plans = []
        for step in range(12):
            ddp.zero_grad()
            ddp(noise(5, 6, step=step)).square().mean().backward()
            plans.append(ddp.plan.fingerprint)
        assert "a communication hook may keep state for every bucket" in str(ddp.explain(show=False).why)
        return plans


def test_a_hook_keeps_the_plan(two_ranks: Ranks) -> None:
    assert len({plan for plans in two_ranks.run(plans_under_a_hook) for plan in plans}) == 1


def sent_bytes(name: str) -> tuple[list[int], list[int]]:
    """By bucket, what the report says was handed to collectives for its gradients, and what the plan has beside them."""
    hooks: dict[str, Hooks] = {
        **HOOKS,
        "PowerSGD": lambda: (power_state(start=2), powerSGD_hook),
        "nothing": lambda: (1.0, scale),
        "bf16": lambda: (None, default.bf16_compress_hook),
    }
    with wrapped(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))), bucket_cap_mb=1e-6) as ddp:
        if name != "none":
            ddp.register_comm_hook(*hooks[name]())
        for step in range(8):
            ddp.zero_grad()
            ddp(noise(5, 16, step=step)).square().mean().backward()
        report = ddp.report(show=False)
        assert report.sent_bytes == sum(bucket.sent_bytes for bucket in report.buckets)
        sent = [bucket.sent_bytes for bucket in report.buckets]
        if name == "none":
            return sent, [bucket.wire_bytes for bucket in ddp.plan.buckets]
        trailers = [(bucket.storage_numel - bucket.trailer.start) * 4 for bucket in ddp.plan.buckets]
        return sent, [SENT[name] + trailer for trailer in trailers]


MATRIX = 16 * 16 * 4
SENT = {
    "none": MATRIX,
    "allreduce": MATRIX,
    "fp16": MATRIX // 2,
    "fp16, wrapped": MATRIX // 2,
    "bf16": MATRIX // 2,
    "a chain": MATRIX // 2,
    "PowerSGD": (16 + 16) * 4,  # P and Q, which its callbacks send
    "nothing": 0,
}


@pytest.mark.parametrize("name", SENT)
def test_the_report_shows_what_a_hook_really_sends(two_ranks: Ranks, name: str) -> None:
    for sent, expected in two_ranks.run(sent_bytes, name):
        assert sent == expected
        assert len(sent) == 3


@torch.compile(backend="aot_eager", fullgraph=True)
def halves(buffer: torch.Tensor) -> torch.Tensor:
    return (buffer / 2).half()


def compiled_in_one_graph() -> tuple[int, int]:
    """fullgraph=True is an error where anything keeps torch.compile from compiling, such as looking on."""

    def hook(_state, bucket):
        work = dist.all_reduce(halves(bucket.buffer()), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].float())

    with wrapped(nn.Linear(16, 16, bias=False), record="full") as ddp:
        ddp.register_comm_hook(None, hook)
        for step in range(3):
            ddp.zero_grad()
            ddp(noise(5, 16, step=step)).square().mean().backward()
        bucket = ddp.plan.buckets[0]
        return ddp.report(show=False).sent_bytes, MATRIX // 2 + (bucket.storage_numel - bucket.trailer.start) * 4


def test_what_a_compiled_hook_sends_is_counted_without_cutting_its_graph(two_ranks: Ranks) -> None:
    for sent, expected in two_ranks.run(compiled_in_one_graph, timeout_s=TIMEOUT_S):
        assert sent == expected


SHAPE = GptShape(num_layers=2, num_heads=4, width=128, context=32, batch=8)
NUM_TRAINED, NUM_LAST = 80, 20


def gpt_losses(*, is_compressed: bool) -> tuple[float, int]:
    """The mean loss of the last steps, over both ranks, and the bytes of the median step."""
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(load_corpus()), dtype=torch.uint8)
    shuffle = torch.Generator().manual_seed(dist.get_rank())
    with wrapped(Gpt(SHAPE)) as ddp:
        if is_compressed:
            ddp.register_comm_hook(PowerSGDState(None, 4, start_powerSGD_iter=10, min_compression_rate=1), powerSGD_hook)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        losses = []
        for _ in range(NUM_TRAINED):
            starts = torch.randint(len(text) - SHAPE.context, (SHAPE.batch, 1), generator=shuffle)
            optimizer.zero_grad()
            loss = ddp(text[starts + torch.arange(SHAPE.context + 1)].long())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        of_all = torch.tensor(mean(losses[-NUM_LAST:]), dtype=torch.float64)
        dist.all_reduce(of_all)
        return float(of_all) / dist.get_world_size(), ddp.report(show=False).sent_bytes


def gpt_with_and_without() -> tuple[tuple[float, int], tuple[float, int]]:
    return gpt_losses(is_compressed=False), gpt_losses(is_compressed=True)


def test_power_sgd_trains_the_demos_gpt_to_the_same_loss_with_a_tenth_of_the_bytes(two_ranks: Ranks) -> None:
    for (loss, num_bytes), (compressed_loss, compressed_bytes) in two_ranks.run(gpt_with_and_without, timeout_s=240.0):
        assert compressed_loss <= 1.02 * loss, (loss, compressed_loss)  # what the design promises: within 2 %
        assert compressed_bytes <= num_bytes / 10, (num_bytes, compressed_bytes)
        # Shown by -rP, for docs/concepts.md.
        print(f"loss {loss:.4f}, compressed {compressed_loss:.4f}: ratio {compressed_loss / loss:.4f}")
        print(f"bytes {num_bytes}, compressed {compressed_bytes}: ratio {compressed_bytes / num_bytes:.4f}")
        assert loss < 4.0  # it has learned something: untrained it is that of 256 equally likely bytes, 5.5
