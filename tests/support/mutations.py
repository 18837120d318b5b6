"""Changes at random to bytes, to JSON, and to checkpoints: the same ones for the same seed."""

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    (name,) = chance.choices(list(_CHECKPOINTS), [6, 12, 8, 4])
    _CHECKPOINTS[name](chance, path, other)
    return name


def _change_bytes(chance: random.Random, path: Path, _other: Path) -> None:
    file = chance.choice(sorted(path.iterdir()))
    file.write_bytes(mutated_bytes(chance, file.read_bytes()))


def _change_header(chance: random.Random, path: Path, _other: Path) -> None:
    """Of a safetensors file, as a writer of bad will would: its length fits."""
    file = chance.choice(sorted(path.glob("*.safetensors")))
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = _with_other_entry(chance, data[8 : 8 + size].decode())
    if chance.random() < 0.5:
        header = mutated_json(chance, header)
    changed = header.encode("utf-8", "surrogatepass" if "\udcff" not in header else "surrogateescape")
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])


def _with_other_entry(chance: random.Random, header: str) -> str:
    """Gives a tensor another name, place, shape or dtype, or has it twice."""
    entries = json.loads(header)
    names = [name for name in entries if name != "__metadata__"]
    name, another = (chance.choice(names) for _ in range(2))
    entry = entries[name]
    match chance.randrange(7):
        case 0:
            entries[chance.choice(ENTRIES) if chance.random() < 0.5 else f"{name}x"] = entries.pop(name)
        case 1:
            entries[re.sub(r"[0-9]+(?=[:\]])", lambda _: str(chance.choice(NUMBERS)), name)] = entries.pop(name)
        case 2:
            entries[name], entries[another] = entries[another], entry
        case 3:
            entry["data_offsets"] = chance.choice([entries[another]["data_offsets"], chance.choices(NUMBERS, k=2)])
        case 4:
            entry["shape"] = chance.choice(
                [entries[another]["shape"], chance.choices(NUMBERS, k=chance.randrange(4)), [1, *entry["shape"]]]
            )
        case 5:
            entry["dtype"] = chance.choice(["F64", "I32", "U8", "BF16", "BOOL", "F4", "C64", "F8_E8M0", "X"])
        case _:
            texts = entries.setdefault("__metadata__", {})
            texts[chance.choice([*names, *ENTRIES])] = chance.choice([name, *TEXTS, "null", "5"])
    return json.dumps(entries)


def _change_index(chance: random.Random, path: Path, _other: Path) -> None:
    text = mutated_json(chance, (path / "undertow.json").read_text())
    (path / "undertow.json").write_bytes(text.encode("utf-8", "surrogatepass"))


def _change_files(chance: random.Random, path: Path, other: Path) -> None:
    file, another = (chance.choice(sorted(path.iterdir())) for _ in range(2))
    there = other / file.name
    match chance.randrange(8):
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
        case 6:
            os.truncate(file, 1 << 40)  # which takes no space on the disk
        case _:
            os.truncate(file, chance.randrange(2 * file.stat().st_size + 2))


NUMBERS = [0, 1, 2, 6, 8, 24, 47, 48, 49, -1, 2**31, 2**40, 2**62, 2**64, 10**17, 10**30]
ENTRIES = [
    "",
    "/",
    "../x",
    "0.weight",
    "0.weight/",
    "0.weight/master",
    "0.weight/step",
    "0.weight/exp_avg[0:0]",
    "x/y[1:0]",
    "0.bias/exp_avg",
]
_CHECKPOINTS: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "bytes": _change_bytes,
    "headers": _change_header,
    "the index": _change_index,
    "files": _change_files,
}
