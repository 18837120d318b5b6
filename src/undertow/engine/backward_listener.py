"""The calls that hooks of a backward make."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class BackwardListener(ABC):
    """An `Engine`, as the hooks on its parameters and the end of a backward see it.

    These modules cannot name that class, because it is made of them.
    """

    @abstractmethod
    def first_gradient_arrives(self, task: int) -> None:
        """Called with the first gradient in backward `task`, and again after its round is
        closed."""

    @abstractmethod
    def bucket_is_full(self, index: int) -> None:
        """Called when all gradients of a bucket have arrived."""

    @abstractmethod
    def arrives_outside(self, param: Tensor) -> None:
        """Called with a gradient of a parameter that the plan does not have."""

    @abstractmethod
    def backward_ends(self) -> None:
        """Called at the end of the outermost of nested backwards."""

    @abstractmethod
    def backward_is_gone(self) -> None:
        """Called when a backward, nested or not, has ended, or was ended by an exception."""
