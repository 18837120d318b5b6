"""Compiled models: where graphs are cut, that buckets leave between them, and that nothing of the library is compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import undertow
from support.alike import backward_alike, heard, of_all_ranks, require_equal_values, train
from support.drop_in import TIMEOUT_S
from support.models import CASES, noise
from support.naive import naive_mean
from support.ranks import in_ranks
from support.sharded import parameters, require_equal, training
from undertow import DistributedDataParallel, SyncConfig, attach, average_gradients, clip_grad_norm_

NUM_LAYERS, WIDTH, SMALL = 5, 600, 60  # 1.4 MB each: torch cuts graphs of 1 MiB and more
MIB = 1.2
MLP = CASES["mlp"]
OURS = str(Path(undertow.__file__).parent)
Call = Callable[[], Any]


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

    made = aot_autograd(fw_compiler=lambda graph, _inputs: make_boxed_func(graph.forward), bw_compiler=backward_of)
    return made  # type: ignore[no-any-return]


@in_ranks(2)
@pytest.mark.parametrize(("make", "width"), [(Layers, WIDTH), (sequential, WIDTH), (Layers, SMALL)])
@pytest.mark.parametrize("when", ["before", "after", "before attach", "after attach", "in place, attach"])
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
    assert ddp.report(show=False).is_one_graph == (width < WIDTH)
    ddp.close()
    assert of_all_ranks(log) == [log] * 2
    assert log.count("backward") == (NUM_LAYERS if width == WIDTH else 1)
    if width == WIDTH:
        # The gradients of the last layer are there before the next graph's backward, and so on.
        between = [set(part.split()) for part in " ".join(text.replace(" ", "_") for text in log).split("backward")[1:]]
        assert between == [{f"gradient_{2 * layer}", f"gradient_{2 * layer + 1}"} for layer in reversed(range(NUM_LAYERS))]


@in_ranks(2)
def test_mixed_precision_cuts_no_graph() -> None:
    """fullgraph=True is an error where anything cuts the graph."""
    torch._dynamo.reset()
    narrow = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compiled = torch.compile(Layers(SMALL), backend="aot_eager", fullgraph=True)
    ddp = DistributedDataParallel(compiled, mixed_precision=narrow)

    def narrow_loss(model: nn.Module, step: int) -> Tensor:
        if model is ddp:
            return loss(ddp, step, width=SMALL)
        copies = {name: param.bfloat16() for name, param in model.named_parameters()}
        return loss(lambda x: torch.func.functional_call(model, copies, (x.bfloat16(),)), step, width=SMALL)

    backward_alike(ddp, Layers(SMALL), narrow_loss)
    ddp.close()


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
    ddp = DistributedDataParallel(model, config=SyncConfig(bucket_cap_mb=MIB))
    optimizer, theirs = (torch.optim.SGD(each.parameters(), lr=0.1, foreach=False) for each in (model, bare))
    compiled = torch.compile(step, backend=backend)
    with heard("torch._dynamo") as texts:
        for number in range(4):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.compile looks for a `.grad` of the output
                compiled(noise(4, WIDTH, step=number))
            theirs.zero_grad()
            loss(bare, number).backward()
            naive_mean(bare)
            theirs.step()
            require_equal_values(model, bare)
    ddp.close()
    assert [text for text in texts if "Profiler" not in text] == []  # that one is of torch's optimizer
    # The model, the loss, and the optimizer's step.
    assert [graph for graph in graphs if "linear" not in graph and "tanh" not in graph] == ["mean square", "add_"]


@in_ranks(2)
@pytest.mark.parametrize("eager", [False, True], ids=["barrier", "eager"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before wrapping", "after wrapping"])
def test_sharded_steps_of_a_compiled_model_have_the_same_bits(is_before: bool, eager: bool) -> None:
    torch._dynamo.reset()
    found = []
    for is_compiled in (False, True):
        model = Layers()
        inner = torch.compile(model, backend="aot_eager") if is_compiled and is_before else model
        with training(inner, "zero1", "SGD", bucket_cap_mb=MIB, reduction="ordered", eager=eager) as (ddp, opt):
            run = torch.compile(ddp, backend="aot_eager") if is_compiled and not is_before else ddp
            train(run, opt, loss, steps=range(5))
            ddp.wait()
            found.append({str(at): param.detach().clone() for at, param in enumerate(model.parameters())})
    require_equal(*found)


def calls_of_a_step(ddp: Any, opt: Any, step: int, *, eager: bool) -> dict[str, Call]:
    """Everything between one forward and the next, in an order in which each is right."""
    weight, is_sharded = ddp.module[0].weight, isinstance(opt, undertow.ShardedOptimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    value: Tensor = MLP.loss(ddp, step)
    with_barrier: dict[str, Call] = {
        "unscale": lambda: scaler.unscale_(opt),
        "clip all": lambda: clip_grad_norm_(ddp, 1.0),
        "clip": lambda: opt.clip_grad_norm_(1.0) if is_sharded else None,
        "scaled step": lambda: scaler.step(opt),
    }
    return {
        "weight": lambda: ddp.weight(5.0),
        "backward": (value if eager else scaler.scale(value)).backward,
        "finish": ddp.finish,
        "sync.finish": ddp.sync.finish,
        "full gradient": lambda: ddp.full_gradient(weight),
        **({"step": opt.step} if eager else with_barrier),
        "zero_grad": lambda: opt.zero_grad(set_to_none=False),
        "wait": ddp.wait,
        "sync.wait": ddp.sync.wait,
        "state": opt.state_dict,
        "average": lambda: average_gradients([noise(3)]),
    }


def results(strategy: str, *, eager: bool, run: Callable[[Call], Any]) -> dict[str, Tensor]:
    """The parameters after a few steps, of which `run` makes each call."""
    with training(MLP.model(), strategy, "SGD", eager=eager) as (ddp, opt):
        for step in range(3):
            for call in calls_of_a_step(ddp, opt, step, eager=eager).values():
                run(call)
        with ddp.no_sync():
            MLP.loss(ddp, 3).backward()
        reductions: list[Any] = []
        run(lambda: reductions.append(ddp.reduce_gradients_async()))
        run(reductions[0].wait)
        run(opt.step)
        return parameters(ddp)


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(("strategy", "eager"), [("ddp", False), ("zero1", False), ("zero1", True)])
def test_nothing_of_ours_is_compiled_with_what_calls_it(strategy: str, eager: bool) -> None:
    from torch._dynamo.convert_frame import input_codes

    torch._dynamo.reset()
    input_codes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile looks for a `.grad` of the loss
        found = results(strategy, eager=eager, run=lambda call: torch.compile(call, backend="eager")())
    seen = [code for ref in input_codes.seen if (code := ref())]
    assert len(input_codes.seen) > 0
    assert sorted(f"{Path(code.co_filename).name}: {code.co_name}" for code in seen if OURS in code.co_filename) == []
    require_equal(results(strategy, eager=eager, run=lambda call: call()), found)
