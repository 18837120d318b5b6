"""Buckets of gradients: storage, `.grad`, trailer, reduction."""
