"""The example profile: GPT-2 small by arithmetic."""

from itertools import accumulate

from undertow.plan import ParamSpec
from undertow.profile import Profile

_WIDTH, _NUM_BLOCKS = 768, 12
_NUM_TOKENS = 8192  # on each rank
_FLOPS_PER_US = 50e6  # 50 TFLOP/s
_UPDATE_BYTES_PER_US = 1e6  # 1 TB/s
_UPDATE_BYTES = 28  # of a parameter: AdamW reads parameter, gradient and two moments, and writes all but the gradient


def gpt2_profile() -> Profile:
    """Forward 2, backward 4 operations per token and parameter that it is multiplied with; the head is the tied embedding."""
    params, flops = _params()
    backward_us = [4 * _NUM_TOKENS * numel / _FLOPS_PER_US for numel in flops]
    # Layers come in reverse; the embedding is complete only when the first layer has had its turn.
    head_us = backward_us[0]
    ready_us = list(accumulate(backward_us[:0:-1], initial=head_us))[:0:-1]
    total_us = sum(backward_us)
    return Profile(
        name="GPT-2 small; times by arithmetic: 8,192 tokens per rank at 50 TFLOP/s",
        params=params,
        ready_us=tuple(round(time, 1) for time in (total_us, *ready_us)),
        forward_us=round(total_us / 2, 1),
        backward_us=round(total_us, 1),
        update_us=round(_UPDATE_BYTES * sum(spec.numel for spec in params) / _UPDATE_BYTES_PER_US, 1),
    )


def _params() -> tuple[tuple[ParamSpec, ...], list[int]]:
    """In the order of registration, and with how many elements of each a token is multiplied."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50_257, _WIDTH), "wpe.weight": (1024, _WIDTH)}
    for block in range(_NUM_BLOCKS):
        for name, shape in _BLOCK.items():
            shapes[f"h.{block}.{name}"] = shape
    shapes |= {"ln_f.weight": (_WIDTH,), "ln_f.bias": (_WIDTH,)}
    params = tuple(ParamSpec(name=name, shape=shape, dtype="float32", itemsize=4) for name, shape in shapes.items())
    return params, [spec.numel if len(spec.shape) == 2 and spec.name != "wpe.weight" else 0 for spec in params]


_BLOCK: dict[str, tuple[int, ...]] = {
    "ln_1.weight": (_WIDTH,),
    "ln_1.bias": (_WIDTH,),
    "attn.c_attn.weight": (_WIDTH, 3 * _WIDTH),
    "attn.c_attn.bias": (3 * _WIDTH,),
    "attn.c_proj.weight": (_WIDTH, _WIDTH),
    "attn.c_proj.bias": (_WIDTH,),
    "ln_2.weight": (_WIDTH,),
    "ln_2.bias": (_WIDTH,),
    "mlp.c_fc.weight": (_WIDTH, 4 * _WIDTH),
    "mlp.c_fc.bias": (4 * _WIDTH,),
    "mlp.c_proj.weight": (4 * _WIDTH, _WIDTH),
    "mlp.c_proj.bias": (_WIDTH,),
}
