"""Outer synchronization: replicas train alone, and average their differences now and then."""
