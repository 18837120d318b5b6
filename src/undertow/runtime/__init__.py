"""Acts on torch: buckets, collectives, hooks, and the engine that interprets a schedule."""

# Imported before any group exists: its functions take the world group of that moment as a default.
# Torch itself imports it with the first optimizer; a group that it holds then is never destroyed,
# and the process may abort at exit.
import torch.distributed.nn.functional  # noqa: F401
