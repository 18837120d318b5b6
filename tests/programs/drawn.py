"""Programs drawn at random, the same on every rank, and how one that fails is made smaller."""

import dataclasses
import random
from collections.abc import Callable, Iterator

from support.programs import PLANS, Program, events_of, run
from support.ranks import Ranks, RanksFailed
from support.units import IN_PARTS, UNITS

NUM_STEPS = 3
# Sharded optimizers step on shards of 32 bits at least, without rows.
WRITTEN = ("written", "written-and-used")
LATE = ("pack", "all_reduce", "reduce_scatter", "step", "bind", "all_gather")


def drawn(seed: int, num_ranks: int) -> Program:
    further = (random.Random(f"{name} {seed}") for name in ("between", "formats"))
    return Drawing(random.Random(seed), *further, num_ranks).program()


class Drawing:
    """One program on its way; what is drawn first bars some of what may follow."""

    def __init__(self, chance: random.Random, between: random.Random, formats: random.Random, num_ranks: int) -> None:
        self.chance, self.between, self.num_ranks = chance, between, num_ranks  # `between` decides on what comes between steps
        self.strategy = chance.choice(["ddp", "ddp", "ddp", "zero1", "zero2", *(["hybrid"] * (num_ranks == 4))])
        self.is_plain = self.strategy == "ddp"
        self.has_tokens = chance.choice([False, False, True, False])
        wire, param_wire = (formats.choice([None, None, "bfloat16"]) for _ in range(2))
        # A gradient that comes in parts is rounded in parts.
        barred = (*(() if self.is_plain else ("table", "bag", "bfloat16", "half")), *(IN_PARTS if wire else ()))
        self.units = ["linear", *chance.choices([kind for kind in UNITS if kind not in barred], k=chance.randint(1, 4))]
        self.units += ["linear"]
        self.num_units = len(self.units)
        self.has_stepped = False  # with nothing after it
        self.has_mean = False  # that no optimizer has stepped on
        self.has_hook = self.is_plain and self.likely(0.15)
        self.formats = {
            "wire": None if self.has_hook else wire,
            "param_wire": None if self.is_plain else param_wire,
        }

    def likely(self, probability: float) -> bool:
        return self.chance.random() < probability

    def program(self) -> Program:
        settings = {
            "reduction": self.chance.choice(["ordered", "native"]),
            "order": self.chance.choice(["observed", "reverse"]),
            "overlap": self.likely(0.8),
            "average_in_collective": self.likely(0.8),
            "nonfinite": "skip",
            **{name: wire for name, wire in self.formats.items() if wire is not None},
        }
        return Program(
            units=" ".join(self.units),
            before=self.chance.choice(["", "", f"freeze {self.unit()}"]),
            events=", ".join(event for _ in range(NUM_STEPS) for event in self.step() if event),
            times=1,
            strategy=self.strategy,
            is_attached=self.is_plain and self.likely(0.2),
            has_hook=self.has_hook,
            plan=self.chance.choice(list(PLANS)),
            settings=settings,
        )

    def step(self) -> Iterator[str]:
        change = self.change() if self.likely(0.3) else ""
        # What a backward of the bare module leaves must not be there if units change, nor statistics if it moves them.
        is_bare = self.has_stepped and not change and "norm" not in self.units and self.between.random() < 0.3
        self.has_stepped = False
        had_mean, self.has_mean = self.has_mean, False
        yield f"saliency {'|'.join(self.between.choice(['now', '']) for _ in range(self.num_ranks))}" if is_bare else ""
        yield change
        yield f"late {self.chance.randrange(self.num_ranks)} {self.chance.choice(LATE)}" if self.likely(0.15) else ""
        yield "zero" if change else self.chance.choice(self.clearings())
        yield (
            self.chance.choice(["fail backward", "fail backward|", "fail |backward"])
            if "norm" not in self.units and self.likely(0.05)  # whose statistics it would change
            else ""
        )
        num_accumulated = self.chance.choice([0, 0, 1, 2])
        # The window ends before the backward that synchronizes, as at the end of an epoch.
        is_cut = num_accumulated > 0 and self.between.random() < 0.25
        for _ in range(num_accumulated):
            # On top of a mean, a rank whose loss reaches nothing counts as one that looks at its loss, and averages nothing.
            forward = self.forward(reaches=is_cut and had_mean)
            yield from (
                "|".join(f"{word.removesuffix(' quiet')} quiet" for word in forward.split("|")) if is_cut else forward,
                self.tokens(),
                self.chance.choice(["accumulate", "accumulate flagged", "accumulate leaves"]),
            )
        if is_cut:
            yield "step"
            self.has_stepped = True
            return
        # A forward behind a synchronization that has brought nothing, on any rank, would owe another one.
        looks = "norm" not in self.units and self.likely(0.1)
        # Parameters that are new, or thawed, are written to in the first synchronization: no other graph may have them.
        is_plain = change.startswith(("append", "replace", "thaw"))
        yield from self.synchronization(is_plain=is_plain, reaches=looks)
        if self.likely(0.2):
            yield from self.synchronization(is_plain=False, reaches=looks)
        is_scaled = self.is_plain and self.likely(0.1)  # what a backward of the bare module then adds cannot be told apart
        yield "scale" if is_scaled else ""
        yield f"look {self.of_ranks(['now', ''])}" if looks else ""
        if self.likely(0.1):
            self.has_mean = True
            return  # without a step
        yield "step"
        self.has_stepped = not is_scaled
        yield f"evaluate {self.of_ranks(['now', ''])}" if self.likely(0.1) else ""
        yield "reload" if self.likely(0.1) else ""
        yield "forget" if self.between.random() < 0.1 else ""
        yield f"resume {self.between.choice(['model', 'optimizer'])}" if self.between.random() < 0.1 else ""

    def clearings(self) -> list[str]:
        return ["zero", "zero", "zero in-place", "", *(["hold"] if self.is_plain else [])]

    def synchronization(self, *, is_plain: bool, reaches: bool) -> Iterator[str]:
        """A rank that reaches nothing joins once for each forward; in all but the plain way it must reach something."""
        how = 1.0 if is_plain else self.chance.random()
        yield self.forward(reaches=reaches or how < 0.4)
        if how < 0.1:
            yield from (self.tokens(), "accumulate", "reduce")
        elif how < 0.2:
            yield from (self.tokens(), "backward retain", self.tokens(), "backward")
        elif how < 0.3:
            yield from (self.forward(reaches=True), self.tokens(), "backward", self.tokens(), "backward")
        elif how < 0.4:
            yield from (self.forward(reaches=True), self.tokens(), "backward together")
        elif how < 0.45:
            overflow = f"overflow {self.of_ranks(['now', ''])}"
            yield from (
                overflow,
                self.tokens(),
                "backward",
                "step",
                "zero",
                self.forward(reaches=reaches),
                self.tokens(),
                "backward",
            )
        else:
            yield from (self.tokens(), "backward")

    def forward(self, *, reaches: bool = False) -> str:
        word = self.chance.choice(["", "", "", " quiet"])
        return f"forward {'|'.join(self.order(reaches=reaches or word != '') + word for _ in range(self.num_ranks))}"

    def order(self, *, reaches: bool) -> str:
        """Unit 0 is never frozen."""
        indices = "".join(map(str, range(self.num_units)))
        picked = "".join(self.chance.choices(indices, k=self.chance.randint(1, self.num_units + 1)))
        order = self.chance.choice([indices, indices[::-1], picked, picked, *(["-"] * self.likely(0.3))])
        # Zeros that a function has written, or that came late, look like gradients that were thrown away.
        may_be_empty = {"norm", *WRITTEN}.isdisjoint(self.units)
        return (f"0{order.strip('-')}" if reaches else order) + (" empty" if may_be_empty and self.likely(0.2) else "")

    def tokens(self) -> str:
        return f"tokens {self.of_ranks('1234567')}" if self.has_tokens else ""

    def unit(self) -> int:
        """One that may be frozen: of another kind its loss would have a graph all the same, which reaches nothing."""
        return self.chance.choice([index for index, kind in enumerate(self.units) if index > 0 and kind not in IN_PARTS])

    def change(self) -> str:
        may_grow = self.is_plain and not self.has_hook and self.num_units < 8
        change = self.chance.choice(["freeze", "thaw", *(["append", "replace", "move"] if may_grow else [])])
        self.num_units += change == "append"
        return change if change in ("append", "move") else f"{change} {self.unit()}"

    def of_ranks(self, words: str | list[str]) -> str:
        return "|".join(self.chance.choice(words) for _ in range(self.num_ranks))


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Without the events and settings that it fails without as well."""
    for number in reversed(range(len(list(events_of(program.events))))):
        events = list(events_of(program.events))
        smaller = dataclasses.replace(program, events=", ".join(events[:number] + events[number + 1 :]))
        program = smaller if fails(smaller) else program
    return program


def main(seed: int, num_ranks: int, call: Callable[[Program], None] = run) -> None:
    """Prints the smallest program that fails, when `call` runs it, as the program of `seed` does."""
    with Ranks(num_ranks) as ranks:

        def fails(program: Program) -> bool:
            try:
                ranks.run(call, program, timeout_s=10.0)
            except RanksFailed:
                return True
            return False

        print(shrunk(drawn(seed, num_ranks), fails))
