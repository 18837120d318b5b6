"""Parameters in the memory of their bucket, and placeholders of gradients."""

import io
import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.errors import text_of
from support.strategies import spec
from undertow import ShardedGradientError
from undertow.plan import plan_from_groups
from undertow.sharded.params import FlatParams, _gaps_in
from undertow.sharded.placeholder import GradientPlaceholder
from undertow.torch_private import dtensors, private


def test_a_parameter_is_shared_while_another_tensor_has_its_memory() -> None:
    (bucket,) = plan_from_groups([spec("weight", 8)], ((0,),), num_ranks=2).buckets
    flat = FlatParams(bucket, [nn.Parameter(torch.ones(8))], rank=0, num_ranks=2, num_shards=2)
    assert not private.are_shared(flat.addresses)
    kept = flat.params[0].data
    assert private.are_shared(flat.addresses)
    del kept
    assert not private.are_shared(flat.addresses)


def test_what_kind_of_tensor_a_parameter_is_on_a_mesh_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in every step, of every parameter."""
    (bucket,) = plan_from_groups([spec("weight", 8)], ((0,),), num_ranks=2).buckets
    param = nn.Parameter(torch.ones(8))
    flat, asked = FlatParams(bucket, [param], rank=0, num_ranks=2, num_shards=2), list[object]()
    monkeypatch.setattr(dtensors, "is_dtensor", asked.append)
    before = param._version
    flat.follow()
    flat.count_write()
    assert param._version > before
    assert not asked


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_without_others_to_gather_from_keeps_no_second_copy_of_its_parameters(num_ranks: int) -> None:
    (bucket,) = plan_from_groups([spec("weight", 1024)], ((0,),), num_ranks=num_ranks).buckets
    ranks = {"rank": 0, "num_ranks": num_ranks, "num_shards": 1}
    flat = FlatParams(bucket, [nn.Parameter(torch.ones(1024))], param_wire="int8", **ranks)
    assert (flat.exact, flat.parcel) == (None, None)


@pytest.mark.parametrize(("dtype", "param_wire"), [("float32", "int8"), ("bfloat16", None)], ids=["in a format", "in 16 bits"])
@pytest.mark.parametrize("written", [None, 5.0, math.nan])
def test_exact_values_are_copied_only_if_other_code_has_written_to_the_parameter(
    dtype: str, param_wire: str | None, written: float | None
) -> None:
    param = nn.Parameter(torch.full((1024,), 1.0, dtype=getattr(torch, dtype)))
    (bucket,) = plan_from_groups([spec("weight", 1024, dtype=dtype)], ((0,),), num_ranks=2, block=512).buckets
    flat = FlatParams(bucket, [param], rank=0, num_ranks=2, num_shards=2, param_wire=param_wire)
    assert flat.exact is not None
    flat.exact.add_(2**-12)  # less than a unit of bfloat16: the parameter stays
    expected, version = flat.exact.clone(), flat.exact._version
    if written is not None:
        param.data[3] = expected[3] = written
    flat.follow_writes()
    assert torch.equal(flat.exact.nan_to_num(-1.0), expected.nan_to_num(-1.0))
    assert (flat.exact._version == version) == (written is None)


def test_nan_does_not_stay_between_parameters() -> None:
    specs = [spec("one", 520), spec("other", 600)]
    (bucket,) = plan_from_groups(specs, ((0, 1),), num_ranks=1, block=512).buckets
    params = [nn.Parameter(torch.ones(each.numel)) for each in specs]
    flat = FlatParams(bucket, params, rank=0, num_ranks=1, num_shards=1)
    gaps = _gaps_in(flat.flat, bucket.slots, range(bucket.numel))
    covered = sorted([*((gap.storage_offset(), gap.numel()) for gap in gaps), *((it.start, it.numel) for it in bucket.slots)])
    assert [start + numel for start, numel in covered] == [*(start for start, _ in covered[1:]), bucket.numel]
    assert sum(gap.numel() for gap in gaps) == bucket.numel - 1120


REMEDY = "Clip with optimizer.clip_grad_norm_(), read it with model.full_gradient(param), or call zero_grad() before writing."


def linear() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    for name, param in layer.named_parameters():
        param.grad = GradientPlaceholder(param, torch.empty(0), name=name)
    return layer


def test_a_placeholder_looks_like_the_gradient() -> None:
    grad = linear().weight.grad
    assert (grad.shape, grad.dtype, grad.device.type, repr(grad)) == (
        (2, 3),
        torch.float32,
        "cpu",
        "GradientPlaceholder('weight', shape=(2, 3), dtype=torch.float32): a shard of it is here",
    )
    assert grad.detach() is grad


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda layer: layer.weight.grad.norm(), id="norm"),
        pytest.param(lambda layer: nn.utils.clip_grad_norm_(layer.parameters(), 1.0), id="clipping"),
        pytest.param(lambda layer: layer.weight.grad[0, 0].item(), id="item"),
        pytest.param(lambda layer: layer.weight.grad.tolist(), id="tolist"),
        pytest.param(lambda layer: layer.weight.grad.numpy(), id="numpy"),
        pytest.param(lambda layer: torch.save(layer.weight.grad, io.BytesIO()), id="save"),
        pytest.param(lambda layer: layer.weight.grad.add_(torch.ones(2, 3)), id="noise"),
        pytest.param(lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1).step(), id="optimizer"),
        pytest.param(lambda layer: torch.optim.AdamW(layer.parameters(), fused=True).step(), id="fused optimizer"),
    ],
)
def test_every_use_of_a_placeholder_raises_with_the_way_out(use: Callable[[nn.Linear], object]) -> None:
    layer = linear()
    before = layer.weight.detach().clone()
    with pytest.raises(ShardedGradientError, match=rf"is sharded: no rank has all of it\.\n.*\n  {re.escape(REMEDY)}\n"):
        use(layer)
    assert torch.equal(layer.weight, before)


def test_the_error_names_the_parameter_and_the_operation() -> None:
    assert text_of(ShardedGradientError, lambda: linear().bias.grad.sum()) == (
        f"the gradient of 'bias' is sharded: no rank has all of it.\n  aten.sum.default\n  {REMEDY}"
    )


def test_a_later_backward_adds_to_a_placeholder() -> None:
    layer, bare = linear(), nn.Linear(3, 2)
    bare.load_state_dict(layer.state_dict())
    held = layer.weight.grad
    for model in (layer, bare):
        for scale in (1.0, 2.0):
            model(torch.full((1, 3), scale)).sum().backward()
    assert (layer.weight.grad is held, torch.equal(held.added, bare.weight.grad)) == (True, True)


@pytest.mark.parametrize("foreach", [True, False])
def test_zeroing_clears_a_placeholder(foreach: bool) -> None:
    layer = linear()
    layer(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(layer.parameters(), foreach=foreach).zero_grad(set_to_none=False)
    assert (layer.weight.grad.is_cleared, layer.weight.grad.added) == (True, None)


def test_a_scaler_unscales_the_parts() -> None:
    layer, part = linear(), torch.tensor([4.0, 8.0])
    layer.weight.grad.part = part
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(layer.parameters()))
    assert part.tolist() == [1.0, 2.0]
