"""Parameters read between a sharded step and the next forward are what the step has made of them, however they are reached."""

import contextlib
import copy
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from support.checkpoints import copied
from support.errors import text_of
from support.inside import (
    CODE_OF_GATHERS,
    before_lines,
    call_before,
    gathers_of,
    interrupted_steps,
    observe,
    reads_that_wait,
    slow_gathers,
)
from support.levels import some
from support.models import Case, noise
from support.naive import wrapped
from support.ranks import in_ranks
from support.sharded import (
    MLP,
    NARROW,
    ORDERED,
    SMALL,
    TIED,
    Parameters,
    one_step,
    parameters,
    require_bits,
    require_equal,
    require_moved,
    require_same_everywhere,
    step_of,
    stepped,
    training,
)
from undertow import ConfigError, DistributedDataParallel, PhaseError, RankLost, ShardedOptimizer
from undertow.schedule import OpKind


class Kept:
    """What a user holds since before training: the module, its parameters in a list, and tensors over their memory."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.params = module, list(module.parameters())
        self.detached = [param.detach() for param in self.params]
        self.data = [param.data for param in self.params]
        self.arrays = [param.detach().numpy() for param in self.params]
        self.state = module.state_dict()


READS: dict[str, Callable[[DistributedDataParallel, "Kept"], Iterable[Tensor]]] = {
    "parameters of the wrapper": lambda ddp, _: ddp.parameters(),
    "a list of parameters": lambda _, kept: kept.params,
    "attributes of a layer": lambda ddp, _: [param for layer in ddp.module[::2] for param in (layer.weight, layer.bias)],
    "param.data": lambda _, kept: [param.data for param in kept.params],
    "named parameters of the sync": lambda ddp, _: [param for _, param in ddp.sync.named_parameters()],
    "state_dict of the wrapper": lambda ddp, _: ddp.state_dict().values(),
    "state_dict with keep_vars": lambda _, kept: kept.module.state_dict(keep_vars=True).values(),
    "a deep copy of the wrapper": lambda ddp, _: copy.deepcopy(ddp).module.parameters(),
    "a deep copy of the inner module": lambda _, kept: copy.deepcopy(kept.module).parameters(),
    "copies of parameters": lambda _, kept: map(copy.copy, kept.params),
    "AveragedModel": lambda _, kept: AveragedModel(kept.module).module.parameters(),
    "torch.save": lambda _, kept: copied(kept.module, weights_only=False).parameters(),
    "pickle": lambda _, kept: pickle.loads(pickle.dumps(kept.params)),
    "a batched function": lambda _, kept: torch._foreach_add(kept.params, 0),
    "an operator": lambda _, kept: map(torch.ops.aten.clone.default, kept.params),
    "functional_call": lambda _, kept: torch.func.stack_module_state([kept.module])[0].values(),
    "numpy": lambda _, kept: [torch.from_numpy(param.detach().numpy()) for param in kept.params],
    "tensors of a loop": lambda _, kept: [torch.stack(list(param)) for param in kept.params],
    "parameters of parameters": lambda _, kept: [nn.Parameter(param) for param in kept.params],
    "the class of a parameter": lambda _, kept: [type(param)(param.data) for param in kept.params],
    "vmap": lambda _, kept: [torch.vmap(torch.clone)(param) for param in kept.params],
}
# What was held since before training ends the gathers with the step.
HELD_READS: dict[str, Callable[[DistributedDataParallel, "Kept"], Iterable[Tensor]]] = {
    "detached before training": lambda _, kept: kept.detached,
    "param.data of before training": lambda _, kept: kept.data,
    "arrays of before training": lambda _, kept: map(torch.from_numpy, kept.arrays),
    "state_dict of before training": lambda _, kept: kept.state.values(),
}


def require_read(found: Iterable[Tensor], ddp: DistributedDataParallel, params: list[nn.Parameter], what: str = "") -> None:
    """What was found are the values that the parameters have when all of them have come."""
    values = [value.detach().clone() for value in found]
    ddp.wait()
    assert [torch.equal(mine.view(it.shape), it) for mine, it in zip(values, params, strict=True)] == [True] * len(params), what


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("zero1", SMALL),
        ("zero2", {"bucket_cap_mb": 2e-4}),  # several parameters in one bucket
        ("zero1", {}),
    ],
)
def test_a_read_between_steps_sees_what_was_stepped(strategy: str, settings: dict[str, Any]) -> None:
    model = MLP.model()
    kept = Kept(model)
    with training(model, strategy, "SGD", **settings) as (ddp, opt):
        one_step(ddp, opt, 0)
        slow_gathers(ddp)
        for number, (name, read) in enumerate(HELD_READS.items(), start=1):
            one_step(ddp, opt, number)
            require_read(read(ddp, kept), ddp, kept.params, name)


@in_ranks(2)
@pytest.mark.parametrize("name", some(READS, most=3))
def test_a_read_waits_for_what_is_in_flight(name: str) -> None:
    with stepped(1, **SMALL) as (ddp, opt):
        slow_gathers(ddp)
        one_step(ddp, opt, 1)
        assert gathers_of(ddp).in_flight
        kept = Kept.__new__(Kept)
        kept.module, kept.params = ddp.module, list(ddp.module.parameters())
        found = [value.detach().clone() for value in READS[name](ddp, kept)]
        assert gathers_of(ddp).in_flight == {}
        require_read(found, ddp, kept.params)


FOLLOWS: dict[str, Callable[..., object]] = {
    "AveragedModel": lambda ema, module, _source, _shadow: ema.update_parameters(module),
    "a loop": lambda _ema, module, _source, shadow: [
        mine.mul_(0.9).add_(param.data, alpha=0.1) for mine, param in zip(shadow, module.parameters(), strict=True)
    ],
    "a batched function": lambda _ema, module, _source, shadow: torch._foreach_lerp_(shadow, list(module.parameters()), 0.1),
    "a state dict": lambda _ema, _module, source, shadow: [
        mine.lerp_(value, 0.1) for mine, value in zip(shadow, source.values(), strict=True)
    ],
}


# A moving average of the parameters, written as people do, in a hook of the optimizer's step.
@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("follow", FOLLOWS)
def test_a_moving_average_is_that_of_plain_training(follow: str) -> None:
    def averaged(strategy: str) -> Parameters:
        with training(MLP.model(), strategy, "SGD", **ORDERED) as (ddp, opt):
            source = ddp.module.state_dict() if follow == "a state dict" else None  # held for good, as some recipes do
            ema = AveragedModel(ddp.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
            shadow = [param.detach().clone() for param in ddp.module.parameters()]
            follow_all = torch.no_grad(partial(FOLLOWS[follow], ema, ddp.module, source, shadow))
            opt.register_step_post_hook(lambda *_: follow_all())
            for number in range(5):
                one_step(ddp, opt, number)
                if strategy != "ddp" and number == 1:
                    slow_gathers(ddp)
            return {str(number): value.detach().clone() for number, value in enumerate([*ema.module.parameters(), *shadow])}

    require_equal(averaged("ddp"), averaged("zero1"))


WRITES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clamp_": torch.no_grad(lambda params: [param.clamp_(-0.05, 0.05) for param in params]),
    "a batched function": torch.no_grad(lambda params: torch._foreach_mul_(params, 0.5)),
    "param.data =": lambda params: [setattr(param, "data", param.data.sign() * 0.1) for param in params],
    "param.data.clamp_": lambda params: [param.data.clamp_(-0.05, 0.05) for param in params],
}


def slowly(ddp: DistributedDataParallel, _opt: Any, step: int, *, first: int = 2, **how: float) -> None:
    if step == first:
        slow_gathers(ddp, **how)


@pytest.mark.slow
@in_ranks(2)
@pytest.mark.parametrize("how", WRITES)
def test_a_write_between_steps_is_trained_on(how: str) -> None:
    # The list is made when no parameter is on its way, which is how users have it.
    def each(ddp: Any, opt: Any, step: int) -> None:
        params = list(ddp.module.parameters())
        one_step(ddp, opt, step)
        WRITES[how](params)

    require_bits(MLP, num_steps=5, each=each, before=slowly)


@in_ranks(2)
def test_a_step_that_reads_nothing_leaves_its_gathers_to_the_forward() -> None:
    with stepped(2, **SMALL) as (ddp, opt):
        ddp.wait()
        reads = reads_that_wait(ddp)
        for number in range(2, 5):
            one_step(ddp, opt, number)
            opt.zero_grad()
            ddp.zero_grad()
            ddp.module.zero_grad()
            assert [param.requires_grad for param in ddp.module.parameters()] == [True] * 4
            assert all(param.is_floating_point() for param in ddp.module.parameters())
            assert len(gathers_of(ddp).in_flight) == len(ddp.plan.buckets)
        assert reads == []
        next(ddp.module.parameters()).sum()
        others = {bucket.index for bucket in ddp.plan.buckets if 0 not in bucket.params}
        assert (len(reads), set(gathers_of(ddp).in_flight)) == (1, others)


# What no peer will bring any more cannot be read in silence; after close() it can.
@in_ranks(2)
def test_a_gather_that_has_failed_fails_every_read() -> None:
    with stepped(2, **SMALL) as (ddp, _):
        params = list(ddp.module.parameters())
        bucket, handle = next(iter(gathers_of(ddp).in_flight.items()))
        param = params[ddp.plan.buckets[bucket].params[0]]
        with mock.patch.object(handle, "wait", side_effect=RankLost("rank 1 is gone.", where="here", remedy="Start again.")):
            for read in [param.sum, lambda: copy.deepcopy(ddp.module)] * 2:
                assert text_of(RankLost, read).startswith("rank 1 is gone")
    assert all(type(param) is nn.Parameter for param in params)


@in_ranks(2)
def test_a_child_process_cannot_read_what_only_its_parent_receives() -> None:
    with stepped(2, **SMALL) as (ddp, _):
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                next(ddp.module.parameters()).sum()
            except PhaseError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            said = file.read()
        os.wait()
        assert said.startswith("a child process reads a parameter that had not arrived when the process was started.")


@in_ranks(2)
def test_two_parameters_over_one_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    with wrapped(model) as ddp:
        text = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.SGD, ddp, lr=0.1))
        assert text.startswith("parameters '0.weight' and '1.weight' lie in the same memory")
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)  # the model is as it was
        ddp(noise(3, 4)).sum().backward()
        optimizer.step()


# Another process evaluates a model in shared memory.
@in_ranks(2)
@pytest.mark.parametrize("after_a_step", [False, True])
def test_parameters_stay_in_memory_that_processes_share(after_a_step: bool) -> None:
    model = MLP.model()
    if not after_a_step:
        model.share_memory()
    with training(model, "zero1", "SGD", **SMALL) as (ddp, opt):
        one_step(ddp, opt, 0)
        model.share_memory()
        pointers, values = [param.data_ptr() for param in model.parameters()], parameters(ddp)
        for number in range(1, 3):
            one_step(ddp, opt, number)
        assert pointers == [param.data_ptr() for param in model.parameters()]
        require_moved(values, parameters(ddp))


# A thread reads a parameter; before it goes on, the thread that trains has taken another step.
@pytest.mark.deep
@in_ranks(2)
def test_a_thread_that_read_before_the_next_step_leaves_that_to_its_own_readers() -> None:
    with stepped(2, **SMALL) as (ddp, opt):
        params, gathers = list(ddp.module.parameters()), gathers_of(ddp)
        bucket, handle = next(iter(gathers.in_flight.items()))
        wait, has_come, goes_on = handle.wait, threading.Event(), threading.Event()

        def late() -> None:
            wait()
            if threading.current_thread() is reader:
                has_come.set()
                goes_on.wait()

        param = ddp.plan.buckets[bucket].params[0]
        others = {bucket.index for bucket in ddp.plan.buckets if param not in bucket.params}
        reader = threading.Thread(target=params[param].sum)
        with mock.patch.object(handle, "wait", late):
            reader.start()
            has_come.wait()
            ddp.wait()
            slow_gathers(ddp)
            one_step(ddp, opt, 2)
            goes_on.set()
            reader.join()
        assert set(gathers.in_flight) == others
        require_read(params, ddp, params)


# Python runs signal handlers and `__del__` between any two lines. Here one runs in each step, before
# another line of those that bring parameters, until there is no such line. Inside of `opt.step()`
# parameters are half updated, as with any optimizer.
@in_ranks(2)
@pytest.mark.parametrize(
    ("part", "ends"),
    some([("forward", False), ("forward", True), ("read", False), ("read", True), ("step", False)], most=1),
    ids=str,
)
def test_between_any_two_lines_parameters_can_be_read(part: str, ends: bool) -> None:
    case = Case(lambda: nn.Linear(6, 8), MLP.loss)
    with stepped(3, case=case, **SMALL) as (ddp, opt):
        weight, bias = ddp.module.parameters()
        parts = {"forward": lambda: case.loss(ddp, 0), "read": weight.sum, "step": opt.step}
        found, ran = dict[str, Tensor](), set[str]()

        def handler() -> None:
            found.update(weight=weight.detach().clone(), bias=bias.detach().clone())
            if ends:
                raise KeyboardInterrupt

        for number in count(1):
            opt.zero_grad()
            if part == "step":
                case.loss(ddp, number).backward()
            found.clear()
            with (
                before_lines(CODE_OF_GATHERS, handler, number=number) as lines,
                contextlib.suppress(KeyboardInterrupt),
            ):
                parts[part]()
            if not found:
                break
            what = f"line {number} is of {lines[number - 1]}"
            ran.add(lines[number - 1])
            if part == "step":
                ddp.wait()
            else:
                require_read(found.values(), ddp, [weight, bias], what)
            assert type(weight) is type(bias) is nn.Parameter, what
            if part != "step":
                step_of(ddp, opt, case, number)
        require_same_everywhere(parameters(ddp))
    assert ("launch" if part == "step" else "wait") in ran


# Gathers under the next forward: every reader waits for what it reads, and for no more; delays change nothing.


def buckets_of_first_layer(ddp: DistributedDataParallel) -> set[int]:
    return {bucket.index for bucket in ddp.plan.buckets for param in bucket.params if param in (0, 1)}


@in_ranks(2, 3)
def test_the_whole_model_waits_for_nothing_that_its_first_layer_does_not_need() -> None:
    with stepped(4, **SMALL) as (ddp, opt):
        waited, seen = slow_gathers(ddp), []
        ddp.module[0].register_forward_pre_hook(lambda *_: seen.append(len(waited)))
        one_step(ddp, opt, 4)  # whose gathers are the next forward's
        waited.clear()
        seen.clear()
        MLP.loss(ddp, 5)
        assert seen == [len(buckets_of_first_layer(ddp))]  # by the first layer's forward nobody has waited for more
        assert sorted(waited) == [bucket.index for bucket in ddp.plan.buckets]


@in_ranks(2, 3)
def test_gathers_leave_in_the_order_of_the_forward() -> None:
    with stepped(3, case=TIED, **SMALL) as (ddp, _):
        names = [ddp.plan.params[ddp.plan.buckets[bucket].params[0]].name for bucket in list(gathers_of(ddp).in_flight)]
    assert names[0] == "embedding.weight"
    last_of_attention = max(at for at, name in enumerate(names) if "attn" in name)
    assert last_of_attention < min(at for at, name in enumerate(names) if "linear2" in name)


# Multiplies by a weight that it hands to a function of its own, which no torch function sees; calls its child twice or never.
class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # as in a kernel
            ctx.save_for_backward(x, weight)
            return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Scaled(nn.Module):
    def __init__(self, *, reads_child: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.3, 0.7, 6))
        self.child = nn.Linear(6, 6, bias=False) if reads_child else nn.Identity()
        self.reads_child = reads_child

    def forward(self, x: Tensor) -> Tensor:
        x = Scaling.apply(x, self.weight)
        return Scaling.apply(x, self.child.weight[0]) if self.reads_child else self.child(self.child(x))


UNSEEN = Case(lambda: nn.Sequential(*(Scaled() for _ in range(6)), nn.Linear(6, 4)), MLP.loss)


def unseen_of_all_kinds() -> nn.Module:
    model = nn.Sequential(*(Scaled(reads_child=place == 1) for place in range(4)), nn.Linear(6, 4))
    model[3].weight = model[0].weight  # shared
    model[2].child = model[0]  # called three times
    return model


@pytest.mark.deep
@in_ranks(2, 3)
def test_a_layer_whose_reads_cannot_be_seen_waits_for_its_own_parameters_in_the_order_of_the_forward() -> None:
    with stepped(3, case=UNSEEN, bucket_cap_mb=24 / 2**20) as (ddp, opt):
        places = {bucket.index: int(ddp.plan.params[bucket.params[0]].name.split(".")[0]) for bucket in ddp.plan.buckets}
        waited, seen = slow_gathers(ddp), []
        for place, layer in enumerate(ddp.module):
            layer.register_forward_pre_hook(lambda *_, place=place: seen.append((place, {places[it] for it in waited})))
        step_of(ddp, opt, UNSEEN, 3)
        order = [places[bucket] for bucket in gathers_of(ddp).in_flight]
        waited.clear()
        seen.clear()
        UNSEEN.loss(ddp, 4)
    assert order == sorted(order)
    assert seen == [(place, set(range(place + 1))) for place in range(7)]


@pytest.mark.deep
@in_ranks(2)
def test_reads_that_cannot_be_seen_read_parameters_that_have_come() -> None:
    require_bits(Case(unseen_of_all_kinds, MLP.loss), before=partial(slowly, first=3, seconds=0.005))


# What is read after a step that is interrupted on the first ranks, and trained from there, is as
# without. Parameters of 16 bits keep their fp32 values.
@in_ranks(2)
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], most=1), ids=str)
@pytest.mark.parametrize("overlap", some([True, False], most=1))
@pytest.mark.parametrize("num_interrupted", some([1, 2], most=1))
def test_an_interrupted_step_leaves_no_torn_parameters(
    num_interrupted: int,
    overlap: bool,
    dtype: torch.dtype,
) -> None:
    def run(*, is_interrupted: bool) -> list[Parameters]:
        found = []
        model = NARROW[dtype].model()
        with training(model, "zero1", "SGD", overlap=overlap, **ORDERED) as (ddp, opt):
            for number in range(3):
                if is_interrupted and number == 1 and dist.get_rank() < num_interrupted:
                    with interrupted_steps(), pytest.raises(KeyboardInterrupt):
                        step_of(ddp, opt, NARROW[dtype], number)
                else:
                    step_of(ddp, opt, NARROW[dtype], number)
                found.append({name: param.clone() for name, param in ddp.state_dict().items()})
        return found

    for found, expected in zip(run(is_interrupted=True), run(is_interrupted=False), strict=True):
        require_equal(found, expected)


@in_ranks(2)
def test_a_graph_from_before_a_step_does_not_go_through_backward() -> None:
    with stepped(2, **SMALL) as (ddp, opt):
        ddp.wait()
        before = ddp(noise(5, 6)).sum()
        opt.step()
        assert "modified by an inplace operation" in text_of(RuntimeError, before.backward)


@pytest.mark.slow
@in_ranks(2, 4)
def test_a_delay_in_a_thread_changes_nothing() -> None:
    def before(ddp: Any, opt: Any, step: int, *, place: str) -> None:
        if step == 1:
            call_before(ddp, place, lambda: time.sleep(0.003 * (dist.get_rank() == 1)))

    across = ["sends across", "reductions across"] if dist.get_world_size() == 4 else []
    for place in ["sends", "gathers", *across]:
        require_bits(TIED, num_steps=5, before=partial(before, place=place))


def wait_for(event: threading.Event) -> None:
    assert event.wait(40.0)


# If the training thread waited for either reduction of a bucket, nobody would let the first of them leave.
@pytest.mark.deep
@in_ranks(4)
def test_backward_waits_for_neither_axis_of_a_mesh() -> None:
    is_over = threading.Event()

    def before(ddp: Any, _opt: Any, step: int) -> None:
        if step == 1:
            observe(ddp, before=lambda op: is_over.set() if op.kind is OpKind.BIND else None)
            call_before(ddp, "reductions", lambda: wait_for(is_over))

    require_bits(MLP, num_steps=3, before=before, among=[{"strategy": "hybrid"}])
    assert is_over.is_set()


@pytest.mark.deep
@in_ranks(2)
def test_the_trace_has_both_ways_of_every_bucket() -> None:
    with stepped(5, case=TIED, record="full", **SMALL) as (ddp, _):
        ddp.wait()
        trace = ddp.traces()[-1]
        ddp.report()
        kinds = [event.kind for event in trace.communication]
        assert [kinds.count(kind) for kind in ("reduce_scatter", "all_gather")] == [len(ddp.plan.buckets)] * 2
        assert all(event.start_us <= event.stop_us for event in trace.events)


@pytest.mark.deep
@in_ranks(2)
def test_without_overlap_nothing_is_in_flight_after_a_step() -> None:
    with training(TIED.model(), overlap=False, **SMALL) as (ddp, opt):
        for number in range(4):
            step_of(ddp, opt, TIED, number)
            assert gathers_of(ddp).in_flight == {}
