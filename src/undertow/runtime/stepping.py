"""What a sharded optimizer and the forwards of its model have to do with each other."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from undertow.runtime.formation import Formation
from undertow.runtime.group import OwnGroup
from undertow.runtime.native_exchange import exchanges_over
from undertow.runtime.places import Places
from undertow.runtime.sharding import Sharding
from undertow.schedule import Strategy


class ShardedSteps:
    """Steps of `module` under a `strategy` with shards, exchanged over `group`, which is this one's alone.

    What every rank has updated is gathered under the next forward, or at once if it does not `overlap`.
    """

    def __init__(
        self,
        module: weakref.ref[nn.Module],
        formation: Formation,
        group: OwnGroup,
        strategy: Strategy,
        *,
        in_order: bool,
        overlap: bool,
        is_compiled: bool,
    ) -> None:
        self.strategy = strategy
        self.group = group
        self._module = module
        self._formation = formation
        self._exchanges = exchanges_over(group, in_order=in_order)
        self._overlap = overlap
        self._sharding: Sharding | None = None
        self._places: Places | None = None
        self._is_compiled = is_compiled

    def begin(self) -> Sharding:
        """An optimizer steps: what this rank owns, with nothing in flight. The same object while the layout is the same."""
        self.wait()
        sharding = self._formation.shard(self.strategy, self._exchanges)
        if sharding is not self._sharding:
            self._sharding = sharding
            self._watch(sharding)
        sharding.adopt_gradients()
        return sharding

    def end(self) -> None:
        """It has stepped: every rank's shards are on their way to the others."""
        if self._formation.is_active:
            self._formation.assembly.gather()
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Returns when every parameter is what the optimizer has made of it."""
        if self._sharding is not None:
            self._sharding.gathers.wait_for_all()

    def full_gradient(self, param: Tensor) -> Tensor | None:
        """The mean gradient of a parameter; a collective call where ranks have shards of it."""
        sharding = self._sharding
        index = None if sharding is None else next((at for at, it in enumerate(sharding.params) if it is param), None)
        return param.grad if sharding is None or index is None else sharding.full_gradient(index)

    def forward_begins(self, *, is_training: bool, is_compiled: bool) -> None:
        """Called before every forward of the whole module, also of an evaluation."""
        self._is_compiled |= is_compiled
        module = self._module()
        if self._places is not None and module is not None:
            self._places.root_begins(module, is_training=is_training and not is_compiled)

    def forward_ends(self) -> None:
        if self._places is not None:
            self._places.root_ends()

    def close(self) -> None:
        """Takes hooks off and ends threads; nothing may be in flight."""
        if self._places is not None:
            self._places.close()
        self._exchanges.close()

    def _watch(self, sharding: Sharding) -> None:
        if self._places is not None:
            self._places.close()
            self._places = None
        module = self._module()
        if sharding.group.num_ranks == 1 or module is None:
            return
        # Ranks that find different orders still agree on what goes with what: gathers have numbers, where they may differ.
        follow = self._formation.assembly.gather_in if self._exchanges.may_differ_in_order else _leave
        self._places = Places(module, sharding.buckets_of(), sharding.gathers, on_order=follow, only_root=self._is_compiled)


def _leave(_order: object) -> None:
    return None
