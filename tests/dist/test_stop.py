"""A signal on any rank: all ranks stop after the same step, under every strategy."""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.errors import text_of
from support.levels import some
from support.ranks import in_ranks
from support.sharded import mesh_of
from undertow import (
    ConfigError,
    DistributedDataParallel,
    Outer,
    PhaseError,
    ShardedOptimizer,
    SyncConfig,
    WrongType,
    attach,
    stop_on_signal,
)

BOTH = (signal.SIGTERM, signal.SIGUSR1)


@contextlib.contextmanager
def handlers_of_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*BOTH, signal.SIGINT)}
    for number in BOTH:  # a benchmark that ran in this process may have left its own
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def steps_until_stop(model: Any, optimizer: Any, *, signaled: int, at: int = 2, most: int = 12) -> int:
    """The number of the step after which this rank is to stop; rank `signaled` gets SIGTERM in the forward of step `at`."""
    for number in range(most):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), float(number + dist.get_rank()))).square().mean()
        if number == at and dist.get_rank() == signaled:
            os.kill(os.getpid(), signal.SIGTERM)
        loss.backward()
        optimizer.step()
        if model.stop_requested:
            return number
    return most


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero2 in small buckets, int8": {"strategy": "zero2", "wire": "int8", "param_wire": "int8", "bucket_cap_mb": 1e-5},
    "without overlap": {"overlap": False},
}


@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", some(STRATEGIES, most=2))
def test_all_ranks_stop_after_the_step_in_which_one_has_the_signal(strategy: str) -> None:
    with handlers_of_before():
        ddp = DistributedDataParallel(net(), config=SyncConfig(**STRATEGIES[strategy]))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        if "strategy" in STRATEGIES[strategy]:
            optimizer = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
        stop_on_signal(ddp)
        assert not ddp.stop_requested
        assert steps_until_stop(ddp, optimizer, signaled=1) == 2
        ddp.close()


@pytest.mark.deep
@in_ranks(4)
def test_so_do_ranks_of_a_mesh() -> None:
    with handlers_of_before(), mesh_of(2, 2) as mesh:
        ddp = DistributedDataParallel(net(), device_mesh=mesh, config=SyncConfig(strategy="hybrid"))
        optimizer = ShardedOptimizer(torch.optim.AdamW, ddp, lr=0.01)
        stop_on_signal(ddp)
        assert steps_until_stop(ddp, optimizer, signaled=3) == 2
        ddp.close()


@in_ranks(2)
@pytest.mark.parametrize(("delay", "stops_after"), [(0, 3), (1, 4)])
def test_replicas_stop_after_the_next_exchange(delay: int, stops_after: int) -> None:
    """Exchanges start after steps 4 and 8, counted from 1."""
    with handlers_of_before():
        ddp = DistributedDataParallel(net(), config=SyncConfig(outer=Outer(every=4, fragments=1, delay=delay)))
        stop_on_signal(ddp)
        assert steps_until_stop(ddp, torch.optim.SGD(ddp.parameters(), lr=0.01), signaled=1) == stops_after
        ddp.close()


@pytest.mark.deep
@in_ranks(4)
def test_so_do_replicas_of_several_ranks() -> None:
    with handlers_of_before(), mesh_of(2, 2) as mesh:
        config = SyncConfig(outer=Outer(every=4, fragments=2, delay=1))
        ddp = DistributedDataParallel(net(), device_mesh=mesh, config=config)
        stop_on_signal(ddp)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        # fragments start after steps 4 and 6; the one after step 4 brings the flag after step 5, which is number 4
        assert steps_until_stop(ddp, optimizer, signaled=2) == 4
        ddp.close()


@in_ranks(2)
def test_a_signal_counts_for_every_model_and_calls_the_handlers_before() -> None:
    with handlers_of_before():
        called: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
        models = [DistributedDataParallel(net()) for _ in range(2)]
        sync = attach(net())
        for model in (*models, models[0], sync):  # one of them twice
            stop_on_signal(model)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        assert steps_until_stop(models[0], optimizers[0], signaled=0, at=1) == 1
        assert called == ([signal.SIGTERM] if dist.get_rank() == 0 else [])
        assert not models[1].stop_requested
        assert steps_until_stop(models[1], optimizers[1], signaled=9) == 0
        models[0].close()
        os.kill(os.getpid(), signal.SIGTERM)  # the others are open: it does not end the process
        for model in (models[1], sync):
            model.close()


@in_ranks(2)
def test_a_handler_that_was_installed_after_is_called_once() -> None:
    with handlers_of_before():
        model = DistributedDataParallel(net())
        stop_on_signal(model)
        called: list[int] = []
        before = signal.getsignal(signal.SIGTERM)

        def users(number: int, frame: Any) -> None:
            called.append(number)
            before(number, frame)  # type: ignore[operator]

        signal.signal(signal.SIGTERM, users)
        stop_on_signal(model)
        os.kill(os.getpid(), signal.SIGTERM)
        assert called == [signal.SIGTERM]
        model.close()


@in_ranks(2)
def test_handlers_that_call_each_other_do_not_end_the_process_while_a_model_is_open() -> None:
    with handlers_of_before():
        first = DistributedDataParallel(net())
        stop_on_signal(first)
        before = signal.getsignal(signal.SIGTERM)
        called: list[int] = []

        def users(number: int, frame: Any) -> None:
            called.append(number)
            before(number, frame)  # type: ignore[operator]

        signal.signal(signal.SIGTERM, users)
        second = DistributedDataParallel(net())
        stop_on_signal(second)
        first.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert called == [signal.SIGTERM]
        second.close()
        assert ending_of_a_child() == -signal.SIGTERM


class Request:
    """What a handler asks, of a model that a forked process could have."""

    is_closed = False
    is_asked = False

    def ask(self) -> None:
        self.is_asked = True


def test_in_a_forked_process_the_handlers_of_its_parent_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    of_parent, of_child = Request(), Request()
    requests = iter([of_parent, of_child])
    monkeypatch.setattr("undertow.ddp.signals._request_of", lambda model: next(requests))
    with handlers_of_before():
        stop_on_signal(nn.Linear(1, 1))
        child = os.fork()
        if child == 0:
            try:
                stop_on_signal(nn.Linear(1, 1))
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(7 if of_child.is_asked and not of_parent.is_asked else 3)
            except BaseException:
                traceback.print_exc()
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def ending_of_a_child() -> int:
    """The exit code of a forked process that gets SIGTERM."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@in_ranks(2)
def test_without_an_open_model_the_signal_ends_a_process_as_before() -> None:
    with handlers_of_before():
        model = DistributedDataParallel(net())
        stop_on_signal(model)
        assert ending_of_a_child() == -signal.SIGTERM  # as of a DataLoader's worker, which its parent ends
        called: list[int] = []
        model.close()
        assert ending_of_a_child() == -signal.SIGTERM
        signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
        model = DistributedDataParallel(net())
        stop_on_signal(model)
        model.close()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called == [signal.SIGUSR1]


@in_ranks(2)
def test_calls_that_cannot_work_say_so_and_install_nothing() -> None:
    with handlers_of_before():
        before = [signal.getsignal(number) for number in BOTH]
        model = DistributedDataParallel(net())
        for error, text, given in (
            (WrongType, "model must be an undertow.DistributedDataParallel", {"model": net()}),
            (WrongType, "signals must be a tuple of signals.", {"signals": signal.SIGTERM}),
            (WrongType, "signals must be a tuple of signals.", {"signals": "SIGTERM"}),
            (WrongType, "'SIGTERM' is not a signal.", {"signals": ("SIGTERM",)}),
            (ConfigError, "SIGKILL cannot be handled.", {"signals": (signal.SIGTERM, signal.SIGKILL)}),
            (ConfigError, "signal 4711 cannot be handled.", {"signals": (4711,)}),
            (ConfigError, "signals are empty.", {"signals": ()}),
            (WrongType, "seconds must be a number.", {"seconds": "60"}),
            (WrongType, "seconds must be a number.", {"seconds": True}),
            (ConfigError, "seconds must be a number above 0.", {"seconds": 0}),
            (ConfigError, "seconds must be a number above 0.", {"seconds": 1e400}),
            (ConfigError, "seconds must be a number above 0.", {"seconds": float("nan")}),
        ):
            arguments: dict[str, Any] = {"model": model, **given}
            assert text in text_of(error, lambda arguments=arguments: stop_on_signal(**arguments))
        texts: list[str] = []
        thread = threading.Thread(target=lambda: texts.append(text_of(PhaseError, lambda: stop_on_signal(model))), name="loader")
        thread.start()
        thread.join()
        assert texts == [
            "signals are handled in the main thread only.\n  stop_on_signal, thread 'loader'\n"
            "  Call it in the main thread, on any rank; the other threads may ask model.stop_requested."
        ]
        model.close()
        assert "this model is closed" in text_of(PhaseError, lambda: stop_on_signal(model))
        assert [signal.getsignal(number) for number in BOTH] == before


@in_ranks(2)
def test_a_rank_without_others_follows_its_own_signal() -> None:
    with handlers_of_before():
        groups = [dist.new_group([rank]) for rank in range(2)]
        model = attach(net(), process_group=groups[dist.get_rank()])
        stop_on_signal(model, signals=[signal.SIGUSR1])
        assert not model.stop_requested
        os.kill(os.getpid(), signal.SIGUSR1)
        assert model.stop_requested
        model.close()
        dist.destroy_process_group(groups[dist.get_rank()])
