from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from support.errors import text_of
from support.models import CASES, Branches, mlp, noise
from support.naive import gradients, naive_mean, require_same, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import Ranks, in_ranks
from undertow import BucketedDDPHooks, ConfigError, DistributedDataParallel, PlanMismatch, SyncConfig, WrongType, attach
from undertow.plan import ParamSpec
from undertow.runtime import members

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


# Arguments, the warning that they cause, whose parameters and buffers are there afterwards (-1: each rank's own), and
# whether buffers follow rank 0 in training.
DEPRECATED = "`broadcast_buffers` is deprecated"
STILL_EQUAL = " Unlike `broadcast_buffers=False`, `forward_sync_buffers=False` still makes buffers equal at the start."
RENAMED = f"{DEPRECATED}. Use `forward_sync_buffers` instead.{STILL_EQUAL}"
IGNORED = f"{DEPRECATED} and ignored when `forward_sync_buffers` is provided.{STILL_EQUAL}"
NO_CHECK = "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Please avoid using it."
STARTS: list[tuple[dict[str, bool], list[str], int, int, bool]] = [
    ({}, [], 0, 0, True),
    ({"init_sync": False}, [], -1, -1, True),
    ({"forward_sync_buffers": True}, [], 0, 0, True),
    ({"forward_sync_buffers": False}, [], 0, 0, False),
    ({"broadcast_buffers": True}, [RENAMED], 0, 0, True),
    ({"broadcast_buffers": False}, [RENAMED], 0, -1, False),
    ({"broadcast_buffers": False, "forward_sync_buffers": True}, [IGNORED], 0, 0, True),
    ({"broadcast_buffers": True, "forward_sync_buffers": False}, [IGNORED], 0, 0, False),
    ({"broadcast_buffers": False, "init_sync": False}, [RENAMED], -1, -1, False),
    ({"check_reduction": True}, [NO_CHECK], 0, 0, True),
]


def start(arguments: dict[str, bool]) -> tuple[list[tuple[str, str, bool]], float, float, bool]:
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.tensor(float(dist.get_rank())))
    model.weight.data.fill_(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(model, **arguments)
    ddp.close()
    said = [(str(each.message), each.category.__name__, each.filename == __file__) for each in caught]
    return said, model.weight.item(), model.table.item(), ddp.forward_sync_buffers


@pytest.mark.parametrize(("arguments", "said", "parameters_of", "buffers_of", "follows"), STARTS, ids=str)
def test_who_follows_rank_0_at_the_start_is_as_torchs_arguments_say(
    ranks: Ranks, arguments: dict[str, bool], said: list[str], parameters_of: int, buffers_of: int, follows: bool
) -> None:
    for rank, answer in enumerate(ranks.run(start, arguments)):
        expected = [rank if source < 0 else source for source in (parameters_of, buffers_of)]
        assert answer == ([(text, "FutureWarning", True) for text in said], *expected, follows)


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


def of_fewer_axes(model: nn.Sequential) -> None:
    model[3] = nn.Linear(1, 2)


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
    (of_fewer_axes, PARAMETERS, 6, "shape of parameter 4 ('3.weight') is [2, 4] on rank 0 and [2, 1] on rank {rank}"),
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
            "  Give every rank the same settings and the same versions.",
        ]


def versions_differ(where: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, f"1.{min(dist.get_rank(), 1)}")
        return text_of(PlanMismatch, lambda: attach(mlp()))


@pytest.mark.parametrize(
    ("where", "name"), [("torch.__version__", "torch"), ("undertow.runtime.agreement.__version__", "undertow")]
)
def test_ranks_with_different_versions_are_told_so(ranks: Ranks, where: str, name: str) -> None:
    for text in ranks.run(versions_differ, where):
        assert f"  first difference: {name} is '1.0' on rank 0 and '1.1' on rank 1" in text


def step_is_right(model: nn.Module, bare: nn.Module, step: int) -> None:
    for each in (model, bare):
        each.zero_grad()
        each(noise(5, 6, step=step)).square().sum().backward()
    naive_mean(bare)
    require_same(*(dict(enumerate(gradients(each).values())) for each in (model, bare)))


@in_ranks(2, 3)
@pytest.mark.parametrize("close", ["in between", "at the end"])
@pytest.mark.parametrize("later", WRAP)
@pytest.mark.parametrize("earlier", WRAP)
def test_a_module_may_be_wrapped_anew(earlier: str, later: str, close: str) -> None:
    """Gradients are averaged once, whoever is closed in between."""
    model = mlp()
    bare = copy.deepcopy(model)
    first = WRAP[earlier](model)
    step_is_right(model, bare, 0)
    second = WRAP[later](model)
    for step in range(1, 4):
        if step == 2 and close == "in between":
            first.close()
        step_is_right(model if later == "attach" else second, bare, step)
    second.close()
    first.close()
    for each in (model, bare):  # and now each rank trains alone
        each.zero_grad()
        each(noise(5, 6)).square().sum().backward()
    require_same_gradients(model, bare)


@in_ranks(2, 3)
@pytest.mark.parametrize("way", WRAP)
def test_a_module_may_be_wrapped_after_a_part_of_it(way: str) -> None:
    model = mlp()
    bare = copy.deepcopy(model)
    part = attach(model[0])
    whole = WRAP[way](model)
    for step in range(3):
        step_is_right(model if way == "attach" else whole, bare, step)
    whole.close()
    part.close()


def wrapper_in_a_wrapper() -> list[str]:
    with wrapped_and_bare(mlp()) as (inner, bare), wrapped(inner) as outer:
        for step in range(3):
            step_is_right(outer, bare, step)
        return list(outer.state_dict())


def test_a_wrapper_may_be_wrapped(ranks: Ranks) -> None:
    for keys in ranks.run(wrapper_in_a_wrapper):
        assert keys == [f"module.module.{name}" for name in ("0.weight", "0.bias", "2.weight", "2.bias")]


def wrapped_in_part() -> set[str]:
    with wrapped_and_bare(mlp()) as (ddp, bare):
        model = ddp.module
        calls = [lambda: attach(model[0]), lambda: DistributedDataParallel(model[0]), lambda: attach(model, ignore=["2.bias"])]
        texts = {text_of(ConfigError, call).replace("'weight'", "'0.weight'") for call in calls}
        for step in range(2):  # the earlier one goes on
            step_is_right(ddp, bare, step)
    return texts


ALREADY = (
    "a part of this module is synchronised already.\n"
    "  parameter '0.weight' belongs to an earlier attach() or DistributedDataParallel\n"
    "  Call close() on the earlier one first."
)


def test_a_part_of_what_is_wrapped_is_not_wrapped_again(ranks: Ranks) -> None:
    assert ranks.run(wrapped_in_part) == [{ALREADY}] * ranks.num_ranks


def wrapped_over_another_group() -> str | None:
    group = dist.new_group([0, 1])
    with wrapped_and_bare(mlp()) as (ddp, bare):
        text = None
        if dist.get_rank() < 2:
            text = text_of(ConfigError, lambda: attach(ddp.module, process_group=group))
        for step in range(2):
            step_is_right(ddp, bare, step)
    if dist.get_rank() < 2:
        dist.destroy_process_group(group)
    return text


def test_what_is_wrapped_is_not_wrapped_again_over_other_ranks(three_ranks: Ranks) -> None:
    assert three_ranks.run(wrapped_over_another_group) == [ALREADY, ALREADY, None]


@in_ranks(2, 3)
def test_what_was_closed_can_be_wrapped_in_every_way() -> None:
    model = mlp()
    bare = copy.deepcopy(model)
    for way in WRAP.values():
        sync = way(model)
        step_is_right(model, bare, 0)
        sync.close()
        sync.close()
        part = attach(model[0])  # what was closed is free, in parts too
        part.close()


WRONG_TYPES = ("no group", "no module")


def on_two_device_types() -> nn.Module:
    model = mlp()
    model[2].to("meta")
    return model


def without_a_shape() -> nn.Module:
    model = mlp()
    model[2].weight = nn.parameter.UninitializedParameter()
    return model


@in_ranks(2)
@pytest.mark.parametrize("by_settings", [False, True])
@pytest.mark.parametrize("way", [DistributedDataParallel, attach])
def test_sharded_parameters_may_be_ignored(way: Callable[..., Any], by_settings: bool) -> None:
    """Tensor parallelism's, for example, whose gradients are no affair of ours."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
    how = {"config": SyncConfig(ignore=("1.weight",))} if by_settings else {"ignore": (it for it in [model[1]])}
    sync = way(model, **how)
    model[0](torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), (dist.get_world_size() + 1) / 2))
    sync.close()


def errors_of_arguments() -> dict[str, str]:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("outer", "dp"))
    other = Branches(1)
    with wrapped(other) as ddp:
        plan = ddp.plan.to_json()
    sharded = nn.Linear(2, 2, bias=False)
    sharded.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh["dp"], [Shard(0)]))
    with_batch_norm = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    model = mlp()
    name, weight = next(iter(model.named_parameters()))
    calls: dict[str, Callable[[], object]] = {
        "no group": lambda: attach(mlp(), process_group="world"),
        "group in second place": lambda: DistributedDataParallel(mlp(), dist.group.WORLD),
        "no module": lambda: DistributedDataParallel([1]),
        "torch's wrapper": lambda: DistributedDataParallel(nn.parallel.DistributedDataParallel(mlp())),
        "two device types": lambda: DistributedDataParallel(on_two_device_types()),
        "sync batch norm": lambda: DistributedDataParallel(with_batch_norm),
        "no shape": lambda: DistributedDataParallel(without_a_shape()),
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
    texts = {
        name: text_of(WrongType if name in WRONG_TYPES else ConfigError, call).replace(str(mesh), "MESH")
        for name, call in calls.items()
    }
    for group in (mesh["outer"].get_group(), mesh["dp"].get_group()):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return texts


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
    "sync batch norm": "SyncBatchNorm layers only work with GPU modules.\n"
    "  DistributedDataParallel(...)\n"
    "  Keep the BatchNorm layers on CPU: their running statistics follow rank 0.",
    "no shape": "Modules with uninitialized parameters can't be used with `DistributedDataParallel`.\n"
    "  parameter '2.weight' has no shape yet\n"
    "  Run a dummy forward pass to correctly initialize the modules.",
    "sharded": "parameter 'weight' is sharded already, by torch's fully_shard or by tensor parallelism.\n"
    "  DistributedDataParallel(...)\n"
    "  Leave fully_shard out, or use it alone; with tensor parallelism it goes on the data-parallel dimension.",
    "sharded, attached": "parameter 'weight' is sharded already, by torch's fully_shard or by tensor parallelism.\n"
    "  attach(...)\n"
    "  Leave fully_shard out, or use it alone; with tensor parallelism it goes on the data-parallel dimension.",
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


def test_arguments_that_cannot_work_are_refused(two_ranks: Ranks) -> None:
    for texts in two_ranks.run(errors_of_arguments):
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


@in_ranks(2)
def test_ranks_may_have_devices_of_different_numbers() -> None:
    described = members.spec_of

    def numbered(name: str, tensor: torch.Tensor, *, is_sparse: bool = False) -> ParamSpec:
        return dataclasses.replace(described(name, tensor, is_sparse=is_sparse), device=f"cuda:{dist.get_rank()}")

    members.spec_of = numbered
    try:
        attach(mlp()).close()
    finally:
        members.spec_of = described


def accumulated_then_wrapped_anew() -> list[float]:
    layers = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"})
    inputs = torch.full((1, 1), dist.get_rank() + 1.0)
    first = DistributedDataParallel(layers)
    with first.no_sync():
        layers["a"](inputs).sum().backward()
    second = DistributedDataParallel(layers)
    layers["b"](inputs).sum().backward()
    grads = [layer.weight.grad.item() for layer in layers.values()]
    for wrapper in (first, second):
        wrapper.close()
    return grads


def test_what_was_accumulated_before_wrapping_anew_is_averaged(two_ranks: Ranks) -> None:
    assert two_ranks.run(accumulated_then_wrapped_anew) == [[1.5, 1.5]] * 2


def buckets_of_zero_mib() -> list[int]:
    counts = []
    for arguments in ({"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [0]}):
        ddp = DistributedDataParallel(mlp(), **arguments)
        counts.append(len(ddp.plan.buckets))
        ddp.close()
    return counts


def test_a_cap_of_zero_gives_every_parameter_a_bucket_as_in_torch(two_ranks: Ranks) -> None:
    assert two_ranks.run(buckets_of_zero_mib) == [[4, 4]] * 2
