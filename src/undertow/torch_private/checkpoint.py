"""Private parts of torch.distributed.checkpoint, like `private` for the rest of torch."""

from collections.abc import Sequence
from typing import Any

import torch

from undertow.boxes import Box


def chunks(boxes: Sequence[Box]) -> list[Any]:
    """Returns the boxes that a rank has of a tensor, in the form that `__create_chunk_list__` must
    return."""
    # importing it takes as long as importing torch itself
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


def write_items(name: str, tensor: torch.Tensor, boxes: Sequence[Box]) -> list[Any]:
    """Returns the boxes of `tensor`, named `name`, that a rank writes, in the form that
    `__create_write_items__` must return."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk, properties=TensorProperties(dtype=tensor.dtype), size=tensor.shape
            ),
        )
        for chunk in chunks(boxes)
    ]
