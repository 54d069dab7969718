"""What synchronisation has cost an island, as running totals (`Stats`) and one thing at a time (`Event`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from isles.wire.world import Handle, Payload, World

Kind = Literal["send", "apply", "nonfinite"]


@dataclass
class Stats:
    """What synchronisation has cost this island so far. `dict(stats)` and `stats["sends"]` work too, for logging."""

    bytes_sent: int = 0
    bytes_received: int = 0
    sends: int = 0
    applies: int = 0
    wait_seconds: float = 0.0
    nonfinite_rounds: int = 0
    payload_bytes: int = 0
    payload_parameters: int = 0

    @property
    def payload_bits_per_parameter(self) -> float:
        """Bits on the wire for one parameter sent once, scales included."""
        return 8 * self.payload_bytes / self.payload_parameters if self.payload_parameters else 0.0

    def keys(self) -> list[str]:
        return [*(item.name for item in dataclasses.fields(self)), "payload_bits_per_parameter"]

    def __getitem__(self, name: str) -> float:
        if name not in self.keys():
            raise KeyError(name)
        return getattr(self, name)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Event:
    """Something the engine did, for whoever watches (`on_event`)."""

    kind: Kind
    step: int
    fragment: int
    round: int
    num_bytes: int = 0
    seconds: float = 0.0
    """Time spent encoding (send) or waiting (apply)."""


class Counted:
    """A world whose traffic is counted: outer gradients, and what islands exchange at the start and at the end."""

    def __init__(self, world: World, stats: Stats) -> None:
        self.world, self.stats = world, stats
        self.gather = world.gather

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def start(self, payload: Payload) -> Handle:
        handle = self.world.start(payload)
        self.stats.bytes_sent += handle.bytes_sent
        self.stats.bytes_received += handle.bytes_received
        return handle
