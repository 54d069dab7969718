"""For tests of the laboratory: can this system make networks? In CI it has to; elsewhere such tests are skipped.

And what do links carry? Asked of the kernel's counters (`Meter`), since a busy machine lets a program look and act only
now and then.
"""

import os
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from isles.lab import Network, namespaces
from isles.lab.network import Counters
from isles.lab.shaping import ETHERNET_BYTES, HEADER_BYTES


def require() -> None:
    """Skips the test where namespaces are impossible, and says why; fails it in CI."""
    try:
        namespaces.check()
    except OSError as error:
        if os.environ.get("CI"):
            pytest.fail(f"in CI the laboratory has to work: {error}")
        pytest.skip(str(error))


def wait_until(holds, what: str, seconds: float = 240.0) -> None:
    """Until something holds; the limit is there for what hangs."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def alive(marker: str) -> bool:
    """Is there a process `sleep MARKER`?"""
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and Path(f"/proc/{entry}/cmdline").read_bytes() == b"sleep\0%s\0" % marker.encode():
                return True
        except OSError:
            pass
    return False


@dataclass(frozen=True)
class Sample:
    """What the kernel had counted on every island, at some moment between two."""

    before: float
    islands: list[Counters]
    after: float


class Meter:
    """Watches links that are full, from now on.

    Two samples are a window. That counters were read late, or that a machine had no time for its links, does not make
    links carry too much in any window, nor enough in one if they cannot.
    """

    def __init__(self, network: Network) -> None:
        self.network, self.samples = network, list[Sample]()

    def wait_until_carried(self, rates: dict[int, float], tolerance: float, frames: int = 40) -> None:
        """Until there is a window of so many frames to each of these islands in which all of them, at once, have got
        their rate, in bits of payload per second, but for the tolerance. What a bucket held at first does not count.
        """
        wanted = {island: (1 - tolerance) * rate for island, rate in rates.items()}

        def carried() -> bool:
            self._sample()
            full = [sample for sample in self.samples if all(self._frames(sample, island) >= 10 for island in rates)]
            return any(
                all(self._frames(full[-1], island) - self._frames(begin, island) >= frames for island in rates)
                and all(rate_to(island, begin, full[-1]) >= least for island, least in wanted.items())
                for begin in full[:-1]
            )

        wait_until(carried, f"a window in which the links carry {wanted} bit/s")

    def check_that_no_link_has_carried_more_than_it_may(self) -> None:
        """In any window, out of an island and into it: no more than its bandwidth and a bucket."""
        for island, shape in enumerate(self.network.shapes):
            for begin, end in combinations(self.samples, 2):
                most = shape.bits_per_second / 8 * (end.after - begin.before) + shape.burst_bytes
                counted = end.islands[island] - begin.islands[island]
                assert counted.sent_bytes <= most, f"out of island {island}, at {shape.bits_per_second:g} bit/s"
                assert counted.received_bytes <= most, f"into island {island}, at {shape.bits_per_second:g} bit/s"

    def _sample(self) -> None:
        before = time.monotonic()
        islands = [self.network.counters(island) for island in range(len(self.network.islands))]
        self.samples.append(Sample(before, islands, time.monotonic()))

    def _frames(self, sample: Sample, island: int) -> float:
        """Full ones, that an island has got since the first sample."""
        got = payload(sample.islands[island] - self.samples[0].islands[island])
        return got / (self.network.shapes[island].mtu - HEADER_BYTES)


def payload(counted: Counters) -> int:
    """The bytes that an island has got without headers: an acknowledgement is a header."""
    return counted.received_bytes - counted.received_frames * (ETHERNET_BYTES + HEADER_BYTES)


def rate_to(island: int, begin: Sample, end: Sample) -> float:
    """Bits of payload per second that an island has got in a window, at least."""
    return 8 * payload(end.islands[island] - begin.islands[island]) / (end.after - begin.before)
