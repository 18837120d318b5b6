"""Whole steps over a real shaped link: one rank in each network namespace, systems in turn."""
