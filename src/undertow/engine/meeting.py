"""The meeting of all ranks at which they leave a plan together.

Reasons: docs/design/plan-changes.md.
"""

from __future__ import annotations

import torch

from undertow.buckets.bucket import gradients_aside
from undertow.buckets.fingerprints import fingerprints
from undertow.engine.agreed_errors import require_sound, started_unlike
from undertow.engine.current_plan import CurrentPlan
from undertow.engine.round import Round, RoundKind, Stage, Terms
from undertow.ranks.agreement import Agreement, send_in_place
from undertow.ranks.transport import Handle


class Meeting:
    """The last round under the plan in force: all ranks agree on a change of it, and follow it.

        begin ──> _bind ──> _require_alike ──> _require_equal ──> _end

    It is synchronization `number`, with the mode of the next one, and has no gradients. A rank that
    has not changed is in a usual round, and both find out. New parameters take over rank 0's
    values.

    Raises PlanMismatch, on all ranks, if changes differ, or if these values differ and some rank
    has used its own already (`are_used`). The last stage continues with `then`.
    """

    def __init__(
        self,
        plans: CurrentPlan,
        number: int,
        *,
        mode: int | None,
        are_used: bool,
        then: Stage | None = None,
    ) -> None:
        self._plans, self._group, self._compiled = plans, plans.group, plans.compiled
        self._then = then
        self._are_used = are_used
        self._terms = Terms(number=number, mode=mode)
        self._round = Round(kind=RoundKind.RETIRE)

    def begin(self) -> Stage:
        """Sends the buckets of the plan in force."""
        change = self._plans.change
        assert change is not None  # else there is nothing to meet for
        self._plans.require_own()
        self._compiled.layout.make_gradients_whole(change.named_params)
        self._plans.note_written()
        with gradients_aside(self._compiled.params):
            self._round.start(self._compiled, None, self._terms)
            self._round.send()
        return self._bind

    def _bind(self) -> Stage:
        plans = self._plans
        with gradients_aside(self._compiled.params):
            self._round.wait()
        self._compiled.recorder.forgets_buckets()
        require_sound(self._round, self._group, plans.members.names)
        plans.require_changed_alike(self._round)
        change = plans.change
        assert change is not None
        known = set(map(id, self._compiled.params))
        known.update(
            id(param) for _, param in plans.members.common_frozen if not param.requires_grad
        )
        self._new = [
            (name, param) for name, param in plans.members.named_params() if id(param) not in known
        ]
        params = [param for _, param in change.named_params]
        self._agreement: Agreement = plans.compare(
            change.plan, params, change.reducer, new=[name for name, _ in self._new]
        )
        return self._require_alike

    def _require_alike(self) -> Stage | None:
        self._agreement.require()
        if not self._new:
            return self._end()
        values = fingerprints([param for _, param in self._new], device=self._group.device)
        # [1 + number of parameters] int64
        mine = torch.cat((torch.full_like(values[:1], self._are_used), values))
        self._fingerprints: Handle = self._group.all_gather(
            mine, "the comparison of new parameters"
        )
        return self._require_equal

    def _require_equal(self) -> Stage | None:
        are_used_by, *of_ranks = self._fingerprints.result().T.tolist()
        differing = [index for index, values in enumerate(of_ranks) if len(set(values)) > 1]
        if not differing:
            return self._end()
        if any(are_used_by):
            values = of_ranks[differing[0]]
            names = self._group.names
            others = [names[rank] for rank, value in enumerate(values) if value != values[0]]
            name, number = self._new[differing[0]][0], self._round.terms.number
            raise started_unlike(name, number, others=others, first=names[0], rank=self._group.name)
        write = send_in_place([param for _, param in self._new], self._group)

        def end() -> Stage | None:
            write()
            return self._end()

        return end

    def _end(self) -> Stage | None:
        self._plans.members.ranks_agree()
        self._plans.follow()
        return None if self._then is None else self._then()
