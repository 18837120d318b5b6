"""A model of transformers, distributed by its own plan, beside data parallelism."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from support.ranks import in_ranks
from support.tensor_parallel import mean_by_hand, mesh_of_four, require_same_parts
from undertow import DistributedDataParallel


def llama(mesh: DeviceMesh) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    return apply_tensor_parallelism(model, mesh["tp"], model._expand_parallel_plan(model.tp_plan))


@pytest.mark.slow
@in_ranks(4, is_fresh=True, timeout_s=240.0)
def test_a_llama_with_its_own_plan_has_the_gradients_of_a_mean_by_hand() -> None:
    with mesh_of_four() as mesh:
        replica = mesh["dp"].get_local_rank()
        model, bare = DistributedDataParallel(llama(mesh), device_mesh=mesh["dp"]), llama(mesh)
        kinds = {isinstance(param, DTensor) for param in bare.parameters()}
        assert kinds == {True, False}  # norms are plain
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, bare)]
        for step in range(3):
            words = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(10 * step + replica))
            for net, optimizer in zip((model, bare), optimizers, strict=True):
                optimizer.zero_grad()
                net(input_ids=words, labels=words).loss.backward()
            mean_by_hand(bare, mesh["dp"].get_group())
            require_same_parts(model.module, bare)
            for optimizer in optimizers:
                optimizer.step()
        model.close()
