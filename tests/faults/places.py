"""Places of a training at which a rank fails, and what the other ranks say then."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from support.faults import SMALL, Fault, outcomes
from support.processes import Ended

WITHIN_S = 10.0
GONE = """rank {faulty} is gone: its process exited or was killed without reporting an error.
  {where}
  The step is incomplete on every rank. Find out why it ended (memory, the scheduler), and restart from a checkpoint."""
FAILED = """rank {faulty} has failed: support.faults.BadBatch: row 7 has no label
  {where}
  The step is incomplete on every rank. The traceback is in the log of rank {faulty}."""
FINISHED = (
    "rank {faulty} has left: it has finished after 3 synchronizations, and others wait for it.\n"
    "  {where}\n"
    "  Give every rank the same number of batches, have a rank without data call finish(), or train inside join() of the "
    "wrapper (not with a ShardedOptimizer)."
)


@dataclass(frozen=True)
class Place:
    point: str
    way: str = "ddp"
    step: int | None = 3  # in which others wait for the rank: after an optimizer's step they are in the next one
    passage: int = 0

    def fault(self, kind: str, num_ranks: int, **more: Any) -> Fault:
        settings = {**SMALL, **more.pop("settings", {})}
        how = {"rank": num_ranks - 1, "way": self.way, "passage": self.passage, **more}
        return Fault(kind=kind, point=self.point, num_ranks=num_ranks, settings=settings, **how)

    def told(self, fault: Fault, kind: str, text: str) -> list[Ended]:
        """How the other ranks have ended: all with that error, in time."""
        found = outcomes(fault)
        where = "the making of a process group"
        if self.step is not None:
            where = f"synchronization {self.step + (self.way == 'a hook')}"  # the change to the hook is one too
        for rank in fault.others:
            assert (found[rank].kind, found[rank].text, found[rank].seconds < WITHIN_S) == (
                kind,
                text.format(faulty=fault.rank, where=f"{where}, rank {rank}"),
                True,
            ), found[rank].log
        if fault.kind == "killed":
            assert found[fault.rank].exit_code == -9
        return [found[rank] for rank in fault.others]


PLACES = {
    "in data": Place("data"),
    "in forward": Place("forward"),
    "in backward": Place("backward"),
    "in sharded backward": Place("backward", "zero1"),
    "in hybrid backward": Place("backward", "hybrid"),
    "in expert backward": Place("backward", "experts"),
    "in launch": Place("before all_reduce", "goes on", passage=1),  # the first bucket has left, the second has not
    "in comm hook": Place("hook", "a hook"),
    "in buffers": Place("buffers"),
    "in mean": Place("mean", "a mean"),
    "in join": Place("data", "join"),
    "in optimizer": Place("optimizer", step=4),
    "in gathers": Place("after step", "zero1", step=4),
    "in checkpoint": Place("checkpoint", "sharded checkpoints", step=4),
    "before checkpoint": Place("save", "checkpoints", step=4),
    "in construction": Place("construction", step=0),
    "connecting in construction": Place("connection", step=0),
    "before construction": Place("start", step=None),
}


def alternately(names: Iterable[str]) -> list[tuple[str, int]]:
    """Each name with two ranks or with three: how many there are changes none of the places."""
    return [(name, 2 + number % 2) for number, name in enumerate(names)]
