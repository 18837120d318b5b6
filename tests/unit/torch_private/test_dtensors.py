"""The private parts of DTensors, meshes and FSDP2, on one rank."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from undertow.mesh.axes import MeshPlace, place_of
from undertow.mesh.local_tensors import (
    LocalParam,
    awaited_members,
    let_go_of_memory,
    local_params,
    local_tensor,
    part_like,
    placed_like,
)
from undertow.torch_private import dtensors, fsdp, private


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def parameter(mesh: DeviceMesh, values: Tensor) -> DTensor:
    return nn.Parameter(distribute_tensor(values, mesh["tp"], [Shard(0)]))  # type: ignore[return-value]


def test_a_dtensor_holds_the_very_tensor_that_it_is_made_of(mesh: DeviceMesh) -> None:
    param, part = parameter(mesh, torch.ones(4, 2)), torch.zeros(4, 2)
    made = dtensors.dtensor_of(part, dtensors.spec_for_gradient(param, part.dtype))
    assert dtensors.is_dtensor(made)
    assert not dtensors.is_dtensor(part)
    assert dtensors.local_of(made) is part
    param.grad = made
    assert dtensors.local_of(param.grad) is part
    assert (made.placements, made.device_mesh, made.stride()) == (param.placements, param.device_mesh, (2, 1))


def test_a_mesh_knows_the_one_that_it_is_a_part_of(mesh: DeviceMesh) -> None:
    assert dtensors.root_of(mesh["tp"]) == mesh
    assert dtensors.root_of(mesh) == mesh
    assert dtensors.flattened(mesh, ("dp", "tp")).ndim == 1


def test_a_module_under_fully_shard_is_known(mesh: DeviceMesh) -> None:
    assert not fsdp.is_managed(nn.Linear(1, 1))
    assert fsdp.is_managed(fully_shard(nn.Linear(1, 1), mesh=mesh["dp"]))


def test_the_average_across_replicas_is_taken_over_and_given_back(mesh: DeviceMesh) -> None:
    net, seen = fully_shard(nn.Linear(2, 2), mesh=mesh), list[int]()
    (group,) = fsdp.param_groups(net)
    assert fsdp.params_of(group) == list(net.parameters())
    assert (fsdp.is_sharded(group), fsdp.has_own_divisor(group), fsdp.all_reduces(group)) == (True, False, True)
    replicas = fsdp.replicas_of(group)
    assert replicas is mesh.get_group("dp")
    undo = fsdp.take_over(net, lambda values: seen.append(values.numel()), refuse=lambda factor: seen.append(int(factor)))
    net.set_gradient_divide_factor(2.0)
    assert (seen.pop(), fsdp.has_own_divisor(group)) == (2, False)
    net(torch.ones(1, 2)).sum().backward()
    assert (seen, fsdp.replicas_of(group), fsdp.shards_of(group)) == ([6], None, mesh.get_group("tp"))
    undo()
    net(torch.ones(1, 2)).sum().backward()
    assert (seen, fsdp.replicas_of(group)) == ([6], replicas)
    net.set_gradient_divide_factor(2.0)
    assert fsdp.has_own_divisor(group)


def test_a_module_of_replicate_has_no_shards(mesh: DeviceMesh) -> None:
    net = replicate(nn.Linear(2, 2), mesh=mesh["dp"])
    (group,) = fsdp.param_groups(net)
    assert fsdp.is_managed(net)
    assert not fsdp.is_sharded(group)


def test_a_local_parameter_has_its_part_of_the_gradient_in_both_directions(mesh: DeviceMesh) -> None:
    param, plain = parameter(mesh, torch.ones(4, 2)), nn.Parameter(torch.ones(1))
    local, same = local_params([param, plain])
    assert same is plain
    assert isinstance(local, LocalParam)
    assert (local.shape, local.data_ptr(), local.grad) == ((4, 2), param.to_local().data_ptr(), None)
    view = torch.zeros(4, 2)
    local.grad = view
    assert local.grad is view
    assert isinstance(param.grad, DTensor)
    param.sum().backward()
    assert torch.equal(view, torch.ones(4, 2))  # autograd adds in place, as to any gradient
    local.grad = None
    assert param.grad is None
    assert type(local + 1) is Tensor


def test_a_gradient_of_other_placements_is_refused_by_name(mesh: DeviceMesh) -> None:
    param = parameter(mesh, torch.ones(4, 2))
    (local,) = local_params([param])
    param.grad = distribute_tensor(torch.ones(4, 2), mesh["tp"], [Replicate()])
    with pytest.raises(ValueError, match=r"a gradient has the placements R, and its parameter has S\(0\)"):
        _ = local.grad


def test_a_local_parameter_lets_go_of_the_memory_and_keeps_its_layout(mesh: DeviceMesh) -> None:
    param = parameter(mesh, torch.ones(4, 2))
    (local,) = local_params([param])
    storages = [local_tensor(param).untyped_storage()]
    assert private.are_shared(private.addresses_of(storages))
    let_go_of_memory([local])
    gc.collect()  # torch's nodes may be in cycles, of earlier tests too
    assert not private.are_shared(private.addresses_of(storages))
    assert (local.shape, local.stride(), local.untyped_storage().nbytes()) == ((4, 2), (2, 1), 0)
    assert torch.equal(local_tensor(local), torch.ones(4, 2))
    set_before = local.grad
    local.grad = torch.zeros(4, 2)
    assert (set_before, param.grad.placements) == (None, param.placements)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "read",
    [
        lambda param: param.to_local(),
        lambda param: param.full_tensor(),
        lambda param: param.redistribute(placements=[Replicate()]),
    ],
)
def test_python_code_of_a_dtensor_that_reads_its_part_waits_first(mesh: DeviceMesh, read: Callable[[DTensor], object]) -> None:
    param, arrived = parameter(mesh, torch.ones(4, 2)), list[DTensor]()

    def arrive(tensor: DTensor) -> None:
        arrived.append(tensor)
        tensor.__class__ = DTensor

    param.__class__ = type(DTensor)("Awaited", (DTensor,), awaited_members(DTensor, arrive))
    assert local_tensor(param).shape == (4, 2)  # the library's own look does not wait
    assert not arrived
    read(param)
    assert len(arrived) == 1
    assert arrived[0] is param
    assert awaited_members(nn.Parameter, arrive) == {}


def test_a_value_becomes_a_dtensor_like_its_parameter_and_a_part_again(mesh: DeviceMesh) -> None:
    param, part = parameter(mesh, torch.ones(4, 2)), torch.zeros(4, 2)
    made = placed_like(param, part)
    assert isinstance(made, DTensor)
    assert (made.placements, part_like(param, made) is part) == (param.placements, True)
    step = torch.tensor(3.0)
    assert placed_like(param, step) is step
    with pytest.raises(ValueError, match=r"a state has the placements R on mesh axis 'tp', and its parameter has S\(0\)"):
        part_like(param, distribute_tensor(torch.ones(4, 2), mesh["tp"], [Replicate()]))


def test_places_are_told_by_the_axes_over_which_parameters_are_cut(mesh: DeviceMesh) -> None:
    whole = nn.Parameter(distribute_tensor(torch.ones(3), mesh["tp"], [Replicate()]))
    assert place_of([nn.Parameter(torch.ones(1)), whole]) == MeshPlace()
    assert place_of([whole, parameter(mesh, torch.ones(4, 2))]) == MeshPlace((("tp", 1),), 0)


def test_a_message_of_fully_shard_has_its_parameters_one_after_another(mesh: DeviceMesh) -> None:
    net = fully_shard(nn.Linear(2, 3), mesh=mesh["dp"])
    (group,) = fsdp.param_groups(net)
    assert (fsdp.numels_of(group), fsdp.is_offloaded(group)) == ([6, 3], False)
    net = fully_shard(nn.Linear(2, 3), mesh=mesh["dp"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert fsdp.is_offloaded(fsdp.param_groups(net)[0])
