"""What surrounds a step, called from a function that is compiled: torch.compile finds nothing of ours to compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import undertow
from support.drop_in import TIMEOUT_S
from support.models import CASES, noise
from support.ranks import Ranks
from support.sharded import parameters, require_equal, training
from undertow import average_gradients, clip_grad_norm_

MLP = CASES["mlp"]
OURS = str(Path(undertow.__file__).parent)
Call = Callable[[], Any]


def compiled_of_ours() -> list[str]:
    """Our functions that torch.compile has looked through since its last reset, by file and name."""
    from torch._dynamo.convert_frame import input_codes

    codes = [ref() for ref in input_codes.seen]
    return sorted({f"{Path(code.co_filename).name}: {code.co_name}" for code in codes if code and OURS in code.co_filename})


def calls_of_a_step(ddp: Any, opt: Any, step: int, *, eager: bool) -> dict[str, Call]:
    """Everything between one forward and the next, in an order in which each is right."""
    weight, is_sharded = ddp.module[0].weight, isinstance(opt, undertow.ShardedOptimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss: Tensor = MLP.loss(ddp, step)
    with_barrier: dict[str, Call] = {
        "unscale": lambda: scaler.unscale_(opt),
        "clip all": lambda: clip_grad_norm_(ddp, 1.0),
        "clip": lambda: opt.clip_grad_norm_(1.0) if is_sharded else None,
        "scaled step": lambda: scaler.step(opt),
    }
    return {
        "weight": lambda: ddp.weight(5.0),
        "backward": (loss if eager else scaler.scale(loss)).backward,
        "finish": ddp.finish,
        "sync.finish": ddp.sync.finish,
        "full gradient": lambda: ddp.full_gradient(weight),
        **({"step": opt.step} if eager else with_barrier),
        "zero_grad": lambda: opt.zero_grad(set_to_none=False),
        "wait": ddp.wait,
        "sync.wait": ddp.sync.wait,
        "state": opt.state_dict,
        "average": lambda: average_gradients([noise(3)]),
    }


def train(strategy: str, *, eager: bool, run: Callable[[Call], Any]) -> dict[str, Tensor]:
    """The parameters after a few steps, of which `run` makes each call."""
    with training(MLP.model(), strategy, "SGD", eager=eager) as (ddp, opt):
        for step in range(3):
            for call in calls_of_a_step(ddp, opt, step, eager=eager).values():
                run(call)
        with ddp.no_sync():
            MLP.loss(ddp, 3).backward()
        reductions: list[Any] = []
        run(lambda: reductions.append(ddp.reduce_gradients_async()))
        run(reductions[0].wait)
        run(opt.step)
        return parameters(ddp)


def compiled_call_by_call(strategy: str, eager: bool) -> list[str]:
    from torch._dynamo.convert_frame import input_codes

    torch._dynamo.reset()
    input_codes.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile looks for a `.grad` of the loss
        found = train(strategy, eager=eager, run=lambda call: torch.compile(call, backend="eager")())
    ours = compiled_of_ours()
    assert len(input_codes.seen) > 0
    require_equal(train(strategy, eager=eager, run=lambda call: call()), found)
    return ours


@pytest.mark.parametrize(("strategy", "eager"), [("ddp", False), ("zero1", False), ("zero1", True)])
def test_nothing_of_ours_is_compiled_with_what_calls_it(two_ranks: Ranks, strategy: str, eager: bool) -> None:
    assert two_ranks.run(compiled_call_by_call, strategy, eager, timeout_s=TIMEOUT_S) == [[], []]
