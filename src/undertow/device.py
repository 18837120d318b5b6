"""The devices that tensors are on, and the streams that their operators run on.

No other file makes streams or events, and all others ask here if the host may read a result.

Host         an operator has run when its call returns
Accelerator  an operator runs later, on a stream; events order streams without the host
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor


class Host:
    """The host: its tensors have their values when a call returns, and it has no streams."""

    is_host: ClassVar = True
    record: ClassVar[None] = None  # no stream needs an event

    def __init__(self, place: torch.device) -> None:
        self.place = place  # to make tensors on

    def new_stream(self) -> torch.Stream | None:
        """Returns None: calls run in the order of the program."""
        return None

    def use(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Context that does nothing."""
        return nullcontext()

    def keep(self, tensor: Tensor) -> Tensor:
        """Returns the tensor."""
        return tensor

    def synchronize(self) -> None:
        """Does nothing."""

    def to_device(self, values: Sequence[float] | Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a small tensor, perhaps the given one."""
        return torch.as_tensor(values, dtype=dtype)

    def memory_on_host(self, num_bytes: int) -> Tensor:
        """Returns bytes for copies of large tensors."""
        return torch.empty(num_bytes, dtype=torch.uint8)


class Accelerator:
    """A CUDA device, or another one that `torch.accelerator` knows: its streams run after the host
    has continued."""

    is_host: ClassVar = False

    def __init__(self, place: torch.device) -> None:
        self.place = place  # to make tensors on

    def new_stream(self) -> torch.Stream | None:
        """Returns a new stream."""
        return torch.Stream(self.place)

    @contextmanager
    def use(self, stream: torch.Stream | None) -> Iterator[None]:
        """Context that makes `stream`, from `new_stream`, the current one. Contexts may nest."""
        assert stream is not None
        # torch's own `with stream` refuses to nest.
        with torch.accelerator.device_index(self.place.index):
            before = torch.accelerator.current_stream(self.place)
            torch.accelerator.set_stream(stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def stream_of(self, tensor: Tensor) -> torch.Stream:
        """Returns the stream that operators on `tensor` run on now."""
        return torch.accelerator.current_stream(tensor.device)

    def wait_for(self, streams: Iterable[torch.Stream]) -> None:
        """Makes the current stream wait for the present operators of others."""
        for stream in streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)

    def record(self, *, timed: bool = False) -> torch.Event:
        """Returns an event of this moment on the current stream."""
        event = torch.Event(self.place, enable_timing=timed)
        event.record()
        return event

    def keep(self, tensor: Tensor) -> Tensor:
        """Returns the tensor. Its memory is not used again before the current stream, perhaps not
        the one that allocated it, has run its present operators."""
        tensor.record_stream(self.stream_of(tensor))
        return tensor

    def synchronize(self) -> None:
        """Makes the host wait for all streams."""
        torch.accelerator.synchronize(self.place)

    def to_device(self, values: Sequence[float] | Tensor, dtype: torch.dtype) -> Tensor:
        """Returns a small tensor on the device. The host does not wait for the copy."""
        # The caching allocator reuses pinned memory only after the copy has run.
        on_host = torch.as_tensor(values, dtype=dtype).pin_memory()
        return on_host.to(self.place, non_blocking=True)

    def to_host(self, tensor: Tensor) -> Tensor:
        """Returns a pinned copy on the host. It has its values once the next event is reached."""
        on_host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return on_host.copy_(tensor, non_blocking=True)

    def memory_on_host(self, num_bytes: int) -> Tensor:
        """Returns pinned bytes for copies of large tensors: the device writes them itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


Device: TypeAlias = Host | Accelerator

# By the type of a torch.device; all others are accelerators. Tests enter a fake one.
MAKERS: dict[str, Callable[[torch.device], Device]] = {"cpu": Host, "meta": Host}


def device_of(place: torch.device) -> Device:
    """Returns the device of the tensors on `place`."""
    return MAKERS.get(place.type, Accelerator)(place)
