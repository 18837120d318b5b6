"""Special cases of training by name: programs whose results are to be the reference's."""

from itertools import cycle
from typing import Any

from support.programs import HOLDERS, PLANS, Program
from support.units import IN_PARTS

ACCUMULATES = "zero, forward 012, accumulate, forward 012, backward, step"
OF_EVERY_KIND = {
    **{
        f"{name} units train": Program(units=f"linear {name} linear", events=ACCUMULATES)
        for name in ("bag", "norm", "twice", "checkpoint", *IN_PARTS)
    },
    "units of every kind train together": Program(
        units="tied double complex128 odd bfloat16 strided half channels complex table",
        events=ACCUMULATES.replace("012", "0123456789"),
    ),
    "a hook reduces complex gradients": Program(units="linear complex linear", has_hook=True),
    "a model of nothing but empty and single numbers trains": Program(units="odd", events="zero, forward 0, backward, step"),
    "a batch norm allows two forwards before a backward": Program(
        units="linear norm linear", events="zero, forward 012, forward 012, backward together, step"
    ),
    "a part that comes late on one rank only is added": Program(
        units="linear twice-reentrant linear", events="zero, forward 012|02, backward, step, zero, forward 02|012, backward, step"
    ),
    "parts that come more often from rank to rank are added": Program(
        units="linear reentrant linear", events="zero, forward 012|0112, backward, step", times=4
    ),
    "parts that come late are sent afterwards": Program(units="linear twice-reentrant linear", settings={"overlap": False}),
    **{
        f"gradients that have a graph, {kind}": Program(
            units=f"linear {kind} linear", events="zero, forward 012, backward graph, step"
        )
        for kind in ("linear", "twice-nested")
    },
    "a gradient penalty": Program(events="zero, forward 012 penalty, backward, step"),
    **{
        f"{order} order, whatever order gradients arrive in": Program(
            events="zero, forward 012|210, backward, step, zero, forward 210|120, backward, step", settings={"order": order}
        )
        for order in ("observed", "reverse")
    },
}

# By step, the units that each rank uses.
USES = {
    "one rank leaves one out": "012|02, 012|02, 012|02",
    "every rank leaves another one out": "01|12, 01|12",
    "all ranks leave the same out": "02, 02, 02",
    "another one in each step": "0|1, 1|2, 20|0, 012|0, 0|012",
    "some are used several times, in another order": "010200|201, 210|012",
    "one rank has an empty batch": "012 empty|012, 012|012 empty",
    "one rank uses nothing": "012|-, 012|-, 012",
}


def steps(uses: str, *, before: str = "zero, ", after: str = ", backward, step") -> str:
    return ", ".join(f"{before}forward {use.strip()}{after}" for use in uses.split(","))


IN_OTHER_WAYS: dict[str, dict[str, Any]] = {
    "under a hook": {"has_hook": True},
    "sent afterwards": {"settings": {"overlap": False}},
    "in a table": {"units": "table bag linear"},
}
USED = {
    **{name: Program(events=steps(uses), times=1) for name, uses in USES.items()},
    **{f"{name}, gradients kept": Program(events=steps(uses, before=""), times=1) for name, uses in USES.items()},
    **{
        f"{name}, {where}": Program(events=steps(USES[name]), times=1, **how)
        for name in ("every rank leaves another one out", "another one in each step", "one rank uses nothing")
        for where, how in IN_OTHER_WAYS.items()
    },
    "a rank that uses nothing joins at the optimizer's step": Program(
        events="zero, forward 012|-, backward by-step, step, zero, forward 012|-, backward by-step, step, zero, forward 012, backward, step"
    ),
    **{
        f"a rank that uses nothing joins {how}, {strategy}": Program(
            events=f"zero, forward 012, backward, step, {zero}, forward 012|-, backward {how}, step", strategy=strategy
        )
        for how, strategy, zero in (
            ("by-norm", "ddp", "zero"),
            ("by-optimizers-norm", "zero2", "zero"),
            ("by-look", "ddp", "zero"),
            ("by-look", "zero2", "zero"),
            ("by-scaler", "ddp", "zero in-place"),
        )
    },
    **{
        f"a rank that uses nothing joins where another one overflows, {zero}": Program(
            events=f"{zero}, forward 012, backward, step, {zero}, forward 012|-, overflow now|, backward by-scaler, {zero}",
            times=2,
        )
        for zero in ("zero", "zero in-place")
    },
    "a rank without data joins": Program(events="zero, train 012|none, finish, finish, step, zero, train 012, finish, step"),
    "an old gradient that nobody adds to stays": Program(
        events="forward 012, backward, scale, forward 02, backward, forward 0, backward"
    ),
    "an accumulated gradient that nobody adds to stays": Program(
        events="zero, forward 01, accumulate, reduce, scale, forward 02, backward, forward 02, backward"
    ),
    "a gradient of the user's that nobody adds to stays": Program(
        events="write 1, forward 02, backward, forward 02, backward, zero in-place, forward 02, backward", times=2
    ),
    "a backward adds to gradients of the user's": Program(
        events="zero, write 0, forward 012, backward, step, zero, write 1, forward 012, backward, step, write 2, forward 012, backward"
    ),
    "a unit used in one micro-batch is used": Program(events="zero, forward 01, accumulate, forward 0, backward, step"),
    "a gradient that was thrown away was not used": Program(events="forward 012, accumulate, zero, forward 0, backward, step"),
    "one more forward on one rank starts nothing": Program(events="zero, forward 012, backward, look now|, step"),
    "a mean of zeros is a result after one more forward": Program(events="zero, forward 012 empty, backward, look now|, step"),
    "a rank joins after a step that was left out": Program(
        events="zero, forward 012, backward, step, zero, forward 012, backward, zero, train 012|none, step, zero, forward 012|-, backward, step"
    ),
    "a rank joins after a step that was left out, zeroed in place": Program(
        events="zero in-place, forward 012, backward, step, zero in-place, forward 012, backward, zero in-place, train 012|none, step, "
        "zero in-place, forward 012, backward, zero in-place, forward 012|-, backward by-step, step"
    ),
}

# What is unused is known from the end of a synchronization until the next forward.
WINDOWS = {
    "a step": "zero, forward 0, backward, step, zero, forward 01, backward",
    "an accumulation": "zero, forward 0, accumulate, forward 1, accumulate, forward 1, backward, forward 02 quiet, accumulate, reduce",
    "two forwards first": "zero, forward 0, forward 2, backward, backward",
    "gradients thrown away": "forward 1, accumulate, zero, forward 0, backward",
    "a loss that reaches nothing": "zero, forward -, backward by-own-step",
    "one more forward": "zero, forward 0, backward, look now, step",
    "a method of the module": "look now, zero, forward 0 inside, backward, step, look now, zero, forward 1 inside, backward, step",
    "a frozen unit": "zero, freeze 1, forward 01, backward, thaw 1, zero, forward 0, backward",
}
WINDOWS_OF_ALL = {
    f"unused in {name}, {kind}": Program(
        events=f"forward 012, backward, step, {events}",
        times=1,
        strategy=kind if kind in ("zero1", "zero2") else "ddp",
        is_attached=kind == "attached",
        plan="each",
    )
    for name, events in WINDOWS.items()
    for kind in (("ddp", "attached", "zero1", "zero2") if name in ("a step", "an accumulation") else ("ddp", "zero1"))
}

ACCUMULATED = {
    "micro-batches are summed here and averaged once": Program(
        events="zero, forward 012, accumulate, forward 012|02, accumulate, forward 012, backward, step"
    ),
    "micro-batches are summed where gradients are zeroed in place": Program(
        events="zero in-place, forward 012, accumulate, forward 01, backward, step", plan="default"
    ),
    "a loss from before a failed accumulation synchronizes": Program(events="zero, forward 012, fail accumulate, backward, step"),
    **{
        f"a reduction that nobody waited for, completed by {end}": Program(events=f"zero, forward 012, accumulate, begin, {end}")
        for end in ("step", "wait", "finish", "forward 012, accumulate")
    },
    "the flag counts when backward runs": Program(
        events="zero, forward 012 quiet, forward 012, forward 012 quiet, accumulate flagged, accumulate flagged, backward, step"
    ),
    "an exception inside no_sync ends it": Program(
        events="zero, forward 012, accumulate nested leaves, forward 012, backward, step"
    ),
    "a second backward adds the mean of what is new": Program(events="forward 012, backward, forward 012, backward"),
    "two forwards before two backwards": Program(events="zero, forward 012, forward 012, backward, backward, step"),
    "a graph that is retained": Program(events="zero, forward 012, backward retain, backward retain, backward, step"),
    "one backward of two losses": Program(events="zero, forward 012, forward 02|012, backward together, step"),
    "what was accumulated is reduced by hand": Program(
        events="zero, forward 012, accumulate, forward 01, accumulate, reduce, step"
    ),
    "an attached model accumulates": Program(is_attached=True, events=ACCUMULATES),
    "a loss from a method of the module": Program(
        events="look now, zero, forward 012 inside, accumulate, forward 012 inside, backward, step"
    ),
    "a hook reduces what was accumulated": Program(has_hook=True, events=ACCUMULATES),
    "a hook adds to gradients that were kept": Program(has_hook=True, events="forward 012, backward"),
    "sparse gradients accumulate": Program(units="table linear bag", events=ACCUMULATES),
    "sparse gradients that are zeroed in place": Program(units="table linear bag", events="zero in-place, forward 012, backward"),
    "gradients that get new data": Program(
        events="zero, forward 012, backward, scale data, step, forward 012, backward, scale data, step", times=2
    ),
    **{
        f"a gradient of which the user holds the {how}, {plan}": Program(
            events=f"hold {how}, forward 012, backward, step", plan=plan, times=4
        )
        for how, plan in zip(HOLDERS, cycle(["each", "one"]), strict=False)
    },
    "a step is skipped for an infinity of one rank": Program(
        events="zero, forward 012, overflow |now, backward, step, zero, forward 012, backward, step",
        settings={"nonfinite": "skip"},
    ),
    **{
        f"reduced by hand as a sum, {strategy}": Program(
            events="zero, forward 012, accumulate, forward 01, accumulate, reduce sum", strategy=strategy
        )
        for strategy in ("ddp", "zero1")
    },
    "reduced by hand with shards of micro-batches": Program(
        strategy="zero2", events="zero, forward 012, accumulate, forward 01, accumulate, reduce, step"
    ),
}

# The first unit is frozen when the model is wrapped, the last may get another parameter.
CHANGES = {
    "thawed": "thaw 0",
    "frozen": "freeze 1",
    "exchanged": "freeze 1, freeze 2, thaw 0",
    "extended": "extend 2",
    "appended": "append",
    "a parameter replaced": "renew 1",
    "a unit replaced": "replace 1",
    "a larger unit": "replace 1 odd",
    "all replaced": "replace 0, replace 1, replace 2",
    "all assigned": "assign",
    "LoRA put in late": "adapt 0, adapt 1, adapt 2",
    "removed": "remove",
    "new data": "move",
    "cast to double": "to float64",
    "cast to bfloat16": "to bfloat16",
    "channels last": "to channels_last",
}
IN_A_GRAPH = ("thawed", "extended")  # of tensors that are there still
ALL_SITUATIONS = (*IN_A_GRAPH, "exchanged", "a larger unit", "LoRA put in late")
# A change comes at "*".
SITUATIONS = {
    "before the first step": "*, zero, forward 012, backward, step, zero, forward 012, backward, step",
    "after the first step": "zero, forward 012, backward, step, *, zero, forward 012, backward, step, zero, forward 012, backward, step",
    "with gradients kept": "forward 012, backward, step, forward 012, backward, step, *, forward 012, backward, step, forward 012, backward",
    "while accumulating": "zero, forward 012, backward, step, zero, forward 012, accumulate, *, forward 012, accumulate, forward 012, backward, step",
    "between forward and backward": "zero, forward 012, backward, step, zero, forward 012, *, backward, step, zero, forward 012, backward",
    "of which no forward tells": "zero, forward 012, backward, step, look now, *, zero, forward 012 inside, backward by-step, step",
    "after a forward that told of another one": "zero, forward 012, backward, step, thaw 0, look now, *, zero, forward 012 inside, backward by-step, step",
}


def changed(situation: str, change: str, **how: Any) -> Program:
    before, after = SITUATIONS[situation].split("*")
    order = {"appended": "0123", "removed": "01"}.get(change, "012")
    return Program(
        units="channels channels channels" if change == "channels last" else "linear linear shift",
        before="freeze 0",
        events=before + CHANGES[change] + after.replace("012", order),
        times=1,
        **how,
    )


CHANGED = {
    **{
        f"{change}, {situation}": changed(situation, change, is_attached=number % 2 == 1, plan=list(PLANS)[number % len(PLANS)])
        for number, situation in enumerate(SITUATIONS)
        for change in CHANGES
        if situation == "after the first step" or change in ALL_SITUATIONS
        if situation != "between forward and backward" or change in IN_A_GRAPH
    },
    **{
        f"LoRA put in late, {situation}, {strategy}": changed(situation, "LoRA put in late", strategy=strategy)
        for strategy, situation in (
            ("zero1", "after the first step"),
            ("zero1", "while accumulating"),
            ("zero2", "after the first step"),  # no shards of gradients are held then
        )
    },
    "LoRA put in late, and a layer thawed after it, zero1": Program(
        events="zero, forward 012, backward, step, adapt 0, adapt 2, freeze 1, zero, forward 012, backward, step, "
        "thaw 1, zero, forward 012, backward, step",
        strategy="zero1",
        times=1,
    ),
    "the last unit thawed, of which no forward tells": Program(
        before="freeze 0, freeze 2",
        events="look now, zero, forward 012 inside, backward, thaw 2, zero, forward 012 inside, backward, step",
        times=2,
    ),
    "the last unit thawed, after a forward that told of another one": Program(
        before="freeze 0, freeze 2",
        events="zero, forward 012, backward, thaw 0, look now, thaw 2, zero, forward 012 inside, backward",
        times=1,
    ),
    "a gradient from before the change counts": Program(
        before="freeze 2",
        events="zero, forward 012, backward, zero, forward 01, accumulate, thaw 2, forward 20, backward, step, zero, forward 02, backward, step",
        times=1,
    ),
    **{
        f"rank {rank} is without data when {change}, {strategy}": Program(
            events=f"zero, train 012, step, {event}, zero, train {order}, step", strategy=strategy, times=times
        )
        for rank, change, event, order, times, strategy in (
            (0, "a unit is appended", "append", "none|0123", 1, "ddp"),
            (1, "a unit is appended", "append", "0123|none", 1, "ddp"),
            (1, "a unit is frozen and thawed", "freeze 1, zero, train 012|none, step, thaw 1", "012|none", 2, "ddp"),
            (1, "a unit is frozen and thawed", "freeze 1, zero, train 012|none, step, thaw 1", "012|none", 2, "zero1"),
        )
    },
    "a rank alone with shards follows a change": Program(
        before="freeze 0",
        events="zero, forward 012, backward, step, thaw 0, zero, forward 012, backward, step, freeze 0",
        strategy="zero1",
        is_alone=True,
    ),
    "units take turns": Program(
        before="freeze 1, freeze 2",
        events="zero, forward 012, backward, step, freeze 0, thaw 1, zero, forward 012, backward, step, freeze 1, thaw 2, zero, forward 012, "
        "backward, step, freeze 2, thaw 0",
    ),
    "everything is frozen for a while": Program(
        events="zero, forward 012, backward, step, freeze 0, freeze 1, freeze 2, zero, forward 012, backward, forward 012, backward, "
        "thaw 0, thaw 1, thaw 2"
    ),
    "a change under a hook": Program(
        before="freeze 0",
        has_hook=True,
        events="zero, forward 012, backward, step, thaw 0, freeze 1, zero, forward 012, backward, step, freeze 0",
    ),
    **{
        f"a unit thawed between two backwards, {strategy}, {first}": Program(
            before="freeze 2",
            events=f"look now, thaw 0, thaw 1, freeze 2, zero, forward 01 inside, {first}, freeze 0, freeze 1, thaw 2, forward 12 inside, backward, "
            "thaw 0, thaw 1, step",
            strategy=strategy,
        )
        for strategy, first in (
            ("ddp", "backward"),
            ("zero1", "accumulate"),
        )
    },
}

# a: a backward that accumulates, s: one that synchronizes, z and 0: zero_grad() with and without set_to_none,
# r: what was accumulated is reduced by hand. Rank 0 uses two units, other ranks one.
LETTERS = {"a": "{}forward 01|0, accumulate", "s": "{}forward 01|0, backward", "z": "zero", "0": "zero in-place", "r": "reduce"}
PATTERNS = ["sar", "aas", "sss", "sas", "s0s", "a0s", "sazs"]


def combined(letters: str, **how: Any) -> Program:
    """Losses are divided by the mean of the ranks' numbers of tokens."""
    tokens = ["tokens 3|5, ", "tokens 6|10, "]
    events = [LETTERS[letter].format(number) for letter, number in zip(letters, cycle(tokens), strict=False)]
    return Program(events=", ".join(["zero", *events, "step"]), **how)


COMBINED = {
    "zeros in sparse gradients count as cleared": Program(
        units="linear table linear", events="zero in-place, tokens 2|5, forward 012, backward, step"
    ),
    **{letters: combined(letters) for letters in PATTERNS},
    **{
        f"{letters}, {strategy}": combined(letters, strategy=strategy)
        for strategy, letters in (("zero1", "sas"), ("zero1", "s0s"), ("zero2", "as"), ("zero2", "ss"), ("zero2", "szs"))
    },
    **{f"{letters}, alone": combined(letters, is_alone=True) for letters in ("as", "ss")},
    **{
        f"sas, {setting}, {strategy}": combined("sas", strategy=strategy, settings={setting: value})
        for setting, value, strategy in (
            ("reduction", "ordered", "zero1"),
            ("overlap", False, "ddp"),
            ("average_in_collective", False, "zero1"),
        )
    },
    **{
        f"one mean for {how} and backward, {strategy}": Program(
            events=f"zero, tokens 6|3, forward 01|0, {how}, forward 01|0, backward, step", strategy=strategy
        )
        for strategy, how in (("ddp", "backward"), ("zero1", "accumulate"), ("zero2", "backward"))
    },
    **{
        f"a rank without data has 0 tokens, {strategy}": Program(
            events="zero, tokens 3|0, train 01|none, step, zero, tokens 5|4, train 01|0, step", strategy=strategy
        )
        for strategy in ("ddp", "zero2")
    },
    **{
        name: Program(units=units, before=before, events=events)
        for name, units, before, events in (
            ("parts that come late", "linear twice-reentrant linear", "", "zero, tokens 3|5, forward 012, backward, step"),
            ("sparse", "table linear", "", "zero, tokens 3|5, forward 01|10, backward, tokens 4|1, forward 0, backward, step"),
            (
                "units exchanged",
                "linear linear linear",
                "freeze 1",
                "zero, tokens 3|5, forward 01, backward, step, freeze 0, thaw 1, zero, tokens 1|2, forward 01|10, backward, forward 1, "
                "backward, thaw 0, freeze 1",
            ),
            (
                "a unit frozen with an accumulated gradient",
                "linear linear linear",
                "",
                "zero, forward 01, tokens 3|5, accumulate, freeze 0, forward 01, backward, step, thaw 0, zero, forward 0, backward",
            ),
            (
                "the mean after a backward that has failed on one rank",
                "linear linear linear",
                "",
                "zero, tokens 3|5, forward 01, backward, step, zero, fail |backward, tokens 4|2, forward 01, backward, step",
            ),
        )
    },
}

WRITTEN_OR_DISTURBED = {
    **{
        f"a written gradient {where}, {strategy}, {zero}, {number} micro-batches": Program(
            units=f"linear {kind} linear linear",
            events=f"{zero}, forward {order}, {'accumulate, forward 02, ' if number == 2 else ''}backward, step",
            strategy=strategy,
        )
        for where, kind, order in (
            ("in the middle", "written", "012"),
            ("ahead of all hooks", "written", "021"),
            ("used by autograd too", "written-and-used", "012"),
        )
        for strategy, zero, number in (
            ("ddp", "zero in-place", 1),
            ("ddp", "zero", 2),
            ("zero1", "zero in-place", 2),
            ("zero2", "zero", 1),
        )
    },
    "a gradient is written on one rank only": Program(
        units="linear written linear", events="zero, forward 012|02, backward, scale, forward 02, backward, step"
    ),
    **{
        f"gradients are set {how}": Program(events=f"zero, forward 012, backward {how} by-step, step")
        for how in ("by-hand", "partly-by-hand")
    },
    **{
        f"all ranks fail in {where}": Program(events=f"fail {where}, forward 012, backward, step, zero")
        for where in ("forward", "backward")
    },
    "one rank fails in backward": Program(events="zero, forward 012, backward, step, zero, fail |backward"),
    "one rank fails in backward, with shards": Program(
        events="zero, fail |backward, forward 012, backward, step", strategy="zero1"
    ),
    **{
        f"rank {rank} is late with {kind}, {strategy}": Program(
            events=f"zero, forward 012, backward, step, late {rank} {kind}, zero, forward 01|20, backward, step",
            times=2,
            strategy=strategy,
        )
        for rank, strategy, kind in (
            (0, "ddp", "pack"),
            (1, "ddp", "all_reduce"),
            (0, "ddp", "bind"),
            (1, "zero1", "reduce_scatter"),
            (0, "zero2", "all_gather"),
        )
    },
    "a rank looks at its loss between the steps of two optimizers": Program(
        events="zero, forward 012, backward, update 0, look now|, update 12"
    ),
    **{
        f"rank {rank} steps, others step on {what}": Program(before=before, events=f"zero, forward 012, backward, step {rank}")
        for rank in (0, 1)
        for what, before in (("nothing", ""), ("what is frozen", "freeze 0"))
    },
    **{
        f"{who} looks through the bare module between two steps, {cleared or 'kept'}, {strategy}": Program(
            events=f"zero, forward 012, backward, step, saliency {now}, {cleared}, forward 02|012, backward, step",
            strategy=strategy,
        )
        for who, now, cleared, strategy in (
            ("rank 0", "now|", "zero", "ddp"),
            ("rank 0", "now|", "zero in-place", "zero1"),
            ("rank 0", "now|", "", "zero2"),
            ("every rank", "now", "", "ddp"),
            ("every rank", "now", "zero", "zero2"),
        )
    },
    "gradients of the bare module are reduced by hand": Program(events="zero, saliency now, reduce, step"),
    "rank 0 looks through the bare module before the first step": Program(
        events="saliency now|, zero, forward 012, backward, step", times=1
    ),
    "the mean after rank 0 has looked through the bare module": Program(
        events="zero, forward 012, backward, step, saliency now|, zero, tokens 1|4, forward 012, backward, step"
    ),
    "a rank evaluates alone": Program(events="zero, forward 012, backward, step, evaluate now|"),
    **{
        f"a state is cleared, {strategy}": Program(
            before="freeze 2",
            events="zero, forward 012, backward, step flying, forget, zero, thaw 2, forward 012, backward, step, freeze 1",
            strategy=strategy,
        )
        for strategy in ("ddp", "zero1", "zero2")
    },
    "a state is cleared while a parameter is frozen": Program(
        events="zero, forward 012, backward, step, freeze 1, zero, forward 012, backward, step, forget, thaw 1", strategy="zero1"
    ),
    "a state dict goes round": Program(events="zero, forward 012, backward, step, reload", strategy="zero1", plan="each"),
    "a gradient that was there before the forward is none, in a later step": Program(
        events="zero, forward 012, backward, zero, write 1, forward 02, backward, zero, write 1, forward 02, accumulate, reduce"
    ),
    "a state dict of a model without shards goes round": Program(events="zero, forward 012, backward, step, reload"),
    "empty and single parameters are left out": Program(
        units="linear odd", events="zero, forward 01|0, backward, step, forward 0, backward, zero, forward 0, backward, step"
    ),
}

# Steps on gradients that were only accumulated.
CUTS = {
    "ends": "zero, forward 012 quiet, accumulate, step",
    "ends before another": "zero, forward 012 quiet, accumulate, step, zero, forward 012, backward, step",
    "reaches nothing on one rank": "zero, forward 012 quiet|- quiet, accumulate, step",
    "has a forward that would synchronize": "zero, forward 012|01, accumulate, step",
    "has two backwards": "zero, forward 012 quiet, accumulate, forward 02 quiet|1 quiet, accumulate, step",
    "follows a synchronization": "zero, forward 012, backward, forward 12 quiet|0 quiet, accumulate, step",
    "ends on the others": "zero, forward 012 quiet|012, accumulate, step",
    "was zeroed": "zero, forward 012 quiet, accumulate, zero, forward 01 quiet|12 quiet, accumulate, step",
    "comes before a look of one rank": "zero, forward 01 quiet, accumulate, step, zero, forward 012, backward, look now quiet|, step",
}
CUT_SHORT = {
    **{
        f"a window that is cut short {name}, {strategy}": Program(events=events, strategy=strategy)
        for name, events in CUTS.items()
        for strategy in ("ddp", "zero1", "zero2")
    },
    "a window that is cut short, with a hook": Program(events=CUTS["ends before another"], has_hook=True),
    "a window that is cut short, attached": Program(events=CUTS["ends before another"], is_attached=True),
    "a window that is cut short, in one bucket": Program(events=CUTS["reaches nothing on one rank"], plan="one"),
    "a step of its own, and a common one": Program(
        events="zero, forward 012 quiet, accumulate, step alone, zero, forward 012, backward, step"
    ),
    "steps of its own, and a common one that adds to what they have left": Program(
        events="zero, forward 012 quiet, accumulate, step alone, forward 02 quiet, accumulate, step alone, forward 012, backward, step"
    ),
    **{
        f"backwards of the bare module only, {strategy}": Program(
            events="zero, forward 012 inside|01 inside, local, step, zero, forward 012 inside, local, forward 0 inside, local, step",
            strategy=strategy,
        )
        for strategy in ("ddp", "zero1", "zero2")
    },
    **{
        f"everything is saved and loaded, the {first} first, {strategy}": Program(
            events=f"zero, forward 012, backward, step, resume {first}", strategy=strategy
        )
        for first in ("model", "optimizer")
        for strategy in ("ddp", "zero1", "zero2")
    },
}

EXAMPLES = {**OF_EVERY_KIND, **USED, **WINDOWS_OF_ALL, **ACCUMULATED, **CHANGED, **COMBINED, **CUT_SHORT, **WRITTEN_OR_DISTURBED}

# The mean of three equal values may have other bits, and a third rank is neither the first nor the last.
ON_THREE_RANKS = [
    *(name for name in USED if "joins" not in name),
    *("micro-batches are summed here and averaged once", "a second backward adds the mean of what is new"),
    *PATTERNS,
    *("units of every kind train together", "twice-reentrant units train"),
]
