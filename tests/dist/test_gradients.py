"""Where gradients lie, how often they are sent, and what is left out; their values are in test_programs.py."""

import copy

import pytest
import torch
import torch.distributed as dist

from support.errors import text_of
from support.models import CASES, Branches, noise
from support.naive import TIMEOUT_S, collectives, groups_of, naive_mean, require_same_gradients, wrapped, wrapped_and_bare
from support.ranks import in_ranks
from support.sharded import training
from support.units import Units
from undertow import DistributedDataParallel, ExpertGroup, PhaseError


@in_ranks(2, 3)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("case_name", CASES)
def test_gradients_are_views_of_buckets_at_the_same_place_in_every_step(case_name: str, set_to_none: bool) -> None:
    """Each lies in a storage that is larger than itself: a trailer follows it at least."""
    case, places = CASES[case_name], []
    with wrapped_and_bare(case.model(), order="reverse", bucket_cap_mb=3e-4, buffers="off") as (ddp, bare):
        for step in range(4):
            for model in (ddp, bare):
                model.zero_grad(set_to_none=set_to_none)
                case.loss(model, step).backward()
            naive_mean(bare)
            require_same_gradients(ddp, bare)
            assert all(param.grad.untyped_storage().nbytes() > param.grad.nbytes for param in ddp.parameters())
            places.append([param.grad.data_ptr() for param in ddp.parameters()])
    assert places == places[:1] * 4


@in_ranks(2, 3)
def test_a_gradient_of_the_users_that_no_rank_adds_to_stays_where_it_is() -> None:
    with wrapped(Branches()) as ddp:
        weight = ddp.module.layers[1].weight
        weight.grad = torch.ones(4, 4)
        place = weight.grad.data_ptr()
        for step in range(3):
            ddp(noise(2, 4, step=step), (0, 2)).sum().backward()
            assert weight.grad.data_ptr() == place


@in_ranks(2, 3)
def test_ignored_parameters_keep_their_local_gradient() -> None:
    with wrapped_and_bare(Branches(2), ignore=("layers.0.weight",)) as (ddp, bare):
        local = copy.deepcopy(bare)
        for model in (ddp, bare, local):
            model(noise(2, 4), (0, 1)).sum().backward()
        naive_mean(bare)
        bare.layers[0].weight.grad = local.layers[0].weight.grad
        require_same_gradients(ddp, bare)


@in_ranks(2, 3)
def test_late_parts_cost_a_second_round_once() -> None:
    """Six buckets; in the first step those of the middle layer's weight and bias go out twice."""
    with wrapped(Units("linear twice-reentrant linear"), bucket_cap_mb=1e-6, order="reverse") as ddp, collectives() as called:
        for step, num_calls in enumerate([8, 6, 6, 6]):
            called.clear()
            ddp(noise(3, 4, step=step), "012").sum().backward()
            assert called == ["all_reduce"] * num_calls


@in_ranks(2)
def test_settings_of_torchs_class_that_we_do_not_need_are_accepted() -> None:
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, static_graph=True, gradient_as_bucket_view=True)
    ddp(noise(2, 4), (0,)).sum().backward()
    assert ddp.module.layers[1].weight.grad is None
    ddp.close()


@in_ranks(2)
def test_experts_of_one_rank_that_got_nothing_are_named() -> None:
    """Layers 1 and 2 are experts that this rank alone has."""
    group = groups_of([0], [1])[0]
    experts = tuple(ExpertGroup(match=f"layers.{index}.*", process_group=group) for index in (1, 2))
    with wrapped(Branches(), experts=experts) as ddp:
        for used, unused in (((0, 1), {"2"}), ((0,), {"1", "2"}), ((1,), {"0", "2"})):
            ddp(noise(2, 4), used).sum().backward()
            ddp.finish()  # where nothing dense was reached
            assert {name.split(".")[1] for name in ddp.unused_parameters} == unused
    dist.destroy_process_group(group)


@in_ranks(2)
def test_a_rank_alone_notes_gradients_without_a_frame() -> None:
    """A rank alone waits for no gradient: what notes them is C, and gone with the wrapper."""
    group, model = groups_of([0], [1])[0], Branches()
    with wrapped(model, process_group=group, record="off"):
        hooks = [hook for param in model.parameters() for hook in (param._post_accumulate_grad_hooks or {}).values()]
        assert len(hooks) == len(list(model.parameters()))
        assert not any(hasattr(hook, "__code__") or hasattr(hook, "func") for hook in hooks)
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    dist.destroy_process_group(group)


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
def test_a_gradient_that_is_written_too_late_for_an_eager_step_is_an_error() -> None:
    """As from autograd."""
    units = Units("linear written-and-used linear")
    with training(units, "zero1", "SGD", eager=True, bucket_cap_mb=1e-6) as (ddp, optimizer):
        ddp(noise(3, 4), "012").square().mean().backward()
        optimizer.step()
        with pytest.raises(PhaseError, match=r"^parameters are read in the backward that has updated them already\."):
            ddp(noise(3, 4), "012").square().mean().backward()


@in_ranks(2, is_fresh=True, timeout_s=TIMEOUT_S)
@pytest.mark.parametrize("way", ["sum", "weights"])
def test_what_is_written_into_an_earlier_result_is_an_error(way: str) -> None:
    """The written layer writes before any gradient has told that a backward begins."""
    with wrapped(Units("linear linear written"), op="sum" if way == "sum" else "weighted", bucket_cap_mb=1e-6) as ddp:

        def train() -> None:
            ddp.zero_grad(set_to_none=False)
            if way == "weights":
                ddp.loss_weight(1.0)
            ddp(noise(3, 4), "012").sum().backward()

        train()
        assert text_of(PhaseError, train) == (
            "something else than autograd has added to a gradient that holds an earlier result, "
            "and the two cannot be told apart.\n"
            "  parameter 'units.2.layer.weight', before the first gradient of a backward arrived\n"
            "  Clear gradients with zero_grad(set_to_none=True) before each backward, and change them before the forward only."
        )
