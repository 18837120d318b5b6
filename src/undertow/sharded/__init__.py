"""Shards: each rank's parts of parameters and gradients, and how they become whole again."""
