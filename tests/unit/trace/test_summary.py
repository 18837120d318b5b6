"""The report of steps whose times are known, their overlap, and what collectives cost in them."""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.errors import refusal
from support.records import GATHERS, record, report, row
from support.strategies import spec
from undertow.lab.cost import curve_from_samples
from undertow.lab.samples import Transfer, cost_samples
from undertow.plan import plan_from_groups
from undertow.trace import (
    Event,
    Overlap,
    StepReport,
    Trace,
    limit_us,
    overlap_of,
    summarize,
    union_us,
)
from undertow.trace.record import wires_of

LATE = (record().buckets[0], row(1, 60_000, 99_000, (60_000, 99_000)))
VARIED = ((100_000, LATE), (101_000, record().buckets), (99_000, record().buckets))
PLAIN, SHARDED, ALONE = report(record()), report(record(gathers=GATHERS)), report(record(buckets=(), busy_ms=()))
# A report, and the values of some of its fields.


@pytest.mark.parametrize(
    ("found", "fields"),
    [
        pytest.param(
            PLAIN,
            {
                "step_ms": 100.0,
                "forward_ms": 20.0,
                "backward_ms": 40.0,
                "rest_ms": 20.0,
                "communication_ms": 40.0,
                "exposed_ms": 20.0,
                "overlap": 0.5,
                "synchronized_ms": 80.0,
                "limit_ms": 80.0,
            },
            id="a step is split into forward, backward, hidden and exposed",
        ),
        pytest.param(
            SHARDED,
            {
                "forward_ms": 15.0,  # 5 of 20 ms are a wait
                "rest_ms": 20.0,
                "communication_ms": 60.0,
                "exposed_ms": 25.0,
                "gather_ms": 20.0,
                "gather_exposed_ms": 5.0,
                "limit_ms": 80.0,  # of the gradients
            },
            id="gathers are communication and have figures of their own",
        ),
        pytest.param(
            report(*(record(step=step, step_us=100_000 + us) for step, us in enumerate((0, 4_000, 90_000)))),
            {"step": 1, "step_ms": 104.0, "step_p50_ms": 104.0, "step_p95_ms": 190.0, "num_steps": 3},
            id="times are of the step that is nearest to the medians",
        ),
        pytest.param(
            # The waits of the second are nearest to the medians, although its step is not.
            report(*(record(step=at, step_us=us, buckets=rows) for at, (us, rows) in enumerate(VARIED))),
            {"step": 1, "step_p50_ms": 100.0, "exposed_ms": 20.0},
            id="one step, of which all times are typical",
        ),
        pytest.param(
            report(
                record(
                    cpu_us=12_000,
                    backwards=((20_000.0, 62_000.0),),
                    buckets=(row(0, 30_000, 50_000, (62_000, 62_000), ready_us=29_000),),
                )
            ),
            {"processors_ms": 1.0, "exposed_ms": 0.0},
            id="packing takes processors",
        ),
        pytest.param(
            report(record(busy_ms=(50.0, 65.0))),
            {"late_rank_ms": 15.0, "slowest_rank": 1},
            id="the wait for a slower rank is told from the wait for the network",
        ),
        pytest.param(
            report(record(rank=1, busy_ms=(50.0, 65.0)), rank=1),
            {"late_rank_ms": 0.0, "exposed_ms": 20.0},
            id="the slowest rank itself waits for nobody",
        ),
        pytest.param(ALONE, {"overlap": None, "buckets": (), "slowest_rank": None}, id="without communication"),
    ],
)
def test_a_report_splits_a_typical_step_into_its_parts(found: StepReport, fields: dict[str, Any]) -> None:
    assert {name: getattr(found, name) for name in fields} == fields


def test_gathers_have_rows() -> None:
    assert (
        [(it.index, it.launched_ms, it.done_ms) for it in SHARDED.gathers],
        [(it.num_bytes, it.wire_ms, it.waited_ms) for it in SHARDED.gathers],
    ) == ([(1, -10, 5), (0, -9, 10)], [(4_000_000, 15, 5), (8_000_000, 5, 0)])
    # A step without gathers, whose optimizer's step the scaler has skipped, is not typical.
    assert [it.waited_ms for it in report(record(), record(step=1, gathers=GATHERS)).gathers] == [5, 0]


@pytest.mark.parametrize(
    ("rows", "wires"),
    [
        ([(0, 80), (10, 100), (20, 50), (30, 60)], [((0, 80), 40), ((80, 100), 20), ((20, 50), 30), ((50, 60), 10)]),
        ([(0, 50), (5, 60), (6, 70)], [((0, 50), 50), ((50, 60), 10), ((60, 70), 10)]),
        ([(0, 50), (5, 50)], [((0, 50), 5), ((5, 50), 45)]),
        ([(51, 50)], [((50, 50), 0)]),
    ],
    ids=["all of these", "none overtakes another", "two end together", "a clock that jumped"],
)
def test_the_link_works_on_the_bucket_that_ends_first(rows: list[tuple[int, int]], wires: list[tuple[Any, int]]) -> None:
    assert wires_of([row(0, launched, done, (0, 0)) for launched, done in rows]) == wires


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=9))
def test_times_on_the_link_add_up_however_buckets_end(drawn: list[tuple[int, int]]) -> None:
    flights = [(launched, launched + took) for launched, took in sorted(drawn)]
    wires = wires_of([row(0, launched, done, (0, 0)) for launched, done in flights])
    assert sum(wire for _, wire in wires) == union_us(flights) == union_us(interval for interval, _ in wires)
    assert all(launched <= at <= stop == done for (launched, done), ((at, stop), _) in zip(flights, wires, strict=True))
    assert all(0 <= wire <= stop - at for (at, stop), wire in wires)
    pairs = [(one, two) for (one, _), (two, _) in combinations(sorted(wires), 2)]
    assert all(one[1] <= two[0] or two[1] <= one[1] or one[0] == two[0] for one, two in pairs)


SIX = [record(step=step, busy_ms=(50.0, 65.0)) for step in range(6)]
CROWDED = (row(0, 30_000, 60_000, (60_000, 60_000)), row(1, 60_000, 80_000, (60_000, 80_000)))
EMBEDDING = plan_from_groups([spec(name, 1_000_000) for name in ("head", "body", "wte.weight")], [(0, 1), (2,)], num_ranks=2)
ONE_BUCKET = summarize(
    [record(step=step, buckets=(row(0, 60_000, 80_000, (60_000, 80_000)),)) for step in range(6)],
    plan_from_groups(EMBEDDING.params, [(0, 1, 2)], num_ranks=2),
    rank=0,
)


def six(**changes: Any) -> StepReport:
    return report(*(record(step=step, **changes) for step in range(6)))


HIDDEN = "Well hidden: the step waits for communication in {}% of its time. There is nothing to do."
WAITED_FOR = (
    "Another rank waits {} ms for rank {}, the slowest in this step: look at its input pipeline, at the length of its batches, "
    "and at what else runs on its machine."
)
OF_LAST = "explain() gives the reasons for these buckets. To hide more, "
AT_THE_END = (
    f"Gradients leave as soon as these buckets are full, and the last of {{}}, with {{}}, is full when backward ends: {OF_LAST}"
)
NETWORK = (
    "The network is the limit: communication of gradients takes {} ms, longer than the 40.0 ms of backward: simulate another "
    "link with undertow simulate, or "
)
INT8 = 'set wire="int8" (or "auto") to send fewer bytes (undertow docs slow-networks).'
INT8_TOO = 'set wire="int8" (or "auto") and param_wire="int8" to send fewer bytes (undertow docs slow-networks).'
TOO_SMALL = (
    "Too small to judge: the step waits 0.80 ms for communication, and waits below 1 ms depend on what else the processors do."
)
WAITS_LITTLE = (row(0, 30_000, 64_000, (60_000, 64_000)),)
ANOTHER_ORDER = row(0, 60_000, 70_000, (60_000, 70_000), ready_us=30_000)
ADVICE: dict[str, tuple[StepReport, str]] = {
    "no steps": (report(), "No step is recorded yet: run a training step, and leave record on."),
    "one rank": (ALONE, "Nothing is sent, so nothing is waited for: all gradients stay where they are."),
    "too few steps": (PLAIN, "Too few steps to judge: 1 under this plan. Train at least ten more."),
    "well hidden": (six(step_us=1e6), HIDDEN.format("2.0")),
    # Half of the exposed time, as a cause, would be 2.5 % of the step.
    "good, and processors have a part": (six(step_us=4e5, cpu_us=12_000), HIDDEN.format("5.0")),
    "good, and a rank is late": (six(step_us=2e5, busy_ms=(50.0, 65.0)), HIDDEN.format("10.0")),
    # Rank 0 waits 2 % of its step, and rank 1 40 ms for it.
    "others wait for this rank": (six(step_us=2e5, busy_ms=(65.0, 25.0), buckets=WAITS_LITTLE), WAITED_FOR.format("40.0", 0)),
    # Rank 0 waits 15 ms for rank 1, and rank 2 40 ms.
    "another rank waits for a third one": (six(step_us=2e5, busy_ms=(50.0, 65.0, 25.0)), WAITED_FOR.format("40.0", 1)),
    # No rank waits longer than rank 0.
    "this rank waits longest": (six(step_us=2e5, busy_ms=(25.0, 65.0, 50.0)), HIDDEN.format("10.0")),
    # Less than a tenth of the step.
    "others wait little": (six(step_us=2e5, busy_ms=(65.0, 46.0), buckets=WAITS_LITTLE), HIDDEN.format("2.0")),
    # The step of rank 0 is poor too, but the other one's is worse.
    "others wait longer than this rank": (six(busy_ms=(90.0, 65.0)), WAITED_FOR.format("25.0", 0)),
    # 5 of the 25 ms are this rank's own wait for parameters, and the rest is no longer than its exposed time.
    "a wait for parameters holds nobody up": (
        six(busy_ms=(90.0, 65.0), gathers=GATHERS),
        AT_THE_END.format(2, "stem") + INT8_TOO,
    ),
    "too small": (
        six(buckets=(row(0, 59_000, 60_800, (60_000, 60_800)),), step_us=2_000, cpu_us=700),
        TOO_SMALL,
    ),
    "another rank's wait is too small": (
        six(buckets=(row(0, 59_000, 60_800, (60_000, 60_800)),), step_us=2_000, cpu_us=700, busy_ms=(1.9, 1.0)),
        TOO_SMALL,
    ),
    "a late rank": (
        report(*SIX),
        "75% of the exposed time is waiting for a late rank, in this step rank 1: look at its input pipeline, at the length "
        "of its batches, and at what else runs on its machine.",
    ),
    "processors": (
        six(cpu_us=12_000),
        "Processors are the limit: packing, copying and adding gradients take 12.0 ms of a step of 100.0 ms. "
        "Leave a core to each rank's communication, or use fewer compute threads or ranks on this machine.",
    ),
    "a bucket that a setting fixes": (
        replace(ONE_BUCKET, why_fixed="bucket_cap_mb=25 is set"),
        "100% of the exposed time is for bucket 0, which holds 100% of the gradients and is full late in backward. No other "
        "plan is tried (bucket_cap_mb=25 is set): remove that setting, or choose smaller buckets.",
    ),
    "one planned bucket": (ONE_BUCKET, AT_THE_END.format(1, "head") + INT8),
    "the network": (six(buckets=CROWDED), NETWORK.format("50.0") + INT8),
    "a last bucket that is full when backward ends": (
        six(buckets=(CROWDED[0], row(1, 60_000, 78_000, (60_000, 78_000))), busy_ms=(50.0, 58.5)),
        AT_THE_END.format(2, "stem") + INT8,
    ),
    "another plan": (
        six(buckets=(ANOTHER_ORDER, row(1, 60_000, 80_000, (70_000, 80_000)))),
        "Gradients are synchronized 1.14 times as late as these buckets allow: explain() gives the reasons for this plan.",
    ),
    # Another plan saves 10 ms of 250.
    "a plan that is worth little": (
        six(buckets=(ANOTHER_ORDER, row(1, 60_000, 101_000, (70_000, 101_000))), step_us=250_000),
        NETWORK.format("41.0") + INT8,
    ),
    "parameters": (
        six(buckets=(), gathers=GATHERS, step_us=40_000),
        "The step waits for parameters: let more of the forward run before it reads the first of them.",
    ),
}


@pytest.mark.parametrize(("found", "advice"), ADVICE.values(), ids=ADVICE)
def test_advice_is_one_sentence_from_the_figures(found: StepReport, advice: str) -> None:
    assert found.advice == advice


@pytest.mark.parametrize(
    ("found", "remedy"),
    [
        (replace(six(buckets=CROWDED), wire="auto"), "send fewer bytes in another way"),
        (six(buckets=CROWDED, gathers=GATHERS), 'set wire="int8" (or "auto") and param_wire="int8" to send fewer bytes'),
        (replace(six(buckets=CROWDED, gathers=GATHERS), wire="int8"), 'set param_wire="int8" to send fewer bytes'),
        (replace(six(buckets=CROWDED, gathers=GATHERS), wire="int8", param_wire="int8"), "send fewer bytes in another way"),
        (six(buckets=tuple(replace(it, num_bytes=0) for it in CROWDED)), "send fewer bytes in another way"),
    ],
    ids=["wire", "nothing, with shards", "wire, with shards", "both", "a communication hook"],
)
def test_the_remedy_for_a_slow_network_names_settings_that_are_not_in_use(found: StepReport, remedy: str) -> None:
    assert found.advice.endswith(f", or {remedy} (undertow docs slow-networks).")


def sent(report: StepReport, num_bytes: int) -> StepReport:
    """The same times, with buckets of `num_bytes` each."""
    rows = [row(it.index, 1e3 * it.launched_ms, 1e3 * it.done_ms, (60_000, 60_000 + 1e3 * it.waited_ms)) for it in report.buckets]
    return six(step_us=1e3 * report.step_ms, buckets=tuple(replace(it, num_bytes=num_bytes) for it in rows))


COMPUTE_MORE = "let a step compute more, with larger batches or gradient accumulation (undertow docs slow-networks)."


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        (
            sent(six(buckets=CROWDED), 1_300),
            "Messages are the limit, not bytes: communication of gradients takes 50.0 ms, longer than the 40.0 ms of backward, "
            f"and the bytes of this step take at most 0.2 ms of it at 100 Mb/s or more: {COMPUTE_MORE}",
        ),
        (sent(six(), 1_300), OF_LAST + COMPUTE_MORE),
        # 5 ms over 100 Mb/s: 5 % of the step of 100 ms.
        (sent(six(), 31_249), OF_LAST + COMPUTE_MORE),
        (sent(six(), 31_250), OF_LAST + INT8),
        # A tenth of a fast step is exposed, but all bytes at once have taken 4 ms in the best one.
        (
            report(
                *(record(step=step) for step in range(6)),
                record(step=6, buckets=(row(0, 56_000, 58_000, (60_000, 60_000)), row(1, 58_000, 60_000, (60_000, 60_000)))),
            ),
            OF_LAST + COMPUTE_MORE,
        ),
    ],
    ids=["more than backward", "at its end", "just too few", "just enough", "a link that is fast"],
)
def test_fewer_bytes_are_advised_only_if_bytes_can_cost_a_twentieth_of_the_step(found: StepReport, advice: str) -> None:
    assert found.advice.endswith(advice)


def test_the_bytes_of_a_step_that_waits_less_than_a_millisecond_for_them_are_not_its_cost() -> None:
    # 0.9 ms over 100 Mb/s is 9 % of the step of 10 ms.
    buckets = (row(0, 1_000, 9_000, (6_000, 9_000), num_bytes=11_250),)
    found = six(step_us=10_000, forwards=((0.0, 2_000.0),), backwards=((2_000.0, 6_000.0),), buckets=buckets)
    assert found.bytes_ms == pytest.approx(0.9)  # a quotient
    assert found.advice.endswith(COMPUTE_MORE)


@pytest.mark.parametrize(("num_bytes", "bytes_ms"), [(0, 40.0), (4_000_000, 40.0), (1_250, 0.2)])
def test_bytes_take_no_longer_than_communication_or_than_on_the_slowest_link(num_bytes: int, bytes_ms: float) -> None:
    # A hook that does not tell its bytes has sent those of the buckets at most: 8 and 4 MB.
    assert sent(PLAIN, num_bytes).bytes_ms == pytest.approx(bytes_ms)  # a quotient


CODED = (
    row(0, 30_000, 50_000, (60_000, 60_000), codings=(("encode", 30_000, 34_000), ("decode", 46_000, 50_000))),
    row(1, 60_000, 80_000, (60_000, 80_000), codings=(("encode", 60_000, 70_000), ("decode", 65_000, 75_000))),
)


def test_times_to_encode_and_decode_count_once_and_are_no_communication_of_their_own() -> None:
    found = report(record(buckets=CODED))
    # Two threads work from 65 to 70 ms.
    assert (found.coding_ms, [bucket.coding_ms for bucket in found.buckets]) == (23.0, [8.0, 20.0])
    assert found.scalars()["undertow/coding_ms"] == 23.0
    assert (found.communication_ms, found.overlap) == (PLAIN.communication_ms, PLAIN.overlap)
    (later,) = (each.shifted(5.0) for each in CODED[:1])
    assert later.codings == (("encode", 30_005, 34_005), ("decode", 46_005, 50_005))


def test_the_bytes_of_a_small_model_are_not_shown_as_none() -> None:
    found = report(record(buckets=tuple(replace(each, num_bytes=10_400) for each in CODED)))
    assert "and decoding; 0.02 of " in str(found)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (six(step_us=1e6), "excellent"),
        (six(step_us=2e5), "good"),
        (six(buckets=(row(0, 59_000, 61_000, (60_000, 61_000)),), step_us=5e3), "poor"),
        (PLAIN, ""),
        (report(), ""),
        (six(step_us=9.9e5), "good"),
        (six(step_us=1.99e5), "poor"),
        (six(buckets=(row(0, 59_000, 60_999, (60_000, 60_999)),), step_us=5e3), ""),
    ],
)
def test_a_verdict_is_of_the_exposed_share_if_there_is_enough_to_judge(found: StepReport, verdict: str) -> None:
    assert found.verdict == verdict
    assert (f"hidden; {verdict}: " in str(found)) == bool(verdict)


def test_nothing_is_shown_as_less_than_nothing() -> None:
    buckets = tuple(replace(it, launched_ms=-0.01, ready_ms=-0.0) for it in PLAIN.buckets)
    assert "-0.0" not in str(replace(six(step_us=1e6), buckets=buckets, exposed_ms=-1e-9))


def test_scalars_are_flat_floats() -> None:
    found = report(*SIX).scalars()
    assert {type(value) for value in found.values()} == {float}
    some = ("step_ms", "exposed_ms", "overlap", "limit_ms", "slowest_rank", "late_rank_ms", "buckets", "sent_mb")
    assert [found[f"undertow/{name}"] for name in some] == [100.0, 20.0, 0.5, 80.0, 1.0, 15.0, 2.0, 12.0]


def test_scalars_that_do_not_exist_are_left_out() -> None:
    assert report().scalars() == {}
    assert not {"undertow/overlap", "undertow/slowest_rank"} & ALONE.scalars().keys()


def test_a_saved_report_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PLAIN.save(tmp_path / "it.json")
    assert json.loads((tmp_path / "it.json").read_text()) == json.loads(json.dumps(PLAIN.to_dict()))
    assert refusal(lambda: PLAIN.save(tmp_path / "it.json" / "it.json")) == (
        f"'{tmp_path / 'it.json' / 'it.json'}' cannot be written: File exists.\n"
        "  report.save(path)\n"
        "  Give a path in a folder that exists, is writable and has space."
    )

    def full(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (tmp_path / "it.json").read_text()
    monkeypatch.setattr(Path, "write_bytes", full)
    assert "No space left on device" in refusal(lambda: PLAIN.save(tmp_path / "it.json"))
    assert [(path.name, path.read_text() == before) for path in tmp_path.iterdir()] == [("it.json", True)]


# Whole microseconds, so that sums are exact.
TIMES = st.integers(0, 60)


def trace(*events: tuple[str, str, float, float]) -> Trace:
    return Trace(
        rank=0,
        step=3,
        events=tuple(Event(lane=lane, kind=kind, start_us=start, stop_us=stop) for lane, kind, start, stop in events),
    )


STEP = trace(
    ("compute", "backward", 0, 100),
    ("comm.dp", "all_reduce", 20, 60),
    ("comm.dp", "all_reduce", 50, 90),
    ("comm.dp", "all_reduce", 100, 130),
    ("compute", "wait", 100, 125),
    ("compute", "wait", 125, 130),
    ("compute", "optimizer", 130, 150),
)
OVERLAP_SHARDED = trace(
    ("comm.dp", "all_gather", -30, -10),
    ("comm.dp", "all_gather", -10, 20),
    ("compute", "wait", 5, 20),
    ("compute", "forward", 0, 50),
    ("comm.dp", "reduce_scatter", 60, 90),
)


@given(st.lists(st.tuples(TIMES, TIMES).map(sorted).map(tuple), max_size=8))
def test_union_is_the_number_of_microseconds_under_any_interval(spans: list[tuple[int, int]]) -> None:
    assert union_us(spans) == len({us for start, stop in spans for us in range(start, stop)})


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (overlap_of(STEP), (100, 30, 0.7)),
        (overlap_of(OVERLAP_SHARDED), (80, 15, 65 / 80)),
        (overlap_of(trace(("compute", "backward", 0, 100))), (0, 0, None)),
        (Overlap(total_us=10, exposed_us=12), (10, 12, 0)),
    ],
    ids=["a step", "gathers that began before it", "no communication", "a longer wait than communication"],
)
def test_communication_is_hidden_where_no_wait_covers_it(overlap: Overlap, expected: tuple[float | None, ...]) -> None:
    assert (overlap.total_us, overlap.exposed_us, overlap.fraction) == expected


@given(st.lists(st.tuples(TIMES, TIMES), max_size=12))
def test_limit_is_reached_by_a_link_that_sends_each_bucket_when_it_is_ready_and_the_link_is_free(
    buckets: list[tuple[int, int]],
) -> None:
    free, (ready, wire) = 0, ([r for r, _ in buckets], [w for _, w in buckets])
    for ready_us, wire_us in buckets:
        free = max(free, ready_us) + wire_us
    # The largest ready time plus all wire time from there on.
    assert limit_us(ready, wire) == free == max((ready[i] + sum(wire[i:]) for i in range(len(buckets))), default=0)


LATENCY_US, US_PER_BYTE = 50.0, 0.002
SIZES = (10_000, 400_000, 90_000, 1_000_000, 20_000)


def cost_us(num_bytes: int) -> float:
    return LATENCY_US + US_PER_BYTE * num_bytes


def transfer(num_bytes: int, start_us: float, stop_us: float) -> Transfer:
    return Transfer(num_bytes=num_bytes, start_us=start_us, stop_us=stop_us)


def exact(sizes: Sequence[int]) -> tuple[tuple[float, Any], ...]:
    return tuple((size, pytest.approx(cost_us(size))) for size in sizes)


def alone(sizes: Sequence[int]) -> list[Transfer]:
    """One after another, with pauses."""
    return [transfer(size, 1e5 * at, 1e5 * at + cost_us(size)) for at, size in enumerate(sizes)]


def queued(sizes: Sequence[int]) -> list[Transfer]:
    """All launched at once, and carried one after another."""
    return [
        transfer(size, 0.0, float(end)) for size, end in zip(sizes, np.cumsum([cost_us(size) for size in sizes]), strict=True)
    ]


# Each has half of the link until the first one is through.
TOGETHER = [
    transfer(SIZES[1], 0.0, 2 * cost_us(SIZES[1])),
    transfer(SIZES[3], 0.0, cost_us(SIZES[1]) + cost_us(SIZES[3])),
]
LENGTHS, STALLS = (1, 2, 3, 5), [queued(SIZES[: 1 + at % 5]) for at in range(19)]
# The steps, and the sizes of the first samples, which are exact.


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        pytest.param([alone(SIZES)], SIZES, id="with pauses between them"),
        # How long the link was busy says nothing of latency there: when each was through does.
        pytest.param([queued(SIZES)] * 5, SIZES * 5, id="the same queue in every step"),
        pytest.param(
            [*STALLS, [transfer(it.num_bytes, 0.0, it.stop_us + 1e6) for it in queued(SIZES[:2])]],
            [size for at in range(19) for size in SIZES[: 1 + at % 5]],
            id="one stalled step in ten moves nothing else",
        ),
        # Some wait for others although each is launched later than the one before it: the link is busy all the time.
        pytest.param(
            [
                [transfer(it.num_bytes, 40.0 * at, it.stop_us) for at, it in enumerate(queued(SIZES[:length]))]
                for length in LENGTHS
            ],
            [size for length in LENGTHS for size in SIZES[:length]],
            id="launched while others are under way",
        ),
        pytest.param([queued([0, 0]), queued([0, 1000, 0]), queued([0])], (0, 0, 0, 1000, 0, 0), id="without bytes the latency"),
    ],
)
def test_what_each_costs_is_found(steps: list[list[Transfer]], sizes: Sequence[int]) -> None:
    samples = cost_samples(steps)
    assert (samples[: len(sizes)], len(samples)) == (exact(sizes), sum(map(len, steps)))


def test_two_that_share_the_link_which_makes_each_longer_cost_what_they_do_alone() -> None:
    samples = cost_samples([TOGETHER, *([row] for row in alone(SIZES))])
    # The end of the first counts as well, as if the second had not been under way: that moves both by a quarter of a percent.
    assert samples[:2] == tuple((size, pytest.approx(cost_us(int(size)), rel=3e-3)) for size in (SIZES[1], SIZES[3]))


def test_queues_that_are_almost_the_same_in_every_step_give_what_each_costs() -> None:
    # One step of five had a pause, and all were 2 % longer or shorter: the latency must not drown in that.
    times = np.random.default_rng(7).uniform(0.98, 1.02, size=5)
    steps = [[transfer(it.num_bytes, 0.0, it.stop_us * time) for it in queued(SIZES)] for time in times]
    steps[2] = [transfer(SIZES[0], -1e4, -1e4 + cost_us(SIZES[0])), *queued(SIZES[1:])]
    line = curve_from_samples(cost_samples(steps)).us([0, 1_000_000])
    # Sizes range over a factor of 100: the smallest costs 1.4 latencies, and its time is within 2 %, as are all others.
    assert line == pytest.approx([LATENCY_US, cost_us(1_000_000)], rel=0.05)


times = st.floats(0, 1e6, allow_nan=False)
transfers = st.builds(
    lambda num_bytes, start_us, duration_us: transfer(num_bytes, start_us, start_us + duration_us),
    st.integers(0, 10**9),
    times,
    times,
)


@given(together=st.lists(transfers, max_size=6), others=st.lists(st.lists(transfers, max_size=6), max_size=6))
def test_each_collective_has_a_sample_that_a_curve_takes_and_without_pauses_they_add_up(
    together: list[Transfer], others: list[list[Transfer]]
) -> None:
    steps = [[transfer(0, 0.0, 3e6), *together], *others]  # the first one lasts as long as anything drawn
    samples = cost_samples(steps)
    assert sorted(size for size, _ in samples) == sorted(float(it.num_bytes) for step in steps for it in step)
    assert all(0 < time < np.inf for _, time in (*samples, *cost_samples(others)))
    # Each is a nanosecond at least, so that the sum may be more by one for each.
    assert sum(time for _, time in samples[: 1 + len(together)]) == pytest.approx(3e6, rel=1e-9, abs=0.01)


def test_replicas_of_several_ranks_have_advice_on_each() -> None:
    """The times of computing are of the ranks of one replica; rank 2 is the first one of the second replica."""
    first = six(step_us=2e5, busy_ms=(65.0, 25.0), buckets=(row(0, 30_000, 64_000, (60_000, 64_000)),))
    second = replace(first, rank=2)
    assert second.advice == first.advice
    assert first.advice.startswith("Another rank waits 40.0 ms for rank 0")
