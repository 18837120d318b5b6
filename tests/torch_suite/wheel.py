"""torch's own tests of DistributedDataParallel, from the installed wheel, with Undertow's class in its place.

Each test runs in ranks that are forked from this process, on CPU with gloo. torch runs most of these tests on GPUs only,
although they need none: the module is rewritten as text while it is loaded.
"""

import contextlib
import gc
import importlib.util
import inspect
import io
import logging
import os
import re
import sys
import types
import unittest
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.testing._internal.common_distributed as common

from undertow import DistributedDataParallel

TIMEOUT_S, HOME = 120, "torch.testing._internal.distributed"

# Calls that name a GPU, and the same calls on CPU.
_RANK = r"(?:self\.rank|rank|device_id|device|torch\.cuda\.current_device\(\))"
TO_CPU = {
    r"\.cuda\([^()]*(?:\(\))?\)": "",
    rf"\.to\({_RANK}\)": "",
    rf"\b(device=)(?:{_RANK}|\"cuda\")": r"\1'cpu'",
    r"\b(device_ids|output_device)=(?:\[[^]]*\]|torch\.device\([^)]*\)|[\w.]+)": r"\1=None",
    r"\btorch\.cuda\.(?:set_device|manual_seed|synchronize)\([^()]*\)": "None",
}


def cases() -> Iterator[unittest.TestCase]:
    _prepare()
    plain, autograd = _load(f"{HOME}.distributed_test", TO_CPU), _load(f"{HOME}.ddp_under_dist_autograd_test", {})
    fixture = importlib.import_module(f"{HOME}.rpc.tensorpipe_rpc_agent_test_fixture").TensorPipeRpcAgentTestFixture
    gc.freeze()  # ranks that looked through all of torch would copy its memory
    for bases in (
        (plain.TestDistBackend, plain.DistributedTest._DistTestBase),
        (fixture, autograd.DdpUnderDistAutogradTest, common.MultiProcessTestCase),
        (fixture, autograd.DdpComparisonTest, common.MultiProcessTestCase),
    ):
        kind = type("OnForkedRanks", (_Forked, *bases), {})
        yield from (kind(name) for name in dir(kind) if name.startswith("test_") and _uses_the_class(kind, name))


def outcome(case: unittest.TestCase) -> tuple[str, str]:
    result = unittest.TestResult()
    with contextlib.redirect_stdout(io.StringIO()):
        case.run(result)
    problems, skips = result.failures + result.errors, [reason for _, reason in result.skipped]
    return ("fail", problems[0][1]) if problems else ("skip", skips[0]) if skips else ("pass", "")


class _Forked:
    """Comes before torch's MultiProcessTestCase: ranks are forked, silent, and end with this process."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(partial(torch.multiprocessing.get_context("fork").Process, daemon=True))

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        super()._run(*args, **kwargs)


def _prepare() -> None:
    os.environ.update(BACKEND="gloo", WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES="")
    os.environ.update(TEMP_DIR="", INIT_METHOD="")  # torch's setUp gives them values
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel
    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = common.nccl_skip_if_lt_x_gpu = lambda *_: lambda test: test
    common.init_multigpu_helper = lambda num_ranks, _backend: {rank: [rank] for rank in range(int(num_ranks))}
    common.get_timeout = lambda _test: TIMEOUT_S


def _load(name: str, changes: dict[str, str]) -> types.ModuleType:
    spec = importlib.util.find_spec(name)
    text = spec.loader.get_source(name)
    for found, replacement in changes.items():
        text = re.sub(found, partial(_same_lines, replacement), text)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    return module


def _same_lines(replacement: str, match: re.Match[str]) -> str:
    """The replacement, with the line breaks of the text that it replaces: sources of functions are found by their lines."""
    return match.expand(replacement) + "\n" * match[0].count("\n")


def _uses_the_class(kind: type, name: str) -> bool:
    """True if the test, or a helper method that it calls, makes a DistributedDataParallel."""
    todo, seen = [name], set()
    while todo:
        name = todo.pop()
        seen.add(name)
        text = inspect.getsource(inspect.unwrap(getattr(kind, name)))
        if "ddp" in name or re.search(r"DistributedDataParallel\(|\bDDP\(|_dump_DDP", text):
            return True
        called = re.findall(r"\bself\.(_\w+|run\w+|do\w+)\(", text)
        todo += [name for name in called if name not in seen and inspect.isfunction(getattr(kind, name, None))]
    return False
