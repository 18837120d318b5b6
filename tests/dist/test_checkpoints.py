"""Checkpoints: saved by some ranks and loaded by others, interrupted, cut short, and of another model."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.checkpoints import Setup, from_bytes, require_equal, rewrite, to_bytes, train, trained_by, whole_state
from support.errors import text_of
from support.ranks import Ranks, RanksFailed, in_ranks
from undertow import CheckpointError, DistributedDataParallel, attach, has_checkpoint, load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def pools(one_rank: Ranks, two_ranks: Ranks, three_ranks: Ranks) -> dict[int, Ranks]:
    return {1: one_rank, 2: two_ranks, 3: three_ranks}


def begins(setup: Setup, path: Path) -> bytes:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer, extra={"step": 2})
        return to_bytes(whole_state(model, optimizer))


def goes_on(setup: Setup, path: Path, then: Path, before: bytes, compares: bool) -> bytes:
    """Loads, trains on beside torch's optimizer that had `before`, and saves again."""
    known = from_bytes(before)
    with trained_by(setup, seed=8) as (model, optimizer):
        extra = load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer), known)
        train(setup, model, optimizer, steps=range(extra["step"], extra["step"] + 2))
        save_checkpoint(then, model, optimizer, extra={"step": extra["step"] + 2})
        after = whole_state(model, optimizer)
    if compares:
        with trained_by(replace(setup, strategy="ddp"), seed=9) as (model, optimizer):
            model.load_state_dict(known["model"])
            optimizer.load_state_dict(known["optimizer"])
            train(setup, model, optimizer, steps=range(extra["step"], extra["step"] + 2))
            require_equal(after, whole_state(model, optimizer))
    return to_bytes(after)


CHAINS = {
    "2 to 3 to 2 to 1 to 3": [(2, "zero1"), (3, "zero2"), (2, "zero1"), (1, "zero1"), (3, "zero1")],
    "ddp to zero1 to ddp to zero2": [(2, "ddp"), (3, "zero1"), (2, "ddp"), (2, "zero2")],
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("case", ["mlp", "convolutions", "tied transformer"])
def test_training_goes_on_with_the_same_bits(
    pools: dict[int, Ranks], tmp_path: Path, case: str, optimizer: str, chain: list[tuple[int, str]]
) -> None:
    caps = [3e-4, None, 1e-6]
    for place, (num_ranks, strategy) in enumerate(chain):
        setup = Setup(case, strategy, optimizer, caps[place % 3])
        if place == 0:
            state, *_ = pools[num_ranks].run(begins, setup, tmp_path / "0")
        else:
            arguments = (setup, tmp_path / str(place - 1), tmp_path / str(place), state, True)
            state, *_ = pools[num_ranks].run(goes_on, *arguments)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    with Ranks(4) as ranks:
        yield ranks


def test_four_ranks_then_two_then_three(pools: dict[int, Ranks], four_ranks: Ranks, tmp_path: Path) -> None:
    setup = Setup("oddities", "zero1", "nadam")
    state, *_ = four_ranks.run(begins, setup, tmp_path / "0")
    for place, num_ranks in enumerate([2, 3], start=1):
        arguments = (replace(setup, bucket_cap_mb=None), tmp_path / str(place - 1), tmp_path / str(place), state, False)
        state, *_ = pools[num_ranks].run(goes_on, *arguments)


def goes_on_like_one_run(setup: Setup, path: Path) -> None:
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer)
        train(setup, model, optimizer, steps=range(2, 4))
        wanted = whole_state(model, optimizer)
    with trained_by(setup, seed=8) as (model, optimizer):
        train(setup, model, optimizer, steps=range(1))  # what is loaded takes the place of a state that is there
        load_checkpoint(path, model, optimizer)
        train(setup, model, optimizer, steps=range(2, 4))
        require_equal(whole_state(model, optimizer), wanted)


@pytest.mark.parametrize(
    "setup",
    [Setup("brain"), Setup("brain", "zero2", "sgd"), Setup("oddities"), Setup(optimizer="amsgrad"), Setup(optimizer="plain sgd")],
    ids=lambda setup: f"{setup.case} {setup.optimizer}",
)
def test_it_is_as_if_there_had_been_no_break(ranks: Ranks, tmp_path: Path, setup: Setup) -> None:
    ranks.run(goes_on_like_one_run, setup, tmp_path / "saved")


def masters_come_from_the_parameters(path: Path) -> None:
    with trained_by(Setup("brain", "ddp")) as (model, optimizer):
        train(Setup("brain"), model, optimizer, steps=range(2))
        save_checkpoint(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    with trained_by(Setup("brain"), seed=8) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        after = whole_state(model, optimizer)
        require_equal(after["model"], wanted["model"])
        for number, state in after["optimizer"]["state"].items():
            assert torch.equal(state["master"], list(model.parameters())[number].float())
            assert torch.equal(state["exp_avg"], wanted["optimizer"]["state"][number]["exp_avg"].float())
        train(Setup("brain"), model, optimizer, steps=range(2, 3))
        save_checkpoint(path, model, optimizer)
        wanted = whole_state(model, optimizer)
    with trained_by(Setup("brain", "ddp"), seed=9) as (model, optimizer):
        load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer)["model"], wanted["model"])
        train(Setup("brain"), model, optimizer, steps=range(3, 4))
        assert {key for state in optimizer.state.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_parameters_of_16_bits_come_from_and_go_to_a_plain_optimizer(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(masters_come_from_the_parameters, tmp_path / "saved")


def schedules_go_on(path: Path) -> None:
    def of(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)

    setup = Setup()
    with trained_by(setup) as (model, optimizer):
        scheduler = of(optimizer)
        for step in range(4):
            if step == 2:
                save_checkpoint(path, model, optimizer, extra={"scheduler": scheduler.state_dict()})
            train(setup, model, optimizer, steps=range(step, step + 1))
            scheduler.step()
        wanted = whole_state(model, optimizer)
    with trained_by(setup, seed=8) as (model, optimizer):
        scheduler = of(optimizer)
        scheduler.load_state_dict(load_checkpoint(path, model, optimizer)["scheduler"])
        for step in range(2, 4):
            train(setup, model, optimizer, steps=range(step, step + 1))
            scheduler.step()
        require_equal(whole_state(model, optimizer), wanted)


def test_a_schedule_of_learning_rates_goes_on(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(schedules_go_on, tmp_path / "saved")


@in_ranks(2, 3)
def test_wide_values_that_a_plain_optimizer_has_left_behind_are_not_taken_back() -> None:
    setup, plain = Setup("brain"), Setup("brain", "ddp")
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        saved = from_bytes(to_bytes(whole_state(model, optimizer)))
    with trained_by(plain, seed=8) as (model, optimizer):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(plain, model, optimizer, steps=range(2, 5))
        there = from_bytes(to_bytes(whole_state(model, optimizer)))
    with trained_by(setup, seed=9) as (model, optimizer):
        train(setup, model, optimizer, steps=range(1))
        model.wait()  # else what is on its way may arrive on top of what is loaded
        model.load_state_dict(there["model"])
        optimizer.load_state_dict(there["optimizer"])
        for number, state in optimizer.full_state_dict()["state"].items():
            assert torch.equal(state["master"], list(model.parameters())[number].float())


def states_have_the_keys_of_torchs(optimizer_name: str) -> None:
    keys = []
    for strategy in ("zero1", "ddp"):
        setup = Setup("oddities", strategy, optimizer_name)
        with trained_by(setup) as (model, optimizer):
            train(setup, model, optimizer, steps=range(1))
            states = whole_state(model, optimizer)["optimizer"]["state"]
            keys.append({number: shapes_of(state) for number, state in states.items()})
    assert keys[0] == keys[1]


def shapes_of(state: dict[str, Any]) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in state.items() if key != "master"}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "plain sgd", "nadam"])
def test_a_full_state_has_what_torchs_has_of_every_parameter(ranks: Ranks, optimizer: str) -> None:
    ranks.run(states_have_the_keys_of_torchs, optimizer)


@in_ranks(2, 3)
@pytest.mark.parametrize("case", ["mlp", "convolutions"])
@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_full_states_go_to_a_plain_optimizer_and_back(strategy: str, case: str) -> None:
    setup, plain = Setup(case, strategy), Setup(case, "ddp")
    with trained_by(setup) as (model, optimizer):
        train(setup, model, optimizer, steps=range(2))
        saved = from_bytes(to_bytes(whole_state(model, optimizer)))
        train(setup, model, optimizer, steps=range(2, 4))
        wanted = whole_state(model, optimizer)
    with trained_by(plain, seed=8) as (model, optimizer):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(plain, model, optimizer, steps=range(2, 3))
        there = from_bytes(to_bytes(whole_state(model, optimizer)))
    with trained_by(setup, seed=9) as (model, optimizer):
        model.load_state_dict(there["model"])
        optimizer.load_state_dict(there["optimizer"])
        require_equal(whole_state(model, optimizer)["optimizer"]["param_groups"], there["optimizer"]["param_groups"])
        train(setup, model, optimizer, steps=range(3, 4))
        require_equal(whole_state(model, optimizer), wanted)


def saves_and_is_killed(path: Path, at: str, number: int) -> None:
    """A first save, and one of later parameters in which rank 0 ends at the `number`th call of a function of `os`."""
    with trained_by(Setup()) as (model, optimizer):
        train(Setup(), model, optimizer, steps=range(1))
        save_checkpoint(path, model, optimizer, extra=1)
        train(Setup(), model, optimizer, steps=range(1, 2))
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setattr(os, at, killed_at(number, getattr(os, at)))
            with contextlib.suppress(CheckpointError):  # the other rank's, whose peer is gone
                save_checkpoint(path, model, optimizer, extra=2)


def killed_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count(1)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            os._exit(3)
        return function(*args, **kwargs)

    return wrapped


def loads_one_of_both(path: Path) -> int:
    assert has_checkpoint(path)
    with trained_by(Setup()) as (model, optimizer):
        train(Setup(), model, optimizer, steps=range(1))
        states = {1: whole_state(model, optimizer)}
        train(Setup(), model, optimizer, steps=range(1, 2))
        states[2] = whole_state(model, optimizer)
    with trained_by(Setup(), seed=8) as (model, optimizer):
        extra = load_checkpoint(path, model, optimizer)
        require_equal(whole_state(model, optimizer), states[extra])
        save_checkpoint(path, model, optimizer, extra=3)
        assert load_checkpoint(path, model, optimizer) == 3
    return extra


KILLED = {
    "when nothing is written": ("fsync", 1, 1),
    "before the tensors are on the disk": ("fsync", 2, 1),
    "before what describes them is": ("fsync", 3, 1),
    "before that has its name": ("rename", 1, 1),
    "before the one before is moved away": ("rename", 2, 1),
    "between both renames": ("rename", 3, 2),
    "before the one before is removed": ("unlink", 1, 2),
    "while the one before is removed": ("unlink", 2, 2),
    "when all but a folder is removed": ("rmdir", 1, 2),
}


@pytest.mark.parametrize(("at", "number", "extra"), KILLED.values(), ids=KILLED)
def test_a_save_that_is_killed_leaves_a_whole_checkpoint(
    fresh_pair: Ranks, two_ranks: Ranks, tmp_path: Path, at: str, number: int, extra: int
) -> None:
    with pytest.raises(RanksFailed, match="exit code 3"):
        fresh_pair.run(saves_and_is_killed, tmp_path / "saved", at, number, timeout_s=30.0)
    assert two_ranks.run(loads_one_of_both, tmp_path / "saved") == [extra] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def save_fails_on_a_rank(path: Path, at: str) -> list[str]:
    """A full disk, on rank 1; then on rank 0, which also renames."""
    texts = []
    with trained_by(Setup()) as (model, optimizer):
        train(Setup(), model, optimizer, steps=range(1))
        save_checkpoint(path, model, optimizer, extra="whole")
        for rank in (0, 1) if at == "fsync" else (0,):
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == rank:
                    patch.setattr(os, at, full_disk)
                texts.append(text_of(CheckpointError, lambda: save_checkpoint(path, model, optimizer)))
            assert load_checkpoint(path, model, optimizer) == "whole"
        save_checkpoint(path, model, optimizer, extra="again")
        assert load_checkpoint(path, model, optimizer) == "again"
    return texts


def full_disk(*_args: Any, **_kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", ["fsync", "rename"])
def test_a_save_that_fails_on_a_rank_fails_on_all_and_leaves_the_one_before(two_ranks: Ranks, tmp_path: Path, at: str) -> None:
    first, second = two_ranks.run(save_fails_on_a_rank, tmp_path / "saved", at)
    assert first == second
    for text in first:
        assert "No space left on device" in text
        assert text.splitlines()[-1] == "  A checkpoint that was there before is still there."


def texts_of_loading(path: Path, setup: Setup, only_model: bool) -> str:
    with trained_by(setup, seed=8) as (model, optimizer):
        before = from_bytes(to_bytes(whole_state(model, optimizer)))
        text = text_of(CheckpointError, lambda: load_checkpoint(path, model, None if only_model else optimizer))
        require_equal(whole_state(model, optimizer), before)
    return text


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def flip(path: Path) -> None:
    """Somewhere among the values of a tensor, past the headers of the archive in which torch saves it."""
    data = bytearray(path.read_bytes())
    for place in range(200, len(data), 3):
        data[place] ^= 0xFF
    path.write_bytes(bytes(data))


def of_another_program(path: Path) -> None:
    path.write_bytes(pickle.dumps({"model": os.getcwd}))


def of_another_checkpoint(path: Path) -> None:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = f"../other/{info.relative_path}"

    rewrite(path.parent, change)


def impossible(path: Path) -> None:
    def change(metadata: Any) -> None:
        found = metadata.state_dict_metadata["optimizer.state.0.weight.step"]  # which only one of two ranks may need
        found.size = torch.Size((2**40,))

    rewrite(path.parent, change)


DAMAGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "tensors cut": ("__1_0.distcp", cut, r"__1_0.distcp should have [\d,]+ bytes, and has [\d,]+"),
    "tensors missing": ("__1_0.distcp", Path.unlink, "__1_0.distcp is missing"),
    "tensors garbled": ("__0_0.distcp", flip, r"__0_0.distcp cannot be read \("),
    "metadata cut": (".metadata", cut, r".metadata is none that torch.distributed.checkpoint has written \("),
    "metadata missing": (".metadata", Path.unlink, ".metadata is missing"),
    "metadata of others": (".metadata", of_another_program, ".metadata is none that .*getcwd does not belong there"),
    "metadata of another folder": (".metadata", of_another_checkpoint, ".metadata is none that .*is not a file of this"),
    "metadata of impossible shapes": (".metadata", impossible, ".metadata is none that .*has a shape that cannot be"),
    "header cut": ("undertow.json", cut, "undertow.json is none of ours, or cut short"),
    "header missing": ("undertow.json", Path.unlink, "undertow.json is missing"),
    "header of others": ("undertow.json", lambda path: path.write_text("[1]"), "undertow.json is none of ours"),
    "header of the future": (
        "undertow.json",
        lambda path: path.write_text('{"format": 2, "optimizer": null, "extra": null}'),
        "undertow.json is of format 2, and this version reads format 1",
    ),
}


@pytest.mark.parametrize(("name", "damage", "expected"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_refused_on_every_rank_by_the_name_of_the_file(
    two_ranks: Ranks, tmp_path: Path, name: str, damage: Callable[[Path], None], expected: str
) -> None:
    path = tmp_path / "saved"
    two_ranks.run(begins, Setup(), path)
    damage(path / name)
    first, second = two_ranks.run(texts_of_loading, path, Setup(), False)
    assert first == second
    what, where, remedy = first.splitlines()
    assert re.fullmatch(rf"the checkpoint cannot be loaded: {expected}.*", what), what
    assert where == f"  {path / name}"
    assert remedy.startswith("  Load another checkpoint")


def without_elements(metadata: Any) -> None:
    name = "optimizer.state.0.weight.exp_avg"
    metadata.state_dict_metadata[name].size, metadata.state_dict_metadata[name].chunks = torch.Size((0,)), []
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        del metadata.storage_data[index]


def test_a_state_of_another_shape_than_its_parameter_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(begins, Setup(), tmp_path / "saved")
    rewrite(tmp_path / "saved", without_elements)
    first, second = two_ranks.run(texts_of_loading, tmp_path / "saved", Setup(), False)
    assert first == second
    assert re.match(r"the checkpoint has 'exp_avg' of shape \(0,\) in the state of '0.weight', and the parameter is of ", first)


OTHERS: dict[str, tuple[Setup, Setup, bool, str]] = {
    "model with less": (
        Setup(),
        Setup("convolutions"),
        False,
        "the checkpoint has no '0.0.weight', which the model has.",
    ),
    "optimizer of another kind": (
        Setup(),
        Setup(optimizer="sgd"),
        False,
        "the checkpoint holds the state of AdamW, and the optimizer is SGD.",
    ),
    "model of 16 bits is no other model": (
        Setup(),
        Setup("oddities"),
        True,
        "the checkpoint has no 'empty', which the model has.",
    ),
}


@pytest.mark.parametrize(("saved", "given", "only_model", "expected"), OTHERS.values(), ids=OTHERS)
def test_a_checkpoint_of_something_else_is_refused(
    two_ranks: Ranks, tmp_path: Path, saved: Setup, given: Setup, only_model: bool, expected: str
) -> None:
    two_ranks.run(begins, saved, tmp_path / "saved")
    first, second = two_ranks.run(texts_of_loading, tmp_path / "saved", given, only_model)
    assert first == second
    assert first.splitlines()[0] == expected


def wrong_models_alone(path: Path) -> dict[str, str]:
    """Without ranks: one process without torch.distributed may save and load as well."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(path, model, optimizer, extra={"a": [1, 2.5, None]})
    assert load_checkpoint(path, model, optimizer) == {"a": [1, 2.5, None]}
    assert load_checkpoint(path, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))) == {"a": [1, 2.5, None]}
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    texts = {
        "shape": lambda: load_checkpoint(path, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))),
        "unexpected": lambda: load_checkpoint(path, nn.Sequential(nn.Linear(2, 3))),
        "groups": lambda: load_checkpoint(path, model, torch.optim.SGD(groups, lr=0.1)),
        "nowhere": lambda: load_checkpoint(path.with_name("nowhere"), model),
        "stranger": lambda: load_checkpoint(path, model, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)),
        "extra": lambda: save_checkpoint(path, model, extra={1: 2}),
        "over something else": lambda: save_checkpoint(path.parent, model),
    }
    return {name: text_of(CheckpointError, call) for name, call in texts.items()}


class Counting(nn.Linear):
    """A module with a state that is no tensor."""

    num_calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]


def extra_states_and_wrappings(path: Path) -> None:
    model = nn.Sequential(Counting(2, 2))
    model[0].num_calls = 5 + dist.get_rank()
    compiled = torch.compile(model, backend="eager")
    save_checkpoint(path, compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    other = nn.Sequential(Counting(2, 2))
    with contextlib.closing(DistributedDataParallel(other)) as ddp:
        load_checkpoint(path, ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    assert other[0].num_calls == 5
    require_equal(dict(other.state_dict()), dict(model.state_dict()) | {"0._extra_state": {"num_calls": 5}})


def test_names_are_the_modules_however_it_is_wrapped_and_extra_states_are_the_first_ranks(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    two_ranks.run(extra_states_and_wrappings, tmp_path / "saved")


def each_half_saves_its_own(folder: Path, how: str) -> None:
    """Ranks 0 and 1 have one model, ranks 2 and 3 another one of the same names."""
    halves = [[0, 1], [2, 3]]
    groups = [dist.new_group(half) for half in halves]
    mine = dist.get_rank() // 2
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, 1.0 + mine)
    wrap = attach if how == "attach" else DistributedDataParallel
    with contextlib.closing(wrap(model, process_group=groups[mine])):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        save_checkpoint(folder / f"half {mine}", model, optimizer, extra=mine)
        dist.barrier()
        nn.init.zeros_(model.weight)
        assert load_checkpoint(folder / f"half {mine}", model, optimizer) == mine
        require_equal({"weight": model.weight}, {"weight": torch.full((2, 2), 1.0 + mine)})
    dist.destroy_process_group(groups[mine])


@pytest.mark.parametrize("how", ["attach", "a wrapper's module"])
def test_a_bare_model_is_saved_by_the_ranks_that_synchronise_it(fresh_four: Ranks, tmp_path: Path, how: str) -> None:
    fresh_four.run(each_half_saves_its_own, tmp_path, how)


def test_one_process_saves_and_loads_without_ranks(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    texts = wrong_models_alone(path)
    rebuild = "  Build the model as it was when the checkpoint was saved."
    assert texts == {
        "shape": f"the checkpoint has '1.weight' of shape (1, 3), and the model's is of shape (2, 3).\n  {path}\n{rebuild}",
        "unexpected": f"the checkpoint has '1.weight', which the model has not.\n  {path}\n{rebuild}",
        "groups": "the checkpoint has 1 parameter groups that are not the optimizer's 2.\n"
        "  group 0\n"
        "  Make the optimizer with the parameter groups that it was saved with.",
        "nowhere": f"there is no checkpoint.\n  {tmp_path / 'nowhere'}\n  Look for it in another place; every rank must see it.",
        "stranger": "parameter 0 of a group of the optimizer, of shape (1, 1), is none of the model's.\n"
        "  the optimizer\n"
        "  Give the model and the optimizer that belong together.",
        "extra": "extra does not survive being written as JSON: {1: 2}.\n"
        "  save_checkpoint(extra=...)\n"
        "  Give numbers, strings, lists and dicts with strings as keys.",
        "over something else": "saved is no part of a checkpoint, and saving there would remove it.\n"
        f"  {path}\n"
        "  Save to a path of its own, which does not exist or holds an earlier checkpoint.",
    }


def test_what_a_first_save_has_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    assert not has_checkpoint(path)
    (tmp_path / "saved.new").mkdir()
    (tmp_path / "saved.new" / "undertow.json").write_text("{")
    assert not has_checkpoint(path)
    path.mkdir()  # damaged: loading it is an error, and not a new beginning
    assert has_checkpoint(path)
