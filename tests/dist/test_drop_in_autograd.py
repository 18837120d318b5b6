"""Graphs beyond what programs have: losses, outputs, hooks, gradients of gradients, other dtypes, and compiled models."""

import contextlib
import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc
from torch.func import functional_call

from support.alike import backward_alike, heard, of_all_ranks, require_equal_values, train
from support.errors import text_of
from support.inside import CODE_OF_ROUNDS, before_lines
from support.levels import some
from support.models import CASES, mlp, noise
from support.naive import TIMEOUT_S, naive_mean, require_same, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from support.sharded import require_equal, training
from undertow import DistributedDataParallel, PhaseError, SyncConfig, attach, average_gradients

MLP = CASES["mlp"]


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def in_bfloat16(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def changed_in_place(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).mul_(2).add_(1)
    out[:, 0] = 0
    return out.square().mean()


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("loss", [in_bfloat16, changed_in_place])
def test_the_loss_may_do_anything_with_a_forward(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    with wrapped_and_bare(smooth(), bucket_cap_mb=1e-6) as (ddp, bare):
        backward_alike(ddp, bare, lambda model, step: loss(model, noise(5, 6, step=step)))
        assert {param.grad.dtype for param in ddp.parameters()} == {torch.float32}


# As a signal handler does before it saves: it may come between any two lines.
@in_ranks(2)
def test_wait_may_be_called_anywhere_in_a_backward() -> None:
    with wrapped_and_bare(mlp(), bucket_cap_mb=1e-4) as (ddp, bare), before_lines(CODE_OF_ROUNDS, ddp.wait) as ran:
        backward_alike(ddp, bare, MLP.loss)
    assert len(ran) > 100


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("of_the_wrapper", [True, False], ids=["of the wrapper", "of the module"])
def test_a_functional_call_trains_what_its_parameters_are_made_from(of_the_wrapper: bool) -> None:
    """Every second step runs on tensors that are made from the parameters."""

    def loss(model: nn.Module, step: int) -> Tensor:
        called = ddp.module if model is ddp and not of_the_wrapper and step % 2 else model
        doubled = {name: 2 * param for name, param in called.named_parameters()}
        return functional_call(called, doubled if step % 2 else {}, (noise(5, 6, step=step),)).square().mean()

    with wrapped_and_bare(mlp(), bucket_cap_mb=1e-6 if of_the_wrapper else None) as (ddp, bare):
        backward_alike(ddp, bare, loss, steps=range(4))


def backward_with_graph(loss: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True will create a reference cycle")
        loss.backward(create_graph=True)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
def test_gradients_made_in_no_sync_keep_their_graph() -> None:
    """The first backward only makes slopes; the second one, through them, is synchronized."""

    def loss(model: nn.Module, step: int) -> Tensor:
        with ddp.no_sync():
            backward_with_graph(MLP.loss(model, step))
        slopes = [param.grad for param in model.parameters()]
        assert [slope.requires_grad for slope in slopes[:-1]] == [True] * 3
        model.zero_grad()
        return sum(slope.square().sum() for slope in slopes)

    with wrapped_and_bare(smooth()) as (ddp, bare):
        backward_alike(ddp, bare, loss)


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("averages", [False, True])
def test_what_autograd_grad_returns_is_this_ranks_own(averages: bool) -> None:
    """Nothing is left of it, averaged by hand or not, in a step that follows, nor in one that does not."""
    with wrapped_and_bare(mlp()) as (ddp, bare):
        for step in range(4):
            by_hand = [torch.autograd.grad(MLP.loss(model, step), list(model.parameters())) for model in (ddp, bare)]
            assert all(map(torch.equal, *by_hand))
            if averages:
                average_gradients(by_hand[0])
            if step % 2:
                backward_alike(ddp, bare, MLP.loss, steps=[step])
        assert len({*of_all_ranks(float(by_hand[0][0].sum()))}) == dist.get_world_size()


def double_in_place(param: Tensor) -> None:
    param.grad.mul_(2)


HOOKS: dict[str, Callable[[Tensor], object]] = {
    "on tensors": lambda param: param.register_hook(lambda grad: 2 * grad),
    "after accumulation": lambda param: param.register_post_accumulate_grad_hook(double_in_place),
}
BEFORE, BETWEEN, AFTER = "before wrapping", "between two steps", "after a forward"


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("when", [BEFORE, BETWEEN, AFTER])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_the_user_see_and_change_this_ranks_gradient(name: str, when: str) -> None:
    def register(model: nn.Module) -> None:
        for param in [*model.parameters()][::2]:
            HOOKS[name](param)
            param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))

    def loss(model: nn.Module, step: int) -> Tensor:
        if (step, when) == (1, BETWEEN):
            register(model)
        value = MLP.loss(model, step)
        if (step, when) == (1, AFTER):
            register(model)
        return value

    seen: list[Tensor] = []  # of a step, two of the wrapped model, then two of the bare one
    model, bare = MLP.model(), MLP.model()
    for each in (model, bare) if when == BEFORE else ():
        register(each)
    with wrapped(model) as ddp:
        backward_alike(ddp, bare, loss)
    assert len(seen) == 2 * 2 * (3 if when == BEFORE else 2)
    assert all(torch.equal(seen[at], seen[at + 2]) for step in range(0, len(seen), 4) for at in (step, step + 1))


class TwoOutputs(nn.Module):
    """Returns two tensors with parameters of their own in an object, and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> SimpleNamespace:
        self.made = SimpleNamespace(left=self.left(x), more={"right": [self.right(x), None]})
        return self.made


@in_ranks(2, 3)
def test_an_output_comes_back_as_it_is_and_trains() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        out = model(noise(5, 6, step=step))
        assert out is getattr(model, "module", model).made
        return out.left.square().mean() + (out.more["right"][0].square().mean() if step != 1 else 0)

    with wrapped_and_bare(TwoOutputs(), bucket_cap_mb=1e-6) as (ddp, bare):
        backward_alike(ddp, bare, loss)


def integers(high: int, *shape: int, step: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(1000 * dist.get_rank() + step))


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("dense_on", [(), (0,), (0, 1, 2)], ids=["nowhere", "rank 0", "all ranks"])
def test_a_gradient_is_sparse_unless_a_rank_has_a_dense_part(dense_on: tuple[int, ...]) -> None:
    """A table, tied to a dense layer on some ranks. Gradients are integers, and none is zero: no row of a sum goes away."""

    def loss(model: nn.Module, step: int) -> Tensor:
        words, factors = integers(7, 5, step=step), 1.0 + integers(4, 5, 3, step=step)
        value = (model(words) * factors).sum()
        return value + (factors @ next(model.parameters()).t()).sum() if dist.get_rank() in dense_on else value

    with wrapped_and_bare(nn.Embedding(7, 3, sparse=True)) as (ddp, bare):
        for step in range(3):
            for model in (ddp, bare):
                model.zero_grad()
                loss(model, step).backward()
            ours, bare.weight.grad = ddp.module.weight.grad, bare.weight.grad.to_dense()
            naive_mean(bare)
            require_same({"table": ours.to_dense()}, {"table": bare.weight.grad})
            assert dense_on == (0,) or ours.is_sparse == (dense_on == ())  # what others make of a part of rank 0 alone is free


# Compiled models: where graphs are cut, that buckets leave between them, and that nothing of the library is compiled.

NUM_LAYERS, WIDTH, SMALL = 5, 600, 60  # 1.4 MB each: torch cuts graphs of 1 MiB and more
MIB = 1.2


class Layers(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def sequential(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*Layers(width).layers)


def loss(model: nn.Module, step: int, *, width: int = WIDTH) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile looks for a `.grad` of what is no leaf
        return model(noise(4, width, step=step)).float().square().mean()


def logging_backend(log: list[str]) -> Callable[..., Any]:
    """Runs graphs as they are, and says when one's backward runs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def backward_of(graph: Any, _inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            log.append("backward")
            return graph.forward(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward), bw_compiler=backward_of)


@pytest.mark.slow
@in_ranks(2)
@pytest.mark.parametrize(("make", "width"), [(Layers, WIDTH), (sequential, WIDTH), (Layers, SMALL)])
@pytest.mark.parametrize("when", ["before", "after attach", "in place, attach"])
def test_graphs_are_cut_where_buckets_end_and_a_small_model_is_one(
    make: Callable[[int], nn.Module], width: int, when: str
) -> None:
    """`when`: "before" or "after" it is wrapped, with "attach" in place of the wrapper, or "in place" under it."""
    torch._dynamo.reset()
    log: list[str] = []
    model, bare, backend = make(width), make(width), logging_backend(log)
    config = SyncConfig(bucket_cap_mb=MIB, order="reverse")
    inner = torch.compile(model, backend=backend) if "before" in when else model
    ddp = attach(inner, config=config) if "attach" in when else DistributedDataParallel(inner, config=config)
    wrapped = inner if "attach" in when else ddp
    run = torch.compile(wrapped, backend=backend) if "after" in when else wrapped
    if "in place" in when:
        model.compile(backend=backend)
    for index, param in enumerate(model.parameters()):
        param.register_post_accumulate_grad_hook(lambda _, index=index: log.append(f"gradient {index}"))
    for step in range(3):
        log.clear()
        backward_alike(run, bare, partial(loss, width=width), steps=[step])
    assert ddp.report().is_one_graph == (width < WIDTH)
    ddp.close()
    assert (of_all_ranks(log), log.count("backward")) == ([log] * 2, NUM_LAYERS if width == WIDTH else 1)
    if width == WIDTH:
        # The gradients of the last layer are there before the next graph's backward, and so on.
        between = [set(part.split()) for part in " ".join(text.replace(" ", "_") for text in log).split("backward")[1:]]
        assert between == [{f"gradient_{2 * layer}", f"gradient_{2 * layer + 1}"} for layer in reversed(range(NUM_LAYERS))]


@pytest.mark.slow
@in_ranks(2, timeout_s=TIMEOUT_S)
def test_nothing_of_ours_is_compiled_with_a_whole_step() -> None:
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(" ".join(sorted({str(node.target) for node in graph.graph.nodes if node.op.startswith("call")})))
        return graph.forward

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()

    model, bare = Layers(), Layers()
    optimizer, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (model, bare))
    compiled = torch.compile(step, backend=backend)
    with wrapped(model, bucket_cap_mb=MIB) as ddp, heard("torch._dynamo") as texts:
        for number in range(4):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.compile looks for a `.grad` of the output
                compiled(noise(4, WIDTH, step=number))
            theirs.zero_grad()
            loss(bare, number).backward()
            naive_mean(bare)
            theirs.step()
            require_equal_values(model, bare)
    assert [text for text in texts if "Profiler" not in text] == []  # that one is of torch's optimizer
    # The model, the loss, and the optimizer's step.
    assert [graph for graph in graphs if "linear" not in graph and "tanh" not in graph] == ["mean square", "add_"]


@pytest.mark.slow
@in_ranks(2)
@pytest.mark.parametrize("is_before", [True, False], ids=["before wrapping", "after wrapping"])
def test_sharded_steps_of_a_compiled_model_have_the_same_bits(is_before: bool) -> None:
    torch._dynamo.reset()
    found = []
    for is_compiled in (False, True):
        model = Layers()
        with training(
            torch.compile(model, backend="aot_eager") if is_compiled and is_before else model,
            "zero1",
            "SGD",
            bucket_cap_mb=MIB,
            reduction="ordered",
        ) as (ddp, opt):
            train(torch.compile(ddp, backend="aot_eager") if is_compiled and not is_before else ddp, opt, loss, steps=range(5))
            ddp.wait()
            found.append({str(at): param.detach().clone() for at, param in enumerate(model.parameters())})
    require_equal(*found)


class RunsAnotherBackward(torch.autograd.Function):
    """Its backward runs one that reaches `weight`, and then fails."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _gradient: Tensor) -> Any:
        with torch.enable_grad():
            ctx.weight.sum().backward()
        raise ZeroDivisionError


class FailsOnRequest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.also = (nn.Parameter(torch.ones(3)) for _ in range(2))
        self.unused = nn.ParameterList(torch.ones(3) for _ in range(2))  # so the bucket never looks full

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        x = x * self.also
        return (RunsAnotherBackward.apply(x, self.used) if fails else x * self.used).sum()


@in_ranks(2)
def test_a_backward_after_one_that_failed_around_an_inner_one_is_synchronized() -> None:
    # The graph of the failed one is still there, and so is what waits for its end.
    x = torch.full((3,), dist.get_rank() + 1.0)
    with wrapped(FailsOnRequest()) as ddp:
        for _ in range(25):  # past the steps that time every gradient
            ddp.zero_grad()
            ddp(x).backward()
        failing, sound = ddp(x, fails=True), ddp(x)
        with pytest.raises(ZeroDivisionError):
            failing.backward()
        ddp.zero_grad()
        sound.backward()
        assert [None if param.grad is None else param.grad.tolist() for param in ddp.parameters()] == [
            *[[1.5] * 3] * 2,
            *[None] * 2,
        ]


class InAnotherOrder(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](self[2](x)))


def triple(param: Tensor) -> None:
    param.grad.mul_(3.0)


@in_ranks(2)
def test_a_hook_of_the_users_comes_first_in_the_step_in_which_the_plan_moves() -> None:
    with wrapped_and_bare(InAnotherOrder(*(nn.Linear(4, 4, bias=False) for _ in range(3))), bucket_cap_mb=1e-5) as (ddp, bare):
        first_plan = ddp.plan
        for step in range(3):
            for each in (ddp, bare):
                each.zero_grad()
                loss = each(noise(2, 4) + dist.get_rank() + step).sum()
                hooks = [param.register_post_accumulate_grad_hook(triple) for param in each.parameters()]
                loss.backward()
                for hook in hooks:
                    hook.remove()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
        assert ddp.plan != first_plan


@pytest.mark.deep
@in_ranks(2)
def test_compiled_autograd_is_refused() -> None:
    with wrapped(nn.Linear(3, 2)) as ddp:
        loss = ddp(torch.ones(1, 3)).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            assert text_of(PhaseError, loss.backward) == (
                "compiled autograd runs this backward, and would leave gradients out of the mean.\n"
                "  torch._dynamo.config.compiled_autograd, or torch._dynamo.compiled_autograd\n"
                "  Turn it off; torch.compile of the model or of the whole step works without it."
            )


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("wrap", some([DistributedDataParallel, attach], most=1))
def test_a_training_forward_in_a_context_of_rpc_is_refused(wrap: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    """Training outside of it goes on, and evaluation within."""
    rank, model = dist.get_rank(), mlp()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", num_worker_threads=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of how it uses its groups
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=dist.get_world_size(), rpc_backend_options=options)
    with contextlib.closing(wrap(model)) as sync:
        ddp, bare = sync if wrap is DistributedDataParallel else model, copy.deepcopy(model)
        with dist_autograd.context():
            assert text_of(PhaseError, lambda: ddp(noise(4, 6))) == (
                "gradients of torch.distributed.rpc are not averaged: a context of distributed autograd keeps them instead of "
                "`.grad`.\n"
                f"  a training forward in dist_autograd.context(), rank {rank}\n"
                "  Run the forward outside of the context, or use torch's DistributedDataParallel."
            )
            with torch.no_grad():
                assert torch.equal(ddp(noise(4, 6)), bare(noise(4, 6)))
        backward_alike(ddp, bare, MLP.loss)
    rpc.shutdown()
