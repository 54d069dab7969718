"""The protocol between the engine and the network: the only door.

The engine hands a world a *payload*, one encoded outer gradient, and gets back a *handle*. Waiting on it gives the
*mean* over the islands that took part, the same on every island, and says who they were. Nothing in the engine knows
whether the others are threads, processes or continents, nor how many they are.

    world.start(payload) -> handle    does not block; every island starts the same rounds in the same order
    handle.wait()        -> Mean      blocks; may be called again, and then answers at once
    world.gather(data)   -> [bytes]   blocks; bytes from every island, for comparing settings
    world.close(reason)               leaves, and tells the others why; a world of one's own may do without

A world whose islands come and go (`ElasticWorld`) has no gather: an island joins a run, is told where in the schedule
it is, and may find that a round was completed without it.

Two things can go wrong, and both are loud. `LostPeerError`: an island died, left, or did not answer within the timeout.
`MismatchError`: the islands are not doing the same thing, or a payload was damaged on the way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from isles.wire.codecs import Codec

if TYPE_CHECKING:
    from isles.wire.reduction import Gathered


class LostPeerError(RuntimeError):
    """An island died, left or fell silent; the round cannot be completed."""


class MismatchError(ValueError):
    """Islands disagree about what they are doing, or a payload arrived damaged."""


@dataclass(eq=False)
class Payload:
    """One island's part in one round. An island that has nothing to contribute takes part with weight zero."""

    fragment: int
    round: int
    codec: Codec
    numel: int
    weight: float
    encoded: Tensor | Callable[[], Tensor | None] | None
    """uint8, on the CPU: `codec.encode` of the outer gradient; None: there is nothing to contribute. Or a function that
    makes it, called once: a world with threads of its own calls it there. Weight and steps count once it is made."""
    step: int = 0
    """How many steps the island has taken, for error messages."""
    steps: int = 0
    """How many of them this payload contains."""
    closing: bool = False
    """Sent by `finish()`: the island ends here."""
    then: Callable[[Mean], None] | None = field(default=None, kw_only=True)
    """Called with the mean as soon as it has arrived, if the world has a thread to call it in. Otherwise it is never
    called, and whoever waits for the round does that work."""
    gathers: bool = field(default=False, kw_only=True)
    """The mean is made on a device, so `Mean.result` may be the payloads, where the world has those of all islands."""
    _making: Any = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def body(self) -> Tensor:
        """What goes over the wire. Once it is made, what it was made of is released."""
        with self._making:
            made = self.encoded() if callable(self.encoded) else self.encoded
            if made is None:
                self.weight, self.steps, made = 0.0, 0, torch.zeros(self.num_bytes, dtype=torch.uint8)
            self.encoded = made
            return made

    @property
    def num_bytes(self) -> int:
        """Size of the body."""
        return self.codec.num_bytes(self.numel)


@dataclass(eq=False)
class Mean:
    """The answer of a round, the same on every island but for `included` and `missed`."""

    result: Tensor | Gathered
    """The values; or, if that was asked for, the payloads that they are to be made of."""
    weights: dict[int, float]
    """Who took part: the weight of each island, by rank; islands of weight zero are left out."""
    included: bool = True
    """Whether this island's payload is among those that were averaged (or would be, had it a weight)."""
    missed: tuple[Missed, ...] = ()
    """What the others did without this island, in order: to be applied before this one."""
    closing: bool = False
    """Everybody who is in it ends with it."""
    superseded: bool = False
    """The global model contains this round already: there is nothing to apply."""
    late_seconds: float | None = None
    """How much too late this island's payloads come, if it sent one and is not included; None: not known."""

    @property
    def values(self) -> Tensor:
        """fp32, on the host: the weighted mean over those who took part; zeros if nobody did."""
        return self.result if isinstance(self.result, Tensor) else self.result.mean()

    @property
    def total_weight(self) -> float:
        return sum(self.weights.values())


class MissedRound(NamedTuple):
    """A round that this island has to catch up on."""

    fragment: int
    round: int
    mean: Mean


class Snapshot(NamedTuple):
    """The state after a round, in the place of all rounds up to it: an island was away for longer than they are kept,
    or has just joined.
    """

    fragments: list[dict[str, Tensor]]
    """Of every fragment: anchor, velocity and what else the outer optimizer remembers."""
    counted: tuple[tuple[int, int], ...] = ()
    """(fragment, round) of what this island had in flight and the snapshot contains."""
    dropped: tuple[tuple[int, int], ...] = ()
    """The same of what the snapshot does not contain."""


Missed = MissedRound | Snapshot


class Handle(Protocol):
    """A round in flight. One that completes in the background may have `arrived`: when it did, by `perf_counter`."""

    @property
    def bytes_sent(self) -> int: ...  # what this island puts on the link for the round, headers included
    @property
    def bytes_received(self) -> int: ...

    def wait(self) -> Mean: ...


class World(Protocol):
    """Islands that can average."""

    @property
    def rank(self) -> int: ...  # this island's number, from 0
    @property
    def size(self) -> int: ...  # how many islands there are *now*: never build on it staying the same
    def start(self, payload: Payload) -> Handle: ...

    def gather(self, data: bytes) -> list[bytes]: ...


@dataclass(frozen=True)
class Joining:
    """What an island is, for those who are there already. Whoever is first makes the run, with its own state."""

    settings: str
    """JSON: what has to be the same on all islands."""
    model: str
    """Digest of names and shapes."""
    schedule: Any
    codec: Codec
    numels: list[int]
    """Of the fragments, on this rank."""
    empty: list[int]
    """Fragments with nothing in them, on any rank."""
    state: Callable[[], list[dict[str, Tensor]]]
    """The outer state of this rank, now."""
    ranks: Sequence[int] = ()
    """Of the default process group: those of the island, if it has several. All of them join at the same time."""


class ElasticWorld(World, Protocol):
    """Islands that come and go. Every island has read the same log of completed rounds, some of them later."""

    def join(self, joining: Joining) -> Iterator[Missed]:
        """Becomes an island of the run: what it gives, applied in order, is the global model."""

    @property
    def clock(self) -> int: ...  # where in the schedule a new island starts

    def reach(self, clock: int) -> int:
        """A step was taken. Returns the clock to go on with: this one or, for an island that is behind, a later one."""

    def wants(self, fragment: int, round: int) -> bool:
        """Whether a payload of this round may still count."""

    def watch(self, fragment: int, round: int) -> Handle:
        """A round to which this island has sent nothing."""

    def applied(self, fragment: int, round: int) -> bool:
        """A round has been applied. Whether this island completed it for all."""

    def order(self, fragment: int, round: int) -> int:
        """The place of a round in the log."""

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received besides payloads that were sent, since the last call."""

    def last_rounds(self, fragments: Sequence[int]) -> list[tuple[int, int]]:
        """(fragment, round) of the rounds to send before their time, so that each of these fragments is sent once."""

    def finish(self) -> None:
        """No more steps will be taken: the rounds that were sent are waited for at once."""

    def close(self, reason: str = "") -> None:
        """Leaves. The others do not wait for this island any more."""


def is_elastic(world: World) -> TypeGuard[ElasticWorld]:
    """Whether the islands of this world come and go."""
    return hasattr(world, "join")


@dataclass(frozen=True)
class Arrived:
    """The handle of a round that is over: what a resumed run has in flight."""

    mean: Mean
    bytes_sent: int = 0
    bytes_received: int = 0

    def wait(self) -> Mean:
        return self.mean


def default_world(island_ranks: Sequence[int]) -> tuple[World, bool]:
    """The world of an island that trains on these ranks, and whether it was made here and has to be closed.

    Inside `run_local` it is the island's own; else all of torch.distributed's ranks that hold the same place in their
    islands; without torch.distributed, one island alone.
    """
    from isles.wire.local_world import LocalWorld

    here = LocalWorld.current()
    if here is not None:
        return here, False
    if dist.is_available() and dist.is_initialized():
        from isles.wire.groups import ranks_at_the_same_place
        from isles.wire.torch_world import TorchWorld

        return TorchWorld(ranks_at_the_same_place(island_ranks)), True
    if dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, and they are not joined: call "
            "torch.distributed.init_process_group() first (or, for an island alone, world=isles.LocalWorld.alone())"
        )
    return LocalWorld.alone(), True
