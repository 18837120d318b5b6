"""Data parallelism of models that torch's parallelize_module has distributed over another axis, on 2 x 2 ranks."""

import contextlib
import copy
import os
import random
import signal
import time
import warnings
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
from torch.distributed.fsdp import DataParallelMeshDims as Dims
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as recomputed

from support.alike import heard
from support.errors import text_of
from support.inside import gathers_of_checkpoints, ranks_that_choose, rounds_with_late_gradients
from support.levels import some
from support.ranks import in_ranks
from support.sharded import kept_mesh, mesh_of
from support.tensor_parallel import (
    adamw,
    backward_alone,
    gpt,
    layers,
    mean_by_hand,
    mesh_of_four,
    on_mesh_of,
    parallelized,
    parts,
    placed,
    require_near,
    require_same_parts,
    tokens,
)
from undertow import (
    ConfigError,
    Desync,
    DistributedDataParallel,
    NonFiniteGradient,
    Outer,
    PeerFailed,
    PhaseError,
    PlanMismatch,
    ReplicaMismatch,
    ShardedOptimizer,
    SyncConfig,
    UndertowError,
    WrongType,
    attach,
    load_checkpoint,
    save_checkpoint,
    stop_on_signal,
)

STEPS = 4
# Ranks whose mesh stays: the first steps on one take seconds. Others would find its groups, which have names that count up.
ON_A_MESH = in_ranks(4, pool="mesh", timeout_s=240.0)


@contextlib.contextmanager
def on_mesh(
    make: Callable[[DeviceMesh], Any] = gpt, **settings: Any
) -> Iterator[tuple[DeviceMesh, DistributedDataParallel, Any]]:
    """A wrapped model, and a bare one of the same values."""
    with mesh_of_four() as mesh:
        model = DistributedDataParallel(make(mesh), device_mesh=mesh["dp"], config=SyncConfig(**settings))
        yield mesh, model, make(mesh)
        model.close()


@ON_A_MESH
def test_steps_are_those_of_torchs_replicate_and_of_a_single_process() -> None:
    with on_mesh() as (mesh, model, other):
        other = replicate(other, mesh=mesh["dp"])
        alone = gpt()
        trained = [(net, adamw(net)) for net in (model, other, alone)]
        for step in range(STEPS):
            for net, optimizer in trained:
                optimizer.zero_grad()
                if net is alone:
                    backward_alone(net, step)
                else:
                    net(tokens(step, mesh["dp"].get_local_rank())).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
            require_same_parts(model.module, other)
        require_near(model.module, alone)


def runs(seed: int) -> list[list[str]]:
    """The micro-batches of a few steps: "shallow" leaves the last block out on the first replica."""
    drawn = random.Random(seed)
    steps = [
        [drawn.choice(("deep", "deep", "shallow", "frozen", "fails")) for _ in range(drawn.choice((1, 1, 2, 3)))]
        for _ in range(5)
    ]
    # A failed backward is the last of its step: nothing is stepped on.
    return [[kind for kind in step[:-1] if kind != "fails"] + step[-1:] for step in steps]


class Stop(Exception):
    """A backward fails."""


def stop(_: Tensor) -> None:
    raise Stop


def micro_batch(net: nn.Module, kind: str, batch: Tensor, replica: int) -> None:
    bare: Any = net.module if isinstance(net, DistributedDataParallel) else net
    bare.is_deep = kind != "shallow" or replica == 1
    bare.blocks[0].mlp.up.requires_grad_(kind != "frozen")

    hook = bare.blocks[0].norm1.weight.register_hook(stop) if kind == "fails" else None
    try:
        net(batch).backward()
        placed(bare)
    finally:
        if hook is not None:
            hook.remove()
        bare.blocks[0].mlp.up.requires_grad_(True)


@pytest.mark.deep
@pytest.mark.parametrize("seed", [3])  # in which each kind of micro-batch is met
@ON_A_MESH
def test_drawn_programs_have_the_gradients_of_a_mean_by_hand(seed: int) -> None:
    with on_mesh() as (mesh, model, bare):
        replica, data = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
        optimizers = [adamw(model), adamw(bare)]
        for number, step in enumerate(runs(seed)):
            has_failed = step[-1] == "fails"
            for optimizer in optimizers:
                optimizer.zero_grad()
            for net in (model, bare):
                for place, kind in enumerate(step):
                    batch, is_last = tokens(10 * number + place, replica), place == len(step) - 1
                    held = contextlib.nullcontext() if is_last or net is bare else model.no_sync()
                    with held, pytest.raises(Stop) if kind == "fails" else contextlib.nullcontext():
                        micro_batch(net, kind, batch, replica)
            if has_failed:
                continue
            mean_by_hand(bare, data)
            require_same_parts(model.module, bare)
            for optimizer in optimizers:
                optimizer.step()
            require_same_parts(model.module, bare)


WRAP: dict[str, Callable[..., Any]] = {"DistributedDataParallel": DistributedDataParallel, "attach": attach}


@ON_A_MESH
def test_gradients_are_views_of_buckets_and_what_users_ask_for_is_told_as_without_a_mesh() -> None:
    with mesh_of_four() as mesh:
        _ask(mesh)


def _ask(mesh: DeviceMesh) -> None:
    bare = gpt(mesh)
    sync = attach(bare, device_mesh=mesh["dp"], config=SyncConfig(check_replicas_every=1))
    bare.is_deep = False
    bare(tokens(0, mesh["dp"].get_local_rank())).backward()
    for _, _, grad in parts(bare):
        assert grad is None or grad.untyped_storage().nbytes() > grad.nbytes
    assert set(sync.unused_parameters) == {name for name, _ in bare.named_parameters() if name.startswith("blocks.1.")}
    weight = bare.blocks[0].mlp.up.weight
    assert sync.full_gradient(weight) is weight.grad
    assert sync.named_parameters() == list(bare.named_parameters())
    assert sync.plan.params[0].shape == tuple(next(bare.parameters()).to_local().shape)
    torch.optim.SGD(bare.parameters(), lr=0.1).step()
    assert "bucket" in str(sync.report())
    sync.broadcast_parameters()
    sync.close()


@pytest.mark.deep
@ON_A_MESH
def test_rank_0_of_each_data_axis_gives_its_parameters_and_buffers() -> None:
    with mesh_of_four() as mesh:
        for wrap in WRAP.values():
            _share(mesh, wrap)


def _share(mesh: DeviceMesh, wrap: Callable[..., Any]) -> None:
    bare = gpt(mesh, seed=mesh["dp"].get_local_rank())
    whole = torch.arange(4.0) + 10 * mesh["dp"].get_local_rank()
    bare.register_buffer("scale", on_mesh_of(bare.head.weight, whole))
    synced = wrap(bare, device_mesh=mesh["dp"])
    reference = gpt(mesh, seed=0)
    reference.register_buffer("scale", on_mesh_of(reference.head.weight, torch.arange(4.0)))
    require_same_parts(bare, reference)
    assert torch.equal(bare.scale.to_local(), torch.arange(4.0))
    with torch.no_grad():
        bare.scale.to_local().add_(float(mesh["dp"].get_local_rank()))
    (synced if wrap is DistributedDataParallel else bare)(tokens(0, 0)).backward()  # copies rank 0's again
    assert torch.equal(bare.scale.to_local(), torch.arange(4.0))
    synced.close()


# From zero to the largest value of a block of int8, or to a power of two of bfloat16.
NUM_UNITS = {"int8": 127, "bfloat16": 2**8}


@pytest.mark.deep
@pytest.mark.parametrize("wire", some(NUM_UNITS, most=1))
@ON_A_MESH
def test_a_format_leaves_equal_bits_on_a_data_axis_near_to_those_in_full_width(wire: str) -> None:
    with on_mesh(partial(gpt, width=32), wire=wire) as (mesh, model, bare):
        replica, data, alone = mesh["dp"].get_local_rank(), mesh["dp"].get_group(), gpt(width=32)
        for net in (model, bare):
            net(tokens(0, replica)).backward()
        mean_by_hand(bare, data)
        backward_alone(alone, 0)
        are_rounded = []
        for (name, _, grad), (_, _, wanted) in zip(parts(model.module), parts(bare), strict=True):
            assert grad is not None
            assert wanted is not None
            first = grad.clone()
            dist.broadcast(first, group=data, group_src=0)
            assert torch.equal(first, grad), name
            # A value is rounded twice, by up to a unit each time, on each of two replicas.
            assert (grad - wanted).abs().max() <= 2 * 2 * wanted.abs().max() / NUM_UNITS[wire], name
            are_rounded.append(not torch.equal(grad, wanted))
        assert any(are_rounded), "all gradients travel in full width"
        for (name, param), whole in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            assert isinstance(param.grad, DTensor)
            assert whole.grad is not None
            difference = param.grad.full_tensor() - whole.grad
            assert difference.abs().max() <= 2 * 2 * whole.grad.abs().max() / NUM_UNITS[wire], name


@pytest.mark.deep
@ON_A_MESH
def test_a_parameter_that_all_places_hold_stays_alike_in_int8() -> None:
    with mesh_of_four() as mesh:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))  # the last one is not cut
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        config = SyncConfig(wire="int8")
        model = DistributedDataParallel(net, device_mesh=mesh["dp"], config=config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
        for _ in range(3):
            model(torch.randn(8, 64, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weight = net[2].weight.detach()
        first = weight.clone()
        dist.broadcast(first, src=0)
        assert torch.equal(weight, first)
        assert model.report().sent_bytes < 0.5 * sum(bucket.num_bytes for bucket in model.report().buckets)
        model.close()


@pytest.mark.deep
@ON_A_MESH
def test_a_signal_on_one_rank_stops_all_places_after_the_same_step() -> None:
    with on_mesh() as (mesh, model, _):
        stop_on_signal(model, (signal.SIGUSR1,))
        optimizer, stopped = torch.optim.SGD(model.parameters(), lr=0.1), -1
        for step in range(8):
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            model(tokens(step, mesh["dp"].get_local_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            if model.stop_requested:
                stopped = step
                break
        of_ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
        dist.all_gather(of_ranks, torch.tensor([stopped]))
        assert [int(each) for each in of_ranks] == [3] * 4


@pytest.mark.deep
@pytest.mark.parametrize("has_hook", [False, True], ids=["", "with a hook"])
@ON_A_MESH
def test_a_signal_stops_replicas_that_train_alone_at_all_places(has_hook: bool) -> None:
    with on_mesh(outer=Outer(every=2, fragments=1, delay=0)) as (mesh, model, _):
        stop_on_signal(model, (signal.SIGUSR1,))
        if has_hook:  # then replicas have synchronizations, which reach their own places only
            model.register_comm_hook(None, as_it_is)
        optimizer, are_stopped = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step in range(5):
            if step == 2 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            model(tokens(step, mesh["dp"].get_local_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            are_stopped.append(model.stop_requested)
        of_ranks: list[Any] = [None] * 4
        dist.all_gather_object(of_ranks, are_stopped)
        assert of_ranks == [[False, False, False, True, True]] * 4


def as_it_is(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook of a rank that averages over nobody else."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@pytest.mark.deep
@ON_A_MESH
def test_a_format_that_is_tried_is_the_same_at_all_places() -> None:
    """All ranks decide by the slowest one of all, and so hold the same plan in every step."""
    with on_mesh(layers, wire="auto") as (mesh, model, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        formats = set()
        for step in range(60):
            model(tokens(step, mesh["dp"].get_local_rank())).backward()
            optimizer.step()
            optimizer.zero_grad()
            plans: list[Any] = [None] * 4
            dist.all_gather_object(plans, model.plan.to_json())
            assert len(set(plans)) == 1, step
            formats.update(model.plan.wires)
        assert formats == {None, "int8"}, "no trial took place"
        for name, param in model.module.named_parameters():
            assert isinstance(param, DTensor)
            if param.placements[0].is_replicate():
                first = param.to_local().clone()
                dist.broadcast(first, src=0)
                assert torch.equal(first, param.to_local()), name


@ON_A_MESH
def test_trials_of_a_format_need_parts_of_equal_sizes() -> None:
    with mesh_of_four() as mesh:
        net = parallelize_module(nn.Linear(4, 5), mesh["tp"], ColwiseParallel())
        text = text_of(ConfigError, lambda: attach(net, device_mesh=mesh["dp"], config=SyncConfig(wire="auto")))
        assert text.startswith('wire="auto" does not work with parameters whose parts have different sizes')


class Grows(nn.Module):
    """A layer, to which another one may be added."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        return sum((layer(x).square().sum() for layer in self.more), self.first(x).square().sum())


@pytest.mark.deep
@ON_A_MESH
def test_places_whose_parts_become_unequal_choose_plans_apart() -> None:
    with mesh_of_four() as mesh:
        data = mesh["dp"]
        model = DistributedDataParallel(parallelize_module(Grows(), mesh["tp"], {"first": ColwiseParallel()}), device_mesh=data)

        def step() -> tuple[int, ...]:
            """The ranks that choose plans together."""
            model(torch.ones(2, 4)).backward()
            for param in model.module.parameters():
                param.grad = None
            return ranks_that_choose(model)

        assert [step() for _ in range(2)] == [(0, 1, 2, 3)] * 2
        torch.manual_seed(0)
        model.module.more.append(parallelize_module(nn.Linear(4, 5), mesh["tp"], ColwiseParallel()))
        own = tuple(dist.get_process_group_ranks(data.get_group()))
        assert [step() for _ in range(2)] == [own] * 2
        del model.module.more[0]
        assert [step() for _ in range(2)] == [(0, 1, 2, 3)] * 2
        model.close()


@pytest.mark.deep
@pytest.mark.parametrize("policy", some(["skip", "raise"], most=1))
@ON_A_MESH
def test_a_gradient_that_is_not_finite_at_one_place_counts_at_all(policy: str) -> None:
    with on_mesh(nonfinite=policy) as (mesh, model, bare):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        poisoned = model.module.blocks[0].mlp.up.weight
        hook = poisoned.register_hook(lambda grad: on_mesh_of(poisoned, torch.full_like(grad.to_local(), _poison())))
        model(tokens(0, mesh["dp"].get_local_rank())).backward()
        if policy == "skip":
            optimizer.step()
            optimizer.zero_grad()
            model(tokens(0, mesh["dp"].get_local_rank())).backward()
            optimizer.step()
            assert model.report().num_skipped == 2
            for (name, param, _), (_, wanted, _) in zip(parts(model.module), parts(bare), strict=True):
                assert torch.equal(param, wanted), f"{name} was stepped"
        else:
            text = text_of(NonFiniteGradient, optimizer.step)
            assert text.startswith("the gradient of 'blocks.0.mlp.up.weight' is not finite (NaN or Inf) on rank 3.")
        hook.remove()
        optimizer.zero_grad()
        model(tokens(1, mesh["dp"].get_local_rank())).backward()
        optimizer.step()  # the next step is sound again


def _poison() -> float:
    return torch.inf if dist.get_rank() == 3 else 1.0


class Repeats(nn.Module):
    """A norm and a layer, both used twice in checkpoints, whose gradients autograd delivers one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.cut = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = recomputed(lambda x: self.cut(self.norm(x)), x, use_reentrant=True)
        return x.square().sum()


@pytest.mark.deep
@ON_A_MESH
def test_gradients_that_arrive_after_their_bucket_has_left_are_added() -> None:
    plan = {"norm": SequenceParallel(), "cut": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1))}
    with mesh_of_four() as mesh:
        replica, data = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
        torch.manual_seed(0)
        bare = parallelize_module(Repeats(), mesh["tp"], plan)
        model = DistributedDataParallel(copy.deepcopy(bare), device_mesh=mesh["dp"], config=SyncConfig(bucket_cap_mb=1e-4))
        with rounds_with_late_gradients() as late:
            for step in range(2):
                batch = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(10 * step + replica))
                for net in (model, bare):
                    net.zero_grad()
                    net(batch).backward()
                mean_by_hand(bare, data)
                for (name, _, grad), (_, _, wanted) in zip(parts(model.module), parts(bare), strict=True):
                    assert grad is not None
                    assert wanted is not None
                    # Late gradients are averaged alone, so the first sums have another order.
                    most = 0.0 if step else 4 * 2**-24 * wanted.abs().max()
                    assert (grad - wanted).abs().max() <= most, name
        assert late == [0]
        model.close()


@pytest.mark.deep
@pytest.mark.parametrize("strategy", some(["ddp", "zero1"], most=1))
@ON_A_MESH
def test_parts_of_unequal_sizes_train_as_without_tensor_parallelism(strategy: str) -> None:
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    with mesh_of_four() as mesh:
        replica, data = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
        nets: list[nn.Module] = []
        for is_cut in (True, True, False):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double()
            nets.append(parallelize_module(net, mesh["tp"], plan) if is_cut else net)
        bare, alone = nets[1:]
        model = DistributedDataParallel(nets[0], device_mesh=mesh["dp"], config=SyncConfig(strategy=strategy))
        made: Any = ShardedOptimizer if strategy == "zero1" else lambda cls, net, **how: cls(net.parameters(), **how)
        optimizers = [made(torch.optim.AdamW, model, lr=1e-2), adamw(bare), adamw(alone)]
        for step in range(4):
            batches = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            for net in (model, bare):
                net(batches[replica]).square().sum().backward()
            for batch in batches:
                (alone(batch).square().sum() / 2).backward()
            mean_by_hand(bare, data)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert are_same(model.module, bare)
        sizes = []
        for (name, param), whole in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            assert isinstance(param, DTensor)
            sizes.append(param.to_local().numel())
            # Sums of fp64 in another order, which four steps of AdamW by 0.01 make larger.
            torch.testing.assert_close(param.full_tensor(), whole, rtol=0.0, atol=1e-10, msg=name)
        is_first = mesh["tp"].get_local_rank() == 0
        assert sizes == ([12, 3, 9, 3] if is_first else [8, 2, 6, 3])
        model.close()


OPTIMIZERS: dict[str, tuple[str, Callable[[DistributedDataParallel], torch.optim.Optimizer]]] = {
    "SGD": ("ddp", lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
    "fused AdamW": ("ddp", lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)),
    "zero1": ("zero1", lambda model: ShardedOptimizer(torch.optim.SGD, model, lr=0.1)),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", some(OPTIMIZERS, most=1))
@ON_A_MESH
def test_a_scaler_skips_a_step_at_all_places_if_a_gradient_overflows_at_one(name: str) -> None:
    """Torch asks the other places only if the first gradient of all is cut, and this one is not."""
    strategy, make = OPTIMIZERS[name]
    with mesh_of_four() as mesh:
        torch.manual_seed(0)
        plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "2": RowwiseParallel()}
        net: Any = parallelize_module(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)), mesh["tp"], plan)
        model = DistributedDataParallel(net, device_mesh=mesh["dp"], config=SyncConfig(strategy=strategy))
        optimizer, scaler = make(model), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        weight, told = net[1].weight, list[tuple[float, bool]]()

        def in_second_step(grad: DTensor) -> DTensor:
            return on_mesh_of(weight, torch.full_like(grad.to_local(), _poison())) if len(told) == 1 else grad

        weight.register_hook(in_second_step)
        for step in range(3):
            before = [param.clone() for _, param, _ in parts(net)]
            batch = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(batch).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = [param for _, param, _ in parts(net)]
            told.append((scaler.get_scale(), all(map(torch.equal, before, after))))
        of_ranks: list[Any] = [None] * 4
        dist.all_gather_object(of_ranks, told)
        assert of_ranks == [[(4.0, False), (2.0, True), (2.0, False)]] * 4
        model.close()


def averaged(given: list[Tensor], net: nn.Module, data: dist.ProcessGroup) -> None:
    """Makes each part the mean over replicas of what they have trained, by hand."""
    for begun, (_, param, _) in zip(given, parts(net), strict=True):
        difference = begun - param
        dist.all_reduce(difference, group=data)
        param.copy_(begun.sub_(difference.div_(data.size())))


@pytest.mark.deep
@ON_A_MESH
def test_ranks_of_a_mesh_gather_few_bytes_for_a_save(tmp_path: Path) -> None:
    """Each place has one index, which the first rank of the place sends."""
    with on_mesh() as (mesh, model, _):
        optimizer = adamw(model)
        model(tokens(0, mesh["dp"].get_local_rank())).backward()
        optimizer.step()
        with gathers_of_checkpoints() as sizes:
            save_checkpoint(tmp_path / "a", model, optimizer)
        assert 0 < max(sizes) <= 300, sizes


@pytest.mark.deep
@ON_A_MESH
def test_replicas_that_train_alone_exchange_their_parts_and_are_saved(tmp_path: Path) -> None:
    outer = Outer(every=2, fragments=1, delay=0, lr=1.0, momentum=0.0, wire=None)
    with on_mesh(outer=outer) as (mesh, model, bare):
        replica, data = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
        trained = [(model, adamw(model)), (bare, adamw(bare))]
        given = [param.clone() for _, param, _ in parts(bare)]
        for step in range(5):
            for net, optimizer in trained:
                net(tokens(step, replica)).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % 2:
                averaged(given, bare, data)
            require_same_parts(model.module, bare)
        save_checkpoint(tmp_path / "a", model, trained[0][1], extra={"step": 5})
        files = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*.safetensors")}
        of_place = {"model", "outer", "replica-0", "replica-1", "optimizer-0", "optimizer-1"}
        assert files == {f"place-{place}/{name}.safetensors" for place in (0, 1) for name in of_place}
        second = DistributedDataParallel(gpt(mesh, seed=1), device_mesh=mesh["dp"], config=SyncConfig(outer=outer))
        resumed = adamw(second)
        assert load_checkpoint(tmp_path / "a", second, resumed) == {"step": 5}
        for net, optimizer in ((second, resumed), trained[1]):
            net(tokens(5, replica)).backward()
            optimizer.step()
            optimizer.zero_grad()
        averaged(given, bare, data)
        require_same_parts(second.module, bare)
        second.close()


@pytest.mark.deep
@ON_A_MESH
def test_a_replica_that_trains_alone_skips_a_step_at_all_of_its_places() -> None:
    with on_mesh(outer=Outer(every=10, fragments=1, delay=0), nonfinite="skip") as (mesh, model, bare):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        poisoned = model.module.blocks[0].mlp.up.weight
        hook = poisoned.register_hook(lambda grad: on_mesh_of(poisoned, torch.full_like(grad.to_local(), _poison())))
        model(tokens(0, mesh["dp"].get_local_rank())).backward()
        hook.remove()
        optimizer.step()
        optimizer.zero_grad()
        assert are_same(model.module, bare) == (dist.get_rank() >= 2)
        model(tokens(1, mesh["dp"].get_local_rank())).backward()
        optimizer.step()  # the next step is sound again
        optimizer.zero_grad()
        assert not are_same(model.module, bare)


@pytest.mark.deep
@ON_A_MESH
def test_a_replica_that_is_not_finite_at_one_place_is_left_out_at_all() -> None:
    """Else a parameter that all places hold would be a mean of other replicas at each of them."""
    with on_mesh(outer=Outer(every=2, fragments=1, delay=0), nonfinite="skip") as (mesh, model, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model(tokens(step, mesh["dp"].get_local_rank())).backward()
            if step == 1 and dist.get_rank() == 3:
                with torch.no_grad():
                    model.module.blocks[0].mlp.up.weight.to_local().fill_(torch.nan)
            optimizer.step()
            optimizer.zero_grad()
        for name, param in model.module.named_parameters():
            assert isinstance(param, DTensor)
            assert param.to_local().isfinite().all(), name
            if param.placements[0].is_replicate():
                first = param.to_local().clone()
                dist.broadcast(first, src=0)
                assert torch.equal(first, param.to_local()), name
        assert model.outer.report().num_left_out == 1


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [{3}, {2, 3}], ids=["at one place", "at all places"])
@ON_A_MESH
def test_frozen_values_that_differ_between_replicas_are_told_where_they_do(ranks: set[int]) -> None:
    """Other places have other parts, which are no difference between replicas."""
    with mesh_of_four() as mesh:
        net = gpt(mesh)
        alike, other = net.blocks[0].mlp.down, net.blocks[1].mlp.up
        for part in (alike, other):
            part.requires_grad_(False)
        config = SyncConfig(outer=Outer(every=1, fragments=1, delay=0))
        model = DistributedDataParallel(net, device_mesh=mesh["dp"], config=config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if dist.get_rank() in ranks:
            with torch.no_grad():
                other.weight.to_local().add_(1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                model(tokens(step, mesh["dp"].get_local_rank())).backward()
                optimizer.step()
                optimizer.zero_grad()
        told = [str(each.message) for each in caught if "frozen" in str(each.message)]
        is_told = any(rank % 2 == dist.get_rank() % 2 for rank in ranks)
        assert len(told) == is_told
        for text in told:
            assert text.startswith("replicas have different values of the frozen parameter 'blocks.1.mlp.up.weight', which ")
            assert f"\n  exchange of fragment 0, after step 1, rank {dist.get_rank()}\n" in text
        model.close()


def are_same(ours: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(parts(ours), parts(reference), strict=True)
    return all(torch.equal(param, other) for (_, param, _), (_, other, _) in pairs)


def written(model: DistributedDataParallel, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.module.up.weight.to_local().add_(1.0)


def frozen(model: DistributedDataParallel, _: torch.optim.Optimizer) -> None:
    model.module.up.weight.requires_grad_(False)


def frozen_last(model: DistributedDataParallel, _: torch.optim.Optimizer) -> None:
    list(model.module.parameters())[-1].requires_grad_(False)


def added_frozen(model: DistributedDataParallel, _: torch.optim.Optimizer) -> None:
    model.module.register_parameter("extra", nn.Parameter(torch.zeros(3), requires_grad=False))


def other_settings(_: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.2


def no_steps(_: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc]


Change = Callable[[DistributedDataParallel, torch.optim.Optimizer], None]
UNLIKE: dict[str, tuple[set[int], Change, type[UndertowError], str]] = {
    "written": ({2}, written, ReplicaMismatch, "parameter 'up.weight' has other values on rank 2 than on rank 0."),
    "frozen": ({2}, frozen, PlanMismatch, "up.weight"),
    "settings": ({2}, other_settings, PlanMismatch, " is 0.1 on rank 0, but 0.2 on rank 2"),
    "steps": ({2}, no_steps, Desync, "ranks are not in the same step."),
    "frozen at one place": (
        {0, 2},
        frozen,
        PlanMismatch,
        " on rank 0 and 'up.weight' on rank 1",
    ),
    "the last one frozen at one place": (
        {0, 2},
        frozen_last,
        PlanMismatch,
        "') is True on rank 0 and False on rank 1",
    ),
    "a frozen one added at one place": (
        {0, 2},
        added_frozen,
        PlanMismatch,
        " is 'extra' on rank 0 and missing on rank 1",
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("what", UNLIKE)
@in_ranks(4, is_fresh=True, timeout_s=240.0)  # an error on one axis cuts the other one's messages
def test_a_difference_on_some_ranks_is_told_to_all_places(what: str) -> None:
    ranks, change, error, text = UNLIKE[what]
    with on_mesh(layers, check_replicas_every=1) as (mesh, model, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start_s = time.monotonic()

        def train() -> None:
            for step in range(20):
                if step == 2 and dist.get_rank() in ranks:
                    change(model, optimizer)
                model(tokens(step, mesh["dp"].get_local_rank())).backward()
                optimizer.step()
                optimizer.zero_grad()

        assert text in text_of(error, train)
        assert time.monotonic() - start_s < 60  # else it is the stall timeout that ends a wait


@pytest.mark.deep
@in_ranks(4, is_fresh=True, timeout_s=240.0)
def test_differences_in_two_models_are_told_after_a_backward_that_reaches_them_in_other_orders() -> None:
    """Inside of it, one rank would gather the first model's difference, and another one the second model's."""
    with mesh_of_four() as mesh:
        replica = mesh["dp"].get_local_rank()
        config = SyncConfig(stall_timeout_s=20.0)
        models = [DistributedDataParallel(layers(mesh), device_mesh=mesh["dp"], config=config) for _ in range(2)]
        optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)

        def loss_of(step: int) -> Tensor:
            turned = models[::-1] if step == replica == 1 else models
            first, second = (model(tokens(step, replica)) for model in turned)
            return first + second

        loss_of(0).backward()
        optimizer.step()
        if mesh["tp"].get_local_rank() == 0:
            for model in models:
                frozen(model, optimizer)
        loss = loss_of(1)
        for _ in range(2):  # the second one hears of the first one
            loss.backward(retain_graph=True)
        assert "up.weight" in text_of(PlanMismatch, optimizer.step)


def step_that_fails(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
    weight: Tensor,
    *,
    is_faulty: bool,
    has_closure: bool = False,
) -> Any:
    """The error of a step. The gradient of `weight` comes after all messages of the other axis."""

    def backward() -> Tensor:
        loss: Tensor = net(batch)
        loss.backward()
        return loss

    def train() -> None:
        if has_closure:
            optimizer.step(backward)  # type: ignore[arg-type]  # torch's stubs want a float
        else:
            backward()
            optimizer.step()

    hook = weight.register_hook(stop) if is_faulty else None
    with pytest.raises((Stop, PeerFailed)) as caught:
        train()
    if hook is not None:
        hook.remove()
    return caught.value


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [{2}, {2, 3}], ids=["at one place", "at all places"])
@ON_A_MESH
def test_a_step_whose_backward_has_failed_on_some_ranks_is_left_out_at_all_places(ranks: set[int]) -> None:
    """Also while plans are tried, for which all places count the same synchronizations."""
    with on_mesh(layers, stall_timeout_s=30.0) as (mesh, model, bare):
        replica, data = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
        optimizer, by_hand = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, bare))
        for step in range(28):
            batch = tokens(step, replica)
            if step in (1, 6, 10, 16):  # of the last one the window of a trial begins again
                weight = model.module.embedding.weight
                step_that_fails(model, optimizer, batch, weight, is_faulty=dist.get_rank() in ranks)
            else:
                for net in (model, bare):
                    net(batch).backward()
                mean_by_hand(bare, data)
                optimizer.step()
                by_hand.step()
                require_same_parts(model.module, bare)
            optimizer.zero_grad()
            by_hand.zero_grad()
        plans: list[Any] = [None] * 4
        dist.all_gather_object(plans, model.plan.to_json())
        assert len(set(plans)) == 1


@pytest.mark.deep
@pytest.mark.parametrize("has_closure", [False, True], ids=["", "in a closure"])
@ON_A_MESH
def test_ranks_at_another_place_are_told_of_a_backward_that_has_failed_before_they_step(has_closure: bool) -> None:
    with on_mesh(stall_timeout_s=30.0) as (mesh, model, bare):
        rank, batch = dist.get_rank(), tokens(0, mesh["dp"].get_local_rank())
        optimizer, weight = torch.optim.SGD(model.parameters(), lr=0.1), model.module.embedding.weight
        error = step_that_fails(model, optimizer, batch, weight, is_faulty=rank == 2, has_closure=has_closure)
        if rank != 2:
            told = f"backward failed on rank 2.\n  synchronization 0, rank {rank}\n  The gradients of this step are incomplete"
            assert str(error).startswith(told)
        assert text_of(PhaseError, optimizer.step).startswith("the last backward or synchronization failed")
        assert are_same(model.module, bare)


@pytest.mark.deep
@pytest.mark.parametrize("num_sound", [1, 2, 3])
@ON_A_MESH
def test_a_step_is_left_out_at_all_places_if_the_first_of_its_synchronizations_has_failed_at_one(num_sound: int) -> None:
    """The other place hears of it after the second one. The later ones are sound, and mend nothing."""
    with on_mesh(stall_timeout_s=30.0) as (mesh, model, bare):
        rank, optimizer = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(tokens(0, mesh["dp"].get_local_rank()))
        is_told = rank % 2 == 0
        hook = model.module.embedding.weight.register_hook(stop) if rank == 2 else None
        with pytest.raises((Stop, PeerFailed)) if is_told else contextlib.nullcontext():
            loss.backward(retain_graph=True)
        if hook is not None:
            hook.remove()
        for _ in range(num_sound):
            loss.backward(retain_graph=True)
        text = text_of(PhaseError if is_told else PeerFailed, optimizer.step)
        assert text.startswith("the last backward or synchronization failed" if is_told else "backward failed on rank 2.")
        assert are_same(model.module, bare)


def look_at_a_gradient(model: DistributedDataParallel, _: Tensor) -> None:
    assert model.full_gradient(model.module.embedding.weight) is not None


def evaluate(model: DistributedDataParallel, batch: Tensor) -> None:
    model.eval()
    model(batch)  # without no_grad(), under which nothing is noticed
    model.train()


def look_at_the_loss(model: DistributedDataParallel, batch: Tensor) -> None:
    model(batch)


LOOKS: dict[str, tuple[set[int], Callable[[DistributedDataParallel, Tensor], None]]] = {
    "a rank at a gradient": ({0}, look_at_a_gradient),
    "a replica evaluates": ({0, 1}, evaluate),
    "a replica at its loss": ({0, 1}, look_at_the_loss),
}


def format_at_all_places(model: DistributedDataParallel) -> str:
    plans: list[Any] = [None] * 4
    dist.all_gather_object(plans, model.plan.to_json())
    assert len(set(plans)) == 1
    return str(model.plan.wires[0])


# Synchronizations of a step, by the first of them. Between the two some ranks look. Of synchronization 1 rank 0's order is sent
# then, of 8 the times of all ranks, and of 15 those of a window. That window begins again: it times 16 too, which follows no
# forward. The plan moves to int8 when 24 ends, and back when 36 does.
SYNCHRONIZATIONS = {1: 2, 8: 2, 15: 2, 23: 2, 35: 2}
FORMATS = ["None"] * 23 + ["int8"] * 12 + ["None"] * 2  # after each


@pytest.mark.deep
@pytest.mark.parametrize("what", LOOKS)
@ON_A_MESH
def test_a_look_on_some_ranks_between_two_synchronizations_moves_no_plan_there(what: str) -> None:
    """The other ranks have not heard yet that the first one was sound at all places."""
    ranks, look = LOOKS[what]
    with on_mesh(layers, wire="auto", check_replicas_every=3, stall_timeout_s=30.0) as (mesh, model, _):
        optimizer, formats = torch.optim.SGD(model.parameters(), lr=0.1), list[str]()
        number = 1
        while number <= len(FORMATS):
            batch = tokens(number, mesh["dp"].get_local_rank())
            loss, num_left = model(batch), SYNCHRONIZATIONS.get(number, 1)
            while num_left > 0:
                loss.backward(retain_graph=num_left > 1)
                formats.append(format_at_all_places(model))
                num_left, number = num_left - 1, number + 1
                if num_left > 0 and dist.get_rank() in ranks:
                    look(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        assert formats == FORMATS


@pytest.mark.deep
@ON_A_MESH
def test_a_replica_without_data_moves_to_another_plan_with_the_others() -> None:
    """No optimizer steps, so nothing is heard before the next synchronization."""
    with on_mesh(layers, stall_timeout_s=30.0) as (mesh, model, bare):
        replica, data = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
        for step in range(12):
            if replica == 0 or step == 0:
                model(tokens(step, replica)).backward()
            else:
                model.finish()
            if replica == 0 or step == 0:
                bare(tokens(step, replica)).backward()
            mean_by_hand(bare, data)
            require_same_parts(model.module, bare)
            for param in (*model.module.parameters(), *bare.parameters()):
                param.grad = None


def on_another_axis(mesh: DeviceMesh, weight: Any) -> None:
    weight.register_hook(lambda grad: DTensor.from_local(grad.to_local(), mesh["dp"], grad.placements, run_check=False))


def whole_at_each_place(mesh: DeviceMesh, weight: Any) -> None:
    def replace(param: Any) -> None:
        param.grad = DTensor.from_local(torch.zeros(param.shape), mesh["tp"], [Replicate()], run_check=False)

    weight.register_post_accumulate_grad_hook(replace)


WRONG_GRADIENTS: dict[str, tuple[Callable[[DeviceMesh, Any], None], str]] = {
    "mesh": (on_another_axis, "a gradient is on mesh axis 'dp', and its parameter on mesh axis 'tp'."),
    "placements": (whole_at_each_place, "a gradient has the placements R, and its parameter has S(0)."),
}


@pytest.mark.deep
@pytest.mark.parametrize("what", WRONG_GRADIENTS)
@in_ranks(4, is_fresh=True, timeout_s=240.0)  # an error on one rank cuts the messages of its other axis
def test_a_gradient_that_one_rank_cannot_use_is_an_error_on_every_rank(what: str) -> None:
    """Its process lives on, and so nothing else tells the others of it."""
    spoil, text = WRONG_GRADIENTS[what]
    with heard() as told, on_mesh(stall_timeout_s=60.0) as (mesh, model, _):
        rank, batch = dist.get_rank(), tokens(0, mesh["dp"].get_local_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train() -> None:
            model(batch).backward()
            optimizer.step()

        if rank == 3:
            spoil(mesh, model.module.blocks[1].mlp.up.weight)
        start_s = time.monotonic()
        with pytest.raises(ConfigError if rank == 3 else (PeerFailed, RuntimeError)) as caught:
            train()
        assert time.monotonic() - start_s < 30
        dist.barrier()
        named = f"rank 3 has failed: undertow.errors.ConfigError: {text}"
        assert text_of(PeerFailed, train).startswith(named)
        # If a rank waits in torch, the error of the transport stays, and the library tells the reason beside it.
        assert text in "\n".join([str(caught.value), *told])


def clear(param: Tensor) -> None:
    param.grad = None


@pytest.mark.deep
@in_ranks(4, is_fresh=True, timeout_s=240.0)  # an error at one place cuts the messages of the other axis
def test_a_change_of_one_rank_is_named_at_all_places_before_a_gradient_that_another_has_cleared() -> None:
    with on_mesh(stall_timeout_s=30.0) as (mesh, model, _):
        rank, replica = dist.get_rank(), mesh["dp"].get_local_rank()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight = model.module.blocks[1].mlp.up.weight

        def train(step: int) -> None:
            model(tokens(step, replica)).backward()
            optimizer.step()

        train(0)
        weight.requires_grad_(rank != 0)
        if rank == 2:
            weight.register_post_accumulate_grad_hook(clear)
        text = text_of(PlanMismatch, lambda: train(1))
        assert text.startswith("ranks disagree on the parameters.")
        assert "'blocks.1.mlp.up.weight'" in text


@pytest.mark.deep
@ON_A_MESH
def test_a_gradient_that_one_rank_clears_in_the_step_of_a_change_leaves_the_step_out_at_all_places() -> None:
    with on_mesh(stall_timeout_s=30.0) as (mesh, model, bare):
        rank, replica, data = dist.get_rank(), mesh["dp"].get_local_rank(), mesh["dp"].get_group()
        optimizer, by_hand = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, bare))

        def train(step: int) -> None:
            model(tokens(step, replica)).backward()
            optimizer.step()

        def train_both(step: int) -> None:
            train(step)
            bare(tokens(step, replica)).backward()
            mean_by_hand(bare, data)
            by_hand.step()
            require_same_parts(model.module, bare)
            for each in (optimizer, by_hand):
                each.zero_grad()

        train_both(0)
        for net in (model.module, bare):
            net.blocks[0].mlp.up.weight.requires_grad_(False)
        weight = model.module.blocks[1].mlp.up.weight
        hook = weight.register_post_accumulate_grad_hook(clear) if rank == 2 else None
        is_told = rank % 2 == 0
        text = text_of(PhaseError if is_told else PeerFailed, lambda: train(1))
        assert text.startswith("`.grad` was cleared during backward" if is_told else "backward failed on rank 2.")
        assert are_same(model.module, bare)
        if hook is not None:
            hook.remove()
        optimizer.zero_grad()
        for step in range(2, 16):  # plans are tried too
            train_both(step)


@pytest.mark.deep
@ON_A_MESH
def test_a_change_that_one_place_cannot_follow_leaves_the_step_out_at_all_places() -> None:
    with on_mesh(strategy="zero1", stall_timeout_s=30.0) as (mesh, model, _):
        rank, replica = dist.get_rank(), mesh["dp"].get_local_rank()
        optimizer = ShardedOptimizer(torch.optim.SGD, model, lr=0.1)

        def train(step: int) -> None:
            model(tokens(step, replica)).backward()
            optimizer.step()

        train(0)
        is_told = rank % 2 == 0
        if not is_told:
            optimizer.zero_grad()
        model.module.blocks[0].mlp.up.weight.requires_grad_(False)
        text = text_of(PhaseError if is_told else PeerFailed, lambda: train(1))
        assert text.startswith("the parameters have changed while sharded" if is_told else "backward failed on ranks 0, 2.")
        for step in range(2, 6):
            optimizer.zero_grad()
            train(step)
        model.wait()
        optimizer.zero_grad()
        values: list[Any] = [None] * 4
        dist.all_gather_object(values, [part.tolist() for _, part, _ in parts(model.module)])
        assert values[:2] == values[2:]  # of both replicas


class TwoNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(8), nn.LayerNorm(8)
        self.is_turned = False

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.is_turned else (self.a, self.b)
        return (first(x) + second(x)).to_local().square().sum()


def two_norms(mesh: DeviceMesh) -> nn.Module:
    """All parameters are whole at each place, and so there is one place."""
    return parallelize_module(TwoNorms(), mesh["tp"], {"a": SequenceParallel(), "b": SequenceParallel()})


@pytest.mark.deep
@ON_A_MESH
def test_a_checkpoint_has_each_replica_if_all_parameters_are_whole_at_all_places(tmp_path: Path) -> None:
    outer = Outer(every=2, fragments=1, delay=0)
    with mesh_of_four() as mesh:
        generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
        batches = [torch.randn(2, 3, 8, generator=generator) for _ in range(5)]

        def trained(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> None:
            for batch in batches:
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        model, second = (
            DistributedDataParallel(two_norms(mesh), device_mesh=mesh["dp"], config=SyncConfig(outer=outer)) for _ in range(2)
        )
        optimizer, resumed = adamw(model), adamw(second)
        trained(model, optimizer, batches[:3])
        save_checkpoint(tmp_path / "a", model, optimizer)
        files = {path.name for path in (tmp_path / "a").rglob("*.safetensors")}
        names = ("model", "outer", "replica-0", "replica-1", "optimizer-0", "optimizer-2")
        assert files == {f"{name}.safetensors" for name in names}
        load_checkpoint(tmp_path / "a", second, resumed)
        require_same_parts(model.module, second.module)
        for net, each in ((model, optimizer), (second, resumed)):
            trained(net, each, batches[3:])
        require_same_parts(model.module, second.module)
        model.close()
        second.close()


@pytest.mark.deep
@ON_A_MESH
def test_partial_gradients_in_different_orders_are_an_error_on_every_rank() -> None:
    with mesh_of_four() as mesh:
        net = two_norms(mesh)
        model = DistributedDataParallel(net, device_mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3, 8)).backward()
        optimizer.step()
        net.is_turned = dist.get_rank() == 3
        model(torch.ones(2, 3, 8)).backward()
        text = text_of(Desync, optimizer.step)
        assert text.startswith("gradients have arrived in different orders on ranks of a tensor-parallel axis")
        assert "\n  rank 2: 'b." in text
        assert "\n  rank 3: 'a." in text
        model.close()


@ON_A_MESH
def test_plain_tensors_with_a_process_group_train_as_megatron_s_do() -> None:
    """Each rank of a tensor axis has other parts, and nothing tells the library of it."""
    with mesh_of_four() as mesh:
        torch.manual_seed(mesh["tp"].get_local_rank())
        model = DistributedDataParallel(nn.Linear(4, 2), process_group=mesh["dp"].get_group())
        bare = copy.deepcopy(model.module)
        for net in (model, bare):
            net(torch.full((1, 4), 1.0 + dist.get_rank())).square().sum().backward()
        mean_by_hand(bare, mesh["dp"].get_group())
        require_same_parts(model.module, bare)
        model.close()


def ranks_of(model: Any) -> list[int]:
    return dist.get_process_group_ranks(model.process_group)


@pytest.mark.deep
@ON_A_MESH
def test_data_parallel_dimensions_are_named_as_torch_names_them() -> None:
    with mesh_of(2, 2, 1, names=("a", "b", "tp")) as mesh:
        rank, own = dist.get_rank(), {}
        for name, dims in {"a": Dims(replicate="a"), "b": Dims(shard="b"), "a, b": Dims(replicate=("a", "b"))}.items():
            sync = attach(nn.Linear(2, 1), device_mesh=mesh, dp_mesh_dims=dims)
            own[name] = ranks_of(sync)
            sync.close()
        assert own == {"a": [rank % 2, 2 + rank % 2], "b": [rank // 2 * 2, rank // 2 * 2 + 1], "a, b": [0, 1, 2, 3]}
        values = {}
        for how in ({"device_mesh": mesh["a", "b"]}, {"device_mesh": mesh, "dp_mesh_dims": Dims(replicate="a", shard="b")}):
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(2, 1), config=SyncConfig(strategy="hybrid"), **how)
            optimizer = ShardedOptimizer(torch.optim.SGD, model, lr=1.0)
            model(torch.full((1, 2), float(rank))).sum().backward()
            optimizer.step()
            values[len(how)] = model.module.weight.detach().clone()
            assert torch.equal(values[len(how)], values[1])
            model.close()
        torch.manual_seed(0)
        assert torch.equal(values[2], nn.Linear(2, 1).weight - 1.5)  # the mean of 0 to 3


@pytest.mark.deep
@ON_A_MESH
def test_a_model_is_wrapped_over_the_whole_mesh_by_names() -> None:
    with mesh_of_four() as mesh:
        model = DistributedDataParallel(gpt(mesh), device_mesh=mesh, dp_mesh_dims=Dims(replicate="dp"))
        assert ranks_of(model) == [dist.get_rank() % 2, 2 + dist.get_rank() % 2]
        bare = gpt(mesh)
        for net in (model, bare):
            net(tokens(0, mesh["dp"].get_local_rank())).backward()
        mean_by_hand(bare, mesh["dp"].get_group())
        require_same_parts(model.module, bare)
        model.close()


@pytest.mark.deep
@ON_A_MESH
def test_a_checkpoint_of_torch_takes_the_model_and_its_optimizer(tmp_path: Path) -> None:
    with on_mesh() as (mesh, model, other):
        replica, trained = mesh["dp"].get_local_rank(), adamw(model)
        for step in range(2):
            model(tokens(step, replica)).backward()
            trained.step()
            trained.zero_grad()
        names, states = get_state_dict(model.module, trained)
        checkpoint.save({"model": names, "optimizer": states}, checkpoint_id=tmp_path)
        resumed = adamw(other)
        found = dict(zip(("model", "optimizer"), get_state_dict(other, resumed), strict=True))
        checkpoint.load(found, checkpoint_id=tmp_path)
        set_state_dict(other, resumed, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        second = DistributedDataParallel(other, device_mesh=mesh["dp"])
        for net, optimizer in ((model, trained), (second, resumed)):
            net(tokens(5, replica)).backward()
            optimizer.step()
        require_same_parts(model.module, other)
        second.close()


def rank_3(value: Any, other: Any) -> Any:
    return other if dist.get_rank() == 3 else value


def wrong_placements(mesh: DeviceMesh) -> Callable[[], object]:
    net = nn.Linear(4, 4, bias=False)
    placement = rank_3([Shard(0)], [Shard(1)]) if mesh["dp"].get_local_rank() else [Shard(0)]
    # Rank 2 takes part in its distribution: only rank 3 describes it differently.
    local = torch.zeros(2, 4)
    net.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], placement, run_check=False))
    return lambda: attach(net, device_mesh=mesh["dp"])


def wrong_shape(mesh: DeviceMesh) -> Callable[[], object]:
    net = nn.Linear(4, 4, bias=False)
    local = torch.zeros(rank_3(2, 3), 4)
    net.weight = nn.Parameter(DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False, shape=(5, 4), stride=(4, 1)))
    return lambda: attach(net, device_mesh=mesh["dp"])


def other_names(_: DeviceMesh) -> Callable[[], object]:
    name = rank_3("cut", "split")
    mesh = kept_mesh(2, 2, names=("dp", name))
    net = parallelize_module(nn.Linear(4, 4), mesh[name], ColwiseParallel())
    return lambda: attach(net, device_mesh=mesh["dp"])


def other_at_a_place(mesh: DeviceMesh) -> Callable[[], object]:
    net: Any = gpt(mesh)
    if mesh["tp"].get_local_rank() == 0:
        net.extra = nn.Linear(2, 2)
    return lambda: attach(net, device_mesh=mesh["dp"])


def other_sizes(mesh: DeviceMesh) -> Callable[[], object]:
    net: Any = gpt(mesh)
    net.extra = nn.Linear(2, 2 + mesh["tp"].get_local_rank(), bias=False)
    return lambda: attach(net, device_mesh=mesh["dp"])


def gradient_elsewhere(mesh: DeviceMesh) -> Callable[[], object]:
    """A hook of the user's gives a gradient the placements of its parameter, over another axis."""
    net = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    net.weight.register_hook(lambda grad: DTensor.from_local(grad.to_local(), mesh["dp"], grad.placements, run_check=False))
    model = DistributedDataParallel(net, device_mesh=mesh["dp"])
    return lambda: model(torch.ones(1, 4)).sum().backward()


def wrong_axis(mesh: DeviceMesh) -> Callable[[], object]:
    return lambda: DistributedDataParallel(gpt(mesh), device_mesh=mesh["tp"])


def no_axis(mesh: DeviceMesh) -> Callable[[], object]:
    return lambda: attach(gpt(mesh))


def whole_mesh(mesh: DeviceMesh) -> Callable[[], object]:
    return lambda: attach(gpt(mesh), device_mesh=mesh, config=SyncConfig(strategy="hybrid"))


def parallelized_late(mesh: DeviceMesh) -> Callable[[], object]:
    model = DistributedDataParallel(gpt(), device_mesh=mesh["dp"])
    parallelized(model.module, mesh["tp"])
    return lambda: model(tokens(0, 0))


def fully_sharded(mesh: DeviceMesh) -> Callable[[], object]:
    net = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    return lambda: attach(net, device_mesh=mesh["dp"])


def outer_on_rows(mesh: DeviceMesh) -> Callable[[], object]:
    cube = kept_mesh(2, 1, 2, names=("rows", "dp", "tp"))
    config = SyncConfig(outer=Outer(every=2))
    return lambda: attach(parallelized(gpt(), cube["tp"]), device_mesh=cube["rows", "dp"], config=config)


REFUSED: dict[str, tuple[Callable[[DeviceMesh], Callable[[], object]], type[Exception], str]] = {
    "placements": (
        wrong_placements,
        PlanMismatch,
        "placements of parameter 0 ('weight') is ['S(0)'] on rank 1 and ['S(1)'] on rank 3",
    ),
    "shape": (wrong_shape, PlanMismatch, "shape of parameter 0 ('weight') is [2, 4] on rank 1 and [3, 4] on rank 3"),
    "names": (
        other_names,
        PlanMismatch,
        "mesh of parameter 0 ('weight') is {'cut': 2} on rank 1 and {'split': 2} on rank 3",
    ),
    "names at places": (other_at_a_place, PlanMismatch, " is 'extra.weight' on rank 0 and missing on rank 1"),
    "sizes at places": (other_sizes, PlanMismatch, "('extra.weight') is [2, 2] on rank 0 and [3, 2] on rank 1"),
    "gradient": (
        gradient_elsewhere,
        ConfigError,
        "a gradient is on mesh axis 'dp', and its parameter on mesh axis 'tp'.",
    ),
    "axis": (wrong_axis, ConfigError, "the mesh axis 'tp' is not a data-parallel axis: ranks "),
    "no axis": (no_axis, ConfigError, 'Give the data-parallel axis of the mesh, such as device_mesh=mesh["dp"], and'),
    "whole mesh": (whole_mesh, ConfigError, "the mesh axis 'tp' is not a data-parallel axis: ranks "),
    "dims": (
        lambda mesh: lambda: attach(gpt(mesh), device_mesh=mesh, dp_mesh_dims=Dims(replicate="tp")),
        ConfigError,
        "the mesh axis 'tp' is not a data-parallel axis: ranks ",
    ),
    "name": (
        lambda mesh: lambda: attach(gpt(mesh), device_mesh=mesh, dp_mesh_dims=Dims(replicate="pd")),
        ConfigError,
        "the mesh has no dimension 'pd'.\n  dp_mesh_dims\n  Known: dp, tp.",
    ),
    "no mesh": (lambda _: lambda: attach(gpt(), dp_mesh_dims=Dims(replicate="dp")), ConfigError, "and no mesh is given."),
    "two of one kind": (
        lambda mesh: lambda: attach(gpt(), device_mesh=mesh["dp", "tp"], dp_mesh_dims=Dims(replicate=("dp", "tp"), shard="dp")),
        ConfigError,
        "dp_mesh_dims has several dimensions of one kind, and one of the other",
    ),
    "no dims": (
        lambda mesh: lambda: attach(gpt(mesh), device_mesh=mesh, dp_mesh_dims="dp"),
        WrongType,
        "dp_mesh_dims must be a torch.distributed.fsdp.DataParallelMeshDims, got str.",
    ),
    "late": (parallelized_late, ConfigError, "the model was parallelized after it was wrapped: parameter 'embedding.weight'"),
    "fully_shard": (fully_sharded, ConfigError, "the model is managed by torch's fully_shard or replicate"),
    "outer": (outer_on_rows, ConfigError, "outer synchronization has two data-parallel axes, and parameters are DTensors"),
    "outer axis": (
        lambda mesh: lambda: attach(gpt(mesh), device_mesh=mesh["tp"], config=SyncConfig(outer=Outer(every=2))),
        ConfigError,
        "the mesh axis 'tp' is not a data-parallel axis: ranks ",
    ),
}


@pytest.mark.parametrize("what", some(REFUSED, most=5))
@ON_A_MESH
def test_each_mistake_is_the_same_error_on_every_rank(what: str) -> None:
    """Also on those of the other place, which would hang in the next collective of the tensor axis."""
    make, error, text = REFUSED[what]
    with mesh_of_four() as mesh:
        assert text in text_of(error, make(mesh))
