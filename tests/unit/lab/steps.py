"""Steps that are planned and simulated: profiles, costs that are lines, and every grouping of a few random parameters.

Groupings are timed one event after another: that is what simulated steps are compared with.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from support.strategies import spec
from undertow.lab.profile import Profile
from undertow.plan import ParamSpec


@dataclass(frozen=True)
class LineCosts:
    lines: Mapping[str, tuple[float, float]]

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        fixed, per_byte = self.lines[kind]
        return fixed + per_byte * np.asarray(num_bytes, dtype=np.float64)

    direct_us = collective_us

    def of(self, kind: str, num_bytes: int) -> float:
        fixed, per_byte = self.lines[kind]
        return fixed + per_byte * num_bytes


def lines(reduction: tuple[float, float], gather: tuple[float, float] = (0, 0)) -> LineCosts:
    return LineCosts({"all_reduce": reduction, "reduce_scatter": reduction, "all_gather": gather})


FREE = lines((0, 0))


def profile_of(ready_us: Sequence[float], *, backward_us: float, numels: Sequence[int] = (), update_us: float = 5) -> Profile:
    return Profile(
        params=tuple(spec(f"p{i}", numel) for i, numel in enumerate(numels or [100] * len(ready_us))),
        ready_us=tuple(ready_us),
        forward_us=10,
        backward_us=backward_us,
        update_us=update_us,
    )


@dataclass(frozen=True)
class TableCosts:
    """A cost in microseconds for every number of bytes, a part of a byte as a whole one, by kind of collective."""

    tables: dict[str, list[float]]

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(self.tables[kind])[np.ceil(np.asarray(num_bytes, dtype=np.float64)).astype(np.int64)]

    direct_us = collective_us

    def of(self, kind: str, num_bytes: int) -> float:
        return self.tables[kind][num_bytes]


@dataclass(frozen=True)
class Case:
    params: Sequence[ParamSpec]
    order: Sequence[int]
    ready_us: Sequence[float]
    backward_end_us: float
    costs: TableCosts | LineCosts
    used_us: Sequence[float] = ()
    has_shards: bool = False

    def finish_us(self, groups: Sequence[Sequence[int]]) -> float:
        sizes = [self.num_bytes(group) for group in groups]
        through, last = 0.0, len(groups) - 1
        for at, group in enumerate(groups):
            ready = max(self.ready_us[param] for param in group)
            ready = max(ready, self.backward_end_us) if at == last else ready
            through = max(through, ready) + self.costs.of("reduce_scatter" if self.has_shards else "all_reduce", sizes[at])
        return through + self._stall_us(groups, sizes) if self.has_shards else through

    def num_bytes(self, group: Sequence[int]) -> int:
        return sum(self.params[param].num_bytes for param in group)

    def _stall_us(self, groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> float:
        """Gathers from the last bucket to the first; a forward that reads its parameters one by one and waits for each."""
        clock, there = 0.0, dict.fromkeys(self.order, 0.0)
        for group, size in zip(reversed(groups), reversed(sizes), strict=True):
            clock += self.costs.of("all_gather", size)
            there.update({param: max(clock, there[param]) for param in group})
        stall = 0.0
        for param in sorted(self.order, key=lambda param: self.used_us[param]):
            stall = max(stall, there[param] - self.used_us[param])
        return stall

    def groupings(self) -> Iterator[tuple[int, list[list[int]]]]:
        """Every way to cut the order into windows: how many windows, and their buckets."""
        places = range(1, len(self.order))
        for chosen in product((False, True), repeat=len(places)):
            cuts = [0, *(place for place, is_cut in zip(places, chosen, strict=True) if is_cut), len(self.order)]
            groups = [group for first, stop in pairwise(cuts) for group in self._window(first, stop)]
            yield len(cuts) - 1, groups

    def _window(self, first: int, stop: int) -> list[list[int]]:
        kinds = [self.params[param].kind for param in self.order[first:stop]]
        by_last = sorted(set(kinds), key=lambda kind: len(kinds) - kinds[::-1].index(kind))
        return [[param for param in self.order[first:stop] if self.params[param].kind == kind] for kind in by_last]

    def best_by_windows(self) -> dict[int, float]:
        best: dict[int, float] = {}
        for num_windows, groups in self.groupings():
            best[num_windows] = min(best.get(num_windows, math.inf), self.finish_us(groups))
        return best


def table_costs(rng: random.Random, total_bytes: int, shape: str) -> TableCosts:
    """Random costs of all collectives, of one shape: "affine", "concave", "steps", "monotone" or "wild"."""
    return TableCosts(
        {kind: _table(rng, range(total_bytes + 2), shape) for kind in ("all_reduce", "reduce_scatter", "all_gather")}
    )


def times_us(rng: random.Random, num: int) -> list[float]:
    return [float(rng.randrange(8)) for _ in range(num)] if rng.random() < 0.5 else [rng.uniform(0, 30) for _ in range(num)]


def _table(rng: random.Random, sizes: range, shape: str) -> list[float]:
    launch, slope, step = rng.uniform(0, 5), rng.uniform(0, 1), rng.choice([3, 5, 8])
    match shape:
        case "affine":
            return [launch + slope * size for size in sizes]
        case "concave":
            return [launch + 3 * slope * math.sqrt(size) for size in sizes]
        case "steps":
            return [launch + 3 * slope * (size // step) for size in sizes]
        case "monotone":
            return np.cumsum([rng.choice([0, 0, 1, 3]) * rng.random() for _ in sizes]).tolist()
        case _:
            return [float(rng.randrange(5)) if rng.random() < 0.5 else rng.uniform(0, 10) for _ in sizes]


SHAPES = ("affine", "concave", "steps", "monotone", "wild")


def random_case(rng: random.Random, shapes: tuple[str, ...] = SHAPES) -> Case:
    """Up to six parameters of one dtype or two, some of them sparse."""
    num = rng.randrange(1, 7)
    dtypes = rng.choice([["uint8"], ["uint8"], ["uint8", "bool"]])
    are_sparse = rng.choices([False, True], [9, 1], k=num)
    params = [
        ParamSpec(name=f"p{i}", shape=(rng.choice([0, 1, 2, 5, 9]),), dtype=rng.choice(dtypes), itemsize=1, is_sparse=is_sparse)
        for i, is_sparse in enumerate(are_sparse)
    ]
    ready = times_us(rng, num)
    return Case(
        params=params,
        order=rng.sample(range(num), num) if rng.random() < 0.3 else sorted(range(num), key=lambda param: ready[param]),
        ready_us=ready,
        backward_end_us=max(ready) + rng.choice([0.0, 3.0]),
        costs=table_costs(rng, sum(each.num_bytes for each in params), rng.choice(shapes)),
    )
