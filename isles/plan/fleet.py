"""The islands that train together: how long a step takes on each, and the link that joins it to the others.

Only what is between islands is modelled. A link has a bandwidth in each direction and a latency; inside an island
everything is as fast as the measured time of a step says. A synchronous exchange goes at the pace of the slowest
direction of the slowest link, since every payload has to get out of every island and into every other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isles.plan.quantities import positive


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins an island to the others.

    >>> Link.symmetric(1e9).down_bits_per_second
    1000000000.0
    """

    up_bits_per_second: float
    down_bits_per_second: float
    latency_seconds: float = 0.0
    """One way, from island to island: half of what ping shows."""

    def __post_init__(self) -> None:
        positive(self.up_bits_per_second, f"up_bits_per_second={self.up_bits_per_second}")
        positive(self.down_bits_per_second, f"down_bits_per_second={self.down_bits_per_second}")
        positive(self.latency_seconds, f"latency_seconds={self.latency_seconds}", or_zero=True)

    @classmethod
    def symmetric(cls, bits_per_second: float, latency_seconds: float = 0.0) -> Link:
        """A link that is as fast up as down."""
        return cls(
            up_bits_per_second=bits_per_second, down_bits_per_second=bits_per_second, latency_seconds=latency_seconds
        )


@dataclass(frozen=True, kw_only=True)
class Island:
    """One replica of the model and what it trains on."""

    step_seconds: float
    """Time of an inner step, without any exchange with other islands."""
    link: Link

    def __post_init__(self) -> None:
        positive(self.step_seconds, f"step_seconds={self.step_seconds}")


def alike(islands: int, step_seconds: float, link: Link) -> tuple[Island, ...]:
    """So many islands of one kind."""
    if islands < 1:
        raise ValueError(f"islands={islands} must be at least 1")
    return (Island(step_seconds=step_seconds, link=link),) * islands


def slowest_bits_per_second(fleet: Sequence[Island]) -> float:
    """The pace of an exchange.

    >>> fast, slow_up = Link.symmetric(1e9), Link(up_bits_per_second=2e7, down_bits_per_second=1e8)
    >>> slowest_bits_per_second([Island(step_seconds=1, link=link) for link in (fast, slow_up)])
    20000000.0
    """
    return min(min(island.link.up_bits_per_second, island.link.down_bits_per_second) for island in fleet)


def longest_latency_seconds(fleet: Sequence[Island]) -> float:
    """An exchange is over when its slowest message has arrived."""
    return max(island.link.latency_seconds for island in fleet)
