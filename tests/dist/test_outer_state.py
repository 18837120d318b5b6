"""The state of outer synchronization through loads, copies, evaluations and interruptions, compared with a run without them."""

import contextlib
import copy
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from support.alike import of_all_ranks
from support.checkpoints import require_equal as require_same
from support.errors import text_of
from support.levels import some
from support.outer import Net, Reference, loss_of, net, replica, require_equal, same_everywhere, step, train, values_of
from support.ranks import in_ranks
from support.sharded import mesh_of
from undertow import (
    CheckpointError,
    DistributedDataParallel,
    Outer,
    PhaseError,
    PlanMismatch,
    ReplicaMismatch,
    load_checkpoint,
    save_checkpoint,
)

OUTER = Outer(every=4, fragments=2, delay=2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("order", some([(order,) for order in [*permutations(["outer", "module", "optimizer"])][::2]], most=1))
@pytest.mark.parametrize("num_steps", some([4, 7], most=1))
def test_the_states_of_a_run_may_be_loaded_in_any_order(order: tuple[str, ...], num_steps: int) -> None:
    with replica(net(), OUTER) as ddp:
        optimizer = adamw(ddp)
        train(ddp, optimizer, range(num_steps))
        states = {"outer": ddp.outer.state_dict(), "module": values_of(ddp), "optimizer": copy.deepcopy(optimizer.state_dict())}
        train(ddp, optimizer, range(num_steps, 14))
        wanted = values_of(ddp.module)
    with replica(Net(), OUTER) as ddp:
        optimizer = adamw(ddp)
        for name in order:
            {"outer": ddp.outer, "module": ddp, "optimizer": optimizer}[name].load_state_dict(states[name])
        train(ddp, optimizer, range(num_steps, 14))
        assert all(torch.equal(ddp.module.state_dict()[name], value) for name, value in wanted.items())


@pytest.mark.deep
@in_ranks(2)
def test_parameters_that_are_loaded_after_a_step_begin_anew_although_a_state_was_loaded_before() -> None:
    with replica(net(), Outer(every=4, fragments=1, delay=0)) as ddp:
        optimizer = adamw(ddp)
        train(ddp, optimizer, range(5))
        ddp.outer.load_state_dict(ddp.outer.state_dict())
        train(ddp, optimizer, range(5, 6))
        torch.manual_seed(8)
        loaded = Net().state_dict()
        ddp.module.load_state_dict(loaded)
        state = ddp.outer.state_dict()
        assert not state["momentum"]
        assert all(torch.equal(state["global"][name], loaded[name]) for name in state["global"])


@pytest.mark.deep
@in_ranks(2)
def test_own_parameters_without_the_outer_state_are_an_error_that_names_it() -> None:
    with replica(net(), Outer(every=4, fragments=1, delay=0)) as ddp:
        train(ddp, adamw(ddp), range(6))
        own = values_of(ddp)
    with replica(Net(), Outer(every=4, fragments=1, delay=0)) as ddp:
        ddp.load_state_dict(own)
        text = text_of(ReplicaMismatch, lambda: train(ddp, adamw(ddp), range(6, 12)))
    assert "A run that resumes also needs the saved state of model.outer on every rank." in text


def swap(ddp: DistributedDataParallel, *, trains: bool = False, on: int | None = None) -> None:
    """Evaluates an average, and brings the parameters back."""
    if on not in (None, dist.get_rank()):
        return
    own = values_of(ddp)
    ddp.load_state_dict({name: value * 0.9 if value.is_floating_point() else value for name, value in own.items()})
    with contextlib.nullcontext() if trains else torch.no_grad():
        loss_of(ddp.train(trains), 50, 0)
    ddp.train()
    ddp.load_state_dict(own)


def copied(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Returns a copy that trains instead of the model."""
    other = copy.deepcopy(ddp)
    state = copy.deepcopy(optimizer.state_dict())
    ddp.close()
    optimizer = adamw(other)
    optimizer.load_state_dict(state)
    return other, optimizer


def assigned(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Loads the same values as other tensors; returns an optimizer of these."""
    ddp.load_state_dict(values_of(ddp), assign=True)
    made = adamw(ddp)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return made


def taken_back(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, number: int, *, first: str) -> None:
    """Trains on, and loads the states from before: the "outer" one first, or the module's."""
    of_outer, of_module, of_optimizer = ddp.outer.state_dict(), values_of(ddp), copy.deepcopy(optimizer.state_dict())
    train(ddp, optimizer, range(number + 1, number + 4))
    if first == "outer":
        ddp.outer.load_state_dict(of_outer)
    ddp.load_state_dict(of_module)
    if first == "module":
        ddp.outer.load_state_dict(of_outer)
    optimizer.load_state_dict(of_optimizer)


EVENTS = [
    *("swap", "swap on 1", "copy", "assign", "evaluate", "state", "break 0", "break 1", "cut", "cut"),
    *("take back, outer first", "take back, module first", "-", "-"),
]


class DrawnRun:
    """A run with events between its steps; what they change of the training happens to the reference too."""

    def __init__(self, drawn: random.Random, stack: contextlib.ExitStack) -> None:
        every = drawn.randint(1, 5)
        self.outer = Outer(
            every=every,
            fragments=drawn.randint(1, 4),
            delay=drawn.randrange(every),
            wire=drawn.choice([None, "int8", "bfloat16"]),
            mix=drawn.choice([0.0, 0.5]),
        )
        self.reference = Reference(self.outer, dist.get_world_size())
        self.stack, self.number = stack, 0
        self.ddp: Any = stack.enter_context(replica(net(), self.outer, nonfinite="skip"))
        self.optimizer = adamw(self.ddp)

    def step(self, event: str) -> None:
        # Before the first step it would be a write of other global parameters, on one rank.
        breaks = [int(event[-1])] if event.startswith("break") and self.number else []
        num_micro_batches = 2 if event == "cut" else 1
        step(self.ddp, self.optimizer, self.number, num_micro_batches, breaks, is_cut=event == "cut")
        self.reference.step(num_micro_batches, breaks)

    def happen(self, event: str) -> None:
        """Steps, and then lets the event happen."""
        self.step(event)
        ddp = self.ddp
        match event:
            case "swap":
                swap(ddp)
            case "swap on 1":
                swap(ddp, on=1)
            case "copy":
                self.ddp, self.optimizer = copied(ddp, self.optimizer)
                self.stack.enter_context(contextlib.closing(self.ddp))
            case "assign":
                self.optimizer = assigned(ddp, self.optimizer)
            case "evaluate":
                with torch.inference_mode(), ddp.outer.synchronized():
                    loss_of(ddp.eval(), 0, 0)
                ddp.train()
            case "state":
                get_optimizer_state_dict(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
            case "take back, outer first" | "take back, module first":
                taken_back(ddp, self.optimizer, self.number, first=event.split()[2])
        what = f"step {self.number}, {event!r}, {self.outer}"
        require_equal(self.ddp.module, self.reference.models[dist.get_rank()], what)
        self.number += 1


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("seed", some(range(8), most=1))
def test_a_drawn_program_with_events_between_steps_is_the_reference(seed: int) -> None:
    drawn = random.Random(seed)
    with contextlib.ExitStack() as stack:
        run = DrawnRun(drawn, stack)
        for event in [drawn.choice(EVENTS) for _ in range(14)]:
            run.happen(event)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("seed", some(range(3), most=1))
def test_other_settings_on_one_replica_are_the_same_error_in_the_same_step_after_any_events(seed: int) -> None:
    drawn = random.Random(seed)
    name, value = drawn.choice([("lr", 0.02), ("betas", (0.8, 0.999)), ("weight_decay", 0.1)])
    rank = drawn.randrange(2)
    with contextlib.ExitStack() as stack:
        run = DrawnRun(drawn, stack)
        for event in [drawn.choice(EVENTS) for _ in range(drawn.randint(1, 8))]:
            run.happen(event)
        (group,) = run.optimizer.param_groups
        before = group[name]

        def differ_once() -> None:
            for number in range(20):
                group[name] = value if number == 0 and dist.get_rank() == rank else before
                run.step("-")
                run.number += 1

        text = text_of(PlanMismatch, differ_once)
        assert f"first difference: {name} of group 0 of AdamW" in text
        assert of_all_ranks((text, run.number)) == [(text, run.number)] * 2


@pytest.mark.deep
@in_ranks(2)
def test_a_forward_on_other_parameters_does_not_lose_the_state_if_they_are_brought_back_before_a_step() -> None:
    with replica(net(), OUTER) as ddp:
        train(ddp, adamw(ddp), range(7))
        wanted = ddp.outer.state_dict()
        ddp.eval()  # so that buffers stay as they are
        own = values_of(ddp)
        ddp.load_state_dict({name: value * 0.9 if value.is_floating_point() else value for name, value in own.items()})
        assert not ddp.outer.state_dict()["momentum"]
        ddp.load_state_dict(own)
        found = ddp.outer.state_dict()
    for kind in ("global", "momentum", "mean"):
        assert all(torch.equal(found[kind][name], value) for name, value in wanted[kind].items())
        assert found[kind].keys() == wanted[kind].keys()
    assert (found["due"], found["step"]) == (wanted["due"], wanted["step"])


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("is_part", some([False, True], most=1))
def test_an_optimizer_of_parameters_that_a_load_has_replaced_is_told(is_part: bool) -> None:
    with replica(net(), Outer(every=1, fragments=1, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        step(ddp, optimizer, 0)
        part = ddp.module.blocks if is_part else ddp
        part.load_state_dict(values_of(part), assign=True)
        assert text_of(PhaseError, lambda: step(ddp, optimizer, 1)) == (
            "load_state_dict(assign=True) has put other parameters into the model: SGD steps those from before.\n"
            "  outer synchronization\n  Make the optimizer after the load, or load with assign=False."
        )


@in_ranks(2)
def test_a_load_may_bring_the_optimizers_own_parameters_back() -> None:
    with replica(net(), Outer(every=1, fragments=1, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        step(ddp, optimizer, 0)
        own = dict(ddp.module.first.state_dict(keep_vars=True))
        ddp.module.first.load_state_dict(values_of(ddp.module.first), assign=True)
        loss_of(ddp, 1, dist.get_rank())
        ddp.module.first.load_state_dict(own, assign=True)
        step(ddp, optimizer, 1)
        assert ddp.outer.num_synchronizations == 2


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("within", some([False, True], most=1))
def test_a_copy_between_synchronizations_has_the_global_parameters_and_the_momentum(within: bool) -> None:
    with replica(net(), Outer(every=4, fragments=1, delay=0)) as ddp:
        train(ddp, adamw(ddp), range(6))
        wanted = ddp.outer.state_dict()
        with ddp.outer.synchronized() if within else contextlib.nullcontext():
            made = copy.deepcopy(ddp)
        with contextlib.closing(made):
            own, found = values_of(made.module), made.outer.state_dict()
            assert within == all(torch.equal(own[name], value) for name, value in wanted["global"].items())
    assert all(torch.equal(found[kind][name], it) for kind in ("global", "momentum") for name, it in wanted[kind].items())
    assert found["step"] == 6


@pytest.mark.deep
@in_ranks(2)
def test_a_copy_into_which_other_parameters_are_loaded_begins_with_these() -> None:
    with replica(net(), Outer(every=4, fragments=1, delay=0)) as ddp:
        train(ddp, adamw(ddp), range(6))
        with contextlib.closing(copy.deepcopy(ddp)) as made:
            torch.manual_seed(8)
            loaded = Net().state_dict()
            made.module.load_state_dict(loaded)
            state = made.outer.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in state["global"].items())
    assert not state["momentum"]


class Interrupts(TorchDispatchMode):
    """Raises KeyboardInterrupt once, instead of a copy."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.at -= call is torch.ops.aten.copy_.default
        if self.at == 0:
            self.at = -1
            raise KeyboardInterrupt
        return call(*args, **kwargs or {})


@pytest.mark.deep
@in_ranks(2)
def test_an_interruption_while_parameters_are_exchanged_leaves_the_replicas_own() -> None:
    with replica(net(), Outer(every=2, fragments=2, delay=0)) as ddp:
        train(ddp, adamw(ddp), range(3))
        own = values_of(ddp.module)
        num_interrupted = 0
        for at in range(1, 200):
            with contextlib.suppress(KeyboardInterrupt), Interrupts(at) as mode:
                with ddp.outer.synchronized():
                    pass
                break
            num_interrupted += 1
            assert all(torch.equal(ddp.module.state_dict()[name], value) for name, value in own.items()), at
        assert mode.at > 0, "all copies were tried"
        # A copy out, one in and one back for each of 8 parameters and 4 buffers of floating point at least.
        assert num_interrupted >= 36


class Holds(nn.Module):
    """Its forward puts another tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.last = y.detach().mean(0)
        return y


@in_ranks(2)
@pytest.mark.parametrize("copies", some([False, True], most=1))
def test_training_goes_on_after_an_evaluation_in_inference_mode(copies: bool) -> None:
    torch.manual_seed(0)
    with replica(Holds(), Outer(every=2, fragments=1, delay=1)) as ddp, contextlib.ExitStack() as stack:
        model = stack.enter_context(contextlib.closing(copy.deepcopy(ddp))) if copies else ddp
        model.module.load_state_dict(Holds().state_dict())
        with torch.inference_mode():
            with model.outer.synchronized():
                model(torch.ones(2, 4))
            model.outer.load_state_dict(model.outer.state_dict())
            model(torch.ones(2, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(6):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(dist.get_rank() + number))).square().mean().backward()
            optimizer.step()
        assert model.outer.num_synchronizations == 2
        with model.outer.synchronized():
            assert same_everywhere(model.module.last)


@in_ranks(2)
@pytest.mark.parametrize("name", some(["model", "outer", "replica-0", "replica-1"], most=1))
@pytest.mark.parametrize("damage", some(["cut", "empty", "gone"], most=1))
def test_every_file_of_a_checkpoint_must_be_there(name: str, damage: str, tmp_path: Path) -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = adamw(ddp)
        train(ddp, optimizer, range(3))
        save_checkpoint(tmp_path / "saved", ddp, optimizer)
        before = values_of(ddp.module)
        file = tmp_path / "saved" / f"{name}.safetensors"
        dist.barrier()
        if dist.get_rank() == 0:
            whole = file.read_bytes()
            file.unlink()
            if damage != "gone":
                file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
        dist.barrier()
        text = text_of(CheckpointError, lambda: load_checkpoint(tmp_path / "saved", ddp, optimizer))
        assert text.startswith(f"the checkpoint cannot be loaded: {name}.safetensors ")
        assert all(torch.equal(ddp.module.state_dict()[key], value) for key, value in before.items())


@pytest.mark.deep
@in_ranks(4)
def test_a_copy_of_a_mesh_trains_on_without_the_others(tmp_path: Path) -> None:
    """No rank waits for another one to make a copy."""
    with mesh_of(2, 2) as mesh, replica(net(), Outer(every=2, fragments=1, delay=1), device_mesh=mesh) as ddp:
        optimizer = adamw(ddp)
        train(ddp, optimizer, range(2))  # an exchange is on its way
        made = copy.deepcopy(ddp) if dist.get_rank() == 1 else None
        train(ddp, optimizer, range(2, 5))
        assert ddp.outer.num_synchronizations == 2
        if made is not None:
            made.close()


class Fails(Net):
    """A model with a state of its own, which rank 3 cannot give."""

    def get_extra_state(self) -> str:
        if dist.get_rank() == 3:
            raise ValueError("no state")
        return "state"

    def set_extra_state(self, state: str) -> None:
        pass


@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("what", some(["extra", "model"], most=1))
def test_a_save_that_one_rank_of_a_row_cannot_begin_is_an_error_on_every_rank(what: str, tmp_path: Path) -> None:
    """The state of an exchange on its way is gathered over the row: all ranks ask for it, or none."""
    outer = Outer(every=2, fragments=1, delay=1)
    with mesh_of(2, 2) as mesh, replica(Fails() if what == "model" else net(), outer, device_mesh=mesh) as ddp:
        optimizer = adamw(ddp)
        train(ddp, optimizer, range(2))
        extra = {1, 2} if what == "extra" and dist.get_rank() == 3 else 1
        text = text_of(CheckpointError, lambda: save_checkpoint(tmp_path / "a", ddp, optimizer, extra=extra))
        assert ("extra cannot be stored as JSON: {1, 2}." if what == "extra" else "ValueError: no state") in text
        train(ddp, optimizer, range(2, 5))


def global_values(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    with ddp.outer.synchronized():
        return values_of(ddp.module)


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("delay", some([0, 1], most=1))
def test_state_dicts_that_are_to_be_saved_have_the_global_parameters_on_one_rank_too(delay: int) -> None:
    with replica(net(), Outer(every=4, fragments=2, delay=delay)) as ddp:
        ddp.outer.save_global()
        ddp.outer.save_global()  # twice is once
        optimizer = adamw(ddp)
        own = values_of(ddp.module)
        assert all(
            value.data_ptr() == ddp.module.state_dict()[name].data_ptr() for name, value in ddp.module.state_dict().items()
        )
        train(ddp, optimizer, range(4))
        with pytest.warns(UserWarning, match="only this replica's own parameters: not every fragment was exchanged yet, after 4"):
            saved = values_of(ddp.module)
        assert any(not torch.equal(saved[name], own[name]) for name in saved)
        assert saved.keys() == ddp.module.state_dict().keys()  # it warns once
        train(ddp, optimizer, range(4, 11))
        wanted = global_values(ddp)
        live = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
        assert any(not torch.equal(live[name], wanted[name]) for name in live)
        if dist.get_rank() == 0:  # nothing communicates
            require_same(ddp.module.state_dict(), wanted)
            require_same(ddp.state_dict(), {f"module.{name}": value for name, value in wanted.items()})
            name, part = next((name, part) for name, part in ddp.module.named_children() if list(part.parameters()))
            require_same(
                part.state_dict(), {key.removeprefix(f"{name}."): wanted[key] for key in wanted if key.startswith(f"{name}.")}
            )
            assert all(
                isinstance(value, nn.Parameter) for name, value in ddp.module.state_dict(keep_vars=True).items() if name in live
            )
        assert all(torch.equal(live[name], param) for name, param in ddp.module.named_parameters())
        assert all(same_everywhere(value) for value in wanted.values())
        with ddp.outer.synchronized():
            require_same(ddp.module.state_dict(), wanted)


@pytest.mark.deep
@in_ranks(2)
def test_a_swap_by_such_state_dicts_keeps_the_outer_momentum() -> None:
    with replica(net(), Outer(every=4, fragments=1, delay=0)) as ddp:
        ddp.outer.save_global()
        optimizer = adamw(ddp)
        train(ddp, optimizer, range(6))
        state, wanted = ddp.outer.state_dict(), global_values(ddp)
        backup = values_of(ddp)
        ddp.load_state_dict({name: value * 0.9 if value.is_floating_point() else value for name, value in backup.items()})
        assert all(
            torch.equal(value, backup[name] * 0.9) for name, value in ddp.state_dict().items() if value.is_floating_point()
        )
        ddp.load_state_dict(backup)
        train(ddp, optimizer, range(6, 7))
        assert ddp.outer.num_synchronizations == 1
        after = ddp.outer.state_dict()
        require_same(after["momentum"], state["momentum"])
        require_same(after["global"], {name: wanted[name] for name in after["global"]})
        train(ddp, optimizer, range(7, 9))
        assert ddp.outer.num_synchronizations == 2


@in_ranks(2)
def test_checkpoints_copies_and_pickles_do_not_depend_on_it(tmp_path: Path) -> None:
    with replica(net(), OUTER) as ddp:
        optimizer = adamw(ddp)
        train(ddp, optimizer, range(9))
        save_checkpoint(tmp_path / "before", ddp, optimizer)
        ddp.outer.save_global()
        save_checkpoint(tmp_path / "after", ddp, optimizer)
        bare = copy.deepcopy(ddp.module)
        live = {name: param.detach().clone() for name, param in ddp.module.named_parameters()}
        assert all(torch.equal(value, live[name]) for name, value in bare.state_dict().items() if name in live)
        with replica(Net(), OUTER) as other:
            load_checkpoint(tmp_path / "after", other, adamw(other))
            assert all(torch.equal(param, live[name]) for name, param in other.module.named_parameters())
    for file in sorted((tmp_path / "before").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "after" / file.name).read_bytes()


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))


@in_ranks(2)
def test_names_of_one_tensor_share_its_global_copy() -> None:
    torch.manual_seed(1)
    with replica(TiedNet(), Outer(every=2, fragments=1, delay=0)) as ddp:
        ddp.outer.save_global()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            ddp(torch.full((2, 4), 1.0 + number + dist.get_rank())).square().mean().backward()
            optimizer.step()
        state = ddp.module.state_dict()
        assert state["inner.weight"].data_ptr() == state["outer.weight"].data_ptr() != ddp.module.inner.weight.data_ptr()
        wanted = global_values(ddp)
        again = ddp.module.state_dict()
        require_same(again, wanted)
        assert again["inner.weight"].data_ptr() != state["inner.weight"].data_ptr()
