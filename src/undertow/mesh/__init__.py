"""Tensor parallelism beside data parallelism: what a DTensor is on this rank, and which ranks the
other axes of a mesh have. No other room knows DTensors."""
