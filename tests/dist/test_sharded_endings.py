"""The process group is destroyed after the last step: parameters are whole on every rank, or every read raises."""

import copy
import gc
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel

from support.errors import text_of
from support.inside import call_before, interrupt, patience, sharding_of
from support.levels import some
from support.ranks import in_ranks
from support.sharded import MLP, Parameters, destroy, one_step, optimizer_for, reference, require_equal, training
from undertow import DistributedDataParallel, PeerFailed, PhaseError

NUM_STEPS = 3
LATE_S = 0.3  # longer than the other rank takes to destroy its groups and to read


def values_of(module: nn.Module) -> Parameters:
    return {name: value.clone() for name, value in module.state_dict().items()}


def closes(models: list[DistributedDataParallel], module: nn.Module) -> Parameters:
    models[0].close()
    return values_of(module)


def drops(models: list[DistributedDataParallel], module: nn.Module) -> Parameters:
    models.clear()
    gc.collect()
    return values_of(module)


def waits(models: list[DistributedDataParallel], module: nn.Module) -> Parameters:
    models[0].wait()
    return values_of(module)


Ending = Callable[[list[DistributedDataParallel], nn.Module], Parameters]
ENDINGS: dict[str, Ending] = {
    "reads the module": lambda _, module: values_of(module),
    "closes the model": closes,
    "drops the model": drops,
    "waits": waits,
    "averages": lambda _, module: values_of(AveragedModel(module).module),
    "saves the wrapper": lambda models, _: {
        name.removeprefix("module."): value for name, value in copy.deepcopy(models[0].state_dict()).items()
    },
}


def train(optimizer: torch.optim.Optimizer, model: DistributedDataParallel, *, late: str, mesh: DeviceMesh | None = None) -> None:
    """Trains until the process group is gone; rank 1 begins its last step, or sends its shards, later than the others."""
    for number in range(NUM_STEPS):
        if number == NUM_STEPS - 1 and late == "its step":
            optimizer.register_step_pre_hook(lambda *_: time.sleep(LATE_S * (dist.get_rank() == 1)))
        if number == NUM_STEPS - 1 and late == "its thread":
            call_before(model, "gathers", partial(time.sleep, LATE_S * (dist.get_rank() == 1)))
        one_step(model, optimizer, number)
    if mesh is not None:
        destroy(mesh)
    dist.destroy_process_group()


def require_trained(found: Parameters, expected: Parameters) -> None:
    require_equal({f"module.{name}": value for name, value in found.items()}, expected)


# Fresh ranks, because other tests could not use ranks without process groups.
@in_ranks(2, is_fresh=True)
@pytest.mark.parametrize("ending", some(ENDINGS, most=1))
def test_gathers_of_the_last_step_outlive_the_process_group(ending: str) -> None:
    expected = reference(MLP, "ddp", "SGD", num_steps=NUM_STEPS)
    model = DistributedDataParallel(MLP.model())
    train(optimizer_for(model, "zero1", "SGD"), model, late="its step")
    models, module = [model], model.module
    del model
    require_trained(ENDINGS[ending](models, module), expected)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_gathers_outlive_it_that_were_not_sent_yet() -> None:
    expected = reference(MLP, "ddp", "SGD", num_steps=NUM_STEPS)
    model = DistributedDataParallel(MLP.model())
    train(optimizer_for(model, "zero1", "SGD"), model, late="its thread")
    require_trained(values_of(model.module), expected)


TORN = (
    "the parameters are torn: this rank's shards have the values of the last step, and the other shards still have the values of "
    "the step before.\n"
    "  bucket 0, rank 0\n"
    "  Call model.wait() on every rank after the last step, before a rank ends or calls "
    "torch.distributed.destroy_process_group(). Now, call close(), then load other values: "
    "module.load_state_dict(state, assign=True)."
)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_parameters_whose_gathers_fail_after_that_are_torn_until_they_are_loaded() -> None:
    patience.VERDICT_S = 0.05
    model = DistributedDataParallel(MLP.model())
    optimizer = optimizer_for(model, "zero1", "SGD")
    one_step(model, optimizer)
    before = values_of(model.module)
    MLP.loss(model, 1).backward()
    if dist.get_rank() == 1:  # which never steps
        interrupt(sharding_of(model).group.process_group)
        return
    optimizer.step()
    dist.destroy_process_group()
    models, module = [model], model.module
    del model
    for ending in ("reads the module", "waits", "saves the wrapper", "closes the model", "drops the model", "averages"):
        assert text_of(PhaseError, lambda ending=ending: ENDINGS[ending](models, module)) == TORN, ending
    module.load_state_dict(before, assign=True)
    require_equal(values_of(module), before)


@pytest.mark.deep
@in_ranks(2, is_fresh=True)
def test_a_step_that_can_send_nothing_leaves_torn_parameters() -> None:
    with training(MLP.model(), optimizer="SGD") as (model, optimizer):
        one_step(model, optimizer)
        model.wait()
        MLP.loss(model, 1).backward()
        cut_off = mock.patch.object(sharding_of(model).shard_exchanges.inside, "all_gather", side_effect=KeyboardInterrupt)
        with cut_off, pytest.raises((KeyboardInterrupt, PeerFailed)):  # of this rank, or of the other one before
            optimizer.step()
        assert text_of(PhaseError, lambda: values_of(model.module)).startswith("the parameters are torn: ")
