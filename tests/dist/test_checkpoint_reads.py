"""What a rank reads of a checkpoint: the files that it needs, and no byte that another rank reads for it."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as brief
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support.alike import of_all_ranks
from support.errors import text_of
from support.inside import messages_of_a_load_have
from support.levels import some
from support.ranks import in_ranks
from support.tensor_parallel import mesh_of_four
from undertow import (
    CheckpointError,
    DistributedDataParallel,
    Outer,
    ShardedOptimizer,
    SyncConfig,
    load_checkpoint,
    save_checkpoint,
)
from undertow.checkpoint import files
from undertow.checkpoint.loading import Loading

MB = 1 << 20
# The system maps up to 2 MiB around a byte that is read: of the headers of two files, and of both ends of a share.
_AROUND = 4 * 2 * MB


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saved"


def bytes_in_memory(folder: Path) -> Counter[str]:
    """The bytes of the folder's files that this process has read, as far as they are mapped."""
    found: Counter[str] = Counter()
    name = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        place = re.fullmatch(r"[0-9a-f]+-[0-9a-f]+ .*?(/.*)?", line)
        if place is not None:
            name = Path(place[1]).name if place[1] is not None and Path(place[1]).parent == folder else ""
        elif name and line.startswith("Rss:"):
            found[name] += 1024 * int(line.split()[1])
    return found


class Reads:
    """What this rank has opened, and read until all values are in place."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.bytes: Counter[str] = Counter()


@contextmanager
def reads(folder: Path) -> Iterator[Reads]:
    found = Reads()
    open_tensors, put = files.open_tensors, Loading.put

    def opens(path: Path) -> Any:
        found.opened.append(path.name)
        return open_tensors(path)

    def puts(self: Loading) -> None:
        put(self)
        found.bytes = bytes_in_memory(folder)

    with mock.patch.object(files, "open_tensors", opens), mock.patch.object(Loading, "put", puts):
        yield found


def made(seed: int, *, width: int = 2048, strategy: str = "ddp", **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 3))
    model = DistributedDataParallel(layers, config=SyncConfig(strategy=strategy, **settings))
    if strategy == "ddp":
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, ShardedOptimizer(torch.optim.AdamW, model, lr=0.01)


def trained(seed: int, **settings: Any) -> tuple[Any, Any]:
    model, optimizer = made(seed, **settings)
    model(torch.ones(2, model.module[0].in_features)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [*model.state_dict().values(), *(state[number][key] for number in sorted(state) for key in sorted(state[number]))]


def loads_what_was_saved(path: Path, reader: dict[str, Any], **writer: Any) -> Reads:
    model, optimizer = trained(1, **writer)
    save_checkpoint(path, model, optimizer)
    wanted = [value.clone() for value in values(model, optimizer)]
    model.close()
    model, optimizer = made(2, **reader)
    with reads(path) as found:
        load_checkpoint(path, model, optimizer)
    assert all(map(torch.equal, values(model, optimizer), wanted))
    model.close()
    return found


@pytest.mark.deep
@in_ranks(2, 3)
@pytest.mark.parametrize("strategy", some(["ddp", "zero1"], most=1))
def test_what_all_ranks_need_is_read_once(strategy: str, path: Path) -> None:
    found = loads_what_was_saved(path, {}, strategy=strategy)  # a plain optimizer, whatever has written
    sizes = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    assert sum(sizes.values()) > 48 * MB
    # It reads through the files from one place to another; else a rank would read all of them.
    assert sum(found.bytes.values()) < sum(sizes.values()) / dist.get_world_size() + _AROUND
    assert len(found.opened) == len({*found.opened}) == len(sizes)


@in_ranks(2)
def test_a_rank_opens_the_files_of_its_shards_and_reads_its_part(path: Path) -> None:
    found = loads_what_was_saved(path, {"strategy": "zero1"}, strategy="zero1")
    of_model = (path / "model.safetensors").stat().st_size
    of_state = sum(file.stat().st_size for file in path.glob("optimizer-*"))
    assert found.bytes["model.safetensors"] < of_model / 2 + _AROUND
    assert sum(found.bytes.values()) < (of_model + of_state) / 2 + 2 * _AROUND
    assert len(found.opened) == len({*found.opened})
    assert {"model.safetensors", f"optimizer-{dist.get_rank()}.safetensors"} <= {*found.opened}


@pytest.mark.deep
@in_ranks(2)
def test_with_replicas_a_rank_reads_its_own_and_half_of_what_is_global(path: Path) -> None:
    replicas = {"outer": Outer(every=1, fragments=1, delay=0)}
    found = loads_what_was_saved(path, replicas, **replicas)
    assert found.bytes["model.safetensors"] < _AROUND
    assert 0 < found.bytes["outer.safetensors"] < (path / "outer.safetensors").stat().st_size / 2 + _AROUND
    other = 1 - dist.get_rank()
    assert {f"replica-{other}.safetensors", f"optimizer-{other}.safetensors"} & {*found.opened} == set()
    assert of_all_ranks("model.safetensors" in found.opened) == [True, False]


@pytest.mark.deep
@in_ranks(2)
def test_shares_travel_in_many_messages_that_end_within_elements(path: Path) -> None:
    with messages_of_a_load_have(2 * 37):
        loads_what_was_saved(path, {"width": 7}, strategy="zero1", width=7)


@in_ranks(2)
def test_ranks_that_load_different_things_read_for_themselves(path: Path) -> None:
    model, optimizer = trained(1, width=8)
    save_checkpoint(path, model, optimizer)
    wanted = [value.clone() for value in values(model, optimizer)]
    model.close()
    model, optimizer = made(2, width=8)
    load_checkpoint(path, model, None if dist.get_rank() else optimizer)
    found = [*model.state_dict().values()] if dist.get_rank() else values(model, optimizer)
    assert all(map(torch.equal, found, wanted))
    model.close()


@in_ranks(2)
def test_ranks_that_find_different_saves_load_nothing(path: Path) -> None:
    """Such as an older one on a disk of one node: parts of it fit beside parts of the newer one."""
    model, optimizer = trained(1, width=8)
    save_checkpoint(path, model, optimizer)
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    before = [value.clone() for value in values(model, optimizer)]
    read_index = files.read_index

    def of_another(folder: Path) -> dict[str, Any]:
        return {**read_index(folder), "save": "0a", "saved_ns": 1}

    with mock.patch.object(files, "read_index", of_another if dist.get_rank() else read_index):
        text = text_of(CheckpointError, lambda: load_checkpoint(path, model, optimizer))
    assert text == (
        "ranks have found different saves under the same path.\n"
        f"  {path}\n"
        "  rank 1: save '0a'\n"
        f"  rank 0: save {brief(read_index(path)['save'])}, the newest\n"
        "  Every rank must see the same files. Save to a disk that all nodes share, or copy the newest save to every node."
    )
    assert all(map(torch.equal, values(model, optimizer), before))
    load_checkpoint(path, model, optimizer)
    assert not all(map(torch.equal, values(model, optimizer), before))
    model.close()


def made_on(mesh: DeviceMesh, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 3))
    parallelize_module(layers, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = DistributedDataParallel(layers, device_mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def values_of_place(model: Any, optimizer: Any) -> list[torch.Tensor]:
    states = (optimizer.state[param][key] for param in model.parameters() for key in ("exp_avg", "exp_avg_sq"))
    return [value.to_local().detach().clone() for value in (*model.parameters(), *states)]


@pytest.mark.deep
@in_ranks(4, pool="mesh", timeout_s=240.0)
def test_on_a_mesh_the_files_of_a_place_are_read_once_by_its_ranks(path: Path) -> None:
    with mesh_of_four() as mesh:
        model, optimizer = made_on(mesh, 1)
        model(torch.ones(2, 2048)).square().mean().backward()
        optimizer.step()
        save_checkpoint(path, model, optimizer)
        wanted = values_of_place(model, optimizer)
        model.close()
        model, optimizer = made_on(mesh, 2)
        folder = path / f"place-{mesh['tp'].get_local_rank()}"
        with reads(folder) as found:
            load_checkpoint(path, model, optimizer)
        assert all(map(torch.equal, values_of_place(model, optimizer), wanted))
        sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
        assert sum(sizes.values()) > 24 * MB
        assert 0 < sum(found.bytes.values()) < sum(sizes.values()) / 2 + _AROUND
        assert len(found.opened) == len({*found.opened}) == len(sizes)
        model.close()
