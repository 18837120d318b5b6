"""Reports the times of the last steps on this rank."""

import dataclasses

from undertow.engine.engine import Engine
from undertow.engine.measuring import Present
from undertow.engine.tuning import why_fixed
from undertow.sync.group_sync import GroupSync
from undertow.sync.measurements import plans_not_tried
from undertow.torch_private import private
from undertow.trace import StepReport, summarize


def plan_of_last_steps(engine: Engine) -> Present:
    """Returns the plan in force, or the plan before it until a step has run under the new one."""
    present, left = engine.current_plan.compiled.present, engine.moves.left
    if left is None or left.plan.params != present.plan.params:
        return present
    has_run = bool(engine.recorder.records(generation=present.generation, at_most=1))
    return present if has_run else left


def report_of(part: GroupSync) -> StepReport:
    """Returns the report of a module's own parameters, without experts; never communicates."""
    engine, compiled = part.engine, part.engine.current_plan.compiled
    is_one_graph = (
        part.all_ranks.num_ranks > 1
        and (part.is_compiled or private.is_compiled(part.module))
        and not compiled.cut_bytes
    )
    ran = plan_of_last_steps(engine)
    report = summarize(
        engine.recorder.records(generation=ran.generation),
        ran.plan,
        rank=part.rank,
        num_skipped=engine.checks.numbers.num_skipped,
        is_one_graph=is_one_graph,
        plan_since=engine.recorder.changed_at(ran.generation),
    )
    return dataclasses.replace(
        report,
        save_waited_ms=1000 * engine.save_waited_s,
        why_fixed=why_fixed(compiled.reducer),
        not_tried=plans_not_tried(engine.current_plan.tuning),
        wire=part.config.wire,
        param_wire=part.config.param_wire,
        zeroed=compiled.reducer.lost.share,
    )
