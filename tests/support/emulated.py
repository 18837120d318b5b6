"""Ranks of a test over an emulated link, forked for it; results back in rank order."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from support.inside import BACKEND, EmulatedLink, emulated_backend
from support.processes import Ended, Rank, run_ranks
from undertow.lab.cost import link_from_text

Program = Callable[[EmulatedLink], Any]


def ended_over_link(program: Program, link: str, *, num_ranks: int = 2, burst_bytes: int = 0) -> list[Ended]:
    return run_ranks(partial(_run, program, link, burst_bytes), num_ranks, patience_s=120.0)


def run_over_link(program: Program, link: str, *, num_ranks: int = 2, burst_bytes: int = 0) -> list[Any]:
    found = ended_over_link(program, link, num_ranks=num_ranks, burst_bytes=burst_bytes)
    for rank in found:
        assert rank.exit_code == 0, "\n".join(f"rank {number}: {one.log}" for number, one in enumerate(found))
    return [rank.words["value"] for rank in found]


def over_link(*links: str, num_ranks: int = 2, burst_bytes: int = 0) -> Callable[[Program], Callable[[str], None]]:
    """Makes a test of a function that runs on every rank, over each of these links; its asserts are within the ranks."""

    def decorate(program: Program) -> Callable[[str], None]:
        @pytest.mark.parametrize("link", links)
        def test(link: str) -> None:
            run_over_link(
                partial(_call, program.__module__, program.__name__), link, num_ranks=num_ranks, burst_bytes=burst_bytes
            )

        test.program = program  # type: ignore[attr-defined]  # by its name the module has the test
        test.__doc__ = program.__doc__
        return test

    return decorate


def _call(module: str, name: str, link: EmulatedLink) -> None:
    getattr(importlib.import_module(module), name).program(link)


def _run(program: Program, link: str, burst_bytes: int, rank: Rank) -> Any:
    with emulated_backend(link_from_text(link), burst_bytes=burst_bytes) as emulated:
        rank.meet(BACKEND)
        value = program(emulated)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    return value
