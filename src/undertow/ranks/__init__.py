"""Detects ranks that are late, lost or failed, and ends waits for them with an error that says
so."""
