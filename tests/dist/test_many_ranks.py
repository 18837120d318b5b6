"""More ranks than other tests have: six steps of each strategy and format on 13 or 16, checkpoints, open files; by hand with
still more (`support/many.py`)."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from support.many import OPEN_FILES, WAYS, num_open_files, save_or_load, train
from support.project import ROOT
from support.ranks import Ranks, in_ranks

# Those whose messages have equal parts, and all that have rows.
IN_EQUAL_PARTS = ("plain", "zero1, AdamW", "zero2, bfloat16", "outer")


@pytest.mark.slow
@in_ranks(16, is_fresh=True, timeout_s=300.0)
def test_sixteen_ranks_train_as_the_reference_does() -> None:
    for name in WAYS:
        if "hybrid" in name or name in IN_EQUAL_PARTS:
            train(name)


# A number of ranks that is prime: no part is equal, and no mesh has rows.
@pytest.mark.slow
@in_ranks(13, is_fresh=True, timeout_s=300.0)
def test_a_prime_number_of_ranks_trains_as_the_reference_does() -> None:
    for name in WAYS:
        if "hybrid" not in name and name not in IN_EQUAL_PARTS:
            train(name)


@pytest.mark.slow
def test_a_checkpoint_of_sixteen_ranks_is_loaded_on_fewer_and_on_more(tmp_path: Path) -> None:
    for verb, num_ranks in (("save", 16), ("load", 8), ("load", 24)):
        with Ranks(num_ranks) as ranks:
            ranks.run(save_or_load, verb, tmp_path, timeout_s=120.0)


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="the system does not tell")
@in_ranks(4, is_fresh=True)
@pytest.mark.parametrize("name", ["plain", "zero1"])
def test_a_model_opens_as_many_files_as_the_page_says(name: str) -> None:
    page = (ROOT / "docs" / "several-nodes.md").read_text()
    (counts,) = re.findall(r"\| 2\(N-1\) \+ (\d+),.*?\| \(N-1\) \+ (\d+) \|", page, re.DOTALL)
    own, torchs = map(int, counts)
    before = len(os.listdir(OPEN_FILES))
    num_opened = num_open_files(name) - before
    num_peers = dist.get_world_size() - 1
    assert num_peers <= num_opened <= num_peers + own - torchs
