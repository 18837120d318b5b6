"""Calls of users on an engine: reductions, means, measurements, traces, steps in shards."""
