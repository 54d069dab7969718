"""The same steps without communication: what utilisation is measured against.

Every island trains alone, all at the same time, on its own share of the cores: islands that share a machine compete
for it here as in the run. They work in *turns*: from when they are resumed until they are stopped. A step counts if it
began and ended within a turn. There is a turn before the run, and there may be others during it, while the run is
stopped (`isles.lab.turns`).

The time of a step is a mean, as that of the run is: now and then a step takes longer on any machine, with
communication or without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isles.lab import nodes
from isles.lab.network import Network
from isles.lab.programs import Program
from isles.view import events
from isles.view.events import Event

STARTING_SECONDS = 300.0
WARM_UP_STEPS = 2
"""The first steps allocate memory and load code."""


@dataclass(frozen=True)
class Turn:
    """A time in which all islands worked, in seconds since the epoch."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def within(self, begin: float, end: float) -> bool:
        """Whether it lies in a time."""
        return begin <= self.begin and self.end <= end


class Alone:
    """Islands that train alone, when it is their turn."""

    def __init__(
        self,
        network: Network,
        program: Program,
        folder: Path,
        *,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> None:
        islands = range(len(network.islands))
        self.folders = [folder / f"alone-{island}" for island in islands]
        commands = [
            nodes.torchrun(network, island, program.flags_of_reference(each, island), ranks=ranks, alone=True)
            for island, each in zip(islands, self.folders, strict=True)
        ]
        self.turns: list[Turn] = []
        self._began: float | None = None
        self._network, self._folder = network, folder
        self._nodes = nodes.start(network, folder, commands, env)

    def go_on(self) -> None:
        """A turn begins, the first one once all islands are warm. Raises OSError if they do not get that far."""
        if not self.turns:
            self._began = self._when_warm()
            return
        for node in self._nodes:
            node.go_on()
        self._began = time.time()

    def _when_warm(self) -> float:
        deadline = time.monotonic() + STARTING_SECONDS
        while any(len(each) <= WARM_UP_STEPS for each in self._steps()):
            self._check()
            if time.monotonic() > deadline:
                raise OSError(f"no island began to train within {STARTING_SECONDS:g} s; see {self._folder}")
            time.sleep(0.2)
        return max(float(each[WARM_UP_STEPS - 1]["time"]) for each in self._steps())

    def work(self, steps: int) -> None:
        """Waits until every island has done so many steps in this turn."""
        assert self._began is not None, "it is not their turn"
        while any(len(steps_within(each, Turn(self._began, time.time()))) < steps for each in self._steps()):
            self._check()
            time.sleep(0.2)

    def stop(self) -> None:
        """The turn ends."""
        assert self._began is not None, "it is not their turn"
        self.turns.append(Turn(self._began, time.time()))
        self._began = None
        for node in self._nodes:
            node.stop()

    def step_seconds(self, turn: Turn) -> list[float]:
        """What a step took on each island in a turn; nothing if it was too short for a step on one of them."""
        found = [steps_within(each, turn) for each in self._steps()]
        return [statistics.fmean(event["seconds"] for event in each) for each in found] if all(found) else []

    def _steps(self) -> list[list[Event]]:
        """What each island has done so far."""
        return [_steps(folder) for folder in self.folders]

    def _check(self) -> None:
        for node in self._nodes:
            if node.process.poll() is not None:
                raise OSError(f"the reference failed on island {node.island}: {node.complaint()}; see {node.log}")

    def close(self) -> None:
        """Kills them and everything else on the islands, without waiting for an evaluation."""
        for node in self._nodes:
            self._network.crash(node.island)
            node.process.wait()


def steps_within(steps: Sequence[Event], turn: Turn) -> list[Event]:
    """The steps that began and ended in a turn: one in which the island was stopped is in none."""
    return [step for step in steps if turn.begin <= step["time"] - step["seconds"] and step["time"] <= turn.end]


def mean(turns: Sequence[Sequence[float]]) -> list[float]:
    """What a step took on each island, every turn counting alike.

    >>> mean([[1.0, 2.0], [3.0, 2.0]])
    [2.0, 2.0]
    """
    return [statistics.fmean(island) for island in zip(*turns, strict=True)]


def _steps(folder: Path) -> list[Event]:
    try:
        return [event for event in events.read(folder) if event["event"] == "step"]
    except ValueError:
        return []  # not yet
