"""Checkpoints that torch has written, and such that somebody has changed: nothing outside of the folder is read, nothing runs."""

import io
import json
import math
import os
import pickle
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import metadata as torchs
from torch.distributed.checkpoint.filesystem import _StorageInfo

from support.checkpoints import rewrite
from support.errors import text_of
from undertow import CheckpointError, load_checkpoint, save_checkpoint
from undertow.boxes import Box, boxes_of_range
from undertow.checkpoint.files import read_entries
from undertow.checkpoint.metadata import file_sizes, stored_entries
from undertow.runtime.torch_private import checkpoint as private_checkpoint
from undertow.runtime.torch_private import private

DATA, NAME = "__0_0.distcp", "model.0.weight"


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "saved"
    save_checkpoint(path, *made(seed=1), extra={"step": 2})
    return path


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def refusal(path: Path) -> str:
    """The error's text; the model and the optimizer are as they were."""
    model, optimizer = made(seed=2)
    before = [param.detach().clone() for param in model.parameters()]
    text = text_of(CheckpointError, lambda: load_checkpoint(path, model, optimizer))
    assert (all(map(torch.equal, before, model.parameters())), optimizer.param_groups[0]["lr"]) == (True, 0.1)
    return text


def of(metadata: Any, name: str = NAME) -> Any:
    """Where the bytes of a tensor are."""
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def rename_all(name: Any) -> Callable[[Path], None]:
    """Another name for the file of all tensors, `{parent}` being the folder that has the checkpoint and another one."""

    def change(saved: Path) -> None:
        shutil.copytree(saved, saved.parent / "other")
        path = name.format(parent=saved.parent) if isinstance(name, str) else name
        rewrite(saved, lambda metadata: [vars(info).update(relative_path=path) for info in metadata.storage_data.values()])

    return change


OTHER_NAMES = {
    "another checkpoint": "../other/__0_0.distcp",
    "an absolute path": "{parent}/other/__0_0.distcp",
    "by way of itself": "../saved/__0_0.distcp",
    "the folder itself": ".",
    "the header": "undertow.json",
    "digits of another script": "__\u0660_0.distcp",
    "a number": 7,
}
# What is there instead of a file, which is elsewhere now. Who opened a fifo would wait for ever.
SPECIAL: dict[str, Callable[[Path, Path], object]] = {
    "a link": Path.symlink_to,
    "a folder": lambda path, _: path.mkdir(),
    "a fifo": lambda path, _: os.mkfifo(path),
}


def test_the_folder_may_be_reached_through_a_link(saved: Path) -> None:
    saved.with_name("latest").symlink_to(saved)
    assert load_checkpoint(saved.with_name("latest"), *made(seed=2)) == {"step": 2}


def test_loading_changes_no_class_of_torchs(saved: Path) -> None:
    # BUILD with a pair sets attributes on whatever lies on the stack, also on a class.
    there = b"ctorch.distributed.checkpoint.metadata\n"
    set_version = there + b"Metadata\n(N}\x8c\x07versionK\x01stb0"
    set_method = there + b"ChunkStorageMetadata\n(N}\x8c\x08__eq__Nstb0"
    data = (saved / ".metadata").read_bytes()
    (saved / ".metadata").write_bytes(data[:2] + set_version + set_method + data[2:])
    before = {cls: dict(vars(cls)) for cls in (torchs.Metadata, torchs.ChunkStorageMetadata)}
    assert (".metadata" in refusal(saved), {cls: dict(vars(cls)) for cls in before}) == (True, before)


def tensor(metadata: Any, name: str = NAME) -> Any:
    return metadata.state_dict_metadata[name]


def set_fields(find: Callable[[Any], Any], **fields: Any) -> Callable[[Any], object]:
    return lambda metadata: vars(find(metadata)).update(fields)


def change_shape(*shape: int, chunk: tuple[int, ...] | None = None) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        found = tensor(metadata, "optimizer.state.0.weight.exp_avg")
        found.size = torch.Size(shape)
        found.chunks[0].sizes = found.chunks[0].sizes if chunk is None else torch.Size(chunk)

    return change


METADATA: dict[str, Callable[[Any], object]] = {
    "shape that no memory holds": change_shape(2**40, 2**20, chunk=(2**40, 2**20)),
    "shape beyond 64 bits": change_shape(2**62, 2**62, chunk=(2**62, 2**62)),
    "negative shape": change_shape(-3, -2, chunk=(-3, -2)),
    "shape larger than its pieces": change_shape(30000, 20000),
    "no pieces": set_fields(tensor, chunks=[]),
    "a piece twice": lambda metadata: vars(tensor(metadata)).update(chunks=tensor(metadata).chunks * 2),
    "pieces that leave something out": set_fields(lambda metadata: tensor(metadata).chunks[0], sizes=torch.Size((2, 2))),
    "bytes that two tensors claim": lambda metadata: vars(of(metadata, "model.1.weight")).update(
        offset=of(metadata).offset, length=of(metadata).length
    ),
    "negative offset": set_fields(of, offset=-1),
    "negative length": set_fields(of, length=-1),
    "offset beyond all files": set_fields(of, offset=2**70),
    "length that is no number": set_fields(of, length=float("nan")),
    "length that is true": set_fields(of, length=True),
    "bytes that are to be transformed": set_fields(of, transform_descriptors=["zstd"]),
    "another layout": set_fields(lambda metadata: tensor(metadata).properties, layout=torch.sparse_coo),
    "quantized values": set_fields(lambda metadata: tensor(metadata).properties, dtype=torch.quint8),
    "a shape for a dtype": set_fields(lambda metadata: tensor(metadata).properties, dtype=torch.Size((1,))),
    "another name": lambda metadata: metadata.planner_data.update({NAME: ("model", "1.weight")}),
    "path of numbers": lambda metadata: metadata.planner_data.update({NAME: (0, 1)}),
    "empty path": lambda metadata: metadata.planner_data.update({NAME: ()}),
    "no path": lambda metadata: metadata.planner_data.pop(NAME),
    "no description": lambda metadata: metadata.state_dict_metadata.pop(NAME),
    "no place": lambda metadata: metadata.storage_data.pop(torchs.MetadataIndex(NAME, [0, 0])),
    "a place too many": lambda metadata: metadata.storage_data.update(
        {torchs.MetadataIndex("model.none"): _StorageInfo(DATA, 0, 1)}
    ),
    "a tensor that is said to be none": lambda metadata: metadata.state_dict_metadata.update(
        {NAME: torchs.BytesStorageMetadata()}
    ),
    "no places": set_fields(lambda metadata: metadata, storage_data=None),
    "lists for dicts": set_fields(lambda metadata: metadata, state_dict_metadata=[]),
}


PICKLES = {
    "nested deeply": b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "a memo of gigabytes": b"\x80\x04Nr\xff\xff\xff\xff.",
    "a text of gigabytes": b"\x80\x04\x8d\x00\x00\x00\x00\x00\x01\x00\x00x.",
    "a frame of gigabytes": b"\x80\x04\x95\x00\x00\x00\x00\x00\x01\x00\x00N.",
    "a key twice": b"\x80\x04}(\x8c\x01aN\x8c\x01aNu.",
    "a number of a million digits": b"\x80\x04\x8b\x00\x00\x10\x00" + b"\x01" * 0x100000 + b".",
    "the call of a text": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x011\x85R.",
    "the call of what it has": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)R)R.",
    "a function": b"cos\ngetcwd\n.",
    "a function of a module there": b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.getcwd\x93.",
    "a number": b"K\x01.",
    "nothing": b"",
    "an attribute of torch": b"\x80\x04\x8c\x05torch\x8c\x06onnx.x\x93.",
}


def replaced(path: Path, name: str, data: bytes) -> None:
    """The stored bytes of `name` become `data`; the metadata follows."""
    metadata, parts, start = pickle.loads((path / ".metadata").read_bytes()), [], 0
    whole = (path / DATA).read_bytes()
    for index, info in sorted(metadata.storage_data.items(), key=lambda item: item[1].offset):
        part = data if index.fqn == name else whole[info.offset : info.offset + info.length]
        info.offset, info.length = start, len(part)
        start += len(part)
        parts.append(part)
    (path / DATA).write_bytes(b"".join(parts))
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def archive(value: Any, **how: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def compressed() -> bytes:
    squeezed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive(torch.zeros(3, 2)))) as found, zipfile.ZipFile(squeezed, "w") as new:
        for name in found.namelist():
            new.writestr(name, found.read(name), zipfile.ZIP_DEFLATED)
    return squeezed.getvalue()


class Foreign:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made",)


TENSORS: dict[str, Callable[[], bytes]] = {
    "another shape": lambda: archive(torch.zeros(2, 3)),
    "another dtype": lambda: archive(torch.zeros(3, 2, dtype=torch.float64)),
    "a number": lambda: archive(1.0),
    "a sparse tensor": lambda: archive(torch.zeros(3, 2).to_sparse()),
    "a tensor without values": lambda: archive(torch.zeros(3, 2, device="meta")),
    "an older format": lambda: archive(torch.zeros(3, 2), _use_new_zipfile_serialization=False),
    "a compressed archive": compressed,
    "something else": lambda: archive(Foreign()),
    "nothing": lambda: b"",
}


HEADERS = {
    "nested deeply": '{"format": 1, "optimizer": null, "extra": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a number of too many digits": '{"format": 1, "optimizer": null, "extra": ' + "1" * 5000 + "}",
    "a key twice": '{"format": 1, "format": 1, "optimizer": null, "extra": 1}',
    "an optimizer that is no text": '{"format": 1, "optimizer": ["AdamW"], "extra": 1}',
    "true for a format": '{"format": true, "optimizer": "AdamW", "extra": 1}',
    "a format that is a list": '{"format": [1], "optimizer": "AdamW", "extra": 1}',
    "a byte order mark": "\ufeff" + '{"format": 1, "optimizer": "AdamW", "extra": 1}',
}


CANNOT = "the checkpoint cannot be loaded: "
# What is done to the checkpoint, and what its error says.


@pytest.mark.parametrize(
    ("change", "text"),
    [
        *(
            pytest.param(rename_all(value), "is not a file of this checkpoint", id=f"tensors in a file of another name: {name}")
            for name, value in OTHER_NAMES.items()
        ),
        *(
            pytest.param(
                lambda saved, name=name, make=make: make(saved / name, (saved / name).rename(saved.with_name(f"other{name}"))),
                f"{re.escape(name)} is not a regular file",
                id=f"{name} is {kind}",
            )
            for name in ("undertow.json", ".metadata", DATA)
            for kind, make in SPECIAL.items()
        ),
        *(
            pytest.param(
                lambda saved, change=change: rewrite(saved, change),
                rf"^{CANNOT}(\.metadata|__0_0\.distcp) .*\n  {{saved}}",
                id=name,
            )
            for name, change in METADATA.items()
        ),
        *(
            pytest.param(
                lambda saved, data=data: (saved / ".metadata").write_bytes(data), rf"{CANNOT}\.metadata ", id=f"a pickle: {name}"
            )
            for name, data in PICKLES.items()
        ),
        # It takes no space on the disk.
        pytest.param(
            lambda saved: os.truncate(saved / ".metadata", 1 << 40), r"\.metadata has 1,099,511,627,776 bytes", id="huge metadata"
        ),
        *(
            pytest.param(
                lambda saved, data=data: replaced(saved, NAME, data()),
                rf"{CANNOT}(__0_0\.distcp|\.metadata) ",
                id=f"in place of a tensor {name}",
            )
            for name, data in TENSORS.items()
        ),
        *(
            pytest.param(
                lambda saved, text=text: (saved / "undertow.json").write_text(text, encoding="utf-8"),
                rf"{CANNOT}undertow\.json is ",
                id=f"a header: {name}",
            )
            for name, text in HEADERS.items()
        ),
        # Nor does it steer a terminal.
        pytest.param(
            lambda saved: (saved / "undertow.json").write_text(
                json.dumps({"format": 1, "optimizer": "\x1b[2J\ud800", "extra": 1})
            ),
            r"the state of \\x1b\[2J\\ud800,",
            id="an optimizer of another name",
        ),
    ],
)
def test_what_our_writer_does_not_write_is_refused_by_its_file(saved: Path, change: Callable[[Path], object], text: str) -> None:
    change(saved)
    found = refusal(saved)
    assert re.search(text.replace("{saved}", re.escape(str(saved))), found), found


def test_what_is_too_deep_to_be_loaded_is_not_saved(tmp_path: Path) -> None:
    def nested(levels: int) -> Any:
        return [nested(levels - 1)] if levels else 1

    model, deep = nn.Linear(1, 1), nested(99)  # and the object that has it
    save_checkpoint(tmp_path / "saved", model, extra=deep)
    assert load_checkpoint(tmp_path / "saved", model) == deep
    assert text_of(CheckpointError, lambda: save_checkpoint(tmp_path / "saved", model, extra=[deep])).startswith(
        "extra does not survive being written as JSON: "
    )


class Counting(nn.Linear):
    counts: Any = None

    def get_extra_state(self) -> Any:
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        self.counts = state


def test_an_extra_state_of_a_module_comes_back_whole(tmp_path: Path) -> None:
    model, other = Counting(1, 1), Counting(1, 1)
    model.counts = {"first": 3, "second": {"third": 4}}
    save_checkpoint(tmp_path / "saved", model)
    load_checkpoint(tmp_path / "saved", other)
    assert other.counts == model.counts


@st.composite
def ranges(draw: st.DrawFn) -> tuple[torch.Tensor, int, int]:
    """A tensor of the numbers in its memory, in any order of its dimensions, and a range of them."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    order, numel = draw(st.permutations(range(len(shape)))), math.prod(shape)
    tensor = torch.arange(numel).view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    start = draw(st.integers(0, numel))
    return tensor, start, draw(st.integers(start, numel))


def values_of(tensor: torch.Tensor, box: Box) -> list[int]:
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return sorted(tensor.flatten().tolist())


@given(ranges())
def test_boxes_hold_the_elements_of_the_range_once_and_in_order(case: tuple[torch.Tensor, int, int]) -> None:
    tensor, start, stop = case
    boxes = boxes_of_range(tensor.shape, tensor.stride(), start, stop)
    assert ([value for box in boxes for value in values_of(tensor, box)], [box.start for box in boxes]) == (
        list(range(start, stop)),
        [values_of(tensor, box)[0] for box in boxes],
    )
    assert len(boxes) <= max(1, 2 * tensor.dim() - 1)


CHANNELS_LAST = torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last).stride()


@pytest.mark.parametrize(
    ("shape", "strides", "start", "stop", "boxes"),
    [
        ((5, 4), (4, 1), 3, 14, [((0, 3), (1, 1), 3), ((1, 0), (2, 4), 4), ((3, 0), (1, 2), 12)]),
        ((2, 3, 2, 2), CHANNELS_LAST, 1, 6, [((0, 1, 0, 0), (1, 2, 1, 1), 1), ((0, 0, 0, 1), (1, 3, 1, 1), 3)]),
        ((), (), 0, 1, [((), (), 0)]),
        ((), (), 0, 0, []),
        ((0, 3), (3, 1), 0, 0, []),
        ((1, 1), (1, 1), 0, 1, [((0, 0), (1, 1), 0)]),
    ],
    ids=[
        "the end of a row, whole rows, the begin of one",
        "channels are cut first",
        "a scalar",
        "none of it",
        "empty",
        "one element",
    ],
)
def test_boxes_of_a_range(
    shape: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int, boxes: list[tuple[Any, ...]]
) -> None:
    assert [(box.offsets, box.sizes, box.start) for box in boxes_of_range(shape, strides, start, stop)] == boxes


class InRows(torch.Tensor):
    """A tensor that says to torch.distributed.checkpoint that it lies in two boxes, its first row and the others."""

    BOXES = (Box(offsets=(0, 0), sizes=(1, 2), start=0), Box(offsets=(1, 0), sizes=(2, 2), start=2))
    rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> "InRows":
        made = private.wrapper_tensor(cls, rows, dtype=torch.float32, device=torch.device("cpu"))
        made.rows = rows
        return made

    def __create_write_items__(self, name: str, _object: object) -> list[object]:
        return private_checkpoint.write_items(name, self, self.BOXES)

    def __create_chunk_list__(self) -> list[object]:
        return private_checkpoint.chunks(self.BOXES)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.rows[:1] if tuple(index.offset) == (0, 0) else self.rows[1:]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{op} was called: it has no values")


class Unwritable(InRows):
    def __create_write_items__(self, name: str, _object: object) -> list[object]:
        raise ValueError(f"{name} cannot be written")


def save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        private_checkpoint.save_checkpoint(state, folder, None)


@pytest.fixture
def saved_by_torch(tmp_path: Path) -> Path:
    save(
        {"model": {"rows": InRows(torch.arange(6.0).view(3, 2)), "number": 7, "whole": torch.ones(2, dtype=torch.bfloat16)}},
        tmp_path / "saved",
    )
    return tmp_path / "saved"


def read(folder: Path, targets: dict[str, Any]) -> dict[str, Any]:
    return read_entries(folder, stored_entries((folder / ".metadata").read_bytes()), targets)


def test_a_tensor_in_boxes_that_torch_saves_is_read_by_us(saved_by_torch: Path) -> None:
    rows, plain, middle = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2, 1)
    assert (
        read(
            saved_by_torch,
            {
                "model.rows": [(box.offsets, part) for box, part in zip(InRows.BOXES, (rows[:1], rows[1:]), strict=True)],
                "model.number": [],
            },
        ),
        read(saved_by_torch, {"model.rows": [((0, 0), plain), ((1, 1), middle)]}),
    ) == ({"model.number": 7}, {})
    assert (rows.tolist(), plain.tolist(), middle.tolist()) == (*[[[0, 1], [2, 3], [4, 5]]] * 2, [[3], [5]])


def test_the_metadata_that_torch_writes_is_understood(saved_by_torch: Path) -> None:
    entries = stored_entries((saved_by_torch / ".metadata").read_bytes())
    assert file_sizes(entries.values()) == {"__0_0.distcp": (saved_by_torch / "__0_0.distcp").stat().st_size}
    assert {name: (entry.path, entry.dtype, entry.shape, len(entry.pieces)) for name, entry in entries.items()} == {
        "model.rows": (("model", "rows"), torch.float32, (3, 2), 2),
        "model.number": (("model", "number"), None, None, 1),
        "model.whole": (("model", "whole"), torch.bfloat16, (2,), 1),
    }


def test_the_first_failure_of_a_kind_comes_out_of_torchs_exception(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="Error") as caught:
        save({"rows": Unwritable(torch.zeros(3, 2))}, tmp_path)
    assert [str(private.first_failure(caught.value, kind)) for kind in (OSError, ValueError)] == [
        "None",
        "rows cannot be written",
    ]
