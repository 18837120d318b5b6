"""A step that is skipped changes nothing."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.checkpoints import require_equal
from support.errors import text_of
from support.strategies import spec
from undertow.buckets.facts import Reading
from undertow.config import SyncConfig
from undertow.engine import nonfinite
from undertow.engine.checks import Checks, Loads, _PlaceReport
from undertow.engine.nonfinite import Finding, NonFinite
from undertow.engine.round import Round, RoundKind, Terms
from undertow.errors import Desync, NonFiniteGradient
from undertow.plan import plan_from_groups

PLAN = plan_from_groups([spec("weight", 6)], ((0,),), num_ranks=2)
# LBFGS needs a closure, with which a step cannot be skipped.
OPTIMIZERS = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name not in ("Optimizer", "LBFGS")
)


class Counting(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 0, "total": torch.zeros(())})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.calls += 1
        (group,) = self.param_groups
        group["steps"] += 1
        group["total"] += 1
        for param in group["params"]:
            self.state[param]["steps"] = group["steps"]


def numbers(policy: str = "skip", *, is_found: bool) -> NonFinite:
    judge = NonFinite(policy, rank=1, find_alone=lambda: None, has_own=lambda _: False, find_own=lambda _: None)
    judge.round_ends(a_round(is_found), PLAN)
    return judge


def a_round(is_found: bool, *, number: int = 4, ranks: tuple[int, ...] = (1,), keeps_earlier: bool = False) -> Round:
    this = Round(kind=RoundKind.REDUCE, terms=Terms(number=number))
    this.found.keeps_earlier = keeps_earlier
    if is_found:
        this.found.nonfinite[0] = frozenset({0})
        this.found.readings.append(Reading(used=frozenset({0}), ranks_differ=False, flags={"nonfinite": ranks}))
    return this


@contextlib.contextmanager
def judged(optimizer: torch.optim.Optimizer, judge: NonFinite) -> Iterator[None]:
    """With the hooks that every optimizer of our parameters has."""
    before = optimizer.register_step_pre_hook(judge.before_step)
    after = optimizer.register_step_post_hook(lambda optimizer, *_: judge.step_ends(optimizer))
    yield
    before.remove()
    after.remove()


def stepped(optimizer: torch.optim.Optimizer, judge: NonFinite) -> None:
    with judged(optimizer, judge):
        optimizer.step()


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.randn(3))], lr=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_steps", [0, 2])
def test_every_optimizer_of_torchs_is_left_as_it_was(name: str, num_steps: int) -> None:
    param, more = nn.Parameter(torch.randn(3, 2)), {"momentum": 0.9, "weight_decay": 0.1} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, name)([param], lr=0.1, **more)
    param.grad = torch.ones_like(param).to_sparse(1) if name == "SparseAdam" else torch.ones_like(param)
    for _ in range(num_steps):
        optimizer.step()
    before = copy.deepcopy({"param": param.detach(), "optimizer": optimizer.state_dict()})
    stepped(optimizer, numbers(is_found=True))
    require_equal({"param": param.detach(), "optimizer": optimizer.state_dict()}, before)
    stepped(optimizer, numbers(is_found=False))
    assert not torch.equal(param, before["param"])


def test_steps_that_an_optimizer_counts_elsewhere_are_not_counted() -> None:
    param = nn.Parameter(torch.randn(3))
    param.grad, optimizer = torch.ones(3), Counting([param])
    optimizer.step()
    stepped(optimizer, numbers(is_found=True))
    (group,) = optimizer.param_groups
    assert (optimizer.calls, group["steps"], float(group["total"]), optimizer.state[param]["steps"], group["params"]) == (
        1,
        1,
        1.0,
        1,
        [param],
    )


def test_a_scheduler_does_not_take_a_skipped_step_for_none() -> None:
    optimizer = sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    stepped(optimizer, numbers(is_found=True))
    scheduler.step()  # would warn, and warnings are errors here
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)  # 0.1 * 0.1 in doubles


class Around(torch.optim.Optimizer):
    """Steps another optimizer of the same parameters, or raises."""

    def __init__(self, inner: torch.optim.Optimizer, error: type[BaseException] | None = None) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.error = inner, error
        self.judge: NonFinite | None = None

    def step(self, closure: None = None) -> None:
        if self.error is not None:
            raise self.error
        assert self.judge is not None
        stepped(self.inner, self.judge)


def with_grad(optimizer: torch.optim.Optimizer, value: float) -> nn.Parameter:
    (group,) = optimizer.param_groups
    (param,) = group["params"]
    param.grad = torch.full_like(param, value)
    return param


def looking_at(param: Tensor) -> NonFinite:
    """As a rank alone looks at the gradient when an optimizer steps."""
    found = Finding(("weight",), (0,), "here")
    return NonFinite(
        "skip",
        rank=0,
        find_alone=lambda: None if param.grad is None or param.grad.isfinite().all() else found,
        has_own=lambda _: False,
        find_own=lambda _: None,
    )


def test_an_optimizer_within_one_whose_step_is_skipped_skips_too() -> None:
    inner = Counting([nn.Parameter(torch.randn(3))])
    param, outer = with_grad(inner, torch.nan), Around(inner)
    outer.judge = looking_at(param)
    stepped(outer, outer.judge)
    assert (inner.param_groups[0]["steps"], len(inner.state), outer.judge.num_skipped) == (0, 0, 1)
    assert param.grad is not None  # it is there again
    with_grad(inner, 1.0)
    stepped(outer, outer.judge)
    assert (inner.param_groups[0]["steps"], outer.judge.num_skipped) == (1, 1)


def test_two_models_of_an_optimizer_that_both_skip_leave_the_gradients_as_they_were() -> None:
    optimizer = sgd()
    param, first, second = with_grad(optimizer, torch.nan), numbers(is_found=True), numbers(is_found=True)
    with judged(optimizer, first), judged(optimizer, second):
        optimizer.step()
    assert param.grad is not None


@pytest.mark.parametrize("has_new", [False, True])
def test_gradients_are_there_again_in_the_step_after_a_skipped_one_that_has_raised(has_new: bool) -> None:
    outer = Around(sgd(), KeyboardInterrupt)
    param = with_grad(outer, torch.nan)
    judge = looking_at(param)
    with judged(outer, judge):
        with pytest.raises(KeyboardInterrupt):
            outer.step()
        outer.error, outer.judge = None, judge
        if has_new:
            with_grad(outer, 1.0)
        before = param.detach().clone()
        outer.step()
    assert torch.equal(param, before) is not has_new
    assert param.grad is not None
    assert bool(param.grad.isfinite().all()) is has_new


def test_a_step_with_found_inf_is_the_scalers() -> None:
    optimizer = sgd()
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # as torch's GradScaler does
    assert not any(numbers(policy, is_found=True).skips(optimizer) for policy in ("raise", "skip"))


def test_what_was_found_counts_until_a_round_that_does_not_add_to_it() -> None:
    optimizer, judge = sgd(), numbers(is_found=True)
    assert [judge.skips(optimizer), judge.skips(optimizer)] == [True, True]
    skips = []
    for this in (a_round(False, keeps_earlier=True), a_round(False), a_round(True)):
        judge.round_ends(this, PLAN)
        skips.append((judge.skips(optimizer), judge.num_skipped))
    assert skips == [(True, 1), (False, 1), (True, 2)]  # the first round belongs to the step that was counted


def test_the_first_of_several_rounds_of_a_step_is_named() -> None:
    optimizer, judge = sgd(), numbers("raise", is_found=True)
    judge.round_ends(a_round(True, number=5, ranks=(0, 1), keeps_earlier=True), PLAN)  # with the mean of the one before
    text = "the gradient of 'weight' is not finite (NaN or Inf) on rank 1.\n  synchronization 4, bucket 0\n"
    assert text_of(NonFiniteGradient, lambda: judge.skips(optimizer)).startswith(text)
    judge.round_ends(a_round(True, number=6), PLAN)
    assert "on rank 1.\n  synchronization 6," in text_of(NonFiniteGradient, lambda: judge.skips(optimizer))


@pytest.mark.parametrize(("policy", "every", "wanted"), [("ignore", None, ""), ("ignore", 3, "12 45"), ("skip", None, "012345")])
def test_the_end_of_a_round_waits_for_trailers_if_the_next_step_needs_them(policy: str, every: int | None, wanted: str) -> None:
    """The round before a comparison may be one: a synchronization that changes the parameters counts as two."""
    group = SimpleNamespace(rank=0, num_ranks=2)
    group.everyone, group.is_on_mesh = group, False
    config = SyncConfig(nonfinite=policy, check_replicas_every=every)
    checks = Checks(SimpleNamespace(group=group), config)  # type: ignore[arg-type]
    assert [number for number in range(6) if checks.must_be_read(number)] == list(map(int, wanted.replace(" ", "")))


@pytest.mark.parametrize("is_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("how", ["its backward failed", "a gradient was cleared"])
def test_a_failed_backward_is_a_fault_for_all_places_of_a_mesh_if_they_report_rarely(how: str, is_host: bool) -> None:
    told, sent = list[Any](), list[Any]()
    group: Any = SimpleNamespace(rank=1, name=2, num_ranks=2, is_on_mesh=True, hardware=SimpleNamespace(is_host=is_host))
    group.is_broken, group.tell_places = False, told.append
    group.everyone = SimpleNamespace(device=torch.device("cpu"), all_gather=lambda row, _: sent.append(row.tolist()))
    placements = SimpleNamespace(take_order=list, axis=())
    compiled = SimpleNamespace(digest_at_all_places=0, at_all_places=[])
    members = SimpleNamespace(digest_of_frozen=0, frozen_at_all_places=[])
    plans: Any = SimpleNamespace(group=group, placements=placements, compiled=compiled, members=members)
    checks = Checks(plans, SyncConfig())
    this = Round(kind=RoundKind.REDUCE, terms=Terms(number=7), has_failed=how == "its backward failed")
    if not this.has_failed:
        this.found.taken.add(0)
    checks.report_to_places(this, is_sound=False, then=None)
    text = (
        "backward failed on rank 2.\n  synchronization 7\n"
        "  Ranks at other places of the mesh may have made the step. Find the cause in the log of that rank, and restart from "
        "a checkpoint."
    )
    assert list(map(str, told)) == ([] if is_host else [text])
    assert [row[-1] for row in sent] == ([1] if is_host else [])  # the host's report has it


@pytest.mark.parametrize("field", ["order", "params"])
def test_a_difference_between_places_is_gathered_when_its_error_is_raised_and_not_when_it_is_heard(field: str) -> None:
    """Inside a backward, ranks may be in different models, where two gathers would wait for each other."""
    gathered, are_sound = list[str](), list[bool]()

    def all_gather(row: Tensor, what: str) -> Any:
        other = row.clone()
        if not gathered:
            other[_PlaceReport._fields.index(field)] += 1
        gathered.append(what)
        return SimpleNamespace(result=lambda: torch.stack((row, other)))

    group: Any = SimpleNamespace(rank=0, name=0, num_ranks=2, is_on_mesh=True, hardware=SimpleNamespace(is_host=True))
    group.is_broken, group.everyone = False, SimpleNamespace(device=torch.device("cpu"), all_gather=all_gather)
    placements = SimpleNamespace(take_order=lambda: ["weight"], axis=())
    compiled = SimpleNamespace(digest_at_all_places=0, at_all_places=[])
    members = SimpleNamespace(digest_of_frozen=0, frozen_at_all_places=[])
    plans: Any = SimpleNamespace(group=group, placements=placements, compiled=compiled, members=members)
    checks = Checks(plans, SyncConfig())
    this = Round(kind=RoundKind.REDUCE, terms=Terms(number=7))
    checks.report_to_places(this, is_sound=True, then=lambda *, is_sound: are_sound.append(is_sound))
    checks.hear()
    checks.hear()
    assert (len(gathered), are_sound) == (1, [False])
    if field == "order":
        assert text_of(Desync, checks.require_alike).startswith("gradients have arrived in different orders")
        assert (len(gathered), are_sound) == (3, [False])  # the sizes of the lists, and the lists


def test_a_rank_that_skips_its_own_step_tells_it_itself(caplog: pytest.LogCaptureFixture) -> None:
    own = Finding(("first.weight",), (1,), "a step inside accumulate() or no_sync()", is_own=True)
    judge = NonFinite("skip", rank=1, find_alone=lambda: None, has_own=lambda _: True, find_own=lambda _: own)
    assert judge.skips(sgd(), accumulates=True)
    assert [record.message for record in caplog.records] == [
        "the gradient of 'first.weight' is not finite (NaN or Inf) on rank 1. The step is skipped on this rank only.\n"
        "  a step inside accumulate() or no_sync()"
    ]


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_what_one_rank_of_a_mesh_finds_in_its_own_gradients_stops_that_step_everywhere(
    policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This rank has found nothing itself, and the next step is free again."""
    own = Finding(("first.weight",), (1,), "a step inside accumulate() or no_sync()", is_own=True)
    of_ranks = [None, dataclasses.asdict(own)]
    monkeypatch.setattr(nonfinite, "any_rank", lambda *_: any(of_ranks))
    monkeypatch.setattr(nonfinite, "gather_json", lambda *_, **__: of_ranks)
    judge = NonFinite(policy, rank=0, find_alone=lambda: None, has_own=lambda _: False, find_own=lambda _: None)
    judge.agree = partial(nonfinite.found_by_any, None)  # type: ignore[arg-type]
    if policy == "raise":
        text = text_of(NonFiniteGradient, lambda: judge.skips(sgd(), accumulates=True))
        assert "  No rank has taken the step." in text
    else:
        assert judge.skips(sgd(), accumulates=True)
        assert "The step is skipped on every rank." in caplog.text
    monkeypatch.setattr(judge, "agree", lambda finding: finding)
    assert not judge.skips(sgd())


def compared(loading: dict[int, tuple[int, ...]], delays: tuple[int, ...], *, is_host: bool = False) -> list[list[int]]:
    """For each rank the rounds in which it compares parameters.

    `loading` has the ranks that load before a round. A rank reads a round's trailers when it ends if it tells of loads
    itself, and else so many rounds later, as on a device.
    """
    ranks = range(len(delays))
    group = SimpleNamespace(names=list(ranks), hardware=SimpleNamespace(is_host=is_host))
    loads = [Loads(group) for _ in ranks]  # type: ignore[arg-type]
    found: list[list[int]] = [[] for _ in ranks]
    unread: list[list[tuple[int, Reading]]] = [[] for _ in ranks]
    for number in range(20):
        for rank in loading.get(number, ()):
            loads[rank].begins()
        telling = [rank for rank in ranks if loads[rank].are_known]
        said = {"used": frozenset(), "ranks_differ": False, "flags": {"loaded": tuple(telling)}}
        for rank, delay in zip(ranks, delays, strict=True):
            this = Round(kind=RoundKind.REDUCE, terms=Terms(number=number))
            this.found.readings += [overdue for at, overdue in unread[rank] if at <= number]
            unread[rank] = [each for each in unread[rank] if each[0] > number]
            if is_host or rank in telling:
                # the host has waited for this round's trailers, so earlier ones are there when the next round begins
                this.found.readings.append(Reading(**said))
                unread[rank] = [(number + 1, overdue) for _, overdue in unread[rank]]
            elif telling:
                unread[rank].append((number + delay, Reading(**said, is_overdue=True)))
            loads[rank].round_ends(this)
            if loads[rank].are_told_by_all(this):
                loads[rank].settle(number)
                found[rank].append(number)
    return found


@pytest.mark.parametrize("ranks", [(0,), (2,), (0, 1, 2)])
def test_all_ranks_on_the_host_compare_once_in_the_round_after_a_load(ranks: tuple[int, ...]) -> None:
    assert compared({3: ranks, 9: ranks}, (1, 1, 1), is_host=True) == [[3, 9]] * 3


@pytest.mark.parametrize("delays", [(1, 1, 1), (1, 2, 3), (4, 1, 2), (3, 3, 1)])
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_all_ranks_on_devices_compare_once_in_the_same_round(ranks: tuple[int, ...], delays: tuple[int, ...]) -> None:
    first, *others = compared({3: ranks}, delays)
    assert others == [first] * 2
    assert len(first) == 1
    assert first[0] == 3 if len(ranks) == 3 else first[0] > 3


def test_a_load_after_a_comparison_is_compared_again() -> None:
    first, *others = compared({3: (0, 1, 2), 4: (1,)}, (1, 2, 2))
    assert (others, len(first)) == ([first] * 2, 2)
