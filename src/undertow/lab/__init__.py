"""Predicts steps on other networks, shows where their time went, and runs the commands."""
