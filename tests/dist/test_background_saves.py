"""Saves that threads write: they hold the values of their call, and every rank is told how they end."""

import contextlib
import errno
import gc
import io
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.alike import of_all_ranks
from support.checkpoints import Setup, require_equal, train, trained_by, whole_state
from support.errors import text_of
from support.levels import some
from support.ranks import in_ranks
from support.saves import made, net, parameters, steps
from support.sharded import training
from undertow import (
    CheckpointError,
    ConfigError,
    DistributedDataParallel,
    SyncConfig,
    has_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from undertow.checkpoint import files
from undertow.checkpoint.statuses import Statuses

SETUPS = {
    "ddp": Setup(strategy="ddp"),
    "zero1": Setup(),
    "zero2": Setup(strategy="zero2"),
    "16 bits": Setup("brain"),
    "tied": Setup("tied transformer"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saved"


def continues_from_the_moment_of_the_call(setup: Setup, path: Path) -> None:
    with trained_by(setup, num_steps=2) as (model, optimizer):
        save = save_checkpoint(path, model, optimizer, extra=2, background=True)
        assert save is not None
        train(setup, model, optimizer, steps=range(2, 4))
        wanted = whole_state(model, optimizer)
        save.wait()
        assert save.is_done
        save.wait()  # again
    assert not path.with_name("saved.new").exists()
    with trained_by(setup, num_steps=1, seed=8) as (model, optimizer):
        assert load_checkpoint(path, model, optimizer) == 2
        train(setup, model, optimizer, steps=range(2, 4))
        require_equal(whole_state(model, optimizer), wanted)


@in_ranks(2)
@pytest.mark.parametrize("name", some(SETUPS, most=1))
def test_a_run_resumed_from_it_has_the_bits_of_the_run_without_a_break(name: str, path: Path) -> None:
    continues_from_the_moment_of_the_call(SETUPS[name], path)


@pytest.mark.deep
@in_ranks(4)
def test_so_it_has_on_a_mesh(path: Path) -> None:
    continues_from_the_moment_of_the_call(Setup(strategy="hybrid", mesh=(2, 2)), path)


@pytest.mark.deep
@in_ranks(2)
@pytest.mark.parametrize("kind", some(["param_wire", "outer"], most=1))
def test_so_it_has_with_formats_and_with_replicas(kind: str, path: Path) -> None:
    model, optimizer = made(kind)
    steps(model, optimizer, range(7))
    save = save_checkpoint(path, model, optimizer, background=True)
    steps(model, optimizer, range(7, 14))
    wanted = parameters(model)
    assert save is not None
    save.wait()
    model.close()
    model, optimizer = made(kind)
    load_checkpoint(path, model, optimizer)
    steps(model, optimizer, range(7, 14))
    assert all(map(torch.equal, parameters(model), wanted))
    model.close()


@contextlib.contextmanager
def held(*, rank: int | None = None) -> Iterator[threading.Event]:
    """Writes of this process stop until the event is set, in all ranks or in one."""
    event, write = threading.Event(), os.write
    if rank in (None, dist.get_rank()):
        with mock.patch.object(os, "write", lambda *args: (event.wait(20), write(*args))[1]):
            try:
                yield event
            finally:
                event.set()
    else:
        yield event


@pytest.mark.deep
@in_ranks(2)
def test_the_one_before_stays_until_it_is_complete_and_one_rank_may_wait_alone(path: Path) -> None:
    with trained_by(Setup(), num_steps=1) as (model, optimizer):
        save_checkpoint(path, model, optimizer, extra=1)
        with held(rank=1) as event:
            save = save_checkpoint(path, model, optimizer, extra=2, background=True)
            assert save is not None
            train(Setup(), model, optimizer, steps=range(1, 2))
            time.sleep(0.2)
            assert not save.is_done
            assert sorted(file.name for file in path.iterdir())[-1] == "undertow.json"
            assert '"extra": 1' in (path / "undertow.json").read_text()
            if dist.get_rank() == 1:
                assert "writes optimizer-1.safetensors" in repr(save)
            dist.barrier()
            event.set()
            if dist.get_rank() == 0:
                save.wait()
                assert "complete" in repr(save)
        save.wait()
        assert load_checkpoint(path, model, optimizer) == 2
        assert sorted(file.name for file in path.iterdir()) == [
            "model.safetensors",
            "optimizer-0.safetensors",
            "optimizer-1.safetensors",
            "undertow.json",
        ]


@in_ranks(2)
@pytest.mark.parametrize("then", some(["save", "background", "load"], most=1))
def test_the_next_call_waits_and_the_report_says_so(then: str, path: Path) -> None:
    with trained_by(Setup(), num_steps=1) as (model, optimizer):
        with held(rank=0) as event:
            save = save_checkpoint(path, model, optimizer, extra=1, background=True)
            threading.Timer(0.3, event.set).start()
            if then == "load":
                assert load_checkpoint(path, model, optimizer) == 1
            else:
                save_checkpoint(path, model, optimizer, extra=2, background=then == "background")
        assert save is not None
        assert save.is_done
        save.wait()
        report = model.report()
        assert report.save_waited_ms > (100 if dist.get_rank() == 0 else 0)
        assert "Waited for saves in the background: " in str(report)
        assert load_checkpoint(path, model, optimizer) == (1 if then == "load" else 2)


def same_text(call: Callable[[], object]) -> str:
    text = text_of(CheckpointError, call)
    assert of_all_ranks(text) == [text] * dist.get_world_size()
    return text


FULL = OSError(errno.ENOSPC, "No space left on device")


@in_ranks(2)
@pytest.mark.parametrize("on_rank", some([0, 1], most=1))
@pytest.mark.parametrize("at", ["write", "fsync"])
def test_a_full_disk_on_one_rank_is_an_error_of_all_and_leaves_the_one_before(at: str, on_rank: int, path: Path) -> None:
    said = io.StringIO()
    with trained_by(Setup(), num_steps=1) as (model, optimizer), contextlib.redirect_stderr(said):
        save_checkpoint(path, model, optimizer, extra="whole")
        full_disk = mock.patch.object(os, at, side_effect=FULL)
        with full_disk if dist.get_rank() == on_rank else contextlib.nullcontext():
            save = save_checkpoint(path, model, optimizer, background=True)
            assert save is not None
            train(Setup(), model, optimizer, steps=range(1, 2))
            text = same_text(save.wait)
        assert text == (
            f"the background save of {path} has failed on rank {on_rank}.\n"
            "  OSError: [Errno 28] No space left on device\n  An earlier checkpoint is still there."
        )
        assert save.is_done
        assert (text.splitlines()[0] in said.getvalue()) == (dist.get_rank() == 0)  # printed once, at once
        save_checkpoint(path, model, optimizer, extra="again")  # all have been told
        assert load_checkpoint(path, model, optimizer) == "again"


@in_ranks(2)
def test_an_error_that_nobody_has_waited_for_is_raised_by_the_next_save_on_every_rank_once(path: Path) -> None:
    with trained_by(Setup(), num_steps=1) as (model, optimizer):
        with mock.patch.object(os, "write", side_effect=FULL) if dist.get_rank() == 1 else contextlib.nullcontext():
            save = save_checkpoint(path, model, optimizer, background=True)
            assert save is not None
            if dist.get_rank() == 0:
                text_of(CheckpointError, save.wait)  # this rank knows, the other one does not
            while not save.is_done:
                time.sleep(0.01)
        text = same_text(lambda: save_checkpoint(path, model, optimizer))
        assert "has failed on rank 1.\n  OSError: [Errno 28]" in text
        assert not has_checkpoint(path)
        save_checkpoint(path, model, optimizer, extra="again", background=True)
        assert load_checkpoint(path, model, optimizer) == "again"


@pytest.mark.deep
@in_ranks(2)
def test_a_disk_that_fails_at_the_end_is_told_to_the_other_ranks(path: Path) -> None:
    said = io.StringIO()
    with trained_by(Setup(), num_steps=1) as (model, optimizer), contextlib.redirect_stderr(said):
        save_checkpoint(path, model, optimizer, extra=1)
        removal = mock.patch.object(Path, "rmdir", side_effect=PermissionError(13, "Permission denied"))
        with removal if dist.get_rank() == 0 else contextlib.nullcontext():
            save = save_checkpoint(path, model, optimizer, extra=2, background=True)
            assert save is not None
            save.wait()  # the one before is removed but for its folder: the new one is found
        assert ("PermissionError: [Errno 13] Permission denied" in said.getvalue()) == (dist.get_rank() == 0)
        assert path.with_name("saved.new").exists()
        assert load_checkpoint(path, model, optimizer) == 2
        assert load_checkpoint(path.parent, model, optimizer, which="latest") == 2
        save_checkpoint(path, model, optimizer, extra=3)
        assert load_checkpoint(path, model, optimizer) == 3
        # The one before cannot be removed at all: it is found.
        index = path / "undertow.json"
        unlink = Path.unlink
        refuses = mock.patch.object(Path, "unlink", lambda file: fails() if file == index else unlink(file))
        with refuses if dist.get_rank() == 0 else contextlib.nullcontext():
            save = save_checkpoint(path, model, optimizer, extra=4, background=True)
            assert save is not None
            assert "PermissionError: [Errno 13] Permission denied" in same_text(save.wait)
        assert load_checkpoint(path, model, optimizer) == 3
        # No rank has left its large files.
        assert [file.name for file in path.with_name("saved.new").iterdir() if file.suffix == ".safetensors"] == []
        save_checkpoint(path, model, optimizer, extra=5)
        assert load_checkpoint(path, model, optimizer) == 5
        assert [file.name for file in path.parent.iterdir()] == ["saved"]


def fails() -> None:
    raise PermissionError(13, "Permission denied")


@in_ranks(2)
def test_a_rank_that_cannot_look_at_the_others_files_tells_them(path: Path) -> None:
    look = mock.patch.object(Statuses, "number_written", side_effect=OSError(errno.ESTALE, "Stale file handle"))
    with trained_by(Setup(), num_steps=1) as (model, optimizer):
        with look if dist.get_rank() == 0 else contextlib.nullcontext():
            save = save_checkpoint(path, model, optimizer, background=True)
            assert save is not None
            assert "has failed on rank 0.\n  OSError: [Errno 116] Stale file handle" in same_text(save.wait)
        assert not has_checkpoint(path)


@in_ranks(2)
def test_a_path_that_differs_between_ranks_is_the_first_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(2)]
    folders[dist.get_rank()].mkdir()
    with trained_by(Setup(), num_steps=1) as (model, optimizer), contextlib.chdir(folders[dist.get_rank()]):
        save = save_checkpoint("saved", model, optimizer, extra=1, background=True, keep=1)
        assert save is not None
        os.chdir(tmp_path)
        save.wait()
        assert has_checkpoint(folders[0] / "saved")
        assert load_checkpoint(folders[0] / "saved", model, optimizer) == 1
        assert [*folders[1].iterdir()] == []


@in_ranks(2)
def test_an_older_one_that_cannot_be_removed_is_told_and_the_save_has_not_failed(path: Path) -> None:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        for number in range(2):
            save_checkpoint(path.with_name(f"step-{number}"), nn.Linear(1, 1))
        with mock.patch.object(Path, "rmdir", side_effect=PermissionError(13, "Permission denied")):
            save = save_checkpoint(path, nn.Linear(1, 1), extra=2, background=True, keep=1)
            assert save is not None
            save.wait()
            assert load_checkpoint(path, nn.Linear(1, 1)) == 2
            save_checkpoint(path.with_name("other"), nn.Linear(1, 1), extra=3, keep=1)
    assert said.getvalue().count("older ones could not be removed") == (2 if dist.get_rank() == 0 else 0)
    assert load_checkpoint(path.parent, nn.Linear(1, 1), which="latest") == 3


@in_ranks(2)
def test_a_disk_that_hangs_is_shown_training_goes_on_and_the_next_save_raises(path: Path) -> None:
    config = SyncConfig(stall_timeout_s=1.0, stall_warning_s=0.9)
    model = DistributedDataParallel(net(), config=config)
    optimizer = torch.optim.AdamW(model.parameters())
    steps(model, optimizer, range(1))
    with held(rank=0) as event:
        save = save_checkpoint(path, model, optimizer, background=True)
        assert save is not None
        steps(model, optimizer, range(1, 3))
        text = same_text(lambda: save_checkpoint(path, model, optimizer))
        assert text.startswith(f"the background save of {path} has not ended: nothing was written for ")
        assert "rank 0 writes model.safetensors" in text
        if dist.get_rank() == 0:
            assert not save.is_done
            assert "writes model.safetensors, 0.0 MB written, nothing for " in repr(save)
        steps(model, optimizer, range(3, 5))
        dist.barrier()
        event.set()
        time.sleep(0.5)
        dist.barrier()
    with contextlib.suppress(CheckpointError):  # rank 1 may have given up before rank 0 went on
        save_checkpoint(path, model, optimizer)
    save_checkpoint(path, model, optimizer, extra="at last")
    assert load_checkpoint(path, model, optimizer) == "at last"
    model.close()


@in_ranks(2)
def test_a_folder_that_cannot_be_made_is_an_error_of_the_call(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # not a folder without rights: root may write there
    text = same_text(lambda: save_checkpoint(tmp_path / "file" / "saved", nn.Linear(1, 1), background=True))
    assert "NotADirectoryError" in text


@in_ranks(2)
def test_a_folder_inside_of_a_checkpoint_is_refused(path: Path) -> None:
    save_checkpoint(path, nn.Linear(1, 1), extra=1)
    text = same_text(lambda: save_checkpoint(path / "inside", nn.Linear(1, 1), background=True))
    assert text.startswith("saved is a checkpoint, and another one inside would be foreign to it.\n")
    assert load_checkpoint(path, nn.Linear(1, 1)) == 1


@in_ranks(2)
def test_a_rank_that_cannot_write_there_is_an_error_of_the_call(path: Path) -> None:
    touch = mock.patch.object(Path, "touch", side_effect=PermissionError(13, "Permission denied"))
    with touch if dist.get_rank() == 1 else contextlib.nullcontext():
        text = same_text(lambda: save_checkpoint(path, nn.Linear(1, 1), background=True))
    assert text.startswith(f"it was not possible to save a checkpoint in {path}.\n  PermissionError: [Errno 13]")


@in_ranks(2)
def test_several_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with trained_by(Setup(), num_steps=1) as (model, optimizer):
        assert not has_checkpoint(folder, "latest")
        missing = same_text(lambda: load_checkpoint(folder, model, optimizer, which="latest"))
        assert missing.startswith("no complete checkpoint was found.\n")
        for number in range(5):
            save_checkpoint(folder / f"step-{number}", model, optimizer, extra=number, background=number % 2 == 0, keep=3)
        assert load_checkpoint(folder, model, optimizer, which="latest") == 4
        dist.barrier()
        assert sorted(file.name for file in folder.iterdir()) == ["step-2", "step-3", "step-4"]
        dist.barrier()  # all ranks have looked
        if dist.get_rank() == 0:
            (folder / "notes").mkdir()
            (folder / "notes" / "undertow.json.txt").touch()
            (folder / "step-9.new").mkdir()  # that nobody has completed
            (folder / "step-9.new" / "model.safetensors").touch()
            os.utime(folder / "step-2" / "undertow.json")  # it is not newer
        dist.barrier()
        assert load_checkpoint(folder, model, optimizer, which="latest") == 4
        save_checkpoint(folder / "step-1", model, optimizer, extra=5, keep=1)  # the name does not count
        assert load_checkpoint(folder, model, optimizer, which="latest") == 5
        assert has_checkpoint(folder, "latest")
        assert sorted(file.name for file in folder.iterdir()) == ["notes", "step-1", "step-9.new"]


@in_ranks(2)
def test_a_checkpoint_that_is_complete_under_its_first_name_is_found_too(tmp_path: Path) -> None:
    with trained_by(Setup(), num_steps=1) as (model, optimizer):
        for number in range(2):
            save_checkpoint(tmp_path / f"step-{number}", model, optimizer, extra=number)
        if dist.get_rank() == 0:  # as a process leaves it that is killed before the last rename
            (tmp_path / "step-1").rename(tmp_path / "step-1.new")
        dist.barrier()
        assert load_checkpoint(tmp_path, model, optimizer, which="latest") == 1


@in_ranks(2)
def test_wrong_arguments_are_refused(path: Path) -> None:
    for keep in (0, -1, 1.5, True, "3"):
        found = text_of(ConfigError, lambda keep=keep: save_checkpoint(path, nn.Linear(1, 1), keep=keep))
        assert found.startswith(f"keep={keep!r} is not a number of checkpoints.\n")
    assert "which='newest' is not known." in text_of(ConfigError, lambda: load_checkpoint(path, nn.Linear(1, 1), which="newest"))  # type: ignore[arg-type]
    assert not has_checkpoint(path)


@in_ranks(2)
def test_steps_that_change_the_plan_do_not_change_it(path: Path) -> None:
    torch.manual_seed(2)
    with training(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8)), "ddp", "AdamW") as (model, optimizer):
        steps(model, optimizer, range(2))
        wanted = parameters(model)
        with held() as event:
            save = save_checkpoint(path, model, optimizer, background=True)
            model.module[0].weight.requires_grad_(False)
            steps(model, optimizer, range(2, 5))
            event.set()
        assert save is not None
        save.wait()
        load_checkpoint(path, model, optimizer)
        assert all(map(torch.equal, parameters(model), wanted))


def test_one_process_saves_in_the_background_and_ends_after_the_thread(path: Path) -> None:
    model = nn.Linear(3, 2)
    save = save_checkpoint(path, model, extra={"a": 1}, background=True)
    assert save is not None
    model.weight.data.zero_()
    save.wait()
    other = nn.Linear(3, 2)
    assert load_checkpoint(path, other) == {"a": 1}
    assert other.weight.any()


def test_a_save_that_has_ended_keeps_no_model(path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save = save_checkpoint(path, model, optimizer, background=True)
    assert save is not None
    save.wait()
    gone = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert "complete" in repr(save)


def test_neighbors_that_are_not_purely_ours_stay_and_only_the_latest_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        save_checkpoint(tmp_path / name, nn.Linear(1, 1))
    (tmp_path / "a" / "notes.txt").touch()
    (tmp_path / "b" / "undertow.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    save_checkpoint(tmp_path / "d", nn.Linear(1, 1), keep=1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "d", "link"]
    assert "undertow.json is of format" in text_of(
        CheckpointError, lambda: load_checkpoint(tmp_path, nn.Linear(1, 1), which="latest")
    )


def test_a_link_is_not_the_latest(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "saved", nn.Linear(1, 1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "saved")
    assert not has_checkpoint(tmp_path / "run", "latest")


def test_one_that_vanishes_between_finding_and_reading_is_skipped(tmp_path: Path) -> None:
    for number in range(3):
        save_checkpoint(tmp_path / f"step-{number}", nn.Linear(1, 1), extra=number)
    head = files.head_of

    def vanishes(folder: Path) -> Any:
        """Another job's save removes the newest, and renames the one before, at this moment."""
        if folder.name == "step-2":
            shutil.rmtree(folder)
        elif folder.name == "step-1":
            folder.rename(tmp_path / "step-1.new")
        return head(folder)

    with mock.patch.object(files, "head_of", vanishes):
        assert load_checkpoint(tmp_path, nn.Linear(1, 1), which="latest") == 1


def test_a_rank_first_waits_for_its_own_save_and_a_name_with_new_is_refused(path: Path) -> None:
    write = os.write
    with mock.patch.object(os, "write", lambda *args: (time.sleep(0.05), write(*args))[1]):
        save_checkpoint(path, nn.Linear(1, 1), background=True)
        assert has_checkpoint(path)
    text = text_of(CheckpointError, lambda: save_checkpoint(path.with_name("saved.new"), nn.Linear(1, 1)))
    assert text.startswith("saved.new cannot be the name of a checkpoint: ")
    with contextlib.chdir(path):
        text_of(CheckpointError, lambda: save_checkpoint(".", nn.Linear(1, 1)))
        load_checkpoint(".", nn.Linear(1, 1))
    with mock.patch.object(os, "write", side_effect=FULL):
        save_checkpoint(path, nn.Linear(1, 1), background=True)
        assert has_checkpoint(path)  # the one before
    text_of(CheckpointError, lambda: save_checkpoint(path, nn.Linear(1, 1)))  # the error is not lost
