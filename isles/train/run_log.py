"""What one rank of a run writes to the event log: its start, its steps, and the sums that make the summary.

`isles train` and the timed islands of the laboratory write the same events (`isles.view.events` has their fields).
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import isles
from isles.train.place import Place
from isles.train.synchronise import Cost, Synchroniser
from isles.view import events


@dataclass
class Totals:
    """Sums over the steps of one rank; part of a checkpoint."""

    steps: int = 0
    seconds: float = 0.0
    engine_seconds: float = 0.0
    bytes_sent: int = 0
    peak_bytes_per_step: int = 0

    def add(self, seconds: float, cost: Cost) -> None:
        self.steps += 1
        self.seconds += seconds
        self.engine_seconds += cost.engine_seconds
        self.bytes_sent += cost.bytes_sent
        self.peak_bytes_per_step = max(self.peak_bytes_per_step, cost.bytes_sent)


class RunLog:
    """The event log of a run, as one rank writes it."""

    def __init__(self, folder: Path, place: Place, tokens_per_step: int) -> None:
        self.folder, self.place, self.tokens_per_step = folder, place, tokens_per_step
        self.began = time.time()
        self.totals = Totals()
        self.events = events.EventLog(folder / events.FILE_NAME)
        self.events.write("island", island=place.island, rank=place.rank, pid=os.getpid(), host=socket.gethostname())

    def write(self, event: str, **fields: Any) -> None:
        """An event of the whole run: only rank 0 writes it."""
        if self.place.rank == 0:
            self.events.write(event, island=0, **fields)

    def start(self, config: dict[str, Any], method: isles.Method | None, synchroniser: Synchroniser) -> None:
        """The run, before its first step."""
        self.write(
            "config",
            islands=self.place.islands,
            name=self.folder.name,
            config=config,
            method=method.as_dict() if method else None,
            method_name=config["method"],
            tokens_per_step=self.tokens_per_step,
            version=isles.__version__,
            **synchroniser.describe(),
        )

    def step(self, step: int, seconds: float, cost: Cost, *, loss: float | None, learning_rate: float) -> None:
        """A step that has ended, counted from 1."""
        self.totals.add(seconds, cost)
        if self.place.is_first_of_island:
            self.events.write(
                "step",
                island=self.place.island,
                step=step,
                loss=loss,
                learning_rate=learning_rate,
                seconds=seconds,
                tokens=step * self.tokens_per_step,
                **asdict(cost),
            )

    def total(self) -> dict[str, Any]:
        """The totals of all ranks together; all of them call it."""
        every = self.place.gather(asdict(self.totals))
        return {name: sum(part[name] for part in every) for name in every[0]}

    def summary(self, config: dict[str, Any], parameters: int) -> dict[str, Any]:
        """What is known of the run at its end; all ranks call it."""
        total, tokens = self.total(), config["steps"] * self.tokens_per_step
        seconds = total["seconds"]
        return {
            "method": config["method"],
            "steps": config["steps"],
            "tokens": tokens,
            "islands": self.place.islands,
            "parameters": parameters,
            "bytes_sent": total["bytes_sent"],
            "peak_bytes_per_step": total["peak_bytes_per_step"],
            "compute_utilization": 1 - total["engine_seconds"] / seconds if seconds else 1.0,
            "tokens_per_second": tokens / (seconds / self.place.world_size) if seconds else 0.0,
            "wall_seconds": time.time() - self.began,
            "run_dir": str(self.folder),
        }
