"""Two islands, two processes of this machine: the same measurement as for one, over a link that is the loopback.

Here background threads of each process communicate and decode. They take CPU time that the hooks in the training loop
do not see, so the reading that counts is `overhead_threads`. An island that is held up by something else keeps the
other waiting (`wait_share`).
"""

from __future__ import annotations

import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isles.bench import engine
from isles.bench.engine import Load

ISLANDS = 2


def measure(load: Load, sync_every: int = 100) -> list[dict[str, Any]]:
    """What `engine.measure` finds on each island."""
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(ISLANDS, mp_context=context) as processes:
            jobs = [processes.submit(_island, rank, rendezvous, load, sync_every) for rank in range(ISLANDS)]
            return [job.result() for job in jobs]


def _island(rank: int, rendezvous: str, load: Load, sync_every: int) -> dict[str, Any]:
    from isles.wire.torch_world import TorchWorld

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ISLANDS)
    try:
        return engine.measure(load, sync_every, TorchWorld())
    finally:
        dist.destroy_process_group()
