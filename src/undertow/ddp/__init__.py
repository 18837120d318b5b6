"""Data-parallel training of a module: the wrapper, `attach`, and the arguments of torch's
wrapper."""
