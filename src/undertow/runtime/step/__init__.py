"""What users ask an engine for: reductions, means, measurements, traces, steps in shards."""
