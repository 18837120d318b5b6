"""A rank that is killed on one axis of a mesh is named on all others, also at other places of the other axis."""

from functools import partial

import pytest

from support.levels import some
from support.processes import run_ranks, script

TRAINS = """
import os, signal, time, torch
from torch.distributed.fsdp import fully_shard
from support.tensor_parallel import gpt, mesh_of_four, tokens
import undertow

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

rank.meet()
try:
    with mesh_of_four() as mesh:
        if way == "outer axis":  # the first dimension is across replicas, the second has their shards
            model = fully_shard(gpt(), mesh=mesh)
            axis = undertow.outer_axis(model)
        else:
            settings = {"outer": undertow.Outer(every=1, fragments=1, delay=0)} if way == "outer" else {"strategy": way}
            config = undertow.SyncConfig(**settings)
            model = undertow.DistributedDataParallel(gpt(mesh), device_mesh=mesh["dp"], config=config)
        if way == "zero1":
            optimizer = undertow.ShardedOptimizer(torch.optim.SGD, model, lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            is_faulty = (rank.number, step) == (faulty, 3)
            loss = model(tokens(step, mesh["dp"].get_local_rank()))
            if is_faulty and place == "before backward":
                die()
            if is_faulty:
                model.module.blocks[0].mlp.up.weight.register_hook(die)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
finally:
    time.sleep(2.0)  # until it has been told to all: when this rank's connections break, it must not be for it
    rank.say(logged=rank.logged)
"""

FAULTS = [
    (3, "before backward", "ddp"),
    (2, "in backward", "zero1"),
    (1, "before backward", "outer"),
    (1, "before backward", "outer axis"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("faulty", "place", "way"), some(FAULTS, most=2))
def test_a_killed_rank_is_named_on_every_axis(faulty: int, place: str, way: str) -> None:
    ended = run_ranks(partial(script, TRAINS, faulty=faulty, place=place, way=way), 4, patience_s=120.0)
    assert ended[faulty].exit_code == -9
    for rank in {0, 1, 2, 3} - {faulty}:
        told = "\n".join([ended[rank].text, *ended[rank].words.get("logged", [])])
        assert f"rank {faulty} is gone: its process exited or was killed" in told, f"rank {rank}: {told}\n{ended[rank].log}"
