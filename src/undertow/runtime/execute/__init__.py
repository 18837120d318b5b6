"""Runs a plan: its ops, the hooks that release them, and what the ranks conclude."""
