"""Checkpoints of a model and its optimizer, in the format of torch.distributed.checkpoint."""
