"""What torch.distributed.checkpoint keeps to itself, like what is in `private`."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Sequence
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


class _MetadataUnpickler(pickle.Unpickler):
    """Of all that a pickle can name, only what the metadata of a checkpoint consists of."""

    def find_class(self, module: str, name: str) -> Any:
        is_plain = (module, name) in _IN_METADATA or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype))
        if is_plain:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


_IN_METADATA = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


def read_checkpoint_metadata(path: Path) -> Any:
    """What torch's FileSystemWriter has written as `.metadata`: a pickle, which is read without running anything else."""
    from torch.distributed.checkpoint.metadata import Metadata

    with path.open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    return metadata


def sizes_in_checkpoint(metadata: Any) -> dict[str, int]:
    """The files that hold the tensors, and how many bytes each has."""
    sizes: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
    return sizes


def save_checkpoint(state_dict: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Writes it with torch.distributed.checkpoint; a collective call. `folder` is new: nothing is overwritten."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder)  # waits until files are on the disk
    save(state_dict, storage_writer=writer, process_group=group, no_dist=group is None)


class CheckpointReads:
    """What is read of a checkpoint on this rank: tensors into `room`, and other things, which are then in `values`.

    `on_error` makes the error for a file that cannot be read.
    """

    def __init__(self, folder: Path, metadata: Any, *, on_error: Callable[[str, Exception], Exception]) -> None:
        self.values: dict[str, Any] = {}
        self._folder = folder
        self._metadata = metadata
        self._on_error = on_error

    def run(self, room: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        """`room` has a tensor by the name of each one that is wanted, and None for other things; a collective call."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reads, values, metadata = self, self.values, self._metadata

        class Planner(DefaultLoadPlanner):
            def load_bytes(self, read_item: Any, value: Any) -> None:  # torch's unpickles whatever is there
                values[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

        class Reader(FileSystemReader):
            def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
                return metadata

            def read_data(self, plan: Any, planner: Any) -> Any:
                done: torch.futures.Future[None] = torch.futures.Future()
                for name, items in reads.by_file(plan.items).items():
                    try:
                        super().read_data(dataclasses.replace(plan, items=items), planner)
                    except Exception as error:
                        raise reads._on_error(name, error) from None
                done.set_result(None)
                return done

        load(room, storage_reader=Reader(self._folder), planner=Planner(), process_group=group, no_dist=group is None)

    def by_file(self, items: Sequence[Any]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for item in items:
            found.setdefault(self._metadata.storage_data[item.storage_index].relative_path, []).append(item)
        return found
