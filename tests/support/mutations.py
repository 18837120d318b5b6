"""Changes at random to bytes, to JSON, and to checkpoints: the same ones for the same seed."""

import contextlib
import copy
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as torchs

VALUES = [
    *(0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), True, False, None),
    *("", "a", "../other", "/etc/passwd", "\x1b[2J", "[/bold]", "\ud800", "\x00", "$x^$", "9" * 400, "ü"),
    *([], [[]], [0], [1, 2], [-1], {}, {"a": 1}, {"": []}),
]
TEXTS = ["[" * 3000, "]" * 50, "1" * 5000, '"\\ud800"', "NaN", "-Infinity", "1e999", "\ufeff", "\x00", "\udcff", '{"a":' * 2000]


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        at, to = (chance.randrange(len(changed) + 1) for _ in range(2))
        length = chance.choice([1, 2, 4, 8, 64])
        match chance.randrange(7):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                changed[at : at + 1] = bytes([(changed[at : at + 1] or b"\0")[0] ^ 1 << chance.randrange(8)])
            case 2:
                changed[at:at] = chance.randbytes(length)
            case 3:
                del changed[at : at + length]
            case 4:
                changed[to:to] = changed[at : at + length]
            case 5:
                changed[at : at + length] = chance.choice([b"\xff", b"\0", b"\x7f"]) * length
            case 6:
                del changed[at:]
    return bytes(changed)


def mutated_json(chance: random.Random, text: str) -> str:
    if chance.random() < 0.25:
        return mutated_bytes(chance, text.encode()).decode("utf-8", "surrogateescape")
    if chance.random() < 0.1:
        at = chance.randrange(len(text) + 1)
        return text[:at] + chance.choice(TEXTS) + text[at:]
    data = [json.loads(text)]
    for _ in range(chance.choice([1, 1, 2, 4])):
        part, key = chance.choice(list(_places(data)))
        match chance.randrange(8):
            case 0 | 1 | 2 | 3:
                part[key] = _like(chance, part[key])
            case 4:
                part[key] = copy.deepcopy(chance.choice(VALUES))  # which later changes may change
            case 5:
                part[key] = [part[key]]
            case 6 if part is not data:
                del part[key]
            case _:
                other, there = chance.choice(list(_places(data)))
                part[key] = json.loads(json.dumps(other[there]))
    return json.dumps(data[0])


def _like(chance: random.Random, value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return chance.choice([value + 1, value - 1, 2 * value, 1000 * value, 10**9 * value, 2**40 + value, 0, 0.5, 1e300])
        case str():
            return chance.choice(
                [*(it for it in VALUES if isinstance(it, str)), value + "x", value[1:], "float32", "zero1", "cuda"]
            )
        case list():
            return chance.choice([value[::-1], value[1:], value + value[:1], value * 2, value[:-1]])
    return value


def _places(part: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(part) if isinstance(part, dict) else range(len(part)):
        yield part, key
        if isinstance(part[key], dict | list):
            yield from _places(part[key])


def mutate_checkpoint(chance: random.Random, path: Path, *, other: Path) -> str:
    """Changes the checkpoint at `path` in one way, of which it returns the name; `other` is one of the same names."""
    kind, weight = list(_CHECKPOINTS), [8, 8, 4, 4, 2]
    (name,) = chance.choices(kind, weight)
    _CHECKPOINTS[name](chance, path, other)
    return name


def _change_metadata(chance: random.Random, path: Path, _other: Path) -> None:
    _rewrite(path / ".metadata", lambda data: mutated_bytes(chance, data))


def _change_tensors(chance: random.Random, path: Path, _other: Path) -> None:
    data = chance.choice(sorted(path.glob("*.distcp")))
    _rewrite(data, lambda data: mutated_bytes(chance, data))


def _change_header(chance: random.Random, path: Path, _other: Path) -> None:
    text = mutated_json(chance, (path / "undertow.json").read_text())
    (path / "undertow.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def _change_files(chance: random.Random, path: Path, other: Path) -> None:
    file, another = (chance.choice(sorted(path.iterdir())) for _ in range(2))
    there = other / file.name
    match chance.randrange(7):
        case 0:
            file.unlink()
        case 1:
            file.unlink()
            file.mkdir()
        case 2:
            file.unlink()
            file.symlink_to(there)
        case 3:
            file.unlink()
            os.mkfifo(file)
        case 4:
            shutil.copy(there, file)
        case 5 if file != another:
            shutil.copy(another, file)
        case _:
            os.truncate(file, chance.randrange(2 * file.stat().st_size + 2))


def _change_fields(chance: random.Random, path: Path, other: Path) -> None:
    """Of torch's objects, as a writer of bad will would: all else fits."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for _ in range(chance.choice([1, 1, 2, 3])):
        with contextlib.suppress(AttributeError, IndexError, TypeError):  # after an earlier change there may be nothing to change
            chance.choice((_change_place, _change_tensor, _change_table))(chance, metadata, other)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _change_place(chance: random.Random, metadata: Any, other: Path) -> None:
    info = chance.choice(list(metadata.storage_data.values()))
    name = chance.choice(["relative_path", "offset", "length", "transform_descriptors"])
    paths = [f"../{other.name}/__0_0.distcp", str(other / "__0_0.distcp"), "__1_0.distcp", "__7_0.distcp", ".metadata", "."]
    values = paths if name == "relative_path" else [*VALUES, info.offset + 1, info.length - 1, info.length + 1]
    object.__setattr__(info, name, chance.choice([*values, chance.choice(VALUES)]))


def _change_tensor(chance: random.Random, metadata: Any, _other: Path) -> None:
    found = chance.choice([it for it in metadata.state_dict_metadata.values() if hasattr(it, "size")])
    sizes = [torch.Size(()), torch.Size((1,)), torch.Size((2**40, 2**20)), torch.Size((0,)), torch.Size((-1, 3)), found.size]
    sizes += [torch.Size([*found.size[:-1], (found.size or (1,))[-1] + 1]), torch.Size([1] * 70)]
    match chance.randrange(5):
        case 0:
            found.size = chance.choice(sizes)
        case 1:
            found.properties.dtype = chance.choice([torch.float64, torch.complex64, torch.int8, torch.quint8, None])
        case 2:
            found.chunks = chance.choice([[], found.chunks * 2, found.chunks[:1], None, [1]])
        case 3 if found.chunks:
            chance.choice(found.chunks).sizes = chance.choice(sizes)
        case _ if found.chunks:
            chance.choice(found.chunks).offsets = chance.choice(sizes)


def _change_table(chance: random.Random, metadata: Any, _other: Path) -> None:
    table = chance.choice([metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data])
    keys = list(table)
    key, another = (chance.choice(keys) for _ in range(2)) if keys else (None, None)
    match chance.randrange(5):
        case 0:
            table.pop(key, None)
        case 1:
            table[key] = table.get(another)
        case 2:
            table[key] = chance.choice([None, (), ("model",), (1, 2), {}, [], 7, "a", torchs.BytesStorageMetadata()])
        case 3:
            table[chance.choice(["model.new", 7, None, torchs.MetadataIndex("model.new")])] = table.get(key)
        case _:
            setattr(metadata, chance.choice(["planner_data", "storage_data", "state_dict_metadata", "storage_meta"]), {})


def _rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


_CHECKPOINTS: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "bytes of the metadata": _change_metadata,
    "fields of the metadata": _change_fields,
    "bytes of the tensors": _change_tensors,
    "the header": _change_header,
    "files": _change_files,
}
