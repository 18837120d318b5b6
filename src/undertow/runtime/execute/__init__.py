"""Runs a plan: its ops, the hooks that release them, and the conclusions of the ranks."""
