"""Arguments of the constructors that cannot work: each with its whole text, and those of torch's that become settings."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from support.errors import text_of
from support.models import Branches, mlp
from support.naive import wrapped
from support.ranks import in_ranks
from support.sharded import destroy
from undertow import BucketedDDPHooks, ConfigError, DistributedDataParallel, SyncConfig, WrongType, attach


def with_last(change: Callable[[nn.Module], object]) -> nn.Module:
    model = mlp()
    change(model[2])
    return model


ONLY_ON_DEVICES = (
    "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules, but got "
    "device_ids {}, output_device {}, and module parameters {}.\n"
    "  DistributedDataParallel(...)\n"
    "  Leave both out on CPU and for modules on several devices."
)
BOTH_OR_NONE = (
    "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.\n"
    "  DistributedDataParallel(...)\n"
    "  Leave both out: Undertow sends every bucket as soon as it can."
)
ONE_MESH = (
    "Only 1D device mesh is supported, but got MESH.\n"
    "  the ranks over which gradients are averaged, with strategy=None\n"
    '  Give one dimension of it, such as mesh["dp"], or set strategy="hybrid", under which the first of two dimensions '
    "replicates and the second shards."
)
MESH_OR_GROUP = (
    "Cannot specify both process_group and device_mesh arguments.\n"
    "  the ranks over which gradients are averaged\n"
    '  Give process_group=, or one dimension of a mesh, such as mesh["dp"].'
)
SIZE = (
    "bucket_cap_mb must be a positive number of MiB, got {}.\n"
    "  SyncConfig\n"
    "  Give a size above zero, or leave it out for a planned one."
)
BATCH_NORM = (
    "SyncBatchNorm layers only work with GPU modules.\n"
    "  {}(...)\n"
    "  Keep the BatchNorm layers on CPU: their running statistics follow rank 0."
)
SHARDED = (
    "parameter 'weight' is sharded already, by torch's fully_shard or by tensor parallelism.\n"
    "  {}(...)\n"
    "  Leave fully_shard out, or use it alone; with tensor parallelism it goes on the data-parallel dimension."
)
ARGUMENTS = {
    "no group": "process_group must be a torch.distributed.ProcessGroup, got str.\n"
    "  the group over which gradients are averaged\n"
    "  Pass what torch.distributed.new_group() returned; a rank outside of the group does not wrap.",
    "group in second place": "a process group stands where device_ids belongs.\n"
    "  DistributedDataParallel, second argument\n"
    "  Write DistributedDataParallel(module, process_group=group).",
    "no module": "module must be a torch.nn.Module, got list.\n"
    "  DistributedDataParallel, first argument\n"
    "  Pass the model itself.",
    "torch's wrapper": "this module is wrapped already, by torch's own DistributedDataParallel.\n"
    "  DistributedDataParallel(torch.nn.parallel.DistributedDataParallel(...))\n"
    "  Give the bare module.",
    "two device types": "DistributedDataParallel's input module must be on the same type of devices, but input module "
    "parameters locate in ['cpu', 'meta'].\n"
    "  DistributedDataParallel(...)\n"
    "  Move the whole module with module.to(device) before.",
    "sync batch norm": BATCH_NORM.format("DistributedDataParallel"),
    "sync batch norm, attached": BATCH_NORM.format("attach"),
    "no shape": "Modules with uninitialized parameters can't be used with `DistributedDataParallel`.\n"
    "  parameter '2.weight' has no shape yet\n"
    "  Run a dummy forward pass to correctly initialize the modules.",
    "sharded": SHARDED.format("DistributedDataParallel"),
    "sharded, attached": SHARDED.format("attach"),
    "no settings": "config must be a SyncConfig, got dict.\n"
    "  the settings of a wrapper or of attach\n"
    "  Write config=SyncConfig(**settings) for a dict of settings.",
    "no settings, attached": "config must be a SyncConfig, got str.\n"
    "  the settings of a wrapper or of attach\n"
    "  Write config=SyncConfig(...).",
    "devices": "device_ids can only be None or contain a single element, got [0, 1].\n"
    "  DistributedDataParallel(...)\n"
    "  Start one process per device, and move the module to its device before wrapping it.",
    "device on CPU": ONLY_ON_DEVICES.format("[device(type='cpu')]", "None", "['cpu']"),
    "output device on CPU": ONLY_ON_DEVICES.format("None", "1", "['cpu']"),
    "devices without parameters": ONLY_ON_DEVICES.format("[0]", "0", "[]"),
    "nothing hooked": BOTH_OR_NONE,
    "nothing delayed": BOTH_OR_NONE,
    "another's delayed": "delay_all_reduce_named_params: '0.weight' is no parameter of the module.\n"
    "  DistributedDataParallel(...)\n"
    "  Give what module.named_parameters() gives, or leave the argument out.",
    "mixed precision": "mixed_precision has no dtypes: 'half'.\n"
    "  DistributedDataParallel(...)\n"
    "  Pass torch's _MixedPrecision(param_dtype=torch.bfloat16), or use torch.autocast around the forward.",
    "twice": "settings are given twice: bucket_cap_mb, buffers by arguments of torch's, and config.\n"
    "  DistributedDataParallel(...)\n"
    "  Put bucket_cap_mb, buffers into config=SyncConfig(...).",
    "twice, in a list": "settings are given twice: bucket_cap_mb by arguments of torch's, and config.\n"
    "  DistributedDataParallel(...)\n"
    "  Put bucket_cap_mb into config=SyncConfig(...).",
    "ignore": "there is no '3.weight' to ignore.\n  ignore, for a model of type Sequential\n  Did you mean '2.weight'?",
    "mesh": ONE_MESH,
    "mesh and group": MESH_OR_GROUP,
    "device mesh": ONE_MESH,
    "device mesh and group": MESH_OR_GROUP,
    "plan": "the saved plan is for another model.\n"
    "  it has 'layers.0.weight' (4, 4) float32 where the model has '0.weight' (8, 6) float32\n"
    "  Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out.",
    "size": SIZE.format("nan"),
    "negative": SIZE.format("-1"),
    "no size in a list": SIZE.format("-2"),
}


@pytest.mark.slow
@in_ranks(2)
def test_arguments_that_cannot_work_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("outer", "dp"))
    with wrapped(Branches(1)) as ddp:
        plan = ddp.plan.to_json()
    sharded = nn.Linear(2, 2, bias=False)
    sharded.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh["dp"], [Shard(0)]))
    with_batch_norm, model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), mlp()
    name, weight = next(iter(model.named_parameters()))
    calls: dict[str, Callable[[], object]] = {
        "no group": lambda: attach(mlp(), process_group="world"),
        "group in second place": lambda: DistributedDataParallel(mlp(), dist.group.WORLD),
        "no module": lambda: DistributedDataParallel([1]),
        "torch's wrapper": lambda: DistributedDataParallel(nn.parallel.DistributedDataParallel(mlp())),
        "two device types": lambda: DistributedDataParallel(with_last(lambda layer: layer.to("meta"))),
        "sync batch norm": lambda: DistributedDataParallel(with_batch_norm),
        "sync batch norm, attached": lambda: attach(with_batch_norm),
        "no shape": lambda: DistributedDataParallel(
            with_last(lambda layer: setattr(layer, "weight", nn.parameter.UninitializedParameter()))
        ),
        "sharded": lambda: DistributedDataParallel(sharded),
        "sharded, attached": lambda: attach(sharded),
        "no settings": lambda: DistributedDataParallel(mlp(), config={"strategy": "zero1"}),
        "no settings, attached": lambda: attach(mlp(), config="zero1"),
        "devices": lambda: DistributedDataParallel(mlp(), [0, 1]),
        "device on CPU": lambda: DistributedDataParallel(mlp(), [torch.device("cpu")]),
        "output device on CPU": lambda: DistributedDataParallel(mlp(), output_device=1),
        "devices without parameters": lambda: DistributedDataParallel(nn.Flatten(), [0], 0),
        "nothing hooked": lambda: DistributedDataParallel(model, delay_all_reduce_named_params=[(name, weight)]),
        "nothing delayed": lambda: DistributedDataParallel(model, param_to_hook_all_reduce=weight),
        "another's delayed": lambda: DistributedDataParallel(
            mlp(), delay_all_reduce_named_params=[(name, weight)], param_to_hook_all_reduce=weight
        ),
        "mixed precision": lambda: DistributedDataParallel(mlp(), mixed_precision="half"),
        "twice": lambda: DistributedDataParallel(mlp(), bucket_cap_mb=1, forward_sync_buffers=False, config=SyncConfig()),
        "twice, in a list": lambda: DistributedDataParallel(mlp(), bucket_cap_mb_list=[1], config=SyncConfig()),
        "ignore": lambda: attach(mlp(), config=SyncConfig(ignore=("3.weight",))),
        "mesh": lambda: attach(mlp(), mesh=mesh),
        "mesh and group": lambda: attach(mlp(), mesh=mesh["dp"], process_group=dist.group.WORLD),
        "device mesh": lambda: DistributedDataParallel(mlp(), device_mesh=mesh),
        "device mesh and group": lambda: DistributedDataParallel(mlp(), device_mesh=mesh["dp"], process_group=dist.group.WORLD),
        "plan": lambda: attach(mlp(), config=SyncConfig(plan=plan)),
        "size": lambda: BucketedDDPHooks(mlp(), bucket_size_mb=float("nan")),
        "negative": lambda: DistributedDataParallel(mlp(), bucket_cap_mb=-1),
        "no size in a list": lambda: DistributedDataParallel(mlp(), bucket_cap_mb_list=[1, -2]),
    }
    for case, call in calls.items():
        text = text_of(WrongType if case in ("no group", "no module") else ConfigError, call)
        assert text.replace(str(mesh), "MESH") == ARGUMENTS[case], case
    assert calls.keys() == ARGUMENTS.keys()
    destroy(mesh)


TORCHS_IGNORED = "ignored by torch's name"


@in_ranks(2)
@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({}, {}),
        ({"bucket_cap_mb": 3, "forward_sync_buffers": False}, {"bucket_cap_mb": 3, "buffers": "off"}),
        ({"bucket_cap_mb": 3, "bucket_cap_mb_list": [1, 2]}, {"bucket_cap_mb": (1, 2)}),
        ({"bucket_cap_mb": 3, "bucket_cap_mb_list": []}, {"bucket_cap_mb": 3}),
        ({"forward_sync_buffers": True}, {}),
        ({"ignore": ["2.weight", "0.bias"]}, {"ignore": ("0.bias", "2.weight")}),
        ({TORCHS_IGNORED: ["2.bias"], "ignore": ["0.bias"]}, {"ignore": ("0.bias", "2.bias")}),
        (
            {"config": SyncConfig(overlap=False, ignore=("2.bias",)), "ignore": ["0"]},
            {"overlap": False, "ignore": ("0.bias", "0.weight", "2.bias")},
        ),
    ],
    ids=str,
)
def test_torchs_arguments_become_settings(arguments: dict[str, Any], settings: dict[str, Any]) -> None:
    model = mlp()
    if TORCHS_IGNORED in arguments:
        model._ddp_params_and_buffers_to_ignore = arguments.pop(TORCHS_IGNORED)
    ddp = DistributedDataParallel(model, **arguments)
    assert (ddp.sync.config, ddp.parameters_to_ignore) == (SyncConfig(**settings), set(ddp.sync.config.ignore))
    ddp.close()
