from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import undertow.sync as sync_module
from support.errors import text_of
from support.models import CASES, Branches, mlp, noise
from support.naive import wrapped
from support.ranks import Ranks
from undertow import BucketedDDPHooks, ConfigError, DistributedDataParallel, PlanMismatch, SyncConfig, attach
from undertow.plan import ParamSpec

WRAP = {"wrapper": DistributedDataParallel, "attach": attach}


def model_of_this_rank() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    model = CASES["convolutions"].make()
    model[2].weight.requires_grad_(False)
    for name, buffer in model.named_buffers():
        buffer.fill_(dist.get_rank() + len(name))
    return model


def state_after(way: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model = model_of_this_rank()
    before = copy.deepcopy(model.state_dict())
    WRAP[way](model).close()
    return before, model.state_dict()


@pytest.mark.parametrize("way", WRAP)
def test_parameters_and_buffers_of_rank_0_arrive_everywhere(ranks: Ranks, way: str) -> None:
    (wanted, _), *_ = answers = ranks.run(state_after, way)
    for _, state in answers:
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def differs_without_init_sync() -> bool:
    model = nn.Linear(1, 1)
    model.weight.data.fill_(dist.get_rank())
    DistributedDataParallel(model, init_sync=False).close()
    return model.weight.item() == dist.get_rank()


def test_init_sync_can_be_switched_off(ranks: Ranks) -> None:
    assert all(ranks.run(differs_without_init_sync))


class Odd(nn.Sequential):
    """`mlp()`, changed by the last rank."""

    def __init__(self, change: Callable[[nn.Sequential], None]) -> None:
        super().__init__(*mlp())
        self.append(nn.Linear(4, 2))
        if dist.get_rank() == dist.get_world_size() - 1:
            change(self)


def renamed(model: nn.Sequential) -> None:
    model.add_module("other", model.pop(3))


def of_another_shape(model: nn.Sequential) -> None:
    model[3] = nn.Linear(5, 2)


def of_another_dtype(model: nn.Sequential) -> None:
    model[3].double()


def of_another_layout(model: nn.Sequential) -> None:
    model[3].weight = nn.Parameter(torch.zeros(4, 2).t())


def one_missing(model: nn.Sequential) -> None:
    del model[3]


def one_more(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def frozen(model: nn.Sequential) -> None:
    model[2].weight.requires_grad_(False)


def frozen_of_another_shape(model: nn.Sequential) -> None:
    model.register_parameter("extra", nn.Parameter(torch.zeros(3), requires_grad=False))


def buffer_of_another_dtype(model: nn.Sequential) -> None:
    model.register_buffer("table", torch.zeros(3, dtype=torch.int64))


# What the last rank, {rank}, has changed; how many parameters it has; the first difference.
PARAMETERS = "ranks disagree on the parameters."
OTHERS = "ranks disagree on the frozen parameters or the buffers."
DIFFERENCES = [
    (renamed, PARAMETERS, 6, "parameter 4 is '3.weight' on rank 0 and 'other.weight' on rank {rank}"),
    (of_another_shape, PARAMETERS, 6, "shape of parameter 4 ('3.weight') is [2, 4] on rank 0 and [2, 5] on rank {rank}"),
    (of_another_dtype, PARAMETERS, 6, "dtype of parameter 4 ('3.weight') is float32 on rank 0 and float64 on rank {rank}"),
    (
        of_another_layout,
        PARAMETERS,
        6,
        "axes in memory of parameter 4 ('3.weight') is [0, 1] on rank 0 and [1, 0] on rank {rank}",
    ),
    (one_missing, PARAMETERS, 4, "parameter 4 is '3.weight' on rank 0 and missing on rank {rank}"),
    (one_more, PARAMETERS, 8, "parameter 6 is missing on rank 0 and '4.weight' on rank {rank}"),
    (frozen, PARAMETERS, 5, "parameter 2 is '2.weight' on rank 0 and '2.bias' on rank {rank}"),
    (frozen_of_another_shape, OTHERS, 6, "tensor 0 is missing on rank 0 and 'extra' on rank {rank}"),
    (buffer_of_another_dtype, OTHERS, 6, "tensor 0 is missing on rank 0 and 'table' on rank {rank}"),
]


def mismatch(change: Callable[[nn.Sequential], None], way: str) -> str:
    model = Odd(change)
    return text_of(PlanMismatch, lambda: WRAP[way](model))


@pytest.mark.parametrize("way", WRAP)
@pytest.mark.parametrize(("change", "what", "num_params", "difference"), DIFFERENCES)
def test_ranks_with_different_models_are_told_the_first_difference(
    ranks: Ranks, way: str, change: Callable[[nn.Sequential], None], what: str, num_params: int, difference: str
) -> None:
    texts = ranks.run(mismatch, change, way)
    assert texts == texts[:1] * ranks.num_ranks
    rank = ranks.num_ranks - 1
    lines = texts[0].splitlines()
    assert lines[0] == what
    assert lines[1].startswith("  rank 0: 6 parameters, fingerprint ")
    assert f"   rank {rank}: {num_params} parameters, fingerprint " in lines[1]
    assert lines[2:] == [
        f"  first difference: {difference.format(rank=rank)}",
        "  Build the model the same way on every rank before wrapping it.",
    ]


def settings_differ(name: str, values: tuple[Any, Any]) -> str:
    config = SyncConfig(**{name: values[dist.get_rank() > 0]})
    return text_of(PlanMismatch, lambda: attach(mlp(), config=config))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bucket_cap_mb", (None, 4.0)),
        ("overlap", (True, False)),
        ("order", ("observed", "reverse")),
        ("buffers", ("rank0", "off")),
    ],
)
def test_ranks_with_different_settings_are_told_the_first_difference(ranks: Ranks, name: str, values: tuple[Any, Any]) -> None:
    for text in ranks.run(settings_differ, name, values):
        first, _, *rest = text.splitlines()
        assert first == "ranks disagree on the settings."
        assert rest == [
            f"  first difference: {name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1",
            "  Give every rank the same settings and the same version of torch.",
        ]


ALREADY = (
    "this module is synchronised already.\n"
    "  parameter '0.weight' belongs to an earlier attach() or DistributedDataParallel\n"
    "  Wrap a module once; call close() on the earlier one to wrap it anew."
)


def wrapped_twice() -> dict[str, str]:
    texts = {}
    model = mlp()
    with wrapped(model) as ddp:
        texts["wrap, wrap"] = text_of(ConfigError, lambda: DistributedDataParallel(model))
        texts["wrap, attach"] = text_of(ConfigError, lambda: attach(model))
        texts["wrap of wrap"] = text_of(ConfigError, lambda: DistributedDataParallel(ddp))
        texts["part"] = text_of(ConfigError, lambda: attach(nn.Sequential(model[0])))
    sync = attach(model)  # what was closed can be wrapped anew
    texts["attach, attach"] = text_of(ConfigError, lambda: attach(model))
    sync.close()
    sync.close()
    return texts


def test_a_module_is_wrapped_once(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(wrapped_twice):
        assert texts.pop("wrap of wrap") == (
            "this module is wrapped already.\n"
            "  DistributedDataParallel(DistributedDataParallel(...))\n"
            "  Wrap the bare module once."
        )
        assert texts.pop("part") == ALREADY
        assert texts == {"wrap, wrap": ALREADY, "wrap, attach": ALREADY, "attach, attach": ALREADY}


def errors_of_arguments() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("outer", "dp"))
    other = Branches(1)
    with wrapped(other) as ddp:
        plan = ddp.plan.to_json()
    calls: dict[str, Callable[[], object]] = {
        "no group": lambda: attach(mlp(), process_group="world"),
        "group in second place": lambda: DistributedDataParallel(mlp(), dist.group.WORLD),
        "no module": lambda: DistributedDataParallel([1]),
        "devices": lambda: DistributedDataParallel(mlp(), [0, 1]),
        "twice": lambda: DistributedDataParallel(mlp(), bucket_cap_mb=1, config=SyncConfig()),
        "ignore": lambda: attach(mlp(), config=SyncConfig(ignore=("3.weight",))),
        "mesh": lambda: attach(mlp(), mesh=mesh),
        "mesh and group": lambda: attach(mlp(), mesh=mesh["dp"], process_group=dist.group.WORLD),
        "plan": lambda: attach(mlp(), config=SyncConfig(plan=plan)),
        "size": lambda: BucketedDDPHooks(mlp(), bucket_size_mb=float("nan")),
        "negative": lambda: DistributedDataParallel(mlp(), bucket_cap_mb=-1),
    }
    texts = {name: text_of(ConfigError, call) for name, call in calls.items()}
    for group in (mesh["outer"].get_group(), mesh["dp"].get_group()):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return texts


ARGUMENTS = {
    "no group": "process_group must be a torch.distributed.ProcessGroup, got str.\n"
    "  Pass what torch.distributed.new_group() returned; a rank outside of the group does not wrap.",
    "group in second place": "a process group stands where device_ids belongs.\n"
    "  DistributedDataParallel, second argument\n"
    "  Write DistributedDataParallel(module, process_group=group).",
    "no module": "module must be a torch.nn.Module, got list.\n  DistributedDataParallel, first argument\n  Pass the model itself.",
    "devices": "device_ids must name one device, got [0, 1].\n"
    "  DistributedDataParallel\n"
    "  Start one process per device, and move the module to its device before wrapping it.",
    "twice": "settings are given twice.\n"
    "  DistributedDataParallel(bucket_cap_mb=... or broadcast_buffers=..., config=...)\n"
    "  Put bucket_cap_mb and buffers into config=SyncConfig(...).",
    "ignore": "there is no parameter or buffer '3.weight' to ignore.\n"
    "  a module of 4 parameters: 0.weight, 0.bias, 2.weight, 2.bias\n"
    "  Use the names that module.named_parameters() gives.",
    "mesh": "a mesh with 2 dimensions is not supported yet.",
    "mesh and group": "give either process_group= or a mesh with one dimension.",
    "plan": "the saved plan is for another model.\n"
    "  it has 'layers.0.weight' (4, 4) float32 where the model has '0.weight' (8, 6) float32\n"
    "  Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out.",
    "size": "bucket_cap_mb must be a positive number of MiB, got nan.\n"
    "  Give a size above zero, or leave it out for a planned one.",
    "negative": "bucket_cap_mb must be a positive number of MiB, got -1.\n"
    "  Give a size above zero, or leave it out for a planned one.",
}


def test_arguments_that_cannot_work_are_refused(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(errors_of_arguments):
        for name in ("mesh", "mesh and group"):
            texts[name] = texts[name].splitlines()[0]
        assert texts == ARGUMENTS


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    assert text_of(ConfigError, lambda: attach(mlp())) == (
        "torch.distributed is not initialised.\n"
        "  no default process group exists in this process\n"
        '  Call torch.distributed.init_process_group("gloo") (or "nccl") first, and start the ranks with '
        "torchrun --nproc-per-node=2 script.py."
    )


def mesh_with_one_dimension() -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = mlp()
    sync = attach(model, mesh=mesh)
    model(noise(1, 6)).sum().backward()
    sync.close()
    grads = [torch.zeros(4) for _ in range(dist.get_world_size())]
    dist.all_gather(grads, model[2].bias.grad)
    return all(torch.equal(grads[0], other) for other in grads)


def test_a_mesh_with_one_dimension_names_the_ranks(ranks: Ranks) -> None:
    assert all(ranks.run(mesh_with_one_dimension))


def agree_on_numbered_devices() -> None:
    described = sync_module.spec_of

    def numbered(name: str, tensor: torch.Tensor) -> ParamSpec:
        return dataclasses.replace(described(name, tensor), device=f"cuda:{dist.get_rank()}")

    sync_module.spec_of = numbered
    try:
        attach(mlp()).close()
    finally:
        sync_module.spec_of = described


def test_ranks_may_have_devices_of_different_numbers(two_ranks: Ranks) -> None:
    two_ranks.run(agree_on_numbered_devices)
