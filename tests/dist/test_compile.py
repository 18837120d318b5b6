"""Compiled models: where graphs are cut, and that buckets leave between them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from support.drop_in import TIMEOUT_S
from support.models import noise
from support.naive import naive_mean
from support.ranks import Ranks, in_ranks
from support.sharded import require_equal, training
from undertow import DistributedDataParallel, SyncConfig, attach

NUM_LAYERS, WIDTH = 5, 600  # 1.4 MB each: torch cuts graphs of 1 MiB and more
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


def what_happened(make: Callable[[int], nn.Module], when: str, width: int) -> list[str]:
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
        for each in (run, bare):
            each.zero_grad()
            each(noise(4, width, step=step)).square().mean().backward()
        naive_mean(bare)
        require_equal(
            dict(enumerate(p.grad for p in bare.parameters())),  # type: ignore[arg-type]
            dict(enumerate(p.grad for p in model.parameters())),  # type: ignore[arg-type]
        )
    assert ddp.report(show=False).is_one_graph == (width < WIDTH)
    ddp.close()
    return log


@pytest.mark.parametrize("make", [Layers, sequential])
@pytest.mark.parametrize("when", ["before", "after", "before attach", "after attach", "in place, attach"])
def test_graphs_are_cut_where_buckets_end(two_ranks: Ranks, make: Callable[[int], nn.Module], when: str) -> None:
    log, other = two_ranks.run(what_happened, make, when, WIDTH)
    assert log == other
    assert log.count("backward") == NUM_LAYERS
    # The gradients of the last layer are there before the next graph's backward, and so on.
    at = [place for place, what in enumerate(log) if what == "backward"]
    between = [set(log[start + 1 : stop]) for start, stop in zip(at, [*at[1:], len(log)], strict=True)]
    layers = reversed(range(NUM_LAYERS))
    assert between == [{f"gradient {2 * layer}", f"gradient {2 * layer + 1}"} for layer in layers]


@pytest.mark.parametrize("when", ["before", "after", "before attach", "after attach", "in place, attach"])
def test_a_small_model_is_one_graph(two_ranks: Ranks, when: str) -> None:
    log, _ = two_ranks.run(what_happened, Layers, when, 60)
    assert log.count("backward") == 1


@in_ranks(2)
def test_mixed_precision_cuts_no_graph() -> None:
    """fullgraph=True is an error where anything cuts the graph."""
    torch._dynamo.reset()
    model, bare = Layers(60), Layers(60)
    narrow = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager", fullgraph=True), mixed_precision=narrow)
    for step in range(3):
        ddp.zero_grad()
        bare.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile looks for a `.grad` of the narrow copies of parameters
            out = ddp(noise(4, 60, step=step))
        out.float().square().mean().backward()
        copies = {name: param.bfloat16() for name, param in bare.named_parameters()}
        torch.func.functional_call(bare, copies, (noise(4, 60, step=step).bfloat16(),)).float().square().mean().backward()
        naive_mean(bare)
        require_equal(
            dict(enumerate(p.grad for p in bare.parameters())),  # type: ignore[arg-type]
            dict(enumerate(p.grad for p in model.parameters())),  # type: ignore[arg-type]
        )
    ddp.close()


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def whole_step() -> list[str]:
    """What is compiled of a function that runs forward, backward and the optimizer."""
    torch._dynamo.reset()
    heard, graphs = Warnings(), []

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
    logging.getLogger("torch._dynamo").addHandler(heard)
    for number in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile looks for a `.grad` of the output
            compiled(noise(4, WIDTH, step=number))
        theirs.zero_grad()
        bare(noise(4, WIDTH, step=number)).square().mean().backward()
        naive_mean(bare)
        theirs.step()
        require_equal(dict(bare.named_parameters()), dict(model.named_parameters()), what=f"step {number}")  # type: ignore[arg-type]
    logging.getLogger("torch._dynamo").removeHandler(heard)
    ddp.close()
    assert [text for text in heard.texts if "Profiler" not in text] == []  # that one is of torch's optimizer
    return graphs


def test_nothing_of_ours_is_compiled_with_a_whole_step(two_ranks: Ranks) -> None:
    for graphs in two_ranks.run(whole_step, timeout_s=TIMEOUT_S):
        # The model, the loss, and the optimizer's step.
        assert [graph for graph in graphs if "linear" not in graph and "tanh" not in graph] == ["mean square", "add_"]


def sharded(is_before: bool, eager: bool) -> None:
    torch._dynamo.reset()
    results = []
    for is_compiled in (False, True):
        model = Layers()
        inner = torch.compile(model, backend="aot_eager") if is_compiled and is_before else model
        with training(inner, "zero1", "SGD", bucket_cap_mb=MIB, reduction="ordered", eager=eager) as (ddp, opt):
            run = torch.compile(ddp, backend="aot_eager") if is_compiled and not is_before else ddp
            for step in range(5):
                opt.zero_grad()
                run(noise(4, WIDTH, step=step)).square().mean().backward()
                opt.step()
            ddp.wait()
            results.append({str(at): param.detach().clone() for at, param in enumerate(model.parameters())})
    require_equal(*results)


@pytest.mark.parametrize("eager", [False, True], ids=["barrier", "eager"])
@pytest.mark.parametrize("is_before", [True, False], ids=["before wrapping", "after wrapping"])
def test_sharded_steps_of_a_compiled_model_have_the_same_bits(two_ranks: Ranks, is_before: bool, eager: bool) -> None:
    two_ranks.run(sharded, is_before, eager)
