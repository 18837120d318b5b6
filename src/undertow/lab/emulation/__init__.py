"""An emulated network link: a torch.distributed backend around gloo."""
