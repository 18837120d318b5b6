"""A group without ranks that could be lost: what a communication hook asks of the group of its model."""

from types import SimpleNamespace

ALONE = SimpleNamespace(is_broken=False, member="of one", result=lambda future: future.result())
