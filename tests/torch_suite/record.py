"""The results that are recorded for torch's tests, and what differs from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RECORD, LEFT_OUT = Path(__file__).with_name("expected.txt"), "left"


@dataclass(frozen=True, slots=True)
class Expected:
    result: str
    why: str


def read(path: Path = RECORD) -> dict[str, Expected]:
    lines = (line.split(maxsplit=2) for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {name: Expected(result, " ".join(why)) for result, name, *why in lines}


def difference(name: str, result: str, expected: Mapping[str, Expected]) -> str:
    """One line about a result that is not the recorded one; empty if it is."""
    match expected.get(name), result:
        case None, _:
            return f"{name} is not in {RECORD.name}: record its result ({result}), or leave it out and say why"
        case Expected(result=recorded), _ if recorded == result:
            return ""
        case Expected(result="fail", why=why), "pass":
            return f"{name} passes now; it is recorded as a failure: {why}"
        case Expected(result=recorded), _:
            return f"{name}: {result}; recorded is {recorded}"


def missing(names: set[str], expected: Mapping[str, Expected]) -> list[str]:
    return [f"{name} is recorded, and this torch does not have it" for name in sorted(set(expected) - names)]
