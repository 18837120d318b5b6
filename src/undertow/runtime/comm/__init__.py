"""Undertow's process groups, collectives, and agreements between ranks."""
