"""The state and the groups of a sharded optimizer can be changed as a plain one's, or an error says why not."""

import contextlib
import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.errors import text_of
from support.levels import some
from support.ranks import in_ranks
from support.sharded import MLP, ORDERED, Parameters, one_step, parameters, require_equal, stepped, trained
from undertow import CheckpointError, ConfigError, DistributedDataParallel, ShardedOptimizer, load_checkpoint, save_checkpoint

Edit = Callable[[Any, list[nn.Parameter]], object]


def number_of(optimizer: Any, param: Tensor) -> int:
    return next(index for index, each in enumerate(optimizer.param_groups[0]["params"]) if each is param)


def take_out(optimizer: Any, params: list[nn.Parameter]) -> None:
    del optimizer.param_groups[0]["params"][number_of(optimizer, params[1])]


def put_back(optimizer: Any, params: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"].append(params[1])


def to_a_group_of_its_own(optimizer: Any, params: list[nn.Parameter]) -> None:
    take_out(optimizer, params)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [params[1]], "lr": 0.001})


def two_groups_anew(optimizer: Any, params: list[nn.Parameter]) -> None:
    group = optimizer.param_groups[0]
    optimizer.param_groups = [{**group, "params": params[:2], "lr": 0.001}, {**group, "params": params[2:]}]


def fresh(param: Tensor) -> dict[str, Tensor]:
    return {"step": torch.tensor(2.0), "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.ones_like(param)}


# What happens to an optimizer, by the step before which it happens.
EDITS: dict[str, dict[int, Edit]] = {
    "cleared": {3: lambda it, _: it.state.clear(), 5: lambda it, _: it.state.clear()},
    "cleared before the first step": {0: lambda it, _: it.state.clear()},
    "exchanged for an empty one": {3: lambda it, _: setattr(it, "state", defaultdict(dict))},
    "exchanged for another": {
        3: lambda it, params: setattr(it, "state", defaultdict(dict, {param: fresh(param) for param in params[1:]}))
    },
    "one deleted": {3: lambda it, params: it.state.__delitem__(params[0])},
    "one popped": {3: lambda it, params: it.state.pop(params[0])},
    "one given": {3: lambda it, params: it.state.__setitem__(params[0], fresh(params[0]))},
    "one given before the first step": {0: lambda it, params: it.state.__setitem__(params[0], fresh(params[0]))},
    "all given anew": {3: lambda it, _: [it.state.__setitem__(param, state) for param, state in it.state.items()]},
    "an entry set": {3: lambda it, params: it.state[params[0]].update(step=torch.tensor(0.0))},
    "an entry given by another": {
        3: lambda it, params: it.state[params[0]].__setitem__("exp_avg", it.state[params[0]]["exp_avg_sq"].clone())
    },
    "entries set to whole tensors": {
        3: lambda it, params: [
            it.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.ones_like(param)) for param in params
        ],
        5: lambda it, params: it.state[params[1]].__setitem__("exp_avg", torch.ones_like(params[1])),
    },
    "entries set to whole tensors of other strides": {
        3: lambda it, params: it.state[params[0]].update(exp_avg=torch.arange(params[0].numel()).view(params[0].T.shape).T / 100)
    },
    "entries of one that has none": {
        3: lambda it, params: (it.state.pop(params[0]), it.state[params[0]].update(fresh(params[0])))
    },
    "a parameter taken out and put back": {2: take_out, 4: put_back},
    "a parameter taken out, and the state cleared": {2: take_out, 4: lambda it, _: it.state.clear()},
    "a parameter moved to another group": {3: to_a_group_of_its_own},
    "a group popped, and added again": {
        2: to_a_group_of_its_own,
        4: lambda it, _: it.param_groups.pop(),
        5: lambda it, params: it.add_param_group({"params": [params[1]], "lr": 0.002}),
    },
    "new groups": {0: two_groups_anew, 3: lambda it, _: it.param_groups.reverse()},
}


def edited(name: str, strategy: str) -> Parameters:
    def each(ddp: Any, optimizer: Any, step: int) -> None:
        edit = EDITS[name].get(step)
        if edit is not None:
            edit(optimizer, list(ddp.module.parameters()))
        one_step(ddp, optimizer, step)

    return trained(MLP, strategy, "AdamW", num_steps=7, each=each, **ORDERED)


@in_ranks(2)
@pytest.mark.parametrize("name", some(EDITS, most=1))
def test_a_change_of_state_or_groups_does_what_it_does_to_a_plain_optimizer(name: str) -> None:
    require_equal(edited(name, "ddp"), edited(name, "zero1"))


@in_ranks(2)
def test_a_cleared_state_is_empty_in_state_dicts_too() -> None:
    with stepped(2, optimizer="AdamW", **ORDERED) as (_, opt):
        opt.state.clear()
        assert opt.state_dict()["state"] == {}


# A step moves a bfloat16 parameter by less than half of its last place.
@pytest.mark.deep
@in_ranks(2)
def test_a_cleared_state_leaves_the_wide_values_of_16_bit_parameters() -> None:
    with contextlib.closing(DistributedDataParallel(nn.Linear(4, 4, bias=False).bfloat16())) as ddp:
        opt = ShardedOptimizer(torch.optim.SGD, ddp, lr=2.0**-12, momentum=0.5)
        with torch.no_grad():
            ddp.module.weight.fill_(1.0)
        for _ in range(2**6):
            opt.zero_grad()
            ddp(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
            opt.step()
            opt.state.clear()
        assert torch.equal(parameters(ddp)["module.weight"], torch.full((4, 4), 1.0 - 2.0**-6, dtype=torch.bfloat16))


@in_ranks(2)
def test_a_state_has_this_ranks_elements_which_can_be_changed_in_place() -> None:
    with stepped(2, optimizer="AdamW", **ORDERED) as (ddp, opt):
        weight = ddp.module[0].weight
        part = opt.owned_parts()[weight]
        if part.numel:
            assert opt.state[weight]["exp_avg"].shape == (part.numel,)
            opt.state[weight]["exp_avg"].fill_(3.0)
        number = number_of(opt, weight)
        assert torch.equal(opt.state_dict()["state"][number]["exp_avg"], torch.full_like(weight, 3.0))


@in_ranks(2)
def test_a_loaded_state_of_no_parameter_is_refused_by_name() -> None:
    with stepped(1, optimizer="AdamW", **ORDERED) as (_, opt):
        given = opt.state_dict()
        assert text_of(CheckpointError, lambda: opt.load_state_dict({**given, "state": {**given["state"], "count": 1}})) == (
            "the state has an entry for 'count', which is not a parameter.\n"
            "  ShardedOptimizer.load_state_dict\n"
            "  Remove it: a sharded optimizer keeps state for parameters only."
        )


@in_ranks(2)
def test_a_parameter_that_the_model_does_not_have_is_refused_in_the_next_step() -> None:
    with stepped(1, **ORDERED) as (ddp, opt):
        opt.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
        text = text_of(ConfigError, lambda: one_step(ddp, opt, 1))
        assert text.startswith(f"parameter {len(list(ddp.parameters()))} of the optimizer, of shape (3,), is not synchronized")


class Ported(torch.optim.Optimizer):
    """Elementwise, with names for its states that other classes use for counts."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in filter(lambda it: it.grad is not None, group["params"]):
                state = self.state[param]
                if not state:
                    state |= {key: torch.zeros_like(param) for key in ("mu", "eta", "mu_product")} | {"count": torch.zeros(())}
                state["count"] += 1
                state["mu"].lerp_(param.grad, 0.1)
                state["eta"].add_(param.grad.square())
                state["mu_product"].add_(state["mu"])
                param.sub_(state["mu"] / (1 + state["eta"]) + state["mu_product"] / state["count"], alpha=group["lr"])


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.number = nn.Linear(6, 5), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x) * self.number
        return result


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("cls", some([Ported, torch.optim.ASGD, torch.optim.NAdam], most=1), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("by_files", some([False, True], most=1), ids=["state dicts", "files"])
def test_names_tell_counts_from_states_of_elements_only_for_torchs_classes(cls: Any, by_files: bool, tmp_path: Path) -> None:
    def made() -> tuple[DistributedDataParallel, ShardedOptimizer]:
        model = DistributedDataParallel(Single())
        with warnings.catch_warnings(action="ignore"):
            return model, ShardedOptimizer(cls, model, whole=None if cls.__module__.startswith("torch") else False, lr=0.1)

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            one = torch.full((2, 6), 1.0 + step + dist.get_rank())
            optimizer.zero_grad()
            model(one).square().mean().backward()
            optimizer.step()

    first, second = made(), made()
    train(*first, range(3))
    if by_files:
        save_checkpoint(tmp_path, *first)
    saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    train(*first, range(3, 6))
    train(*second, range(1))
    if by_files:
        load_checkpoint(tmp_path, *second)
    else:
        second[0].load_state_dict(saved[0])
        second[1].load_state_dict(saved[1])
    train(*second, range(3, 6))
    require_equal(parameters(first[0]), parameters(second[0]))
    for model, _ in (first, second):
        model.close()
