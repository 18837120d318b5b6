"""The settings that optimizers have stepped with: a digest that ranks compare in every round, and
texts for the error if the digests differ."""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from itertools import chain, filterfalse
from operator import attrgetter, is_
from weakref import WeakKeyDictionary, ref

from torch import Tensor
from torch.optim.optimizer import Optimizer

from undertow.buckets.facts import differing
from undertow.device import device_of
from undertow.errors import PlanMismatch, ReplicaMismatch
from undertow.ranks.answers import Alike, named

# Settings that choose an implementation: ranks may differ in them.
_IMPLEMENTATION = frozenset(("foreach", "fused", "capturable", "differentiable"))
# Settings that users choose, under whatever name a constructor has them.
_CHOSEN = {"lr", "betas", "eps", "momentum", "weight_decay"}


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of one parameter group in one step."""

    label: str  # "group 0 of AdamW with 'head.weight'"
    values: tuple[tuple[str, str], ...]  # each setting's name, and its value as it is compared
    digest: int = field(init=False, compare=False)  # the same in all processes

    def __post_init__(self) -> None:
        digest = zlib.crc32(repr((self.label, self.values)).encode())
        object.__setattr__(self, "digest", digest)

    def lines(self) -> list[str]:
        """Returns a text for each setting."""
        return [f"{name} of {self.label}: {value}" for name, value in self.values]


Settings = tuple[GroupSettings, ...]
_digest_of = attrgetter("digest")


@dataclass(slots=True)
class _Known:
    """The settings of an optimizer when it last stepped."""

    # names that are not compared without estimates; found when they are needed, by inspection
    left_out: frozenset[str] | None = None
    # by the number, the first and the last of a group's parameters
    first_names: dict[tuple[int, int, int], str] = field(default_factory=dict)
    # by a group's number, the number of its parameters, and if estimates count, the values that
    # its settings were made of, if these cannot change in place. No parameter: it may refer to the
    # optimizer by its hooks, and would keep the entry of this module forever.
    groups: dict[tuple[int, int, bool], tuple[list[object], GroupSettings]] = field(
        default_factory=dict
    )


_KNOWN: WeakKeyDictionary[Optimizer, _Known] = WeakKeyDictionary()
_NONE: tuple[list[object], None] = ([], None)
ALONE: Settings = (GroupSettings("the model", (("stepping inside accumulate()", "True"),)),)
_WRITTEN = "the gradients that a program has written"
_OF_WRITTEN = f" of {_WRITTEN}"
_SAME_SETTINGS = (
    "Give every rank the same settings. A scheduler must follow a number that all ranks have, such "
    "as the mean of their losses."
)


def settings_of(
    optimizer: Optimizer,
    trained: Collection[int],
    names: Mapping[int, str],
    *,
    with_estimates: bool = True,
) -> Settings:
    """Returns the settings of each group with `trained` parameters, by id; ranks that step alike
    have the same. `names` has the names of parameters by id.

    Leaves out tensors on devices, because the host would wait for them, and settings that only
    choose an implementation. Without `with_estimates` also numbers that the optimizer keeps for
    itself: they differ between replicas that train alone.
    """
    known = _KNOWN.get(optimizer)
    if known is None:
        known = _KNOWN[optimizer] = _Known()
    left_out = _IMPLEMENTATION
    if not with_estimates:
        if known.left_out is None:
            known.left_out = _IMPLEMENTATION | _estimates_of(optimizer)
        left_out = known.left_out
    told = list(filterfalse(left_out.__contains__, getattr(optimizer, "defaults", ())))
    found: list[GroupSettings] = []
    for group in optimizer.param_groups:
        params = group["params"]
        if not any(map(trained.__contains__, map(id, params))):
            continue
        number = len(found)
        key = number, len(params), with_estimates
        # The reference to a tensor is the same object each time.
        now = [ref(params[0]), ref(params[-1]), *told, *map(group.get, told)]
        before, settings = known.groups.get(key, _NONE)
        # Most steps have the very values of the step before: a text of each would take longer.
        if settings is None or len(before) != len(now) or not all(map(is_, before, now)):
            first = _first_name(known, params, names)
            settings = _settings_of_group(optimizer, number, group, told, first)
            known.groups.pop(key, None)
            if all(map(_is_fixed, map(group.get, told))):
                known.groups[key] = now, settings
        found.append(settings)
    return tuple(found)


def _estimates_of(optimizer: Optimizer) -> frozenset[str]:
    """Returns the entries of `defaults` that no constructor of its classes takes.

    The optimizer keeps them for itself, as Prodigy its estimate `d`.
    """
    taken = set(_CHOSEN)
    takes_any = False
    for each in getattr(optimizer, "optimizer_class", type(optimizer)).__mro__:
        constructor = vars(each).get("__init__")
        if constructor is None or each in (Optimizer, object):
            continue
        try:
            params = signature(constructor).parameters
        except (TypeError, ValueError):  # it is compiled, or no function
            return frozenset()
        taken.update(params)
        # The next class takes these, so those of the last one decide.
        takes_any = any(param.kind is Parameter.VAR_KEYWORD for param in params.values())
    return frozenset() if takes_any else frozenset(getattr(optimizer, "defaults", ())) - taken


def written_gradients(fingerprints: Mapping[str, int]) -> Settings:
    """Returns gradients that a program has written since they were averaged, by the names of their
    parameters, as settings of a step: ranks that step on them must have the same."""
    values = tuple((repr(name), f"{value:x}") for name, value in fingerprints.items())
    return (GroupSettings(_WRITTEN, values),)


def written_differ(
    name: str, of_ranks: Mapping[int, object], *, where: str, remedy: str
) -> ReplicaMismatch:
    """Returns the error of ranks that step on different gradients of parameter `name`, given a
    value for the gradient of each rank."""
    others = differing(of_ranks)
    alike = [rank for rank in of_ranks if rank not in others]
    return ReplicaMismatch(
        f"the gradient of {name!r} is not the same on {named(others)} as on {named(alike)}, and a "
        "sharded optimizer steps on it.",
        where=where,
        remedy=remedy,
    )


def _settings_of_group(
    optimizer: Optimizer, number: int, group: Mapping[str, object], told: Iterable[str], first: str
) -> GroupSettings:
    """Returns the settings `told` of a group whose first parameter has this name."""
    kind = getattr(optimizer, "optimizer_class", type(optimizer)).__name__
    texts = [(name, _text(group.get(name))) for name in told]
    values = tuple((name, text) for name, text in texts if text is not None)
    return GroupSettings(f"group {number} of {kind} with {first!r}", values)


def _is_fixed(value: object) -> bool:
    """Returns True if the value cannot change in place."""
    if isinstance(value, tuple):
        return all(map(_is_fixed, value))
    return value is None or isinstance(value, float | int | str)


def _first_name(known: _Known, params: Sequence[Tensor], names: Mapping[int, str]) -> str:
    """Returns the name of the first of a group's parameters, in alphabetical order.

    Another optimizer may have a group of the same number, and the ranks may step the two in another
    order. A search for the name takes longer than all the rest, so it is kept while the group has
    as many parameters, the same first and the same last one.
    """
    key = len(params), id(params[0]), id(params[-1])
    if key not in known.first_names:
        known.first_names[key] = min(
            (names[id(param)] for param in params if id(param) in names), default="?"
        )
    return known.first_names[key]


def digest_of(settings: Settings) -> int:
    """Returns a number that is the same in all processes, in any order of the optimizers' steps."""
    return sum(map(_digest_of, settings))


def text_of(settings: Settings) -> str:
    """Returns a line for each setting, in an order that does not depend on the optimizers'
    steps."""
    return "\n".join(sorted(chain.from_iterable(each.lines() for each in settings)))


def settings_differ(found: Sequence[Alike], *, where: str, remedy: str = "") -> PlanMismatch:
    """Returns the error of ranks that step with different settings, given the `text_of` each; it
    compares the first two texts. `remedy` is a further one."""
    told = _told(found)
    difference = _first_difference(*told) if len(told) == 2 else ""
    if difference:
        where += f"\n  first difference: {difference}"
        others = [rank for one in found if one not in told for rank in one.ranks]
        if others:
            where += f"\n  {named(others)}: other settings than both"
    return PlanMismatch(
        "ranks step with different settings of an optimizer.",
        where=where,
        remedy=f"{_SAME_SETTINGS} {remedy}".rstrip(),
    )


def written_unlike(found: Sequence[Alike], *, where: str) -> ReplicaMismatch | None:
    """Returns the error if ranks have stepped on different `written_gradients`, given the `text_of`
    the settings of each; it compares the first two texts."""
    told = _told(found)
    if len(told) < 2:
        return None
    one, other = told
    here, there = _written_in(one), _written_in(other)
    unlike = [name for name in here | there if here.get(name) != there.get(name)]
    if not unlike:
        return None
    name = unlike[0]
    return written_differ(
        name.removesuffix(_OF_WRITTEN).strip("'"),
        dict.fromkeys(one.ranks, here.get(name)) | dict.fromkeys(other.ranks, there.get(name)),
        where=f"the step before {where}",
        remedy="On every rank, write the same values into `.grad` after backward. If that step was "
        "not skipped, it has mixed the ranks' gradients: load a checkpoint.",
    )


def _told(found: Sequence[Alike]) -> list[Alike]:
    """Returns the first two texts that were sent."""
    return [one for one in found if one.text is not None][:2]


def _first_difference(one: Alike, other: Alike) -> str:
    """Names the first setting that differs, or a group that is not stepped on one side."""
    here, there = _settings_in(one), _settings_in(other)
    for name in here | there:
        value, others = here.get(name, "not set"), there.get(name, "not set")
        if value != others:
            return (
                _other_groups(name, one.ranks, here, there)
                or _other_groups(name, other.ranks, there, here)
                or f"{name} is {value} on {named(one.ranks)}, but {others} on {named(other.ranks)}"
            )
    return ""


def _settings_in(told: Alike) -> dict[str, str]:
    lines = (told.text or "").splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def _written_in(told: Alike) -> dict[str, str]:
    settings = _settings_in(told)
    return {name: value for name, value in settings.items() if name.endswith(_OF_WRITTEN)}


def _other_groups(
    name: str, ranks: Sequence[int], here: Mapping[str, str], there: Mapping[str, str]
) -> str:
    """Names the `ranks` with the settings `here` if they do not step the group that the setting
    `name` belongs to, but another one, such as one of another class; "" if they step it."""
    group = name.partition(" of ")[2]
    own, others = ({each.partition(" of ")[2] for each in settings} for settings in (here, there))
    if group in own or not group.startswith("group "):
        return ""
    instead = f", but {min(own - others)}" if own - others else ""
    return f"{named(ranks)} {'do' if len(ranks) > 1 else 'does'} not step {group}{instead}"


def _text(value: object) -> str | None:
    """Returns a plain value as it is compared; None for anything else.

    Numbers that differ in their last digits are equal: libraries of two machines may.
    """
    if isinstance(value, float):  # numpy's too
        return f"{value:.6g}"
    if isinstance(value, bool | int | str):
        return str(value)
    if isinstance(value, Tensor):
        is_there = value.dim() == 0 and device_of(value.device).is_host
        return _text(value.item()) if is_there else None
    if isinstance(value, tuple | list):
        return _text_of_each(value)
    return None


def _text_of_each(values: Iterable[object]) -> str | None:
    texts = [_text(value) for value in values]
    told = [text for text in texts if text is not None]
    return f"({', '.join(told)})" if len(told) == len(texts) else None
