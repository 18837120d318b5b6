"""Averages gradients by hand: no hooks, no schedule."""
