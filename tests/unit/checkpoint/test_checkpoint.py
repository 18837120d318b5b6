"""Checkpoints of one process: what their files hold, and files that somebody has changed."""

import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import nn

from support.checkpoints import require_equal
from support.errors import text_of
from support.mutations import mutate_checkpoint
from undertow import CheckpointError, has_checkpoint, load_checkpoint, save_checkpoint

MODEL, STATE, INDEX = "model.safetensors", "optimizer-0.safetensors", "undertow.json"


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "saved"
    save_checkpoint(path, *made(seed=1), extra={"step": 2})
    return path


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "saved"))


def refusal(path: Path) -> str:
    """The error's text; the model and the optimizer are as they were."""
    model, optimizer = made(seed=2)
    before = [param.detach().clone() for param in model.parameters()]
    text = text_of(CheckpointError, lambda: load_checkpoint(path, model, optimizer))
    assert (all(map(torch.equal, before, model.parameters())), optimizer.param_groups[0]["lr"]) == (True, 0.1)
    return text


def test_any_tool_opens_the_files(saved: Path) -> None:
    model, optimizer = made(seed=1)
    state = load_file(saved / STATE)
    shown = json.loads((saved / INDEX).read_text())
    assert sorted(file.name for file in saved.iterdir()) == [MODEL, STATE, INDEX]
    require_equal(load_file(saved / MODEL), dict(model.state_dict()))
    assert {name for name in state if name.startswith("0.weight")} == {
        "0.weight/step",
        "0.weight/exp_avg[0:6]",
        "0.weight/exp_avg_sq[0:6]",
    }
    assert torch.equal(state["0.weight/exp_avg[0:6]"].view(3, 2), optimizer.state[model[0].weight]["exp_avg"])
    assert (shown["format"], shown["extra"], [*shown["files"]]) == (4, {"step": 2}, [STATE])
    (of_optimizer,) = shown["optimizers"]
    assert of_optimizer["optimizer"] == "AdamW"
    assert of_optimizer["param_groups"][0]["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert of_optimizer["param_groups"][0]["betas"] == [0.9, 0.999]


def test_whoever_may_read_one_file_may_read_all(saved: Path) -> None:
    assert len({file.stat().st_mode for file in saved.iterdir()}) == 1


class Tied(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        if is_tied:
            self.outer.weight = self.inner.weight


def test_a_tied_tensor_is_stored_once_as_safetensors_stores_it(tmp_path: Path) -> None:
    model, bare, other, untied = Tied(), Tied(), Tied(), Tied(is_tied=False)
    save_checkpoint(tmp_path / "saved", model)
    with safe_open(tmp_path / "saved" / MODEL, framework="pt") as file:
        assert (file.keys(), file.metadata()) == (["inner.weight"], {"format": "pt", "outer.weight": "inner.weight"})
    load_model(bare, tmp_path / "saved" / MODEL)
    load_checkpoint(tmp_path / "saved", other)
    load_checkpoint(tmp_path / "saved", untied)
    for loaded in (bare, other, untied):
        require_equal(dict(loaded.state_dict()), dict(model.state_dict()))


class Parts(nn.Module):
    """Buffers that share memory, in part and with another shape."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.randn(3, 2)
        for name, part in {"rows": rows, "flat": rows.flatten(), "last": rows[1:], "turned": rows.t()}.items():
            self.register_buffer(name, part)


def test_tensors_that_share_memory_are_stored_separately(tmp_path: Path) -> None:
    model, other = Parts(), Parts()
    save_checkpoint(tmp_path / "saved", model)
    load_checkpoint(tmp_path / "saved", other)
    assert load_file(tmp_path / "saved" / MODEL).keys() == model.state_dict().keys()


def convolution(memory_format: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Conv2d(2, 3, 2).to(memory_format=memory_format)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(1, 2, 3, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("before", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("after", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_state_is_the_same_in_another_memory_format(
    tmp_path: Path, before: torch.memory_format, after: torch.memory_format
) -> None:
    model, optimizer = convolution(before)
    save_checkpoint(tmp_path / "saved", model, optimizer)
    other, other_optimizer = convolution(after)
    load_checkpoint(tmp_path / "saved", other, other_optimizer)
    require_equal(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


class Counts(torch.optim.SGD):
    """Has a state that is not a tensor, as optimizers outside of torch do."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            group.update(pair=(1, 2.5), rate=torch.tensor(0.25), flag=True)
            for param in group["params"]:
                self.state[param] = {"number": 7, "nothing": None, "mean": torch.ones(3)}


def test_values_and_settings_come_back_in_their_types(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer, other = (Counts(model.parameters(), lr=lr) for lr in (0.1, 0.2))
    optimizer.param_groups[0]["rate"].fill_(0.125)
    optimizer.state[model.bias].update(number=9, mean=torch.zeros(3))
    save_checkpoint(tmp_path / "saved", model, optimizer)
    load_checkpoint(tmp_path / "saved", model, other)
    require_equal(other.state_dict(), optimizer.state_dict())


def with_state(**state: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = state
    return model, optimizer


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


class Extra(nn.Linear):
    value: Any = None

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def with_extra_state(value: Any) -> Extra:
    model = Extra(1, 1)
    model.value = value
    return model


JSON = "Give numbers, strings, lists and dicts with strings as keys."
BY_TORCH = "by torch.save()."


@pytest.mark.parametrize(
    ("save", "what", "remedy"),
    [
        (
            lambda path: save_checkpoint(path, nn.Linear(1, 1), extra=[{"a": (1,)}]),
            "extra[0]['a'] cannot be stored as JSON: (1,).",
            JSON,
        ),
        (
            lambda path: save_checkpoint(path, nn.Linear(1, 1), extra=nested(96)),
            "extra" + "[0]" * 95 + " cannot be stored as JSON: [1].",
            JSON,
        ),
        (
            lambda path: save_checkpoint(path, with_extra_state({"scale": torch.ones(1)})),
            "state_dict['_extra_state']['scale'] cannot be stored as JSON: tensor([1.]).",
            JSON,
        ),
        (
            lambda path: save_checkpoint(path, *with_state(**{"a/b": 1})),
            "the state of 'weight' has the key 'a/b', which is not a name.",
            BY_TORCH,
        ),
        (
            lambda path: save_checkpoint(path, nn.Linear(1, 1, dtype=torch.complex128)),
            "'weight' is of torch.complex128 and torch.strided, which safetensors files do not hold.",
            BY_TORCH,
        ),
    ],
    ids=["a tuple", "too deep", "an extra state", "a key that is a path", "a dtype"],
)
def test_what_the_files_do_not_hold_is_refused_by_its_name(
    tmp_path: Path, save: Callable[[Path], None], what: str, remedy: str
) -> None:
    first, where, last = text_of(CheckpointError, lambda: save(tmp_path / "saved")).splitlines()
    assert (first, where, last.endswith(remedy), has_checkpoint(tmp_path / "saved")) == (what, "  save_checkpoint", True, False)


def test_no_index_is_saved_that_is_too_large_to_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undertow.checkpoint.files._MOST_BYTES", 100)
    found = text_of(CheckpointError, lambda: save_checkpoint(tmp_path / "saved", nn.Linear(1, 1), extra="x" * 100))
    assert re.match(r"extra and the names of parameters take 2\d\d bytes as JSON, more than an index may have\.\n", found)


@pytest.mark.parametrize(
    "extra", [None, nested(95), {"best": float("inf"), "a": [1, 2.5, "ü\ud800", True, {}]}, float("nan")], ids=repr
)
def test_extra_comes_back_as_it_was(tmp_path: Path, extra: Any) -> None:
    model = nn.Linear(1, 1)
    save_checkpoint(tmp_path / "saved", model, extra=extra)
    assert repr(load_checkpoint(tmp_path / "saved", model)) == repr(extra)


@pytest.mark.parametrize("value", [{"first": 3, "second": {"third": [4]}}, None, torch.arange(3)], ids=repr)
def test_an_extra_state_of_a_module_comes_back_whole(tmp_path: Path, value: Any) -> None:
    other = with_extra_state(torch.zeros(5))
    save_checkpoint(tmp_path / "saved", with_extra_state(value))
    load_checkpoint(tmp_path / "saved", other)
    (tmp_path / "saved" / MODEL).write_bytes(b"")  # it does not refer to the file
    require_equal(other.value, value)


def test_the_folder_may_be_reached_through_a_link(saved: Path) -> None:
    saved.with_name("latest").symlink_to(saved)
    assert load_checkpoint(saved.with_name("latest"), *made(seed=2)) == {"step": 2}


def change_index(**fields: Any) -> Callable[[Path], object]:
    def change(saved: Path) -> None:
        index = json.loads((saved / INDEX).read_text())
        (saved / INDEX).write_text(json.dumps({**index, **fields}))

    return change


def change_optimizer(**fields: object) -> Callable[[Path], object]:
    def change(saved: Path) -> None:
        (of_optimizer,) = json.loads((saved / INDEX).read_text())["optimizers"]
        change_index(optimizers=[{**of_optimizer, **fields}])(saved)

    return change


def text(written: str) -> Callable[[Path], object]:
    return lambda saved: (saved / INDEX).write_text(written, encoding="utf-8")


def change_tensors(name: str, **entries: torch.Tensor | None) -> Callable[[Path], object]:
    """Adds tensors to a file, or leaves them out."""

    def change(saved: Path) -> None:
        changed = {**load_file(saved / name), **{entry.replace("__", "/"): tensor for entry, tensor in entries.items()}}
        save_file({entry: tensor for entry, tensor in changed.items() if tensor is not None}, saved / name, {"format": "pt"})

    return change


def change_state(**entries: torch.Tensor | None) -> Callable[[Path], object]:
    def change(saved: Path) -> None:
        change_tensors(STATE, **entries)(saved)
        change_index(files={STATE: list(load_file(saved / STATE))})(saved)

    return change


def change_group(**settings: Any) -> Callable[[Path], object]:
    def change(saved: Path) -> None:
        (of_optimizer,) = json.loads((saved / INDEX).read_text())["optimizers"]
        (group,) = of_optimizer["param_groups"]
        change_optimizer(param_groups=[{**group, **settings}])(saved)

    return change


# What is there instead of a file, which is elsewhere now. Opening a fifo would block for ever.
SPECIAL: dict[str, Callable[[Path, Path], object]] = {
    "a link": Path.symlink_to,
    "a folder": lambda path, _: path.mkdir(),
    "a fifo": lambda path, _: os.mkfifo(path),
}
HALF = torch.zeros(3)
OUTER = {"step": 1, "num_forwards": 1, "num_synchronizations": 0, "turns": None, "due": [None]}
OTHER_TENSORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "half of the elements": (
        change_state(**{"0.weight/exp_avg[0:6]": None, "0.weight/exp_avg[0:3]": HALF}),
        "do not hold every element",
    ),
    "fewer elements than the name says": (
        change_state(**{"0.weight/exp_avg[0:6]": HALF}),
        "every element of 'exp_avg' of '0.weight'",
    ),
    "a parameter that is not the optimizer's": (
        change_state(**{"2.weight/step": torch.tensor(1.0)}),
        "has a state of '2.weight', which",
    ),
    "another shape of the model": (
        change_tensors(MODEL, **{"0.weight": torch.zeros(2, 3)}),
        r"shape \(2, 3\), and the model's is .* \(3, 2\)",
    ),
    "a state that the index does not list": (change_tensors(STATE, more=HALF), "differ: only one of them has 'more'"),
    "a model of integers": (
        change_tensors(MODEL, **{"0.weight": torch.zeros(3, 2, dtype=torch.int32)}),
        r"has '0.weight' of torch.int32 and shape \(3, 2\), and the model's is of torch.float32",
    ),
    "a state of integers": (
        change_state(**{"0.weight/exp_avg[0:6]": torch.zeros(6, dtype=torch.int64)}),
        "has 'exp_avg' of '0.weight' of torch.int64 .* for a parameter of torch.float32",
    ),
    "a file of nobody": (
        lambda saved: (saved / "optimizer-1.safetensors").write_bytes(b""),
        "optimizer-1.safetensors belongs to no",
    ),
    "a note": (lambda saved: (saved / "notes.txt").touch(), "notes.txt belongs to no entry of undertow.json"),
    "a folder": (lambda saved: (saved / "more").mkdir(), "more belongs to no entry of undertow.json"),
    "an empty model": (lambda saved: (saved / MODEL).write_bytes(b""), "model.safetensors cannot be read"),
    "an empty state": (lambda saved: (saved / STATE).write_bytes(b""), "optimizer-0.safetensors cannot be read"),
    "no model": (lambda saved: (saved / MODEL).unlink(), "model.safetensors is missing"),
    "a tensor too many": (change_tensors(MODEL, more=HALF), "has 'more', which the model does not have"),
    "a tensor too few": (change_tensors(MODEL, **{"0.weight": None}), "has no '0.weight', which the model has"),
    "a gap": (
        change_state(**{"0.weight/exp_avg[0:6]": None, "0.weight/exp_avg[0:2]": HALF[:2], "0.weight/exp_avg[3:6]": HALF.clone()}),
        "every element of 'exp_avg' of '0.weight'",
    ),
}
INDICES: dict[str, tuple[Callable[[Path], object], str]] = {
    "nested deeply": (text('{"format": 4, "extra": ' + "[" * 100_000 + "]" * 100_000 + "}"), "undertow.json is not"),
    "a key twice": (text('{"format": 4, "format": 4}'), "undertow.json is not"),
    "huge": (
        lambda saved: os.truncate(saved / INDEX, 1 << 40),
        "undertow.json has 1,099,511,627,776 bytes",
    ),  # but not on the disk
    "no optimizer": (change_index(optimizers=[]), "optimizers in the checkpoint: 0; given: 1"),
    "an optimizer that steers a terminal": (change_optimizer(optimizer="\x1b[2J\ud800"), r"the state of \\x1b\[2J\\ud800,"),
    "a file that is missing": (change_index(files={STATE: [], "optimizer-1.safetensors": []}), "undertow.json differ"),
    "only missing files": (change_index(files={"optimizer-7.safetensors": []}), "optimizer-7.safetensors is missing"),
    "a file elsewhere": (change_index(files={"../optimizer-0.safetensors": []}), "has a 'files' that save_checkpoint does not"),
    "a file too few": (change_index(files={}), "optimizer-0.safetensors belongs to no entry of undertow.json"),
    "a field too many": (change_index(num_files=1), "has 'num_files', which save_checkpoint does not write"),
    "a list": (text("[]"), "undertow.json is not"),
    **{
        f"{name} as a list": (change_index(**{name: [1]}), f"has a '{name}' that save_checkpoint does not write: ")
        for name in ("save", "saved_ns", "extra_states", "files", "optimizers")
    },
    "an optimizer as a list": (change_index(optimizers=[[]]), "has a 'optimizers' that save_checkpoint"),
    "a group as a list": (change_optimizer(param_groups=[["0.weight"]]), "has a 'optimizers' that save_checkpoint"),
    "parameters as an object": (change_group(params={"0.weight": 1}), "has a 'optimizers' that save_checkpoint"),
    "axes as a list": (change_optimizer(axes=[]), "has a 'optimizers' that save_checkpoint"),
    "other axes": (change_optimizer(axes={"0.weight": [1, 0, 2]}), "has other axes of '0.weight'"),
    "a time in the past": (change_index(saved_ns=-1), "has a 'saved_ns' that save_checkpoint"),
    "outer as a list": (change_index(outer=[], num_replicas=1, writers=[[0]]), "has a 'outer' that save_checkpoint"),
    "no replicas": (change_index(outer=OUTER, num_replicas=0, writers=[]), "has a 'num_replicas' that save_checkpoint"),
    "writers of others": (change_index(outer=OUTER, num_replicas=2, writers=[[0]]), "has 'writers' of 1 replicas, not 2"),
    "replicas that are missing": (change_index(outer=OUTER, num_replicas=1, writers=[[0]]), "outer.safetensors is missing"),
    **{
        f"lr={lr!r}": (change_group(lr=lr), r"undertow.json has .* for 'lr', and the optimizer 0.1")
        for lr in ("0.1", float("nan"), float("inf"), None, True, [0.1], {}, 10**400)
    },
    "lr=1e400": (
        lambda saved: (saved / INDEX).write_text((saved / INDEX).read_text().replace('"lr": 0.1', '"lr": 1e400')),
        "undertow.json has inf for 'lr', and the optimizer 0.1",
    ),
    "betas as a number": (change_group(betas=0.9), r"has 0.9 for 'betas', and the optimizer \(0.9, 0.999\)"),
    "three betas": (change_group(betas=[0.9, 0.9, 0.9]), "for 'betas'"),
    "a text among betas": (change_group(betas=[0.9, "0.999"]), "for 'betas'"),
    "a flag as a text": (change_group(amsgrad="no"), "has 'no' for 'amsgrad', and the optimizer False"),
    "a scheduler's rate as a text": (change_group(initial_lr="0.1"), "has '0.1' for 'initial_lr', and the optimizer None"),
    "no groups": (change_optimizer(param_groups=[]), "the checkpoint's 0 parameter groups differ from the optimizer's 1"),
    "a tensor as a value": (change_index(extra_states={"0.weight": 1}), "has '0.weight' as a value, and the model's is"),
    "axes twice": (change_optimizer(axes={"0.weight": [0, 0]}), "has a 'optimizers' that save_checkpoint does not write"),
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *(
            pytest.param(
                lambda saved, name=name, make=make: make(saved / name, (saved / name).rename(saved.with_name(f"other{name}"))),
                f"{re.escape(name)} is not a regular file",
                id=f"{name} is {kind}",
            )
            for name in (MODEL, STATE, INDEX)
            for kind, make in SPECIAL.items()
        ),
        *(pytest.param(*case, id=f"tensors: {name}") for name, case in OTHER_TENSORS.items()),
        *(pytest.param(*case, id=f"index: {name}") for name, case in INDICES.items()),
    ],
)
def test_what_save_checkpoint_does_not_write_is_refused(saved: Path, change: Callable[[Path], object], expected: str) -> None:
    change(saved)
    found = refusal(saved)
    assert re.search(expected, found), found


@pytest.mark.deep
@given(st.integers(0, 2**64))
def test_whatever_is_changed_is_loaded_or_is_an_error_and_no_other_file_is_touched(original: Path, seed: int) -> None:
    folder = original.parent / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    case = Path(shutil.copytree(original, folder / "case"))
    other = Path(shutil.copytree(original, folder / "other"))
    mutate_checkpoint(random.Random(seed), case, other=other)
    before = {path: path.lstat() for path in folder.rglob("*")}
    model, optimizer = made(seed=2)
    params = [param.detach().clone() for param in model.parameters()]
    try:
        load_checkpoint(case, model, optimizer)
    except CheckpointError:
        assert all(map(torch.equal, params, model.parameters()))
    assert {path: (found.st_size, found.st_mtime_ns) for path, found in before.items()} == {
        path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")
    }


def told(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Loads, and returns what is told."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        load_checkpoint(path, model, optimizer)
    return [str(warning.message) for warning in found]


def test_other_dtypes_than_the_models_are_converted_and_told(saved: Path) -> None:
    model, optimizer = made(seed=2)
    names = [f"'{name}' from torch.float32 to torch.bfloat16" for name in ("0.weight", "0.bias", "1.weight")]
    assert told(saved, model.bfloat16(), optimizer) == [
        f"the checkpoint has other dtypes than the model or its optimizer: {', '.join(names)} and 9 more.\n"  # two states of each
        f"  {saved}\n"
        "  Values are converted. Make the model and the optimizer as they were saved to keep all of their bits."
    ]
    wanted = made(seed=1)[0].bfloat16()
    assert all(map(torch.equal, model.parameters(), wanted.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_state_of_another_dtype_is_converted_and_told_if_it_loses_bits(saved: Path, dtype: torch.dtype) -> None:
    change_state(**{"0.weight/exp_avg[0:6]": torch.full((6,), 0.1, dtype=dtype)})(saved)
    model, optimizer = made(seed=2)
    texts = told(saved, model, optimizer)
    rounded = "'exp_avg' of '0.weight' from torch.float64 to torch.float32"
    assert [rounded in text for text in texts] == [True] * (dtype is torch.float64)
    state = optimizer.state[model[0].weight]["exp_avg"]
    assert torch.equal(state, torch.full((3, 2), 0.1, dtype=dtype).float())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_checkpoint_of_torchs_format_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Earlier versions wrote these files."""
    path = tmp_path / "saved"
    path.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (path / name).write_bytes(b"\x80\x04")
    (path / INDEX).write_text('{"format": 1, "optimizer": null, "extra": null}')
    assert has_checkpoint(path)
    assert "undertow.json is of format 1, and this version reads format 4." in refusal(path)
    assert text_of(CheckpointError, lambda: save_checkpoint(path, nn.Linear(1, 1))).startswith(
        ".metadata is not part of a checkpoint"
    )


def with_turned_states(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """States as a factorization leaves them, by columns, and one of a parameter whose memory has channels last."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        optimizer.state[param] = {
            "momentum_buffer": torch.randn(param.shape[::-1]).permute(*reversed(range(param.dim()))),
            "like": torch.randn_like(param),
            "factors": [torch.randn(4, 2).T, torch.randn(2, 4)],
        }
    return model, optimizer


def test_states_keep_the_order_of_their_axes_in_memory(tmp_path: Path) -> None:
    model, optimizer = with_turned_states(1)
    save_checkpoint(tmp_path / "turned", model, optimizer)
    other, loaded = with_turned_states(2)
    load_checkpoint(tmp_path / "turned", other, loaded)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        first, second = optimizer.state[one], loaded.state[two]
        pairs = [(first[key], second[key]) for key in ("momentum_buffer", "like")]
        for a, b in [*pairs, *zip(first["factors"], second["factors"], strict=True)]:
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


@pytest.mark.parametrize("axes", ["[0]", "[0, 0]", "[1.0, 0]", "7", '"10"', "[1, 2]", "null"])
def test_an_order_of_axes_that_is_none_is_refused(tmp_path: Path, axes: str) -> None:
    path = tmp_path / "turned"
    save_checkpoint(path, *with_turned_states(1))
    with safe_open(path / STATE, framework="pt") as file:
        texts = file.metadata()
    assert texts["0.weight/momentum_buffer[axes]"] == "[1, 0]"
    texts["0.weight/momentum_buffer[axes]"] = axes
    save_file(load_file(path / STATE), path / STATE, texts)
    text = text_of(CheckpointError, lambda: load_checkpoint(path, *with_turned_states(2)))
    assert "do not have the order of axes of 'momentum_buffer' of '0.weight'" in text
