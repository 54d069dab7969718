"""What makes a second island worth nearly all of it: the schedule of the outer loop in short runs, knob by knob.

Worth of the other islands = (alone - method) / (alone - data-parallel), every side at its best inner learning rate.
The setting is about that of `make demo`: 263k parameters, 1,500 steps of 8 x 128 tokens an island. H = 30, M = 2 and
e3m0, where nothing else is said.

    python experiments/outer_schedule.py GROUP ... [--seeds N] [--workers N]    # runs what is not there yet
    python experiments/outer_schedule.py --show                                 # the table of all that is there

One line of JSON per run is appended to the results. docs/log.md has the findings.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import isles
from isles.reproduce.job import Job, Text
from isles.reproduce.pool import run_tasks, tasks_of

RESULTS = Path(__file__).parent / "results" / "outer-schedule.jsonl"
SETTINGS: dict[str, dict[str, Any]] = {
    "demo": {"model": "micro", "vocabulary": 1024, "steps": 1500, "batch_size": 8, "sequence_length": 128},
    "mini": {"model": "mini", "vocabulary": 0, "steps": 2100, "batch_size": 4, "sequence_length": 64},
}
BASE: dict[str, Any] = {"dense_start": [(50, 3)], "warmup_rounds": 20, "outer_lr": 0.7, "mixing": 0.25}
"""Where the search began; `Method.gradual` is where it ended."""


def job(setting: str, rate: float, knobs: dict[str, Any] | None, **changes: Any) -> Job:
    """A run; no knobs: data-parallel, or alone with islands=1. The rate is in thousandths."""
    method = None if knobs is None else isles.Method.streaming(**{"sync_every": 30, **knobs})
    return Job(method=method, learning_rate=rate / 1000, **{**SETTINGS[setting], "evaluations": 10, **changes})


Runs = dict[tuple[str, float], Job]


def sides(setting: str, rates: dict[str, list[float]], **changes: Any) -> Runs:
    """Alone, data-parallel, the papers' settings and the gradual start, each at learning rates of its own."""
    gradual = isles.Method.gradual(sync_every=30).as_dict()
    knobs = {"parallel": None, "paper": {}, "gradual": gradual}
    found: Runs = {}
    for side, grid in rates.items():
        for rate in grid:
            own = {**changes, "islands": 1} if side == "alone" else changes
            found[f"{about(setting, changes)}: {side}", rate] = job(setting, rate, knobs.get(side), **own)
    return found


def variants(setting: str, rate: float, table: dict[str, dict[str, Any]], **changes: Any) -> Runs:
    """Where the search began, with one thing changed."""
    label = f"{about(setting, changes)}: ours, "
    return {(label + name, rate): job(setting, rate, {**BASE, **knobs}, **changes) for name, knobs in table.items()}


def late() -> Runs:
    """A whole round late, with the schedule and without."""
    start = {"dense_start": [(50, 3)], "warmup_rounds": 20}
    whole, eager = {"overlap": 29, "mixing": 0.75}, {"overlap": 0, "update": "eager", "mixing": 0.5}
    table = {
        "distant": whole,
        "distant, gradual": {**whole, **start, "outer_lr": 0.9},
        "distant, gradual, outer lr 0.4": {**whole, **start, "outer_lr": 0.4},
        "distant, gradual, mixing 0.5": {**whole, **start, "outer_lr": 0.9, "mixing": 0.5},
        "eager": eager,
        "eager, gradual": {**eager, **start, "outer_lr": 0.9},
        "eager, gradual, outer lr 0.4": {**eager, **start, "outer_lr": 0.4},
    }
    return {(f"demo adamw M=2: H=30, {name}", 12.0): job("demo", 12, knobs) for name, knobs in table.items()}


def long_period() -> Runs:
    """H = 100: fifteen periods in all. What does the start have to be?"""
    gradual = {**isles.Method.gradual(sync_every=100).as_dict(), "dense_start": [(50, 10)], "warmup_rounds": 20}
    table = {
        "streaming": {"sync_every": 100},
        "gradual": gradual,
        "gradual, 100 x 3, warm-up 6": isles.Method.gradual(sync_every=100).as_dict(),
        "gradual, 50 x 3": {**gradual, "dense_start": [(50, 3)]},
        "gradual, 100 x 3": {**gradual, "dense_start": [(100, 3)]},
        "gradual, 100 x 3, warm-up 5": {**gradual, "dense_start": [(100, 3)], "warmup_rounds": 5},
        "gradual, 50 x 3, warm-up 6": {**gradual, "dense_start": [(50, 3)], "warmup_rounds": 6},
        "gradual, 50 x 3, warm-up 3": {**gradual, "dense_start": [(50, 3)], "warmup_rounds": 3},
    }
    return {(f"demo adamw M=2: H=100, {name}", 12.0): job("demo", 12, knobs) for name, knobs in table.items()}


def longer(times: int) -> Runs:
    """A run of so many times the length: with the start as it is, and with one that grows with the run."""
    steps = times * SETTINGS["demo"]["steps"]
    gradual = isles.Method.gradual(sync_every=30).as_dict()
    start = {"dense_start": [(50 * times, 3)], "warmup_rounds": 20 * times}
    grown = job("demo", 12, {**gradual, **start}, steps=steps)
    return {
        **sides("demo", {**THREE, "paper": [12]}, steps=steps),
        (f"demo adamw M=2 x{steps}: gradual, start x{times}", 12): grown,
    }


def muon(rate: float) -> Runs:
    """`Method.gradual` with one thing changed, for the other inner optimizer."""
    table: dict[str, dict[str, Any]] = {
        "momentum 0.8": {"outer_momentum": 0.8},
        "momentum 0.6": {"outer_momentum": 0.6},
        "outer lr 0.7": {"outer_lr": 0.7},
        "mixing 0": {"mixing": 0.0},
        "no dense start": {"dense_start": []},
        "H = 24": {"sync_every": 24},
    }
    gradual, label = isles.Method.gradual(sync_every=30).as_dict(), "demo muon M=2: gradual, "
    return {
        (label + name, rate): job("demo", rate, {**gradual, **knobs}, inner="muon") for name, knobs in table.items()
    }


def frontier(rate: float) -> Runs:
    """More bytes for Muon at 1.2M parameters: what are shorter rounds worth, and what a longer dense start?"""
    table: dict[str, dict[str, Any]] = {
        "100 x 3": {"dense_start": [(100, 3)]},
        "H = 18": {"sync_every": 18},
        "H = 10": {"sync_every": 10},
    }
    gradual, label = isles.Method.gradual(sync_every=30).as_dict(), "mini muon M=2: gradual, "
    return {
        (label + name, rate): job("mini", rate, {**gradual, **knobs}, inner="muon") for name, knobs in table.items()
    }


def four_islands() -> Runs:
    """`Method.gradual` on four islands with one thing changed: what do more islands want?"""
    table: dict[str, dict[str, Any]] = {
        "H = 15": {"sync_every": 15},
        "100 x 3": {"dense_start": [(100, 3)]},
        "outer lr 1.2": {"outer_lr": 1.2},
        "momentum 0.95": {"outer_momentum": 0.95},
        "100 x 3, H = 15": {"dense_start": [(100, 3)], "sync_every": 15},
        "H = 15, warm-up 40": {"sync_every": 15, "warmup_rounds": 40},
    }
    gradual, label = isles.Method.gradual(sync_every=30).as_dict(), "demo adamw M=4: gradual, "
    return {(label + name, 12): job("demo", 12, {**gradual, **knobs}, islands=4) for name, knobs in table.items()}


def about(setting: str, changes: dict[str, Any]) -> str:
    length = f" x{changes['steps']}" if "steps" in changes else ""
    return f"{setting} {changes.get('inner', 'adamw')} M={changes.get('islands', 2)}{length}"


SEARCH: dict[str, dict[str, Any]] = {
    "base": {},
    "no dense start": {"dense_start": []},
    "no warm-up": {"warmup_rounds": 0},
    "warm-up 10": {"warmup_rounds": 10},
    "warm-up 40": {"warmup_rounds": 40},
    "64x2": {"dense_start": [(64, 2)]},
    "60x3": {"dense_start": [(60, 3)]},
    "30x3 20x6 10x12": {"dense_start": [(30, 3), (20, 6), (10, 12)]},
    "mixing 0": {"mixing": 0.0},
    "outer lr 1, mixing 0.5": {"outer_lr": 1.0, "mixing": 0.5},
    "momentum 0.8": {"outer_momentum": 0.8},
    "outer lr 0.7, momentum 0.95": {"outer_momentum": 0.95},
    "outer lr 0.9": {"outer_lr": 0.9},
    "outer lr 0.9, mixing 0.1": {"outer_lr": 0.9, "mixing": 0.1},
    "outer lr 1": {"outer_lr": 1.0},
    "outer lr 1, warm-up 10": {"outer_lr": 1.0, "warmup_rounds": 10},
    "outer lr 1.2": {"outer_lr": 1.2},
}
THREE: dict[str, list[float]] = {"alone": [12], "parallel": [6], "gradual": [12]}
GROUPS: dict[str, Callable[[], Runs]] = {
    "sides": lambda: sides("demo", {"alone": [6, 12, 18], "parallel": [4, 6, 9], "paper": [12, 18]}),
    "search": lambda: variants("demo", 12, SEARCH),
    "text": lambda: sides("demo", {**THREE, "paper": [12]}),
    "twice": lambda: longer(2),
    "four-times": lambda: longer(4),
    "eight-islands": lambda: sides("demo", {"parallel": [6], "gradual": [12]}, islands=8),
    "four-islands": four_islands,
    "muon": lambda: muon(22),
    "frontier": lambda: frontier(2.6),
    "late": late,
    "long-period": long_period,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--val")
    args = parser.parse_args()
    text = Text(args.data, args.val)
    known = {(row["name"], row["text"], row["seed"]) for row in rows()}
    runs = [item for name in args.groups for item in GROUPS[name]().items()]
    jobs = {f"{label} @ {rate:g}": made for (label, rate), made in runs if args.only in label}
    tasks = tasks_of(jobs, range(args.seeds), text)
    missing = [task for task in tasks if (task.name, text.names()[0], task.job.seed) not in known]
    for task, outcome in run_tasks(missing, text, workers=args.workers):
        about = {"name": task.name, "text": text.names()[0], "seed": task.job.seed}
        kept = {key: outcome[key] for key in ("val_loss", "bytes_sent", "parameters", "curve")}
        with RESULTS.open("a") as file:
            file.write(json.dumps({**about, **kept, "job": task.job.as_dict()}) + "\n")
    if args.show:
        show()


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def show() -> None:
    """The losses, one line per configuration, with the spread over seeds."""
    found = defaultdict(list)
    for row in rows():
        found[row["text"], row["name"]].append(row)
    for (text, name), runs in sorted(found.items()):
        losses = [run["val_loss"] for run in runs]
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        print(f"{text:8} {name:60} {statistics.fmean(losses):.4f}{spread} ({len(losses)})")


if __name__ == "__main__":
    main()
