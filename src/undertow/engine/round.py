"""One round under a plan: a synchronization, or a backward that only accumulates.

Reasons: docs/design/buckets.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import repeat
from operator import attrgetter, is_not

import torch
from torch import Tensor

from undertow.buckets.bucket import LiveBucket
from undertow.buckets.comm_hook import CommHook
from undertow.buckets.facts import Facts, Reading
from undertow.device import Accelerator
from undertow.engine.compiled import CompiledPlan
from undertow.engine.hooks import ParamHooks, users_hooks
from undertow.engine.step_settings import Settings, digest_of
from undertow.errors import UndertowError
from undertow.plan import Bucket, signature_of
from undertow.plan.facts import Fact
from undertow.schedule import OpKind

# by trailers; a codec keeps the bits that it has written, and need not keep more
_NUM_STEPS_TOLD_APART = 64

_gradient_of = attrgetter("grad")


class RoundKind(Enum):
    """The treatment of gradients in a round."""

    ACCUMULATE = auto()  # packs them, or leaves them in place, and sends nothing
    REDUCE = auto()
    SHADOW = auto()  # contributes none: this rank has run out of data
    # only says that the parameters, or the communication hook, change: the last one under a plan
    TELL = auto()


class Stage(Enum):
    """The parts of a round after its backward, each between two waits for other ranks.

    SEND ───────────────────┐
    START ──> [REBUILD ──>] ┴──> WAIT ──> [ADD_LATE ──>] concluded
    """

    SEND = auto()
    START = auto()  # if it has not started: starts and sends it, or tells of a change first
    REBUILD = auto()  # all ranks leave the plan; then starts and sends it
    WAIT = auto()
    ADD_LATE = auto()  # gradients that arrived after their bucket was sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The conditions of a round, as its start decides them."""

    number: int = 0  # of the synchronization
    # must be the same on every rank; None on a rank that accepts the mode of the others
    mode: int | None = None
    settings: Settings = ()  # of optimizers that have stepped since the last synchronization
    is_loaded: bool = False  # all ranks are to compare parameters, because of a load
    is_stopping: bool = False  # a signal has asked a rank to stop, as far as this one knows
    rescale: float = 1.0  # factor for the mean over all ranks, if some of them have run out of data
    is_read_at_once: bool = False  # on devices too: the contents of its trailers count when it ends


@dataclass(slots=True)
class Findings:
    """The findings of this rank in a round, and the reports of all ranks."""

    # parameters whose gradient arrived and was gone when its bucket left
    taken: set[int] = field(default_factory=set)
    # bucket -> positions unused on this rank
    unused: dict[int, list[int]] = field(default_factory=dict)
    keeps_earlier: bool = False  # the results are added to earlier ones of the step
    readings: list[Reading] = field(default_factory=list)  # of trailers
    # that this rank has told in the first round of these whose ranks have told different ones
    unlike_settings: Settings | None = None
    # bucket -> positions, on any rank
    nonfinite: dict[int, frozenset[int]] = field(default_factory=dict)
    hook: str = ""  # the communication hook whose results are among these
    # it has made values that are not finite of the zeros of unused parameters
    spoils_hook: bool = False
    busy_ms: tuple[float, ...] = ()  # of each rank

    @property
    def late_buckets(self) -> list[int]:
        """Buckets with a gradient, on some rank, that arrived after they had been launched."""
        return self.reported(Fact.LATE, overdue=False)

    def add(self, reading: Reading, settings: Settings) -> None:
        """Adds a reading of a trailer that compares these settings."""
        self.readings.append(reading)
        if self.unlike_settings is None and Fact.SETTINGS in reading.unlike:
            self.unlike_settings = settings

    def reported(self, fact: Fact, *, overdue: bool = True) -> list[int]:
        """Returns the ranks, or buckets, with this flag.

        With or without trailers of earlier rounds.
        """
        readings = [reading for reading in self.readings if overdue or not reading.is_overdue]
        return sorted({marked for reading in readings for marked in reading.flags.get(fact, ())})


@dataclass(slots=True, eq=False, kw_only=True)
class Round:
    """A round that is under way.

        start under a plan ──> end of backward: send ──> wait ──> [add_late ──>] concluded
        buckets leave as they fill, in the order of the plan, so that all ranks send alike

    It exists from its first gradient on. It starts at once, or after a rebuild when its backward
    has ended. `Rounds.advance` runs stage after stage, and concludes the round after the last one.
    `send`, `wait` and `add_late` return the next stage, or None.
    """

    kind: RoundKind
    is_last: bool = True  # of the step, which adds up no more gradients
    op: str | None = None  # of a reduction by hand, if it is not the mean
    holds_back: bool = False  # no bucket leaves before the end of backward
    has_started: bool = False
    has_ended: bool = False  # its backward; then stage after stage runs, until none is left
    stage: Stage | None = None  # the next one after backward; None while one runs
    told: Round | None = None  # the round before it that tells of a change, until `REBUILD`
    refusal: UndertowError | None = None  # why this rank cannot follow the change that it tells of
    has_failed: bool = False  # on this rank
    found: Findings = field(default_factory=Findings)
    terms: Terms = Terms()
    # from `start` on
    compiled: CompiledPlan = field(init=False)
    num_sent: int = 0  # buckets that have left
    kept: set[int] = field(default_factory=set)  # buckets that an accumulation has packed
    # bucket -> position -> gradient that arrived on this rank after the bucket was packed
    late: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    hooks: ParamHooks | None = None  # that follow its gradients; None before a rebuild

    def start(self, compiled: CompiledPlan, hooks: ParamHooks | None, terms: Terms) -> None:
        """Starts it under a plan, once."""
        self.has_started = True
        self.compiled, self.hooks, self.terms = compiled, hooks, terms
        is_synchronized = self.kind is not RoundKind.ACCUMULATE
        for reading, settings in compiled.round_begins(is_synchronized=is_synchronized):
            self.found.add(reading, settings)

    def bucket_is_full(self, index: int) -> None:
        """Called when all gradients of a bucket have arrived.

        Sends it if all buckets before it were sent. The last one waits for the end of backward,
        because its trailer has facts that a rank knows only then.
        """
        if self.kind is RoundKind.ACCUMULATE:
            self._keep(self.compiled.buckets[index])
        elif not self.holds_back:
            assert self.hooks is not None  # whose call this is
            arrivals, last = self.hooks.arrivals.buckets, len(self.compiled.buckets) - 1
            while self.num_sent < last and arrivals[self.num_sent].is_full:
                self._send_next()

    def send(self) -> Stage:
        """Called at the end of backward: sends the remaining buckets."""
        buckets = self.compiled.buckets
        if self.hooks is not None and not self.has_failed:
            arrivals = self.hooks.arrivals
            absent = arrivals.absent
            if absent:  # gradients that other code than autograd has written into `.grad` count too
                arrivals.note(self.compiled.written(absent - self.hooks.arrived_before))
        if self.kind is RoundKind.ACCUMULATE:
            for bucket in buckets:
                if bucket.spec.index not in self.kept:
                    self._keep(bucket)
        else:
            while self.num_sent < len(buckets):
                self._send_next()
        return Stage.WAIT

    def _send_next(self) -> None:
        """Packs the next bucket, and starts its reduction."""
        compiled, bucket = self.compiled, self.compiled.buckets[self.num_sent]
        self.num_sent += 1
        compiled.group.watch.check()
        try:
            with compiled.observed(OpKind.PACK, bucket):
                self._pack(bucket)
            with compiled.observed(bucket.kind, bucket):
                bucket.start(compiled.turns.now)
                compiled.group.makes_call(bucket.label)
            crossing = compiled.strategy.crossing
            if crossing is not None:
                with compiled.observed(crossing, bucket):
                    bucket.start_across(compiled.turns.now)
        except BaseException as error:
            compiled.group.watch.fail(error)  # others wait for this rank's message
            raise

    def _pack(self, bucket: LiveBucket) -> None:
        spec = bucket.spec
        hooks = self.hooks
        arrivals = None if hooks is None else hooks.arrivals.buckets[spec.index]
        if arrivals is not None and arrivals.streams:
            self._follow_streams(bucket)
        bucket.mark_ready()
        has_all = arrivals is not None and arrivals.is_full
        not_arrived = () if has_all else self._not_arrived(spec)
        unused = self.found.unused[spec.index] = bucket.gradients.pack(
            not_arrived, is_discarded=self.has_failed or self.kind is RoundKind.TELL
        )
        if hooks is not None and len(unused) > len(not_arrived) and not self.has_failed:
            # Without a hook of the user's, the gradient that arrived was undefined, as of a
            # function that returns None for it.
            gone = set(map(spec.params.__getitem__, unused)) - hooks.arrivals.missing(spec.index)
            self.found.taken.update(
                param for param in gone if users_hooks(hooks.named_params[param][1])
            )
        if bucket.gradients.earlier:
            self.found.keeps_earlier = True
        signature = signature_of(
            generation=self.compiled.generation,
            mode=self.terms.mode,
            has_other_op=self.op is not None,
        )
        bucket.trailer.write(
            unused=unused,
            signature=signature,
            step=self.terms.number % _NUM_STEPS_TOLD_APART,
            facts=self._own_facts() if spec.trailer.facts else None,
        )

    def _follow_streams(self, bucket: LiveBucket) -> None:
        """Makes the current stream wait for those that gradients arrived on, and forgets them."""
        if self.hooks is None or not self.hooks.arrivals.buckets[bucket.spec.index].streams:
            return
        streams = self.hooks.arrivals.buckets[bucket.spec.index].streams
        device = self.compiled.group.hardware
        assert isinstance(device, Accelerator)
        streams.discard(device.stream_of(bucket.gradients.params[0]))
        device.wait_for(streams)
        if streams:
            bucket.keep_gradients()
        streams.clear()

    def _not_arrived(self, spec: Bucket) -> Sequence[int]:
        """Returns the positions without a gradient since the last synchronization, on this rank."""
        if self.hooks is None:
            return range(len(spec.params))
        return self.hooks.not_arrived(spec.params, self.hooks.arrivals.missing(spec.index))

    def _own_facts(self) -> Facts:
        # No `.grad` holds anything except late gradients, from autograd or written by some
        # function, which no hook reports. This includes the last bucket, just packed.
        compiled = self.compiled
        has_late = self.hooks is not None and self.hooks.arrivals.has_repeats
        # a single bucket has just taken all that has arrived
        if not has_late and len(compiled.buckets) > 1:
            has_late = any(map(is_not, map(_gradient_of, compiled.params), repeat(None)))
        here = (compiled.reducer.group.rank,)
        flags: dict[str, Sequence[int]] = {}
        if self.has_failed:
            flags[Fact.FAILED] = here
        if self.found.taken:
            flags[Fact.TAKEN] = here
        if self.kind is RoundKind.TELL:
            flags[Fact.CHANGED] = here
        if self.terms.is_loaded:
            flags[Fact.LOADED] = here
        if self.terms.is_stopping:
            flags[Fact.STOPPING] = here
        if has_late:
            self._catch_late()
            flags[Fact.LATE] = list(self.late)
        # Without a digest, this rank accepts the digest of the others. If this round tells of a
        # change, the next one tells the settings.
        digests: dict[str, int | None] = {}
        if self.kind is RoundKind.REDUCE and self.terms.settings:
            digests[Fact.SETTINGS] = digest_of(self.terms.settings)
        return Facts(
            digests=digests, flags=flags, numbers={Fact.BUSY_MS: compiled.recorder.busy_ms()}
        )

    def _catch_late(self) -> None:
        """Takes gradients out of `.grad` that arrived after their bucket was packed."""
        for bucket in self.compiled.buckets:
            late = bucket.catch_late()
            if late:
                self.late[bucket.spec.index] = late

    def _keep(self, bucket: LiveBucket) -> None:
        """Packs the gradients of a backward that only accumulates; they stay on this rank."""
        compiled = self.compiled
        self.kept.add(bucket.spec.index)
        try:
            with compiled.observed(OpKind.PACK, bucket):
                self._follow_streams(bucket)
                bucket.pack_local()
        except BaseException as error:
            compiled.group.watch.fail(error)  # others may wait for the next synchronization
            raise
        with compiled.observed(OpKind.BIND, bucket):
            bucket.bind_local()

    def wait(self) -> Stage | None:
        """Waits for the buckets, and binds `.grad` to them.

        Sends gradients again that arrived late on any rank.
        """
        if self.kind is not RoundKind.ACCUMULATE:
            for bucket in self.compiled.buckets:
                with self.compiled.observed(OpKind.BIND, bucket):
                    self._bind(bucket)
        if self.kind is RoundKind.TELL or not self.found.readings:
            return None
        if self.found.reported(Fact.CHANGED, overdue=False):
            return None  # all ranks raise: the ones that have changed send no late gradients
        late_buckets = self.found.late_buckets
        for index in late_buckets:
            self.compiled.buckets[index].start_late(self.late.pop(index, {}))
        return Stage.ADD_LATE if late_buckets else None

    def _bind(self, bucket: LiveBucket) -> None:
        with self.compiled.group.watch.waiting(bucket.label):
            bucket.finish()
            if self.terms.rescale != 1.0:
                for value in bucket.gradients.values():
                    value.mul_(self.terms.rescale)
            reading = self._read_trailer(bucket)
            is_telling = self.kind is RoundKind.TELL
            used = frozenset[int]() if reading is None or is_telling else reading.used
            if self.compiled.reducer.hook is not None:
                self._check_results(bucket, used, self.compiled.reducer.hook)
            bucket.gradients.bind(used)

    def _read_trailer(self, bucket: LiveBucket) -> Reading | None:
        """Notes the findings of all ranks in a bucket's trailer, and returns them.

        None if nothing was found, or if the findings are still on a device.
        """
        index, found = bucket.spec.index, self.found
        must_know = bool(found.unused[index]) or self.terms.is_read_at_once
        compiled = self.compiled
        if not (compiled.group.hardware.is_host or must_know or compiled.is_learning):
            # the host does not wait for a device
            compiled.snapshots.append((bucket.trailer.snapshot(), self.terms.settings))
            return None
        if bucket.spec.trailer.facts:  # the last bucket
            found.busy_ms = bucket.trailer.numbers(Fact.BUSY_MS)
        if compiled.is_profiling:
            with torch.profiler.record_function("search_unused_parameters"):  # torch's name for it
                reading = bucket.trailer.read()
        else:
            reading = bucket.trailer.read()
        if reading is not None:
            found.add(reading, self.terms.settings)
            if reading.nonfinite:
                found.nonfinite[index] = reading.nonfinite
        return reading

    def _check_results(self, bucket: LiveBucket, used: frozenset[int], hook: CommHook) -> None:
        """Notes results of the communication hook that are not finite; some rank has `used` these
        positions."""
        # A parameter that no rank has used keeps its gradient, whatever a hook returns for it.
        kept = frozenset(self.found.unused[bucket.spec.index]) - used
        bad = bucket.bad_results()
        if bad - kept:
            self._note_nonfinite(bucket, bad - kept)
            self.found.hook = hook.name
        if bad & kept:
            self.found.spoils_hook = True  # alike on all ranks

    def add_late(self) -> None:
        """Waits for these gradients, and adds them."""
        for bucket in self.compiled.buckets:
            bad = bucket.finish_late(rescale=self.terms.rescale)
            if bad:
                self._note_nonfinite(bucket, bad)
        assert self.hooks is not None  # only a round of gradients gets here
        self.hooks.arrivals.learn_repeats()

    def _note_nonfinite(self, bucket: LiveBucket, bad: frozenset[int]) -> None:
        """Notes positions whose reduced values are not finite."""
        found, index = self.found.nonfinite, bucket.spec.index
        found[index] = bad | found.get(index, frozenset())
