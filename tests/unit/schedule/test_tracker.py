from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import text_of
from support.strategies import lowerings, plans
from undertow.errors import ConfigError
from undertow.plan import Plan
from undertow.schedule import Arrivals, Op, OpKind, Schedule, Tracker, lower_accumulation, lower_data_parallel, schedule_from_text
from undertow.schedule.op import EXTERNAL

FILLS_BACKWARDS = """
id  lane     kind  bucket  reads     writes    after
00  compute  fill  b1      -         grad[b1]  -
01  compute  fill  b0      -         grad[b0]  -
02  compute  pack  b0      grad[b0]  grad[b0]  01
03  compute  pack  b1      grad[b1]  grad[b1]  00
04  compute  end   *       -         -         00 01
05  compute  join  *       -         -         04
"""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a tracker releases in one round."""

    at_arrival: list[tuple[int, Op]]  # with the number of arrivals so far
    at_end: list[Op]
    at_join: list[Op]

    @property
    def ops(self) -> list[Op]:
        return [*(op for _, op in self.at_arrival), *self.at_end, *self.at_join]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, how it is lowered, and which parameters arrive in which order, some of them again."""

    plan: Plan
    lower: Callable[[int], Schedule]
    arrivals: list[int]

    @property
    def schedule(self) -> Schedule:
        return self.lower(len(self.plan.buckets))

    @property
    def tracker(self) -> Tracker:
        return Tracker(self.schedule, [bucket.params for bucket in self.plan.buckets], num_params=len(self.plan.params))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    plan = draw(plans() | plans(splits=True))
    indices = range(len(plan.params))
    permuted = draw(st.permutations(indices))
    arrivals = draw(st.just(permuted) | st.lists(st.sampled_from(indices)) if indices else st.just([]))
    return Case(plan=plan, lower=draw(lowerings), arrivals=arrivals)


def play(tracker: Tracker, arrivals: Sequence[int]) -> Round:
    return Round(
        at_arrival=[(count, op) for count, param in enumerate(arrivals, start=1) for op in tracker.arrive(param)],
        at_end=list(tracker.end_backward()),
        at_join=list(tracker.join()),
    )


def labels(ops: Iterable[Op]) -> list[str]:
    return [op.label for op in ops]


def three_buckets(schedule: Schedule) -> Tracker:
    """Parameters 0 and 1 in bucket 0, 2 in bucket 1, 3 in bucket 2."""
    return Tracker(schedule, [(1, 0), (2,), (3,)], num_params=4)


def test_a_full_bucket_is_packed_and_leaves() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    assert labels(tracker.arrive(1)) == []
    assert labels(tracker.arrive(0)) == ["pack b0", "all_reduce b0"]


def test_late_bucket_holds_back_those_behind_it() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    assert labels(tracker.arrive(2)) == ["pack b1"]
    assert labels(tracker.arrive(0)) == []
    assert labels(tracker.arrive(1)) == ["pack b0", "all_reduce b0", "all_reduce b1"]


def test_end_of_backward_releases_what_never_filled_and_the_last_bucket() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    tracker.arrive(3)
    assert labels(tracker.end_backward()) == [
        "pack b0",
        "all_reduce b0",
        "pack b1",
        "all_reduce b1",
        "pack b2",
        "all_reduce b2",
    ]


def test_without_overlap_every_bucket_leaves_as_soon_as_it_is_packed_at_the_end() -> None:
    tracker = three_buckets(lower_data_parallel(3, overlap=False))
    assert play(tracker, [0, 1, 2, 3]).at_arrival == []
    tracker.reset()
    assert labels(tracker.end_backward())[:4] == ["pack b0", "all_reduce b0", "pack b1", "all_reduce b1"]


def test_join_releases_the_binds_in_order() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    tracker.end_backward()
    assert labels(tracker.join()) == ["bind b0", "bind b1", "bind b2"]


def test_an_accumulation_packs_and_binds_each_bucket_when_it_is_full() -> None:
    tracker = three_buckets(lower_accumulation(3))
    assert labels(tracker.arrive(2)) == ["pack b1", "bind b1"]
    assert labels(tracker.end_backward()) == ["pack b0", "bind b0", "pack b2", "bind b2"]
    assert labels(tracker.join()) == []


def test_joining_early_and_often_binds_nothing_that_has_not_left() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    assert [*tracker.join(), *tracker.join()] == []
    assert labels(tracker.arrive(2)) == ["pack b1"]
    assert labels(tracker.end_backward())[:3] == ["pack b0", "all_reduce b0", "all_reduce b1"]


def test_a_schedule_may_name_the_fills_in_any_order() -> None:
    schedule = schedule_from_text(FILLS_BACKWARDS)
    tracker = Tracker(schedule, [(0,), (1,)], num_params=2)
    assert labels(tracker.arrive(1)) == ["pack b1"]


@given(cases())
def test_collectives_leave_in_the_order_of_the_schedule_whatever_arrives(case: Case) -> None:
    released = play(case.tracker, case.arrivals).ops
    assert [op for op in released if op.kind is OpKind.ALL_REDUCE] == list(case.schedule.collectives)


@given(cases())
def test_every_op_of_ours_is_released_exactly_once_whatever_arrives(case: Case) -> None:
    ours = [op for op in case.schedule.ops if op.kind not in EXTERNAL]
    assert sorted(play(case.tracker, case.arrivals).ops, key=lambda op: op.id) == ours


@given(cases())
def test_an_op_is_released_after_all_that_it_comes_after(case: Case) -> None:
    released: set[int] = set()
    for op in play(case.tracker, case.arrivals).ops:
        assert all(earlier in released for earlier in op.after if case.schedule.ops[earlier].kind not in EXTERNAL)
        released.add(op.id)


@given(cases())
def test_during_backward_only_full_buckets_are_packed(case: Case) -> None:
    for count, op in play(case.tracker, case.arrivals).at_arrival:
        assert op.bucket is not None
        assert set(case.plan.buckets[op.bucket].params) <= set(case.arrivals[:count])


@given(cases())
def test_last_bucket_leaves_at_the_end_of_backward_only(case: Case) -> None:
    last = len(case.plan.buckets) - 1
    during = [op for _, op in play(case.tracker, case.arrivals).at_arrival]
    assert not any(op.kind is OpKind.ALL_REDUCE and op.bucket == last for op in during)


@given(cases())
def test_gradients_that_crossed_are_bound_after_the_join_only(case: Case) -> None:
    played = play(case.tracker, case.arrivals)
    crossed = {op.bucket for op in case.schedule.collectives}
    before_join = played.ops[: len(played.ops) - len(played.at_join)]
    assert not any(op.kind is OpKind.BIND and op.bucket in crossed for op in before_join)


@given(cases())
def test_repeated_arrivals_release_nothing(case: Case) -> None:
    tracker = case.tracker
    for param in case.arrivals:
        tracker.arrive(param)
        assert list(tracker.arrive(param)) == []


@given(cases())
def test_a_second_end_or_join_releases_nothing(case: Case) -> None:
    tracker = case.tracker
    play(tracker, case.arrivals)
    assert [*tracker.end_backward(), *tracker.join()] == []


@given(cases(), st.data())
def test_a_round_after_a_reset_is_like_the_first(case: Case, data: st.DataObject) -> None:
    tracker = case.tracker
    before = data.draw(st.integers(0, len(case.arrivals)))
    for param in case.arrivals[:before]:
        tracker.arrive(param)
    tracker.reset()
    assert play(tracker, case.arrivals) == play(case.tracker, case.arrivals)


@given(cases())
def test_missing_is_what_has_not_arrived(case: Case) -> None:
    tracker = case.tracker
    for param in case.arrivals:
        tracker.arrive(param)
    for index, bucket in enumerate(case.plan.buckets):
        assert tracker.arrivals.missing(index) == set(bucket.params) - set(case.arrivals)


@given(cases())
def test_arrived_is_what_came_since_the_reset(case: Case) -> None:
    tracker = case.tracker
    play(tracker, case.arrivals)
    assert tracker.arrivals.arrived == set(case.arrivals)
    tracker.reset()
    assert tracker.arrivals.arrived == set()


@pytest.mark.parametrize(("arrivals", "has_repeats"), [([], False), ([0, 2], False), ([0, 2, 0], True)])
def test_a_repeated_arrival_is_noticed(arrivals: list[int], has_repeats: bool) -> None:
    tracker = three_buckets(lower_data_parallel(3))
    for param in arrivals:
        tracker.arrive(param)
    assert tracker.arrivals.has_repeats == has_repeats


def test_after_learning_a_bucket_waits_for_the_repeats_of_its_parameters() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    play(tracker, [0, 1, 0])
    tracker.arrivals.learn_repeats()
    tracker.reset()
    assert [labels(tracker.arrive(param)) for param in (0, 1, 0)] == [[], [], ["pack b0", "all_reduce b0"]]
    assert not tracker.arrivals.has_repeats


def test_a_parameter_whose_learned_repeat_is_outstanding_is_not_missing() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    play(tracker, [0, 1, 0])
    tracker.arrivals.learn_repeats()
    tracker.reset()
    tracker.arrive(0)
    assert (tracker.arrivals.arrived, tracker.arrivals.missing(0)) == ({0}, {1})


def test_repeats_that_do_not_come_again_leave_the_bucket_to_the_end_of_backward() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    play(tracker, [0, 1, 0])
    tracker.arrivals.learn_repeats()
    tracker.reset()
    played = play(tracker, [0, 1, 2, 3])
    assert labels(op for _, op in played.at_arrival) == ["pack b1"]
    assert labels(played.at_end)[:3] == ["pack b0", "all_reduce b0", "all_reduce b1"]


def test_learning_from_a_round_without_repeats_forgets_them() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    for arrivals in ([0, 1, 0], [0, 1]):
        play(tracker, arrivals)
        tracker.arrivals.learn_repeats()
        tracker.reset()
    assert play(tracker, [0, 1]).at_arrival == play(three_buckets(lower_data_parallel(3)), [0, 1]).at_arrival


@given(cases())
def test_learned_repeats_change_neither_the_ops_nor_the_order_of_collectives(case: Case) -> None:
    tracker = case.tracker
    play(tracker, [*case.arrivals, *case.arrivals])
    tracker.arrivals.learn_repeats()
    tracker.reset()
    released = play(tracker, case.arrivals).ops
    assert [op for op in released if op.kind is OpKind.ALL_REDUCE] == list(case.schedule.collectives)
    assert sorted(op.id for op in released) == [op.id for op in case.schedule.ops if op.kind not in EXTERNAL]


def test_the_first_arrival_of_every_traversal_is_told_with_its_parameter() -> None:
    told: list[tuple[str, int, int]] = []
    traversal = 7
    arrivals = Arrivals(
        [(1, 0), (2,)],
        num_params=3,
        on_full=lambda bucket: told.append(("full", bucket, -1)),
        traversal=lambda: traversal,
        on_traversal=lambda traversal, param: told.append(("traversal", traversal, param)),
    )
    arrivals.arrive(2)
    assert told == [("traversal", 7, 2), ("full", 1, -1)]
    traversal = 8
    for param in (1, 0, 2, 0):
        arrivals.arrive(param)
    assert told[2:] == [("traversal", 8, 1), ("full", 0, -1)]
    traversal = 7
    for param in (0, 1):  # repeated, in a traversal that was left and is told anew
        arrivals.arrive(param)
    assert told[4:] == [("traversal", 7, 0)]


def test_a_forgotten_traversal_is_told_again() -> None:
    told: list[int] = []
    arrivals = Arrivals([(0, 1)], num_params=2, on_full=int, on_traversal=lambda _, param: told.append(param))
    for forget, param in ((False, 0), (False, 1), (True, 0), (False, 1)):
        if forget:
            arrivals.forget_traversal()
        arrivals.arrive(param)
    assert told == [0, 0]


def test_a_round_may_be_reset_when_its_first_gradient_is_told() -> None:
    """What was reset counts the gradient that is just being told."""
    arrivals = Arrivals([(0, 1)], num_params=2, on_full=int, on_traversal=lambda *_: arrivals.reset())
    arrivals.note(1)
    arrivals.arrive(0)
    assert (arrivals.arrived, arrivals.missing(0)) == ({0}, {1})


def test_what_is_only_noted_has_arrived_and_releases_nothing() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    for param in (0, 1, 1):
        tracker.arrivals.note(param)
    assert tracker.arrivals.arrived == {0, 1}
    assert tracker.arrivals.missing(0) == frozenset()
    assert not tracker.arrivals.has_repeats
    assert labels(tracker.end_backward())[:2] == ["pack b0", "all_reduce b0"]


def test_arrivals_know_who_listens() -> None:
    tracker = three_buckets(lower_data_parallel(3))
    assert tracker.arrivals.listener is tracker
    assert Arrivals([], num_params=0, on_full=lambda _: None).listener is None


def test_a_parameter_in_no_bucket_is_an_error() -> None:
    assert text_of(ConfigError, lambda: Tracker(lower_data_parallel(2), [(0,), (2,)], num_params=3)) == (
        "parameter 1 belongs to no bucket.\n  Put every parameter into one bucket."
    )


def in_pieces(schedule: Schedule) -> Tracker:
    """Parameter 0 in every bucket, 1 in bucket 0, 2 in bucket 1."""
    return Tracker(schedule, [(1, 0), (0, 2), (0,)], num_params=3)


def test_a_parameter_in_pieces_counts_for_each_of_its_buckets_in_their_order() -> None:
    full: list[int] = []
    arrivals = Arrivals([(1, 0), (0, 2), (0,)], num_params=3, on_full=full.append)
    arrivals.arrive(2)
    assert full == []
    arrivals.arrive(0)
    assert full == [1, 2]
    arrivals.arrive(1)
    assert full == [1, 2, 0]


def test_all_buckets_are_counted_before_one_of_them_is_told_of() -> None:
    missing: list[frozenset[int]] = []
    arrivals = Arrivals([(0,), (0, 1)], num_params=2, on_full=lambda _: missing.append(arrivals.missing(1)))
    arrivals.arrive(1)
    arrivals.arrive(0)
    assert missing == [frozenset(), frozenset()]


def test_pieces_leave_in_the_order_of_their_buckets() -> None:
    tracker = in_pieces(lower_data_parallel(3))
    assert labels(tracker.arrive(2)) == []
    assert labels(tracker.arrive(0)) == ["pack b1"]
    assert labels(tracker.arrive(1)) == ["pack b0", "all_reduce b0", "all_reduce b1"]
    assert labels(tracker.end_backward()) == ["pack b2", "all_reduce b2"]


def test_a_parameter_in_pieces_is_missing_in_each_of_its_buckets() -> None:
    tracker = in_pieces(lower_data_parallel(3))
    tracker.arrive(2)
    assert [tracker.arrivals.missing(bucket) for bucket in range(3)] == [{0, 1}, {0}, {0}]
    assert tracker.arrivals.arrived == {2}
    tracker.arrive(0)
    assert [tracker.arrivals.missing(bucket) for bucket in range(3)] == [{1}, set(), set()]
    assert tracker.arrivals.arrived == {0, 2}


def test_a_noted_parameter_in_pieces_releases_nothing_and_is_missing_nowhere() -> None:
    tracker = in_pieces(lower_data_parallel(3))
    for param in (0, 0, 1):
        tracker.arrivals.note(param)
    assert [tracker.arrivals.missing(bucket) for bucket in range(3)] == [set(), {2}, set()]
    assert (tracker.arrivals.arrived, tracker.arrivals.has_repeats) == ({0, 1}, False)
    assert labels(tracker.arrive(2)) == ["pack b1"]


def test_after_learning_every_bucket_waits_for_the_repeats_of_a_parameter_in_pieces() -> None:
    tracker = in_pieces(lower_data_parallel(3))
    play(tracker, [0, 1, 2, 0])
    assert tracker.arrivals.has_repeats
    tracker.arrivals.learn_repeats()
    tracker.reset()
    assert [labels(tracker.arrive(param)) for param in (0, 1, 2)] == [[], [], []]
    assert labels(tracker.arrive(0)) == ["pack b0", "all_reduce b0", "pack b1", "all_reduce b1"]
    assert not tracker.arrivals.has_repeats
    assert labels(tracker.arrive(0)) == []
    assert tracker.arrivals.has_repeats


def test_other_buckets_may_hold_a_parameter_in_pieces_or_whole() -> None:
    full: list[int] = []
    arrivals = Arrivals([(0, 1)], num_params=2, on_full=full.append)
    for buckets, filled in (([(0,), (0, 1)], [0, 1]), ([(1,), (0,)], [1, 0])):
        arrivals.regroup(buckets)
        full.clear()
        arrivals.arrive(0)
        arrivals.arrive(1)
        assert full == filled
