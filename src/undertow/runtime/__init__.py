"""Acts on torch: buckets, collectives, hooks, and the engine that interprets a schedule."""
