"""What reports and traces say of gradients in a format: their bytes, and the times to encode and decode them."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from support.alike import of_all_ranks, train
from support.inside import bytes_given_to_gloo
from support.levels import some
from support.models import noise
from support.ranks import in_ranks
from support.sharded import training
from undertow import DistributedDataParallel
from undertow.trace import StepReport

FORMATS = [None, "bfloat16", "int8"]


def odd_model() -> nn.Module:
    """Parameters of whole blocks of 512, of parts of blocks, and of less than one."""
    return nn.Sequential(nn.Linear(37, 29), nn.Tanh(), nn.Linear(29, 1), nn.Tanh(), nn.Linear(1, 512))


def loss_of(model: nn.Module, step: int) -> Any:
    return model(noise(3, 37, step=step)).square().mean()


def train_steps(ddp: DistributedDataParallel, optimizer: Any, *steps: int) -> None:
    train(ddp, optimizer, loss_of, steps=steps)
    ddp.wait()


def payload(total_bytes: int, *, num_ranks: int, num_times: int, trailer_bytes: int) -> float:
    """The bytes of a rank if n ranks have sent `total_bytes`.

    Each rank sends all values but its part, `num_times`: 2 times in an all-reduce. A trailer goes whole to each other rank.
    """
    of_trailers = num_ranks * (num_ranks - 1) * trailer_bytes
    return (total_bytes - of_trailers) / (num_ranks - 1) / num_times + trailer_bytes


def payload_of(counts: list[dict[tuple[int, ...], int]], ranks: tuple[int, ...], **how: int) -> float:
    return payload(sum(count.get(ranks, 0) for count in counts), num_ranks=len(ranks), **how)


@in_ranks(2, 3)
@pytest.mark.parametrize("cap", some([0.001, 25.0], most=1))
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("wire", FORMATS)
def test_reported_bytes_are_those_given_to_gloo(wire: str | None, strategy: str, cap: float) -> None:
    # "ordered", because gloo's own all-reduce cannot be counted here.
    settings: dict[str, Any] = {"reduction": "ordered", "bucket_cap_mb": cap, "order": "reverse", "wire": wire}
    with training(odd_model(), strategy, "SGD", **settings) as (ddp, optimizer):
        train_steps(ddp, optimizer, 0, 1)
        with bytes_given_to_gloo() as counted:
            train_steps(ddp, optimizer, 2)
        # The others travel with their gradients: parameters of less than a block, in full width.
        apart = [bucket for bucket in ddp.plan.buckets if bucket.wire is not None or strategy != "ddp"]
        found = payload_of(
            of_all_ranks(dict(counted)),
            tuple(range(dist.get_world_size())),
            num_times=2 if strategy == "ddp" else 1,
            trailer_bytes=sum(bucket.trailer_bytes for bucket in apart),
        )
        assert found == ddp.report().sent_bytes


@in_ranks(4)
@pytest.mark.parametrize("wire", some([None, "int8", ((None, "int8"),), (("bfloat16", "int8"),)], most=1), ids=str)
@pytest.mark.parametrize("reduction", some(["native", "ordered"], most=1))
def test_on_a_mesh_both_axes_count_each_in_its_format(reduction: str, wire: Any) -> None:
    settings: dict[str, Any] = {"reduction": reduction, "order": "reverse", "wire": wire}
    with training(odd_model(), "hybrid", "SGD", **settings) as (ddp, optimizer):
        train_steps(ddp, optimizer, 0, 1)
        with bytes_given_to_gloo() as counted:
            train_steps(ddp, optimizer, 2)
        counts = of_all_ranks(dict(counted))
        trailer_bytes = sum(bucket.trailer_bytes for bucket in ddp.plan.buckets)
        (row,) = (ranks for ranks in ((0, 1), (2, 3)) if dist.get_rank() in ranks)
        (column,) = (ranks for ranks in ((0, 2), (1, 3)) if dist.get_rank() in ranks)
        inside = payload_of(counts, row, num_times=1, trailer_bytes=trailer_bytes)
        across = payload_of(counts, column, num_times=2, trailer_bytes=trailer_bytes)
        assert ddp.report().sent_bytes == inside + across


@in_ranks(2)
def test_int8_sends_a_quarter_of_the_bytes() -> None:
    sent = {}
    for wire in (None, "int8"):
        with training(nn.Linear(512, 512), "ddp", "SGD", wire=wire) as (ddp, optimizer):
            train(ddp, optimizer, lambda model, step: model(noise(3, 512, step=step)).square().mean())
            sent[wire] = ddp.report().sent_bytes
    # A byte for each element, 4 for each block of 512, and the trailer, some ten elements, as it is.
    assert 0.252 <= sent["int8"] / sent[None] < 0.253


def codings_of(report: StepReport) -> dict[str, int]:
    """How often each bucket was encoded or decoded, if each as often."""
    counts = Counter((event.kind, event.bucket) for event in report.events if event.lane == "coding")
    return {kind: count for (kind, _), count in counts.items()}


@in_ranks(2)
@pytest.mark.parametrize(
    ("strategy", "wire", "codings"),
    some(
        [
            # The gradients; the part of this rank added up, its mean, all means.
            ("ddp", "int8", {"encode": 2, "decode": 2}),
            ("ddp", "bfloat16", {"encode": 2, "decode": 2}),
            ("zero1", "int8", {"encode": 1, "decode": 1}),
            ("ddp", None, {}),
            ("zero1", None, {}),
        ],
        most=1,
    ),
)
def test_a_report_tells_when_gradients_were_encoded_and_decoded(strategy: str, wire: str | None, codings: dict[str, int]) -> None:
    with training(odd_model(), strategy, "SGD", wire=wire, bucket_cap_mb=25.0, order="reverse") as (ddp, optimizer):
        train_steps(ddp, optimizer, *range(4))
        report = ddp.report()
    assert codings_of(report) == codings
    (bucket,) = report.buckets
    assert (report.coding_ms > 0, bucket.coding_ms > 0, "of it encoding" in str(report)) == (wire is not None,) * 3
    assert ("undertow/coding_ms" in report.scalars(), " sent" in str(report)) == (wire is not None,) * 2
    coded = [event for event in report.events if event.lane == "coding"]
    assert all(bucket.launched_ms <= event.start_us / 1e3 <= event.stop_us / 1e3 <= bucket.done_ms for event in coded)
    assert report.coding_ms <= report.communication_ms


@pytest.mark.deep
@in_ranks(4)
def test_codings_of_both_axes_of_a_mesh_are_shown() -> None:
    with training(odd_model(), "hybrid", "SGD", wire="int8", bucket_cap_mb=25.0, order="reverse") as (ddp, optimizer):
        train_steps(ddp, optimizer, *range(4))
        assert codings_of(ddp.report()) == {"encode": 3, "decode": 3}


@in_ranks(2)
def test_traces_have_a_track_of_codings_if_there_is_a_format(tmp_path: Path) -> None:
    tracks = {}
    for wire in (None, "int8"):
        with training(odd_model(), "ddp", "SGD", wire=wire) as (ddp, optimizer):
            train_steps(ddp, optimizer, 0, 1)
            path = ddp.save_trace(tmp_path / f"{wire}.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        tracks[wire] = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert {"encode b0", "decode b0"} <= {event["name"] for event in events} or wire is None
    assert tracks["int8"] - tracks[None] >= {"coding"}
    assert {"steps", "gradients"} <= tracks[None]
