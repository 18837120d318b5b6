"""An optimizer of which every rank keeps its shard."""
