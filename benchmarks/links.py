"""Links between the ranks of this machine: shaped ones between network namespaces, or the machine's own.

    rank 0            rank 1            a namespace each, named after this process
    eth0 tbf 1gbit    eth0 tbf 1gbit    each rank's way out is shaped
      └──── br0 ────────┘               a bridge in a namespace of its own: the host's is not touched

Needs root and iproute2. Leaving the `with` block deletes the namespaces, also on Ctrl-C, SIGTERM and SIGHUP; those of a runner
that was killed are removed by the next one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.errors import NoNamespaces
from benchmarks.processes import interrupts_postponed

NAMESPACES = Path("/run/netns")  # where iproute2 keeps them
PREFIX = "undertow-bench-"
LOOPBACK = "loopback"  # the link of ranks without namespaces: it shows that a benchmark works, and times nothing
INTERFACE = "eth0"  # of a rank in its namespace
_SUBNET = "10.77.0"
_numbers = count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A rate for `tc tbf`; None leaves the virtual cable as fast as it is."""

    rate: str | None
    burst_bytes: int = 128 * 1024


SHAPES = {
    "100mbit": Shape(rate="100mbit"),
    "1gbit": Shape(rate="1gbit"),
    "5gbit": Shape(rate="5gbit", burst_bytes=640 * 1024),
    "none": Shape(rate=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Where ranks run and what they talk over."""

    interface: str
    namespaces: tuple[str, ...] = ()  # by rank

    def command(self, rank: int, command: Sequence[str]) -> list[str]:
        """`command`, to be run where `rank` lives."""
        return ["ip", "netns", "exec", self.namespaces[rank], *command] if self.namespaces else list(command)

    def address(self, rank: int) -> str:
        """Returns where `rank` is reached, over a shaped link."""
        return f"{_SUBNET}.{rank + 1}"


def what_is_missing() -> str | None:
    """Why shaped links cannot be made here; None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool!r} is not installed (Debian, Ubuntu: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "this user is not root"
    try:
        with shaped_network("1gbit", num_ranks=1):  # all that a run needs: bridge, cable, sysctl, token bucket
            return None
    except NoNamespaces as error:
        return f"they are refused ({error})"


@contextmanager
def network_of(link: str, num_ranks: int) -> Iterator[Network]:
    """Joins `num_ranks` ranks by a shaped link, or by LOOPBACK. Raises NoNamespaces."""
    if link == LOOPBACK:
        yield Network(interface="lo")
        return
    with shaped_network(link, num_ranks) as network:
        yield network


@contextmanager
def shaped_network(link: str, num_ranks: int) -> Iterator[Network]:
    """Namespaces for `num_ranks` ranks joined by `link`, deleted at the end. Raises NoNamespaces."""
    stem = f"{PREFIX}{os.getpid()}-{next(_numbers)}"
    hub, spokes = f"{stem}-hub", tuple(f"{stem}-{rank}" for rank in range(num_ranks))
    made: list[str] = []
    try:
        for name in (hub, *spokes):
            made.append(name)
            _run("ip", "netns", "add", name)
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        for rank, spoke in enumerate(spokes):
            _join(hub, spoke, rank, SHAPES[link])
        yield Network(interface=INTERFACE, namespaces=spokes)
    finally:
        with interrupts_postponed():
            for name in made:
                # Of a session of its own: Ctrl-C reaches every process of the terminal's.
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, start_new_session=True)


def enter(namespace: str) -> None:
    """Moves the calling thread, and the threads that it starts from now on, into a network namespace."""
    descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)


def sent_bytes() -> int:
    """Returns the bytes that have left this namespace through its cable, headers included."""
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, values = line.partition(":")
        if name.strip() == INTERFACE:
            return int(values.split()[8])
    return 0


def remove_abandoned() -> None:
    """Deletes the namespaces of runners that are gone, as far as this user can."""
    for path in sorted(NAMESPACES.glob(f"{PREFIX}*")):
        owner = path.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with suppress(NoNamespaces, OSError):  # an OSError where there is no `ip`
                _run("ip", "netns", "del", path.name)


def _join(hub: str, spoke: str, rank: int, shape: Shape) -> None:
    port = f"port{rank}"
    _run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", spoke)
    _run("ip", "-n", hub, "link", "set", port, "master", "br0", "up")
    _run("ip", "-n", spoke, "addr", "add", f"{_SUBNET}.{rank + 1}/24", "dev", INTERFACE)
    _run("ip", "-n", spoke, "link", "set", INTERFACE, "up")
    _run("ip", "-n", spoke, "link", "set", "lo", "up")
    # bbr, where it is the default, misjudges a token bucket; cubic is refused inside a namespace.
    _run("ip", "netns", "exec", spoke, "sysctl", "-q", "-w", "net.ipv4.tcp_congestion_control=reno")
    if shape.rate is not None:
        bucket = ("rate", shape.rate, "burst", str(shape.burst_bytes), "latency", "100ms")
        _run("tc", "-n", spoke, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *bucket)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise NoNamespaces(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
