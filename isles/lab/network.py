"""Islands joined by a bridge: one namespace each, one more for the bridge, a pair of virtual Ethernet devices each.

    island 0                        the middle                        island 1
    [ eth0 ]----------------[ port0 ]--[ bridge ]--[ port1 ]----------------[ eth0 ]
      tbf: out of island 0     tbf: into island 0     tbf: into island 1      tbf: out of island 1

What an island sends is shaped where it leaves eth0, what it receives where it leaves the bridge's port. A frame is what
crosses a real cable: segmentation offload, in which the kernel hands over several as one, is switched off, so counters,
which count at eth0, see every header.

The default MTU is 9000 (jumbo frames): headers and acknowledgements of TCP are then 1 % of the payload, and what the
kernel counts can be compared with what isles says it sent. With 1500 they are 5 to 7 %. TCP's congestion control is
cubic where the kernel has it, which is the default nearly everywhere, whatever this machine is set to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from isles.lab import shaping
from isles.lab.namespaces import Namespace
from isles.lab.shaping import Shape

DEVICE = "eth0"
BRIDGE = "bridge0"
MOST_ISLANDS = 100
CONGESTION_CONTROL = "cubic"


@dataclass(frozen=True)
class Counters:
    """What the kernel has counted at an island's interface since it was made: bytes of whole frames."""

    sent_bytes: int
    received_bytes: int
    sent_frames: int
    received_frames: int

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(_values(self), _values(earlier), strict=True)))


class Network:
    """Islands on slow links; a context manager. Programs that are still running when it closes are killed.

    `bandwidth` is in bit/s, in each direction; `latency` in seconds, one way; `loss` a share of frames.
    """

    def __init__(
        self, islands: int = 2, bandwidth: float = 100e6, *, latency: float = 0.0, loss: float = 0.0, mtu: int = 9000
    ) -> None:
        check_islands(islands)
        shape = Shape(bits_per_second=bandwidth, latency_seconds=latency, loss=loss, mtu=mtu)
        self.shapes = [shape] * islands
        self._machines: list[Namespace] = []
        try:
            self._middle = self._make("lab")
            self._middle.run(["ip", "link", "add", BRIDGE, "mtu", str(mtu), "type", "bridge"])
            self._middle.run(["ip", "link", "set", BRIDGE, "addrgenmode", "none", "up"])
            self.islands = [self._make(f"island-{number}") for number in range(islands)]
            for island in range(islands):
                self._plug_in(island)
                self.shape(island, shape)
            for island in range(islands):
                self._introduce(island)
        except BaseException:
            self.close()
            raise

    def _make(self, name: str) -> Namespace:
        self._machines.append(Namespace(name, within=self._machines[0] if self._machines else None))
        return self._machines[-1]

    def _plug_in(self, island: int) -> None:
        """The pair of devices that joins an island to the bridge."""
        port, mtu, machine = f"port{island}", str(self.shapes[island].mtu), self.islands[island]
        ends = ["ip", "link", "add", port, "mtu", mtu, "type", "veth"]
        own = ["name", DEVICE, "mtu", mtu, "address", hardware_address(island), "netns", str(machine.pid)]
        self._middle.run([*ends, "peer", *own])
        for where, device in ((self._middle, port), (machine, DEVICE)):
            where.run(["ip", "link", "set", device, "addrgenmode", "none", "gso_max_segs", "1"])
        self._middle.run(["ip", "link", "set", port, "master", BRIDGE, "up"])
        machine.run(["ip", "address", "add", f"{self.address(island)}/24", "dev", DEVICE])
        machine.run(["ip", "link", "set", DEVICE, "up"])
        with contextlib.suppress(OSError):  # a kernel without it keeps what it has
            machine.run(["sh", "-c", f"echo {CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"])

    def _introduce(self, island: int) -> None:
        """Tells the bridge where an island is, and the island who the others are. It would have to ask, and on a link
        that is full the question is dropped as often as anything else: after three times there is "no route to host".
        """
        self._middle.run(
            ["bridge", "fdb", "replace", hardware_address(island), "dev", f"port{island}", "master", "static"]
        )
        others = [other for other in range(len(self.islands)) if other != island]
        known = [f"{self.address(other)} lladdr {hardware_address(other)}" for other in others]
        told = [f"ip neighbour replace {each} dev {DEVICE} nud permanent" for each in known]
        self.islands[island].run(["sh", "-ec", "\n".join(told)])

    def address(self, island: int) -> str:
        """Of an island. In the order of islands also as text: torchrun numbers its nodes by that."""
        return f"10.77.0.{101 + island}"

    # ---- programs

    def start(
        self,
        island: int,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a program on an island."""
        return self.islands[island].start(arguments, env=env, stdout=stdout, stderr=stderr)

    def crash(self, island: int) -> None:
        """Kills every program on an island."""
        self.islands[island].kill_all()

    # ---- links

    def shape(self, island: int, shape: Shape) -> None:
        """Makes an island's link, in both directions, what it should be from now on."""
        shaping.apply(self.islands[island].run, DEVICE, shape, outward=True)
        shaping.apply(self._middle.run, f"port{island}", shape, outward=False)
        self.shapes[island] = shape

    def set_bandwidth(self, bits_per_second: float, island: int | None = None) -> None:
        """Changes the bandwidth of one island's link, or of all, while programs run."""
        for number in range(len(self.islands)) if island is None else (island,):
            self.shape(number, dataclasses.replace(self.shapes[number], bits_per_second=bits_per_second))

    def link_down(self, island: int) -> None:
        """Pulls an island's cable."""
        self._middle.run(["ip", "link", "set", f"port{island}", "down"])

    def link_up(self, island: int) -> None:
        """Plugs it in again."""
        self._middle.run(["ip", "link", "set", f"port{island}", "up"])

    # ---- the kernel's counters

    def counters(self, island: int) -> Counters:
        """What has crossed an island's interface so far."""
        found = re.search(rf"{DEVICE}:\s*(.*)", self.islands[island].read("net/dev"))
        assert found, f"no {DEVICE} on island {island}"
        numbers = [int(number) for number in found.group(1).split()]
        return Counters(numbers[8], numbers[0], numbers[9], numbers[1])

    def congestion_control(self) -> str:
        """How TCP reacts to loss here: cubic, bbr ..."""
        return self.islands[0].run(["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]).strip()

    # ---- the end

    def close(self) -> None:
        """Kills what runs on the islands, and removes them; again: nothing."""
        while self._machines:
            self._machines.pop().close()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_islands(islands: int) -> None:
    """Raises ValueError for a number of islands that cannot be."""
    if not 1 <= islands <= MOST_ISLANDS:
        raise ValueError(f"islands={islands} must be from 1 to {MOST_ISLANDS}")


def hardware_address(island: int) -> str:
    """Of an island's interface: a local one (02)."""
    return f"02:00:00:00:00:{island:02x}"


def _values(counters: Counters) -> tuple[int, ...]:
    return dataclasses.astuple(counters)
