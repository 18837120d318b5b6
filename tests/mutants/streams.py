"""Removes each wait, event, keep-alive, stream switch and guard of a read on a device, and looks whether tests/streams notice.

    python -m mutants.streams [NUMBER ...]

Ranks exchange the code of the file for that of a mutant, and then train on logical streams until something is found.
"""

import contextlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import undertow
from mutants.blocks import PACKAGE
from mutants.forks import exchange_code
from programs.examples import EXAMPLES
from streams import test_training as training
from support.ranks import Ranks, RanksFailed
from support.streamed import run

ROOT = Path(__file__).parents[2]
LATE = ("twice-reentrant units train", "a part that comes late on one rank only is added")


class Removal(NamedTuple):
    """Text of a file, before and after; `why` no test can notice, if none can."""

    file: str
    before: str
    after: str
    why: str = ""


EXCHANGES, COLLECTIVES, DEVICE = "ranks/exchanges.py", "ranks/backend_collectives.py", "device.py"
ONE_STREAM = "one stream allocates this memory and uses it"
TOLD, USUAL = "device.to_host(self._memory.trailer[self._flags])", "torch.from_numpy(self._usual.copy())"
REMOVALS = (
    # Waits
    Removal(
        "ranks/handle.py",
        "        for work in self.works:\n            if waiter is None:",
        "        for work in ():\n            if waiter is None:",
    ),
    Removal(
        "ranks/handle.py",
        "        self.wait()\n        assert self._result is not None",
        "        assert self._result is not None",
    ),
    Removal("ranks/handle.py", "while self.is_host and not work", "while not work"),
    Removal(
        "ranks/handle.py", "        if finish is not None:\n            with torch.no_grad():\n                finish()\n", ""
    ),
    Removal("ranks/handle.py", "                self._arrived.wait()\n", "                pass\n"),
    Removal("ranks/handle.py", "            self._arrived = self._record()", "            pass"),
    Removal(
        "ranks/handle.py",
        "        for work in self.works:\n            work.wait()\n\n    def is_completed",
        "        pass\n\n    def is_completed",
        "only marks when a collective ends, for reports: a device would show times that are too early",
    ),
    Removal(EXCHANGES, "Wait([*summands.works, *flags.works]", "Wait([*summands.works]"),
    Removal(EXCHANGES, "Wait([*summands.works, *flags.works]", "Wait([*flags.works]"),
    Removal(EXCHANGES, "Wait([*last, *shared, *means.works]", "Wait([*shared, *means.works]"),
    Removal(EXCHANGES, "Wait([*last, *shared, *means.works]", "Wait([*last, *shared]"),
    Removal(EXCHANGES, "Wait([*flags.works, *total.works]", "Wait([*total.works]"),
    Removal(EXCHANGES, "Wait([*flags.works, *total.works]", "Wait([*flags.works]"),
    Removal(COLLECTIVES, "            return wait.run_next()", "            return wait.then()"),
    Removal(COLLECTIVES, "return Handle(*wait.works, finish=wait.then)", "return Handle(*wait.works)"),
    Removal("buckets/bucket.py", "        for handle in handles:\n            handle.wait()\n", ""),
    Removal("buckets/bucket.py", "            for handle in handles:\n                handle.wait()\n", "            pass\n"),
    Removal(
        "sharded/gathers.py",
        "                    handle.wait()\n            except",
        "                    pass\n            except",
    ),
    Removal("engine/round.py", "        device.wait_for(streams)\n", ""),
    Removal("sharded/placeholder.py", "dist.ReduceOp.MAX).wait()", "dist.ReduceOp.MAX)"),
    Removal("sharded/sharding.py", "                handle.wait()\n        for slot", "                pass\n        for slot"),
    Removal("engine/measuring.py", "        exchange.handle.wait()\n", ""),
    Removal("sync/handles.py", "            self._handle.wait()", "            pass"),
    Removal("ranks/buffers.py", "        handle.wait()\n        arrived", "        arrived"),
    Removal("ranks/buffers.py", "        handle.wait()\n        for index", "        for index"),
    Removal("checkpoint/copies.py", "            device_of(place).synchronize()", "            pass"),
    Removal("by_hand/average.py", "    manager.wait_for_all()\n", ""),
    Removal("by_hand/average.py", "all_reduce_over(said, group).wait()", "all_reduce_over(said, group)"),
    Removal("by_hand/buckets.py", "        self.reduction_handle.wait()", "        pass"),
    Removal(
        "buckets/comm_hook.py",
        "_write_result(future.wait(), target",
        "_write_result(future.value(), target",
        "the handle has waited for the same future, as its work, just before",
    ),
    # Events
    Removal(
        "buckets/facts.py",
        f"        reduced = {TOLD}\n        usual = {USUAL}\n"
        "        return Snapshot(self, reduced, usual, copied=device.record())",
        f"        copied = device.record()\n        reduced, usual = {TOLD}, {USUAL}\n"
        "        return Snapshot(self, reduced, usual, copied=copied)",
    ),
    Removal("buckets/facts.py", "return self.copied.query()", "return True"),
    Removal("buckets/recorder.py", "        stop.synchronize()\n", ""),
    # The device layer itself
    Removal(DEVICE, "torch.accelerator.current_stream(stream.device).wait_stream(stream)", "pass"),
    Removal(DEVICE, "        event.record()", "        pass"),
    Removal(DEVICE, "        tensor.record_stream(self.stream_of(tensor))", "        pass"),
    Removal(DEVICE, "            torch.accelerator.set_stream(stream)", "            pass"),
    Removal(DEVICE, "torch.accelerator.set_stream(before)", "pass"),
    Removal(DEVICE, "        torch.accelerator.synchronize(self.place)", "        pass"),
    # Tensors that are held or kept for a stream
    Removal(EXCHANGES, "                carrier.give_back(summands.held)", "                pass"),
    Removal(EXCHANGES, "into=total)\n            carrier.give_back(summands.held)", "into=total)"),
    Removal(EXCHANGES, "            carrier.give_back([total])", "            pass", ONE_STREAM),
    Removal(EXCHANGES, "            carrier.give_back(means.held)", "            pass"),
    Removal(EXCHANGES, "            carrier.give_back(borrowed.tensors)", "            pass", ONE_STREAM),
    Removal(EXCHANGES, "                    carrier.give_back([values])", "                    pass"),
    Removal(EXCHANGES, "            carrier.give_back([difference])", "            pass", ONE_STREAM),
    Removal(EXCHANGES, "            carrier.give_back(arriving.held)\n            if pieces", "            if pieces"),
    Removal(COLLECTIVES, "[work], [received, sent])", "[work], [sent])"),
    Removal(COLLECTIVES, "[work], [received, sent])", "[work], [received])"),
    Removal(COLLECTIVES, "[work], [part, values])", "[work], [values])"),
    Removal(COLLECTIVES, "[work], [part, values])", "[work], [part])"),
    Removal(COLLECTIVES, "held=[flat], flat=flat", "flat=flat"),
    Removal(COLLECTIVES, "        gathering.held.append(sent)\n", ""),
    Removal(COLLECTIVES, "            self.group.hardware.keep(tensor)", "            pass"),
    Removal("buckets/gradients.py", "        device_of(self._place).keep(self.flat)", "        pass"),
    Removal("engine/round.py", "            bucket.keep_gradients()", "            pass"),
    Removal("buckets/bucket.py", "        self._keep(late.values())\n", ""),
    Removal("sharded/sharding.py", "in_memory_order(self.group.hardware.keep(grad)", "in_memory_order(grad"),
    Removal("sharded/params.py", "device_of(param.device).keep(param)", "param"),
    Removal("optim/state.py", "return device_of(state.device).keep(state)", "return state"),
    Removal("ranks/parcels.py", "            forget_scratch()  # this", "            pass  # this"),
    # Streams
    Removal(COLLECTIVES, "        with self.group.hardware.use(self._side):", "        if True:"),
    Removal("buckets/recorder.py", "        with self._device.use(self._done_stream):", "        if True:"),
    # Guards of reads
    Removal("engine/round.py", "is_host or must_know or compiled.is_learning", "is_host or compiled.is_learning"),
    Removal("engine/round.py", "if not (compiled.group.hardware.is_host or must_know", "if not (True or must_know"),
    Removal("buckets/facts.py", "bits if device.is_host else device.to_device(bits, bits.dtype)", "bits"),
    Removal("buckets/finite.py", "if is_host and not not_finite(values", "if not not_finite(values"),
    Removal("buckets/finite.py", "if not is_host:\n        nothing", "if False:\n        nothing"),
    Removal("buckets/comm_hook.py", "if not group.hardware.is_host:", "if False:"),
    Removal(
        "sync/handles.py",
        "if isinstance(number, Tensor) and not (device.is_host or device_of",
        "if False and not (device.is_host or device_of",
    ),
    Removal("ranks/buffers.py", "if is_host and torch.equal(", "if torch.equal("),
    Removal("engine/step_settings.py", "value.dim() == 0 and device_of(value.device).is_host", "value.dim() == 0"),
    Removal("by_hand/average.py", "device_of(place).is_host or parameters", "True or parameters"),
)


Case = tuple[int, Callable[..., Any], tuple[Any, ...]]  # the number of ranks, and a test with its arguments


def cases() -> Iterator[Case]:
    """Yields the tests of training, each once before any is repeated, and examples with late gradients."""
    tests = [cases_of(test) for name, test in vars(training).items() if name.startswith("test_")]
    for row in itertools.zip_longest(*tests):
        yield from filter(None, row)
    for name in LATE:
        yield 2, run, (EXAMPLES[name],)


def _listed(names: str | tuple[str, ...], cases: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """The values of each name of a parametrize mark."""
    rows = [it.values if hasattr(it, "marks") else it for it in cases]  # of pytest.param, which has a tuple always
    if isinstance(names, str):
        return {names: tuple(it[0] if hasattr(case, "marks") else it for case, it in zip(cases, rows, strict=True))}
    return dict(zip(names, zip(*rows, strict=True), strict=True))


def cases_of(test: Any) -> Iterator[Case]:
    """Yields every value of each parameter once, with some value of the others."""
    (ranks,) = (mark for mark in test.pytestmark if mark.name == "in_ranks")
    values: dict[str, tuple[Any, ...]] = {}
    for names, found in (mark.args for mark in test.pytestmark if mark.name == "parametrize"):
        values |= _listed(names, found)
    for place in range(max(map(len, values.values()), default=1)):
        yield ranks.args[0], test, tuple(values[name][place % len(values[name])] for name in inspect.signature(test).parameters)


def exchange(file: str, text: str) -> None:
    """Gives this rank the code of a file's other version."""
    path = Path(undertow.__file__).parent / file
    exchange_code(path, compile(text, str(path), "exec"))


def mutant(removal: Removal) -> str:
    """The text of its file. Functions are known by their first lines, which stay."""
    source = (ROOT / PACKAGE / removal.file).read_text()
    blank = "\n" * (removal.before.count("\n") - removal.after.count("\n"))
    return source.replace(removal.before, blank + removal.after)


def failure_of(removal: Removal) -> str:
    """The first test that notices; "" if none does."""
    ranks_of: dict[int, Ranks] = {}
    with contextlib.ExitStack() as stack:
        for num_ranks, test, args in cases():
            if num_ranks not in ranks_of:
                ranks_of[num_ranks] = stack.enter_context(Ranks(num_ranks))
                ranks_of[num_ranks].run(exchange, removal.file, mutant(removal))
            try:
                ranks_of[num_ranks].run(test, *args)
            except RanksFailed as failure:
                reasons = [line for line in str(failure).splitlines() if "Error" in line or "no answer" in line]
                return f"{test.__name__}: {reasons[-1][:150]}"
    return ""


def main() -> None:
    numbers = [int(number) for number in sys.argv[1:]] or range(len(REMOVALS))
    caught = 0
    for number in numbers:
        removal = REMOVALS[number]
        failure = failure_of(removal)
        caught += failure != ""
        print(f"{number:3} {removal.file}: {removal.before.strip()[:60]!r}", failure or f"SURVIVES {removal.why}", flush=True)
    print(f"{caught} of {len(numbers)} are caught")


if __name__ == "__main__":
    main()
