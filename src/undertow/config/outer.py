"""The settings of outer synchronization."""

import dataclasses
import math
from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any, Literal

from undertow.config.dtypes import dtype_name
from undertow.config.known_settings import with_known_settings
from undertow.errors import one_of, require
from undertow.foreign import as_float
from undertow.wire import AUTO, PARAM_WIRES


@with_known_settings()
@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """Settings of outer synchronization: replicas train alone for `every` steps.

    A replica is one rank, or one row of a two-dimensional DeviceMesh. The layers of the model form
    fragments. A fragment's exchange averages, over replicas, the difference between the global
    parameters and the replica's own. Then an outer optimizer, SGD with momentum, steps on the mean.

    All floating-point buffers become their mean over replicas, without an outer step. This suits
    statistics, but mixes queues, codebooks and rotary tables that replicas have changed: leave
    those out with `ignore`.

    Over some outer steps it multiplies the learning rate of your own optimizer by up to
    `lr / (1 - momentum)`: 1.4 by default, and 7 with the momentum of 0.9 that papers have. After a
    change of either, tune that learning rate again. `lr=1.0, momentum=0.0` takes the mean of the
    replicas' parameters, and saves the memory of the momentum.

    Args:
        every: Steps between two exchanges of a fragment.
        lr: The learning rate of the outer optimizer.
        momentum: Its momentum, from 0 to less than 1.
        nesterov: True uses Nesterov momentum.
        fragments: Number of fragments; at most the number of layers. "auto" measures the first
            steps and the link.
        delay: Steps of training that hide an exchange; 0 waits for it at once. A fragment loses the
            training of its replica in them. "auto" measures, and takes a tenth of `every` at most.
        wire: The format of differences, "int8" or "bfloat16"; None is full width. "float16" would
            lose small ones.
        mix: The share that a replica keeps of the parameters it has, from 0 to less than 1.

    Raises:
        ConfigError: For every value that cannot work.

    ```python
    config = SyncConfig(outer=Outer(every=30))
    ```
    """

    every: int = 0  # must be given
    lr: float = 0.7
    momentum: float = 0.5
    nesterov: bool = True
    fragments: int | Literal["auto"] = "auto"
    delay: int | Literal["auto"] = "auto"
    wire: Literal["bfloat16", "int8"] | Any | None = "int8"
    mix: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "wire", dtype_name(self.wire))
        delay = self.delay
        checks = (
            ("every", _is_whole(self.every, least=1), "a whole number of steps, at least 1", "30"),
            ("lr", 0 < as_float(self.lr) < math.inf, "a positive number", "0.7"),
            ("momentum", 0 <= as_float(self.momentum) < 1, "from 0 to less than 1", "0.9"),
            ("nesterov", type(self.nesterov) is bool, "True or False", "True"),
            (
                "fragments",
                self.fragments == AUTO or _is_whole(self.fragments, least=1),
                'a whole number of at least 1, or "auto"',
                "4",
            ),
            (
                "delay",
                delay == AUTO or _is_whole(delay, least=0),
                'a whole number of steps, at least 0, or "auto"',
                "1",
            ),
            ("mix", 0 <= as_float(self.mix) < 1, "from 0 to less than 1", "0.0"),
        )
        for name, holds, wanted, example in checks:
            require(
                holds,
                f"{name} must be {wanted}, got {brief(getattr(self, name))}.",
                where="Outer",
                remedy=f"Write {name}={example}.",
            )
        require(
            not isinstance(delay, int) or delay < self.every,
            f"delay must be less than every={self.every}, got {delay}.",
            where="Outer",
            remedy="An exchange of a fragment ends before its next one begins: give a smaller "
            "delay.",
        )
        require(
            self.wire in (None, *PARAM_WIRES),
            f"wire cannot be {self.wire!r}.",
            where="Outer",
            remedy=one_of(self.wire, (None, *PARAM_WIRES)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name."""
        return dataclasses.asdict(self)


def _is_whole(value: object, *, least: int) -> bool:
    return type(value) is int and value >= least
