"""What the protocol is told before it starts, and what it tells the engine: settings and decisions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isles.elastic.objects import Contribution, Manifest


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How an island behaves. Islands of one run may differ in all of these."""

    quorum: int = 1
    """The least number of payloads in a seal."""
    patience: float = math.inf
    """Seconds after its own send for which an island waits for others."""
    snapshot_every: int = 32
    """Rounds between snapshots."""
    poll: float = 0.2
    """Seconds between two looks for what is not there yet. They grow to a quarter of the time since the last find."""
    longest_poll: float = 3.0
    backoff: float = 0.2
    longest_backoff: float = 10.0
    timeout: float = 600.0
    """Seconds after which an operation that keeps failing, or a payload that stays missing, is an error."""
    max_payload_bytes: int = 1 << 36


@dataclass(frozen=True)
class Apply:
    """Decision: round `number` is the mean of these contributions, in this order."""

    number: int
    contributions: tuple[Contribution, ...]
    seal: str
    """Digest of the seal."""
    included: bool
    """This island is one of them. If not, it moves along, and what it sent is still its own."""
    save: bool
    """It is this island's turn to write a snapshot of the state after this round: call `save` with it."""
    closing: bool
    """Everybody who is in it ends with it."""
    sealed: bool
    """By this island."""


@dataclass(frozen=True)
class Load:
    """Decision: take anchors and velocities from this snapshot.

    An island that has been training moves along, theta + (anchor_new - anchor_old), as for any round it was not in.
    """

    manifest: Manifest
    counted: tuple[int, ...]
    """Of the rounds that it skips, those that include this island."""


Decision = Apply | Load
