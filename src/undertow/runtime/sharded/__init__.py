"""Shards: who owns which part of parameters and gradients, and how the whole comes back."""
