"""torch's communication hooks beside torch's own class, chains of hooks, and what the recorder says that hooks send."""

import contextlib
import copy
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from statistics import mean
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from support.alike import backward_alike, backwards, require_equal_values
from support.errors import text_of
from support.levels import some
from support.models import CASES, Branches, mlp, noise
from support.naive import TIMEOUT_S, naive_mean, wrapped
from support.ranks import in_ranks
from undertow import DistributedDataParallel, SyncConfig, attach
from undertow.errors import ConfigError, NonFiniteGradient, PlanMismatch, WrongType
from undertow.lab.demo.model import Gpt
from undertow.lab.demo.settings import load_corpus

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compiles scripts, which is deprecated

MLP, CONVOLUTIONS = CASES["mlp"], CASES["convolutions"]
Hook = Callable[..., Any]


def completed(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def power_state(rank: int = 1, *, start: int = 2) -> PowerSGDState:
    return PowerSGDState(None, rank, start_powerSGD_iter=start, min_compression_rate=1)


HOOKS: dict[str, Callable[[], tuple[Any, Hook]]] = {
    "allreduce": lambda: (None, default.allreduce_hook),
    "allreduce of a group": lambda: (dist.group.WORLD, default.allreduce_hook),
    "fp16": lambda: (None, default.fp16_compress_hook),
    "fp16, wrapped": lambda: (None, default.fp16_compress_wrapper(default.allreduce_hook)),
}
BRAIN_HOOKS: dict[str, Callable[[], tuple[Any, Hook]]] = {
    "bf16": lambda: (None, default.bf16_compress_hook),
    "bf16, wrapped": lambda: (None, default.bf16_compress_wrapper(default.allreduce_hook)),
}


@contextlib.contextmanager
def hooked(model: nn.Module, state: Any, hook: Hook, **settings: Any) -> Iterator[DistributedDataParallel]:
    with wrapped(model, **settings) as ddp:
        ddp.register_comm_hook(state, hook)
        yield ddp


@contextlib.contextmanager
def both_classes(make: Callable[[], nn.Module], **settings: Any) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The same model under our class and under torch's."""
    model = make()
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    with wrapped(model, **settings) as ours:
        yield ours, theirs


def train_both(
    models: tuple[nn.Module, nn.Module], optimizers: list[Any], loss: Callable[[nn.Module, int], Tensor], *, num_steps: int
) -> None:
    """Gradients and parameters of both must be the same."""
    for step in range(num_steps):
        backward_alike(*models, loss, steps=[step], mean=lambda _: None)
        for optimizer in optimizers:
            optimizer.step()
        require_equal_values(*models)


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("bucket_cap_mb", [1e-6, None], ids=["many buckets", "default plan"])
@pytest.mark.parametrize("case", some(["mlp", "convolutions", "tied transformer"], most=2))
@pytest.mark.parametrize("name", some(HOOKS, most=2))
def test_a_hook_does_what_it_does_under_torchs_class(name: str, case: str, bucket_cap_mb: float | None) -> None:
    def loss(model: Any, step: int) -> Tensor:
        with model.no_sync():
            CASES[case].loss(model, 2 * step).backward()
        return CASES[case].loss(model, 2 * step + 1)

    with both_classes(CASES[case].model, bucket_cap_mb=bucket_cap_mb) as models:
        for model in models:
            model.register_comm_hook(*HOOKS[name]())
        train_both(models, [torch.optim.SGD(model.parameters(), lr=0.05) for model in models], loss, num_steps=4)


def mean_in_bfloat16(bare: nn.Module) -> None:
    for param in bare.parameters():
        brain = param.grad.bfloat16() / dist.get_world_size()
        dist.all_reduce(brain)
        param.grad.copy_(brain)


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("name", BRAIN_HOOKS)
def test_bfloat16_hooks_reduce_on_the_cpu_where_torch_refuses_them(name: str) -> None:
    bare = mlp()
    with hooked(copy.deepcopy(bare), *BRAIN_HOOKS[name]()) as ddp:
        backward_alike(ddp, bare, MLP.loss, mean=mean_in_bfloat16)


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_a_hook_reduces_sparse_gradients_too() -> None:
    """Rows travel beside the bucket, through the same hook: each sparse gradient is a bucket of its own to it."""
    words = nn.Sequential(nn.Embedding(7, 4, sparse=True), nn.Linear(4, 2))
    bare, seen = copy.deepcopy(words), []

    def note(_state, bucket):
        seen.append((bucket.buffer().is_sparse, len(bucket.gradients()), bucket.is_last()))
        return default.allreduce_hook(None, bucket)

    def mean_of_dense(bare: nn.Module) -> None:
        bare[0].weight.grad = bare[0].weight.grad.to_dense()
        naive_mean(bare)
        assert words[0].weight.grad.is_sparse
        words[0].weight.grad = words[0].weight.grad.to_dense()
        assert sorted(seen, key=str) == [(False, 2, not seen[-1][0]), (True, 1, seen[-1][0])]
        seen.clear()

    with hooked(words, None, note) as ddp:
        backward_alike(
            ddp,
            bare,
            lambda model, step: model(torch.tensor([step, dist.get_rank(), 6])).square().sum(),
            steps=range(4),
            mean=mean_of_dense,
        )
        assert ddp.report().communication_ms > 0


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(("bucket_cap_mb", "num_buckets"), [(1e-6, 4), (None, 1)])
def test_a_hook_is_given_a_bucket_with_torchs_methods(bucket_cap_mb: float | None, num_buckets: int) -> None:
    """It reduces nothing, and is not called for what only accumulates."""

    def look_around(seen, bucket):
        buffer, pieces, params = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.shape == (sum(param.numel() for param in params),)  # without padding or trailer
        assert [piece.shape for piece in pieces] == [param.shape for param in params]
        begin = buffer.data_ptr()
        assert all(begin <= piece.data_ptr() < begin + buffer.nbytes for piece in pieces)
        seen.append((bucket.index(), bucket.is_last(), set(map(id, params))))
        return completed(buffer)

    def loss(model: nn.Module, step: int) -> Tensor:
        with ddp.no_sync():
            MLP.loss(model, 2 * step).backward()
        return MLP.loss(model, 2 * step + 1)

    def require_seen(_bare: nn.Module) -> None:
        assert ([(index, is_last) for index, is_last, _ in seen], set().union(*(params for *_, params in seen))) == (
            [(at, at == num_buckets - 1) for at in range(num_buckets)],
            set(map(id, ddp.parameters())),
        )
        seen.clear()

    seen: list[tuple[int, bool, set[int]]] = []
    bare = mlp()
    with hooked(copy.deepcopy(bare), seen, look_around, bucket_cap_mb=bucket_cap_mb) as ddp:
        backward_alike(ddp, bare, loss, mean=require_seen)


def no_future(_state, bucket):
    return bucket.buffer()


def too_short(_state, bucket):
    return completed(bucket.buffer()[1:])


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
def test_a_hook_that_breaks_its_promise_is_told_so_in_backward(hook: Hook, text: str) -> None:
    with hooked(mlp(), None, hook) as ddp:
        assert text_of(WrongType, MLP.loss(ddp, 0).backward) == text


@in_ranks(2)
@pytest.mark.parametrize(("name", "hook"), [("ALLREDUCE", default.allreduce_hook), ("FP16_COMPRESS", default.fp16_compress_hook)])
def test_torchs_builtin_hooks_go_by_their_names(name: str, hook: Hook) -> None:
    with wrapped(MLP.model()) as ddp, hooked(MLP.model(), None, hook) as other:
        ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
        backward_alike(ddp, other, MLP.loss, mean=lambda _: None)


FAILING: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "dense": (mlp, lambda step: noise(5, 6, step=step)),
    "sparse": (lambda: nn.Embedding(7, 4, sparse=True), lambda step: torch.tensor([step, dist.get_rank()])),
}


@in_ranks(2)
@pytest.mark.parametrize("kind", FAILING)
def test_a_hook_that_failed_on_all_ranks_is_called_again_in_the_next_round(kind: str) -> None:
    calls, (make, inputs) = [], FAILING[kind]

    def hook(_state, bucket):
        calls.append(bucket.index())
        if len(calls) == 2:
            raise ZeroDivisionError
        return default.allreduce_hook(None, bucket)

    with hooked(make(), None, hook) as ddp:
        for step in range(4):
            ddp.zero_grad()
            with pytest.raises(ZeroDivisionError) if step == 1 else contextlib.nullcontext():
                ddp(inputs(step)).square().mean().backward()


@in_ranks(1)
@pytest.mark.parametrize("wrap", [DistributedDataParallel, attach])
def test_a_single_rank_calls_a_hook_which_may_reduce_over_others(wrap: Callable[[nn.Module], Any]) -> None:
    def doubled(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future = torch.futures.Future[Tensor]()
        future.set_result(bucket.buffer() * 2)
        return future

    net, bare = mlp(), mlp()
    bare.load_state_dict(net.state_dict())
    with contextlib.closing(wrap(net)) as model:
        called = model if isinstance(model, DistributedDataParallel) else net
        MLP.loss(called, 0).backward()
        net.zero_grad()
        model.register_comm_hook(None, doubled)
        for step in range(2):
            net.zero_grad()
            bare.zero_grad()
            MLP.loss(called, step).backward()
            MLP.loss(bare, step).backward()
            for ours, wanted in zip(net.parameters(), bare.parameters(), strict=True):
                assert torch.equal(ours.grad, 2 * wanted.grad)


@pytest.mark.deep
@in_ranks(2)
def test_hooks_of_two_models_take_turns() -> None:
    """One backward through both, whose hooks send over the same group: in one order on every rank."""
    models = nn.Sequential(mlp(), nn.Linear(4, 2))
    bare, ways = copy.deepcopy(models), (None, default.allreduce_hook)
    with hooked(models[0], *ways, bucket_cap_mb=1e-6) as first, hooked(models[1], *ways, bucket_cap_mb=1e-6) as second:
        backward_alike(nn.Sequential(first, second), bare, MLP.loss, steps=range(20))


@in_ranks(2)
@pytest.mark.parametrize("num_steps_before", [0, 1, 4])
@pytest.mark.parametrize(
    "hooks",
    [(default.allreduce_hook, None), (None, default.allreduce_hook), (default.allreduce_hook, default.fp16_compress_hook)],
)
def test_hooks_that_differ_are_told_on_every_rank(hooks: tuple[Hook | None, Hook | None], num_steps_before: int) -> None:
    """Their messages of two sizes would end a process."""
    mine, (first, second) = hooks[dist.get_rank()], (getattr(hook, "__name__", None) for hook in hooks)
    with wrapped(mlp()) as ddp:
        backwards(ddp, MLP.loss, range(num_steps_before))
        if mine is not None:
            ddp.register_comm_hook(None, mine)
        text = text_of(PlanMismatch, lambda: MLP.loss(ddp, 0).backward())
    assert text.startswith("ranks disagree on the settings.\n")
    assert f"first difference: communication hook is {first!r} on rank 0 and {second!r} on rank 1\n" in text


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("name", some(["none", "allreduce", "fp16", "PowerSGD"], most=2))
def test_the_bytes_that_a_hook_sends_are_not_told(name: str) -> None:
    with wrapped(mlp(), bucket_cap_mb=1e-6, record="full") as ddp:
        if name != "none":
            ddp.register_comm_hook(*HOOKS.get(name, lambda: (power_state(), powerSGD_hook))())
        backwards(ddp, MLP.loss, range(3))
        expected = [bucket.wire_bytes if name == "none" else 0 for bucket in ddp.plan.buckets]
        report, trace = ddp.report(), ddp.traces()[-1]
    assert (
        [bucket.sent_bytes for bucket in report.buckets],
        report.sent_bytes,
        [event.num_bytes for event in trace.communication],
    ) == (expected, sum(expected), expected)


def trained_steps(net: nn.Module, state: Any, hook: Hook, *, num_steps: int, **settings: Any) -> Iterator[int]:
    """Yields the number of each step, before it."""
    with hooked(net, state, hook, **settings) as ddp:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(num_steps):
            yield step
            optimizer.zero_grad()
            MLP.loss(ddp, step).backward()
            optimizer.step()


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("has_feedback", [False, True], ids=["plain", "with error feedback"])
def test_power_sgd_continues_after_a_layer_is_frozen(has_feedback: bool) -> None:
    """The ranks leave the old buckets with zeros, which torch's hook divides by zero."""
    net, state = mlp(), power_state()
    state.use_error_feedback = has_feedback
    for step in trained_steps(net, state, powerSGD_hook, num_steps=7):
        net[0].weight.requires_grad_(step < 4)
    assert all(param.isfinite().all() for param in net.parameters())


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_a_hook_with_another_state_is_told_once_that_its_buckets_have_changed() -> None:
    def hook(state, bucket):
        return default.allreduce_hook(None, bucket)

    net, told, log = mlp(), BufferingHandler(100), logging.getLogger("undertow")
    log.addHandler(told)
    for step in trained_steps(net, {}, hook, num_steps=5):
        net[0].weight.requires_grad_(step < 2)
        net[0].bias.requires_grad_(step < 3)
    log.removeHandler(told)
    assert [record.getMessage().partition(" have other")[0] for record in told.buffer] == [
        f"the buckets of the communication hook {hook.__qualname__}"
    ] * (dist.get_rank() == 0)


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_power_sgd_continues_after_a_step_that_is_skipped() -> None:
    """Its error memory and its matrices hold the NaN of one rank."""
    net, bad = mlp(), []
    net[0].weight.register_hook(lambda grad: grad * torch.nan if bad and dist.get_rank() == 1 else grad)
    values: list[Tensor] = []
    for step in trained_steps(net, power_state(), powerSGD_hook, num_steps=7, nonfinite="skip"):
        bad[:] = [step] if step == 4 else []
        values.append(net[0].weight.detach().clone())
    assert [torch.equal(*pair) for pair in itertools.pairwise(values)] == [step == 4 for step in range(6)]
    assert net[0].weight.isfinite().all()


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_power_sgd_continues_after_a_step_without_the_parameters_of_a_bucket() -> None:
    """Its hook gets zeros for them, and its memory becomes NaN."""
    net = Branches()
    with hooked(net, power_state(), powerSGD_hook, nonfinite="raise", bucket_cap_mb=1e-6) as ddp:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for step in range(8):
            optimizer.zero_grad()
            ddp(noise(3, 4, step=step), (0, 1, 2) if step < 2 else (step % 3,)).square().mean().backward()
            optimizer.step()
    assert all(param.isfinite().all() for param in net.parameters())


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_a_step_is_skipped_if_a_hook_makes_gradients_infinite() -> None:
    net, bad = mlp(), []

    def hook(_state, bucket):
        return completed(bucket.buffer() * torch.inf if bad else torch.ones_like(bucket.buffer()))

    for step in trained_steps(net, None, hook, num_steps=4, nonfinite="skip"):
        bad[:] = [step] if step == 2 else []
    assert all(param.isfinite().all() for param in net.parameters())


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_a_result_that_a_hook_makes_infinite_is_told_as_the_hooks() -> None:
    def infinite(_state, bucket):
        return completed(bucket.buffer() * torch.inf)

    with hooked(nn.Linear(3, 1), None, infinite, nonfinite="raise") as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        ddp(noise(2, 3)).sum().backward()
        assert text_of(NonFiniteGradient, optimizer.step).startswith(
            f"the result of the communication hook {infinite.__qualname__!r} for 'weight', 'bias' is not finite (NaN or Inf).\n"
            "  synchronization 1, bucket 0\n"
        )


CONTEXT = 32


def gpt_loss(state: PowerSGDState | None = None) -> float:
    """The mean loss of the last steps, over both ranks."""
    torch.manual_seed(1)
    text = torch.frombuffer(bytearray(load_corpus()), dtype=torch.uint8)
    shuffle = torch.Generator().manual_seed(dist.get_rank())
    with wrapped(Gpt(num_layers=2, width=128, context=CONTEXT)) as ddp:
        if state is not None:
            ddp.register_comm_hook(state, powerSGD_hook)
        optimizer, losses = torch.optim.AdamW(ddp.parameters(), lr=1e-3), []
        for _ in range(80):
            starts = torch.randint(len(text) - CONTEXT, (8, 1), generator=shuffle)
            optimizer.zero_grad()
            loss = ddp(text[starts + torch.arange(CONTEXT + 1)].long())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        of_all = torch.tensor(mean(losses[-20:]), dtype=torch.float64)
        dist.all_reduce(of_all)
        return float(of_all) / dist.get_world_size()


@pytest.mark.slow
@in_ranks(2, timeout_s=240.0)
def test_power_sgd_trains_the_demos_gpt_to_the_same_loss_with_a_tenth_of_the_bytes() -> None:
    state = power_state(4, start=10)
    loss, compressed_loss = gpt_loss(), gpt_loss(state)
    _, num_elements, num_compressed = state.compression_stats()
    # Shown by -rP, for docs/concepts.md.
    print(f"losses {loss:.4f} {compressed_loss:.4f}; ratio of bytes {num_compressed / num_elements:.4f}", flush=True)
    assert compressed_loss <= 1.02 * loss, (loss, compressed_loss)  # what the design promises: within 2 %
    assert num_compressed <= num_elements / 10, (num_elements, num_compressed)
    assert loss < 4.0  # it has learned something: untrained it is that of 256 equally likely bytes, 5.5


@contextlib.contextmanager
def pinned(module: nn.Module, hook: Callable[[None, Any], Any]) -> Iterator[None]:
    """Trains one step under a plan that is pinned, and registers a hook that the next step is to meet about."""
    with contextlib.closing(attach(module)) as sync:
        plan = sync.plan.to_json()
    with contextlib.closing(attach(module, config=SyncConfig(plan=plan))) as sync:
        module(torch.ones(2, 4)).sum().backward()
        module.zero_grad()
        sync.register_comm_hook(None, hook)
        yield


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@in_ranks(2)
def test_a_change_that_comes_in_a_backward_is_refused_by_the_next_forward_until_it_is_taken_back() -> None:
    module = layers()
    with pinned(module, default.allreduce_hook):
        loss = module(torch.ones(2, 4)).sum()
        handle = module[0].weight.register_hook(lambda _: setattr(module, "bad", nn.Parameter(torch.zeros(3))))
        loss.backward()
        handle.remove()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that the end of this forward fails too
            for _ in range(2):
                with pytest.raises(ConfigError, match="the saved plan is for another model"):
                    module(torch.ones(2, 4))
        del module.bad
        for _ in range(2):
            module.zero_grad()
            module(torch.ones(2, 4)).sum().backward()
        assert all(param.grad is not None for param in module.parameters())
