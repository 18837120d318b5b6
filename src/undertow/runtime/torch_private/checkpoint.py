"""What torch.distributed.checkpoint keeps to itself, like what is in `private`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from undertow.boxes import Box


def chunks(boxes: Sequence[Box]) -> list[Any]:
    """What torch.distributed.checkpoint wants of `__create_chunk_list__`: the boxes that a rank has of a tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata  # takes as long to import as torch itself

    return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]


def write_items(name: str, tensor: torch.Tensor, boxes: Sequence[Box]) -> list[Any]:
    """What it wants of `__create_write_items__`: that a rank has these boxes of `tensor`, called `name`, to write."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties(dtype=tensor.dtype)
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.shape),
        )
        for chunk in chunks(boxes)
    ]


def save_checkpoint(state_dict: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Writes it with torch.distributed.checkpoint; a collective call. `folder` is new: nothing is overwritten."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder)  # waits until files are on the disk
    save(state_dict, storage_writer=writer, process_group=group, no_dist=group is None)
