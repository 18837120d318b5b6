"""Benchmarks: every figure of the README comes out of here."""
