"""The module: which parameters are trained, ignored or replaced."""
