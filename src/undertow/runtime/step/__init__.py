"""The step: rounds, their phases, and what is checked when they end."""
