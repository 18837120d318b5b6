"""Systems that fail, for tests of the benchmark; `options["how"]` says in which way."""

import os
import signal
from collections.abc import Mapping

import torch.distributed as dist
from benchmarks.matrix.systems import Setting
from benchmarks.matrix.systems.plain import PlainSystem
from benchmarks.matrix.truth import NUM_STEPS
from torch import Tensor
from torch.nn import Module


class Averaging(PlainSystem):
    def backward(self, batch: tuple[Tensor, ...]) -> None:
        super().backward(batch)
        for param in self.bare.parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)


class Late(Averaging):
    def __init__(self, *models: Module) -> None:
        super().__init__(*models)
        self.before = [param.detach().clone() for param in self.bare.parameters()]

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        now = [param.detach().clone() for param in self.bare.parameters()]
        self.put(self.before)
        super().backward(batch)
        self.put(now)
        self.before = now

    def put(self, values: list[Tensor]) -> None:
        for param, value in zip(self.bare.parameters(), values, strict=True):
            param.data.copy_(value)


class Parted(Averaging):
    def parameters(self) -> Mapping[str, Tensor]:
        return {name: param + dist.get_rank() for name, param in super().parameters().items()}


class Dying(Averaging):
    """Its rank 1 is killed in the first backward after those that show whether it trains right."""

    num_backwards = 0

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self.num_backwards += 1
        if self.num_backwards > NUM_STEPS and dist.get_rank() == 1:
            print("the last line of rank 1", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        super().backward(batch)


SYSTEMS = {"dies": Dying, "reads too early": Late, "wrong on rank 1": Parted}


def build(setting: Setting) -> PlainSystem:
    how = setting.options["how"]
    if how == "fails on rank 1" and dist.get_rank() == 1:
        raise ValueError("not on this rank")
    return SYSTEMS.get(how, PlainSystem)(setting.model, setting.model)  # otherwise it forgets to average
