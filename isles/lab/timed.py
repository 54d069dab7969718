"""Islands whose compute is a timed sleep, to measure communication with more islands than there are cores.

    torchrun --nproc-per-node 4 -m isles.lab.timed --steps 256 --method streaming --sync-every 128 --run-dir runs/timed

A real training step keeps a core busy, so four islands on two cores would slow each other down, and it would look like
the network. Here a step *waits* as long as an accelerator would compute, and everything else is real: the engine, the
codec, the outer optimizer, the processes and the bytes.

The model, its passes and its optimizer are in `isles.lab.timed_model`. Nothing is learned and there is no loss.

Events and the final JSON line are those of `isles train`; `cpu_seconds_per_step` (all threads of an island, those that
encode and move bytes included) and `late_seconds_per_step` (how late passes ended, which later steps made up for) say
whether the cores were free enough for the figures to mean anything.

Published for plain DiLoCo in fp32 with 30.8M parameters, 4 workers and H = 128: utilisation 11.6 % at 50 Mbit/s, 36.1 %
at 200 Mbit/s, 71.5 % at 1 Gbit/s. `published_step_seconds` finds the step that fits these best; the default is a little
shorter, which is harder.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import isles
from isles import flags
from isles.core.method import Method
from isles.lab.timed_model import SliceSGD, TimedModel
from isles.train.config import MethodName, TrainConfig
from isles.train.launch import FAILED, LOST_PEER, USER_MISTAKE
from isles.train.place import Place, find_place, leave
from isles.train.run_log import RunLog
from isles.train.setup import Setup
from isles.train.synchronise import DataParallel, Islands, Synchroniser
from isles.view import events
from isles.view.runs import Run
from isles.view.table import table

PUBLISHED_UTILIZATION = {50e6: 0.116, 200e6: 0.361, 1e9: 0.715}
"""Bits per second -> compute utilisation, of another implementation (see above)."""


@dataclass(frozen=True, kw_only=True)
class TimedConfig:
    """A timed run."""

    run_dir: str = ""
    """Folder of the run, for events.jsonl (default: runs/timed-METHOD)."""
    parameters: float = 30.8e6
    """N: parameters of the model."""
    layers: int = 8
    """L: layers of the model."""
    step_seconds: float = 0.03
    """T: what a step takes without communication."""
    steps: int = 256
    """Inner steps of each island."""
    method: MethodName = "streaming"
    """How islands synchronise; the fields of the method below can be set on top."""
    reduction: Literal["auto", "all-gather", "reduce-scatter"] = "auto"
    """How payloads become a mean."""
    timeout_seconds: float = 600.0
    """How long another island may be silent before it counts as lost."""
    store: str = ""
    """A bucket or folder that joins islands; every process is then an island of its own."""
    quorum: int = 1
    """With --store: the least number of islands in a round."""
    seed: int = 0
    """Of the gradients."""

    def __post_init__(self) -> None:
        for name, least in (("parameters", self.layers + 1), ("layers", 1), ("steps", 1), ("quorum", 1), ("seed", 0)):
            if not getattr(self, name) >= least or math.isinf(getattr(self, name)):
                raise ValueError(f"--{name} {getattr(self, name):g} must be at least {least}")
        for name in ("step_seconds", "timeout_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name):g} must be greater than 0")

    def as_train_config(self) -> TrainConfig:
        """The same run for `isles train`, as far as `find_place` and `Setup` need it."""
        return TrainConfig(
            run=self.run_dir or f"runs/timed-{self.method}",
            model="timed",
            steps=self.steps,
            method=self.method,
            reduction=self.reduction,
            timeout_seconds=self.timeout_seconds,
            seed=self.seed,
            ranks_per_island=1,
            threads=1,
            device="cpu",
        )


def published_step_seconds(parameters: float = 30.8e6, workers: int = 4, sync_every: int = 128) -> float:
    """The step that fits the published utilisations best, by least squares.

    A round is H steps of T, then a ring all-reduce of fp32, 2 (M - 1) / M * 32 N bits, while everybody waits:
    utilisation(B) = H T / (H T + bits / B).

    >>> round(published_step_seconds(), 4)
    0.0309
    """
    bits = 2 * (workers - 1) / workers * 32 * parameters

    def squares(step_seconds: float) -> float:
        compute = sync_every * step_seconds
        return sum((compute / (compute + bits / rate) - known) ** 2 for rate, known in PUBLISHED_UTILIZATION.items())

    return min((microseconds / 1e6 for microseconds in range(1_000, 1_000_000, 10)), key=squares)


class TimedRun:
    """One island of a timed run."""

    def __init__(self, config: TimedConfig, method: Method | None, place: Place) -> None:
        self.config, self.method, self.place = config, method, place
        self.folder = Path(config.as_train_config().run)
        self._claim()
        self.log = RunLog(self.folder, place, tokens_per_step=place.islands)
        self.model = TimedModel(
            parameters=int(config.parameters),
            layers=config.layers,
            step_seconds=config.step_seconds,
            seed=config.seed,
            island=place.island,
        )
        self.optimizer = SliceSGD(self.model)
        self.seconds_of_steps: list[float] = []

    def run(self) -> dict[str, Any]:
        """Runs all steps; returns the summary of the run, the same on every island."""
        _warm_up(self.method)
        pace, optimizer, one = self.model.pace, self.optimizer, torch.ones(1)
        with self._synchroniser() as synchroniser:
            self.log.start(asdict(self.config), self.method, synchroniser)
            busy = time.process_time()
            begin = time.perf_counter()
            for step in range(1, self.config.steps + 1):
                pace.begin(step, begin)
                synchroniser.model(one).backward()
                passed = time.perf_counter()
                optimizer.step()
                optimizer.zero_grad()
                end = time.perf_counter()
                cost = synchroniser.cost_of_step(passed - begin)
                pace.has_worked(end - passed - (cost.engine_seconds if self.method else 0.0))
                self.seconds_of_steps.append(end - begin)
                learning_rate = optimizer.param_groups[0]["lr"]
                self.log.step(step, end - begin, cost, loss=None, learning_rate=learning_rate)
                begin = end  # writing the log is a part of the next step
            busy = time.process_time() - busy
        self.log.totals.bytes_sent += synchroniser.closing_bytes
        return self._finish(busy)

    def _claim(self) -> None:
        """Makes the run's folder. Raises ValueError, on every island, if there is a run in it."""
        taken = self.place.rank == 0 and (self.folder / events.FILE_NAME).exists()
        if any(self.place.gather(taken)):
            raise ValueError(f"--run-dir {self.folder} holds a run already: name another folder")
        self.folder.mkdir(parents=True, exist_ok=True)

    def _synchroniser(self) -> Synchroniser:
        if self.method is not None:
            world: Any = self.place.world
            if self.config.store:
                world = isles.StoreWorld(
                    self.config.store, quorum=self.config.quorum, timeout=self.config.timeout_seconds
                )
            return Islands(self.model, self.optimizer, self.method, self.place, world, self.log.events)

        def one_pass(model: nn.Module) -> None:
            self.model.pace.begin(1, time.perf_counter())
            model(torch.ones(1)).backward()

        return DataParallel(self.model, self.optimizer, self.place, one_pass)

    def _finish(self, cpu_seconds: float) -> dict[str, Any]:
        steps = self.config.steps
        own = {
            "step_seconds": self.log.totals.seconds / steps,
            "median_step_seconds": statistics.median(self.seconds_of_steps),
            "late_seconds_per_step": self.model.pace.late_seconds / steps,
            "cpu_seconds_per_step": cpu_seconds / steps,
        }
        parts = self.place.gather(own)
        means = {name: statistics.fmean(part[name] for part in parts) for name in own}
        summary = {**self.log.summary(asdict(self.config), int(self.config.parameters)), **means}
        self.log.write("end", **summary)
        return summary


def _warm_up(method: Method | None) -> None:
    """Does once what is slow the first time: an optimizer's step loads a compiler, a codec may use one."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    torch.optim.SGD([parameter]).step()
    if method is not None:
        codec, values = isles.codecs[method.codec], torch.ones(10_000)
        codec.decode(codec.encode(values), values.numel())


def main(arguments: list[str] | None = None) -> int:
    """One island of a timed run, as torchrun starts it, or one alone; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.lab.timed", description="Islands that sleep for compute.")
    flags.add(parser, TimedConfig, "the run")
    flags.add(parser, Method, "the method (defaults: those of --method)", show_defaults=False)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line, last")
    args = parser.parse_args(arguments)
    try:
        config = TimedConfig(**flags.given(args, TimedConfig))
        method = Setup(config.as_train_config(), flags.given(args, Method)).method()
        place = find_place(config.as_train_config())
        summary = TimedRun(config, method, place).run()
        leave()
    except isles.LostPeerError as error:
        print(f"isles.lab.timed: {error}", file=sys.stderr)
        return LOST_PEER
    except (ValueError, OSError) as error:
        print(f"isles.lab.timed: {error}", file=sys.stderr)
        return USER_MISTAKE
    except Exception:
        traceback.print_exc()
        return FAILED
    if place.rank == 0:
        print(table([Run.load(summary["run_dir"])]))
        if args.json:
            print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for a lost island
