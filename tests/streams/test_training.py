"""Training on a device of logical streams: strategies, formats and all else, without findings and without waits of the host."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.utils._python_dispatch import _disable_current_modes

from support.alike import of_all_ranks
from support.errors import text_of
from support.inside import NUM_STEPS_UNTIL_A_MOVE
from support.models import noise
from support.naive import naive_mean, of_all
from support.ranks import in_ranks
from support.scripted import one_each, scripted
from support.streamed import Streamed, checked, on_device, placed
from support.streams import OnStream, StreamErrors
from support.streams.backend import BACKEND
from support.units import reentrant
from undertow import (
    ConfigError,
    DistributedDataParallel,
    GradientBucketManager,
    NonFiniteGradient,
    average_gradients,
    clip_grad_norm_,
)
from undertow.checkpoint.copies import Copies, CopyMemory

pytestmark = pytest.mark.slow
STRATEGIES = ["ddp", "zero1", "zero2"]
OF_TWO = ["ddp", "zero2"]  # for what shards do alike whenever they are reduced
WIDTH, BLOCKS = 8, 24  # layers of BLOCKS have a block of int8 and some more
LEARNS = 3  # steps until the order of gradients is known, a plan for shards is made, and trailers are read late
NUM_STEPS = LEARNS + 2
ROUNDED = 0.02 * NUM_STEPS  # by so much parameters differ if a gradient rounds to the other sign: AdamW's steps are of 0.01
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-bucket": {"bucket_cap_mb": 25.0},
    "ordered": {"reduction": "ordered"},
    "no-overlap": {"overlap": False},
    "divided": {"average_in_collective": False},
    "recorded": {"record": "full"},
    "unrecorded": {"record": "off"},
}
WIRES: dict[str, dict[str, Any]] = {
    "bfloat16": {"wire": "bfloat16"},
    "float16": {"wire": "float16"},
    "int8": {"wire": "int8"},
    "int8-checked": {"wire": "int8", "nonfinite": "skip"},
    "parameters": {"param_wire": "int8"},
    "both": {"wire": "bfloat16", "param_wire": "bfloat16"},
}


def layers(width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def train(it: Streamed, *, num_steps: int = NUM_STEPS, width: int = WIDTH, waits: bool = False) -> None:
    """Trains both models; in the last steps Undertow makes the host wait for nothing."""
    for step in range(num_steps):
        x = noise(4, width, step=step)
        there = on_device(x)
        is_steady = step >= LEARNS and not waits
        with it.checker.without_synchronization() if is_steady else contextlib.nullcontext():
            it.optimizer.zero_grad()
            loss(it.model, there).backward()
            it.optimizer.step()
        with _disable_current_modes():  # nothing of it is on the device
            it.bare_optimizer.zero_grad()
            loss(it.bare, x).backward()
            naive_mean(it.bare)
            it.bare_optimizer.step()


def require_alike(it: Streamed, *, tolerance: float = 0.0) -> None:
    it.model.wait()
    for (name, ours), wanted in zip(it.model.module.named_parameters(), it.bare.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), wanted, rtol=0.0, atol=tolerance, msg=f"{name}: {{}}".format)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_ranks(2)
def test_training_has_the_bits_of_the_reference(strategy: str, settings: dict[str, Any]) -> None:
    with placed(layers(), strategy=strategy, **settings) as it:
        train(it)
        require_alike(it)
        # NCCL's barrier makes the host wait, on a device that torch guesses.
        assert "barrier" not in {launch.kind for launch in it.checker.launches}


@pytest.mark.parametrize("settings", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_ranks(2)
def test_formats_are_encoded_and_decoded_in_order(strategy: str, settings: dict[str, Any]) -> None:
    with placed(layers(BLOCKS), strategy=strategy, **settings) as it:
        train(it, width=BLOCKS, waits="nonfinite" in settings)
        require_alike(it, tolerance=ROUNDED)
        digests = of_all_ranks([float(param.detach().sum()) for param in it.model.module.parameters()])
        assert digests[0] == digests[1]


@pytest.mark.parametrize("settings", [{}, {"reduction": "ordered"}, {"wire": "int8", "param_wire": "int8"}], ids=str)
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
@in_ranks(2, 4)
def test_parts_that_are_whole_parameters_are_sent_in_order(strategy: str, settings: dict[str, Any]) -> None:
    """On four ranks one has much more of a bucket than others, which travels in equal pieces."""
    with placed(layers(BLOCKS), strategy=strategy, whole=True, **settings) as it:
        train(it, width=BLOCKS)
        assert all(bucket.owners is not None for bucket in it.model.plan.buckets)
        in_full = 0.0 if dist.get_world_size() == 2 else 1e-6  # another order of four summands, in fp32
        require_alike(it, tolerance=ROUNDED if "wire" in settings else in_full)


OVER_A_MESH = [
    {"record": "off"},
    {"reduction": "ordered", "record": "off"},
    {"wire": "bfloat16"},
    {"wire": (None, "int8")},
]


@pytest.mark.parametrize("settings", OVER_A_MESH, ids=str)
@in_ranks(4)
def test_a_mesh_orders_its_rows_and_columns_and_waits_for_each_after_backward(settings: dict[str, Any]) -> None:
    width = BLOCKS if "wire" in settings else WIDTH
    with placed(layers(width), strategy="hybrid", **settings) as it:
        train(it, width=width)
        require_alike(it, tolerance=ROUNDED if "wire" in settings else 1e-6)  # another order of four summands, in fp32
        require_overlap(it, width=width)
        require_waits(it)


@pytest.mark.parametrize("settings", [{}, {"reduction": "ordered"}, {"wire": "int8", "param_wire": "int8"}], ids=str)
@in_ranks(4)
def test_parts_may_be_empty_and_uneven(settings: dict[str, Any]) -> None:
    with placed(nn.Linear(3, 1), strategy="zero1", **settings) as it:  # 1 and 3 elements for four ranks
        train(it, width=3)
        require_alike(it, tolerance=ROUNDED if "wire" in settings else 1e-6)  # another order of four summands, in fp32


@pytest.mark.parametrize(("strategy", "lag"), [("ddp", None), ("zero1", None), ("zero2", None), ("zero2", 0)])
@in_ranks(2)
def test_reports_and_times_may_be_there_at_once_or_never(strategy: str, lag: int | None) -> None:
    """Who waits for an event of a time waits until it is reached, however late the device is."""
    with placed(layers(), strategy=strategy, lag=lag, record="full") as it:
        train(it)
        assert "bucket" in str(it.model.report())  # before anything else has made the host wait
        require_alike(it)


@pytest.mark.parametrize("strategy", OF_TWO)
@in_ranks(2)
def test_all_of_a_step_may_run_on_a_stream_of_the_users(strategy: str) -> None:
    with placed(layers(), strategy=strategy, wire="bfloat16") as it:
        stream = it.checker.new_stream()
        it.checker.record().wait(stream)
        with it.checker.use(stream):
            train(it)
            require_alike(it, tolerance=ROUNDED)


class Deep(nn.Module):
    """Layers, the last of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.depth = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), 3

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return x


class Branches(nn.Module):
    """Two layers. One runs on another stream if there is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.here, self.there, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.runs: Callable[[Tensor], Tensor] = self.there

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.here(x) + self.runs(x.detach()))


@pytest.mark.parametrize("cap", [25.0, (9e-4, 25.0)], ids=["at the end of backward", "in backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_ranks(2)
def test_gradients_of_one_bucket_may_come_from_several_streams(strategy: str, cap: Any) -> None:
    with placed(Branches(), strategy=strategy, bucket_cap_mb=cap) as it:
        branches = it.model.module
        branches.__dict__["runs"] = OnStream(branches.there, it.checker, it.checker.new_stream())
        train(it)
        require_alike(it)


@pytest.mark.smoke
@in_ranks(2)
def test_a_late_gradient_may_come_from_another_stream() -> None:
    with placed(Branches()) as it:
        there = OnStream(it.model.module.there, it.checker, it.checker.new_stream())
        it.model.module.__dict__["runs"] = lambda x: there(x) + reentrant(there, x)
        it.bare.__dict__["runs"] = lambda x: it.bare.there(x) + reentrant(it.bare.there, x)
        train(it, num_steps=2, waits=True)
        require_alike(it, tolerance=1e-6)  # two means are added, not the parts


class Rows(nn.Module):
    """An embedding with sparse gradients, between layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.rows, self.last = nn.Linear(WIDTH, WIDTH), nn.Embedding(7, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.first(x))

    def behind(self, x: Tensor) -> Tensor:
        numbers = torch.arange(len(x), device=x.device) + 2 * dist.get_rank()
        return self.last(x + self.rows(numbers))


class LateRows(Rows):
    """The same, with gradients in two parts."""

    def forward(self, x: Tensor) -> Tensor:
        return reentrant(self.behind, reentrant(self.behind, self.first(x)).tanh())


@pytest.mark.parametrize("settings", [{}, {"reduction": "ordered"}, {"wire": "bfloat16"}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_ranks(2)
def test_sparse_gradients_become_dense_on_a_device(strategy: str, settings: dict[str, Any]) -> None:
    """NCCL has no reduction of sparse tensors."""
    with placed(Rows(), strategy=strategy, **settings) as it:
        it.bare.rows.sparse = False
        train(it, waits=True)  # torch's operator for such a gradient may make the host wait
        require_alike(it, tolerance=ROUNDED if "wire" in settings else 0.0)
        if strategy == "ddp":
            assert it.model.module.rows.weight.grad.layout is torch.strided


@in_ranks(2)
def test_a_part_of_a_sparse_gradient_may_come_late() -> None:
    with placed(LateRows()) as it:
        it.bare.rows.sparse = False
        train(it, num_steps=2, waits=True)
        require_alike(it, tolerance=1e-6)  # two means are added, not the parts


@pytest.mark.parametrize("strategy", OF_TWO)
@in_ranks(2)
def test_buckets_may_be_packed_on_several_streams(strategy: str) -> None:
    with placed(Branches(), strategy=strategy, wire="bfloat16") as it:  # a bucket for each parameter
        branches = it.model.module
        branches.__dict__["runs"] = OnStream(branches.there, it.checker, it.checker.new_stream())
        train(it)
        require_alike(it, tolerance=ROUNDED)


@in_ranks(2)
def test_a_parameter_unused_on_one_rank_gets_the_mean_late_too() -> None:
    """When ranks read late, this one must still learn that another one has used it."""
    with placed(Deep()) as it:
        for step in range(NUM_STEPS):
            it.model.zero_grad()
            it.model.module.depth = 3 if step <= LEARNS or dist.get_rank() == 0 else 2
            loss(it.model, torch.ones(2, WIDTH, device="cpu:0")).backward()
        assert it.model.module.layers[2].weight.grad is not None


@pytest.mark.parametrize("strategy", OF_TWO)
@in_ranks(2)
def test_a_loss_is_divided_by_a_mean_over_ranks_on_the_device(strategy: str) -> None:
    with placed(layers(), strategy=strategy) as it:
        for step in range(NUM_STEPS):
            x, number = torch.ones(2, WIDTH, device="cpu:0"), torch.ones((), device="cpu:0") * (dist.get_rank() + 1)
            with it.checker.without_synchronization() if step >= LEARNS else contextlib.nullcontext():
                divisor = it.model.mean_over_ranks(number).wait()
                it.optimizer.zero_grad()
                (it.model(x).sum() / divisor).backward()
                it.optimizer.step()
        assert divisor.item() == 1.5


def start_mean(it: Streamed) -> tuple[Callable[[], object], Tensor]:
    mean = it.model.mean_over_ranks(torch.ones((), device="cpu:0"))
    return mean.wait, mean.wait()


def start_by_hand(it: Streamed) -> tuple[Callable[[], object], Tensor]:
    loss(it.model.module, on_device(noise(4, WIDTH))).backward()
    manager = GradientBucketManager(it.group, list(it.model.module.parameters()))
    return manager.reduce_all_async().wait, manager.buckets[0].bucket_tensor


@pytest.mark.parametrize("start", [start_mean, start_by_hand], ids=["mean", "by-hand"])
@in_ranks(2)
def test_every_stream_that_waits_for_a_message_follows_it(start: Callable[[Streamed], Any]) -> None:
    with placed(layers()) as it:
        side = it.checker.new_stream()
        with it.checker.use(side):
            it.checker.record(it.checker.default).wait()
            wait, tensor = start(it)
            wait()
        wait()
        assert tensor.isfinite().all().item()
        it.model.zero_grad()
        it.checker.synchronize()


@pytest.mark.parametrize("is_awaited", [True, False], ids=["after the forward", "before the forward"])
@in_ranks(2)
def test_parameters_arrive_for_the_stream_that_waits_first(is_awaited: bool) -> None:
    side_is_wrong = (
        contextlib.nullcontext() if is_awaited else pytest.raises(StreamErrors, match="reads what another stream writes")
    )
    with side_is_wrong, placed(layers(), strategy="zero1") as it:
        train(it)
        side, after_step = it.checker.new_stream(), it.checker.record()
        it.model(on_device(noise(4, WIDTH)))
        event = it.checker.record() if is_awaited else after_step
        event.wait(side)
        with it.checker.use(side):
            average = [param.detach() * 0.5 for param in it.model.module.parameters()]
        it.checker.synchronize()
        del average


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_ranks(2)
def test_gradients_are_clipped_and_read_before_the_step(strategy: str) -> None:
    with placed(layers(), strategy=strategy) as it:
        for step in range(LEARNS + 1):
            it.optimizer.zero_grad()
            loss(it.model, on_device(noise(4, WIDTH, step=step))).backward()
            assert clip_grad_norm_(it.model, 0.01).isfinite()
            assert it.model.full_gradient(it.model.module[0].weight).square().sum() <= 0.01**2 * 1.01  # a norm's rounding
            it.optimizer.step()


@pytest.mark.parametrize("strategy", OF_TWO)
@in_ranks(2)
def test_a_scaler_unscales_and_skips(strategy: str) -> None:
    with placed(layers(), strategy=strategy) as it:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(NUM_STEPS):
            before = [param.detach().clone() for param in it.model.module.parameters()]
            it.optimizer.zero_grad()
            factor = float("inf") if step == LEARNS and dist.get_rank() == 1 else 1.0
            scaler.scale(loss(it.model, on_device(noise(4, WIDTH, step=step))) * factor).backward()
            scaler.step(it.optimizer)
            scaler.update()
            it.model.wait()
            assert all(map(torch.equal, before, it.model.module.parameters())) == (step == LEARNS)


@pytest.mark.parametrize("strategy", OF_TWO)
@in_ranks(2)
def test_a_gradient_that_is_not_finite_is_found_before_the_step(strategy: str) -> None:
    with placed(layers(), strategy=strategy, nonfinite="raise") as it:
        for step in range(NUM_STEPS):
            it.optimizer.zero_grad()
            factor = float("nan") if step == LEARNS + 1 and dist.get_rank() == 1 else 1.0
            (loss(it.model, on_device(noise(4, WIDTH, step=step))) * factor).backward()
            if step <= LEARNS:
                it.optimizer.step()
        assert "rank 1" in text_of(NonFiniteGradient, it.optimizer.step)


def wrapped_hook(state: Any, bucket: Any) -> Any:
    return default.fp16_compress_wrapper(default.allreduce_hook)(state, bucket)


HOOKS: dict[str, Callable[..., Any]] = {
    "plain": default.allreduce_hook,
    "fp16": default.fp16_compress_hook,
    "wrapped": wrapped_hook,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
@in_ranks(2)
def test_a_communication_hook_runs_in_order(hook: Callable[..., Any]) -> None:
    with placed(layers()) as it:
        it.model.register_comm_hook(it.group, hook)
        train(it, waits=True)
        require_alike(it, tolerance=ROUNDED)


@in_ranks(2)
def test_a_plan_that_is_tried_is_followed_in_order() -> None:
    with scripted(one_each), placed(layers(), bucket_cap_mb=None) as it:
        stream = it.checker.new_stream()  # not the stream of the first buckets
        it.checker.record().wait(stream)
        with it.checker.use(stream):
            train(it, num_steps=NUM_STEPS_UNTIL_A_MOVE + 5, waits=True)
            assert len(it.model.sync.plan.buckets) == 6  # one for each parameter; there was one for all
            it.model.wait()
        it.checker.record(stream).wait()
        require_alike(it)
        it.checker.synchronize()
        assert "bucket" in str(it.model.report())


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_ranks(2)
def test_micro_batches_from_several_streams_are_added(strategy: str) -> None:
    with placed(Branches(), strategy=strategy, bucket_cap_mb=25.0, record="off") as it:
        branches = it.model.module
        branches.__dict__["runs"] = OnStream(branches.there, it.checker, it.checker.new_stream())
        for step in range(NUM_STEPS):
            x = noise(4, WIDTH, step=step)
            y = on_device(x)
            with it.checker.without_synchronization() if step >= LEARNS else contextlib.nullcontext():
                it.optimizer.zero_grad()
                with it.model.no_sync():
                    loss(it.model, y).backward()
                loss(it.model, y).backward()
                it.optimizer.step()
            it.bare_optimizer.zero_grad()
            for _ in range(2):
                loss(it.bare, x).backward()
            naive_mean(it.bare)
            it.bare_optimizer.step()
        require_alike(it, tolerance=1e-6)  # zero2 averages each micro-batch


@in_ranks(2)
def test_replicas_buffers_and_states_are_compared_and_sent() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with placed(model, strategy="zero1", check_replicas_every=2) as it:
        for step in range(NUM_STEPS):
            it.optimizer.zero_grad()
            loss(it.model, on_device(noise(4, WIDTH, step=step))).backward()
            it.optimizer.step()
        state, of_optimizer = it.model.state_dict(), it.optimizer.state_dict()
        it.model.load_state_dict(state)
        it.optimizer.load_state_dict(of_optimizer)
        it.optimizer.step()
        it.model.wait()


@in_ranks(2)
def test_gradients_are_averaged_by_hand() -> None:
    with placed(layers()) as it:
        loss(it.model.module, on_device(noise(4, WIDTH))).backward()
        grads = [param.grad for param in it.model.module.parameters()]
        with it.checker.without_synchronization():
            means = average_gradients(grads, process_group=it.group)
        assert all(mean is not None and mean.isfinite().all() for mean in means)
        mean, none = average_gradients([grads[0], None], list(it.model.module.parameters())[:2], process_group=it.group)
        assert none is None
        assert torch.equal(mean, means[0])
        it.model.zero_grad()


@pytest.mark.parametrize("waits", [True, False])
@in_ranks(2)
def test_buckets_are_averaged_by_hand(waits: bool) -> None:
    with placed(layers()) as it:
        loss(it.model.module, on_device(noise(4, WIDTH))).backward()
        manager = GradientBucketManager(it.group, list(it.model.module.parameters()))
        manager.reduce_all_async(dist.ReduceOp.AVG)
        if waits:
            manager.wait_for_all()
        manager.copy_back_all()
        manager.close()
        loss(it.bare, noise(4, WIDTH)).backward()
        naive_mean(it.bare)
        pairs = zip(it.model.module.parameters(), it.bare.parameters(), strict=True)
        assert all(torch.equal(ours.grad.cpu(), wanted.grad) for ours, wanted in pairs)
        it.model.zero_grad()


def require_overlap(it: Streamed, *, width: int = WIDTH) -> None:
    """The stream of backward has not waited for any other one when the last gradient arrives, in training under way."""
    known: list[dict[Any, int]] = []
    last = it.model.module[0].weight
    last.register_post_accumulate_grad_hook(lambda _: known.append(dict(it.checker.default.clock)))
    it.optimizer.zero_grad()
    value = loss(it.model, on_device(noise(4, width)))
    before = dict(it.checker.default.clock)
    value.backward()
    (at_last,) = known
    own = it.checker.default, it.checker.host
    assert [stream for stream, count in at_last.items() if stream not in own and count != before.get(stream, 0)] == []


@in_ranks(2)
def test_a_reduction_by_hand_may_be_polled() -> None:
    with placed(layers()) as it:
        loss(it.model.module, on_device(noise(4, WIDTH))).backward()
        manager = GradientBucketManager(it.group, list(it.model.module.parameters()))
        handle = manager.reduce_all_async(dist.ReduceOp.AVG)
        assert not handle.is_completed()  # as on a device that is behind
        while not handle.is_completed():
            pass
        manager.copy_back_all()
        assert all(param.grad.isfinite().all() for param in it.model.module.parameters())
        it.model.zero_grad()


def require_waits(it: Streamed) -> None:
    """Some stream has waited for each collective: a backend holds its tensors until then. Times, if recorded, wait too."""
    it.model.wait()
    it.checker.synchronize()
    assert [work.event for work in it.checker.works] == []


OVERLAPS = [
    {},
    {"wire": "bfloat16"},
    {"reduction": "ordered", "record": "off"},
    pytest.param({"strategy": "zero1", "record": "off"}, marks=pytest.mark.smoke),
    {"strategy": "zero2", "record": "off"},
]


@pytest.mark.parametrize("settings", OVERLAPS, ids=str)
@in_ranks(2)
def test_backward_waits_for_no_collective_before_its_end_and_for_each_afterwards(settings: dict[str, Any]) -> None:
    with placed(layers(), **settings) as it:
        train(it)
        require_overlap(it)
        require_waits(it)


@in_ranks(2)
def test_a_learning_rate_and_buffers_on_the_device_are_not_read() -> None:
    torch.manual_seed(0)
    with placed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))) as it:
        rate = torch.tensor(0.01, device="cpu:0")
        optimizer = torch.optim.SGD(it.model.parameters(), lr=rate, foreach=True)
        for step in range(NUM_STEPS):
            num_before = len(it.checker.synchronizations)
            optimizer.zero_grad()
            loss(it.model, on_device(noise(4, WIDTH, step=step))).backward()
            optimizer.step()  # of torch's, which reads the rate
        assert [text for text in it.checker.synchronizations[num_before:] if "/undertow/" in text] == []


@pytest.mark.parametrize("settings", [{}, {"wire": "int8"}], ids=["plain", "wire"])
@in_ranks(2)
def test_a_search_for_infinities_makes_the_host_wait_only_for_trailers(settings: dict[str, Any]) -> None:
    with placed(layers(BLOCKS), nonfinite="skip", **settings) as it:
        train(it, width=BLOCKS, waits=True)
        num_before = len(it.checker.synchronizations)
        loss(it.model, on_device(noise(4, BLOCKS))).backward()
        assert {text.split("\n")[1].rpartition(" ")[2] for text in it.checker.synchronizations[num_before:]} <= {
            *("TrailerCodec.read", "FactCodec.numbers"),
        }


@in_ranks(2)
def test_a_hook_on_a_stream_of_the_users_is_waited_for_there() -> None:
    with placed(layers()) as it:
        it.model.register_comm_hook(it.group, default.fp16_compress_hook)
        stream = it.checker.new_stream()
        it.checker.record().wait(stream)
        with it.checker.use(stream):
            train(it, num_steps=2, waits=True)
            require_alike(it, tolerance=ROUNDED)


@pytest.mark.parametrize("settings", [{}, {"param_wire": "int8"}], ids=["plain", "parameters"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_ranks(2)
def test_steps_may_run_on_another_stream_than_forwards(strategy: str, settings: dict[str, Any]) -> None:
    with placed(layers(BLOCKS), strategy=strategy, **settings) as it:
        stream = it.checker.new_stream()
        for step in range(NUM_STEPS):
            it.optimizer.zero_grad()
            loss(it.model, on_device(noise(4, BLOCKS, step=step))).backward()
            it.checker.record().wait(stream)
            with it.checker.use(stream):
                it.optimizer.step()
            it.checker.record(stream).wait()
        it.model.wait()


@in_ranks(2)
def test_copies_for_a_save_may_be_read_when_they_are_made() -> None:
    with checked():
        copies = Copies(CopyMemory())
        copies.add("file", ({"tensor": torch.ones(WIDTH, device="cpu:0")}, {}))
        tensors, _ = copies.files["file"]
        assert tensors["tensor"].tolist() == [1.0] * WIDTH


ELSEWHERE = """parameter '{}' is on cpu, and the model was wrapped on cpu:0.
  a module whose gradients are averaged
  Move the whole module with module.to(device) before it is wrapped."""


@in_ranks(2)
def test_a_parameter_of_the_host_cannot_join_those_of_a_device() -> None:
    with placed(layers()) as it:
        train(it, num_steps=1, waits=True)
        it.model.module.add_module("3", nn.Linear(WIDTH, WIDTH))
        x = torch.ones(2, WIDTH, device="cpu:0")
        for _ in range(2):
            assert text_of(ConfigError, lambda: it.model(x)) == ELSEWHERE.format("3.weight")
        it.model.module.pop(3)
        train(it, num_steps=1, waits=True)
        require_alike(it)


@in_ranks(2)
def test_a_model_with_parameters_of_the_host_and_of_a_device_cannot_be_wrapped() -> None:
    with checked() as checker, of_all(BACKEND) as group:
        module = layers()
        checker.place(module[0])
        assert text_of(ConfigError, lambda: DistributedDataParallel(module, process_group=group)) == ELSEWHERE.format("1.weight")


@in_ranks(2)
def test_a_model_that_is_frozen_when_it_is_wrapped_trains_later_on_its_device() -> None:
    with contextlib.ExitStack() as stack:
        with pytest.warns(UserWarning, match="no parameter"):
            it = stack.enter_context(placed(layers().requires_grad_(False)))
        for model in (it.model.module, it.bare):
            model.requires_grad_(True)
        train(it, waits=True)
        require_alike(it)
