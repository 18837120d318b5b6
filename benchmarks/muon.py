"""The cost of whole matrices in shards: Muon with AdamW against AdamW, both as ZeRO-1, and against Muon with AdamW unsharded.

All take a few steps each in turn, in the same four processes and over the same shaped link. Four ranks share the processors of
one machine, so steps are timed with waits instead of arithmetic: the model replays the layers of a GPT, and Newton-Schulz waits
for as long as a device would take that needs the layers' time for 8,192 tokens. The optimizers' time is taken afterwards, with
Newton-Schulz itself, as CPU time of the training thread.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.links import sent_bytes
from benchmarks.part import Part, Row, Run, Table
from benchmarks.ranks import run_ranks
from benchmarks.shaped.workloads.profiles import Layer
from benchmarks.shaped.workloads.replay import Replay, batch_of
from undertow import DistributedDataParallel, ShardedOptimizer
from undertow.trace.step_report import StepReport

LINK = "1gbit"
PLAIN, ADAMW, MUON = "Muon and AdamW, unsharded", "AdamW, ZeRO-1", "Muon and AdamW, ZeRO-1"
_STEPS_OF_TURN, _NUM_WARMUP, _NUM_RANKS = 4, 12, 4  # the plan is found in the first steps
# The shapes of a layer of a GPT of this width, of the embedding and of the head; 4.9 M parameters in all.
_WIDTH, _NUM_LAYERS, _VOCABULARY = 256, 6, 256
_LAYER = ((3 * _WIDTH, _WIDTH), (_WIDTH, _WIDTH), (4 * _WIDTH, _WIDTH), (_WIDTH, 4 * _WIDTH), *[(_WIDTH,)] * 4)
_FORWARD_US, _BACKWARD_US, _TOKENS = 120e3, 240e3, 8192  # times as of the workload `replay`
_NEWTON_SCHULZ = "torch.optim._muon._zeropower_via_newtonschulz"


def measure(how: Run) -> list[Row]:
    """Returns a row for each system. Raises NoNamespaces."""
    num_turns = 2 if how.is_quick else 10
    how.tell(f"{_NUM_RANKS} ranks, {num_turns} turns of each system")
    rows: list[Row] = run_ranks(_measure_rank, _NUM_RANKS, num_turns, link=LINK)
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Returns a line for each system."""
    head = ["system", "step, ms", "the slowest rank's optimizers, CPU ms", "sent, MB", "gathers, ms", "exposed of them, ms"]
    return [head, *([str(value) for value in row.values()] for row in rows)]


def _measure_rank(rank: int, num_turns: int) -> list[Row]:
    torch.manual_seed(0)
    bare, (x,) = _replayed(), batch_of(rank)
    models = {name: DistributedDataParallel(copy.deepcopy(bare)) for name in (PLAIN, ADAMW, MUON)}
    steps = {name: _step_of(name, model) for name, model in models.items()}
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in models}
    for _ in range(_NUM_WARMUP // _STEPS_OF_TURN + num_turns):
        for name, step in steps.items():
            dist.barrier()
            began_bytes = sent_bytes()
            of_turn = []
            with mock.patch(_NEWTON_SCHULZ, partial(_waits, num_params=sum(map(torch.numel, bare.parameters())))):
                for _ in range(_STEPS_OF_TURN):  # the first one has no gathers, and is not timed
                    began = time.perf_counter()
                    step(x)
                    of_turn.append(time.perf_counter() - began)
            models[name].wait()
            sent = (sent_bytes() - began_bytes) / _STEPS_OF_TURN
            times[name] += [(step_s * 1e3, sent / 1e6) for step_s in of_turn[1:]]
    rows, reports = [], {name: model.report() for name, model in models.items()}
    for name, step in steps.items():
        optimizer_ms = median(1e3 * step(x) for _ in range(_STEPS_OF_TURN + 1))
        models[name].wait()
        rows.append(_row(name, times[name][_NUM_WARMUP:], optimizer_ms, reports[name]))
    for model in models.values():
        model.close()
    return rows


def _waits(grad: Tensor, *_settings: object, num_params: int) -> Tensor:
    """Takes the place of Newton-Schulz: five iterations of three products of matrices, on the device of the replayed layers."""
    long, short = max(grad.shape), min(grad.shape)
    flops_per_us = 6 * num_params * _TOKENS / (_FORWARD_US + _BACKWARD_US)
    time.sleep(5 * (4 * long * short**2 + 2 * short**3) / flops_per_us / 1e6)
    return grad.bfloat16()


def _row(name: str, times: Sequence[Sequence[float]], optimizer_ms: float, report: StepReport) -> Row:
    """Medians over steps: of the optimizer on the slowest rank, of the bytes a mean over ranks."""
    step_ms, sent_mb = (median(column) for column in zip(*times, strict=True))
    slowest_ms, all_mb = torch.tensor(optimizer_ms), torch.tensor(sent_mb)
    dist.all_reduce(slowest_ms, dist.ReduceOp.MAX)
    dist.all_reduce(all_mb)
    return {
        "system": name,
        "step_ms": round(step_ms, 1),
        "optimizer_ms": round(slowest_ms.item(), 2),
        "sent_mb": round(all_mb.item() / _NUM_RANKS, 2),
        "gather_ms": round(report.gather_ms, 2),
        "gather_exposed_ms": round(report.gather_exposed_ms, 2),
    }


def _replayed() -> Replay:
    """Returns the replayed layers, with the shapes of a GPT's parameters."""
    outer = ((_VOCABULARY, _WIDTH),)
    of_layers = [outer, *[_LAYER] * _NUM_LAYERS, outer]
    layers = [
        Layer(
            numels=tuple(map(math.prod, shapes)),
            forward_us=_FORWARD_US / len(of_layers),
            backward_us=_BACKWARD_US / len(of_layers),
        )
        for shapes in of_layers
    ]
    model = Replay(tuple(layers))
    for block, shapes in zip(model.blocks, of_layers, strict=True):
        block.params = nn.ParameterList(torch.randn(shape) for shape in shapes)
    return model


def _step_of(name: str, model: DistributedDataParallel) -> Callable[[Tensor], float]:
    """Returns the step of a system, which returns the CPU seconds of its optimizers."""
    hidden = [] if name == ADAMW else [param for block in model.module.blocks[1:-1] for param in block.params if param.ndim == 2]
    ids = set(map(id, hidden))
    rest: list[nn.Parameter] = [param for param in model.parameters() if id(param) not in ids]
    optimizers: list[torch.optim.Optimizer] = []
    if name == PLAIN:
        optimizers = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
    else:
        # First AdamW, whose parameters are gathered first: the forward begins with the embedding.
        optimizers.append(ShardedOptimizer(torch.optim.AdamW, model, params=rest, lr=1e-3))
        if hidden:
            optimizers.append(ShardedOptimizer(torch.optim.Muon, model, params=hidden, lr=0.02))

    def step(x: Tensor) -> float:
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(x).backward()
        began = time.thread_time()
        for optimizer in optimizers:
            optimizer.step()
        return time.thread_time() - began

    return step


PART = Part(
    name="muon",
    title="Whole matrices in shards: replayed layers of a GPT of 4.9 M parameters, 4 ranks, shaped 1 Gb/s link",
    measure=measure,
    table=table,
)
