"""Lists the parameters that Muon is made for."""

from collections.abc import Iterable

from torch import nn

from undertow.errors import require


def hidden_matrices(
    model: nn.Module, *, exclude: Iterable[nn.Module | nn.Parameter] | None = None
) -> list[nn.Parameter]:
    """Returns the trained matrices of `model` that are neither embeddings nor the head, each once,
    in order of registration.

        hidden = undertow.hidden_matrices(model)
        ids = set(map(id, hidden))
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
        muon = undertow.ShardedOptimizer(torch.optim.Muon, model, params=hidden, lr=0.02)
        adamw = undertow.ShardedOptimizer(torch.optim.AdamW, model, params=rest, lr=3e-4)

    These are parameters of two axes, which `torch.optim.Muon` needs. Kernels of convolutions have
    more axes and are left out. So are weights of `nn.Embedding` and `nn.EmbeddingBag`, and a head
    that is tied to one.

    A model does not tell which layer is its head. By default it is the `nn.Linear` that is
    registered last. If that is wrong, name the head with `exclude`: a hidden layer may be
    registered last, a model may have several heads, or its head may use the embedding's weight
    without a layer. Also name embeddings that are a plain `nn.Parameter`.

    Args:
        model: The module, bare or wrapped.
        exclude: Modules and parameters of `model` to leave out besides embeddings. If it is given,
            even if it is empty, no head is guessed.

    Raises:
        ConfigError: If `exclude` names something that is not a part of `model`.
    """
    modules = list(model.modules())
    embeddings = [it for it in modules if isinstance(it, nn.Embedding | nn.EmbeddingBag)]
    if exclude is None:
        exclude = [it for it in modules if isinstance(it, nn.Linear)][-1:]
    left_out = {id(param) for module in embeddings for param in module.parameters()}
    parts = {id(part) for part in (*modules, *model.parameters())}
    for part in exclude:
        require(
            id(part) in parts,
            f"exclude must hold modules and parameters of the model, got {type(part).__name__}.",
            where="hidden_matrices",
            remedy="Give parts such as model.lm_head, of the same model.",
        )
        params = part.parameters() if isinstance(part, nn.Module) else (part,)
        left_out.update(map(id, params))
    return [
        param
        for param in model.parameters()
        if param.requires_grad and param.ndim == 2 and id(param) not in left_out
    ]
