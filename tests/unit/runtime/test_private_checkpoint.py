"""What torch.distributed.checkpoint writes is read by us, and nothing else is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from undertow.boxes import Box
from undertow.runtime import private, private_checkpoint
from undertow.runtime.checkpoint_metadata import file_sizes, stored_entries
from undertow.runtime.checkpoint_reads import read_entries


class InRows(torch.Tensor):
    """A tensor that says to torch.distributed.checkpoint that it lies in two boxes, its first row and the others."""

    BOXES = (Box(offsets=(0, 0), sizes=(1, 2), start=0), Box(offsets=(1, 0), sizes=(2, 2), start=2))
    rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> InRows:
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
def saved(tmp_path: Path) -> Path:
    """What torch saves of such a tensor, of a number and of a plain tensor."""
    state = {"rows": InRows(torch.arange(6.0).view(3, 2)), "number": 7, "whole": torch.ones(2, dtype=torch.bfloat16)}
    save({"model": state}, tmp_path / "saved")
    return tmp_path / "saved"


def read(folder: Path, targets: dict[str, Any]) -> dict[str, Any]:
    entries = stored_entries((folder / ".metadata").read_bytes())
    return read_entries(folder, entries, targets, on_error=lambda path, error: ValueError(f"{path.name}: {error}"))


def test_a_tensor_in_boxes_that_torch_saves_is_read_by_us(saved: Path) -> None:
    rows, plain, middle = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(2, 1)
    boxes = [(box.offsets, part) for box, part in zip(InRows.BOXES, (rows[:1], rows[1:]), strict=True)]
    assert read(saved, {"model.rows": boxes, "model.number": []}) == {"model.number": 7}
    assert read(saved, {"model.rows": [((0, 0), plain), ((1, 1), middle)]}) == {}
    assert rows.tolist() == plain.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert middle.tolist() == [[3], [5]]


def test_the_metadata_that_torch_writes_is_understood(saved: Path) -> None:
    entries = stored_entries((saved / ".metadata").read_bytes())
    assert file_sizes(entries.values()) == {"__0_0.distcp": (saved / "__0_0.distcp").stat().st_size}
    assert {name: (entry.path, entry.dtype, entry.shape, len(entry.pieces)) for name, entry in entries.items()} == {
        "model.rows": (("model", "rows"), torch.float32, (3, 2), 2),
        "model.number": (("model", "number"), None, None, 1),
        "model.whole": (("model", "whole"), torch.bfloat16, (2,), 1),
    }


def test_the_first_failure_of_a_kind_comes_out_of_torchs_exception(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="Error") as caught:
        save({"rows": Unwritable(torch.zeros(3, 2))}, tmp_path)
    assert private.first_failure(caught.value, OSError) is None
    assert str(private.first_failure(caught.value, ValueError)) == "rows cannot be written"
