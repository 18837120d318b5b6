"""Checkpoints: saved by some ranks and loaded by others, interrupted, cut short, and of another model."""

import ast
import contextlib
import errno
import itertools
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from support.alike import of_all_ranks
from support.checkpoints import (
    Setup,
    copied,
    from_bytes,
    require_equal,
    state_after,
    taken_from,
    to_bytes,
    train,
    trained_by,
    whole_state,
)
from support.errors import text_of
from support.inside import elements_read, gathers_of_checkpoints
from support.levels import some
from support.models import CASES
from support.pages import Snippet, execute, snippets, titles
from support.project import ROOT
from support.ranks import Ranks, RanksFailed, in_ranks
from support.sharded import training
from undertow import CheckpointError, DistributedDataParallel, attach, has_checkpoint, load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def pools(two_ranks: Ranks, three_ranks: Ranks, four_ranks: Ranks) -> Iterator[dict[int, Ranks]]:
    with Ranks(1) as one_rank:
        yield {1: one_rank, 2: two_ranks, 3: three_ranks, 4: four_ranks}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test saves to, the same on every rank."""
    return tmp_path / "saved"


def begins(setup: Setup, path: Path) -> bytes:
    with trained_by(setup, num_steps=2) as (model, optimizer):
        save_checkpoint(path, model, optimizer, extra={"step": 2})
        return to_bytes(whole_state(model, optimizer))


def goes_on(setup: Setup, path: Path, then: Path, before: bytes) -> bytes:
    """Loads, trains on beside torch's optimizer that had `before`, where that has the same bits, and saves again."""
    known = from_bytes(before)
    with trained_by(setup, seed=8) as (model, optimizer):
        extra = load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer), known)
        steps = range(extra["step"], extra["step"] + 2)
        train(setup, model, optimizer, steps=steps)
        save_checkpoint(then, model, optimizer, extra={"step": steps.stop})
        after = whole_state(model, optimizer)
    if not setup.mesh and setup.case not in ("brain", "oddities"):
        require_equal(copied(after), taken_from(replace(setup, strategy="ddp"), known, steps=steps))
    return to_bytes(after)


Stage = tuple[int, str, tuple[int, ...]]  # ranks, strategy, shape of their mesh
CHAINS: dict[str, list[Stage]] = {
    "2 to 3 to 2 to 1 to 3": [(2, "zero1", ()), (3, "zero2", ()), (2, "zero1", ()), (1, "zero1", ()), (3, "zero1", ())],
    "ddp to zero1 to ddp to zero2": [(2, "ddp", ()), (3, "zero1", ()), (2, "ddp", ()), (2, "zero2", ())],
}
SQUARE: Stage = (4, "hybrid", (2, 2))


def run_chain(pools: dict[int, Ranks], folder: Path, setup: Setup, stages: list[Stage]) -> None:
    state = b""
    for place, (num_ranks, strategy, mesh) in enumerate(stages):
        given = replace(setup, strategy=strategy, mesh=mesh, bucket_cap_mb=[3e-4, None, 1e-6][place % 3])
        before, after = folder / str(place - 1), folder / str(place)
        work = (begins, given, after) if place == 0 else (goes_on, given, before, after, state)
        state, *_ = pools[num_ranks].run(*work)


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("case", ["mlp", "convolutions", "tied transformer"])
def test_training_goes_on_with_the_same_bits(
    pools: dict[int, Ranks], tmp_path: Path, case: str, optimizer: str, chain: str
) -> None:
    run_chain(pools, tmp_path, Setup(case, optimizer=optimizer), CHAINS[chain])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "stages"),
    [
        (Setup("oddities", optimizer="NAdam"), [(4, "zero1", ()), (2, "zero1", ()), (3, "zero1", ())]),
        *(
            (setup, [SQUARE, (2, "zero1", ()), SQUARE, (4, "hybrid", (4, 1)), (2, "hybrid", (1, 2)), SQUARE])
            for setup in (Setup(), Setup("brain"))
        ),
    ],
    ids=["oddities of four ranks", "mlp by meshes", "brain by meshes"],
)
def test_so_it_does_from_more_ranks_and_over_meshes(
    pools: dict[int, Ranks], tmp_path: Path, setup: Setup, stages: list[Stage]
) -> None:
    run_chain(pools, tmp_path, setup, stages)


SETUPS = {
    "brain": Setup("brain"),
    "oddities": Setup("oddities"),
    "amsgrad": Setup(optimizer="Adam"),
}
ON_A_MESH = Setup(strategy="hybrid", mesh=(2, 2))


@in_ranks(2, 3)
@pytest.mark.parametrize("name", some(SETUPS, most=1))
def test_it_is_as_if_there_had_been_no_break(path: Path, name: str) -> None:
    goes_on_like_one_run(SETUPS[name], path)


@pytest.mark.deep
@in_ranks(4)
def test_so_it_is_on_a_mesh(path: Path) -> None:
    goes_on_like_one_run(ON_A_MESH, path)


def goes_on_like_one_run(setup: Setup, path: Path) -> None:
    with trained_by(setup, num_steps=2) as (model, optimizer):
        save_checkpoint(path, model, optimizer)
        train(setup, model, optimizer, steps=range(2, 4))
        wanted = whole_state(model, optimizer)
    with trained_by(setup, num_steps=1, seed=8) as (model, optimizer):  # what is loaded takes the place of a state that is there
        load_checkpoint(path, model, optimizer)
        train(setup, model, optimizer, steps=range(2, 4))
        require_equal(whole_state(model, optimizer), wanted)


@pytest.mark.deep
@in_ranks(4)
def test_one_replica_of_a_mesh_stores_each_shard(path: Path) -> None:
    with trained_by(ON_A_MESH, num_steps=2) as (model, optimizer):
        save_checkpoint(path, model, optimizer)
    stored = [load_file(file) for file in sorted(path.glob("optimizer-*"))]
    elements = Counter[str]()
    for name, tensor in chain.from_iterable(of_file.items() for of_file in stored):
        elements[name.partition("[")[0]] += tensor.numel()
    assert len(stored) == 4
    for name, param in model.module.named_parameters():
        assert [elements[f"{name}/{key}"] for key in ("exp_avg", "exp_avg_sq", "step")] == [*[param.numel()] * 2, 1]


def loads(setup: Setup, path: Path, state: bytes) -> None:
    with trained_by(setup, seed=8) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer), from_bytes(state))


@pytest.mark.parametrize("num_ranks", some([1, 2, 3, 4], most=1))
def test_any_number_of_ranks_loads_the_same_bits(pools: dict[int, Ranks], path: Path, num_ranks: int) -> None:
    setup = Setup("brain", bucket_cap_mb=1e-4)
    state, *_ = pools[num_ranks].run(begins, setup, path)
    for pool in pools.values():
        pool.run(loads, replace(setup, bucket_cap_mb=3e-4), path, state)


@in_ranks(3)
@pytest.mark.parametrize(("strategy", "num_files"), [("zero1", 3), ("ddp", 1)])
def test_the_model_is_one_file_and_each_rank_that_has_a_part_of_the_state_writes_one(
    path: Path, strategy: str, num_files: int
) -> None:
    begins(Setup(strategy=strategy), path)
    bare = CASES["mlp"].make()
    bare.load_state_dict(load_file(path / "model.safetensors"))
    with trained_by(Setup(strategy=strategy), seed=8) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        require_equal(dict(model.module.state_dict()), dict(bare.state_dict()))
    assert {file.name for file in path.iterdir()} == {
        "undertow.json",
        "model.safetensors",
        *(f"optimizer-{number}.safetensors" for number in range(num_files)),
    }


@in_ranks(2)
def test_ranks_gather_few_bytes_for_a_save(path: Path) -> None:
    """A digest of their settings, and no names that one rank alone needs: with N ranks, each would read those of all N."""
    setup = Setup(strategy="ddp")
    with trained_by(setup) as (model, _):
        optimizer = torch.optim.AdamW([{"params": [param]} for param in model.parameters()])
        train(setup, model, optimizer, steps=range(1))
        with gathers_of_checkpoints() as sizes:
            save_checkpoint(path, model, optimizer)
        assert 0 < max(sizes) <= 300, sizes


@in_ranks(2)
def test_a_rank_reads_only_its_part_of_a_sharded_state(path: Path) -> None:
    begins(Setup(), path)
    with trained_by(Setup(), seed=8) as (model, optimizer), elements_read() as read:
        load_checkpoint(path, model, optimizer)
    num_elements = sum(param.numel() for param in model.parameters())
    of_both = of_all_ranks(read["exp_avg"])
    assert sum(of_both) == num_elements
    assert max(of_both) <= num_elements // 2 + 1


@in_ranks(2)
def test_a_sharded_state_is_the_same_in_another_memory_format(path: Path) -> None:
    with trained_by(Setup("convolutions"), num_steps=2) as (model, optimizer):
        save_checkpoint(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    with training(CASES["convolutions"].make().to(memory_format=torch.contiguous_format)) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer)["optimizer"], wanted["optimizer"])


@in_ranks(2, 3)
def test_parameters_of_16_bits_come_from_and_go_to_a_plain_optimizer(path: Path) -> None:
    setup, plain = Setup("brain"), Setup("brain", "ddp")
    with trained_by(plain, num_steps=2) as (model, optimizer):
        save_checkpoint(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    with trained_by(setup, seed=8) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        after = whole_state(model, optimizer)
        require_equal(after["model"], wanted["model"])
        for number, state in after["optimizer"]["state"].items():
            assert torch.equal(state["master"], list(model.parameters())[number].float())
            assert torch.equal(state["exp_avg"], wanted["optimizer"]["state"][number]["exp_avg"].float())
        train(setup, model, optimizer, steps=range(2, 3))
        save_checkpoint(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    with trained_by(plain, seed=9) as (model, optimizer):
        with told_on_the_first_rank("'exp_avg' of .* from torch.float32 to torch.bfloat16"):
            load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer)["model"], wanted["model"])
        train(plain, model, optimizer, steps=range(3, 4))
        assert {key for state in optimizer.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


def told_on_the_first_rank(text: str) -> contextlib.AbstractContextManager[object]:
    return pytest.warns(UserWarning, match=text) if dist.get_rank() == 0 else contextlib.nullcontext()


@in_ranks(2)
def test_a_sharded_optimizer_goes_on_with_states_of_another_dtype(path: Path) -> None:
    narrow = nn.Linear(4, 4).bfloat16()
    with training(narrow, "ddp") as (model, optimizer):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        save_checkpoint(path, model, optimizer)
        wanted = [state["exp_avg"].float() for state in optimizer.state.values()]
    with training(nn.Linear(4, 4), "zero1") as (model, optimizer):
        with told_on_the_first_rank("'weight' from torch.bfloat16 to torch.float32"):
            load_checkpoint(path, model, optimizer)
        assert all(map(torch.equal, [state["exp_avg"] for state in optimizer.state_dict()["state"].values()], wanted))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def saves_and_is_killed(path: Path, at: str, number: int) -> None:
    """A first save, and one of later parameters in which rank 0 ends at the `number`th call of a function of `os`."""
    with trained_by(Setup(), num_steps=1) as (model, optimizer):
        save_checkpoint(path, model, optimizer, extra=1)
        train(Setup(), model, optimizer, steps=range(1, 2))
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setattr(os, at, killed_at(number, getattr(os, at)))
            with contextlib.suppress(CheckpointError):  # the other rank's, whose peer is gone
                save_checkpoint(path, model, optimizer, extra=2)


def killed_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count(1)
    return lambda *args, **kwargs: os._exit(3) if next(calls) == number else function(*args, **kwargs)


def loads_one_of_both(path: Path, which: int) -> None:
    assert has_checkpoint(path)
    with trained_by(Setup(), seed=8) as (model, optimizer):
        assert load_checkpoint(path, model, optimizer) == which
        found = copied(whole_state(model, optimizer))
        save_checkpoint(path, model, optimizer, extra=3)
        assert load_checkpoint(path, model, optimizer) == 3
    require_equal(found, state_after(Setup(), which))


KILLED = {
    "when nothing is written": ("mkdir", 1, 1),
    "before the model is on the disk": ("fsync", 1, 1),
    "before the index has its name": ("rename", 1, 1),
    "before the one before is removed": ("unlink", 1, 1),
    "when all but a folder is removed": ("rmdir", 1, 2),
    "before the new one has its name": ("rename", 2, 2),
}


@pytest.mark.deep
@pytest.mark.parametrize(("at", "number", "which"), KILLED.values(), ids=KILLED)
def test_a_save_that_is_killed_leaves_a_whole_checkpoint(
    fresh_pair: Ranks, two_ranks: Ranks, path: Path, at: str, number: int, which: int
) -> None:
    assert "exit code 3" in text_of(RanksFailed, lambda: fresh_pair.run(saves_and_is_killed, path, at, number, timeout_s=30.0))
    two_ranks.run(loads_one_of_both, path, which)
    assert [it.name for it in path.parent.iterdir()] == ["saved"]


# Rank 0 also renames.
@in_ranks(2)
@pytest.mark.parametrize(("at", "on_rank"), some([("fsync", 0), ("fsync", 1), ("rename", 0)], most=1))
def test_a_save_that_fails_on_a_rank_fails_on_all_and_leaves_the_one_before(path: Path, at: str, on_rank: int) -> None:
    with trained_by(Setup(), num_steps=1) as (model, optimizer):
        save_checkpoint(path, model, optimizer, extra="whole")
        full_disk = mock.patch.object(os, at, side_effect=OSError(errno.ENOSPC, "No space left on device"))
        with full_disk if dist.get_rank() == on_rank else contextlib.nullcontext():
            text = same_text(lambda: save_checkpoint(path, model, optimizer))
        assert text.startswith(
            f"it was not possible to save a checkpoint in {path}.\n  OSError: [Errno 28] No space left on device"
        )
        assert (text.splitlines()[-1], load_checkpoint(path, model, optimizer)) == (
            "  An earlier checkpoint is still there.",
            "whole",
        )
        save_checkpoint(path, model, optimizer, extra="again")
        assert load_checkpoint(path, model, optimizer) == "again"


def same_text(call: Callable[[], object]) -> str:
    text = text_of(CheckpointError, call)
    assert of_all_ranks(text) == [text] * dist.get_world_size()
    return text


def text_of_loading(path: Path, setup: Setup, *, only_model: bool = False) -> str:
    with trained_by(setup, seed=8) as (model, optimizer):
        before = copied(whole_state(model, optimizer))
        text = same_text(lambda: load_checkpoint(path, model, None if only_model else optimizer))
        require_equal(whole_state(model, optimizer), before)
    return text


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "the model cut": ("model.safetensors", cut, r"model.safetensors cannot be read \(SafetensorError: .*"),
    "the model missing": ("model.safetensors", Path.unlink, "model.safetensors is missing"),
    "a state cut": ("optimizer-1.safetensors", cut, r"optimizer-1.safetensors cannot be read \(SafetensorError: .*"),
    "the index cut": ("undertow.json", cut, "undertow.json is not Undertow's, or is cut short"),
    "the index missing": ("undertow.json", Path.unlink, "undertow.json is missing"),
    "the index of the future": (
        "undertow.json",
        lambda path: path.write_text('{"format": 5}'),
        "undertow.json is of format 5, and this version reads format 4",
    ),
}


@in_ranks(2)
@pytest.mark.parametrize("what", some(DAMAGES, most=2))
def test_a_damaged_checkpoint_is_refused_on_every_rank_by_the_name_of_the_file(path: Path, what: str) -> None:
    name, damage, expected = DAMAGES[what]
    begins_and_is_damaged(path / name, damage)
    what, where, remedy = text_of_loading(path, Setup()).splitlines()
    assert re.fullmatch(rf"the checkpoint cannot be loaded: {expected}\.", what), what
    assert (where, remedy.startswith("  Load another checkpoint")) == (f"  {path / name}", True)


def begins_and_is_damaged(path: Path, damage: Callable[[Path], object]) -> None:
    begins(Setup(), path.parent)
    dist.barrier()
    if dist.get_rank() == 0:
        damage(path)
    dist.barrier()


@in_ranks(2)
@pytest.mark.parametrize(
    ("given", "only_model", "expected"),
    some(
        [
            (Setup("convolutions"), False, "the checkpoint has no '0.0.weight', which the model has."),
            (Setup(optimizer="SGD"), False, "the checkpoint holds the state of AdamW, and the optimizer is SGD."),
            (Setup("oddities"), True, "the checkpoint has no 'empty', which the model has."),
        ],
        most=1,
    ),
    ids=["another model", "another optimizer", "the model alone"],
)
def test_a_checkpoint_of_something_else_is_refused(path: Path, given: Setup, only_model: bool, expected: str) -> None:
    begins(Setup(), path)
    assert text_of_loading(path, given, only_model=only_model).splitlines()[0] == expected


class Counting(nn.Linear):
    num_calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


@in_ranks(2)
def test_ranks_exchange_no_pickles_while_they_load(path: Path) -> None:
    with contextlib.closing(DistributedDataParallel(nn.Linear(2, 2))) as model:
        save_checkpoint(path, model)
        with mock.patch.object(dist.distributed_c10d, "_tensor_to_object", side_effect=AssertionError("unpickled")):
            load_checkpoint(path, model)


@pytest.mark.deep
@in_ranks(2)
def test_names_are_the_modules_however_it_is_wrapped_and_extra_states_are_the_first_ranks(path: Path) -> None:
    model = nn.Sequential(Counting(2, 2))
    model[0].num_calls = 5 + dist.get_rank()
    compiled = torch.compile(model, backend="eager")
    save_checkpoint(path, compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    other = nn.Sequential(Counting(2, 2))
    with contextlib.closing(DistributedDataParallel(other)) as ddp:
        load_checkpoint(path, ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    require_equal(dict(other.state_dict()), dict(model.state_dict()) | {"0._extra_state": {"num_calls": 5}})


# Ranks 0 and 1 have one model, ranks 2 and 3 another one of the same names.
@pytest.mark.deep
@in_ranks(4, is_fresh=True)
@pytest.mark.parametrize("wrap", some([attach, DistributedDataParallel], most=1))
def test_a_bare_model_is_saved_by_the_ranks_that_synchronize_it(path: Path, wrap: Any) -> None:
    groups = [dist.new_group(half) for half in ([0, 1], [2, 3])]
    mine = dist.get_rank() // 2
    model, half = nn.Linear(2, 2), path.with_name(f"half {mine}")
    nn.init.constant_(model.weight, 1.0 + mine)
    with contextlib.closing(wrap(model, process_group=groups[mine])) as sync:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        called = model if wrap is attach else sync
        called(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        save_checkpoint(half, model, optimizer, extra=mine)
        dist.barrier()
        nn.init.zeros_(model.weight)
        assert load_checkpoint(half, model, optimizer) == mine
        assert torch.equal(model.weight, torch.full((2, 2), 1.0 + mine))
    dist.destroy_process_group(groups[mine])


# One process without torch.distributed may save and load as well.
def test_one_process_saves_and_loads_without_ranks(path: Path) -> None:
    where = f"  {path}"
    layers, rebuild = (nn.Linear(2, 3), nn.Linear(3, 1)), "  Build the model as it was when the checkpoint was saved."
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer, extra={"a": [1, 2.5, None]})
    assert (load_checkpoint(path, model, optimizer), load_checkpoint(path, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))) == (
        {"a": [1, 2.5, None]},
        {"a": [1, 2.5, None]},
    )

    def by_sgd(*params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(each)} for each in params], lr=0.1)

    refused: list[tuple[Callable[[], object], str]] = [
        (
            lambda: load_checkpoint(path, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))),
            f"the checkpoint has '1.weight' of torch.float32 and shape (1, 3), "
            f"and the model's is of torch.float32 and shape (2, 3).\n{where}\n{rebuild}",
        ),
        (
            lambda: load_checkpoint(path, nn.Sequential(nn.Linear(2, 3))),
            f"the checkpoint has '1.bias', which the model does not have.\n{where}\n{rebuild}",
        ),
        (
            lambda: load_checkpoint(path, model, by_sgd(*(layer.parameters() for layer in layers))),
            "the checkpoint's 1 parameter groups differ from the optimizer's 2.\n"
            "  their number, or the parameters of one of them\n"
            "  Make the optimizer with the same parameter groups as the saved one.",
        ),
        (
            lambda: load_checkpoint(path.with_name("nowhere"), model),
            f"no checkpoint was found.\n  {path.with_name('nowhere')}\n  Look for it in another place; every rank must see it. "
            "If the script may start without one, ask has_checkpoint(path) first.",
        ),
        (
            lambda: load_checkpoint(path, model, by_sgd(nn.Linear(1, 1).parameters())),
            "parameter 0 of the optimizer, of shape (1, 1), is not one of the model's.\n"
            "  the optimizer\n"
            "  Give the model and the optimizer that belong together.",
        ),
        (
            lambda: save_checkpoint(path, model, extra={1: 2}),
            "extra cannot be stored as JSON: {1: 2}.\n"
            "  save_checkpoint\n"
            "  Give numbers, strings, lists and dicts with strings as keys.",
        ),
        (
            lambda: save_checkpoint(path.parent, model),
            f"saved is not part of a checkpoint, and saving there would remove it.\n{where}\n"
            "  Save to a separate path, which does not exist or holds an earlier checkpoint.",
        ),
    ]
    for call, text in refused:
        assert text_of(CheckpointError, call) == text


def test_what_a_first_save_has_half_written_is_no_checkpoint(tmp_path: Path, path: Path) -> None:
    assert not has_checkpoint(path)
    (tmp_path / "saved.new").mkdir()
    for name in ("undertow.json.tmp", "save-0123456789abcdef-1.writing"):
        (tmp_path / "saved.new" / name).write_text("{")
    assert not has_checkpoint(path)
    save_checkpoint(path, nn.Linear(1, 1))
    assert [file.name for file in tmp_path.iterdir()] == ["saved"]
    shutil.rmtree(path)
    path.mkdir()  # damaged: loading it is an error, and not a new beginning
    assert has_checkpoint(path)


PAGE = ROOT / "docs" / "checkpoints.md"
SNIPPETS = [snippet for snippet in snippets(PAGE) if snippet.mark == "two ranks"]  # tests/frameworks has the others


@in_ranks(2)
@pytest.mark.parametrize("snippet", some(SNIPPETS, most=1), ids=lambda snippet: snippet.section)
def test_a_snippet_holds(tmp_path: Path, snippet: Snippet) -> None:
    with contextlib.chdir(tmp_path):
        execute(snippet)


def test_every_snippet_can_fail_and_every_section_is_in_the_contents() -> None:
    text = PAGE.read_text(encoding="utf-8")
    # None has slipped through.
    assert text.count("```") == 2 * len(SNIPPETS) == 2 * len(list(snippets(PAGE)))
    assert all(any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(snippet.code))) for snippet in SNIPPETS)
    assert re.findall(r"\]\(#([^)]*)\)", text) == [
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles(text)
    ]
