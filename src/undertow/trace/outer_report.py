"""The report of outer synchronization."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterReport:
    """Exchanges between replicas that train alone; the times are of the last 64."""

    every: int  # steps between two exchanges of a fragment
    fragments: int  # 0 until they are chosen
    delay: int  # steps that hide an exchange
    reason: str
    num_exchanges: int  # since the model was wrapped
    sent_bytes: int  # of the largest exchange, on this rank
    exchange_ms: float  # median, from its start until the mean was there
    exposed_ms: float  # mean, that the step waited for it
    num_left_out: int = 0  # exchanges that have left out a replica that was not finite

    @property
    def text(self) -> str:
        """The report in a line."""
        if self.fragments == 0:
            return "Outer synchronization: fragments are chosen after the first steps."
        hidden_ms = max(0.0, self.exchange_ms - self.exposed_ms)
        left_out = ""
        if self.num_left_out:
            left_out = f" A replica that was not finite was left out: {self.num_left_out}."
        return (
            f"Outer synchronization every {self.every} steps, fragments: {self.fragments}, delay: "
            f"{self.delay} ({self.reason}). Exchanges so far: {self.num_exchanges}. One of at most "
            f"{self.sent_bytes / 1e6:.2f} MB takes {self.exchange_ms:.1f} ms, {hidden_ms:.1f} "
            f"hidden and {self.exposed_ms:.1f} exposed.{left_out}"
        )
