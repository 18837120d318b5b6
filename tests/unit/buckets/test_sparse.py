"""What a bucket does with sparse gradients."""

import torch
from torch import nn

from support.strategies import spec
from undertow.buckets.sparse import SparseGradients
from undertow.plan import plan_from_groups


def test_a_sparse_gradient_stays_a_tensor_of_merged_rows() -> None:
    layer = nn.Embedding(4, 2, sparse=True)
    (bucket,) = plan_from_groups([spec("weight", 8, is_sparse=True)], ((0,),), num_ranks=2).buckets
    gradients = SparseGradients(bucket, [layer.weight])
    layer(torch.tensor([1, 3, 1])).sum().backward()
    assert (gradients.pack(()), layer.weight.grad) == ([], None)
    (rows,) = gradients.values()
    assert (rows.is_coalesced(), rows.indices().tolist()) == (True, [[1, 3]])
    gradients.bind(())
    assert layer.weight.grad is rows
