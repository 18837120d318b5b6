"""Training on a mesh: see support/sharded.py."""

from support.sharded import chain, hybrid, mesh_of

__all__ = ["chain", "hybrid", "mesh_of"]
