"""Devices, and the abilities of backends on them."""

from unittest import mock

import pytest
import torch

from support.errors import text_of
from undertow import ConfigError
from undertow.device import MAKERS, Accelerator, Host, device_of
from undertow.ranks.group import BACKENDS, Abilities, GroupRef, tell_of_unknown
from undertow.sync.handles import _checked

CPU, CUDA, XPU = map(torch.device, ("cpu", "cuda:1", "xpu"))


@pytest.mark.parametrize(("place", "kind"), [(CPU, Host), (CUDA, Accelerator), (XPU, Accelerator)])
def test_all_but_the_host_is_an_accelerator(place: torch.device, kind: type) -> None:
    device = device_of(place)
    assert isinstance(device, kind)
    assert (device.place, device.is_host) == (place, kind is Host)


def test_the_host_has_no_streams_and_keeps_nothing() -> None:
    host, value = device_of(CPU), torch.ones(2)
    with host.use(host.new_stream()):
        assert host.keep(value) is value
    assert host.to_device(value, torch.float32) is value
    assert host.to_device([1, 2], torch.float64).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("backend", "place", "expected"),
    [
        ("gloo", CPU, BACKENDS["gloo"]),
        ("nccl", CUDA, BACKENDS["nccl"]),
        ("cpu:gloo,cuda:nccl", CUDA, BACKENDS["nccl"]),
        ("cpu:gloo,cuda:nccl", CPU, BACKENDS["gloo"]),
        ("cpu:gloo,xpu:xccl", XPU, Abilities(order_streams=True)),
        ("nccl2", CUDA, BACKENDS["nccl"]),
        ("nccl-legacy", CUDA, BACKENDS["nccl"]),
        ("cuda:ncclx", CUDA, BACKENDS["nccl"]),
        ("cpu:gloo,cuda:nccl2", CUDA, BACKENDS["nccl"]),
        ("cuda:rcclx", CUDA, BACKENDS["nccl"]),
        ("NCCL", CUDA, BACKENDS["nccl"]),
        ("of a vendor", XPU, Abilities()),
        ("my-nccl", CUDA, Abilities()),
    ],
)
def test_a_backend_is_known_by_its_family_and_any_other_is_asked_for_sums_only(
    backend: str, place: torch.device, expected: Abilities
) -> None:
    assert GroupRef((0,), backend, None).abilities_for(place) == expected


def test_an_unknown_backend_is_told_once_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    tell_of_unknown.cache_clear()
    for backend in ("nccl2", "of another vendor", "of another vendor"):
        tell_of_unknown(backend)
    assert caplog.messages == [
        "the backend 'of another vendor' is unknown: Undertow uses only its sums, and the host waits for its messages. "
        "Known are gloo, emulated, nccl, rccl, xccl, and names that begin with them."
    ]


@pytest.mark.parametrize("backend", ["nccl", "nccl2", "ncclx", "rccl", "xccl", "cuda:nccl", "cuda:ncclx", "xpu:xccl,cuda:nccl"])
def test_a_model_on_the_host_is_refused_for_backends_of_gpus(backend: str) -> None:
    assert text_of(ConfigError, lambda: GroupRef((0,), backend, None).require_device(CPU)) == (
        f'the model is on the CPU, and the backend "{backend}" only transfers tensors of GPUs.\n'
        "  the group over which gradients are averaged\n"
        "  Move the model to this rank's GPU before you wrap it: model.cuda(local_rank). Without GPUs, call "
        'init_process_group("gloo").'
    )
    GroupRef((0,), backend, None).require_device(CUDA)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:ncclx", "emulated", "of a vendor"])
def test_a_model_on_the_host_is_taken_for_backends_of_the_host_and_unknown_ones(backend: str) -> None:
    GroupRef((0,), backend, None).require_device(CPU)


def test_a_number_on_a_device_is_read_if_ranks_exchange_it_on_the_host() -> None:
    """A copy to the host that nobody waits for may have any value."""
    number = torch.tensor(torch.nan)
    with mock.patch.dict(MAKERS, cpu=Accelerator):
        assert "number must be finite, got nan" in text_of(ConfigError, lambda: _checked(number, Host(CPU)))
