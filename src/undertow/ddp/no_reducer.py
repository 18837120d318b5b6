"""Takes the place of torch's C++ reducer, which frameworks call."""


class NoReducer:
    """`model.reducer`: accepts the announcements that frameworks make to the C++ reducer of torch's
    class, and ignores them.

    A backward decides whether to synchronize when it runs, from the parameters it reaches.
    Lightning's manual optimization, Accelerate's `trigger_sync_in_backward` and torch's pipeline
    stages tell torch's reducer that a backward is to synchronize although its forward ran under
    `no_sync`. They call only these methods.
    """

    def prepare_for_backward(self, *_outputs: object) -> None:
        """Does nothing: parameters that the outputs do not reach need not be known before
        backward."""

    _rebuild_buckets = _delay_all_reduce = prepare_for_backward
