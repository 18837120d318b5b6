"""The settings of the demo.

The variants of synchronization that it compares, and the text that it trains on; its results.
"""

import math
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from undertow.config import Outer
from undertow.errors import require
from undertow.lab.cost import link_from_text
from undertow.lab.profile import Profile
from undertow.schedule import STRATEGIES, strategy_named
from undertow.trace import Overlap, Trace

NUM_WARM_UP_STEPS = 10  # until Undertow has measured, and has chosen its plan
_MAX_BYTES = 4 * 1024 * 1024  # of the text

TORCH_DDP = "torch-ddp"  # the variant that speeds are compared with
INT8 = "int8"  # sends rounded gradients
OUTER = "outer"  # replicas train alone between exchanges
# Variants of training on several ranks and their labels, in the order the demo runs them. Gradients
# and all parameters are compared with the first variant's. A variant with shards is named after its
# strategy.
WAYS: Mapping[str, str] = {
    "per-parameter": "a reduction per parameter",
    "bucketed": "bucketed, after backward",
    TORCH_DDP: "torch DDP, defaults",
    "undertow": "Undertow, defaults",
    INT8: 'Undertow, wire="int8"',
    "zero1": "Undertow, ZeRO-1",
    "zero2": "Undertow, ZeRO-2",
    OUTER: "Undertow, outer",
}
OURS = frozenset({"undertow", INT8, "zero1", "zero2", OUTER})
RESULTS = "results"  # the file that rank 0 writes them to


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One run of the demo. Raises ConfigError for values that cannot work."""

    num_ranks: int = 2
    link: str = "250mbit"
    num_steps: int = 5  # measured steps per variant, after the warm-up
    out: Path = Path("out")
    strategy: str = "ddp"  # a strategy with shards is trained as an additional variant
    # the steps between two exchanges of a fragment: outer synchronization as another variant
    outer: int | None = None

    def __post_init__(self) -> None:
        link_from_text(self.link)
        if self.outer is not None:
            Outer(every=self.outer)
        require(
            strategy_named(self.strategy).crossing is None,
            f"strategy {self.strategy!r} is for several nodes, and the demo runs on one.",
            where="undertow demo",
            remedy='Take "zero1" or "zero2".',
        )

    @property
    def ways(self) -> tuple[str, ...]:
        """The compared variants, in this order."""
        asked = {self.strategy, "" if self.outer is None else OUTER}
        return tuple(way for way in WAYS if way not in (*STRATEGIES, OUTER) or way in asked)

    def num_measured(self, way: str) -> int:
        """Returns the measured steps of a variant; with outer synchronization, whole periods."""
        if way != OUTER or self.outer is None:
            return self.num_steps
        return self.outer * math.ceil(self.num_steps / self.outer)

    @property
    def is_exact(self) -> bool:
        """True if all variants that send whole gradients are bit-identical.

        A + b is b + a, but three ranks may be added in any order.
        """
        return self.num_ranks <= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WayDone:
    """One variant on rank 0."""

    way: str
    typical: Trace  # a step of that duration
    loss: float  # of the last step
    is_right: bool = True  # agrees with the first variant on every rank
    # the library's profile; None for other variants, and after too few steps
    profile: Profile | None = None
    step_us: float  # the median, with outer synchronization the mean
    overlap: Overlap  # of a step; with outer synchronization of all fragments over a period
    num_ops: str  # operations of a step, or of a period, as the table has them


def load_corpus() -> bytes:
    """Returns the first few MiB of the standard library's modules in alphabetical order."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(module.read_bytes() for module in modules)[:_MAX_BYTES]
