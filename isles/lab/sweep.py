"""`isles lab --sweep`: all cells, one after the other, then a table and a figure.

Every record is appended to `results.jsonl` as soon as it is there. A sweep that is started again skips what is in the
file, so it may be interrupted at any time, and what failed is tried again.

A virtual machine shares its cores with others on the same host (steal time). A run during which the host took more than
`STOLEN` of them, or was too busy to shape the links, is repeated, a few times at most. Of all its runs a cell keeps the
one with the least steal time, whatever its result; that of each is in the record (`cpu_stolen_each`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.lab import programs
from isles.lab import run as lab
from isles.lab.cells import KINDS, Cell, Kind
from isles.lab.transfer import LinkError
from isles.plan.quantities import format_bandwidth
from isles.view import units

RESULTS, TABLE, FIGURE = "results.jsonl", "table.md", "utilisation.png"
TIMEOUT_SECONDS = 900.0
STOLEN = 0.05
ATTEMPTS = 3

Record = dict[str, Any]


def sweep(folder: Path, wanted: Sequence[Cell], say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the cells that are not there yet; writes table and figure; returns where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    there = {key_of(record) for record in read(folder)}
    left = [cell for cell in wanted if cell.key not in there]
    say(f"{len(wanted)} cells, {len(wanted) - len(left)} of them are there")
    failed = []
    for number, cell in enumerate(left, start=1):
        name = f"{cell.kind.name}, {cell.variant.name}, {format_bandwidth(cell.bandwidth)}"
        say(f"cell {number} of {len(left)}: {name}, {cell.steps()} steps")
        try:
            record = _undisturbed(folder, cell, say)
        except (OSError, ValueError, SystemExit) as error:
            say(f"{name} failed: {error}")
            failed.append(name)
            continue
        with (folder / RESULTS).open("a") as file:
            file.write(json.dumps(record) + "\n")
        planned, measured = units.share(record["planned_utilization"]), units.share(record["steady_utilization"])
        say(f"utilisation {measured}, planned {planned}")
        write(folder)
    return {**write(folder), "cells": len(wanted), "failed": failed}


def _undisturbed(folder: Path, cell: Cell, say: Callable[[str], None]) -> Record:
    """A run of the cell that had the machine to itself, or the one of several that came nearest to it."""
    runs: list[Record] = []
    for attempt in range(1, ATTEMPTS + 1):
        again = ": once more" if attempt < ATTEMPTS else ""
        try:
            runs.append(_run(folder, cell, say))
        except LinkError as error:
            if not runs and not again:
                raise
            say(f"{error}{again}")
            continue
        if stolen(runs[-1]) <= STOLEN:
            break
        say(f"the host took {units.share(stolen(runs[-1]))} of the cores{again}")
    quietest = min(runs, key=stolen)
    return {**quietest, "cpu_stolen_each": [stolen(run) for run in runs]}


def stolen(record: Record) -> float:
    """The share of the cores that the host took during a run."""
    return record.get("cpu_stolen") or 0.0


def _run(folder: Path, cell: Cell, say: Callable[[str], None]) -> Record:
    """One cell. What it leaves behind is its record; its folder is used again."""
    options = lab.Options(
        folder=folder / "cell",
        islands=cell.kind.islands,
        bandwidth=cell.bandwidth,
        reference_steps=cell.kind.reference_steps,
        reference_turns=not cell.kind.timed,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    program = (
        programs.timed(cell.flags()) if cell.kind.timed else programs.train(cell.flags(), islands=cell.kind.islands)
    )
    lab.claim(options.folder, overwrite=True)
    record = lab.run(options, program, say)
    return {"kind": cell.kind.name, "variant": cell.variant.name, "repeat": cell.repeat, **record}


def key_of(record: Record) -> tuple[str, str, float, int]:
    """As `Cell.key`."""
    return record["kind"], record["variant"], record["bandwidth"], record["repeat"]


def read(folder: Path) -> list[Record]:
    """The records that are there; a line that a crash cut short is left out."""
    file = folder / RESULTS
    records = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def write(folder: Path) -> dict[str, Any]:
    """Table and figure of what is there."""
    from isles.lab import figure

    records = read(folder)
    if not records:
        return {"results": str(folder / RESULTS), "table": None, "figure": None}
    (folder / TABLE).write_text(table(records))
    figure.draw(records, folder / FIGURE)
    return {"results": str(folder / RESULTS), "table": str(folder / TABLE), "figure": str(folder / FIGURE)}


@dataclass(frozen=True)
class Group:
    """The repeats of a cell."""

    variant: str
    bandwidth: float
    records: tuple[Record, ...]

    def mean(self, name: str) -> float | None:
        """Over the repeats; None if it is not known."""
        values = self.values(name)
        return statistics.fmean(values) if values else None

    def values(self, name: str) -> list[float]:
        return [record[name] for record in self.records if record.get(name) is not None]


def groups(records: Iterable[Record], kind: Kind) -> list[Group]:
    """The records of a kind by method and bandwidth, in the order of the table."""
    own = [record for record in records if record["kind"] == kind.name]
    order = [variant.name for variant in kind.variants()]
    found = {(record["variant"], record["bandwidth"]) for record in own}
    return [
        Group(name, rate, tuple(r for r in own if (r["variant"], r["bandwidth"]) == (name, rate)))
        for name, rate in sorted(found, key=lambda pair: (order.index(pair[0]) if pair[0] in order else 99, pair[1]))
    ]


def table(records: Sequence[Record]) -> str:
    """Markdown: measured (in the steady state) beside planned, bytes of isles beside those of the kernel."""
    lines: list[str] = []
    for kind in KINDS.values():
        rows = groups(records, kind)
        if not rows:
            continue
        lines += [
            f"**{kind.title[0].upper()}{kind.title[1:]}**",
            "",
            "| method | link | runs | utilisation | spread | planned | in the log | step, alone | step | waiting "
            "| isles sent | in theory | kernel / isles | peak rate | steps | loss |",
            "|" + 16 * "---|",
            *(_row(group) for group in rows),
            "",
        ]
    return "\n".join(lines)


def _row(group: Group) -> str:
    shares = group.values("steady_utilization")
    alone, step = group.mean("reference_step_seconds"), group.mean("step_seconds")
    per_byte, peak = group.mean("kernel_bytes_per_byte_sent"), group.mean("peak_bits_per_second")
    waiting, loss = group.mean("wait_seconds"), group.mean("val_loss")
    cells = [
        group.variant,
        format_bandwidth(group.bandwidth),
        str(len(group.records)),
        units.share(group.mean("steady_utilization")),
        f"{100 * min(shares):.3g} to {100 * max(shares):.3g} %" if len(shares) > 1 else "-",
        units.share(group.mean("planned_utilization")),
        units.share(group.mean("event_log_utilization")),
        "-" if alone is None else f"{1e3 * alone:.3g} ms",
        "-" if step is None else f"{1e3 * step:.4g} ms",
        "-" if waiting is None else f"{waiting:.2f} s",
        units.number_of_bytes(group.mean("bytes_sent")),
        units.number_of_bytes(group.mean("planned_bytes_sent")),
        units.decimal(per_byte),
        "-" if peak is None else format_bandwidth(peak),
        str(group.records[0].get("steps", "-")),
        "-" if loss is None else f"{loss:.3f}",
    ]
    return f"| {' | '.join(cells)} |"
