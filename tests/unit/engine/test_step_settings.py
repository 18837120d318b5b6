"""Settings that optimizers have stepped with: what ranks compare, and what they name if it differs."""

import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from support.levels import some
from undertow.engine.progress import Steps
from undertow.engine.step_settings import (
    ALONE,
    GroupSettings,
    Settings,
    digest_of,
    settings_differ,
    settings_of,
    text_of,
    written_gradients,
    written_unlike,
)
from undertow.errors import ReplicaMismatch
from undertow.outer.facts import first_that_differs
from undertow.outer.step_settings import StepSettings
from undertow.ranks.answers import Alike, alike

PARAMS = [nn.Parameter(torch.ones(2)) for _ in range(4)]
NAMES = dict(zip(map(id, PARAMS), ("d", "c", "b", "a"), strict=True))


def of(*params: nn.Parameter, **settings: object) -> Settings:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.param_groups[0].update(settings)
    return settings_of(optimizer, NAMES, NAMES)


def test_a_group_is_named_by_its_number_and_its_first_parameter() -> None:
    optimizer = torch.optim.SGD([{"params": PARAMS[:1], "lr": 0.5}, {"params": PARAMS[1:]}], lr=0.1)
    lines = text_of(settings_of(optimizer, NAMES, NAMES)).splitlines()
    assert "lr of group 0 of SGD with 'd': 0.5" in lines
    assert "lr of group 1 of SGD with 'a': 0.1" in lines


def test_groups_without_trained_parameters_do_not_count() -> None:
    optimizer = torch.optim.SGD([{"params": PARAMS[:1], "lr": 0.5}, {"params": PARAMS[1:]}], lr=0.1)
    (group,) = settings_of(optimizer, {id(PARAMS[3])}, NAMES)
    assert (group.label, dict(group.values)["lr"]) == ("group 0 of SGD with 'a'", "0.1")


class Estimates(torch.optim.Optimizer):
    """It keeps an estimate and a count of its own beside its settings, as Prodigy and D-Adaptation do."""

    def __init__(self, params: list[nn.Parameter], learning_rate: float = 1.0, d0: float = 1e-6) -> None:
        super().__init__(params, {"lr": learning_rate, "d0": d0, "d": d0, "k": 0})

    def step(self, closure: object = None) -> None: ...


class PassesOn(Estimates):
    def __init__(self, params: list[nn.Parameter], **settings: float) -> None:
        super().__init__(params, **settings)


class TakesAny(torch.optim.Optimizer):
    def __init__(self, params: list[nn.Parameter], **settings: float) -> None:
        super().__init__(params, {"lr": 1.0, "d": 1.0, **settings})

    def step(self, closure: object = None) -> None: ...


class Partial(torch.optim.SGD):
    __init__ = partialmethod(torch.optim.SGD.__init__, lr=0.5)  # type: ignore[assignment]


class Named(Estimates):
    def __init__(self, params: list[nn.Parameter], d: float = 0.5) -> None:
        super().__init__(params)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (Estimates, {"lr", "d0"}),
        (Named, {"lr", "d0", "d"}),
        (PassesOn, {"lr", "d0"}),
        (TakesAny, {"lr", "d"}),
        (torch.optim.SGD, {"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"}),
    ],
)
def test_replicas_that_train_alone_compare_no_estimates(kind: type[torch.optim.Optimizer], names: set[str]) -> None:
    optimizer = kind(PARAMS)
    (alone,) = settings_of(optimizer, NAMES, NAMES, with_estimates=False)
    assert dict(alone.values).keys() == names
    (together,) = settings_of(optimizer, NAMES, NAMES)
    assert dict(together.values).keys() >= {*names, *({"d"} & optimizer.defaults.keys())}


def test_a_number_that_is_taken_out_of_defaults_is_not_compared() -> None:
    optimizer = Named(PARAMS)
    del optimizer.defaults["d"]
    (alone,) = settings_of(optimizer, NAMES, NAMES, with_estimates=False)
    assert dict(alone.values).keys() == {"lr", "d0"}


def test_a_constructor_without_a_signature_hides_nothing() -> None:
    """As classes that functools.partialmethod makes of others."""
    (group,) = settings_of(Partial(PARAMS), NAMES, NAMES, with_estimates=False)
    assert dict(group.values)["lr"] == "0.5"


def test_the_digest_follows_every_setting_and_no_order_of_steps() -> None:
    first, second = of(PARAMS[0]), of(PARAMS[1], lr=0.2)
    assert digest_of(first + second) == digest_of(second + first)
    assert digest_of(of(PARAMS[0])) == digest_of(of(PARAMS[0]))
    swapped = of(PARAMS[0], lr=0.2) + of(PARAMS[1])
    assert digest_of(first + second) != digest_of(swapped)
    others = [{"lr": 0.11}, {"momentum": 0.5}, {"nesterov": True}, {"weight_decay": 1e-9}]
    assert len({digest_of(first), *(digest_of(of(PARAMS[0], **other)) for other in others)}) == 5


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.1 + 0.2, "0.3"),
        (1e-8, "1e-08"),
        (1.0, "1"),
        (1, "1"),
        (np.float64(0.5), "0.5"),
        (torch.tensor(0.5, dtype=torch.float64), "0.5"),
        (True, "True"),
        ((0.9, 0.999), "(0.9, 0.999)"),
        ([0.9, 0.999], "(0.9, 0.999)"),
        ("l1", "l1"),
    ],
)
def test_a_setting_is_compared_as_a_text_with_six_digits(value: object, shown: str) -> None:
    assert dict(of(PARAMS[0], lr=value)[0].values)["lr"] == shown


@pytest.mark.parametrize("value", [None, torch.ones(2), (1, None), object()])
def test_other_values_are_not_compared(value: object) -> None:
    assert "lr" not in dict(of(PARAMS[0], lr=value)[0].values)


def test_settings_follow_every_change_between_two_steps() -> None:
    optimizer = torch.optim.SGD(PARAMS, lr=0.1)
    (group,) = optimizer.param_groups
    rate, rates = torch.tensor(0.5), [0.25, 0.5]
    shown = []

    def step() -> None:
        (found,) = settings_of(optimizer, NAMES, NAMES)
        shown.append(dict(found.values).get("lr"))

    for value in (0.1, 0.2, True, 1, 1.5, rate, rates, (rates,), None, 0.1):
        group["lr"] = value
        step()
        step()
    for in_place, change in ((rate, lambda: rate.fill_(2.0)), (rates, lambda: rates.append(3.0))):
        group["lr"] = in_place
        step()
        change()
        step()
    expected = ["0.1", "0.2", "True", "1", "1.5", "0.5", "(0.25, 0.5)", "((0.25, 0.5))", None, "0.1"]
    in_place_ones = ["0.5", "2", "(0.25, 0.5)", "(0.25, 0.5, 3)"]
    assert shown == [*(text for text in expected for _ in range(2)), *in_place_ones]


def test_another_parameter_names_its_group_and_settings_that_stay_are_not_described_again() -> None:
    params = [nn.Parameter(torch.ones(1)) for _ in range(300)]  # numbers above 256 are new objects each time
    names = {id(param): f"{place:03}" for place, param in enumerate(params)}
    optimizer = torch.optim.SGD(params, lr=0.1)
    first, second = (settings_of(optimizer, names, names) for _ in range(2))
    assert first[0] is second[0]
    optimizer.param_groups[0]["params"][0] = params[1]
    (third,) = settings_of(optimizer, names, names)
    assert (first[0].label, third.label) == ("group 0 of SGD with '000'", "group 0 of SGD with '001'")


def stepped(*, num_params: int) -> tuple[torch.optim.Optimizer, Mapping[int, str]]:
    """An optimizer that has told its settings, and that a hook on its last parameter reaches."""
    params = [nn.Parameter(torch.ones(1)) for _ in range(num_params)]
    names = dict(zip(map(id, params), map(str, range(num_params)), strict=True))
    optimizer = torch.optim.SGD(params, lr=0.1)
    params[-1].register_hook(lambda _: optimizer.zero_grad())
    settings_of(optimizer, names, names)
    return optimizer, names


@pytest.mark.parametrize("num_left", some([2, 1], most=1), ids=["", "its group has become shorter"])
def test_an_optimizer_that_a_hook_on_its_parameter_reaches_is_freed(num_left: int) -> None:
    optimizer, names = stepped(num_params=2)
    kept = weakref.ref(optimizer)
    del optimizer.param_groups[0]["params"][num_left:]
    settings_of(optimizer, names, names)
    del optimizer
    gc.collect()
    assert kept() is None


def test_words_of_the_program_and_choices_of_an_implementation_are_not_compared() -> None:
    assert dict(of(PARAMS[0], seen_on=1, foreach=True)[0].values) == dict(of(PARAMS[0])[0].values)


def test_the_first_setting_that_differs_is_named_with_two_values_and_their_ranks() -> None:
    groups = [
        GroupSettings("group 0 of SGD", (("lr", "0.1"), *more)) for more in ((), (("momentum", "0.5"),), (("momentum", "1"),))
    ]
    texts = [text_of((group,)) for group in groups]
    error = settings_differ(alike(dict(enumerate([texts[0], *texts, *texts]))), where="save_checkpoint")
    assert str(error).splitlines()[1:4] == [
        "  save_checkpoint",
        "  first difference: momentum of group 0 of SGD is not set on ranks 0, 1, 4, but 0.5 on ranks 2, 5",
        "  ranks 3, 6: other settings than both",
    ]


def test_ranks_whose_texts_did_not_arrive_are_not_compared() -> None:
    for found in ([], [Alike([0, 2], "lr: 1")], [Alike([0], None), Alike([1], "lr: 1")]):
        assert str(settings_differ(found, where="save_checkpoint")).splitlines()[1:2] == ["  save_checkpoint"]
        assert "first difference" not in str(settings_differ(found, where="save_checkpoint"))


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (("lr of group 0 of SGD with 'a': 0.1", "lr of group 0 of AdamW with 'a': 0.1"), ", but group 0 of AdamW with 'a'"),
        (("lr of group 0 of SGD with 'a': 0.1", ""), ""),
    ],
)
def test_a_rank_that_steps_another_optimizer_is_named_with_it(texts: tuple[str, str], shown: str) -> None:
    """And not with a setting, which its optimizer may have too."""
    text = str(settings_differ(alike(dict(enumerate(texts))), where="save_checkpoint"))
    assert f"\n  first difference: rank 1 does not step group 0 of SGD with 'a'{shown}\n" in text


@pytest.mark.parametrize(
    ("others", "name", "unlike"), [({"a": 1, "b": 3}, "b", "rank 1 as on ranks 0, 2"), ({}, "a", "rank 1 as on ranks 0, 2")]
)
def test_written_gradients_that_differ_are_no_settings_and_are_told_before_these(
    others: dict[str, int], name: str, unlike: str
) -> None:
    of_ranks = {"a": 1, "b": 2}, others, {"a": 1, "b": 2}
    texts = {rank: text_of(of(PARAMS[0]) + written_gradients(found)) for rank, found in enumerate(of_ranks)}
    error = written_unlike(alike(texts), where="synchronization 5")
    assert isinstance(error, ReplicaMismatch)
    assert str(error).startswith(f"the gradient of {name!r} is not the same on {unlike}, and a sharded optimizer")
    assert "\n  the step before synchronization 5\n" in str(error)
    settings = alike({0: text_of(of(PARAMS[0])), 1: text_of(of(PARAMS[0], lr=0.5))})
    assert written_unlike(settings, where="synchronization 5") is None


def test_steps_before_the_first_synchronization_keep_the_last_settings_of_each_group() -> None:
    """A run whose steps are all inside no_sync() never has one."""
    steps, other = Steps(), of(PARAMS[1])
    for rate in (0.1, 0.2, 0.3):
        for settings in (of(PARAMS[0], lr=rate), other):
            steps.add({0}, settings, is_alone=True)
    assert steps.settings == (*ALONE, *of(PARAMS[0], lr=0.3), *other)


def on_all(num_ranks: int, call: Callable[[int, Any], str]) -> list[str]:
    """What `call` returns on each rank, given its number and a group in which the ranks ask each other."""
    barrier, texts = threading.Barrier(num_ranks, timeout=30.0), dict[int, str]()

    def on_rank(rank: int) -> str:
        def ask(text: str, **_: object) -> list[Alike]:
            texts[rank] = text
            barrier.wait()
            found = [one for one in alike(texts) if one.text]
            barrier.wait()
            return found

        return call(rank, SimpleNamespace(names=range(num_ranks), watch=SimpleNamespace(ask=ask)))

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(on_rank, range(num_ranks)))


def told_to_all(of_ranks: Sequence[StepSettings]) -> list[str]:
    """The error that each replica raises."""
    return on_all(len(of_ranks), lambda rank, group: str(of_ranks[rank].difference(group, where="here")))


def test_a_replica_that_has_skipped_a_step_is_not_blamed_for_the_settings_of_others() -> None:
    replicas = [StepSettings(Mock(names=NAMES)) for _ in range(3)]
    for step in (1, 2, 3):
        for replica, rate in zip(replicas, (0.1, 0.1, 0.2 if step == 3 else 0.1), strict=True):
            replica.add(of(PARAMS[0], lr=rate))
            replica.step_ends(step)
        replicas[0].skip([id(PARAMS[0])])
    for text in told_to_all(replicas):
        assert "\n  here, step 3\n  first difference: lr of group 0 of SGD with 'd' is 0.1 on rank 1, but 0.2 on rank 2\n" in text
        assert text.endswith("del optimizer.defaults[NAME], on every rank.")


def test_skipped_steps_still_count_after_settings_that_differ() -> None:
    """The error may be caught; the learning rates of a schedule that waits differ for good."""
    replicas = [StepSettings(Mock(names=NAMES)) for _ in range(2)]
    replicas[0].skip([id(PARAMS[0])])
    before = [replica.skips for replica in replicas]
    told_to_all(replicas)
    assert [replica.skips for replica in replicas] == before
    assert before[0] != before[1]


@pytest.mark.parametrize(
    ("of_ranks", "name"),
    [
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], "b"),
        ([{"a": 1, "b": 2}, {"b": 2}], "a"),
        ([{}, {"b": 2}, {"b": 2}], "b"),
        ([{"a": 1}, {"a": 1}], "?"),
    ],
)
def test_a_frozen_parameter_that_differs_has_the_same_name_on_every_rank(of_ranks: list[dict[str, int]], name: str) -> None:
    fingerprints = [{of: torch.tensor(value) for of, value in mine.items()} for mine in of_ranks]
    found = on_all(len(of_ranks), lambda rank, group: first_that_differs(group, fingerprints[rank]))
    assert found == [name] * len(of_ranks)
