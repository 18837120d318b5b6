"""The activity of this rank: the training of a model, as other ranks may ask for it.

Activity     the state of a model's training: its steps, its wait, its collective calls
doing_in     the activity of a thread, from its frames

Reasons: docs/design/lost-ranks.md.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from undertow.ranks.answers import Answer, Call, Ranks, Run

_NUM_FRAMES = 12
# folders of torch and Undertow
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep)
# Parts of a file's path, and the activity of a thread that runs its code.
_ACTIVITIES = {
    "/torch/utils/data/": "loading data",
    "/torch/optim/": "in the optimizer",
    "/torch/distributed/distributed_c10d.py": "in {function} of torch.distributed",
    "/torch/autograd/": "in backward",
    "/torch/_tensor.py": "in backward",
}


@dataclass(slots=True)
class Activity:
    """The training of one model in this process. The training thread writes its part.

    A query from another rank reads it.
    """

    # completed synchronizations; True if a step has begun since. Set by `Engine`, and for replicas
    # by `OuterSync` or `OuterAxis`.
    steps: Callable[[], tuple[int, bool]] = lambda: (0, True)
    module: Callable[[], nn.Module | None] = lambda: None  # a weak reference
    # the known training thread: this one until another trains
    thread: int = field(default_factory=threading.get_ident)
    # its name, and when it began; without a name if this rank does not wait
    wait: tuple[str, float] = "", 0.0
    # how often it has made each collective call, and the last one, by their ranks
    num_calls: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)
    last_calls: dict[tuple[int, ...], str] = field(default_factory=dict)
    _before: Answer | None = None  # the last answer to a query

    def num_steps(self) -> int:
        return self.steps()[0]

    def waited_s(self) -> float:
        waits_for, since_s = self.wait
        return time.monotonic() - since_s if waits_for else 0.0

    def answer(self, rank: int, about: Sequence[Call] = ()) -> Answer:
        """Returns what this rank does, and which of the calls in `about` it has not made."""
        step, has_begun = self.steps()
        waits_for, since_s = self.wait
        if waits_for:
            return Answer(
                step,
                waits_for,
                waited_s=time.monotonic() - since_s,
                since_s=since_s,
                calls=self._calls(),
                lacks=self._lacks(rank, about),
            )
        frames = frames_of(self.thread)
        doing = doing_in(frames, self._names())
        if not has_begun:
            since = f"since synchronization {step}" if step else "yet"
            doing += f", no training forward {since} (if its data has ended: finish())"
        return Answer(step, "", "\n".join((doing, *stack_lines(frames))))

    def answer_again(self, rank: int, about: Sequence[Call]) -> tuple[Answer, bool]:
        """Returns the answer, and True if this rank has been in the same wait since it answered
        before."""
        before, self._before = self._before, self.answer(rank, about)
        return self._before, self._before.is_like(before)

    def _calls(self) -> list[Call]:
        return [
            Call(name, _runs(ranks), self.num_calls[name, ranks])
            for ranks, name in list(self.last_calls.items())
        ]

    def _lacks(self, rank: int, about: Sequence[Call]) -> list[Call]:
        counted = list(self.num_calls.items())  # the training thread may add to them
        made = {(name, _runs(ranks)): number for (name, ranks), number in counted}
        return [
            call
            for call in about
            if call.is_of(rank) and made.get((call.name, call.ranks), 0) < call.number
        ]

    def _names(self) -> dict[int, str]:
        """Returns the names of the model's modules, by id."""
        model = self.module()
        with contextlib.suppress(RuntimeError):  # the model may be changing at this moment
            if model is not None:
                return {id(module): name for name, module in model.named_modules()}
        return {}


@cache
def _runs(ranks: tuple[int, ...]) -> tuple[Run, ...]:
    return tuple(Ranks.of(ranks).runs)


def doing_in(frames: Sequence[FrameType], modules: Mapping[int, str]) -> str:
    """Describes a thread's activity from its frames, innermost last.

    `modules` maps ids of the model's modules to names.
    """
    for frame in reversed(frames):
        path = frame.f_code.co_filename.replace(os.sep, "/")
        function = frame.f_code.co_name
        for part, text in _ACTIVITIES.items():
            if part in path:
                return text.format(function=function)
        name = modules.get(id(frame.f_locals.get("self"))) if function == "_call_impl" else None
        if name is not None:
            return f"in the forward of {name!r}" if name else "in the forward of the model"
    return "in code outside of the model"


def frames_of(thread: int) -> list[FrameType]:
    """Returns the stack of a thread, innermost frame last."""
    innermost = sys._current_frames().get(thread)
    frames = () if innermost is None else traceback.walk_stack(innermost)
    return [frame for frame, _ in frames][::-1]


def stack_lines(frames: Sequence[FrameType]) -> list[str]:
    """Returns file, line and function of the innermost frames, without values (maybe secret) or
    source (maybe stale).

    Of the frames of torch and Undertow only the innermost of all: the script's lines tell more.
    """
    told = [frame for frame in frames[:-1] if not _is_of_library(frame)] + [*frames[-1:]]
    return [
        f"{os.sep.join(frame.f_code.co_filename.split(os.sep)[-3:])}, line {frame.f_lineno}, in "
        f"{frame.f_code.co_name}"[:200]
        for frame in told[-_NUM_FRAMES:]
    ]


def _is_of_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_LIBRARIES)
