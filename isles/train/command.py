"""`isles train`: trains a language model on islands, on this machine or, under torchrun, as a part of many machines."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from isles import flags
from isles.core.method import Method
from isles.train import setup
from isles.train.config import TrainConfig
from isles.train.data import prepare_data
from isles.train.launch import LOST_PEER, STOPPED, launch, launch_elastic, watching
from isles.view import report
from isles.view.runs import Run, summarize
from isles.view.table import table

OF_ALL_ISLANDS = ("bytes_sent", "peak_bytes_per_step", "compute_utilization", "tokens_per_second", "wall_seconds")
"""What `isles train --store` says of the islands that it has started, as its table does."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every field of the configuration and of the method."""
    flags.add(parser, TrainConfig, "the run")
    another = "the same as --run; under torchrun, which takes --run for an abbreviation of its own --run-path, use this"
    parser.add_argument("--run-dir", dest="run", metavar="RUN", default=argparse.SUPPRESS, help=another)
    flags.add(parser, Method, "the method (defaults: those of --method)", show_defaults=False)


def run(args: argparse.Namespace) -> dict[str, Any] | None:
    """Trains, prints a table, returns the summary; under torchrun only rank 0 does so."""
    chosen, knobs = flags.given(args, TrainConfig), flags.given(args, Method)
    setup.check_parts(chosen)
    if chosen.get("store"):
        from isles.train import store_run  # which loads torch, and the parent of other runs does without

        wanted = store_run.resolve(chosen, knobs)
        setup.save(wanted)
        own = launch_elastic(wanted.config)
        whole = summarize([Run.load(own["run_dir"])])[0]
        return _show({**own, **{name: getattr(whole, name) for name in OF_ALL_ISLANDS}})
    wanted = setup.resolve(chosen, knobs)
    if "RANK" in os.environ:
        summary = _one_rank(wanted)
    else:
        setup.check_free(wanted.config)
        for island in range(
            wanted.config.islands if wanted.config.island_data else 1
        ):  # once for all, before they start
            prepare_data(wanted.config, island, say=lambda line: print(line, file=sys.stderr))
        with setup.claimed(wanted):
            summary = launch(wanted.config)
    return summary if summary is None else _show(summary)


def _show(summary: dict[str, Any]) -> dict[str, Any]:
    done = Run.load(summary["run_dir"])
    page = report.write([done], Path(summary["run_dir"]) / "report.html")
    print(f"{table([done])}\nreport: {page}")
    return summary


def _one_rank(wanted: setup.Setup) -> dict[str, Any] | None:
    """Under torchrun every rank runs this very command. Each machine has its own disk, or all share one."""
    from isles.train.loop import Stopped
    from isles.wire.world import LostPeerError

    try:
        return _join_and_train(wanted)
    except (LostPeerError, Stopped) as reason:
        print(f"isles train: {reason}; continue with the same command and --resume", file=sys.stderr, flush=True)
        os._exit(STOPPED if isinstance(reason, Stopped) else LOST_PEER)  # threads may still wait for a lost island


def _join_and_train(wanted: setup.Setup) -> dict[str, Any] | None:
    from isles.train.loop import Trainer
    from isles.train.place import find_place, leave

    config = wanted.config
    place = find_place(config)
    problem = ""
    with ExitStack() as stack:
        if place.rank == 0:
            try:
                stack.enter_context(setup.claimed(wanted))
            except ValueError as error:
                problem = str(error)
        if problem := place.gather(problem)[0]:
            raise ValueError(problem)
        Path(config.run).mkdir(parents=True, exist_ok=True)
        if place.rank == 0:
            stack.enter_context(watching(config))
        summary = Trainer(config, wanted.method(), place).run()
    leave()
    return summary if place.rank == 0 else None
