"""Outer synchronization, compared with a naive reference that computes all replicas in every process."""

import contextlib
import copy
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from support.errors import text_of
from support.inside import global_values, leave_unread
from support.levels import some
from support.models import noise
from support.outer import (
    Net,
    Reference,
    loss_of,
    net,
    replica,
    require_equal,
    same_everywhere,
    step,
    train,
    values_of,
)
from support.ranks import in_ranks
from support.sharded import mesh_of
from undertow import (
    CheckpointError,
    ConfigError,
    Desync,
    DistributedDataParallel,
    NonFiniteGradient,
    Outer,
    PhaseError,
    PlanMismatch,
    ReplicaMismatch,
    ShardedOptimizer,
    SyncConfig,
    attach,
    load_checkpoint,
    save_checkpoint,
)

OFF = {"momentum": 0.0, "lr": 1.0, "wire": None, "delay": 0, "fragments": 1}  # nothing but the mean


@in_ranks(2, 3)
@pytest.mark.parametrize("wire", some([None, "int8"], most=1))
def test_one_fragment_without_delay_is_the_reference(wire: str | None) -> None:
    outer = Outer(every=3, fragments=1, delay=0, wire=wire)
    reference = Reference(outer, dist.get_world_size())
    with replica(net(), outer) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for number in range(9):
            step(ddp, optimizer, number)
            reference.step()
            require_equal(ddp.module, reference.models[dist.get_rank()], f"step {number}")
        assert ddp.outer is not None
        assert ddp.outer.num_synchronizations == 3


def programs() -> Iterator[tuple[int, Outer, int]]:
    drawn = random.Random(5)
    for number in range(8):
        every = drawn.randint(1, 5)
        outer = Outer(
            every=every,
            fragments=drawn.randint(1, 4),
            delay=drawn.randrange(every),
            lr=drawn.choice([0.4, 0.7, 1.0]),
            momentum=drawn.choice([0.0, 0.5, 0.9]),
            nesterov=drawn.random() < 0.7,
            wire=drawn.choice([None, "int8", "bfloat16"]),
            mix=drawn.choice([0.0, 0.5]),
        )
        yield number, outer, drawn.randint(1, 2)


@in_ranks(2)
@pytest.mark.parametrize("number", some(range(4), most=1))
def test_a_drawn_program_is_the_reference(number: int) -> None:
    _, outer, num_micro_batches = list(programs())[number]
    reference = Reference(outer, dist.get_world_size())
    with replica(net(), outer) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for number in range(12):
            step(ddp, optimizer, number, num_micro_batches)
            reference.step(num_micro_batches)
            require_equal(ddp.module, reference.models[dist.get_rank()], f"step {number} of {outer}")


class Exact(nn.Module):
    """Weights and inputs are multiples of a power of two, so that no operation rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)])
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x), self.layers[1](x)


def exact() -> Exact:
    torch.manual_seed(1)
    return Exact()


def exact_loss(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    first, second = model(torch.randint(-2, 3, (2, 4)).float())
    return first.sum() + second.sum()


@in_ranks(2)
def test_a_mean_after_every_step_is_data_parallelism_bit_for_bit_where_nothing_rounds() -> None:
    with (
        replica(exact(), Outer(every=1, **OFF)) as ddp,
        contextlib.closing(DistributedDataParallel(exact(), config=SyncConfig(reduction="ordered"))) as plain,
    ):
        for model in (ddp, plain):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
            for number in range(6):
                optimizer.zero_grad()
                exact_loss(model, number).backward()
                optimizer.step()
        require_equal(ddp.module, plain.module)


@pytest.mark.deep
@in_ranks(2)
def test_by_default_outer_steps_multiply_the_learning_rate_by_little() -> None:
    """Otherwise a learning rate that suits plain data parallelism is too high."""
    line = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(line.weight)
    with replica(line, Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.25)
        for _ in range(20):
            optimizer.zero_grad()
            ddp(torch.full((1, 4), 1.0 + 2.0 * dist.get_rank())).sum().backward()
            optimizer.step()
        # The gradients are 1 and 3 in every step: 20 steps of 0.25 along their mean are 10. Outer steps make it 13.3,
        # because lr / (1 - momentum) is 1.4; with a momentum of 0.9 it would be 33.
        assert ((line.weight < -10.0) & (line.weight > -14.0)).all()


@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize("wire", some([None, "int8"], most=1))
def test_rows_of_a_mesh_are_replicas(wire: str | None) -> None:
    """Each row is synchronized in every step; a reference has one replica for a row, with the mean of its gradients."""
    outer = Outer(every=2, fragments=2, delay=1, wire=wire)
    reference = Reference(outer, 2)
    with mesh_of(2, 2) as mesh, replica(net(), outer, device_mesh=mesh, reduction="ordered", buffers="off") as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        rank = dist.get_rank()
        for number in range(6):
            step(ddp, optimizer, number)
            for row, (model, opt) in enumerate(zip(reference.models, reference.optimizers, strict=True)):
                copies = [copy.deepcopy(model) for _ in range(2)]
                for place, each in enumerate(copies):
                    each.zero_grad()
                    loss_of(each, number, 2 * row + place).backward()
                for param, *of_ranks in zip(model.parameters(), *(each.parameters() for each in copies), strict=True):
                    param.grad = (of_ranks[0].grad + of_ranks[1].grad) / 2
                opt.step()
            reference.outer.fragments = [[name for name in names if "running" not in name] for names in reference.outer.fragments]
            reference.outer.step(number + 1)
            for name, value in reference.models[rank // 2].named_parameters():
                assert torch.equal(dict(ddp.module.named_parameters())[name], value), (name, number)


@in_ranks(4)
@pytest.mark.parametrize("strategy", some(["zero1", "zero2"], most=1))
def test_a_sharded_optimizer_within_rows_is_a_plain_one(strategy: str) -> None:
    found = []
    for sharded in (False, True):
        outer, chosen = Outer(every=2, fragments=2, delay=1), strategy if sharded else "ddp"
        settings = {"reduction": "ordered", "strategy": chosen}
        with mesh_of(2, 2) as mesh, replica(net(), outer, device_mesh=mesh, **settings) as ddp:
            make = torch.optim.AdamW
            optimizer = ShardedOptimizer(make, ddp, lr=0.01) if sharded else make(ddp.parameters(), lr=0.01)
            for number in range(6):
                step(ddp, optimizer, number)
            ddp.wait()
            found.append({name: value.detach().clone() for name, value in ddp.module.named_parameters()})
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@pytest.mark.deep
@in_ranks(2)
def test_a_step_of_several_optimizers_counts_once_after_the_last() -> None:
    outer = Outer(every=2, fragments=2, delay=1)
    reference = Reference(outer, 2)
    with replica(net(), outer) as ddp:
        params = list(ddp.parameters())
        optimizers = [torch.optim.AdamW(part, lr=0.01) for part in (params[:3], params[3:])]
        for number in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(ddp, number, dist.get_rank()).backward()
            for optimizer in optimizers if number % 2 else reversed(optimizers):
                optimizer.step()
            reference.step()
            require_equal(ddp.module, reference.models[dist.get_rank()], f"step {number}")


@pytest.mark.deep
@in_ranks(2)
def test_a_step_that_a_scaler_skips_on_one_rank_counts_on_all() -> None:
    outer = Outer(every=2, fragments=1, delay=1)
    with replica(net(), outer) as ddp:
        optimizer, scaler = torch.optim.SGD(ddp.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(7):
            optimizer.zero_grad()
            loss = loss_of(ddp, number, dist.get_rank())
            scaler.scale(loss * (float("inf") if (number, dist.get_rank()) == (2, 1) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        state = ddp.outer.state_dict()
        assert (state["step"], state["num_synchronizations"]) == (7, 3)
        for value in state["global"].values():
            assert same_everywhere(value)
            assert value.isfinite().all()


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("fused", some([False, True], most=1))
def test_a_step_that_a_scaler_skips_keeps_no_replica_waiting_until_the_next_forward(fused: bool) -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        params = list(ddp.parameters())
        optimizers = [torch.optim.SGD(part, lr=0.01, fused=fused) for part in (params[:3], params[3:])]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in range(4):
            ddp.zero_grad()
            scaler.scale(loss_of(ddp, number, dist.get_rank())).backward()
            if number % 2 and dist.get_rank() == 1:
                params[0].grad.fill_(torch.inf)
            if number < 2:
                scaler.unscale_(optimizers[0])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            dist.barrier()  # replicas that have stepped come here too
        assert ddp.outer.num_synchronizations == 2


@pytest.mark.deep
@in_ranks(2)
def test_a_skipped_step_counts_too() -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0), nonfinite="skip") as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for number in range(4):
            optimizer.zero_grad()
            (loss_of(ddp, number, dist.get_rank()) * (torch.nan if (number, dist.get_rank()) == (1, 0) else 1.0)).backward()
            optimizer.step()
        assert ddp.outer.state_dict()["step"] == 4
        assert all(param.isfinite().all() for param in ddp.parameters())


@in_ranks(2)
def test_frozen_and_ignored_parameters_stay_as_they_are() -> None:
    model = net()
    model.first.weight.requires_grad_(False)
    with replica(model, Outer(every=1, fragments=2, delay=0), ignore=("last.bias",)) as ddp:
        own = model.last.bias.detach().fill_(float(dist.get_rank()))
        frozen = model.first.weight.detach().clone()
        trained = [param for name, param in model.named_parameters() if param.requires_grad and name != "last.bias"]
        optimizer = torch.optim.SGD(trained, lr=0.01)
        for number in range(3):
            step(ddp, optimizer, number)
        assert torch.equal(model.first.weight, frozen)
        assert own.eq(dist.get_rank()).all()
        assert {"first.weight", "last.bias"}.isdisjoint(ddp.outer.state_dict()["global"])


@in_ranks(2)
def test_synchronized_shows_the_global_parameters_and_brings_the_own_ones_back() -> None:
    with replica(net(), Outer(every=2, fragments=2, delay=1)) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for number in range(5):
            step(ddp, optimizer, number)
        own = copy.deepcopy(ddp.module.state_dict())
        wanted = ddp.outer.state_dict()["global"]
        with contextlib.suppress(ZeroDivisionError), ddp.outer.synchronized():
            shown = ddp.module.state_dict()
            assert all(torch.equal(shown[name], value) for name, value in wanted.items())
            assert all(same_everywhere(shown[name]) for name in wanted)
            assert not torch.equal(shown["last.weight"], own["last.weight"])
            raise ZeroDivisionError
        assert all(torch.equal(ddp.module.state_dict()[name], value) for name, value in own.items())


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("num_steps", some([4, 5, 6], most=1))
def test_a_state_resumes_bit_for_bit_also_with_a_fragment_on_its_way(num_steps: int) -> None:
    outer = Outer(every=4, fragments=2, delay=2, mix=0.5)
    with replica(net(), outer) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        for number in range(num_steps):
            step(ddp, optimizer, number)
        saved = copy.deepcopy((ddp.outer.state_dict(), ddp.module.state_dict(), optimizer.state_dict()))
        assert any(due is not None for due in saved[0]["due"]) == (num_steps < 6 or None) or num_steps == 6
        for number in range(num_steps, 12):
            step(ddp, optimizer, number)
        wanted = copy.deepcopy(ddp.module.state_dict())
    with replica(Net(), outer) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        ddp.module.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        ddp.outer.load_state_dict(saved[0])
        for number in range(num_steps, 12):
            step(ddp, optimizer, number)
        assert all(torch.equal(ddp.module.state_dict()[name], value) for name, value in wanted.items())


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("num_steps", some([3, 5], most=1))
def test_a_checkpoint_resumes_bit_for_bit_and_has_the_global_parameters(num_steps: int, tmp_path: Path) -> None:
    outer, path = Outer(every=4, fragments=2, delay=2), tmp_path / "saved"
    with replica(net(), outer) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(num_steps))
        save_checkpoint(path, ddp, optimizer, extra=num_steps)
        shared = ddp.outer.state_dict()["global"]
        train(ddp, optimizer, range(num_steps, 12))
        wanted = values_of(ddp.module)
    saved = load_file(path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in shared.items())
    with replica(Net(), outer) as ddp:
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
        assert load_checkpoint(path, ddp, optimizer) == num_steps
        train(ddp, optimizer, range(num_steps, 12))
        assert all(torch.equal(ddp.module.state_dict()[name], value) for name, value in wanted.items())


@pytest.mark.deep
@in_ranks(4)
@pytest.mark.parametrize(
    ("strategy", "param_wire", "num_steps"),
    some(
        [
            ("ddp", None, 5),
            ("zero1", "int8", 6),  # saved directly after an outer step, which has written into parameters
            ("zero1", None, 5),
            ("zero1", "int8", 5),
            ("zero2", "bfloat16", 8),
        ],
        most=2,
    ),
)
def test_a_checkpoint_of_rows_resumes_bit_for_bit(strategy: str, param_wire: str | None, num_steps: int, tmp_path: Path) -> None:
    path, found = tmp_path / "saved", []
    settings = {"strategy": strategy, "param_wire": param_wire}
    for resumes in (False, True):
        with (
            mesh_of(2, 2) as mesh,
            replica(net(), Outer(every=4, fragments=2, delay=2), device_mesh=mesh, **settings) as ddp,
        ):
            make = torch.optim.AdamW
            optimizer = make(ddp.parameters(), lr=0.01) if strategy == "ddp" else ShardedOptimizer(make, ddp, lr=0.01)
            if resumes:
                load_checkpoint(path, ddp, optimizer)
            else:
                train(ddp, optimizer, range(num_steps))
                save_checkpoint(path, ddp, optimizer)
            train(ddp, optimizer, range(num_steps, num_steps + 6))
            ddp.wait()
            found.append(values_of(ddp.module))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items() if "running" not in name)


@pytest.mark.deep
@in_ranks(2)
def test_a_plain_checkpoint_begins_outer_synchronization_and_one_of_it_begins_plain_training(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with contextlib.closing(DistributedDataParallel(net())) as plain:
        save_checkpoint(path, plain)
    with replica(Net(), Outer(every=1, fragments=1, delay=0)) as ddp:
        load_checkpoint(path, ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        require_equal(ddp.module, net())
        before = values_of(ddp.module)
        step(ddp, optimizer, 0)
        moved = max(
            (value.float() - before[name]).abs().max() for name, value in ddp.module.state_dict().items() if "weight" in name
        )
        assert moved < 0.1  # and not by the difference of what was loaded to what was there
        save_checkpoint(path, ddp, optimizer)
        shared = ddp.outer.state_dict()["global"]
    with contextlib.closing(DistributedDataParallel(Net())) as plain:
        load_checkpoint(path, plain, torch.optim.SGD(plain.parameters(), lr=0.01))
        assert all(torch.equal(plain.module.state_dict()[name], value) for name, value in shared.items())


@in_ranks(2)
def test_bad_input_is_named_when_the_model_is_wrapped() -> None:
    def wrap(outer: Outer) -> None:
        DistributedDataParallel(net(), config=SyncConfig(outer=outer)).close()

    assert text_of(ConfigError, lambda: wrap(Outer(every=9, fragments=5))) == (
        "fragments is 5, and the model has 4 layers.\n  SyncConfig(outer=Outer(fragments=...))\n"
        "  Give 4 or less: a fragment has whole layers."
    )
    text = text_of(PlanMismatch, lambda: wrap(Outer(every=2 + dist.get_rank(), fragments=1)))
    assert text.startswith("ranks disagree on the settings.\n")
    assert "first difference: outer.every is 2 on rank 0 and 3 on rank 1\n" in text


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_rank_that_steps_more_often_for_its_forwards_is_named() -> None:
    with replica(net(), Outer(every=4, fragments=1, delay=1)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

        def train() -> None:
            for number in range(8):
                optimizer.zero_grad()
                if dist.get_rank() == 0 or number % 2 == 0:  # rank 1 steps twice on one loss
                    loss_of(ddp, number, dist.get_rank()).backward()
                optimizer.step()

        text = text_of(Desync, train)
    assert text == (
        "rank 1 has stepped a different number of times than the other replicas for the forwards that it ran.\n"
        "  exchange of fragment 0: rank 0: 4 forwards before step 4, rank 1: 2 forwards before step 4\n"
        "  Look for a step, or a forward outside of accumulate(), that only some ranks run, and for a state of model.outer "
        "that only some have loaded."
    )


@in_ranks(2)
def test_ranks_are_compared_before_anyone_uses_the_global_parameters() -> None:
    with replica(net(), Outer(every=1, fragments=1, delay=0)) as ddp:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(1))
        for use in (ddp.outer.state_dict, lambda: ddp.outer.synchronized().__enter__()):
            leave_unread(ddp, [[2.0, 2.0, 9.0, 0.0, 0.0, 0.0], [2.0, 1.0, 9.0, 0.0, 0.0, 0.0]])
            assert text_of(Desync, use).startswith("rank 1 has stepped a different number of times ")
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(1, 2))


@in_ranks(2)
def test_a_step_within_synchronized_and_a_new_parameter_are_refused() -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        step(ddp, optimizer, 0)
        with ddp.outer.synchronized():
            text = text_of(PhaseError, lambda: step(ddp, optimizer, 1))
        assert text == (
            "an optimizer has stepped inside synchronized(): the step is lost, because the replica's own parameters come back.\n"
            f"  step 2, rank {dist.get_rank()}\n  Train outside of it."
        )
        ddp.module.more = nn.Linear(2, 2)
        optimizer.add_param_group({"params": list(ddp.module.more.parameters())})
        assert text_of(PhaseError, lambda: step(ddp, optimizer, 2)) == (
            "parameter 'more.weight' was added or unfrozen after the model was wrapped: it is in no fragment.\n"
            f"  outer synchronization, rank {dist.get_rank()}\n"
            "  Wrap the model again, with all parameters that are to be trained."
        )


@in_ranks(2)
def test_parameters_in_the_same_memory_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    config = SyncConfig(outer=Outer(every=2))
    assert text_of(ConfigError, lambda: DistributedDataParallel(model, config=config)) == (
        "parameters '0.weight' and '1.weight' lie in the same memory: outer synchronization would update each by itself.\n"
        "  SyncConfig(outer=...)\n  Make them one parameter (second.weight = first.weight)."
    )
    model[1].weight = model[0].weight
    DistributedDataParallel(model, config=config).close()


@in_ranks(2)
def test_steps_of_an_optimizer_that_is_not_torchs_are_counted_by_hand() -> None:
    with replica(nn.Linear(2, 2), Outer(every=1, fragments=1, delay=0)) as ddp:
        for _ in range(99):
            ddp(torch.ones(1, 2)).sum().backward()
        with pytest.warns(UserWarning, match="100 forwards have run, and no optimizer has stepped"):
            ddp(torch.ones(1, 2))
        with torch.no_grad():
            ddp.module.weight.fill_(1.0 + dist.get_rank())
        ddp.outer.step()
        assert same_everywhere(ddp.module.weight.detach())
        assert "step 1, 1 synchronizations" in repr(ddp.outer)


@in_ranks(2)
def test_parameters_without_an_optimizer_are_told_once_and_steps_count_without_them() -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.module.last.parameters(), lr=0.01)
        step(ddp, optimizer, 0)
        with pytest.warns(UserWarning, match="10 trained parameters are not stepped with the others"):
            step(ddp, optimizer, 1)
        step(ddp, optimizer, 2)
        assert ddp.outer.state_dict()["step"] == 2


@in_ranks(2)
def test_parameters_that_are_frozen_need_no_optimizer() -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(2))
        ddp.module.first.requires_grad_(False)
        trained = [param for param in ddp.parameters() if param.requires_grad]
        train(ddp, torch.optim.SGD(trained, lr=0.01), range(2, 6))  # a warning would be an error
        assert ddp.outer.num_synchronizations == 2


@in_ranks(2)
def test_a_step_by_hand_follows_parameters_that_were_loaded() -> None:
    with replica(net(), Outer(every=1, fragments=1, delay=0)) as ddp:
        loaded = Net().state_dict()
        ddp.module.load_state_dict(loaded)
        ddp.outer.step()
        assert all(torch.equal(ddp.module.state_dict()[name], value) for name, value in loaded.items())


@in_ranks(2, is_fresh=True)
def test_global_parameters_that_differ_are_named() -> None:
    with replica(net(), Outer(every=1, fragments=1, delay=0, wire=None), check_replicas_every=2) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        step(ddp, optimizer, 0)
        global_values(ddp, "last.bias").add_(dist.get_rank())
        step(ddp, optimizer, 1)
        text = text_of(ReplicaMismatch, lambda: step(ddp, optimizer, 2))
    assert text.startswith("parameter 'last.bias' has other values on rank 1 than on rank 0.\n  global parameters, step 3\n")


@pytest.mark.deep
@in_ranks(2)
def test_fragments_and_delay_are_chosen_alike_and_told() -> None:
    with replica(net(), Outer(every=6)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for number in range(14):
            step(ddp, optimizer, number)
        turns = torch.tensor(ddp.outer.state_dict()["turns"])
        assert same_everywhere(turns)
        report = ddp.report()
        assert report.outer.num_exchanges >= 1
        for text in (str(report), str(ddp.explain())):
            assert "Outer synchronization every 6 steps, fragments: " in " ".join(text.split())


@pytest.mark.deep
@in_ranks(2)
def test_a_copied_model_trains_as_a_new_one() -> None:
    outer = Outer(every=2, fragments=2, delay=1)
    reference = Reference(outer, 2)
    with replica(net(), outer) as ddp, contextlib.closing(copy.deepcopy(ddp)) as copied:
        optimizer = torch.optim.AdamW(copied.parameters(), lr=0.01)
        for number in range(5):
            step(copied, optimizer, number)
            reference.step()
        require_equal(copied.module, reference.models[dist.get_rank()])


@pytest.mark.deep
@in_ranks(2)
def test_an_attached_model_is_synchronized_too() -> None:
    outer = Outer(every=2, fragments=2, delay=1)
    reference, model = Reference(outer, 2), net()
    with contextlib.closing(attach(model, config=SyncConfig(outer=outer))) as sync:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(5):
            optimizer.zero_grad()
            loss_of(model, number, dist.get_rank()).backward()
            optimizer.step()
            reference.step()
        require_equal(model, reference.models[dist.get_rank()])
        assert sync.outer.num_synchronizations == 3


@in_ranks(2)
def test_a_rank_without_outer_synchronization_is_an_error_on_all() -> None:
    outer = Outer(every=2, fragments=1, delay=0) if dist.get_rank() == 0 else None
    text = text_of(PlanMismatch, lambda: DistributedDataParallel(net(), config=SyncConfig(outer=outer)))
    assert text.startswith("ranks disagree on the settings.\n")
    assert "first difference: outer" in text


class Repeats(torch.optim.SGD):
    """Calls its closure once more on the second rank."""

    def step(self, closure) -> None:
        for _ in range(1 + dist.get_rank()):
            closure()
        super().step()


@in_ranks(2)
def test_replicas_may_call_a_closure_a_different_number_of_times() -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = Repeats(ddp.parameters(), lr=0.01)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(ddp, 0, dist.get_rank())
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        assert ddp.outer.state_dict()["num_synchronizations"] == 1


@in_ranks(2)
def test_a_step_that_runs_a_forward_of_its_own_counts() -> None:
    class Holds(torch.optim.SGD):
        def step(self) -> None:
            self.closure().backward()
            super().step()

    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        optimizer = Holds(ddp.parameters(), lr=0.01)
        optimizer.closure = lambda: loss_of(ddp, 0, dist.get_rank())
        for _ in range(2):
            optimizer.step()
        assert ddp.outer.state_dict()["step"] == 2


@in_ranks(2)
def test_steps_count_after_one_that_has_raised() -> None:
    class Raises(torch.optim.SGD):
        def step(self) -> None:
            raise ZeroDivisionError

    with replica(net(), Outer(every=2, fragments=1, delay=0)) as ddp:
        raises = Raises(ddp.parameters(), lr=0.01)
        with pytest.raises(ZeroDivisionError):
            step(ddp, raises, 0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(1, 3))
        assert ddp.outer.state_dict()["step"] == 2


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("fragments", some(["auto", 1], most=1))
def test_a_load_on_one_rank_is_an_error_on_all(fragments: int | str) -> None:
    with replica(net(), Outer(every=2, fragments=fragments, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(3))
        if dist.get_rank() == 1:
            ddp.module.load_state_dict(Net().state_dict())
        text = text_of(ReplicaMismatch, lambda: train(ddp, optimizer, range(3, 6)))
    assert text == (
        "rank 1 has other global parameters than the other replicas.\n  exchange of fragment 0\n"
        "  Load the same parameters on every rank, or call broadcast_parameters() after. A run that resumes also needs the "
        "saved state of model.outer on every rank."
    )


@pytest.mark.deep
@in_ranks(2)
def test_no_exchange_on_its_way_is_lost_when_fragments_start_more_often_after_a_resume() -> None:
    with replica(net(), Outer(every=10, fragments=1, delay=3)) as ddp:
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(10))
        own, shared = values_of(ddp.module), ddp.outer.state_dict()
    assert shared["due"] == [13]
    with replica(net(), Outer(every=4, fragments=1, delay=3)) as ddp:
        ddp.module.load_state_dict(own)
        ddp.outer.load_state_dict(shared)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), range(10, 15))
        assert ddp.outer.num_synchronizations == 2  # after step 12, and after step 15


@in_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_is_frozen_later_stays_where_it_is(dtype: torch.dtype) -> None:
    with replica(nn.Linear(30, 30).to(dtype), Outer(every=1, fragments=1, delay=0)) as ddp:
        weight = ddp.module.weight
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            ddp(noise(6, 30, step=0, rank=dist.get_rank()).to(dtype)).square().mean().backward()
            optimizer.step()

        step()
        weight.requires_grad_(False)
        before = weight.clone()
        for _ in range(3):
            step()
        assert torch.equal(weight, before)


@in_ranks(2)
def test_the_state_is_neither_saved_nor_loaded_within_synchronized(tmp_path: Path) -> None:
    with replica(net(), Outer(every=3, fragments=1, delay=0)) as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        train(ddp, optimizer, range(4))
        own = values_of(ddp.module)
        wanted = (
            "the model has the global parameters: this call needs the replica's own.\n"
            f"  inside synchronized(), rank {dist.get_rank()}\n  Call it outside of synchronized()."
        )
        with ddp.outer.synchronized():
            assert text_of(PhaseError, ddp.outer.state_dict) == wanted
            assert text_of(PhaseError, lambda: ddp.outer.load_state_dict({})) == wanted
            text = text_of(CheckpointError, lambda: save_checkpoint(tmp_path / "saved", ddp, optimizer))
            assert "the model has the global parameters" in text

        def load() -> None:
            with ddp.outer.synchronized():
                ddp.module.load_state_dict(own)

        assert text_of(PhaseError, load) == (
            "parameters were loaded inside synchronized(): they are lost, because the replica's own parameters come back.\n"
            f"  rank {dist.get_rank()}\n  Load outside of it."
        )
        assert all(torch.equal(ddp.module.state_dict()[name], value) for name, value in own.items())

        def load_and_fail() -> None:
            with ddp.outer.synchronized():
                ddp.module.load_state_dict(own)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            load_and_fail()
        train(ddp, optimizer, range(4, 6))  # the global parameters are as before
        assert ddp.outer.state_dict()["num_synchronizations"] == 2


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_replica_with_a_gradient_that_is_not_finite_is_named_as_a_rank_of_all() -> None:
    with replica(net(), Outer(every=2, fragments=1, delay=0), nonfinite="raise") as ddp:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        (loss_of(ddp, 0, dist.get_rank()) * (torch.nan if dist.get_rank() == 1 else 1.0)).backward()
        if dist.get_rank() == 1:
            assert " are not finite (NaN or Inf) on rank 1.\n" in text_of(NonFiniteGradient, optimizer.step)
