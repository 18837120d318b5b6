"""Copies of a save in the background: they have the values of their moment, in memory that the next save uses again."""

import gc
import os
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from undertow import CheckpointError, load_checkpoint, save_checkpoint
from undertow.checkpoint.background import LAST
from undertow.checkpoint.copies import Copies, CopyMemory

TENSORS = {
    "turned": torch.arange(6.0).view(2, 3).t(),
    "complex": torch.tensor([1 + 2j, 3j], dtype=torch.complex64).conj(),
    "bytes": torch.tensor([True, False, True]),
    "short": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(7),
}


def copied(owner: CopyMemory, **tensors: torch.Tensor) -> Copies:
    copies = Copies(owner)
    copies.add("file", (tensors, {}))
    return copies


def memory_of(copies: Copies) -> int:
    tensors, _ = copies.files["file"]
    return min(tensor.data_ptr() for tensor in tensors.values() if tensor.numel())


def test_copies_are_equal_and_nothing_changes_them() -> None:
    given = {name: tensor.clone() for name, tensor in TENSORS.items()}
    copies = copied(CopyMemory(), **given)
    for tensor in given.values():
        tensor.zero_()
    tensors, _ = copies.files["file"]
    assert [*tensors] == [*TENSORS]
    for name, tensor in tensors.items():
        assert tensor.dtype == TENSORS[name].dtype
        assert torch.equal(tensor, TENSORS[name].resolve_conj())


def test_the_next_save_uses_the_memory_again_unless_it_is_too_small_or_much_too_large() -> None:
    owner = CopyMemory()
    first = copied(owner, a=torch.ones(1000))
    place = memory_of(first)
    first.end()
    second = copied(owner, a=torch.zeros(600))
    assert memory_of(second) == place
    second.end()
    for numel in (5000, 100):  # too small, and too large
        third = copied(owner, a=torch.full((numel,), 2.0))
        kept = third._memory["file"]
        assert kept.nbytes == -(-4 * numel // 64) * 64
        assert torch.equal(third.files["file"][0]["a"], torch.full((numel,), 2.0))
        third.end()


def test_a_save_that_has_not_ended_keeps_its_memory() -> None:
    owner = CopyMemory()
    first = copied(owner, a=torch.ones(1000))
    second = copied(owner, a=torch.zeros(1000))
    assert memory_of(first) != memory_of(second)
    assert torch.equal(first.files["file"][0]["a"], torch.ones(1000))


@pytest.mark.deep
def test_the_memory_goes_with_the_model(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    made: list[weakref.ref[torch.Tensor]] = []
    allocate = Copies._memory_of

    def watched(self: Copies, *args: object) -> torch.Tensor:
        memory = allocate(self, *args)  # type: ignore[arg-type]
        made.append(weakref.ref(memory))
        return memory

    with mock.patch.object(Copies, "_memory_of", watched):
        save = save_checkpoint(tmp_path / "saved", model, background=True)
    assert save is not None
    save.wait()
    gc.collect()
    assert made[0]() is not None
    del model
    gc.collect()
    assert made[0]() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_steps_have_the_processor_before_the_thread_that_writes(tmp_path: Path) -> None:
    found = []
    write = os.write

    def noted(*args: object) -> int:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return write(*args)  # type: ignore[arg-type]

    before = os.getpriority(os.PRIO_PROCESS, 0)
    with mock.patch.object(os, "write", noted):
        save = save_checkpoint(tmp_path / "saved", nn.Linear(1, 1), background=True)
        assert save is not None
        save.wait()
    assert {*found} == {min(before + 15, 19)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_save_that_hangs_stays_an_error_of_the_next_save_after_wait_has_raised_it(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    event, write = threading.Event(), os.write
    with mock.patch.object(os, "write", lambda *args: (event.wait(20), write(*args))[1]):
        save = save_checkpoint(tmp_path / "first", model, background=True)
        assert save is not None
        # As with stall_timeout_s=0.1, which a model that nothing synchronizes does not have.
        save._task = replace(save._task, limit_s=0.1)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="has not ended"):
                save.wait()
        with pytest.raises(CheckpointError, match="has not ended"):
            save_checkpoint(tmp_path / "second", model)
        assert not (tmp_path / "second").exists()
        save._task = replace(save._task, limit_s=60.0)
        event.set()
        save.wait()
    save_checkpoint(tmp_path / "second", model)
    assert LAST.settled() == (0.0, "")
    assert load_checkpoint(tmp_path / "first", model) is None
    assert {*load_file(tmp_path / "second" / "model.safetensors")} == {"weight", "bias"}
