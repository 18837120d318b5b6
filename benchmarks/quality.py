"""The loss of training with fewer bytes: the demo's GPT on the text of Python's modules, from one start on the same batches.

The learning rate falls to nothing, so that the last losses hardly depend on the last batches. A control, whose first weight
is moved by a millionth, shows how far two runs in full width drift apart by rounding alone.

`docstrings` is a second, shorter task, with a constant learning rate near the best one of plain data parallelism.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.part import Part, Row, Run, Table
from benchmarks.ranks import run_ranks
from benchmarks.shaped.systems.torch_ddp import with_powersgd
from undertow import DistributedDataParallel, ShardedOptimizer, SyncConfig
from undertow.lab.demo.model import CONTEXT, Gpt
from undertow.lab.demo.settings import load_corpus

_NODES_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RANKS, SEEDS = (2, 4), (0, 1, 2)
NUM_STEPS, NUM_LAST = 1000, 50  # the last losses are averaged
_BATCH, _NUM_VALIDATION = 4, 128  # sequences
_TEXT_BYTES = 3 << 20  # of docstrings
_HELD_OUT = 0.05  # of the text
NAME = "quality"
_RUN = ("variant", "ranks", "seed", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way of sending gradients and parameters."""

    config: Mapping[str, Any] = field(default_factory=dict)
    power_rank: int | None = None  # of torch's PowerSGD, with torch's wrapper
    nudge: float = 0.0  # the first weight is moved by this part of itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A text, and the training on it with AdamW."""

    text: bytes
    num_layers: int
    width: int
    context: int
    learning_rate: float
    decays: bool  # the learning rate falls to nothing
    num_steps: int


def modules(num_steps: int) -> Task:
    """The first 4 MB of Python's modules."""
    return Task(text=load_corpus(), num_layers=3, width=64, context=CONTEXT, learning_rate=1e-3, decays=True, num_steps=num_steps)


def docstrings(num_steps: int) -> Task:
    """3 MB of English: the docstrings of the standard library, then of torch. The model has 0.13 M parameters."""
    text = _load_docstrings()
    return Task(text=text, num_layers=2, width=64, context=32, learning_rate=3e-3, decays=False, num_steps=num_steps)


def _load_docstrings() -> bytes:
    found = bytearray()
    for root in (Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            inner = str(path.relative_to(root))
            if "site-packages" in inner or "test" in inner:
                continue
            with contextlib.suppress(SyntaxError):
                nodes = ast.walk(ast.parse(path.read_bytes()))
                texts = [ast.get_docstring(node) for node in nodes if isinstance(node, _NODES_WITH_DOCSTRINGS)]
                found += "".join(f"{text}\n" for text in texts if text).encode()
            if len(found) >= _TEXT_BYTES:
                return bytes(found[:_TEXT_BYTES])
    return bytes(found)


FULL_WIDTH = "fp32"
VARIANTS = {
    FULL_WIDTH: Variant(),
    "fp32, first weight moved": Variant(nudge=1e-6),
    "bfloat16": Variant(config={"wire": "bfloat16"}),
    "int8": Variant(config={"wire": "int8"}),
    "int8, gathers int8 (zero1)": Variant(config={"strategy": "zero1", "wire": "int8", "param_wire": "int8"}),
    "PowerSGD, rank 1": Variant(power_rank=1),
    "PowerSGD, rank 4": Variant(power_rank=4),
}


def measure(how: Run) -> list[Row]:
    """Returns a row for each variant, number of ranks and seed."""
    num_steps = 20 if how.is_quick else NUM_STEPS
    return measure_runs(how, NAME, dict.fromkeys(RANKS, VARIANTS), SEEDS, modules(num_steps))


def measure_runs(
    how: Run, name: str, variants: Mapping[int, Mapping[str, Variant]], seeds: Sequence[int], task: Task
) -> list[Row]:
    """Returns a row for each seed, number of ranks and variant; finished runs are kept in a file of this name."""
    kept = how.out / f"{name}.jsonl"
    if kept.exists() and not how.resumes:
        kept.replace(kept.with_stem(f"{kept.stem}.previous"))
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    done = {tuple(row[key] for key in _RUN): row for row in map(json.loads, lines)}
    wanted = [(variant, ranks, seed, task.num_steps) for seed in seeds for ranks in variants for variant in variants[ranks]]
    for number, run in enumerate(wanted, start=1):
        if run in done:
            continue
        variant, ranks, seed, _ = run
        how.tell(f"run {number} of {len(wanted)}: {variant}, {ranks} ranks, seed {seed}")
        losses = run_ranks(measure_rank, ranks, variants[ranks][variant], seed, task.num_steps, task)
        done[run] = {**dict(zip(_RUN, run, strict=True)), **losses}
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[run]) + "\n")
    return [done[run] for run in wanted]


def table(rows: Sequence[Row]) -> Table:
    """Returns losses on held-out text, means over seeds, and in percent above those in full width, with the range over seeds."""
    above = percent_above(rows, FULL_WIDTH)
    ranks = sorted({row["ranks"] for row in rows})
    head = [text for number in ranks for text in (f"loss, {number} ranks", f"above {FULL_WIDTH}, %")]
    lines = [["sent as", *head]]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        line = [variant]
        for number in ranks:
            losses = [row["validation_loss"] for row in rows if (row["variant"], row["ranks"]) == (variant, number)]
            line += [f"{mean(losses):.4f}", with_range(above[variant, number])]
        lines.append(line)
    return lines


def percent_above(rows: Sequence[Row], plain: str) -> dict[tuple[str, int], list[float]]:
    """Returns how far losses on held-out text are above those of the variant `plain`: one for each seed, by variant and ranks."""
    losses = {(row["variant"], row["ranks"], row["seed"]): row["validation_loss"] for row in rows}
    above: dict[tuple[str, int], list[float]] = {}
    for (variant, ranks, seed), loss in losses.items():
        above.setdefault((variant, ranks), []).append(100 * (loss / losses[plain, ranks, seed] - 1))
    return above


def with_range(percents: Sequence[float]) -> str:
    """Returns the mean, and the smallest and largest in brackets."""
    return f"{mean(percents):+.2f} ({min(percents):+.2f} to {max(percents):+.2f})"


def measure_rank(rank: int, variant: Variant, seed: int, num_steps: int, task: Task | None = None) -> Row:
    """Returns the loss of the last training steps, a mean over ranks, and on held-out text. The task is `modules` by default."""
    task = task or modules(num_steps)
    torch.manual_seed(seed)
    model = Gpt(num_layers=task.num_layers, width=task.width, context=task.context)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] *= 1 + variant.nudge
    wrapped, optimizer = _training(model, variant, num_steps, lr=task.learning_rate)
    last = 0.0 if task.decays else 1.0
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=last, total_iters=num_steps)
    next_batch, held_out = _batches(task, seed, rank)
    losses = torch.zeros(num_steps)
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = wrapped(next_batch())
        loss.backward()
        optimizer.step()
        decay.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    outer = wrapped.outer if isinstance(wrapped, DistributedDataParallel) else None
    with torch.no_grad(), contextlib.nullcontext() if outer is None else outer.synchronized():
        validation = mean(wrapped(batch).item() for batch in held_out.split(_BATCH * 4))
    if isinstance(wrapped, DistributedDataParallel):
        wrapped.close()
    return {
        "train_loss": round(losses[-NUM_LAST:].mean().item() / dist.get_world_size(), 5),
        "validation_loss": round(validation, 5),
    }


def _training(model: nn.Module, variant: Variant, num_steps: int, *, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    if variant.power_rank is not None:
        # In one bucket: the hook starts collectives from callbacks, which over gloo may pair those of different buckets.
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000)
        # Torch's pages suggest a tenth of all steps in full width, and ranks of 1 to 4.
        with_powersgd(wrapped, matrix_approximation_rank=variant.power_rank, start_powerSGD_iter=max(2, num_steps // 10))
        return wrapped, torch.optim.AdamW(model.parameters(), lr=lr)
    ours = DistributedDataParallel(model, config=SyncConfig(**variant.config))
    if "strategy" in variant.config:
        return ours, ShardedOptimizer(torch.optim.AdamW, ours, lr=lr)
    return ours, torch.optim.AdamW(model.parameters(), lr=lr)


def _batches(task: Task, seed: int, rank: int) -> tuple[Callable[[], Tensor], Tensor]:
    """Returns a rank's batches from random places of the text, and the sequences held out; alike for all variants."""
    text = torch.frombuffer(bytearray(task.text), dtype=torch.uint8)
    num_seen = int(len(text) * (1 - _HELD_OUT))
    pieces = text[:num_seen].unfold(0, task.context + 1, 1)  # [position, byte], a view
    held_out = text[num_seen:].unfold(0, task.context + 1, task.context + 1)
    chosen = torch.linspace(0, len(held_out) - 1, _NUM_VALIDATION).long()
    random = torch.Generator().manual_seed(1000 * seed + rank)
    return lambda: pieces[torch.randint(len(pieces), (_BATCH,), generator=random)].long(), held_out[chosen].long()


PART = Part(
    name=NAME,
    title=f"Loss after {NUM_STEPS} steps: a GPT over bytes on Python's modules, {len(SEEDS)} seeds",
    measure=measure,
    table=table,
)
