"""What a study may look at inside a run, or change in it, from outside the engine.

Watched          a world that records how similar the islands' outer gradients are
ReplicaAverage   the mean of the islands' weights, to evaluate it
freeze           leaves gradients only to the fragment that is sent next
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isles
from isles.wire.world import Handle, Payload, World


class Similarity:
    """The mean pairwise cosine of the islands' outer gradients, for every round of every fragment."""

    def __init__(self) -> None:
        self.cosines: list[tuple[int, int, float]] = []
        """Fragment, round, cosine."""
        self._waiting: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, payload: Payload, islands: int) -> None:
        """Takes one island's part; with the last one the round is complete."""
        if payload.round < 1 or payload.weight == 0 or islands < 2:
            return
        place = (payload.fragment, payload.round)
        vectors = self._waiting.setdefault(place, [])
        vectors.append(payload.codec.decode(payload.body, payload.numel))
        if len(vectors) == islands:
            pairs = [float(F.cosine_similarity(a, b, dim=0)) for a, b in itertools.combinations(vectors, 2)]
            self.cosines.append((*place, sum(pairs) / len(pairs)))
            del self._waiting[place]


class Watched:
    """A world that passes every payload to a `Similarity` before it is sent."""

    def __init__(self, world: World, similarity: Similarity) -> None:
        self.world, self.similarity, self.gather = world, similarity, world.gather

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def size(self) -> int:
        return self.world.size

    def start(self, payload: Payload) -> Handle:
        self.similarity.add(payload, self.size)
        return self.world.start(payload)


class ReplicaAverage:
    """The mean of the islands' weights, where all islands are threads of one process and share this object."""

    def __init__(self) -> None:
        self._weights: dict[int, list[Tensor]] = {}

    def of(self, world: World, model: nn.Module) -> list[Tensor]:
        """By parameter; all islands call it, at the same step."""
        self._weights[world.rank] = [parameter.detach().clone() for parameter in model.parameters()]
        world.gather(b"")  # a barrier: all weights are there
        columns = zip(*(self._weights[rank] for rank in range(world.size)), strict=True)
        return [torch.stack(column).mean(0) for column in columns]


@contextmanager
def holding(model: nn.Module, values: list[Tensor]) -> Iterator[nn.Module]:
    """The model with other parameters in it, until the block ends."""
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), values)
    try:
        yield model
    finally:
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), own)


def freeze(diloco: isles.DiLoCo, step: int) -> None:
    """Removes the gradients of all fragments but the one that is sent next; steps count from 1."""
    turn = min(
        range(len(diloco.fragments)),
        key=lambda p: (diloco.schedule.offsets[p] - step) % diloco.method.sync_every,
    )
    for number, fragment in enumerate(diloco.fragments):
        if number != turn:
            for parameter in fragment.parameters:
                parameter.grad = None
