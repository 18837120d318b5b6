"""The module: its trained, ignored and replaced parameters."""
