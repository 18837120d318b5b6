"""What a wrapper and attach() start from: one model on all ranks, whatever was wrapped before; arguments that cannot work."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from support.alike import backward_alike, of_all_ranks
from support.errors import text_of
from support.inside import of_version, on_device
from support.models import CASES, mlp
from support.naive import wrapped, wrapped_and_bare
from support.ranks import in_ranks
from undertow import ConfigError, DistributedDataParallel, PlanMismatch, SyncConfig, attach

WRAP: dict[str, Callable[..., Any]] = {"DistributedDataParallel": DistributedDataParallel, "attach": attach}
MLP = CASES["mlp"]


@in_ranks(2, 3)
@pytest.mark.parametrize("way", WRAP)
def test_parameters_and_buffers_of_rank_0_arrive_everywhere(way: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = CASES["convolutions"].make()
    model[2].weight.requires_grad_(False)
    for name, buffer in model.named_buffers():
        buffer.fill_(dist.get_rank() + len(name))
    wanted = of_all_ranks(copy.deepcopy(model.state_dict()))[0]
    WRAP[way](model).close()
    assert model.state_dict().keys() == wanted.keys()
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, wanted[name])] == []


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


@in_ranks(2, 3)
@pytest.mark.parametrize(("arguments", "said", "parameters_of", "buffers_of", "follows"), STARTS, ids=str)
def test_who_follows_rank_0_at_the_start_is_as_torchs_arguments_say(
    arguments: dict[str, bool], said: list[str], parameters_of: int, buffers_of: int, follows: bool
) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.tensor(float(dist.get_rank())))
    model.weight.data.fill_(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(model, **arguments)
    ddp.close()
    found = [(str(each.message), each.category, each.filename == __file__) for each in caught]
    assert found == [(text, FutureWarning, True) for text in said]
    expected = [dist.get_rank() if source < 0 else source for source in (parameters_of, buffers_of)]
    assert [model.weight.item(), model.table.item(), ddp.forward_sync_buffers] == [*expected, follows]


# What the last rank, {rank}, does to its model; how many parameters it has; the first difference.
PARAMETERS = "ranks disagree on the parameters."
OTHERS = "ranks disagree on the frozen parameters or the buffers."
CHANGES: dict[str, tuple[Callable[[Any], object], str, int, str]] = {
    "renamed": (
        lambda model: model.add_module("other", model.pop(3)),
        PARAMETERS,
        6,
        "parameter 4 is '3.weight' on rank 0 and 'other.weight' on rank {rank}",
    ),
    "another shape": (
        lambda model: model.__setitem__(3, nn.Linear(5, 2)),
        PARAMETERS,
        6,
        "shape of parameter 4 ('3.weight') is [2, 4] on rank 0 and [2, 5] on rank {rank}",
    ),
    "fewer columns": (
        lambda model: model.__setitem__(3, nn.Linear(1, 2)),
        PARAMETERS,
        6,
        "shape of parameter 4 ('3.weight') is [2, 4] on rank 0 and [2, 1] on rank {rank}",
    ),
    "another dtype": (
        lambda model: model[3].double(),
        PARAMETERS,
        6,
        "dtype of parameter 4 ('3.weight') is float32 on rank 0 and float64 on rank {rank}",
    ),
    "another layout": (
        lambda model: setattr(model[3], "weight", nn.Parameter(torch.zeros(4, 2).t())),
        PARAMETERS,
        6,
        "axes in memory of parameter 4 ('3.weight') is [0, 1] on rank 0 and [1, 0] on rank {rank}",
    ),
    "one missing": (
        lambda model: model.__delitem__(3),
        PARAMETERS,
        4,
        "parameter 4 is '3.weight' on rank 0 and missing on rank {rank}",
    ),
    "one more": (
        lambda model: model.append(nn.Linear(2, 2)),
        PARAMETERS,
        8,
        "parameter 6 is missing on rank 0 and '4.weight' on rank {rank}",
    ),
    "frozen": (
        lambda model: model[2].weight.requires_grad_(False),
        PARAMETERS,
        5,
        "parameter 2 is '2.weight' on rank 0 and '2.bias' on rank {rank}",
    ),
    "another frozen one": (
        lambda model: model.register_parameter("extra", nn.Parameter(torch.zeros(3), requires_grad=False)),
        OTHERS,
        6,
        "tensor 0 is missing on rank 0 and 'extra' on rank {rank}",
    ),
    "another buffer": (
        lambda model: model.register_buffer("table", torch.zeros(3, dtype=torch.int64)),
        OTHERS,
        6,
        "tensor 0 is missing on rank 0 and 'table' on rank {rank}",
    ),
}


@in_ranks(2, 3)
@pytest.mark.parametrize("way", WRAP)
@pytest.mark.parametrize("name", CHANGES)
def test_ranks_with_different_models_are_told_the_first_difference(name: str, way: str) -> None:
    change, what, num_params, difference = CHANGES[name]
    last = dist.get_world_size() - 1
    model = nn.Sequential(*mlp(), nn.Linear(4, 2))
    if dist.get_rank() == last:
        change(model)
    text = text_of(PlanMismatch, lambda: WRAP[way](model))
    assert of_all_ranks(text) == [text] * dist.get_world_size()
    first, second, *rest = text.splitlines()
    assert first == what
    assert second.startswith("  rank 0: 6 parameters, fingerprint ")
    assert f"   rank {last}: {num_params} parameters, fingerprint " in second
    assert rest == [
        f"  first difference: {difference.format(rank=last)}",
        "  Build the model the same way on every rank before wrapping it.",
    ]


@in_ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("bucket_cap_mb", (None, 4.0)),
        ("overlap", (True, False)),
        ("order", ("observed", "reverse")),
        ("buffers", ("rank0", "off")),
        ("torch", ("1.0", "1.1")),
        ("undertow", ("1.0", "1.1")),
    ],
)
def test_ranks_with_different_settings_or_versions_are_told_the_first_difference(name: str, values: tuple[Any, Any]) -> None:
    value = values[dist.get_rank() > 0]
    pretending = {"torch": mock.patch.object(torch, "__version__", value), "undertow": of_version(value)}
    with pretending.get(name, contextlib.nullcontext()):
        config = SyncConfig(**({} if name in pretending else {name: value}))
        first, _, *rest = text_of(PlanMismatch, lambda: attach(mlp(), config=config)).splitlines()
    assert first == "ranks disagree on the settings."
    assert rest == [
        f"  first difference: {name} is {values[0]!r} on rank 0 and {values[1]!r} on rank 1",
        "  Give every rank the same settings and the same versions.",
    ]


@in_ranks(2, 3)
@pytest.mark.parametrize("close", ["in between", "at the end"])
@pytest.mark.parametrize("later", WRAP)
@pytest.mark.parametrize("earlier", [*WRAP, "attach to a part"])
def test_a_module_may_be_wrapped_anew(earlier: str, later: str, close: str) -> None:
    """Gradients are averaged once, whoever is closed in between."""
    model = mlp()
    bare = copy.deepcopy(model)
    first = attach(model[0]) if earlier == "attach to a part" else WRAP[earlier](model)
    if earlier in WRAP:
        backward_alike(model, bare, MLP.loss, steps=[0])
    second = WRAP[later](model)
    called = model if later == "attach" else second
    backward_alike(called, bare, MLP.loss, steps=[1])
    if close == "in between":
        first.close()
    backward_alike(called, bare, MLP.loss, steps=[2, 3])
    for sync in (second, first, second):
        sync.close()
    attach(model[0]).close()  # what was closed is free, in parts too
    backward_alike(model, bare, MLP.loss, steps=[4], mean=lambda _: None)  # and now each rank trains alone


@in_ranks(2, 3)
def test_a_wrapper_may_be_wrapped() -> None:
    with wrapped_and_bare(mlp()) as (inner, bare), wrapped(inner) as outer:
        backward_alike(outer, bare, MLP.loss)
        assert list(outer.state_dict()) == [f"module.module.{name}" for name in bare.state_dict()]


ALREADY = (
    "a part of this module is synchronised already.\n"
    "  parameter '0.weight' belongs to an earlier attach() or DistributedDataParallel\n"
    "  Call close() on the earlier one first."
)


@in_ranks(2, 3)
def test_a_part_of_what_is_wrapped_is_not_wrapped_again_nor_over_other_ranks() -> None:
    group, is_inside = dist.new_group([0, 1]), dist.get_rank() < 2
    with wrapped_and_bare(mlp()) as (ddp, bare):
        model = ddp.module
        calls = [lambda: attach(model[0]), lambda: DistributedDataParallel(model[0]), lambda: attach(model, ignore=["2.bias"])]
        if is_inside and dist.get_world_size() > 2:
            calls.append(lambda: attach(model, process_group=group))
        assert {text_of(ConfigError, call).replace("'weight'", "'0.weight'") for call in calls} == {ALREADY}
        backward_alike(ddp, bare, MLP.loss)  # the earlier one goes on
    if is_inside:
        dist.destroy_process_group(group)


@in_ranks(2)
@pytest.mark.parametrize("by_settings", [False, True])
@pytest.mark.parametrize("way", WRAP)
def test_sharded_parameters_may_be_ignored(way: str, by_settings: bool) -> None:
    """Tensor parallelism's, for example, whose gradients are no affair of ours."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    model[1].weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
    how = {"config": SyncConfig(ignore=("1.weight",))} if by_settings else {"ignore": (it for it in [model[1]])}
    sync = WRAP[way](model, **how)
    model[0](torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
    assert torch.equal(model[0].weight.grad, torch.full((2, 2), (dist.get_world_size() + 1) / 2))
    sync.close()


@in_ranks(2, 3)
def test_a_mesh_with_one_dimension_names_the_ranks() -> None:
    model = mlp()
    bare = copy.deepcopy(model)
    sync = attach(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    backward_alike(model, bare, MLP.loss)
    sync.close()


@in_ranks(2)
def test_ranks_may_have_devices_of_different_numbers() -> None:
    with on_device(f"cuda:{dist.get_rank()}"):
        attach(mlp()).close()


@in_ranks(2)
def test_what_was_accumulated_before_wrapping_anew_is_averaged() -> None:
    layers = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "ab"})
    inputs = torch.full((1, 1), dist.get_rank() + 1.0)
    first = DistributedDataParallel(layers)
    with first.no_sync():
        layers["a"](inputs).sum().backward()
    second = DistributedDataParallel(layers)
    layers["b"](inputs).sum().backward()
    assert [layer.weight.grad.item() for layer in layers.values()] == [1.5, 1.5]
    for wrapper in (first, second):
        wrapper.close()


@in_ranks(2)
@pytest.mark.parametrize("arguments", [{"bucket_cap_mb": 0}, {"bucket_cap_mb_list": [0]}], ids=str)
def test_a_cap_of_zero_gives_every_parameter_a_bucket_as_in_torch(arguments: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(mlp(), **arguments)
    assert len(ddp.plan.buckets) == 4
    ddp.close()


NOTHING = (
    r"^Linear has no parameter that requires a gradient: nothing is averaged until it has one\.\n"
    r"  {}\(\.\.\.\)\n"
    r"  Look at requires_grad, and at what `ignore` names\. If parameters are unfrozen later, filter this warning\.$"
)


@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("way", WRAP)
def test_a_rank_that_trains_nothing_needs_no_other_one(way: str) -> None:
    module = nn.Linear(4, 3).requires_grad_(False)
    with pytest.warns(UserWarning, match=NOTHING.format(way)):
        model = WRAP[way](module)
    called: Callable[..., Any] = model if isinstance(model, nn.Module) else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, store = torch.ones(2, 4, requires_grad=True), dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait([f"left {way}"])
    for _ in range(2 if dist.get_rank() == 1 else 0):
        called(x).sum().backward()
        model.finish()
        called(x).sum().backward()
        optimizer.step()
    model.close()
    store.set(f"left {way}", "")


@in_ranks(2)
def test_what_is_thawed_after_steps_of_nothing_is_averaged() -> None:
    module = nn.Linear(4, 3).requires_grad_(False)
    with pytest.warns(UserWarning, match="no parameter that requires a gradient"):
        model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.full((2, 4), 1.0 + dist.get_rank(), requires_grad=True)
    for step in range(6):
        is_trained = step in (2, 3, 5)
        module.requires_grad_(is_trained)
        optimizer.zero_grad()
        for _ in range(1 if is_trained else 1 + (step + dist.get_rank()) % 2):  # each rank as it likes while nothing is
            model(x).sum().backward()
            model.finish()
        optimizer.step()
    assert torch.equal(module.weight.grad, torch.full((3, 4), 3.0))
    model.close()


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    assert text_of(ConfigError, lambda: attach(mlp())) == (
        "torch.distributed is not initialised.\n"
        "  no default process group exists in this process\n"
        '  Call torch.distributed.init_process_group("gloo") (or "nccl") first, and start the ranks with '
        "torchrun --nproc-per-node=2 script.py."
    )
