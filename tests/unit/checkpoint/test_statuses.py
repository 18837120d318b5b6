"""The files by which the threads of a save tell each other."""

from pathlib import Path

from undertow.checkpoint.statuses import Statuses


def test_a_folder_that_has_just_been_renamed_has_no_files_and_no_errors(tmp_path: Path) -> None:
    folder = tmp_path / "step.new"
    folder.mkdir()
    statuses = Statuses(folder, "token", rank=1)
    statuses.begin()
    assert len(statuses.times()) == 1
    folder.rename(tmp_path / "step")
    assert (statuses.times(), statuses.number_written(), statuses.texts([0, 1])) == ({}, 0, {})
