"""Which features cannot be used together, and what to do instead."""

from collections.abc import Mapping

from undertow.errors import CheckpointError, ConfigError, PhaseError, UndertowError

# Every pair of features that cannot be used together: the error, the reason and the way out.
# docs/limits.md lists them.
REFUSED: Mapping[tuple[str, str], tuple[type[UndertowError], str, str]] = {
    ("closure", "skip"): (
        PhaseError,
        'nonfinite="skip" cannot be used with step(closure): the step has begun when the closure '
        "computes gradients.",
        'Call the closure before step(), or use nonfinite="raise".',
    ),
    ("experts", "checkpoint"): (
        CheckpointError,
        "this model has experts: ranks have different tensors under one name, and a checkpoint "
        "stores one per name.",
        "Save model.state_dict() and optimizer.state_dict() on each rank, in separate files.",
    ),
    ("experts", "hybrid"): (
        ConfigError,
        'experts do not work with strategy="hybrid".',
        'Use "ddp", "zero1" or "zero2".',
    ),
    ("experts", "join"): (
        PhaseError,
        "a rank without data cannot leave a model with experts: tokens of other ranks need the "
        "experts that it holds.",
        "Give every rank the same number of batches.",
    ),
    ("experts", "outer"): (
        ConfigError,
        "outer synchronization does not work with experts: replicas hold different parameters.",
        "Leave outer out.",
    ),
    ("experts", "skip"): (
        ConfigError,
        'nonfinite="skip" cannot be used with experts: only some ranks would know that a step is '
        "to be skipped.",
        'Use "raise".',
    ),
    ("experts", "tensor_parallel"): (
        ConfigError,
        "experts do not work with parameters that are DTensors.",
        "Leave experts out, or name their DTensors in `ignore`.",
    ),
    ("hook", "op"): (
        ConfigError,
        "a communication hook divides gradients itself.",
        "Leave op out, and let the hook divide.",
    ),
    ("hook", "shards"): (
        ConfigError,
        "communication hooks reduce whole gradients, and a ShardedOptimizer needs only shards of "
        "them.",
        "Use a plain optimizer with the hook, or leave the hook out.",
    ),
    ("hook", "wire"): (
        ConfigError,
        "a communication hook chooses the format of the gradients that it sends, and wire asks for "
        "another one.",
        "Leave wire out, or encode in the hook.",
    ),
    ("hybrid", "outer"): (
        ConfigError,
        'outer synchronization does not work with strategy="hybrid", which synchronizes rows in '
        "every step.",
        'Use "zero1": on a mesh, each row shards, and rows are replicas.',
    ),
    ("join", "mean_over_ranks"): (
        PhaseError,
        "mean_over_ranks() was called inside join(): a rank that has left its loop does not "
        "answer.",
        "Leave join() out. Give 0 on a rank without data, call finish() there, and end every "
        "rank's loop when the mean is 0.",
    ),
    ("join", "outer"): (
        PhaseError,
        "join() cannot be used with outer synchronization: each exchange needs all replicas.",
        "Give every rank the same number of batches.",
    ),
    ("join", "shards"): (
        PhaseError,
        "join() cannot be used with a ShardedOptimizer: each step needs all shards, and a rank "
        "without data does not step.",
        "Give every rank the same number of batches: drop_last=True of a DataLoader, or a "
        "sampler that pads, as DistributedSampler does.",
    ),
    ("shards", "sparse"): (
        ConfigError,
        "a gradient is sparse: it cannot be cut into shards.",
        "Make the embedding with sparse=False, or use a plain optimizer.",
    ),
}


def refused(first: str, second: str, *, where: str) -> UndertowError:
    """Returns the error of two features that cannot be used together."""
    error, what, remedy = REFUSED[first, second]
    return error(what, where=where, remedy=remedy)
