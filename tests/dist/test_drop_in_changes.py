"""Changes of the model: unlike ranks are told so in the same step, and what drawn programs do not have is averaged."""

import contextlib
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from support.alike import backward_alike, of_all_ranks
from support.errors import text_of
from support.inside import generation_of
from support.levels import some
from support.models import Branches, mlp, noise
from support.naive import TIMEOUT_S, naive_mean, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from undertow import (
    ConfigError,
    DistributedDataParallel,
    PhaseError,
    PlanMismatch,
    ReplicaMismatch,
    ShardedOptimizer,
    SyncConfig,
    attach,
    clip_grad_norm_,
)

Run = Callable[[nn.Module, Tensor], Tensor]


def branches(frozen: int) -> Branches:
    model = Branches()
    model.layers[frozen].requires_grad_(False)
    return model


CHANGES: dict[str, Callable[[Any], object]] = {
    "new data": lambda model: [setattr(param, "data", param.data * 0.5) for param in model.parameters()],
    "unfrozen": lambda model: model.layers[0].requires_grad_(True),
    "frozen": lambda model: model.layers[1].requires_grad_(False),
    "exchanged": lambda model: model.requires_grad_(False).layers[0].requires_grad_(True),
    "parameter added": lambda model: model.register_parameter("shift", nn.Parameter(torch.ones(4))),
    "layer added": lambda model: model.layers.append(nn.Linear(4, 4)),
    "layer replaced": lambda model: model.layers.__setitem__(1, nn.Linear(4, 4)),
    "layer removed": lambda model: model.layers.__delitem__(2),
    "cast to double": nn.Module.double,
    "cast to bfloat16": nn.Module.bfloat16,
}
# What changes on the last rank, and on all others, and the first difference. Trained before are layers 1 and 2.
DIFFERENT = [
    ("unfrozen", "new data", "parameter 0 is 'layers.1.weight' on rank 0 and 'layers.0.weight' on rank {}"),
    ("layer added", "new data", "parameter 4 is missing on rank 0 and 'layers.3.weight' on rank {}"),
    ("layer removed", "new data", "parameter 2 is 'layers.2.weight' on rank 0 and missing on rank {}"),
    ("cast to double", "new data", "dtype of parameter 0 ('layers.1.weight') is float32 on rank 0 and float64 on rank {}"),
    ("unfrozen", "frozen", "parameter 0 is 'layers.2.weight' on rank 0 and 'layers.0.weight' on rank {}"),
]


@in_ranks(2, 3, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(("of_last", "of_others", "difference"), some(DIFFERENT, most=1))
def test_changes_that_differ_from_rank_to_rank_are_an_error_on_all(of_last: str, of_others: str, difference: str) -> None:
    last = dist.get_world_size() - 1
    with wrapped(branches(frozen=0), bucket_cap_mb=1e-6) as ddp:

        def train() -> None:
            layers = ddp.module.layers
            ddp(noise(3, 4).to(layers[0].weight.dtype), tuple(range(len(layers)))).square().mean().backward()
            ddp.finish()

        train()
        train()
        CHANGES[of_last if dist.get_rank() == last else of_others](ddp.module)
        text = text_of(PlanMismatch, train)
    assert of_all_ranks(text) == [text] * (last + 1)
    what, counts, told, _ = text.splitlines()
    assert what == "ranks disagree on the parameters."
    assert re.search(rf"^  rank 0: \d parameters, .*   rank {last}: \d parameters, ", counts)
    assert told == f"  first difference: {difference.format(last)}"


@in_ranks(2)
def test_one_rank_clips_behind_a_change() -> None:
    """Where no round ends what a change has begun."""
    model, group = branches(frozen=0), dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with contextlib.closing(attach(model, process_group=group)) as sync:
        for step in range(4):
            if step == 2:
                model.layers[0].requires_grad_(True)
            model.zero_grad()
            model.forward(noise(3, 4, step=step)).sum().backward()  # past the hooks of forwards
            clip_grad_norm_(sync, 1.0)
            torch.optim.SGD(model.parameters(), lr=0.125).step()
    dist.destroy_process_group(group)


class Squares(nn.Module):
    """The sum of the squares of its parameters: a gradient is twice the value that the forward has read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Parameter(torch.ones(1)), nn.ModuleList()
        self.late: Callable[[], nn.Module] | None = None  # made within the forward

    def forward(self) -> Tensor:
        if self.late is not None:
            self.layers.append(self.late())
            self.late = None
        return torch.stack([param.square().sum() for param in self.parameters() if param.requires_grad]).sum()


def apart(*shape: int, requires_grad: bool = True) -> nn.Parameter:
    """With 1.0 on rank 0, 2.0 on rank 1 and so on."""
    return nn.Parameter(torch.full(shape, 1.0 + dist.get_rank()), requires_grad=requires_grad)


def layer_of(weight: nn.Parameter) -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = weight
    return layer


def layer_apart() -> nn.Module:
    return layer_of(apart(1, 1))


def layer_alike() -> nn.Module:
    return layer_of(nn.Parameter(torch.ones(1, 1)))


def step_on(ddp: nn.Module) -> None:
    ddp.zero_grad()
    ddp().backward()


def require_doubled(ddp: nn.Module) -> None:
    for name, param in ddp.named_parameters():
        assert torch.equal(param, torch.ones_like(param)), name
        assert torch.equal(param.grad, torch.full_like(param, 2.0)), name


ADDED: dict[str, Callable[[Any], object]] = {
    "a parameter": lambda module: setattr(module, "second", apart(3)),
    "a layer": lambda module: module.layers.append(layer_apart()),
}


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("how", some(["eval first", "no_sync", "two models", "attached", "buffers", "buffers off"], most=2))
def test_a_layer_that_is_added_is_averaged_at_once_in_every_setting(how: str) -> None:
    models = [Squares(), Squares()] if how == "two models" else [Squares()]
    if how == "buffers":
        models[0].register_buffer("count", torch.zeros(1))
    config = SyncConfig(buffers="off") if how == "buffers off" else None
    syncs = [(attach if how == "attached" else DistributedDataParallel)(model, config=config) for model in models]
    called = models if how == "attached" else syncs
    for num_added in (0, 0, 1, 2):
        for model in models[:num_added]:
            model.layers.append(layer_alike())
        if how == "eval first":
            called[0].eval()()
            called[0].train()
        for each in called:
            each.zero_grad()
        with syncs[0].no_sync() if how == "no_sync" else contextlib.nullcontext():
            torch.stack([each() for each in called]).sum().backward()
        if how == "no_sync":
            called[0]().backward()
        for model in models:
            for param in model.parameters():
                assert torch.equal(param, torch.ones_like(param))
                assert torch.equal(param.grad, torch.full_like(param, 4.0 if how == "no_sync" else 2.0))
    for sync in syncs:
        sync.close()


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@pytest.mark.parametrize("clears_late", [False, True])
def test_a_sharded_optimizer_gets_a_parameter_that_is_added(strategy: str, clears_late: bool) -> None:
    with wrapped(Squares(), strategy=strategy) as ddp:
        optimizer = ShardedOptimizer(torch.optim.SGD, ddp, lr=0.25)
        for step in range(5):
            if not clears_late:
                optimizer.zero_grad()
            if step == 2:
                ddp.module.second = nn.Parameter(torch.ones(3))
                optimizer.add_param_group({"params": [ddp.module.second]})
            loss = ddp()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ddp.wait()
        assert torch.equal(ddp.module.first, torch.full((1,), 0.5**5))  # w - 0.25 * 2 w
        assert torch.equal(ddp.module.second, torch.full((3,), 0.5**3))


def drifts(model: Squares) -> None:
    model.layers[0].weight.data = torch.full((1, 1), 1.0 + dist.get_rank())
    model.layers[0].weight.requires_grad_(True)


# Changes, and the parameter that has other values.
APART: dict[str, tuple[Callable[[Squares], object], str]] = {
    "added": (ADDED["a parameter"], "second"),
    "a layer added": (ADDED["a layer"], "layers.1.weight"),
    "made within the forward": (lambda model: setattr(model, "late", layer_apart), "layers.1.weight"),
    "unfrozen": (drifts, "layers.0.weight"),
    "replaced": (lambda model: setattr(model, "first", apart(1)), "first"),
}


@in_ranks(2, 3, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("change", some(APART, most=1))
def test_new_parameters_with_other_values_are_an_error_on_all_ranks(change: str) -> None:
    make_change, name = APART[change]
    model = Squares()
    model.layers.append(nn.Linear(1, 1, bias=False).requires_grad_(False))
    model.layers[0].weight.data.fill_(1.0)
    with wrapped(model) as ddp:
        step_on(ddp)
        step_on(ddp)
        make_change(model)
        majority = "rank 1 than on rank 0" if dist.get_world_size() == 2 else "rank 1, 2 than on rank 0"
        for number in (2, 3):
            assert text_of(ReplicaMismatch, lambda: step_on(ddp)) == (
                f"parameter {name!r} has other values on {majority}.\n"
                f"  it was added or unfrozen, synchronization {number}\n"
                "  Initialize it with the same seed on every rank; or call broadcast_parameters() after adding it and "
                "before the forward. Drop the gradients of this step by zero_grad()."
            )
        ddp.broadcast_parameters()
        step_on(ddp)
        assert all(torch.equal(param.grad, 2 * param) for param in model.parameters() if param.requires_grad)


@in_ranks(2)
def test_parameters_that_are_broadcast_before_the_forward_are_no_error() -> None:
    with wrapped(Squares()) as ddp:
        for change in (None, "a layer", "a parameter"):
            if change is not None:
                ADDED[change](ddp.module)
                ddp.broadcast_parameters()
            step_on(ddp)
            require_doubled(ddp)


@pytest.mark.deep
@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("num_forwards", some([1, 2], most=1))
def test_a_layer_that_one_rank_adds_to_a_model_with_buffers_is_an_error_on_both(num_forwards: int) -> None:
    with wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))) as ddp:

        def train() -> None:
            torch.stack([ddp(noise(3, 4)).square().sum() for _ in range(num_forwards)]).sum().backward()

        train()
        train()
        if dist.get_rank() == 1:
            ddp.module.append(nn.Linear(4, 4))
        text = text_of(PlanMismatch, train)
    assert of_all_ranks(text) == [text] * 2


@in_ranks(2)
def test_data_of_another_shape_with_as_many_elements_is_followed() -> None:
    with wrapped(nn.Linear(4, 6, bias=False)) as ddp:
        ddp(torch.ones(1, 4)).sum().backward()
        ddp.zero_grad()
        ddp.module.weight.data = torch.ones(8, 3)
        ddp(torch.full((2, 3), dist.get_rank() + 1.0)).sum().backward()
        assert torch.equal(ddp.module.weight.grad, torch.full((8, 3), 3.0))  # two rows of the mean of 1 and 2


# Parameters that are in the module, or frozen, for one forward only.


def others(model: nn.Module, kind: str = "trained") -> dict[str, nn.Parameter]:
    """Other parameters for a call of the model, or half of them."""
    made = {name: nn.Parameter(it.detach() * 0.5, requires_grad=kind != "frozen") for name, it in model.named_parameters()}
    return dict([*made.items()][:: 2 if kind == "half" else 1])


@in_ranks(2, 3, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("is_first", [True, False], ids=["teacher first", "teacher last"])
@pytest.mark.parametrize("kind", ["frozen", "trained", "half"])
def test_a_functional_call_with_other_parameters_changes_nothing(kind: str, is_first: bool) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        x = noise(5, 6, step=step)
        calls = [lambda: functional_call(model, others(model, kind), (x,)), lambda: model(x)]
        first, second = [call() for call in calls[:: 1 if is_first else -1]]
        return (first - second).square().mean()

    with wrapped_and_bare(mlp(), bucket_cap_mb=1e-6 if is_first else None) as (ddp, bare):
        backward_alike(ddp, bare, loss, steps=range(4))
        assert [spec.name for spec in ddp.plan.params] == [name for name, _ in bare.named_parameters()]


@in_ranks(2)
@pytest.mark.parametrize("change", ["frozen", "added"])
def test_an_old_gradient_of_a_parameter_that_a_change_leaves_unused_stays_to_the_bit(change: str) -> None:
    with wrapped(Branches()) as ddp:
        for step in range(2):
            ddp.zero_grad()
            ddp(noise(3, 4, step=step), (0, 1, 2)).sum().backward()
        unused = ddp.module.layers[2].weight
        unused.grad.mul_(dist.get_rank() + 1)
        before = unused.grad.clone()
        for part in ddp.module.layers[:2]:
            part.zero_grad()
        if change == "frozen":
            ddp.module.layers[1].requires_grad_(False)
        else:
            ddp.module.layers.append(nn.Linear(4, 4))
        ddp(noise(3, 4), (0, 1)).sum().backward()
        assert torch.equal(unused.grad, before)
        assert "layers.2.weight" in ddp.unused_parameters


@in_ranks(2)
def test_other_values_of_a_new_layer_that_was_used_in_a_micro_batch_are_an_error() -> None:
    with wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))) as ddp:
        ddp(noise(3, 4)).square().sum().backward()
        ddp.zero_grad()
        torch.manual_seed(dist.get_rank())
        ddp.module.append(nn.Linear(4, 2))
        with ddp.no_sync():
            ddp(noise(3, 4)).sum().backward()
        found = text_of(ReplicaMismatch, lambda: ddp(noise(3, 4)).sum().backward())
        assert found.startswith("parameter '2.weight' has other values on rank 1 than on rank 0.")


class Adversaries(nn.Module):
    """A generator and a discriminator, which take turns within one forward, as in a training_step of Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = nn.Linear(4, 4), nn.Linear(4, 1)

    def loss(self, turn: str, x: Tensor) -> Tensor:
        fake = self.generator(x)
        if turn == "discriminator":
            return self.discriminator(fake.detach()).mean() - self.discriminator(x).mean()
        return -self.discriminator(fake).square().mean()

    def forward(self, x: Tensor, turns: str, mean: Callable[[nn.Module], object]) -> None:
        for turn in turns.split():
            were_trained = {param: param.requires_grad for param in self.parameters()}
            for name, child in self.named_children():
                child.requires_grad_(name == turn)
            self.loss(turn, x).backward()
            trained = getattr(self, turn)
            mean(trained)
            torch.optim.SGD(trained.parameters(), lr=0.25).step()
            trained.zero_grad()
            for param, was_trained in were_trained.items():
                param.requires_grad_(was_trained)


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize(
    ("how", "turns", "is_frozen_at_first"),
    some(
        [
            ("wrapped", "generator discriminator", True),
            ("wrapped", "generator discriminator discriminator generator", False),
            ("attached", "generator discriminator discriminator generator", False),
            ("each wrapped by itself", "discriminator generator", False),
        ],
        most=2,
    ),
)
def test_parts_that_are_trained_in_turns_step_on_means(how: str, turns: str, is_frozen_at_first: bool) -> None:
    model = Adversaries()
    model.discriminator.requires_grad_(not is_frozen_at_first)
    bare = copy.deepcopy(model)
    if how == "each wrapped by itself":
        model.generator, model.discriminator = map(DistributedDataParallel, (model.generator, model.discriminator))
        syncs = list(model.children())
    else:
        syncs = [(attach if how == "attached" else DistributedDataParallel)(model, config=SyncConfig(bucket_cap_mb=1e-6))]
    for step in range(5):
        for each in (model, bare):
            each.discriminator.requires_grad_(not is_frozen_at_first or step > 0)
        x = noise(3, 4, step=step)
        (syncs[0] if how == "wrapped" else model)(x, turns, lambda _: None)
        bare(x, turns, naive_mean)
        assert all(map(torch.equal, model.parameters(), bare.parameters()))
    # Freezing for a turn is no change of plan: one new plan, in the order observed.
    assert is_frozen_at_first or max(map(generation_of, syncs)) <= 1
    for sync in syncs:
        sync.close()


@in_ranks(2, timeout_s=TIMEOUT_S)
def test_parts_in_turns_are_stepped_in_shards_with_closures_that_do_nothing() -> None:
    """As Lightning calls optimizers after a backward by hand."""
    model = Adversaries()
    bare = copy.deepcopy(model)
    with wrapped(model, strategy="zero1", bucket_cap_mb=1e-6) as ddp:
        optimizers = [ShardedOptimizer(SGD, ddp, part.parameters(), lr=0.25) for part in model.children()]

        def turns(x: Tensor) -> None:
            for number, (turn, part) in enumerate(model.named_children()):
                for name, child in model.named_children():
                    child.requires_grad_(name == turn)
                model.loss(turn, x).backward()
                optimizers[number].step(lambda: None)
                part.zero_grad()
                model.requires_grad_(True)

        model.forward = lambda x, *_: turns(x)
        for step in range(4):
            x = noise(3, 4, step=step)
            ddp(x)
            bare(x, "generator discriminator", naive_mean)
        ddp.wait()
        assert all(map(torch.equal, model.parameters(), bare.parameters()))


@in_ranks(2)
def test_what_another_wrapper_trains_is_its_own() -> None:
    """One holds a frozen discriminator, which is trained in turns by the wrapper that it has to itself."""
    model = Adversaries()
    model.discriminator.requires_grad_(False)
    bare = copy.deepcopy(model)
    with wrapped(model, bucket_cap_mb=1e-6) as ddp, wrapped(model.discriminator.requires_grad_(True)) as inner:

        def loss(each: nn.Module, step: int) -> Tensor:
            parts = (model.generator, inner) if each is ddp else (bare.generator, bare.discriminator)
            each(noise(3, 4), "", naive_mean)  # no turns
            parts[1].requires_grad_(False)
            parts[0](noise(3, 4, step=step)).square().sum().backward()
            return parts[1].requires_grad_(True)(noise(3, 4, step=step)).square().sum()

        backward_alike(ddp, bare, loss)
        assert len(ddp.plan.params) == len(inner.plan.params) == 2


class Thaws(nn.Module):
    """Runs its frozen body in a way that thaws it; makes its head in the first forward if it has none."""

    def __init__(self, run: Run, head: nn.Module | None) -> None:
        super().__init__()
        self.run, self.body, self.head = run, nn.Linear(4, 4), head

    def forward(self, x: Tensor) -> Tensor:
        if self.head is None:
            torch.manual_seed(1)
            self.head = nn.Linear(4, 1)
        return self.head(self.run(self.body, x)).square().sum()


WITHIN: dict[str, Run] = {
    "made": lambda body, x: body(x),
    "the forward": lambda body, x: body.requires_grad_(True)(x),
    "a hook of a layer": lambda body, x: body(x),
    "a call of other parameters": lambda body, x: functional_call(
        body, {name: param.requires_grad_(True) for name, param in body.named_parameters()}, (x,)
    ),
}


@in_ranks(2, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("where", WITHIN)
def test_a_parameter_that_is_thawed_or_made_within_the_forward_is_averaged_at_once(where: str) -> None:
    model = Thaws(WITHIN[where], None if where == "made" else nn.Linear(4, 1))
    model.body.requires_grad_(where == "made")
    if where == "a hook of a layer":
        model.body.register_forward_pre_hook(lambda layer, _: layer.requires_grad_(True) and None)

    def loss(each: nn.Module, step: int) -> Tensor:
        getattr(each, "module", each).body.requires_grad_(where == "made")
        return each(noise(3, 4, step=step))

    with wrapped_and_bare(model, bucket_cap_mb=1e-6) as (ddp, bare):
        backward_alike(ddp, bare, loss)


# Optimizers that update parameters which are not the model's any more, or which another optimizer updates.

SGD = torch.optim.SGD


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))


def step_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.full((2, 4), 1.0 + dist.get_rank())).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@in_ranks(2)
def test_a_second_sharded_optimizer_is_refused_while_the_first_is_there() -> None:
    model = DistributedDataParallel(net())
    first = ShardedOptimizer(SGD, model, lr=0.1)
    first.step = first.step  # a reference of an object to itself, as schedulers make it
    text = text_of(ConfigError, lambda: ShardedOptimizer(torch.optim.AdamW, model, model.module[1].parameters(), lr=0.1))
    assert text == (
        "a ShardedOptimizer of SGD updates '1.weight', '1.bias' already.\n"
        "  ShardedOptimizer(AdamW, ...)\n"
        "  Give each of several optimizers its own parameters, as params=. "
        "To replace an optimizer, `del` the first one before you make another."
    )
    step_of(model, first)  # as if nothing had happened
    model.zero_grad()
    del first
    second = ShardedOptimizer(SGD, model, lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    step_of(model, second)
    model.wait()
    assert not any(map(torch.equal, before, model.parameters()))
    assert text_of(PhaseError, SGD(model.parameters(), lr=0.1).step) == (
        "SGD steps on parameters that a ShardedOptimizer updates.\n"
        f"  rank {dist.get_rank()}: each rank has its shards of the gradients only\n"
        "  Step the ShardedOptimizer, and leave its parameters out of other optimizers."
    )
    model.close()


@in_ranks(2)
def test_ranks_that_have_not_dropped_the_first_alike_are_told_so() -> None:
    with contextlib.closing(DistributedDataParallel(net())) as model:
        kept = [ShardedOptimizer(SGD, model, lr=0.1)]
        if dist.get_rank() == 1:
            kept.clear()
        text = text_of(PlanMismatch, lambda: ShardedOptimizer(SGD, model, lr=0.1))
    assert of_all_ranks(text) == [text] * 2
    assert "first difference: earlier ShardedOptimizers is ['SGD'] on rank 0 and [] on rank 1" in text


def assigned(module: nn.Sequential) -> None:
    module.load_state_dict({name: it.clone() for name, it in module.state_dict().items()}, assign=True)


def replaced(module: nn.Sequential) -> None:
    module[1] = nn.Linear(4, 3)


@in_ranks(2)
def test_a_plain_optimizer_that_is_left_behind_warns_once() -> None:
    """As under torch's class, it trains nothing."""
    with contextlib.closing(DistributedDataParallel(net())) as model:
        optimizer = SGD(model.parameters(), lr=0.1)
        step_of(model, optimizer)
        assigned(model.module)
        step_of(model)
        with pytest.warns(UserWarning, match="an optimizer steps parameters that are not the model's any more") as warned:
            optimizer.step()
        step_of(model, optimizer)
    assert len(warned) == 1


@in_ranks(2)
def test_a_thawed_parameter_of_a_discarded_window_need_not_get_a_gradient_in_the_next_one() -> None:
    model = branches(frozen=2)
    weight = model.layers[2].weight
    with wrapped_and_bare(model) as (ddp, bare):
        ddp(noise(3, 4), (0, 1)).sum().backward()
        weight.requires_grad_(True)
        weight.register_post_accumulate_grad_hook(lambda _: None)
        with ddp.accumulate():
            ddp(noise(3, 4)).sum().backward()
        ddp.zero_grad()
        backward_alike(ddp, bare, lambda net, step: net(noise(3, 4, step=step), (0, 1)).sum(), steps=[3])
        assert weight.grad is None


@in_ranks(2)
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("change", "which"), [(assigned, "'0.weight' and 3 more"), (replaced, "'1.weight' and 1 more")])
def test_a_sharded_optimizer_that_is_left_behind_raises(
    change: Callable[[nn.Sequential], object], which: str, steps_before: int
) -> None:
    with contextlib.closing(DistributedDataParallel(net())) as model:
        optimizer = ShardedOptimizer(SGD, model, lr=0.1)
        for _ in range(steps_before):
            step_of(model, optimizer)
        model.wait()
        change(model.module)
        step_of(model)
        assert text_of(PhaseError, optimizer.step) == (
            "this optimizer updates parameters that the model no longer has, and not their replacements.\n"
            f"  ShardedOptimizer, parameter {which}\n"
            "  Make the optimizer after the change."
        )
