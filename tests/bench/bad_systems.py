"""Systems that fail, for tests of the benchmark; `options["how"]` says in which way."""

import os
import signal

import torch.distributed as dist
from benchmarks.shaped.systems import Setting
from benchmarks.shaped.systems.plain import PlainSystem
from benchmarks.shaped.truth import NUM_STEPS
from torch import Tensor


class Averaging(PlainSystem):
    def backward(self, batch: tuple[Tensor, ...]) -> None:
        super().backward(batch)
        for param in self.bare.parameters():
            dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)


class Dying(Averaging):
    """Its rank 1 is killed in the first backward after those that show whether it trains right."""

    num_backwards = 0

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self.num_backwards += 1
        if self.num_backwards > NUM_STEPS and dist.get_rank() == 1:
            print("the last line of rank 1", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        super().backward(batch)


def build(setting: Setting) -> PlainSystem:
    of_class = Dying if setting.options["how"] == "dies" else PlainSystem  # which forgets to average
    return of_class(setting.model, setting.model)
