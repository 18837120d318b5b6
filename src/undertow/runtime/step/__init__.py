"""The step: rounds, their phases, and the checks at their end."""
