"""What makes a second island worth nearly all of it: the schedule of the outer loop in short runs, knob by knob.

Worth of the other islands = (alone - method) / (alone - data-parallel), every side at its best inner learning rate.
The settings, one text each: `demo` is that of `make demo` (263k parameters, 1,500 steps of 8 x 128 tokens an island),
`mini` has 1.2M parameters and 2,100 steps of 4 x 64. H = 30, M = 2 and e3m0, where nothing else is said.

    python experiments/outer_schedule.py GROUP ... [--seeds N] [--workers N]    # runs what is not there yet
    python experiments/outer_schedule.py --show                                 # the table of all that is there

One line of JSON per run is appended to the results. docs/log.md has the findings.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import isles
from isles.reproduce.job import Job, Text
from isles.reproduce.pool import run_tasks, tasks_of

RESULTS = Path(__file__).parent / "results" / "outer-schedule.jsonl"
SETTINGS: dict[str, dict[str, Any]] = {
    "demo": {"model": "micro", "vocabulary": 1024, "steps": 1500, "batch_size": 8, "sequence_length": 128},
    "mini": {"model": "mini", "steps": 2100, "batch_size": 4, "sequence_length": 64},
}
BASE: dict[str, Any] = {"dense_start": [(50, 3)], "warmup_rounds": 20, "outer_lr": 0.7, "mixing": 0.25}
"""Where the search begins."""


def job(setting: str, rate: float, knobs: dict[str, Any] | None, **changes: Any) -> Job:
    """A run; no knobs: data-parallel, or alone with islands=1. The rate is in thousandths."""
    method = None if knobs is None else isles.Method.streaming(**{"sync_every": 30, **knobs})
    return Job(method=method, learning_rate=rate / 1000, **{**SETTINGS[setting], "evaluations": 10, **changes})


def group(name: str) -> dict[str, Job]:
    """The runs of a group, by name."""
    return {f"{label} @ {rate:g}": made for (label, rate), made in GROUPS[name]().items()}


def sides(setting: str, rates: dict[str, list[float]], knobs: dict[str, Any] = BASE, **changes: Any) -> Any:
    """Alone, data-parallel, the preset of the paper and ours, at learning rates of their own."""
    found = {}
    inner = changes.get("inner", "adamw")
    islands = changes.get("islands", 2)
    about = f"{setting} {inner} M={islands}" + (f" x{changes['steps']}" if "steps" in changes else "")
    for side, grid in rates.items():
        for rate in grid:
            if side == "alone":
                made = job(setting, rate, None, **{**changes, "islands": 1})
            else:
                made = job(setting, rate, {"parallel": None, "paper": {}, "ours": knobs}[side], **changes)
            found[f"{about}: {side}", rate] = made
    return found


def variants(setting: str, rate: float, table: dict[str, dict[str, Any]], **changes: Any) -> Any:
    """Ours with one thing changed."""
    inner = changes.get("inner", "adamw")
    return {
        (f"{setting} {inner} M={changes.get('islands', 2)}: ours, {label}", rate): job(
            setting, rate, {**BASE, **knobs}, **changes
        )
        for label, knobs in table.items()
    }


KNOBS: dict[str, dict[str, Any]] = {
    "mixing 0": {"mixing": 0.0},
    "mixing 0.5": {"mixing": 0.5},
    "no dense start": {"dense_start": []},
    "no warm-up": {"warmup_rounds": 0},
    "warm-up 10": {"warmup_rounds": 10},
    "warm-up 40": {"warmup_rounds": 40},
    "outer lr 0.5": {"outer_lr": 0.5},
    "outer lr 0.9": {"outer_lr": 0.9},
    "momentum 0": {"outer_momentum": 0.0, "outer_lr": 1.0},
    "momentum 0.5": {"outer_momentum": 0.5},
    "momentum 0.8": {"outer_momentum": 0.8},
    "dense 25x3": {"dense_start": [(25, 3)]},
    "dense 50x2": {"dense_start": [(50, 2)]},
    "dense 50x5": {"dense_start": [(50, 5)]},
    "dense 30x10": {"dense_start": [(30, 10)]},
    "dense 15x3 15x6 15x12": {"dense_start": [(15, 3), (15, 6), (15, 12)]},
    "dense 10x1 10x2 10x4 10x8 10x15": {"dense_start": [(10, 1), (10, 2), (10, 4), (10, 8), (10, 15)]},
    "fp32": {"codec": "fp32"},
    "overlap 0": {"overlap": 0},
}
GROUPS: dict[str, Any] = {
    "demo-sides": lambda: sides(
        "demo", {"alone": [6, 12, 18], "parallel": [4, 6, 9], "paper": [12, 18], "ours": [9, 12, 18]}
    ),
    "demo-knobs": lambda: variants("demo", 12, KNOBS),
    "demo-muon": lambda: sides(
        "demo", {"alone": [6, 12, 24], "parallel": [6, 12, 24], "ours": [6, 12, 24]}, inner="muon"
    ),
    "mini-sides": lambda: sides(
        "mini", {"alone": [3, 6, 12], "parallel": [3, 6, 12], "paper": [6, 12], "ours": [3, 6, 12]}
    ),
    "mini-knobs": lambda: variants("mini", 6, KNOBS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--data", default="stdlib")
    parser.add_argument("--val")
    args = parser.parse_args()
    text = Text(args.data, args.val)
    known = {(row["name"], row["text"], row["seed"]) for row in rows()}
    for name in args.groups:
        tasks = tasks_of(group(name), range(args.seeds), text)
        for task, outcome in run_tasks(tasks, text, workers=args.workers):
            about = {"name": task.name, "text": text.names()[0], "seed": task.job.seed}
            if tuple(about.values()) not in known:
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
