"""The protocol between the engine and the network: the only door.

A world joins islands. The engine hands it a *payload*, one encoded outer gradient, and gets back a *handle*;
waiting on the handle gives the *mean* over the islands that took part, the same on every island, and who they
were. Nothing in the engine knows whether the others are threads, processes or continents, nor how many they
are.

    world.start(payload) -> handle        does not block; every island starts the same rounds in the same order
    handle.wait()        -> Mean          blocks; may be called again, and then answers at once
    world.gather(data)   -> [bytes]       blocks; bytes from every island, for comparing notes

Two things can go wrong, and both are loud. `LostPeerError`: an island died, or did not answer within the time-out.
`MismatchError`: the islands are not doing the same thing, or a payload was damaged on the way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from isles.wire.codecs import Codec


class LostPeerError(RuntimeError):
    """An island died or fell silent; the round cannot be completed."""


class MismatchError(ValueError):
    """Islands disagree about what they are doing, or a payload arrived damaged."""


@dataclass(frozen=True)
class Payload:
    """One island's part in one round. An island that has nothing to say takes part with weight zero."""

    fragment: int
    round: int
    codec: Codec
    numel: int
    weight: float
    encoded: Tensor | Callable[[], Tensor]
    """uint8, on the CPU: `codec.encode` of the outer gradient. Or a function that makes it, once: a world that has a
    thread of its own encodes there, beside the training step."""

    @property
    def body(self) -> Tensor:
        """What goes over the wire. Once it is made, what it was made of is let go."""
        if callable(self.encoded):
            object.__setattr__(self, "encoded", self.encoded())
        return self.encoded  # type: ignore[return-value]

    @property
    def num_bytes(self) -> int:
        """Size of the body."""
        return self.codec.num_bytes(self.numel)


@dataclass(frozen=True)
class Mean:
    """The answer of a round, the same on every island. Do not change `values`: threads share them."""

    values: Tensor
    """fp32: the weighted mean over those who took part; zeros if nobody did."""
    weights: dict[int, float]
    """Who took part: the weight of each island, by rank, those of weight zero left out."""

    @property
    def total_weight(self) -> float:
        return sum(self.weights.values())


class Handle(Protocol):
    """A round under way."""

    @property
    def bytes_sent(self) -> int:
        """What this island puts on the link for the round, headers included."""
        ...

    @property
    def bytes_received(self) -> int: ...

    def wait(self) -> Mean: ...


class World(Protocol):
    """Islands that can average."""

    @property
    def rank(self) -> int:
        """This island's number, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many islands there are *now*: never build on it staying the same."""
        ...

    def start(self, payload: Payload) -> Handle: ...

    def gather(self, data: bytes) -> list[bytes]: ...


@dataclass(frozen=True)
class Arrived:
    """The handle of a round that is over: what a resumed run has in flight."""

    mean: Mean
    bytes_sent: int = 0
    bytes_received: int = 0

    def wait(self) -> Mean:
        return self.mean


def default_world() -> World:
    """Inside `run_local` the island's own; else torch.distributed's default group; without it, one island alone.

    Raises ValueError in one of several processes that torchrun has started, if they have not been joined: each would
    train alone, and nobody would notice.
    """
    from isles.wire.local_world import LocalWorld

    here = LocalWorld.current()
    if here is not None:
        return here
    if dist.is_available() and dist.is_initialized():
        from isles.wire.torch_world import TorchWorld

        return TorchWorld()
    if dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise ValueError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, and they are not joined: call "
            "torch.distributed.init_process_group() first (or, for an island alone, world=isles.LocalWorld.alone())"
        )
    return LocalWorld.alone()
