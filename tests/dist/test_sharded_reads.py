"""Parameters read between a sharded step and the next forward are what the step has made of them, however they are reached."""

from __future__ import annotations

import copy
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from support.inside import gathers_of, slow_gathers
from support.models import CASES, noise
from support.ranks import Ranks, in_ranks
from support.sharded import SMALL, parameters, require_equal, step_of, training
from undertow import ConfigError, DistributedDataParallel, PhaseError, RankLost

MLP = CASES["mlp"]
MIXED = {"bucket_cap_mb": 2e-4}  # parameters in pieces, and several in one bucket

Read = Callable[[DistributedDataParallel, "Kept"], Iterable[Tensor]]


class Kept:
    """What a user holds since before training: the module, its parameters in a list, and tensors over their memory."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.params = list(module.parameters())
        self.detached = [param.detach() for param in self.params]
        self.data = [param.data for param in self.params]
        self.arrays = [param.detach().numpy() for param in self.params]
        self.state = module.state_dict()


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


READS: dict[str, Read] = {
    "parameters of the wrapper": lambda ddp, _: ddp.parameters(),
    "parameters of the inner module": lambda ddp, _: ddp.module.parameters(),
    "the inner module the user kept": lambda _, kept: kept.module.parameters(),
    "a list of parameters": lambda _, kept: kept.params,
    "attributes of a layer": lambda ddp, _: [param for layer in ddp.module[::2] for param in (layer.weight, layer.bias)],
    "_parameters": lambda ddp, _: [param for layer in ddp.module[::2] for param in layer._parameters.values()],
    "param.data": lambda _, kept: [param.data for param in kept.params],
    "named parameters of the sync": lambda ddp, _: [param for _, param in ddp.sync.named_parameters()],
    "state_dict of the wrapper": lambda ddp, _: ddp.state_dict().values(),
    "state_dict of the inner module": lambda _, kept: kept.module.state_dict().values(),
    "state_dict with keep_vars": lambda _, kept: kept.module.state_dict(keep_vars=True).values(),
    "a deep copy of the wrapper": lambda ddp, _: copy.deepcopy(ddp).module.parameters(),
    "a deep copy of the inner module": lambda _, kept: copy.deepcopy(kept.module).parameters(),
    "a deep copy of the list": lambda _, kept: copy.deepcopy(kept.params),
    "copies of parameters": lambda _, kept: map(copy.copy, kept.params),
    "AveragedModel": lambda _, kept: AveragedModel(kept.module).module.parameters(),
    "torch.save": lambda _, kept: saved(kept.module).parameters(),
    "pickle": lambda _, kept: pickle.loads(pickle.dumps(kept.params)),
    "a batched function": lambda _, kept: torch._foreach_add(kept.params, 0),
    "an operator": lambda _, kept: map(torch.ops.aten.clone.default, kept.params),
    "functional_call": lambda _, kept: torch.func.stack_module_state([kept.module])[0].values(),
    "numpy": lambda _, kept: [torch.from_numpy(param.detach().numpy()) for param in kept.params],
    "tensors of a loop": lambda _, kept: [torch.stack(list(param)) for param in kept.params],
    "parameters of parameters": lambda _, kept: [nn.Parameter(param) for param in kept.params],
    "the class of a parameter": lambda _, kept: [type(param)(param.data) for param in kept.params],
    "vmap": lambda _, kept: [torch.vmap(torch.clone)(param) for param in kept.params],
    "detached before training": lambda _, kept: kept.detached,
    "param.data of before training": lambda _, kept: kept.data,
    "arrays of before training": lambda _, kept: map(torch.from_numpy, kept.arrays),
    "state_dict of before training": lambda _, kept: kept.state.values(),
}


@in_ranks(2)
@pytest.mark.parametrize(("strategy", "settings"), [("zero1", SMALL), ("zero2", MIXED), ("zero1", {})])
def test_a_read_between_steps_sees_what_was_stepped(strategy: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(7)
    model = MLP.make()
    kept = Kept(model)
    with training(model, strategy, "SGD", reduction="ordered", **settings) as (ddp, opt):
        step_of(ddp, opt, MLP, 0)
        slow_gathers(ddp)
        for number, (name, read) in enumerate(READS.items(), start=1):
            step_of(ddp, opt, MLP, number)
            found = [value.detach().clone() for value in read(ddp, kept)]
            ddp.wait()
            assert len(found) == len(kept.params), name
            for mine, param in zip(found, kept.params, strict=True):
                assert torch.equal(mine.view(param.shape), param), name


def read_while_in_flight(name: str) -> int:
    """Returns how many gathers were on their way when the read began: what was held before training would have ended them."""
    with training(MLP.model(), "zero1", "SGD", reduction="ordered", **SMALL) as (ddp, opt):
        step_of(ddp, opt, MLP, 0)
        slow_gathers(ddp)
        step_of(ddp, opt, MLP, 1)
        num_in_flight = len(gathers_of(ddp).in_flight)
        kept = Kept.__new__(Kept)
        kept.module, kept.params = ddp.module, list(ddp.module.parameters())
        found = [value.detach().clone() for value in READS[name](ddp, kept)]
        assert gathers_of(ddp).in_flight == {}
        assert all(torch.equal(mine.view(param.shape), param) for mine, param in zip(found, kept.params, strict=True))
        return num_in_flight


@pytest.mark.parametrize("name", [name for name in READS if "before training" not in name])
def test_a_read_waits_for_what_is_in_flight(two_ranks: Ranks, name: str) -> None:
    assert min(two_ranks.run(read_while_in_flight, name)) > 0


def averaged(strategy: str, follow: str) -> list[Tensor]:
    """A moving average of the parameters, written as people do, next to training."""
    with training(MLP.model(), strategy, "SGD", reduction="ordered", **({} if strategy == "ddp" else SMALL)) as (ddp, opt):
        source = ddp.module.state_dict()  # held for good, as some recipes do
        params = list(ddp.module.parameters())
        if follow != "a state dict":
            del source
        ema = AveragedModel(ddp.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        shadow = [param.detach().clone() for param in params]
        for number in range(5):
            step_of(ddp, opt, MLP, number)
            if strategy != "ddp" and number == 1:
                slow_gathers(ddp)
            with torch.no_grad():
                match follow:
                    case "AveragedModel":
                        ema.update_parameters(ddp.module)
                    case "a loop":
                        for mine, param in zip(shadow, params, strict=True):
                            mine.mul_(0.9).add_(param.data, alpha=0.1)
                    case "a batched function":
                        torch._foreach_lerp_(shadow, params, 0.1)
                    case "a state dict":
                        for mine, value in zip(shadow, source.values(), strict=True):
                            mine.lerp_(value, 0.1)
        return [param.detach().clone() for param in ema.module.parameters()] + shadow


@in_ranks(2)
@pytest.mark.parametrize("follow", ["AveragedModel", "a loop", "a batched function", "a state dict"])
def test_a_moving_average_is_that_of_plain_training(follow: str) -> None:
    for mine, wanted in zip(averaged("zero1", follow), averaged("ddp", follow), strict=True):
        assert torch.equal(mine, wanted)


@torch.no_grad()
def clamp(params: list[nn.Parameter]) -> None:
    for param in params:
        param.clamp_(-0.05, 0.05)


@torch.no_grad()
def average_halves(params: list[nn.Parameter]) -> None:
    torch._foreach_mul_(params, 0.5)


def replace_data(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data = param.data.sign() * 0.1


def write_through_data(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data.clamp_(-0.05, 0.05)


WRITES = {
    "clamp_": clamp,
    "a batched function": average_halves,
    "param.data =": replace_data,
    "param.data.clamp_": write_through_data,
}


@in_ranks(2)
@pytest.mark.parametrize(
    ("how", "dtype", "eager"),
    [*((how, torch.float32, False) for how in WRITES), ("clamp_", torch.float32, True), ("clamp_", torch.bfloat16, False)],
)
def test_a_write_between_steps_is_trained_on(how: str, dtype: torch.dtype, eager: bool) -> None:
    def run(strategy: str) -> Any:
        model = MLP.model().to(dtype)
        params = list(model.parameters())
        settings = {} if strategy == "ddp" else SMALL
        is_eager = eager and strategy != "ddp"
        with training(model, strategy, "SGD", reduction="ordered", eager=is_eager, **settings) as (ddp, opt):
            for number in range(5):
                opt.zero_grad()
                ddp(noise(5, 6, step=number).to(dtype)).float().square().sum().backward()
                opt.step()
                if strategy != "ddp" and number == 1:
                    slow_gathers(ddp)
                WRITES[how](params)
            return parameters(ddp)

    if dtype == torch.float32:
        require_equal(run("ddp"), run("zero1"))
    else:  # updated in fp32, unlike the plain optimizer: what was written is there all the same
        assert all(bool((value.float().abs() <= 0.051).all()) for value in run("zero1").values())


class Asked:
    """Counts how often a read of a parameter on its way had to wait."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.num = 0
        reads = gathers_of(ddp)._reads
        self._wait = reads._before_read()
        reads._before_read = weakref.WeakMethod(self.noted)
        reads._classes.clear()

    def noted(self) -> None:
        self.num += 1
        self._wait()


@in_ranks(2)
def test_a_step_that_reads_nothing_leaves_its_gathers_to_the_forward() -> None:
    with training(MLP.model(), "zero1", "SGD", **SMALL) as (ddp, opt):
        for number in range(2):
            step_of(ddp, opt, MLP, number)
        ddp.wait()
        asked = Asked(ddp)
        for number in range(2, 5):
            step_of(ddp, opt, MLP, number)
            opt.zero_grad()
            ddp.zero_grad()
            ddp.module.zero_grad()
            assert [param.requires_grad for param in ddp.module.parameters()] == [True] * 4
            assert all(param.is_floating_point() for param in ddp.module.parameters())
            assert len(gathers_of(ddp).in_flight) == len(ddp.plan.buckets)
        assert asked.num == 0
        next(ddp.module.parameters()).sum()
        assert asked.num == 1
        assert gathers_of(ddp).in_flight == {}


@in_ranks(2)
def test_a_gather_that_has_failed_fails_every_read() -> None:
    """What no peer will bring any more cannot be read in silence; after close() it can."""
    with training(MLP.model(), "zero1", "SGD", **SMALL) as (ddp, opt):
        for number in range(2):
            step_of(ddp, opt, MLP, number)
        params = list(ddp.module.parameters())
        gathers = gathers_of(ddp)
        handle = gathers.in_flight[next(iter(gathers.in_flight))]
        with mock.patch.object(handle, "wait", side_effect=RankLost("rank 1 is gone.", where="here", remedy="Start again.")):
            for _ in range(2):
                with pytest.raises(RankLost, match="rank 1 is gone"):
                    params[-1].sum()
                with pytest.raises(RankLost, match="rank 1 is gone"):
                    copy.deepcopy(ddp.module)
    assert all(type(param) is nn.Parameter for param in params)


def in_a_child() -> str:
    with training(MLP.model(), "zero1", "SGD", **SMALL) as (ddp, opt):
        for number in range(2):
            step_of(ddp, opt, MLP, number)
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                next(ddp.module.parameters()).sum()
                said = "nothing"
            except PhaseError as error:
                said = str(error)
            os.write(writer, said.encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as file:
            said = file.read()
        os.wait()
        return said


def test_a_child_process_cannot_read_what_only_its_parent_receives(two_ranks: Ranks) -> None:
    for said in two_ranks.run(in_a_child):
        assert said.startswith("a parameter is read in a child process, and was on its way when that was started.")


class Doubled(nn.Module):
    """Two parameters over one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight.data = self.first.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@in_ranks(2)
def test_two_parameters_over_one_memory_are_refused() -> None:
    with training(Doubled(), "zero1", "SGD") as (ddp, opt):
        ddp(noise(3, 4)).sum().backward()
        with pytest.raises(ConfigError) as raised:
            opt.step()
    assert str(raised.value).startswith("parameters 'first.weight' and 'second.weight' lie in the same memory")


@in_ranks(2)
def test_parameters_stay_in_memory_that_processes_share() -> None:
    """A model in shared memory, which another process evaluates."""
    for before in (True, False):
        with training(MLP.model(), "zero1", "SGD", **SMALL) as (ddp, opt):
            if before:
                ddp.module.share_memory()
            step_of(ddp, opt, MLP, 0)
            if not before:
                ddp.module.share_memory()
            pointers = [param.data_ptr() for param in ddp.module.parameters()]
            values = [param.detach().clone() for param in ddp.module.parameters()]
            for number in range(1, 3):
                step_of(ddp, opt, MLP, number)
            assert pointers == [param.data_ptr() for param in ddp.module.parameters()]
            for param, value in zip(ddp.module.parameters(), values, strict=True):
                assert not torch.equal(param, value)


@in_ranks(2)
def test_a_compiled_function_sees_what_was_stepped() -> None:
    """A compiled function that reads parameters sees what was stepped."""
    with training(MLP.model(), "zero1", "SGD", reduction="ordered", **SMALL) as (ddp, opt):
        params = list(ddp.module.parameters())
        total = torch.compile(lambda: sum(param.detach().sum() for param in params), backend="eager")
        total()
        step_of(ddp, opt, MLP, 0)
        slow_gathers(ddp)
        for number in range(1, 4):
            step_of(ddp, opt, MLP, number)
            found = total()
            ddp.wait()
            assert torch.equal(found, sum(param.detach().sum() for param in params))


def compiled_average() -> int:
    """Returns how often a moving average was compiled in five steps."""
    compiled: list[object] = []

    def backend(graph: Any, _inputs: object) -> Any:
        compiled.append(graph)
        return graph.forward

    with training(MLP.model(), "zero1", "SGD", **SMALL) as (ddp, opt):
        params = list(ddp.module.parameters())
        shadow = [param.detach().clone() for param in params]
        follow = torch.compile(torch.no_grad(lambda: torch._foreach_lerp_(shadow, params, 0.1)), backend=backend)
        for number in range(5):
            step_of(ddp, opt, MLP, number)
            follow()
    return len(compiled)


def test_a_compiled_function_that_reads_every_step_is_compiled_once(two_ranks: Ranks) -> None:
    assert two_ranks.run(compiled_average) == [1, 1]


@in_ranks(2)
def test_a_tensor_that_is_swapped_with_a_parameter_can_be_read() -> None:
    """What has got the memory and the class of a parameter on its way can be read, and waits."""
    with training(MLP.model(), "zero1", "SGD") as (ddp, opt):
        step_of(ddp, opt, MLP, 0)
        params = list(ddp.module.parameters())
        others = [nn.Parameter(torch.zeros_like(param)) for param in params]
        slow_gathers(ddp)
        step_of(ddp, opt, MLP, 1)
        for param, other in zip(params, others, strict=True):
            torch.utils.swap_tensors(param, other)
        found = [value.detach().clone() for value in others]
        ddp.wait()
        assert all(torch.equal(mine, other) for mine, other in zip(found, others, strict=True))
        assert all(type(param) is nn.Parameter for param in params + others)


@in_ranks(2)
def test_a_thread_that_read_before_the_next_step_leaves_that_to_its_own_readers() -> None:
    """A thread reads a parameter; before it goes on, the thread that trains has taken another step."""
    with training(MLP.model(), "zero1", "SGD", **SMALL) as (ddp, opt):
        for number in range(2):
            step_of(ddp, opt, MLP, number)
        params, gathers = list(ddp.module.parameters()), gathers_of(ddp)
        bucket, handle = next(iter(gathers.in_flight.items()))
        wait, has_come, goes_on = handle.wait, threading.Event(), threading.Event()

        def late() -> None:
            wait()
            if threading.current_thread() is reader:
                has_come.set()
                goes_on.wait()

        reader = threading.Thread(target=lambda: params[-1].sum())
        with mock.patch.object(handle, "wait", late):
            reader.start()
            has_come.wait()
            ddp.wait()
            slow_gathers(ddp)
            step_of(ddp, opt, MLP, 2)
            goes_on.set()
            reader.join()
        assert bucket in gathers.in_flight
        found = [param.detach().clone() for param in params]
        ddp.wait()
        assert all(torch.equal(mine, param) for mine, param in zip(found, params, strict=True))
