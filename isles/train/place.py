"""Which rank and which island a process is, on which device, and how it reaches the others.

A process is started in one of three ways. `isles train` starts its islands itself and sets environment variables.
torchrun sets its own; then every node is an island, or every `--ranks-per-island` ranks. A process without such
variables is one island alone.
"""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import isles
from isles.train.config import TrainConfig

RENDEZVOUS = "ISLES_RENDEZVOUS"
"""Environment variable: a file through which islands that `isles train` has started find each other."""


@dataclass(frozen=True)
class Place:
    """One process among all."""

    rank: int
    world_size: int
    ranks_per_island: int
    device: torch.device
    world: isles.TorchWorld | isles.LocalWorld
    """All ranks."""
    mesh: Any = None
    """Islands x ranks in an island, if there is more than one process."""

    @property
    def island(self) -> int:
        return self.rank // self.ranks_per_island

    @property
    def is_first_of_island(self) -> bool:
        return self.rank % self.ranks_per_island == 0

    @property
    def islands(self) -> int:
        return self.world_size // self.ranks_per_island

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, which must be JSON; all ranks call it."""
        return [json.loads(text) for text in self.world.gather(json.dumps(value).encode())]


def ranks_of_an_island(wanted: int) -> int:
    """How many ranks make one island: as many as wanted (0: not given), or all of a node if torchrun has several."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    under_torchrun = "RANK" in os.environ and RENDEZVOUS not in os.environ
    return wanted or (on_this_machine if under_torchrun and on_this_machine < world_size else 1)


def count_islands(ranks_per_island: int) -> int:
    """How many islands the ranks of this run make, by torchrun's variables."""
    return max(1, int(os.environ.get("WORLD_SIZE", 1)) // ranks_of_an_island(ranks_per_island))


def find_device(wanted: str, local_rank: int) -> torch.device:
    """That of --device, or a GPU where there is one. Raises ValueError for a device that is not there."""
    try:
        device = torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device {wanted} is not known: say cpu or cuda") from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device {wanted}: torch finds no GPU here, and isles doctor says what it finds")
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    return device


def find_place(config: TrainConfig) -> Place:
    """Joins the others, sets threads and device."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    ranks_per_island = ranks_of_an_island(config.ranks_per_island)
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // on_this_machine))
    device = find_device(config.device, local_rank)
    if world_size % ranks_per_island:
        raise ValueError(f"{world_size} ranks cannot be shared out to islands of {ranks_per_island} ranks")
    mesh = None
    if world_size > 1:
        file = os.environ.get(RENDEZVOUS)
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"file://{file}" if file else "env://",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=config.timeout_seconds),
        )
        shape = (world_size // ranks_per_island, ranks_per_island)
        mesh = dist.device_mesh.init_device_mesh(device.type, shape, mesh_dim_names=("island", "rank"))
    world = (
        isles.TorchWorld(timeout=config.timeout_seconds, reduction=config.reduction)
        if mesh
        else isles.LocalWorld.alone()
    )
    return Place(rank, world_size, ranks_per_island, device, world, mesh)


def leave() -> None:
    """Ends what `find_place` began."""
    if dist.is_initialized():
        dist.destroy_process_group()
