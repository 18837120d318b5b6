"""The order in which gradients really arrive."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from undertow.plan import observed
from undertow.runtime.comm.group import OwnGroup, Pending
from undertow.runtime.execute.hooks import remove_all
from undertow.runtime.torch_private import private


class ObservedOrder:
    """Rank 0's order of arrival: watched for one round, sent to all, and then taken by all."""

    def __init__(self, params: Sequence[Tensor], group: OwnGroup) -> None:
        self._params = params
        self._group = group
        self._seen: list[Tensor] = []
        self._hooks: list[RemovableHandle] = [private.hook_gradients(param, self._seen.append) for param in params]
        self.sent: Pending[Tensor] | None = None

    def send(self) -> None:
        """Ends the watch and sends what rank 0 has seen; a second call does nothing.

        Not waited for: with several models in one backward, another rank may be in another one's turn.
        """
        if not self._hooks:
            return
        order = torch.tensor(observed(len(self._params), self.close()), dtype=torch.int64)
        # [number of parameters]
        self.sent = self._group.broadcast(order.to(self._group.device), "the order of rank 0's gradients")

    def take(self) -> list[int] | None:
        """Waits for the order that was sent and returns it, once."""
        pending, self.sent = self.sent, None
        return None if pending is None else pending.take().tolist()

    def close(self) -> list[int]:
        """Removes the hooks; returns the parameters whose gradients have arrived, in that order."""
        remove_all(self._hooks)
        index_of = {id(param): index for index, param in enumerate(self._params)}
        order = [index_of[id(param)] for param in self._seen]
        self._seen.clear()
        return order
