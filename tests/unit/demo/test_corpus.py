from __future__ import annotations

import os
from pathlib import Path

from support.errors import text_of
from undertow.demo.corpus import load_corpus
from undertow.errors import ConfigError

MEGABYTE = 1024 * 1024
UNREADABLE = (
    "the text of undertow demo\n"
    "  Give a file that you may read: --text FILE; or leave --text out for the standard library's source."
)


def test_the_standard_librarys_source_is_at_hand_and_bounded() -> None:
    text = load_corpus()
    assert MEGABYTE < len(text) <= 4 * MEGABYTE
    assert b"def " in text
    assert load_corpus() == text


def test_a_file_is_taken_as_bytes_up_to_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 20_000)
    assert load_corpus(path) == bytes(range(256)) * (4 * MEGABYTE // 256)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    assert text_of(ConfigError, lambda: load_corpus(path)) == (
        f"'{path}' cannot be read: No such file or directory.\n  {UNREADABLE}"
    )


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert text_of(ConfigError, lambda: load_corpus(tmp_path)) == (
        f"'{tmp_path}' cannot be read: it is no regular file.\n  {UNREADABLE}"
    )


def test_a_pipe_without_a_writer_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "it is no regular file" in text_of(ConfigError, lambda: load_corpus(tmp_path / "pipe"))


def test_a_short_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"abc")
    assert text_of(ConfigError, lambda: load_corpus(path)) == (
        f"'{path}' is too short to train on: 3 bytes.\n"
        "  the text of undertow demo\n"
        "  Give a file of 4096 bytes or more: --text FILE."
    )
