"""Synchronizes a module: its own parameters, and its experts' over other groups of ranks.
All of them share its forwards and backwards."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from undertow.engine.agreed_errors import require_outside_of_backward
from undertow.engine.engine import Engine, SiblingEngines
from undertow.engine.step_events import is_outermost_forward
from undertow.errors import all_of
from undertow.sync.group_sync import GroupSync
from undertow.torch_private import private
from undertow.torch_private.module_hook import ModuleHook, cut_graphs


class ModuleSync:
    """The synchronization of a module's own parameters, `own`, and of its `experts`: one for each
    group of experts, in the order of the settings.

    A GradientSync holds this object, and so do the hooks of an attached module. When nothing holds
    it, the synchronization is closed.
    """

    def __init__(self, own: GroupSync) -> None:
        self.own = own
        self.experts: list[ModuleSync] = []
        self.is_attached = False  # True if the module's own forwards are watched
        self._hooks: list[RemovableHandle] = []  # of an attached module
        own.close_with(self)
        self.take_part_together()

    @property
    def parts(self) -> tuple[GroupSync, ...]:
        """The synchronization of the dense parameters, and one of each group of experts."""
        return (self.own, *(expert.own for expert in self.experts))

    @property
    def engines(self) -> list[Engine]:
        return [part.engine for part in self.parts]

    def take_part_together(self) -> None:
        """Makes a backward that reaches a parameter of any part a synchronization of all parts."""
        siblings = SiblingEngines(self.engines, close=weakref.WeakMethod(self.close))
        for engine in self.engines:
            engine.take_part_with(siblings)

    def wait_for_parameters(self) -> None:
        """Waits for all parameters that a sharded optimizer updates."""
        all_of(*(part.wait_for_parameters for part in self.parts))

    def share(self, kinds: Collection[str], *, source: int = 0) -> None:
        """Copies the "parameters" or "buffers" of rank `source`, and of the first rank of experts'
        groups; a collective call."""
        self.own.open_group()
        if self.own.all_ranks.num_ranks == 1:
            return
        self.wait_for_parameters()
        self.own.share(kinds, source=source)
        for expert in self.experts:
            expert.share(kinds)

    # A forward.

    @property
    def is_training_forward(self) -> bool:
        """True if a forward that starts now is a training forward.

        The module is in training mode and gradients are enabled.
        """
        return self.own.module.training and is_outermost_forward()

    def cut_bytes(self) -> int:
        """Returns the bucket size at which torch.compile cuts graphs of the module, or 0 if they
        stay whole."""
        return self.own.engine.current_plan.compiled.cut_bytes

    def watch_forwards(self) -> None:
        """Registers hooks at the start and the end of every forward of an attached module, until
        `close`.

        A single rank has none until a communication hook needs them, unless it is a replica.
        """
        is_active = any(engine.current_plan.is_active for engine in self.engines)
        are_needed = is_active or self.own.outer is not None
        if not are_needed or not self.is_attached or self._hooks:
            return
        module = self.own.module
        begins, ends = ModuleHook(module, self._hook_begins), ModuleHook(module, self.forward_ends)
        self._hooks = [
            module.register_forward_pre_hook(begins, prepend=True),
            module.register_forward_hook(ends, always_call=True),
            *cut_graphs(module, self.cut_bytes),
        ]

    def _hook_begins(self) -> None:
        own = self.own
        follows = own.config.buffers != "off" and own.engine.progress.are_buffers_due
        self.forward_begins(
            buffers_follow=0 if follows else None, is_compiled=torch.compiler.is_compiling()
        )

    @private.untraced
    def forward_begins(self, *, buffers_follow: int | None = 0, is_compiled: bool = False) -> None:
        """Called before each forward of the module.

        Starts a step and, unless `buffers_follow` is None, synchronizes buffers.
        """
        if not self.experts:
            self.own.forward_begins(buffers_follow, is_compiled=is_compiled)
            return
        all_of(
            *(
                partial(part.forward_begins, buffers_follow, is_compiled=is_compiled)
                for part in self.parts
            )
        )

    @private.untraced
    def forward_ends(self) -> None:
        """Called after each forward of the module."""
        self.own.forward_ends()
        for expert in self.experts:
            expert.own.forward_ends()

    # The end.

    def close(self) -> None:
        """Removes all hooks and destroys Undertow's process groups; later calls do nothing.

        A backward whose forward has already run will warn. Raises PhaseError inside a backward.
        """
        if all(part.is_closed for part in self.parts):
            return
        require_outside_of_backward(
            "close()",
            where=f"rank {self.own.group.rank}",
            remedy="Call it after backward: gradients of this one may be on their way.",
        )
        # The own part last: its group watches the ranks for the experts too.
        all_of(*(expert.close for expert in self.experts), self._close)

    def _close(self) -> None:
        try:
            self.own.close()
        finally:
            for hook in self._hooks:
                hook.remove()
