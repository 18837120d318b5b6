"""Makes the plan that the settings request."""

from __future__ import annotations

import math
from collections.abc import Sequence

from undertow.config import SyncConfig, bytes_from_mib
from undertow.errors import ConfigError
from undertow.plan.grouping import SizeCaps, default_caps, group_by_size, group_in_pieces, largest_first, reverse_registration
from undertow.plan.layout import ParamSpec
from undertow.plan.plan import Plan, plan_from_groups


def first_plan(params: Sequence[ParamSpec], config: SyncConfig, *, num_ranks: int, splits: bool = False) -> Plan:
    """Makes the plan of the first step, before any measurement; raises ConfigError if a pinned plan does not fit.

    With `splits` a large parameter may be spread over several buckets. This is for sharded gradients, which need no view.
    """
    if config.plan is not None:
        return _pinned_plan(params, str(config.plan), num_ranks=num_ranks, splits=splits)
    order = largest_first(params) if config.order == "largest_first" else reverse_registration(len(params))
    return plan_in_order(params, order, config, num_ranks=num_ranks, splits=splits)


def plan_in_order(
    params: Sequence[ParamSpec], order: Sequence[int], config: SyncConfig, *, num_ranks: int, splits: bool = False
) -> Plan:
    """Makes buckets of the configured size over `order`; with `splits`, larger parameters are cut."""
    caps = _caps(config.bucket_cap_mb, total_bytes=sum(spec.num_bytes for spec in params), has_shards=splits)
    if splits:
        return plan_from_groups(params, group_in_pieces(params, order, caps, num_ranks=num_ranks), num_ranks=num_ranks)
    return plan_from_groups(params, group_by_size(params, order, caps), num_ranks=num_ranks)


def _caps(bucket_cap_mb: float | tuple[float, ...] | None, *, total_bytes: int, has_shards: bool) -> SizeCaps:
    if bucket_cap_mb is None:
        return default_caps(total_bytes, has_shards=has_shards)
    if isinstance(bucket_cap_mb, tuple):
        *first, rest = (bytes_from_mib(cap, name="bucket_cap_mb") for cap in bucket_cap_mb)
        return SizeCaps(cap_bytes=rest, first_bytes=tuple(first))
    cap = bytes_from_mib(bucket_cap_mb, name="bucket_cap_mb")
    small = min(cap, math.ceil(bytes_from_mib(1.0, name="first bucket")))
    return SizeCaps(cap_bytes=cap, first_bytes=(small,), last_bytes=(small,))


def _pinned_plan(params: Sequence[ParamSpec], text: str, *, num_ranks: int, splits: bool) -> Plan:
    pinned = Plan.from_json(text)
    for mine, planned in zip(params, pinned.params, strict=False):
        if mine.is_sparse != planned.is_sparse:
            raise _another_model(f"gradients of {mine.name!r} are sparse in {'the model' if mine.is_sparse else 'the plan'} only")
        if (mine.name, mine.shape, mine.dtype) != (planned.name, planned.shape, planned.dtype):
            raise _another_model(
                f"it has {planned.name!r} {planned.shape} {planned.dtype} where the model has "
                f"{mine.name!r} {mine.shape} {mine.dtype}"
            )
    if len(params) != len(pinned.params):
        raise _another_model(f"it has {len(pinned.params)} parameters, the model {len(params)}")
    if pinned.split_params and not splits:
        raise ConfigError(
            f"the saved plan cuts parameter {params[min(pinned.split_params)].name!r} into pieces.",
            where="a gradient that is not sharded lies in one bucket as a whole",
            remedy="Use this plan with a sharded optimizer, or leave SyncConfig(plan=...) out.",
        )
    return plan_from_groups(params, pinned.groups, num_ranks=num_ranks)


def _another_model(difference: str) -> ConfigError:
    return ConfigError(
        "the saved plan is for another model.",
        where=difference,
        remedy="Save a plan of this model with save_plan(), or leave SyncConfig(plan=...) out.",
    )
