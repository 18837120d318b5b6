"""DeepSpeed's ZeRO stages 1 and 2 around torch's SGD; options are those of its `zero_optimization`.

Its collectives are synchronous where there are no device streams.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

os.environ["DS_ACCELERATOR"] = "cpu"  # before the import, which chooses
import deepspeed
from torch import Tensor

from benchmarks.shaped.systems import Setting, System, sgd


class DeepSpeed:
    """A step of DeepSpeed's engine."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        self._engine = engine

    def backward(self, batch: tuple[Tensor, ...]) -> None:
        self._engine.backward(self._engine(*batch))

    def update(self) -> None:
        self._engine.step()  # clears the gradients too

    def finish(self) -> None:
        pass

    def parameters(self) -> Mapping[str, Tensor]:
        return dict(self._engine.module.named_parameters())

    def is_settled(self) -> bool:
        return True

    def told(self) -> Mapping[str, str]:
        return {"version": deepspeed.__version__}


def build(setting: Setting) -> System:
    # It would compile a reduction through shared memory, which is not the link that is measured.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"overlap_comm": True, "compute_grad_norm": False, **setting.options},
        "zero_allow_untested_optimizer": True,  # torch's SGD
        "gradient_clipping": 0.0,  # its default clips to a norm of 1
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=setting.model, optimizer=sgd(setting.model), config=config, dist_init_required=False)
    return DeepSpeed(engine)
