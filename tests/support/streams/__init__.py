"""A checker of stream order for a machine without an accelerator.

Operators run at once, on tensors of the host. But every read and write is booked to the logical stream that is current, by the
bytes that it touches, and events and waits are the edges of vector clocks. Whatever is right only by chance of timing on a real
device is a finding here, every time, with the stacks of both accesses:

- a read without an edge from the last write, a write while another stream may still read or write;
- memory that is freed while a stream other than its own may still use it, and that was not kept for that stream;
- pinned memory that the host reads before it has seen the event of the copy;
- collectives: inputs that change between launch and wait, outputs that are read before, an order that differs between ranks.

Outputs of a collective are NaN from the launch until some stream has waited. Host synchronizations are not findings: they are
counted, and `without_synchronization` makes them errors.

To use it alone (it needs torch only; nothing here imports the project that it is a part of):

    from support.streams import Checker

    with Checker() as checker:  # at its end it raises StreamErrors with all findings
        model = checker.place(nn.Linear(8, 8))  # from now on its memory is on the device, `cpu:0`
        side = checker.new_stream()
        x = torch.randn(4, 8, device="cpu:0")  # so is this
        with checker.use(side):
            y = model(x)  # a finding: `side` has not waited for the stream that has made x
        checker.record(side).wait()  # the current stream waits
        y.sum().item()  # right; one more in checker.synchronizations

Everything that an operator makes out of device memory is device memory, unless `device="cpu"` is asked for, without an index;
factories with `device="cpu:0"` make device memory, others the host's. `tensor.device` is `cpu:0` for device memory. Hence code
under test must take devices from tensors, and its own streams and events from the checker. `x.to("cpu", non_blocking=True)`
makes pinned memory; `x.to("cpu:0", non_blocking=True)` takes the host's for pinned.

Collectives: `dist.init_process_group("streams", ...)` or `dist.new_group(backend="streams")` inside of the context; gloo carries
the values. As with NCCL a group has a separate stream, which waits for the stream that is current at the launch; `wait()`
makes the current stream wait and not the host; `is_completed()` is False until the host has seen the end. There is no
send, no receive and no reduction of sparse tensors. All ranks must leave the context together, unless one raises.

`OnStream(module, stream)` runs a module's forward and backward on a stream, with the edges that autograd adds on a device.

It cannot see how long anything takes, what kernels do inside, or memory that C++ or NumPy touches without an
operator of torch's (that it compares the inputs of collectives helps a little). A tensor with gaps counts as all bytes from its
first to its last element. Host threads count as one host: it takes their order for the order of the program.
"""

from support.streams.checker import Checker, OnStream, StreamErrors
from support.streams.clocks import Event, Stream

__all__ = ["Checker", "Event", "OnStream", "Stream", "StreamErrors"]
