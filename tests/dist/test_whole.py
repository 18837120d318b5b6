"""Optimizers that need whole matrices, in shards: one rank updates all of a parameter."""

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.levels import some
from support.naive import wrapped
from support.ranks import Ranks, in_ranks
from support.sharded import mesh_of
from undertow import (
    CheckpointError,
    ConfigError,
    DistributedDataParallel,
    PlanMismatch,
    ShardedOptimizer,
    SyncConfig,
    clip_grad_norm_,
    load_checkpoint,
    save_checkpoint,
)

MODEL = (5, 24, 7, 40, 3)


class OfWholeParameters(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.update(param.grad, param, self.state[param]), alpha=group["lr"])

    def update(self, grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lamb(OfWholeParameters):
    """As LAMB: the update of a parameter is scaled by norms of all of it."""

    def update(self, grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum"] = torch.zeros_like(param)
            state["scale"] = torch.ones(1)
        state["momentum"].mul_(0.9).add_(grad)
        ratio = param.norm() / (state["momentum"].norm() + 1e-6)
        state["scale"].mul_(0.5).add_(ratio)
        return state["momentum"] * state["scale"]


class RowsAndColumns(OfWholeParameters):
    """Its state has a number for each row, and is of no parameter's shape."""

    def update(self, grad: Tensor, param: Tensor, state: dict[str, Any]) -> Tensor:
        matrix = grad.reshape(param.shape[0], -1)
        rows = state.setdefault("rows", torch.zeros(param.shape[0] + 1))
        rows[1:] += matrix.square().mean(1)
        rows[0] += 1
        scaled = matrix / (rows[1:, None].sqrt() + 1e-3)
        return scaled.view(param.shape)


def layers() -> nn.Module:
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for first, last in itertools.pairwise(MODEL):
        modules += [nn.Linear(first, last), nn.Tanh()]
    return nn.Sequential(*modules)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(6, MODEL[0], generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank)).square().mean()


def matrices_and_rest(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    params = list(module.parameters())
    return [param for param in params if param.dim() == 2], [param for param in params if param.dim() != 2]


def two_optimizers(model: DistributedDataParallel, cls: type[torch.optim.Optimizer], **settings: Any) -> list[ShardedOptimizer]:
    hidden, rest = matrices_and_rest(model.module)
    return [
        ShardedOptimizer(cls, model, hidden, whole=True, **settings),
        ShardedOptimizer(torch.optim.AdamW, model, rest, lr=0.01),
    ]


def two_plain(bare: nn.Module, cls: type[torch.optim.Optimizer], **settings: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of `two_optimizers`, without shards."""
    hidden, rest = matrices_and_rest(bare)
    return [cls(hidden, **settings), torch.optim.AdamW(rest, lr=0.01)]


MAKES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Muon": (torch.optim.Muon, {"lr": 0.02, "weight_decay": 0.1}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "Lamb": (Lamb, {}),
    "rows": (RowsAndColumns, {}),
}


def reference_steps(
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    steps: range,
    *,
    max_norm: float | None = None,
    num_ranks: int | None = None,
) -> None:
    """Trains on all ranks' batches in one process, with gradients added in rank order."""
    num_ranks = dist.get_world_size() if num_ranks is None else num_ranks
    params = [param for param in module.parameters() if param.requires_grad]
    for step in steps:
        grads = []
        for rank in range(num_ranks):
            module.zero_grad()
            loss_of(module, step, rank).backward()
            grads.append([param.grad.clone() for param in params])
        module.zero_grad()
        for param, *of_ranks in zip(params, *grads, strict=True):
            total = of_ranks[0].clone()
            for grad in of_ranks[1:]:
                total += grad
            param.grad = total / num_ranks
        if max_norm is not None:
            powers = sum(param.grad.double().square().sum() for param in params)
            scale = (max_norm / (powers.sqrt().float() + 1e-6)).clamp(max=1.0)
            for param in params:
                param.grad.mul_(scale)
        for optimizer in optimizers:
            optimizer.step()


def sharded_steps(model: DistributedDataParallel, optimizers: list[ShardedOptimizer], steps: range, **clip: Any) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
        if clip:
            clip_grad_norm_(model, **clip)
        for optimizer in optimizers:
            optimizer.step()


def require_same(model: nn.Module, bare: nn.Module) -> None:
    for (name, param), expected in zip(model.named_parameters(), bare.parameters(), strict=True):
        assert torch.equal(param, expected), name


@in_ranks(1, 2, 3)
@pytest.mark.parametrize("name", some(MAKES, most=2))
@pytest.mark.parametrize("strategy", some(["zero1", "zero2"], most=1))
def test_whole_parameters_train_as_without_shards(name: str, strategy: str) -> None:
    cls, settings = MAKES[name]
    bare = layers()
    with wrapped(copy.deepcopy(bare), strategy=strategy, reduction="ordered", bucket_cap_mb=0.002) as model:
        optimizers = two_optimizers(model, cls, **settings)
        sharded_steps(model, optimizers, range(4))
        reference_steps(bare, two_plain(bare, cls, **settings), range(4))
        model.wait()
        require_same(model.module, bare)


class CountsInItsGroup(torch.optim.SGD):
    """As schedule-free optimizers do: ranks would not agree on the count, and a checkpoint would lose it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


@in_ranks(2)
def test_a_step_that_changes_settings_is_an_error() -> None:
    with contextlib.closing(DistributedDataParallel(layers())) as model:
        optimizer = ShardedOptimizer(CountsInItsGroup, model, lr=0.1, whole=True)
        loss_of(model, 0, dist.get_rank()).backward()
        text = text_of(ConfigError, optimizer.step)
        assert text.startswith("CountsInItsGroup cannot be sharded: its step changes the settings of a parameter group.")


class KeepsTensorsByName(torch.optim.SGD):
    """As some distributed optimizers do: a dict in the state, with tensors."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["factors"] = {"left": param.new_zeros(1)}
        return loss


@in_ranks(2)
def test_a_state_that_no_other_rank_can_be_sent_is_the_same_error_on_every_rank() -> None:
    with contextlib.closing(DistributedDataParallel(layers())) as model:
        optimizer = ShardedOptimizer(KeepsTensorsByName, model, lr=0.1, whole=True)
        optimizer.zero_grad()
        loss_of(model, 0, dist.get_rank()).backward()
        optimizer.step()
        text = text_of(ConfigError, optimizer.state_dict)
        assert re.match(r"state\['[a-z0-9.]+'\]\['factors'\] is of type dict, which cannot go to another rank\.", text)


@in_ranks(2)
def test_one_norm_clips_the_gradients_of_all_optimizers() -> None:
    bare = layers()
    with wrapped(copy.deepcopy(bare), strategy="zero1", reduction="ordered") as model:
        hidden, rest = matrices_and_rest(model.module)
        optimizers = [
            ShardedOptimizer(Lamb, model, hidden, whole=True),
            ShardedOptimizer(torch.optim.SGD, model, rest, lr=0.01),
        ]
        sharded_steps(model, optimizers, range(3), max_norm=0.01)
        bare_hidden, bare_rest = matrices_and_rest(bare)
        reference_steps(bare, [Lamb(bare_hidden), torch.optim.SGD(bare_rest, lr=0.01)], range(3), max_norm=0.01)
        model.wait()
        for param, expected in zip(model.module.parameters(), bare.parameters(), strict=True):
            # The norm adds the squares in another order: an ulp of the scale, over three steps.
            torch.testing.assert_close(param, expected, rtol=0, atol=4 * torch.finfo().eps)


@pytest.fixture(scope="module")
def pools(two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks) -> Iterator[dict[int, Ranks]]:
    with Ranks(1) as one_rank:
        yield {1: one_rank, 2: two_ranks, 3: three_ranks, 4: four_ranks}


def saved(name: str, path: Path) -> None:
    cls, settings = MAKES[name]
    with wrapped(layers(), strategy="zero1", reduction="ordered") as model:
        optimizers = two_optimizers(model, cls, **settings)
        sharded_steps(model, optimizers, range(2))
        save_checkpoint(path, model, optimizers)


def resumed(name: str, path: Path) -> None:
    """Continues from the checkpoint of two ranks, as one process does that is not interrupted."""
    cls, settings = MAKES[name]
    bare = layers()
    plain = two_plain(bare, cls, **settings)
    reference_steps(bare, plain, range(2), num_ranks=2)
    reference_steps(bare, plain, range(2, 4))
    with wrapped(layers(), strategy="zero1", reduction="ordered", bucket_cap_mb=0.001) as model:
        optimizers = two_optimizers(model, cls, **settings)
        with pytest.raises(CheckpointError, match="optimizers in the checkpoint: 2; given: 1"):
            load_checkpoint(path, model, optimizers[0])
        load_checkpoint(path, model, optimizers)
        sharded_steps(model, optimizers, range(2, 4))
        model.wait()
        require_same(model.module, bare)


@pytest.mark.parametrize(
    ("name", "num_ranks"), some([("Lamb", 3), ("Muon", 1), ("Adafactor", 4), ("rows", 2), ("rows", 3)], most=1)
)
def test_a_checkpoint_of_two_ranks_resumes_bit_for_bit_on_any_number(
    pools: dict[int, Ranks], tmp_path: Path, name: str, num_ranks: int
) -> None:
    pools[2].run(saved, name, tmp_path / "run")
    pools[num_ranks].run(resumed, name, tmp_path / "run")


@in_ranks(2)
@pytest.mark.parametrize("name", some(MAKES, most=1))
def test_state_dicts_are_whole_and_plain(name: str) -> None:
    cls, settings = MAKES[name]
    bare = layers()
    with wrapped(copy.deepcopy(bare), strategy="zero1", reduction="ordered") as model:
        optimizers = two_optimizers(model, cls, **settings)
        sharded_steps(model, optimizers, range(2))
        plain = two_plain(bare, cls, **settings)
        reference_steps(bare, plain, range(2))
        for optimizer, expected in zip(optimizers, plain, strict=True):
            found, wanted = optimizer.state_dict()["state"], expected.state_dict()["state"]
            assert found.keys() == wanted.keys()
            for number, state in wanted.items():
                assert found[number].keys() == state.keys()
                for key, value in state.items():
                    assert torch.equal(torch.as_tensor(found[number][key]), torch.as_tensor(value)), (number, key)


@in_ranks(2)
def test_parameters_that_no_optimizer_has_are_named() -> None:
    with wrapped(layers(), strategy="zero1") as model:
        hidden, _ = matrices_and_rest(model.module)
        optimizer = ShardedOptimizer(Lamb, model, hidden, whole=True)
        loss_of(model, 0, dist.get_rank()).backward()
        text = text_of(ConfigError, optimizer.step)
        assert text.startswith("no ShardedOptimizer updates '0.bias', '2.bias', '4.bias'")


@in_ranks(2)
def test_a_parameter_belongs_to_one_optimizer() -> None:
    with wrapped(layers(), strategy="zero1") as model:
        hidden, _ = matrices_and_rest(model.module)
        kept = ShardedOptimizer(Lamb, model, hidden, whole=True)
        text = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.AdamW, model, lr=0.01))
        assert text.startswith("a ShardedOptimizer of Lamb updates '0.weight', '2.weight', '4.weight'")
        del kept


@in_ranks(2)
def test_a_parameter_added_to_a_second_optimizer_is_named() -> None:
    with wrapped(layers(), strategy="zero1") as model:
        optimizers = two_optimizers(model, Lamb)
        sharded_steps(model, optimizers, range(1))
        optimizers[1].add_param_group({"params": [model.module[2].weight]})
        for _ in range(2):
            text = text_of(ConfigError, optimizers[1].step)
            assert text.startswith("a ShardedOptimizer of Lamb updates '2.weight' already.")


def moved(param: Tensor, optimizers: list[Any], *, to: int) -> None:
    (group,) = optimizers[1 - to].param_groups
    group["params"] = [each for each in group["params"] if each is not param]
    optimizers[1 - to].state.pop(param, None)
    optimizers[to].param_groups[0]["params"].append(param)


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize(("name", "first"), some([("2.weight", 0), ("2.bias", 1)], most=1))
def test_a_parameter_that_moves_to_another_optimizer_and_back_is_updated_by_that_one(name: str, first: int) -> None:
    bare = layers()
    with wrapped(copy.deepcopy(bare), strategy="zero1", reduction="ordered") as model:
        optimizers = two_optimizers(model, Lamb)
        plain = two_plain(bare, Lamb)
        for step, owner in enumerate([first, 1 - first, first]):
            if step:
                moved(model.module.get_parameter(name), optimizers, to=owner)
                moved(bare.get_parameter(name), plain, to=owner)
            sharded_steps(model, optimizers, range(step, step + 1))
            reference_steps(bare, plain, range(step, step + 1))
        model.wait()
        require_same(model.module, bare)


@in_ranks(2)
def test_ranks_that_make_their_optimizers_in_another_order_are_told() -> None:
    with wrapped(layers(), strategy="zero1") as model:
        hidden, rest = matrices_and_rest(model.module)
        made = [(Lamb, hidden), (torch.optim.AdamW, rest)]
        cls, params = made[dist.get_rank()]
        text = text_of(PlanMismatch, lambda: ShardedOptimizer(cls, model, params, whole=cls is Lamb, lr=0.01))
        assert text.startswith("ranks disagree on the settings")


@in_ranks(2)
def test_a_vector_given_to_muon_is_its_own_error_on_every_rank() -> None:
    with wrapped(layers(), strategy="zero1") as model, pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        ShardedOptimizer(torch.optim.Muon, model, lr=0.01)


@in_ranks(2)
def test_a_vector_added_to_muon_later_is_its_own_error_on_every_rank() -> None:
    with wrapped(nn.Linear(4, 4), strategy="zero1") as model:
        weight, bias = model.module.parameters()
        optimizers = [ShardedOptimizer(torch.optim.Muon, model, [weight]), ShardedOptimizer(torch.optim.SGD, model, [bias])]
        moved(bias, optimizers, to=0)
        model(torch.ones(2, 4)).sum().backward()
        for _ in range(2):
            with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
                optimizers[0].step()


@in_ranks(2)
@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Muon])
def test_known_classes_that_need_whole_parameters_get_them(cls: type[torch.optim.Optimizer]) -> None:
    with wrapped(nn.Linear(4, 4, bias=False), strategy="zero1") as model:
        optimizer = ShardedOptimizer(cls, model, lr=0.01)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert [bucket.owners for bucket in model.plan.buckets] == [(0,)]


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("wire", some(["int8", "bfloat16"], most=1))
def test_formats_keep_ranks_equal(wire: str) -> None:
    with wrapped(layers(), strategy="zero1", wire=wire, param_wire=wire) as model:
        optimizers = two_optimizers(model, Lamb)
        sharded_steps(model, optimizers, range(4))
        model.wait()
        for name, param in model.module.named_parameters():
            of_ranks = [torch.empty_like(param) for _ in range(dist.get_world_size())]
            dist.all_gather(of_ranks, param.detach().contiguous())
            assert all(torch.equal(of_ranks[0], other) for other in of_ranks), name


@pytest.mark.deep
@in_ranks(2)
def test_a_parameter_that_is_frozen_for_a_while_moves_owners_and_keeps_its_state() -> None:
    bare = layers()
    with wrapped(copy.deepcopy(bare), strategy="zero1", reduction="ordered") as model:
        optimizers = two_optimizers(model, Lamb)
        plain = two_plain(bare, Lamb)
        for step in range(6):
            for module in (model.module, bare):
                module[2].weight.requires_grad_(step not in (2, 3))
            sharded_steps(model, optimizers, range(step, step + 1))
            reference_steps(bare, plain, range(step, step + 1))
        model.wait()
        require_same(model.module, bare)


@pytest.mark.deep
@in_ranks(2)
def test_a_step_that_is_not_finite_is_skipped_by_all_optimizers() -> None:
    with wrapped(layers(), strategy="zero1", nonfinite="skip") as model:
        optimizers = two_optimizers(model, Lamb)
        sharded_steps(model, optimizers, range(2))
        model.wait()
        before = copy.deepcopy(model.module)
        states = copy.deepcopy([optimizer.state_dict() for optimizer in optimizers])
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = batch(2, dist.get_rank())
        if dist.get_rank() == 1:
            x[0, 0] = float("nan")
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.wait()
        require_same(model.module, before)
        for optimizer, expected in zip(optimizers, states, strict=True):
            for number, state in expected["state"].items():
                for key, value in state.items():
                    found = optimizer.state_dict()["state"][number][key]
                    assert torch.equal(torch.as_tensor(found), torch.as_tensor(value))


@pytest.mark.deep
@in_ranks(4)
def test_rows_of_a_mesh_own_whole_parameters() -> None:
    bare = layers()
    with mesh_of(2, 2) as mesh:
        config = SyncConfig(strategy="hybrid", reduction="ordered")
        model = DistributedDataParallel(copy.deepcopy(bare), device_mesh=mesh, config=config)
        with contextlib.closing(model):
            optimizers = two_optimizers(model, Lamb)
            sharded_steps(model, optimizers, range(3))
            model.wait()
            reference_steps(bare, two_plain(bare, Lamb), range(3))
            for param, expected in zip(model.module.parameters(), bare.parameters(), strict=True):
                # rows are added first: another order of additions
                torch.testing.assert_close(param, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.deep
@in_ranks(4)
def test_ranks_without_a_matrix_accumulate_and_step_with_the_others() -> None:
    """Two matrices for four ranks, of which one is most of the model."""
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(MODEL[0], 90), nn.Tanh(), nn.Linear(90, 3))
    with wrapped(copy.deepcopy(bare), strategy="zero1", reduction="ordered") as model:
        optimizers = two_optimizers(model, torch.optim.Muon, lr=0.02)
        for step in range(3):
            with model.no_sync():
                loss_of(model, 10 + step, dist.get_rank()).backward()
            loss_of(model, step, dist.get_rank()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        owners = [bucket.owners for bucket in model.plan.buckets if bucket.owners is not None]
        assert 1 <= len({owner for ranks in owners for owner in ranks}) <= 2
        model.wait()
        hidden, rest = matrices_and_rest(bare)
        plain = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
        for step in range(3):
            of_ranks = []
            for rank in range(4):
                bare.zero_grad()
                for number in (10 + step, step):
                    loss_of(bare, number, rank).backward()
                of_ranks.append([param.grad.clone() for param in bare.parameters()])
            for param, first, *others in zip(bare.parameters(), *of_ranks, strict=True):
                param.grad = sum(others, start=first) / 4
            for optimizer in plain:
                optimizer.step()
        require_same(model.module, bare)


class LooksAtItsFirstParameter(torch.optim.SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.dtype = self.param_groups[0]["params"][0].dtype


@in_ranks(2)
def test_a_rank_without_a_parameter_makes_no_optimizer_of_the_users_class() -> None:
    with wrapped(nn.Linear(4, 3, bias=False), strategy="zero1") as model:
        optimizer = ShardedOptimizer(LooksAtItsFirstParameter, model, whole=True, lr=0.5)
        expected = model.module.weight.detach() - 2 * 0.5 * torch.ones(3, 4)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        model.wait()
        assert torch.equal(model.module.weight, expected)
        assert len(optimizer.state_dict()["param_groups"]) == 1


@in_ranks(2)
def test_muon_without_nesterov_does_not_normalize_the_momentum_of_narrow_parameters() -> None:
    """torch's Muon normalizes a bf16 update in place, which is the momentum then."""
    with wrapped(nn.Linear(4, 4, bias=False).bfloat16(), strategy="zero1", reduction="ordered") as model:
        optimizer = ShardedOptimizer(torch.optim.Muon, model, lr=0.02, nesterov=False, momentum=0.5)
        momentum = torch.zeros(4, 4)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 4), 1.0 + 2 * dist.get_rank(), dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            momentum.lerp_(torch.full((4, 4), 2.0), 0.5)  # the mean gradient
        (state,) = optimizer.state_dict()["state"].values()
        assert torch.equal(state["momentum_buffer"], momentum)
