"""The text that the demo trains on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support.errors import refusal
from undertow.demo.corpus import load_corpus

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
    (tmp_path / "text").write_bytes(bytes(range(256)) * 20_000)
    assert load_corpus(tmp_path / "text") == bytes(range(256)) * (4 * MEGABYTE // 256)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: None, f"cannot be read: No such file or directory.\n  {UNREADABLE}"),
        (Path.mkdir, f"cannot be read: it is no regular file.\n  {UNREADABLE}"),
        (os.mkfifo, f"cannot be read: it is no regular file.\n  {UNREADABLE}"),  # and without a writer it does not block
        (
            lambda path: path.write_bytes(b"abc"),
            "is too short to train on: 3 bytes.\n  the text of undertow demo\n  Give a file of 4096 bytes or more: --text FILE.",
        ),
    ],
    ids=["missing", "a directory", "a pipe", "short"],
)
def test_what_is_no_text_is_named(make: Callable[[Path], object], text: str, tmp_path: Path) -> None:
    make(tmp_path / "it")
    assert refusal(lambda: load_corpus(tmp_path / "it")) == f"'{tmp_path / 'it'}' {text}"
