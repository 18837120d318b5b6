"""The settings of the demo.

The variants of synchronization that it compares, and the text that it trains on; its results.
"""

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from undertow.cost import link_from_text
from undertow.errors import require
from undertow.profile import Profile
from undertow.schedule import STRATEGIES, strategy_named
from undertow.trace import Trace

NUM_WARM_UP_STEPS = 10  # until Undertow has measured, and has chosen its plan
_MAX_BYTES = 4 * 1024 * 1024  # of the text

TORCH_DDP = "torch-ddp"  # the variant that speeds are compared with
# Variants of averaging gradients over ranks and their labels, in the order the demo runs them.
# Gradients and all parameters are compared with the first variant's. A variant with shards is named
# after its strategy.
WAYS: Mapping[str, str] = {
    "per-parameter": "a reduction per parameter",
    "bucketed": "bucketed, after backward",
    "overlapped": "bucketed, overlapped",
    TORCH_DDP: "torch DDP, defaults",
    "undertow": "Undertow, defaults",
    "zero1": "Undertow, ZeRO-1",
    "zero2": "Undertow, ZeRO-2",
}
OURS = frozenset({"undertow", "zero1", "zero2"})
RESULTS = "results"  # the file in which rank 0 leaves them


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One run of the demo. Raises ConfigError for values that cannot work."""

    num_ranks: int = 2
    link: str = "1gbit"
    num_steps: int = 8  # measured steps per variant, after the warm-up
    out: Path = Path("out")
    strategy: str = "ddp"  # a strategy with shards is trained as an additional variant

    def __post_init__(self) -> None:
        link_from_text(self.link)
        require(
            strategy_named(self.strategy).crossing is None,
            f"strategy {self.strategy!r} is for several nodes, and the demo runs on one.",
            where="undertow demo",
            remedy='Take "zero1" or "zero2".',
        )

    @property
    def ways(self) -> tuple[str, ...]:
        """The compared variants, in this order."""
        return tuple(way for way in WAYS if way not in STRATEGIES or way == self.strategy)

    @property
    def is_exact(self) -> bool:
        """True if all variants are bit-identical.

        A + b is b + a, but three ranks may be added in any order.
        """
        return self.num_ranks <= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WayDone:
    """One variant on rank 0."""

    way: str
    typical: Trace  # of the step of median duration
    loss: float  # of the last step
    is_right: bool = True  # agrees with the first variant on every rank
    # the library's profile; None for other variants, and after too few steps
    profile: Profile | None = None


def load_corpus() -> bytes:
    """Returns the first few MiB of the standard library's modules in alphabetical order."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(module.read_bytes() for module in modules)[:_MAX_BYTES]
