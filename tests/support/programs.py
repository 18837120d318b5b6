"""Programs of training steps, drawn at random or written down, and the naive reference that they are compared with.

A program is data, the same on every rank: a model of a few units, and events. An event is a verb, which is a method of `Run`
or a key of `CHANGES`, and words for it. Words may differ from rank to rank: "forward 012|02" leaves out unit 1 on every second
rank.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from support.inside import late_ops, sharding_of
from support.models import noise
from support.naive import alone, of_all
from support.sharded import chain, mesh_of
from support.units import IN_PARTS, WIDTH, Units, adapted, made
from undertow import DistributedDataParallel, PeerFailed, PhaseError, ShardedOptimizer, SyncConfig, attach, clip_grad_norm_
from undertow.schedule import OpKind

ROWS, LEARNING_RATE = 3, 0.125
# The largest bucket in MiB.
PLANS: dict[str, Any] = {"each": 1e-6, "several": 1.5e-4, "one": 25.0, "default": None}


@dataclass(frozen=True, kw_only=True)
class Device:
    """Where the synchronized model is: the host, unless these functions move a module in place, and a tensor."""

    place: Callable[[nn.Module], object] = lambda _: None
    move: Callable[[Tensor], Tensor] = torch.clone
    backend: str | None = None  # the default group's
    reads_late: bool = False  # what ranks report


HOST = Device()


@dataclass(frozen=True, kw_only=True)
class Program:
    """What all ranks run: `times` the `events`, with a model of `units` to which `before` happens before it is wrapped."""

    units: str = "linear linear linear"
    before: str = ""
    events: str = "zero, forward 012, backward, step"
    times: int = 3
    strategy: str = "ddp"
    is_attached: bool = False
    is_alone: bool = False  # each rank is a group of its own
    has_hook: bool = False
    has_momentum: bool = True
    plan: str = "each"
    settings: dict[str, Any] = field(default_factory=dict)

    def has(self, *kinds: str) -> bool:
        return not set(kinds).isdisjoint(self.units.split())

    def is_exact(self, num_ranks: int) -> bool:
        """True if the reference adds up in the same order; a part of a gradient that comes late is averaged alone."""
        is_native = self.settings.get("reduction") == "native" or self.has_hook or self.has("table", "bag")
        is_merged = self.has("table", "bag") and "accumulate" in self.events  # rows of several micro-batches at once
        return not self.has(*IN_PARTS) and not is_merged and (num_ranks == 2 or not is_native)


class Reference:
    """A bare model on each rank; one all-gather of everything makes its gradients what they are to be.

    A gradient is the mean over ranks of what each rank's `.grad` holds, if some rank has added to it since the last
    synchronization. With shards, the results of earlier synchronizations are not reduced again, but added. What is sent in a
    format is rounded: gradients, and with shards the differences between exact parameters and those that ranks hold.
    """

    def __init__(self, model: nn.Module, program: Program, group: dist.ProcessGroup | None) -> None:
        self.model, self.program, self.group = model, program, group
        self.num_ranks = dist.get_world_size(group)
        self.has_shards = False  # not before the optimizer is made, nor until a change of parameters is in force
        self.new: set[Tensor] = set()  # parameters with a gradient since the last synchronization
        self.used: set[Tensor] = set()  # in this step
        self.is_use_open = False  # shards may count a gradient that was zeroed in place before its reduction, or may not
        self.results: set[Tensor] = set()  # parameters whose `.grad` is a result
        self.earlier: dict[Tensor, Tensor] = {}  # results that were taken out of `.grad`
        self.is_accumulated = False  # on some rank there may be gradients that the next step averages first
        self.exact: dict[Tensor, Tensor] = {}  # parameters that ranks hold rounded

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def backward(self, loss: Tensor, **how: Any) -> None:
        self.take()
        before = {param: param.grad for param in self.params}
        for param in before:
            param.grad = None
        if loss.requires_grad:
            loss.backward(**how)
        self.new |= {param for param in before if param.grad is not None}
        for param, grad in before.items():
            if grad is not None:
                param.grad = grad if param.grad is None else grad + param.grad

    def take(self) -> None:
        """Puts results aside that are not to be reduced again."""
        for param in [param for param in self.results if self.has_shards and param.grad is not None]:
            self.earlier[param], param.grad = param.grad, None
        self.results.clear()

    def accumulated(self) -> None:
        """A result to which nothing was added is a result again."""
        for param in [param for param in self.earlier if param.grad is None]:
            param.grad = self.earlier.pop(param)
            self.results.add(param)

    def mean_of(self, number: float) -> Tensor:
        """The mean of a number over ranks, by a plain all-reduce."""
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total, group=self.group)
        return total / self.num_ranks

    def synchronize(self, *, op: str | None = None) -> None:
        self.take()
        mine = [(None if (it := param.grad) is None else it.detach().to_dense(), param in self.new) for param in self.params]
        everyone: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(everyone, mine, group=self.group)
        for index, param in enumerate(self.params):
            parts = [grads[index] for grads in everyone]
            if any(is_new for _, is_new in parts):
                given = [torch.zeros_like(param) if grad is None else grad for grad, _ in parts]
                grad = self.reduced(given, op, is_rounded=self.is_rounded("wire", param))
                param.grad = torch.empty_like(param).copy_(grad)
            if param in self.earlier:
                earlier = self.earlier[param]
                param.grad = earlier if param.grad is None else param.grad + earlier
        self.used |= self.new
        self.is_accumulated = False
        self.results = {param for param in self.params if param.grad is not None}
        self.new.clear()
        self.earlier.clear()

    def reduced(self, parts: list[Tensor], op: str | None, *, is_rounded: bool) -> Tensor:
        """Added up in rank order, row by row on a mesh, with 32 bits at least."""
        num_ranks, half, is_on_mesh = self.num_ranks, self.num_ranks // 2, self.program.strategy == "hybrid"
        if is_rounded:
            rows = [parts[:half], parts[half:]] if is_on_mesh else [parts]
            means = [chain(list(map(rounded, row))) / num_ranks for row in rows]
            mean = rounded(chain(list(map(rounded, means)))) if is_on_mesh else means[0]
            return (mean if self.has_shards else rounded(mean)) * (num_ranks if op == "sum" else 1)
        wide = [part.float() if part.dtype.itemsize == 2 else part for part in parts]
        rows = [wide[:half], wide[half:]] if is_on_mesh else [wide]
        return (chain([chain(row) for row in rows]) / (1 if op == "sum" else num_ranks)).to(parts[0].dtype)

    def is_rounded(self, setting: str, param: Tensor) -> bool:
        """True if it is sent in the format of a setting, or its gradient is."""
        if self.num_ranks == 1 or self.program.settings.get(setting) is None:
            return False
        sparse = {part.weight for part in self.model.modules() if getattr(part, "sparse", False)}
        return param.is_floating_point() and param.itemsize > 2 and param not in sparse

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, sent: set[str]) -> None:
        """Steps the exact parameters; `sent` are the names of those whose differences ranks then send."""
        held = {param: param.detach().clone() for param in self.params}
        for param, exact in self.exact.items():
            param.copy_(exact)
        optimizer.step()
        for name, param in self.model.named_parameters():
            if self.is_rounded("param_wire", param) and (name in sent or param in self.exact):
                self.exact[param] = param.clone()
                param.copy_(held[param] + (rounded(param - held[param]) if name in sent else 0.0))

    def zero_grad(self, *, set_to_none: bool) -> None:
        self.model.zero_grad(set_to_none=set_to_none)
        self.is_use_open = not set_to_none and self.has_shards and bool(self.new)
        for noted in (self.earlier, self.results, *((self.new, self.used) if set_to_none else ())):
            noted.clear()


def rounded(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)


def stop(*_: object) -> None:
    raise ZeroDivisionError


# How a rank whose loss reaches nothing may join a synchronization, besides `finish`.
JOINS: dict[str, Callable[["Run"], object]] = {
    "by-step": lambda run: torch.optim.SGD(run.module.parameters(), lr=0.0).step(),
    "by-own-step": lambda run: run.optimizers[0].step(),
    "by-norm": lambda run: clip_grad_norm_(run.handle, 1e9),
    "by-optimizers-norm": lambda run: run.optimizers[0].clip_grad_norm_(1e9),
    "by-look": lambda run: run.handle.full_gradient(next(run.module.parameters())),
    "by-scaler": lambda run: run.unscale(),
}
# Changes of the model, given its units, a number that later events raise, and the words of the event.
CHANGES: dict[str, Callable[..., object]] = {
    "freeze": lambda units, _, index: units[int(index)].requires_grad_(False),
    "thaw": lambda units, _, index: units[int(index)].requires_grad_(True),
    "replace": lambda units, number, index, kind="linear": units.__setitem__(int(index), made(kind, 40 + number)),
    # Another tensor for one parameter.
    "renew": lambda units, _, index: setattr(units[int(index)], "weight", nn.Parameter(made("linear", 60).weight.detach())),
    # A parameter more for a unit that may have one.
    "extend": lambda units, _, index: setattr(units[int(index)], "shift", nn.Parameter(torch.full((WIDTH,), 0.5))),
    # An adapter for a unit, which is frozen itself.
    "adapt": lambda units, number, index: units.__setitem__(int(index), adapted(units[int(index)], 70 + number)),
    "append": lambda units, number, kind="linear": units.append(made(kind, 50 + number)),
    "remove": lambda units, _: units.__delitem__(-1),
    "to": lambda units, _, how: units.to(**{"dtype" if "float" in how else "memory_format": getattr(torch, how)}),
    # A state dict is loaded whose tensors become the parameters.
    "assign": lambda units, _: units.load_state_dict({key: it.clone() for key, it in units.state_dict().items()}, assign=True),
}
# What a user holds of a gradient, which must then not be overwritten.
HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "gradient": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "slice": lambda grad: grad[1:],
    "flat-view": lambda grad: grad.view(-1),
    "array": lambda grad: grad.numpy(),
}


class Run:
    """One rank's run of a program: whatever happens to the synchronized model happens to the reference's too."""

    def __init__(self, program: Program, device: Device, **target: Any) -> None:
        self.program, self.rank, self.device = program, dist.get_rank(), device
        self.module, self.bare = Units(program.units), Units(program.units)
        device.place(self.module)
        self.reference = Reference(self.bare, program, target.get("process_group"))
        self.losses: list[tuple[Tensor, Tensor]] = []  # of forwards whose backward is to come
        self.held: list[tuple[Any, Tensor]] = []
        self.late_ops: list[tuple[int, list[OpKind]]] = []  # that must come
        self.unused: set[str] | None = None  # as it is to be said now, if that is known
        self.num_forwards, self.is_synchronized = 0, False
        self.divisors: tuple[Any, Tensor] | None = None  # of losses, ours and the reference's
        for event in events_of(program.before):
            self.happen(event)
        # With two ranks the bits are the same, and "native" is what users have.
        reduction = "native" if dist.get_world_size() == 2 else "ordered"
        given = {"strategy": program.strategy, "reduction": reduction, "bucket_cap_mb": PLANS[program.plan]}
        given |= program.settings
        make: Any = attach if program.is_attached else DistributedDataParallel
        self.handle = make(self.module, config=SyncConfig(**given), **target)
        self.model, self.sync = (self.module, self.handle) if program.is_attached else (self.handle, self.handle.sync)
        if program.has_hook:
            self.handle.register_comm_hook(target.get("process_group"), allreduce_hook)
        self.make_optimizers()
        self.unused = set()

    def make_optimizers(self) -> None:
        how = {"lr": LEARNING_RATE}
        if self.program.has_momentum and not self.program.has("table", "bag"):
            how |= {"momentum": 0.5, "weight_decay": 0.01}
        self.optimizers: list[Any] = [torch.optim.SGD(model.parameters(), **how) for model in (self.module, self.bare)]
        if self.program.strategy != "ddp":
            self.optimizers[0] = ShardedOptimizer(torch.optim.SGD, self.handle, **how)
            self.reference.has_shards = sharding_of(self.sync) is not None
            self._close_gaps()

    def happen(self, event: str) -> None:
        verb, _, words = event.partition(" ")
        of_ranks = words.split("|")
        call = partial(self.change, verb) if verb in CHANGES else getattr(self, verb)
        call(*of_ranks[self.rank % len(of_ranks)].split())
        if self.unused is not None and not self.program.is_alone and not self.device.reads_late:
            assert sorted(self.sync.unused_parameters) == sorted(self.unused)

    def close(self) -> None:
        self.handle.close()
        for rank, late in self.late_ops:
            assert (late != []) == (rank == self.rank)
        for held, copied in self.held:
            assert torch.equal(torch.as_tensor(held).to_dense(), copied.to_dense()), "a gradient that the user holds has changed"

    # Training

    def zero(self, how: str = "") -> None:
        self.model.zero_grad(set_to_none=how != "in-place")
        self.reference.zero_grad(set_to_none=how != "in-place")

    def tokens(self, number: str) -> None:
        """From now on losses are divided by the mean of this number over ranks."""
        self.divisors = self.sync.mean_over_ranks(float(number)), self.reference.mean_of(float(number))

    def forward(self, order: str, *words: str) -> None:
        """Another batch each time; it may be "empty", or run "quiet", while backwards would only accumulate, or "inside".

        With "penalty" the loss has a gradient in it.
        """
        self.num_forwards += 1
        if "inside" not in words:  # of which nobody knows
            self.unused = set()
            if self.is_synchronized:
                self.reference.used.clear()
            self.is_synchronized = False
        wanted = noise(0 if "empty" in words else ROWS, WIDTH, step=self.num_forwards)
        losses = []
        models = self.module.forward if "inside" in words else self.model, self.bare
        for model, x in zip(models, (self.device.move(wanted), wanted), strict=True):
            x.requires_grad_("penalty" in words)
            with self.handle.no_sync() if "quiet" in words else contextlib.nullcontext():
                loss = model(x, order).square().sum() / ROWS
            if x.requires_grad:
                loss = loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()
            losses.append(loss)
        self.losses.append((losses[0], losses[1]))

    def backward(self, *words: str) -> None:
        """Of the oldest loss, or of all "together"; it may "retain" the graph, or make a "graph" of gradients.

        A rank that reaches nothing joins.
        """
        self._backward(*words)
        self._synchronize()

    def accumulate(self, *words: str) -> None:
        """A backward that only accumulates, "flagged" so, behind a "nested" context, or in one that an exception "leaves"."""
        with contextlib.suppress(ZeroDivisionError), contextlib.nullcontext() if "flagged" in words else self.handle.no_sync():
            self.sync.is_accumulating = True
            with self.handle.no_sync() if "nested" in words else contextlib.nullcontext():
                pass
            self._backward(*words)
            self.sync.is_accumulating = "flagged" not in words
            stop() if "leaves" in words else None
        if self.sends_micro_batches:
            self._synchronize(is_last=False)
            return
        self.reference.is_accumulated = True
        self.reference.accumulated()
        if not self.reference.has_shards:
            self.compare_gradients()

    def local(self) -> None:
        """A backward that no forward of the wrapper precedes, since the last step."""
        self._backward()
        self.reference.is_accumulated = True
        self.reference.accumulated()
        self.unused = None

    @property
    def sends_micro_batches(self) -> bool:
        return self.program.strategy == "zero2" and self.reference.has_shards and not self.program.is_alone

    def train(self, order: str) -> None:
        """A forward and a backward; a rank that has "none" only joins."""
        if order == "none":
            self.handle.finish()
            self.reference.used.clear()
            self.reference.backward(torch.zeros(()))
        else:
            self.forward(order)
            self._backward()
        self._synchronize()

    def reduce(self, op: str | None = None) -> None:
        self.handle.reduce_gradients_async(op).wait()
        self.reference.has_shards = sharding_of(self.sync) is not None
        self._synchronize(op=op)

    def begin(self) -> None:
        """A reduction by hand, which something else will complete."""
        self.handle.reduce_gradients_async()
        self.reference.synchronize()
        self.unused = None

    def wait(self) -> None:
        self.handle.wait()
        self.compare_gradients()

    def _backward(self, *words: str) -> None:
        losses = list(self.losses) if "together" in words else self.losses[:1]
        if "retain" not in words:
            del self.losses[: len(losses)]
        ours, wanted = (sum(each) for each in zip(*losses, strict=True))
        if self.divisors is not None:
            ours, wanted = ours / self.divisors[0].wait(), wanted / self.divisors[1]
        joins, has_graph = JOINS.keys() & set(words), "graph" in words
        if ours.requires_grad:
            self.differentiate(ours, *words, retain_graph="retain" in words or has_graph, create_graph=has_graph)
        for name in joins:
            JOINS[name](self)
        if not joins and not ours.requires_grad and (self.sends_micro_batches or not self.sync.is_accumulating):
            self.handle.finish()
        self.reference.has_shards = sharding_of(self.sync) is not None
        if self.reference.has_shards:
            self._close_gaps()
        self.reference.backward(wanted, retain_graph="retain" in words or has_graph, create_graph=has_graph)

    def differentiate(self, loss: Tensor, *words: str, **how: Any) -> None:
        """By backward; "by-hand" for all parameters, or "partly-by-hand" for those of unit 1, before the others' backward."""
        params = [param for param in self.module.parameters() if param.requires_grad]
        chosen = params if "by-hand" in words else list(self.module.units[1].parameters()) if "partly-by-hand" in words else []
        if chosen:
            for param, grad in zip(chosen, torch.autograd.grad(loss, chosen, retain_graph=True), strict=True):
                param.grad = grad
            how["inputs"] = [param for param in params if all(param is not it for it in chosen)]
        if "by-hand" not in words:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", r"Using backward\(\) with create_graph=True")
                loss.backward(**how)

    def unscale(self) -> None:
        """A scaler looks at gradients, and finds the same on all ranks."""
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(self.device.move(torch.zeros(())))
        scaler.step(torch.optim.SGD(self.module.parameters(), lr=0.0))
        scaler.update()
        is_finite = all(param.grad.isfinite().all() for param in self.module.parameters() if param.grad is not None)
        assert scaler.get_scale() == (1.0 if is_finite else 0.5)

    def _synchronize(self, *, op: str | None = None, is_last: bool = True) -> None:
        self.reference.synchronize(op=op)
        self._ends_synchronized(is_last=is_last)

    def _ends_synchronized(self, *, is_last: bool = True) -> None:
        reference = self.reference
        self.is_synchronized = is_last
        self.compare_gradients()
        if is_last:
            used = {name for name, param in self.bare.named_parameters() if param in reference.used}
            self.unused = None if reference.is_use_open else {spec.name for spec in self.sync.plan.params} - used

    def compare_gradients(self) -> None:
        for (name, param), wanted in zip(self.module.named_parameters(), self.bare.parameters(), strict=True):
            if self.program.strategy != "ddp" and not param.requires_grad:
                continue  # it may still have a part of a gradient
            ours = self.handle.full_gradient(param) if self.reference.has_shards else param.grad
            ours = None if ours is None else ours.cpu()
            if ours is None or wanted.grad is None:
                assert ours is wanted.grad, (name, ours, wanted.grad)
                continue
            assert not ours.requires_grad, name
            assert ours.is_sparse or self.reference.has_shards or param.grad.stride() == torch.empty_like(param).stride(), name
            # (a + b) / 2 + (c + d) / 2 for ((a + c) + (b + d)) / 2, or sums in another order: some units in the last place.
            is_exact = self.program.is_exact(dist.get_world_size()) or not wanted.numel()
            largest = 0.0 if is_exact else float(wanted.grad.to_dense().abs().nan_to_num(0.0, 0.0).max())
            tolerance = 4 * torch.finfo(wanted.dtype).eps * largest
            how: dict[str, Any] = {"rtol": 0.0, "atol": tolerance, "equal_nan": True, "msg": f"{name}: {{}}".format}
            torch.testing.assert_close(ours.to_dense(), wanted.grad.to_dense(), **how)
            if not is_exact:  # nor may the difference grow
                wanted.grad = ours.to_dense().clone()

    def _close_gaps(self) -> None:
        """Shards have no gaps between elements, and a matrix product rounds otherwise for one with gaps."""
        for ours, wanted in zip(self.module.parameters(), self.bare.parameters(), strict=True):
            if ours.stride() != wanted.stride():
                wanted.data = torch.empty_like(wanted.data).copy_(wanted.data)

    def step(self, how: str = "") -> None:
        """On all ranks, or on one that sends its parameters to others, which step on those that are frozen.

        After a step that is "flying" the next event comes while parameters are on their way. A step that is "alone", in a context
        that only accumulates, is on this rank's own gradients; any other one averages first what was only accumulated.
        """
        rank = how.replace("flying", "").replace("alone", "")
        is_late = self.reference.is_accumulated and how != "alone"
        frozen = [param for param in self.module.parameters() if not param.requires_grad]
        ours = self.optimizers[:1] if rank in ("", str(self.rank)) else [torch.optim.SGD(frozen, lr=1.0)] if frozen else []
        context = self.handle.no_sync() if how == "alone" else contextlib.nullcontext()
        with context, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "an optimizer steps on gradients that were not averaged")
            for optimizer in ours:
                optimizer.step()
        if how == "alone":
            self.reference.is_accumulated = False
        if is_late:
            self.reference.has_shards = sharding_of(self.sync) is not None  # a change of parameters is in force now
            self.reference.synchronize()
            self._ends_synchronized()
        if all(param.grad.isfinite().all() for param in self.bare.parameters() if param.grad is not None):
            self.reference.step(self.optimizers[1], {spec.name for spec in self.sync.plan.params})
        for param in self.module.parameters() if rank else ():
            dist.broadcast(param.data, int(rank))
        self.reference.has_shards = sharding_of(self.sync) is not None
        self.reference.used.clear()
        if self.reference.has_shards:
            self._close_gaps()
        if how == "flying":
            return
        self.sync.wait()
        for (name, ours), wanted in zip(self.module.named_parameters(), self.bare.parameters(), strict=True):
            assert torch.equal(ours.cpu(), wanted), name
        for ours, wanted in zip(self.module.buffers(), self.bare.buffers(), strict=True):
            assert self.rank > 0 or torch.equal(ours.cpu(), wanted)  # statistics follow rank 0

    def update(self, indices: str) -> None:
        for model in (self.module, self.bare):
            torch.optim.SGD(
                [param for index in indices for param in model.units[int(index)].parameters()], lr=LEARNING_RATE
            ).step()

    # Changes of the model

    def change(self, verb: str, *words: str) -> None:
        """New parameters are the same on every rank."""
        before = list(self.module.parameters())
        for model in (self.module, self.bare):
            CHANGES[verb](model.units, self.num_forwards, *words)
        self.device.place(self.module)
        if hasattr(self, "handle") and list(map(id, before)) != list(map(id, self.module.parameters())):
            self.make_optimizers()

    def move(self) -> None:
        """New data for every parameter."""
        for param in (*self.module.parameters(), *self.bare.parameters()):
            param.data = param.data * 0.5

    # What else a user does

    def write(self, index: str) -> None:
        """Gradients of the user's own."""
        for model in (self.module, self.bare):
            for param in model.units[int(index)].parameters():
                param.grad = torch.empty_like(param).copy_(noise(param.numel(), step=self.num_forwards).view(param.shape))

    def scale(self, how: str = "in-place") -> None:
        """Gradients are scaled, in place or by new data, as for clipping."""
        for param in (*self.module.parameters(), *self.bare.parameters()):
            if param.grad is not None and how == "in-place":
                param.grad.mul_(0.3)
            elif param.grad is not None:
                param.grad.data = param.grad.data * 0.3

    def hold(self, how: str = "gradient") -> None:
        """The user keeps something of some gradients, of which there are new ones from now on."""
        params = list(self.module.parameters())[: self.num_forwards + 1]
        held = [HOLDERS[how](param.grad) for param in params if param.grad is not None]
        self.held += [(it, torch.as_tensor(it).clone()) for it in held]
        self.zero()

    def finish(self) -> None:
        """When nothing is owed it does nothing, and completes a reduction."""
        self.handle.finish()
        self.compare_gradients()

    def look(self, now: str = "", how: str = "") -> None:
        """One more training forward on some ranks, for a look at the loss, or a "quiet" one, in a context that accumulates."""
        if now:
            with self.handle.no_sync() if how == "quiet" else contextlib.nullcontext():
                self.model(self.device.move(noise(ROWS, WIDTH)), "0")
            self.unused = set()

    def saliency(self, now: str = "") -> None:
        """A backward of the bare module on some ranks, after a step and before the next forward."""
        if now:
            order, x = "".join(map(str, range(len(self.module.units)))), noise(ROWS, WIDTH, step=100 + self.num_forwards)
            self.module.forward(self.device.move(x), order).square().sum().backward()
            self.reference.backward(self.bare(x, order).square().sum())
            self.reference.accumulated()
            if not self.reference.has_shards:
                self.compare_gradients()

    def evaluate(self, now: str = "") -> None:
        if now:
            with torch.no_grad():
                x = noise(ROWS, WIDTH)
                ours, wanted = self.model.eval()(self.device.move(x), "0"), self.bare.eval()(x, "0")
            assert torch.equal(ours.cpu(), wanted)
            for model in (self.model, self.bare):
                model.train()

    def reload(self) -> None:
        """A state dict is saved, and loaded when the parameters were lost."""
        state = copy.deepcopy(self.model.state_dict())
        with torch.no_grad():
            for param in self.module.parameters():
                param.zero_()
        self.model.load_state_dict(state)

    def resume(self, first: str) -> None:
        """Everything is saved, lost, and loaded, the "model" or the "optimizer" first."""
        optimizer = self.optimizers[0]
        of_model, of_optimizer = copy.deepcopy((self.model.state_dict(), optimizer.state_dict()))
        with torch.no_grad():
            for param in self.module.parameters():
                param.fill_(float("nan"))
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.fill_(float("nan"))
        loads = [partial(self.model.load_state_dict, of_model), partial(optimizer.load_state_dict, of_optimizer)]
        for load in loads if first == "model" else reversed(loads):
            load()

    def forget(self) -> None:
        """The optimizers begin with fresh states."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def overflow(self, now: str = "") -> None:
        if now:
            ours, wanted = self.losses[0]
            self.losses[0] = ours * float("inf"), wanted * float("inf")

    def late(self, rank: str, kind: str, how: str = "") -> None:
        """From now on a rank is late with every op of a kind, of which "surely" there are some."""
        late = late_ops(self.sync, OpKind(kind), int(rank), seconds=0.005)
        if how == "surely":
            self.late_ops.append((int(rank), late))

    def fail(self, where: str = "") -> None:
        """A forward or a backward, also one that would "accumulate", fails on the ranks that say where, others' therefore.

        Nobody steps on what it has left, and all drop it; a gradient that the failed one has not reached is as it was before.
        """
        unit = self.module.units[0]
        param = next(param for param in unit.parameters() if param.requires_grad)
        before = None if self.reference.has_shards or param.grad is None else param.grad.clone()
        x = self.device.move(noise(ROWS, WIDTH))
        hook = unit.register_forward_hook(stop) if where == "forward" else param.register_hook(stop) if where else None
        with (
            self.handle.no_sync() if where == "accumulate" else contextlib.nullcontext(),
            pytest.raises(ZeroDivisionError if where else PeerFailed),
        ):
            self.model(x, "".join(map(str, range(len(self.module.units))))).sum().backward()
        if hook is not None:
            hook.remove()
        if where in ("", "backward"):
            with pytest.raises(PhaseError, match="the last backward or synchronization failed"):
                self.optimizers[0].step()
        assert before is None or not where or torch.equal(param.grad, before)
        self.unused = None
        self.zero()


@contextlib.contextmanager
def place_of(program: Program, device: Device) -> Iterator[dict[str, Any]]:
    """The ranks that train together: all, rows of a mesh, or this one alone."""
    if program.strategy == "hybrid":
        with mesh_of(2, dist.get_world_size() // 2, backend=device.backend) as mesh:
            yield {"device_mesh": mesh}
    elif program.is_alone:
        with alone() as group:
            yield {"process_group": group}
    elif device.backend is not None:
        with of_all(device.backend) as group:
            yield {"process_group": group}
    else:
        yield {}


def events_of(text: str) -> Iterator[str]:
    return filter(None, map(str.strip, text.split(",")))


def run(program: Program, device: Device = HOST) -> None:
    """Runs a program on this rank; a failure names the event and the program."""
    with place_of(program, device) as place:
        of_rank = Run(program, device, **place)
        try:
            for number, event in enumerate([*events_of(program.events)] * program.times):
                try:
                    of_rank.happen(event)
                except Exception as error:
                    error.add_note(f"event {number}, {event!r}, of\n{program}")
                    raise
        finally:
            of_rank.close()
