"""Experts: which parameters only some ranks have in common, and who reduces their gradients."""

import math
from dataclasses import dataclass
from typing import Any

from undertow.errors import require
from undertow.foreign import as_float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGroup:
    """Experts whose gradients are reduced over a separate group: the ranks that hold the same
    experts.

    Args:
        match: A pattern of parameter and buffer names, such as "*.experts.*"; `*`, `?` and `[...]`
            as in `fnmatch`.
        process_group: The torch.distributed.ProcessGroup of the ranks that hold the same experts as
            this rank.
        divisor: The sum over those ranks is divided by it. If tokens of all ranks reach an expert,
            give the number of all ranks: the mean covers their batches. Every gradient is
            multiplied by the size of the process group over the divisor when autograd adds it to
            `.grad`; one that you write there yourself is not. None uses the size of the process
            group.

    Raises:
        ConfigError: If the pattern is not a non-empty string, or if the divisor is not a positive
            number.

    ```python
    SyncConfig(experts=(ExpertGroup(match="*.experts.*", process_group=group),))
    ```
    """

    match: str
    process_group: Any
    divisor: float | None = None

    def __post_init__(self) -> None:
        require(
            isinstance(self.match, str) and self.match != "",
            f"match must be a pattern of parameter names, got {self.match!r}.",
            where="ExpertGroup",
            remedy='Write match="*.experts.*"; for several patterns give several groups.',
        )
        require(
            self.divisor is None or 0 < as_float(self.divisor) < math.inf,
            f"divisor must be a positive number, got {self.divisor!r}.",
            where=f"ExpertGroup(match={self.match!r})",
            remedy="Give the number of ranks whose tokens reach the experts, or leave it out for "
            "the size of the group.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields without the process group, which exists in this process only."""
        return {"match": self.match, "divisor": self.divisor}
