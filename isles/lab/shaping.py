"""The shape of a link: bandwidth, latency, loss, by the kernel's traffic control at the sending interface.

Bandwidth is a token bucket (tbf) on what leaves an interface. It counts whole Ethernet frames, as a provider
does. The bucket holds 2 ms, or two frames: enough for the clock of the kernel, and little enough that a transfer of
a megabyte goes at the rate and not at the speed of memory. In front of it waits a queue of 50 ms, or eight frames;
what does not fit is dropped, and TCP slows down, as on a real uplink.

Latency and loss are netem's, in front of the bucket, on the way out of an island. Not every kernel has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isles.plan.quantities import positive

ETHERNET_BYTES = 14
HEADER_BYTES = 20 + 32
"""Of IP, and of TCP with time stamps; inside the MTU."""
BURST_SECONDS, QUEUE_SECONDS = 0.002, 0.05

Execute = Callable[[Sequence[str]], str]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A link in one direction.

    >>> Shape(bits_per_second=20e6).burst_bytes, Shape(bits_per_second=1e9).burst_bytes
    (18028, 250000)
    """

    bits_per_second: float
    latency_seconds: float = 0.0
    """One way: half of what ping shows."""
    loss: float = 0.0
    """The share of frames that are lost."""
    mtu: int = 9000

    def __post_init__(self) -> None:
        positive(self.bits_per_second, f"bandwidth {self.bits_per_second}")
        if self.bits_per_second < 1000:
            raise ValueError(f"bandwidth {self.bits_per_second:g} bit/s is less than tc can do: use 1 kbit/s or more")
        positive(self.latency_seconds, f"latency {self.latency_seconds}", or_zero=True)
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss {self.loss} must be a share from 0 to below 1: 0.01 for one frame in a hundred")
        if not 576 <= self.mtu <= 65535:
            raise ValueError(f"mtu {self.mtu} must be from 576 to 65535 bytes: 1500, or 9000 for jumbo frames")

    @property
    def frame_bytes(self) -> int:
        return self.mtu + ETHERNET_BYTES

    @property
    def burst_bytes(self) -> int:
        return max(2 * self.frame_bytes, int(self.bits_per_second * BURST_SECONDS / 8))

    @property
    def queue_bytes(self) -> int:
        return max(8 * self.frame_bytes, int(self.bits_per_second * QUEUE_SECONDS / 8))

    @property
    def goodput_bits_per_second(self) -> float:
        """What TCP can carry of it at best: a frame's payload over the frame."""
        return self.bits_per_second * (self.mtu - HEADER_BYTES) / self.frame_bytes


def parse_share(text: str) -> float:
    """
    >>> parse_share("0.1%"), parse_share("0.001")
    (0.001, 0.001)
    """
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError(f"--loss {text!r} is not understood: write a share such as 0.1% or 0.001") from None


def apply(execute: Execute, device: str, shape: Shape, *, outward: bool) -> None:
    """Shapes what leaves a device; again: changes it, and nothing in flight is lost. `outward`: with latency, loss."""
    netem = _netem(shape) if outward else []
    if netem:
        try:
            execute(["tc", "qdisc", "replace", "dev", device, "root", "handle", "1:", "netem", *netem])
        except OSError as error:
            raise ValueError(
                f"this kernel has no netem ({error}), so latency and loss cannot be set: leave --latency and "
                "--loss out, or load the module sch_netem"
            ) from None
    bucket = [
        "rate",
        f"{shape.bits_per_second:.0f}bit",
        "burst",
        str(shape.burst_bytes),
        "limit",
        str(shape.queue_bytes),
    ]
    place = ["parent", "1:1", "handle", "10:"] if netem else ["root", "handle", "10:"]
    execute(["tc", "qdisc", "replace", "dev", device, *place, "tbf", *bucket])


def _netem(shape: Shape) -> list[str]:
    """The options of netem; none if it is not needed."""
    options: list[str] = []
    if shape.latency_seconds:
        options += ["delay", f"{shape.latency_seconds * 1e6:.0f}us"]
    if shape.loss:
        options += ["loss", f"{shape.loss:.4%}"]
    in_flight = math.ceil(shape.bits_per_second / 8 * shape.latency_seconds / shape.frame_bytes)
    return [*options, "limit", str(1000 + 2 * in_flight)] if options else []
