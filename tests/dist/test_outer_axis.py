"""FSDP2 on 2 x 2 ranks, and with tensor parallelism on 2 x 2 x 2, with the average across replicas by Undertow."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support.errors import text_of
from support.inside import as_on_a_device, bytes_given_to_gloo
from support.levels import some
from support.ranks import in_ranks
from support.sharded import kept_mesh
from support.tensor_parallel import parts, require_same_parts
from undertow import ConfigError, Desync, Outer, PlanMismatch, ReplicaMismatch, UndertowError, attach, outer_axis

WIDTH = 256
NAMES = ("dp_replicate", "dp_shard")
ON_A_MESH = in_ranks(4, pool="mesh", timeout_s=240.0)


class Net(nn.Module):
    """A part of it is used only if it `is_deep`; weights are large beside the scales of blocks of a format."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.is_deep, self.is_turned = True, False

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.second, self.first) if self.is_turned else (self.first, self.second)
        x = first(x).relu()
        return self.last(second(x).relu() if self.is_deep else x)


def sharded(mesh: DeviceMesh, *, seed: int = 0, cut_over: DeviceMesh | None = None, has_unused: bool = False) -> Net:
    """Sharded over `mesh`, after tensor parallelism has cut it over another one; as one module if a parameter is unused."""
    torch.manual_seed(seed)
    net = Net()
    if has_unused:
        net.register_parameter("unused", nn.Parameter(torch.ones(4)))
    if cut_over is not None:
        parallelize_module(net, cut_over, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    for part in (net,) if has_unused else (net.first, net.second, net):
        fully_shard(part, mesh=mesh)
    return net


def batch(step: int, *, place: int | None = None) -> Tensor:
    """The batch of a place in the data, by default this rank's."""
    place = dist.get_rank() if place is None else place
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + place))


def meshes() -> contextlib.AbstractContextManager[DeviceMesh]:
    return contextlib.nullcontext(kept_mesh(2, 2, names=NAMES))


def train(net: Any, steps: Sequence[int], *, num_micro_batches: int = 1, holds: str = "", data_place: int | None = None) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in steps:
        for place in range(num_micro_batches):
            if holds:
                getattr(net, holds)(place == num_micro_batches - 1)
            net(batch(num_micro_batches * step + place, place=data_place)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("way", some(["one dimension", "two dimensions"], most=1))
@ON_A_MESH
def test_full_width_has_the_bits_of_torchs_own_average(way: str) -> None:
    with meshes() as mesh:
        is_flat = way == "one dimension"
        ours = sharded(mesh["dp_shard"] if is_flat else mesh[NAMES])
        axis = outer_axis(ours, device_mesh=mesh["dp_replicate"] if is_flat else None)
        reference = sharded(mesh[NAMES])
        for holds in ("", "set_requires_gradient_sync", *(() if is_flat else ("set_requires_all_reduce",))):
            for net in (ours, reference):
                train(net, range(3), num_micro_batches=3 if holds else 1, holds=holds)
            for (name, param, _), (_, wanted, _) in zip(parts(ours), parts(reference), strict=True):
                assert torch.equal(param, wanted), f"{name} differs after {holds or 'plain steps'}"
        assert axis.num_reductions > 0
        axis.close()


@ON_A_MESH
def test_a_window_that_is_cut_short_leaves_its_sum_to_the_next_one_as_torchs_own_average_does() -> None:
    """No gradient comes of it, so that an optimizer with decay and momentum leaves the parameters as they are."""
    with meshes() as mesh:
        ours, reference = sharded(mesh[NAMES]), sharded(mesh[NAMES])
        axis = outer_axis(ours)
        for net in (ours, reference):
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            for step, is_whole in enumerate((True, False, True)):
                for place in range(2):
                    net.set_requires_all_reduce(is_whole and place == 1)
                    net(batch(2 * step + place)).square().mean().backward()
                assert (net.last.weight.grad is not None) == is_whole
                optimizer.step()
                optimizer.zero_grad()
        require_same_parts(ours, reference)
        axis.close()


@pytest.mark.deep
@ON_A_MESH
def test_int8_sends_a_quarter_of_the_bytes_and_replicas_stay_alike() -> None:
    with meshes() as mesh:
        sent, nets = {}, {}
        for wire in (None, "int8"):
            net = nets[wire] = sharded(mesh[NAMES])
            axis = outer_axis(net, wire=wire)
            with bytes_given_to_gloo() as counted:
                train(net, range(4))
            assert axis.num_bytes == sum(counted.values())
            sent[wire] = axis.num_bytes
            assert ("int8" if wire else "full width") in repr(axis)
            axis.close()
        # A quarter, one scale of 4 bytes for each 512 values, the rest of a module below a block, and trailers.
        assert sent["int8"] <= 0.27 * sent[None]
        for (name, param, _), (_, wanted, _) in zip(parts(nets["int8"]), parts(nets[None]), strict=True):
            first = param.clone()
            dist.broadcast(first, group=mesh.get_group("dp_replicate"), group_src=0)
            assert torch.equal(first, param), f"{name} differs between replicas"
            # Four steps of AdamW, each of at most lr = 0.01 in either direction.
            assert (param - wanted).abs().max() <= 2 * 4 * 0.0101, name


@pytest.mark.slow
@in_ranks(8, is_fresh=True, timeout_s=240.0)
def test_shards_may_be_cut_by_tensor_parallelism() -> None:
    mesh = kept_mesh(2, 2, 2, names=(*NAMES, "tp"))
    reference = sharded(mesh[NAMES], cut_over=mesh["tp"])
    place = dist.get_rank() // 2  # both ranks of "tp" have one batch
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # torch's, of every such model
        train(reference, range(4), data_place=place)
        for wire in (None, "int8"):
            net = sharded(mesh[NAMES], cut_over=mesh["tp"])
            axis = outer_axis(net, wire=wire)
            train(net, range(4), data_place=place)
            axis.close()
            for (name, param, _), (_, wanted, _) in zip(parts(net), parts(reference), strict=True):
                assert torch.equal(param, wanted) == (wire is None), name
                first = param.clone()
                dist.broadcast(first, group=mesh.get_group("dp_replicate"), group_src=0)
                assert torch.equal(first, param), f"{name} differs between replicas"
            require_alike_at_places(net, mesh)


def require_alike_at_places(net: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters that tensor parallelism has not cut have the same shards at all of its places."""
    shards = {name: param for name, param, _ in parts(net)}
    for name in ("second.bias", "last.weight", "last.bias"):
        first = shards[name].clone()
        dist.broadcast(first, group=mesh.get_group("tp"), group_src=0)
        assert torch.equal(first, shards[name]), f"{name} differs between places"


@pytest.mark.deep
@pytest.mark.parametrize("has_unused", [False, True], ids=["", "an unused parameter"])
@ON_A_MESH
def test_parameters_that_tensor_parallelism_has_not_cut_stay_alike_in_int8(has_unused: bool) -> None:
    mesh = kept_mesh(2, 1, 2, names=(*NAMES, "tp"))
    net = sharded(mesh[NAMES], cut_over=mesh["tp"], has_unused=has_unused)
    with torch.no_grad():
        for weight in (net.first.weight, net.last.weight):
            weight.mul_(100)  # so gradients of `second.weight` are large next to those of whole parameters, which follow
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # torch's, of every such model
        axis = outer_axis(net, wire="int8")
        train(net, range(4), data_place=mesh.get_local_rank("dp_replicate"))
        axis.close()
    require_alike_at_places(net, mesh)


def alone(steps: int, mesh: DeviceMesh, every: int) -> Net:
    """Replicas of FSDP that train alone; every few steps each shard becomes the mean over replicas, by hand."""
    net = sharded(mesh["dp_shard"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    given = [param.clone() for _, param, _ in parts(net)]
    for step in range(steps):
        net(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % every == 0:
            for begun, (_, param, _) in zip(given, parts(net), strict=True):
                difference = begun - param
                dist.all_reduce(difference, group=mesh.get_group("dp_replicate"))
                param.copy_(begun.sub_(difference.div_(2)))
    return net


AVERAGE: dict[str, Any] = {"lr": 1.0, "momentum": 0.0, "fragments": 1, "delay": 0, "wire": None}


@pytest.mark.deep
@pytest.mark.parametrize("way", some(["two dimensions", "one dimension"], most=1))
@ON_A_MESH
def test_replicas_that_train_alone_exchange_their_shards_every_few_steps(way: str) -> None:
    with meshes() as mesh:
        is_flat = way == "one dimension"
        net = sharded(mesh["dp_shard"] if is_flat else mesh[NAMES])
        axis = outer_axis(net, outer=Outer(every=3, **AVERAGE), device_mesh=mesh["dp_replicate"] if is_flat else None)
        assert axis.outer is not None
        optimizer, sent = torch.optim.AdamW(net.parameters(), lr=1e-2), []
        for step in range(6):
            with bytes_given_to_gloo() as counted:
                net(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            sent.append(sum(counted.values()) > 0)
            with torch.no_grad():
                net(batch(step))  # an evaluation leaves the root's parameters whole
        assert sent == [False, False, True] * 2
        assert "2 replicas, <OuterSync every 3 steps" in repr(axis)
        reference = alone(6, mesh, every=3)
        net.reshard()
        for (name, param, _), (_, wanted, _) in zip(parts(net), parts(reference), strict=True):
            assert torch.equal(param, wanted), f"{name} differs"
        state = axis.outer.state_dict()
        assert isinstance(state["global"]["first.weight"], DTensor)
        axis.outer.load_state_dict(state)
        axis.close()


@pytest.mark.deep
@ON_A_MESH
def test_fragments_in_int8_leave_equal_shards_on_all_replicas_and_a_state_resumes() -> None:
    with meshes() as mesh:
        net = sharded(mesh[NAMES])
        axis = outer_axis(net, outer=Outer(every=4, fragments=2, delay=1))
        assert axis.outer is not None
        train(net, range(9))
        state = axis.outer.state_dict()
        with axis.outer.synchronized():
            for name, param, _ in parts(net):
                first = param.clone()
                dist.broadcast(first, group=mesh.get_group("dp_replicate"), group_src=0)
                assert torch.equal(first, param), f"{name} differs between replicas"
                assert torch.equal(param, state["global"][name].to_local()), name
        axis.close()
        resumed = sharded(mesh[NAMES])
        again = outer_axis(resumed, outer=Outer(every=4, fragments=2, delay=1))
        assert again.outer is not None
        resumed.load_state_dict(net.state_dict())
        again.outer.load_state_dict(state)
        found = again.outer.state_dict()
        for name, value in found["global"].items():
            assert torch.equal(value.to_local(), state["global"][name].to_local()), name
        again.close()


@pytest.mark.deep
@pytest.mark.parametrize("way", some(["dcp.load", "copy_"], most=1))
@ON_A_MESH
def test_training_begins_with_shards_that_were_written_in_place(way: str, tmp_path: Path) -> None:
    with meshes() as mesh:
        wanted, net = sharded(mesh[NAMES], seed=1), sharded(mesh[NAMES])
        dcp.save(wanted.state_dict(), checkpoint_id=tmp_path)
        axes = [outer_axis(each, outer=Outer(every=2, fragments=2, delay=1)) for each in (wanted, net)]
        if way == "dcp.load":
            dcp.load(net.state_dict(), checkpoint_id=tmp_path)
        else:
            with torch.no_grad():
                for param, value in zip(net.parameters(), wanted.parameters(), strict=True):
                    param.copy_(value)
        for each in (wanted, net):
            train(each, range(5))
        require_same_parts(net, wanted)
        for axis in axes:
            axis.close()


class Two(nn.Module):
    """The gradient of `small` is a thousandth of the gradient of `large`, which is before it in each message."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Parameter(torch.ones(100, 11)), nn.Parameter(torch.ones(100, 11))

    def forward(self) -> Tensor:
        return 1000 * self.large.sum() + self.small.sum()


@ON_A_MESH
def test_no_block_of_a_format_has_values_of_two_parameters() -> None:
    with meshes() as mesh:
        net = fully_shard(Two(), mesh=mesh[NAMES])  # 550 elements of each on a rank: more than a block
        axis = outer_axis(net, wire="int8")
        net().backward()
        assert isinstance(net.small.grad, DTensor)
        # 1.0 is the largest value of each block, rounded twice to at most 1 / 127 of it; beside 1000 it would be 0 or 8.
        torch.testing.assert_close(net.small.grad.to_local(), torch.ones(50, 11), rtol=2 / 127, atol=0.0)
        axis.close()


@pytest.mark.deep
@ON_A_MESH
def test_after_close_the_average_is_torchs_again() -> None:
    with meshes() as mesh:
        ours, reference = sharded(mesh[NAMES]), sharded(mesh[NAMES])
        outer_axis(ours).close()
        for net in (ours, reference):
            train(net, range(2))
        require_same_parts(ours, reference)


@ON_A_MESH
def test_replicas_that_use_other_modules_are_an_error_on_all_of_them() -> None:
    with meshes() as mesh:
        net = sharded(mesh[NAMES])
        axis = outer_axis(net, wire="int8")
        net.is_deep = mesh.get_local_rank("dp_replicate") == 0
        text = text_of(Desync, lambda: net(batch(0)).sum().backward())
        assert text.startswith("replicas reduce gradients of different modules")
        assert "'second'" in text, text
        assert "'the root'" in text, text
        axis.close()


@pytest.mark.deep
@ON_A_MESH
def test_on_a_device_replicas_that_use_modules_in_another_order_are_told_when_the_host_knows() -> None:
    with meshes() as mesh:
        net, is_known = sharded(mesh[NAMES]), False
        axis = outer_axis(net)
        with as_on_a_device(axis, lambda: is_known):
            net.is_turned = mesh.get_local_rank("dp_replicate") == 1
            net(batch(0)).sum().backward()  # modules of one size are mixed up
            net.is_turned, is_known = False, True
            text = text_of(Desync, lambda: net(batch(1)).sum().backward())
        assert text.startswith("replicas reduce gradients of different modules")
        assert "'first'" in text, text
        assert "'second'" in text, text
        axis.close()


@pytest.mark.deep
@ON_A_MESH
def test_on_a_device_replicas_that_use_the_same_modules_are_sound() -> None:
    with meshes() as mesh:
        ours, reference = sharded(mesh[NAMES]), sharded(mesh[NAMES])
        axis = outer_axis(ours)
        with as_on_a_device(axis, lambda: True):
            for net in (ours, reference):
                train(net, range(3))
        require_same_parts(ours, reference)
        axis.close()


def other_width(mesh: DeviceMesh) -> Callable[[], object]:
    torch.manual_seed(0)
    net = fully_shard(nn.Linear(4, 4 + 2 * mesh.get_local_rank("dp_replicate")), mesh=mesh["dp_shard"])
    return lambda: outer_axis(net, device_mesh=mesh["dp_replicate"])


def other_values(mesh: DeviceMesh) -> Callable[[], object]:
    net = sharded(mesh[NAMES], seed=mesh.get_local_rank("dp_replicate"))
    return lambda: outer_axis(net)


def divided(mesh: DeviceMesh) -> Callable[[], object]:
    net = sharded(mesh[NAMES])
    net.last.bias.data.zero_()
    assert isinstance(net, FSDPModule)
    net.set_gradient_divide_factor(3.0)
    return lambda: outer_axis(net)


def divided_later(mesh: DeviceMesh) -> Callable[[], object]:
    net = sharded(mesh[NAMES])
    outer_axis(net)
    assert isinstance(net, FSDPModule)
    return partial(net.set_gradient_divide_factor, 3.0)


def offloaded(mesh: DeviceMesh) -> Callable[[], object]:
    net = fully_shard(nn.Linear(4, 4), mesh=mesh[NAMES], offload_policy=CPUOffloadPolicy(pin_memory=False))
    return lambda: outer_axis(net)


def on_meta(mesh: DeviceMesh) -> Callable[[], object]:
    net = fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh[NAMES])
    return lambda: outer_axis(net)


REFUSED: dict[str, tuple[Callable[[DeviceMesh], Callable[[], object]], type[UndertowError], str]] = {
    "divided later": (divided_later, ConfigError, "module 'the root' has its own divisor"),
    "offloaded": (offloaded, ConfigError, "the model keeps its parameters in host memory"),
    "meta": (on_meta, ConfigError, "the model has parameters on the meta device"),
    "plain": (
        lambda _: lambda: outer_axis(nn.Linear(1, 1)),
        ConfigError,
        "Linear has no module that torch's fully_shard manages.",
    ),
    "no replicas": (
        lambda mesh: lambda: outer_axis(sharded(mesh["dp_shard"])),
        ConfigError,
        "the dimension across replicas is not given.",
    ),
    "twice": (
        lambda mesh: lambda: outer_axis(sharded(mesh[NAMES]), device_mesh=mesh["dp_replicate"]),
        ConfigError,
        "the dimension across replicas is given twice",
    ),
    "shards": (
        lambda mesh: lambda: outer_axis(sharded(mesh["dp_shard"]), device_mesh=mesh["dp_shard"]),
        ConfigError,
        "have shards of one replica: this dimension is not across replicas.",
    ),
    "format": (lambda mesh: lambda: outer_axis(sharded(mesh[NAMES]), wire="int4"), ConfigError, "int4"),
    "auto": (lambda mesh: lambda: outer_axis(sharded(mesh[NAMES]), wire="auto"), ConfigError, 'wire="auto" is not supported'),
    "float16": (
        lambda mesh: lambda: outer_axis(sharded(mesh[NAMES]), wire="float16"),
        ConfigError,
        'wire="float16" is not supported: it loses small values, and nothing counts them here.',
    ),
    "divisor": (divided, ConfigError, "has its own divisor"),
    "wire and outer": (
        lambda mesh: lambda: outer_axis(sharded(mesh[NAMES]), wire="int8", outer=Outer(every=2)),
        ConfigError,
        "wire and outer are both given",
    ),
    "attach": (lambda mesh: lambda: attach(sharded(mesh[NAMES])), ConfigError, "call undertow.outer_axis(model)"),
    "width": (other_width, PlanMismatch, "is [2, 4] on rank 0 and [3, 4] on rank 2"),
    "values": (other_values, ReplicaMismatch, "parameter 'last.weight' has other values on rank "),
}


@pytest.mark.parametrize("what", some(REFUSED, most=4))
@ON_A_MESH
def test_each_mistake_is_an_error_that_says_what_to_do(what: str) -> None:
    make, error, text = REFUSED[what]
    with meshes() as mesh:
        assert text in text_of(error, make(mesh))
