"""What runs on the islands: `isles train`, or `isles.lab.timed`, whose compute is a timed sleep; and their flags.

Flags are read here before anything is built, so a mistake in them is reported at once, and not by every island. The
same flags give the *reference*: the same model, data and batches without any synchronisation, which is data-parallel
training on one island alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from isles import flags
from isles.core.method import Method
from isles.train.config import TrainConfig
from isles.train.setup import Setup

QUIET = {"eval_every": 0, "checkpoint_every": 0, "sample_tokens": 0}
"""Set by the laboratory unless the user sets it: nothing but steps between the first step and the last."""
MANY = 1_000_000
ELASTIC = {
    **{"model": "nano", "data": "synthetic:0.1", "vocabulary": 300, "batch_size": 4, "sequence_length": 64},
    **{
        "method": "streaming",
        "steps": MANY,
        "warmup_steps": 20,
        "patience_seconds": 3.0,
        "timeout_seconds": 300.0,
    },
}
ELASTIC_KNOBS = {"sync_every": 40, "fragments": 2, "overlap": 15}
"""The run of the crash matrix, unless the user says otherwise: a round every 20 steps."""
NOT_THE_USERS = ("run", "run_dir", "islands", "overwrite")
NOT_IN_REFERENCE = ("resume", "method", "island_data", "evals", "reduction", *QUIET)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"after `--`: {message} (see {self.prog} --help)")


@dataclass(frozen=True)
class Program:
    """A program and the flags it was given, checked."""

    name: str
    start: tuple[str, ...]
    """The program, as torchrun takes it."""
    arguments: tuple[str, ...]
    """The user's flags, as they were written."""
    chosen: Mapping[str, Any]
    """The user's flags that are fields of the configuration."""
    sets: Mapping[str, Any]
    """Fields that the laboratory sets; the user's flags win."""
    config: Any
    """Both together."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the method, the user's and the laboratory's."""

    def method(self) -> Method | None:
        return Setup(self.config, dict(self.knobs)).method()

    def flags_of_run(self, folder: Path) -> list[str]:
        """For an island of the run."""
        return [*self.start, "--run-dir", str(folder), *_as_flags(self.sets), *self.arguments]

    def flags_of_reference(self, folder: Path, island: int) -> list[str]:
        """For an island that trains alone, until it is stopped."""
        kept = {name: value for name, value in self.chosen.items() if name not in NOT_IN_REFERENCE}
        sources = self.config.island_sources() if isinstance(self.config, TrainConfig) else []
        if sources:
            kept["data"] = sources[island]
        alone = {**self.sets, **kept, "method": "data-parallel", "steps": MANY}
        alone.pop("islands", None)
        return [*self.start, "--run-dir", str(folder), *_as_flags(alone)]


def train(arguments: Sequence[str], islands: int, ranks: int = 1) -> Program:
    """`isles train` with the user's flags. Raises ValueError for what cannot be."""
    cores = max(1, (os.cpu_count() or 1) // (islands * ranks))
    sets = {**QUIET, "islands": islands, "threads": cores}
    chosen, knobs = _read(arguments, TrainConfig, "isles train")
    config = TrainConfig(**{**sets, **chosen})
    Setup(config, knobs).method()
    return Program("isles train", ("-m", "isles.cli", "train"), tuple(arguments), chosen, sets, config)


def timed(arguments: Sequence[str]) -> Program:
    """`isles.lab.timed` with the user's flags. Raises ValueError for what cannot be."""
    from isles.lab.timed import TimedConfig

    chosen, knobs = _read(arguments, TimedConfig, "isles.lab.timed")
    config = TimedConfig(**chosen)
    Setup(config.as_train_config(), knobs).method()
    return Program("isles.lab.timed", ("-m", "isles.lab.timed"), tuple(arguments), chosen, {}, config)


def elastic(arguments: Sequence[str], threads: int = 1) -> Program:
    """`isles train --store` with the user's flags. Raises ValueError for what cannot be."""
    chosen, knobs = _read(arguments, TrainConfig, "isles train")
    for name in ("store", "resume"):
        if name in chosen:
            raise ValueError(f"--{name} is set by the laboratory: give --store before `--`, and leave --resume out")
    knobs = {**ELASTIC_KNOBS, **knobs}
    sets = {**QUIET, **ELASTIC, "threads": threads}
    config = TrainConfig(**{**sets, **chosen})
    if config.method in ("eager", "data-parallel"):
        raise ValueError(f"--method {config.method} does not go with a store: use streaming or distant")
    Setup(config, knobs).method()
    start = ("-m", "isles.lab.elastic.island")
    return Program("isles train --store", start, tuple(arguments), chosen, {**sets, **ELASTIC_KNOBS}, config, knobs)


def _read(arguments: Sequence[str], config: type, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the configuration, and of the method, that the flags give."""
    parser = _Parser(prog=name, add_help=False)
    flags.add(parser, config, "the run")
    flags.add(parser, Method, "the method")
    args = parser.parse_args(list(arguments))
    chosen, knobs = flags.given(args, config), flags.given(args, Method)
    for name in NOT_THE_USERS:
        if name in chosen:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is set by the laboratory: give --run, --islands or --overwrite before `--`")
    return chosen, knobs


def _as_flags(fields: Mapping[str, Any]) -> list[str]:
    """Fields of a configuration as flags.

    >>> _as_flags({"eval_every": 0, "resume": True, "wandb": "a project"})
    ['--eval-every=0', '--resume', '--wandb=a project']
    """
    found = []
    for name, value in fields.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found.append(f"--{flag}={value}")
    return found
