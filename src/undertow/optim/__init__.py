"""Sharded optimizers: each rank stores and updates its share of the optimizer state."""
