"""Plans from a file: one that save_plan() has written, or a table of parameters written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from undertow.config import SyncConfig
from undertow.errors import ConfigError
from undertow.foreign import parsed_json
from undertow.plan.choose import first_plan, plan_in_order
from undertow.plan.plan import Plan, plan_from_data, plan_from_groups
from undertow.plan.spec import ParamSpec

# Bytes per element of the dtypes that have gradients, by torch's names.
ITEMSIZES: Mapping[str, int] = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
_NUM_RANKS = 2
_COLUMNS = ("name", "shape", "dtype")
_REMEDY = (
    "Give a file that save_plan() has written, or write a table of parameters: "
    '{"params": [{"name": "weight", "shape": [10, 20], "dtype": "float32"}]}'
)


def source_from_file(path: Path) -> Plan | tuple[ParamSpec, ...]:
    """The saved plan in the JSON file at `path`, or the parameters of a table; ConfigError, naming the file, if neither."""
    try:
        data: Any = parsed_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read.", where=error.strerror or str(error), remedy=_REMEDY) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON.", where=str(error), remedy=_REMEDY) from error
    try:
        return _source(data)
    except ConfigError as error:
        what_and_where = str(error).splitlines()[:-1]
        reason = " ".join(line.strip() for line in what_and_where)
        what = f"{path} is neither a saved plan nor a table of parameters."
        raise ConfigError(what, where=reason, remedy=_REMEDY) from error


def plan_from_source(source: Plan | Sequence[ParamSpec], *, num_ranks: int | None = None, splits: bool = False) -> Plan:
    """The plan of parameters without a profile, or the saved one.

    A saved plan keeps its buckets. Without `num_ranks` it is for as many ranks as it was; parameters are planned for two. Only
    with `splits`, as for gradients in shards, may a large parameter lie in several buckets.
    """
    config = SyncConfig(order="reverse")
    if not isinstance(source, Plan):
        return first_plan(source, config, num_ranks=_NUM_RANKS if num_ranks is None else num_ranks, splits=splits)
    num_ranks = source.num_ranks if num_ranks is None else num_ranks
    if splits or not source.split_params:
        return plan_from_groups(source.params, source.groups, num_ranks=num_ranks)
    order = tuple(dict.fromkeys(chain.from_iterable(bucket.params for bucket in source.buckets)))
    return plan_in_order(source.params, order, config, num_ranks=num_ranks, splits=splits)


def _source(data: Any) -> Plan | tuple[ParamSpec, ...]:
    if not isinstance(data, dict):
        raise _wrong(f"expected an object, got {type(data).__name__}.")
    if data.keys() != {"params"}:
        return plan_from_data(data)
    rows = data["params"]
    if not isinstance(rows, list):
        raise _wrong(f'"params" must be a list, got {type(rows).__name__}.')
    return tuple(_spec(row, index) for index, row in enumerate(rows))


def _spec(row: Any, index: int) -> ParamSpec:
    if not isinstance(row, dict) or row.keys() != set(_COLUMNS):
        got = ", ".join(row) if isinstance(row, dict) else brief(row)
        raise _wrong(f"parameter {index} must have {', '.join(_COLUMNS)}, got {got}.")
    name, shape, dtype = (row[column] for column in _COLUMNS)
    if not isinstance(name, str):
        raise _wrong(f"the name of parameter {index} must be a text, got {brief(name)}.")
    if not isinstance(shape, list):
        raise _wrong(f"the shape of parameter {name!r} must be a list of sizes, got {brief(shape)}.")
    if not isinstance(dtype, str) or dtype not in ITEMSIZES:
        raise _wrong(f"the dtype of parameter {name!r} must be one of {', '.join(ITEMSIZES)}, got {brief(dtype)}.")
    return ParamSpec(name=name, shape=tuple(shape), dtype=dtype, itemsize=ITEMSIZES[dtype])


def _wrong(what: str) -> ConfigError:
    return ConfigError(what, remedy=_REMEDY)
