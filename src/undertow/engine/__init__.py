"""The engine: what happens in a step."""
