"""What the tests of both trainers share: worlds to plug in, islands' data, digests, mistakes."""

from __future__ import annotations

import hashlib
import math
import os
import pathlib
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import isles
from tests.processes import free_address

LONG = 600.0
"""A time-out that nobody lives to see."""


@dataclass(frozen=True)
class WorldOfTests:
    """Where the two islands of a test meet, and how each of them joins."""

    place: Callable[[pathlib.Path], str]
    join: Callable[[str, int], Any]


WORLDS = {
    "connect": WorldOfTests(
        lambda folder: free_address(), lambda place, island: isles.TorchWorld.connect(place, island, 2, timeout=LONG)
    ),
    "store": WorldOfTests(
        lambda folder: str(folder / f"store-{uuid.uuid4().hex}"),
        lambda place, island: isles.StoreWorld(place, quorum=2, patience=math.inf, timeout=LONG),
    ),
}
"""Every world that trainers are tested with; what both can do is tested once in each."""
FIXED = ["connect"]
"""Those whose islands stay the same: one that is lost ends the run, and a resumed run is the same run."""


def be_a_rank_of_two(rank: int) -> int:
    """Says what torchrun says to the ranks of an island; the default group is there. Returns the island."""
    island, own = divmod(rank, 2)
    of_two = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    of_torchrun = {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update(RANK=str(own), LOCAL_RANK=str(own), **of_two, **of_torchrun)
    return island


def rows(island: int, count: int, length: int = 16, vocabulary: int = 50) -> torch.Tensor:
    """An island's own token ids."""
    generator = torch.Generator().manual_seed(1000 + island)
    return torch.randint(0, vocabulary, (count, length), generator=generator)


def digest(model: nn.Module) -> str:
    """Of all parameters, whatever wraps the model."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().float().numpy().tobytes())
    return total.hexdigest()[:16]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
