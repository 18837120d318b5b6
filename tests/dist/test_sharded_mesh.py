"""Sharded optimizers over the data-parallel axis of a mesh whose other axis is torch's tensor parallelism, on 2 x 2 ranks."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from support.errors import text_of
from support.levels import some
from support.ranks import in_ranks
from support.sharded import destroy, mesh_of
from support.tensor_parallel import (
    adamw,
    backward_alone,
    gpt,
    layers,
    mean_by_hand,
    mesh_of_four,
    parts,
    placed,
    require_near,
    tokens,
)
from undertow import (
    CheckpointError,
    ConfigError,
    DistributedDataParallel,
    ShardedGradientError,
    ShardedOptimizer,
    SyncConfig,
    clip_grad_norm_,
    load_checkpoint,
    save_checkpoint,
)

# Ranks whose mesh stays: the first steps on one take seconds.
ON_A_MESH = in_ranks(4, pool="mesh", timeout_s=240.0)
# Torch caches what an operation of DTensors does by mesh, with groups that a test has destroyed.
ON_A_MESH_OF_ITS_OWN = in_ranks(4, is_fresh=True, timeout_s=240.0)
STRATEGIES = ("zero1", "zero2")


def sharded(
    model: DistributedDataParallel, cls: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: Any
) -> ShardedOptimizer:
    return ShardedOptimizer(cls, model, lr=1e-2, **settings)


@contextlib.contextmanager
def on_mesh(
    make: Callable[[DeviceMesh], Any] = gpt, *, dtype: torch.dtype = torch.float32, **settings: Any
) -> Iterator[tuple[DeviceMesh, DistributedDataParallel, Any]]:
    """A wrapped model, and a bare one of the same values."""
    with mesh_of_four() as mesh:
        config = SyncConfig(bucket_cap_mb=0.004, **settings)
        model = DistributedDataParallel(make(mesh).to(dtype), device_mesh=mesh["dp"], config=config)
        yield mesh, model, make(mesh).to(dtype)
        model.close()


def backward(net: nn.Module, mesh: DeviceMesh, step: int) -> None:
    net(tokens(step, mesh["dp"].get_local_rank())).backward()


def require_same_parameters(ours: nn.Module, reference: nn.Module) -> None:
    for (name, param), (_, wanted) in zip(ours.named_parameters(), reference.named_parameters(), strict=True):
        assert isinstance(param, DTensor)
        assert isinstance(wanted, DTensor)
        # `to_local` is no function of torch: it waits too.
        assert torch.equal(param.to_local(), wanted.to_local()), f"{name} differs"


def reduced(net: nn.Module, data: dist.ProcessGroup) -> dict[Tensor, Tensor]:
    """The means of a micro-batch, which zero2 reduces by itself; `.grad` is None then."""
    mean_by_hand(net, data)
    found = {param: param.grad for param in net.parameters() if param.grad is not None}
    for param in found:
        param.grad = None
    return found


@pytest.mark.deep
@pytest.mark.parametrize("strategy", some(STRATEGIES, most=1))
@ON_A_MESH
def test_steps_in_shards_have_the_bits_of_a_plain_optimizer_after_a_mean_by_hand(strategy: str) -> None:
    with on_mesh(strategy=strategy) as (mesh, model, other):
        optimizer, plain, data = sharded(model), adamw(other), mesh["dp"].get_group()
        for step in range(6):
            model.module.is_deep = other.is_deep = step != 4  # the last block is unused
            for each in (optimizer, plain):
                each.zero_grad()
            if step % 2:
                with model.no_sync():
                    backward(model, mesh, 100 + step)
                backward(other, mesh, 100 + step)
                placed(other)  # Undertow adds no partial sums up
            earlier = reduced(other, data) if step % 2 and strategy == "zero2" else {}
            for net in (model, other):
                backward(net, mesh, step)
            mean_by_hand(other, data)
            for param, grad in earlier.items():
                param.grad = grad + param.grad
            for (name, param), wanted in zip(model.module.named_parameters(), other.parameters(), strict=True):
                whole = model.full_gradient(param)
                assert (whole is None) == (wanted.grad is None), name
                if isinstance(whole, DTensor):
                    assert whole.placements == param.placements
                    assert torch.equal(whole.to_local(), wanted.grad.to_local()), name
            optimizer.step()
            plain.step()
            if step < 3:  # later steps begin with parameters in flight
                require_same_parameters(model.module, other)
        require_same_parameters(model.module, other)
        held = sum(state["exp_avg"].numel() for state in optimizer.state.values() if state)
        assert 0.4 < held / sum(param.to_local().numel() for param in model.parameters()) < 0.6


@pytest.mark.deep
@ON_A_MESH
def test_steps_in_shards_have_the_bits_of_torchs_replicate_and_train_as_a_single_process() -> None:
    with on_mesh(strategy="zero1") as (mesh, model, other):
        other, alone = replicate(other, mesh=mesh["dp"]), gpt()
        for net, optimizer in ((model, sharded(model)), (other, adamw(other))):
            _trained(net, optimizer, mesh, range(6))
        require_same_parameters(model.module, other)
        _trained_alone(alone, adamw(alone), range(6))
        require_near(model.module, alone)


@pytest.mark.deep
@ON_A_MESH
def test_a_gradient_in_shards_is_not_read_unnoticed_and_can_be_zeroed() -> None:
    with on_mesh(strategy="zero1") as (mesh, model, _):
        optimizer = sharded(model)
        backward(model, mesh, 0)
        weight = model.module.blocks[0].mlp.up.weight
        text = text_of(ShardedGradientError, lambda: weight.grad + 1)
        assert text.startswith("the gradient of 'blocks.0.mlp.up.weight' is sharded: no rank has all of it.")
        optimizer.zero_grad(set_to_none=False)
        found = model.full_gradient(weight)
        assert isinstance(found, DTensor)
        assert not found.to_local().any()


@pytest.mark.deep
@pytest.mark.parametrize("strategy", some(["zero1", "ddp"], most=1))
@ON_A_MESH
def test_the_norm_is_of_all_axes_and_counts_each_element_once(strategy: str) -> None:
    with on_mesh(strategy=strategy) as (mesh, model, other):
        other = replicate(other, mesh=mesh["dp"])
        optimizer = sharded(model) if strategy == "zero1" else adamw(model)
        for net in (model, other):
            backward(net, mesh, 0)
        whole = [param.grad.full_tensor().double() for param in other.parameters()]  # type: ignore[union-attr]
        for order in (2.0, 3.0, float("inf")):
            wanted = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in whole]), order).float()
            clip: Callable[..., Tensor] = optimizer.clip_grad_norm_ if order == 3.0 and strategy == "zero1" else _clip(model)
            norm = clip(1e9, order)
            # Powers are summed in fp64 and rounded once, in another order here.
            torch.testing.assert_close(norm, wanted, rtol=2e-7, atol=0.0)
            norms = [torch.empty_like(norm) for _ in range(4)]
            dist.all_gather(norms, norm)
            assert all(torch.equal(each, norm) for each in norms)
        _clip(model)(1e-3, 2.0)
        scale = (1e-3 / (torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in whole])).float() + 1e-6)).clamp(max=1.0)
        for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
            found = model.full_gradient(param)
            assert isinstance(found, DTensor)
            # The scale is rounded once more.
            torch.testing.assert_close(found.to_local(), wanted.grad.to_local() * scale, rtol=3e-7, atol=0.0)  # type: ignore[union-attr]


def _clip(model: DistributedDataParallel) -> Callable[..., Tensor]:
    return lambda max_norm, order: clip_grad_norm_(model, max_norm, order)


@pytest.mark.deep
@ON_A_MESH
def test_gradients_and_parameters_in_int8_stay_alike_on_both_axes() -> None:
    with on_mesh(partial(gpt, width=32), strategy="zero2", wire="int8", param_wire="int8") as (mesh, model, other):
        other, alone = replicate(other, mesh=mesh["dp"]), gpt(width=32)
        for net, optimizer in ((model, sharded(model)), (other, adamw(other))):
            _trained(net, optimizer, mesh, range(5))
        _trained_alone(alone, adamw(alone), range(5))
        are_rounded = []
        model.zero_grad()
        for (name, param, _), (_, wanted, _) in zip(parts(model.module), parts(other), strict=True):
            first = param.clone()
            dist.broadcast(first, group=mesh["dp"].get_group(), group_src=0)
            assert torch.equal(first, param), f"{name} differs between replicas"
            # Five steps of AdamW by up to 0.01 each: rounding may turn the smallest, which are of noise.
            assert (param - wanted).abs().mean() < 0.01, name
            are_rounded.append(not torch.equal(param, wanted))
        assert any(are_rounded), "all values travel in full width"
        for (name, param), whole in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            assert isinstance(param, DTensor)
            assert (param.full_tensor() - whole).abs().mean() < 0.01, name
            if param.placements[0].is_replicate():
                first = param.to_local().clone()
                dist.broadcast(first, src=0)
                assert torch.equal(first, param.to_local()), f"{name} differs between places"


def _trained(net: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(net, mesh, step)
        optimizer.step()


def _trained_alone(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward_alone(net, step)
        optimizer.step()


def _saved(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model_state, states = get_state_dict(net, optimizer)
    checkpoint.save({"model": model_state, "optimizer": states}, checkpoint_id=folder)


def _loaded(net: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    found = dict(zip(("model", "optimizer"), get_state_dict(net, optimizer), strict=True))
    checkpoint.load(found, checkpoint_id=folder)
    set_state_dict(net, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])


@pytest.mark.deep
@ON_A_MESH
def test_a_checkpoint_of_torch_takes_a_sharded_optimizer_and_its_fp32_copies(tmp_path: Path) -> None:
    with on_mesh(strategy="zero1", dtype=torch.bfloat16) as (mesh, model, other):
        trained = sharded(model)
        _trained(model, trained, mesh, range(3))
        states = trained.state_dict()["state"]
        assert isinstance(states[0]["exp_avg"], DTensor)
        _saved(model.module, trained, tmp_path)
        second = DistributedDataParallel(other, device_mesh=mesh["dp"], config=SyncConfig(strategy="zero2"))
        resumed = sharded(second)
        _loaded(second.module, resumed, tmp_path)
        for net, optimizer in ((model, trained), (second, resumed)):
            _trained(net, optimizer, mesh, range(5, 8))
        require_same_parameters(model.module, second.module)
        second.close()


@pytest.mark.deep
@pytest.mark.parametrize("is_sharded", some([True, False], most=1))
@ON_A_MESH
def test_a_plain_optimizer_takes_a_sharded_ones_checkpoint_of_torch_and_the_reverse(is_sharded: bool, tmp_path: Path) -> None:
    with on_mesh(strategy="zero1" if is_sharded else "ddp") as (mesh, model, other):
        trained = sharded(model) if is_sharded else adamw(model)
        _trained(model, trained, mesh, range(3))
        _saved(model.module, trained, tmp_path)
        config = SyncConfig(strategy="ddp" if is_sharded else "zero1")
        second = DistributedDataParallel(other, device_mesh=mesh["dp"], config=config)
        resumed = adamw(second) if is_sharded else sharded(second)
        _loaded(second.module, resumed, tmp_path)
        for net, optimizer in ((model, trained), (second, resumed)):
            _trained(net, optimizer, mesh, range(5, 8))
        require_same_parameters(model.module, second.module)
        second.close()


@pytest.mark.deep
@ON_A_MESH
def test_other_weights_than_those_that_were_saved_stay() -> None:
    """Exact values that differ from the rounded ones belong to weights of every place."""
    with on_mesh(strategy="zero1", param_wire="int8") as (mesh, model, _):
        optimizer = sharded(model)
        _trained(model, optimizer, mesh, range(3))
        states = optimizer.state_dict()
        average = {name: value * 0.5 for name, value in model.state_dict().items()}
        loads = [lambda: model.load_state_dict(average), lambda: optimizer.load_state_dict(states)]
        for first in ("model", "optimizer"):
            for load in loads if first == "model" else reversed(loads):
                load()
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            _trained(model, optimizer, mesh, range(3, 4))
            for name, value in model.state_dict().items():
                assert torch.equal(value.to_local(), average[name].to_local()), (first, name)


WHOLE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adafactor": (torch.optim.Adafactor, {}),
    "AdamW": (torch.optim.AdamW, {"whole": True}),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", some(WHOLE, most=1))
@ON_A_MESH
def test_an_optimizer_of_whole_matrices_is_refused_by_the_name_of_a_parameter_that_is_cut(name: str) -> None:
    cls, settings = WHOLE[name]
    with on_mesh(strategy="zero1") as (_, model, _):
        text = text_of(ConfigError, lambda: sharded(model, cls, **settings))
        assert text.startswith(f"{name} updates whole parameters, and each rank has a part of 'embedding.weight' only")


@contextlib.contextmanager
def mesh_of_one_replica() -> Iterator[DeviceMesh]:
    """Ranks 0 and 1 are one replica; the others have nothing to do."""
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("dp", "tp"))
    yield mesh
    dist.barrier()
    if dist.get_rank() < 2:
        destroy(mesh)


@pytest.mark.deep
@pytest.mark.parametrize("ways", some([(("zero2", "ddp"),), (("ddp", "zero1"),)], most=1), ids="-".join)
@ON_A_MESH_OF_ITS_OWN
def test_a_checkpoint_folder_has_a_folder_for_each_place_and_resumes_any_number_of_replicas(
    ways: tuple[str, str], tmp_path: Path
) -> None:
    saved_by, loaded_by = ways
    with on_mesh(layers, strategy=saved_by) as (mesh, model, other):
        trained = adamw(model) if saved_by == "ddp" else sharded(model)
        _trained(model, trained, mesh, range(3))
        save_checkpoint(tmp_path / "a", model, trained, extra={"step": 3})
        found = save_checkpoint(tmp_path / "b", model, trained, extra={"step": 3}, background=True)
        assert found is not None
        found.wait()
        files = sorted(str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*"))
        assert files[:3] == ["place-0", "place-0/model.safetensors", "place-0/optimizer-0.safetensors"]
        assert files == sorted(str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*"))
        second = DistributedDataParallel(other, device_mesh=mesh["dp"], config=SyncConfig(strategy=loaded_by))
        resumed = adamw(second) if loaded_by == "ddp" else sharded(second)
        assert load_checkpoint(tmp_path / "b", second, resumed) == {"step": 3}
        with mesh_of_one_replica() as small:
            if dist.get_rank() < 2:
                third = DistributedDataParallel(layers(small), device_mesh=small["dp"], config=SyncConfig(strategy="zero1"))
                fewer = sharded(third)
                assert load_checkpoint(tmp_path / "a", third, fewer) == {"step": 3}
                require_same_parameters(third.module, second.module)
                save_checkpoint(tmp_path / "c", third, fewer)
                third.close()
        fourth = DistributedDataParallel(layers(mesh), device_mesh=mesh["dp"], config=SyncConfig(strategy="zero1"))
        more = sharded(fourth)
        load_checkpoint(tmp_path / "c", fourth, more)
        save_checkpoint(tmp_path / "c", fourth, more)  # replaces one with folders
        for net, optimizer in ((model, trained), (second, resumed), (fourth, more)):
            _trained(net, optimizer, mesh, range(5, 8))
        require_same_parameters(model.module, second.module)
        require_same_parameters(model.module, fourth.module)
        second.close()
        fourth.close()


@pytest.mark.deep
@ON_A_MESH_OF_ITS_OWN
def test_a_checkpoint_of_another_size_of_the_axis_or_with_a_part_missing_is_an_error_on_every_rank(tmp_path: Path) -> None:
    with on_mesh(strategy="zero1") as (mesh, model, other):
        optimizer = sharded(model)
        _trained(model, optimizer, mesh, range(1))
        save_checkpoint(tmp_path / "two", model, optimizer)
        save_checkpoint(tmp_path / "cut", model, optimizer)
        text = text_of(CheckpointError, lambda: load_checkpoint(tmp_path / "two", gpt()))
        assert text.startswith("the checkpoint was saved with parameters cut over tp=2, and the model's are cut over no axis.")
        with mesh_of(1, 4, names=("dp", "tp")) as wide:
            text = text_of(CheckpointError, lambda: load_checkpoint(tmp_path / "two", gpt(wide)))
        assert text.startswith("the checkpoint was saved with parameters cut over tp=2, and the model's are cut over tp=4.")
        before = [param.clone() for _, param, _ in parts(other)]
        if dist.get_rank() == 0:
            (tmp_path / "cut/place-1/model.safetensors").unlink()
        dist.barrier()
        text = text_of(CheckpointError, lambda: load_checkpoint(tmp_path / "cut", other))
        assert text.startswith("the checkpoint cannot be loaded: model.safetensors is missing.\n")
        assert "place-1/model.safetensors" in text
        for (name, param, _), was in zip(parts(other), before, strict=True):
            assert torch.equal(param, was), f"{name} was loaded"
        save_checkpoint(tmp_path / "linked", model, optimizer)
        if dist.get_rank() == 0:
            (tmp_path / "linked/place-1").rename(tmp_path / "elsewhere")
            (tmp_path / "linked/place-1").symlink_to(tmp_path / "elsewhere")
        dist.barrier()
        text = text_of(CheckpointError, lambda: load_checkpoint(tmp_path / "linked", other))
        assert text.startswith("the checkpoint cannot be loaded: place-1 is not a folder.\n")
        if dist.get_rank() == 0:
            (tmp_path / "two/place-0/notes.txt").touch()
        dist.barrier()
        assert "notes.txt belongs to no entry of undertow.json" in text_of(
            CheckpointError, lambda: load_checkpoint(tmp_path / "two", other)
        )
        assert "notes.txt is not part of a checkpoint" in text_of(
            CheckpointError, lambda: save_checkpoint(tmp_path / "two", model, optimizer)
        )


@pytest.mark.deep
@ON_A_MESH
def test_a_setting_that_json_cannot_store_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """Only the first rank of each place makes the text: the others must not wait for it."""
    with on_mesh() as (mesh, model, _):
        optimizer = adamw(model)
        _trained(model, optimizer, mesh, range(1))
        optimizer.param_groups[0]["of the user"] = torch.float32
        text = text_of(CheckpointError, lambda: save_checkpoint(tmp_path / "a", model, optimizer))
        assert text.startswith("it was not possible to save a checkpoint in ")
        del optimizer.param_groups[0]["of the user"]
        save_checkpoint(tmp_path / "a", model, optimizer)
