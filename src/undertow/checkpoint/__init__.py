"""Checkpoints of a model and its optimizer, as safetensors files and JSON."""
