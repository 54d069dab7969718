"""What synchronisation has cost an island, as running totals (`Stats`) and one thing at a time (`Event`).

Under torch.profiler, `phase` names where the time goes: isles.outer_gradient, isles.encode (inside the first, where
both are one pass over memory), isles.wait, isles.outer_step, isles.mix.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from torch.autograd import profiler
from torch.profiler import record_function

Kind = Literal["send", "apply", "nonfinite", "excluded", "catch_up", "join", "leave", "seal"]


@dataclass
class Stats:
    """What synchronisation has cost this island so far. `dict(stats)` and `stats["sends"]` work too, for logging."""

    bytes_sent: int = 0
    bytes_received: int = 0
    sends: int = 0
    applies: int = 0
    """Rounds whose outer steps were taken, those of the others included that this island had no part in."""
    wait_seconds: float = 0.0
    nonfinite_rounds: int = 0
    islands: int = 0
    """How many took part in the last round that was applied."""
    excluded_rounds: int = 0
    """Rounds that the others completed without what this island had sent."""
    catch_up_rounds: int = 0
    """Rounds that this island had no part in and applied later."""
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
    slack_seconds: float | None = None
    """Of an apply: how long before it was due its result arrived; negative: the island waited; None: not known."""
    late_seconds: float | None = None
    """Of an excluded: how much too late the island's payloads come (`isles.elastic.lateness`); None: not known."""


_NOTHING = nullcontext()


def phase(name: str) -> AbstractContextManager[Any]:
    """A range in the profile that is being taken, if there is one: opening a range takes microseconds otherwise too."""
    return record_function(name) if profiler._is_profiler_enabled else _NOTHING
