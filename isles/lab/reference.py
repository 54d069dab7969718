"""The same steps without communication: what utilisation is measured against.

Every island trains alone, all at the same time, on its own share of the cores, so that islands which share a machine
are in each other's way here as in the run. A step is taken into account once all islands are at work. When each has
done enough steps they are ended: nobody waits for an evaluation.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from isles.lab import nodes
from isles.lab.network import Network
from isles.lab.programs import Program
from isles.view import events
from isles.view.events import Event

STARTING_SECONDS = 300.0
WARM_UP_STEPS = 2
"""The first steps allocate memory and load code."""


def measure(network: Network, program: Program, folder: Path, *, steps: int, ranks: int = 1) -> list[float]:
    """The median time of a step on each island. Raises OSError if they do not get that far."""
    islands = range(len(network.islands))
    folders = [folder / f"alone-{island}" for island in islands]
    commands = [
        nodes.torchrun(network, island, program.flags_of_reference(folders[island], island), ranks=ranks, alone=True)
        for island in islands
    ]
    started = nodes.start(network, folder, commands)
    try:
        deadline = time.monotonic() + STARTING_SECONDS
        while True:
            common = _while_all_worked([_steps(each) for each in folders])
            if min(len(each) for each in common) >= steps:
                return [statistics.median(event["seconds"] for event in each) for each in common]
            for node in started:
                if node.process.poll() is not None:
                    raise OSError(f"the reference failed on island {node.island}: {node.complaint()}; see {node.log}")
            if time.monotonic() > deadline and not any(common):
                raise OSError(f"no island began to train within {STARTING_SECONDS:g} s; see {folder}")
            time.sleep(0.2)
    finally:
        for node in started:
            network.crash(node.island)
            node.process.wait()


def _steps(folder: Path) -> list[Event]:
    try:
        return [event for event in events.read(folder) if event["event"] == "step"]
    except ValueError:
        return []  # not yet


def _while_all_worked(found: list[list[Event]]) -> list[list[Event]]:
    """The steps of each island that began and ended while all were at work."""
    warm = [each[WARM_UP_STEPS:] for each in found]
    if not all(warm):
        return [[] for _ in found]
    begin = max(each[0]["time"] - each[0]["seconds"] for each in warm)
    end = min(each[-1]["time"] for each in warm)
    return [[e for e in each if e["time"] - e["seconds"] >= begin and e["time"] <= end] for each in warm]
