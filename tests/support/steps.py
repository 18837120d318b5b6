"""Profiles, and costs that are lines, for steps that are planned and simulated."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from support.strategies import spec
from undertow.profile import Profile


@dataclass(frozen=True)
class LineCosts:
    lines: Mapping[str, tuple[float, float]]

    def collective_us(self, kind: str, num_bytes: ArrayLike) -> NDArray[np.float64]:
        fixed, per_byte = self.lines[kind]
        return fixed + per_byte * np.asarray(num_bytes, dtype=np.float64)


def lines(reduction: tuple[float, float], gather: tuple[float, float] = (0, 0)) -> LineCosts:
    return LineCosts({"all_reduce": reduction, "reduce_scatter": reduction, "all_gather": gather})


FREE = lines((0, 0))


def profile_of(ready_us: Sequence[float], *, backward_us: float, numels: Sequence[int] = (), update_us: float = 5) -> Profile:
    params = tuple(spec(f"p{i}", numel) for i, numel in enumerate(numels or [100] * len(ready_us)))
    return Profile(params=params, ready_us=tuple(ready_us), forward_us=10, backward_us=backward_us, update_us=update_us)


def random_profile(seed: int, num: int) -> Profile:
    numbers = random.Random(seed)
    ready_us = [float(numbers.randint(1, 60)) for _ in range(num)]
    numels = [numbers.randint(1, 50) for _ in range(num)]
    return profile_of(ready_us, backward_us=max(ready_us), numels=numels, update_us=3)
