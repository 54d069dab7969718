"""The answer as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isles.plan.compare import Question, Row
from isles.plan.fleet import longest_latency_seconds, slowest_bits_per_second
from isles.plan.honest import DenseStart
from isles.plan.quantities import format_bandwidth, three_digits
from isles.plan.recommend import Recommendation
from isles.view import units

MODES = {
    "honest": (
        "Honest mode: exact payloads and headers of isles, TCP framing, real messages, whole fragments.\n"
        "(--paper follows the papers' conventions instead.)"
    ),
    "paper": (
        "The papers' conventions (--paper): layers are reduced one by one, 13.45 Gbit per 1e9 parameters in 16 bits,\n"
        "nothing but bandwidth counts, Gbit/s on the papers' grid, rounded as published. (Without: isles as it is.)"
    ),
}


def text(question: Question, rows: Sequence[Row], best: Recommendation, wanted: float, sync_every: int) -> str:
    """The whole answer, for reading."""
    parts = [
        MODES["paper" if question.paper else "honest"] + _coding_note(question),
        _situation(question, sync_every),
        table([_HEADER, *([*_cells(row)] for row in rows)]),
        _memory_note(question),
        *(_start_note(row.variant.name, row.start) for row in rows if row.start is not None),
        "Gbit/s needed for a utilisation of",
        table(
            [["method", *(f"{target} %" for target in rows[0].gbit_per_s)], *(_needed(question, row) for row in rows)]
        ),
        _advice(best, wanted),
    ]
    return "\n\n".join(part for part in parts if part)


def _coding_note(question: Question) -> str:
    if question.paper:
        return ""
    if question.coding:
        return "\nTime to encode and decode is counted."
    return "\nEncoding and decoding are taken to keep up; --measure-coding counts the speed of this machine."


def as_dict(
    question: Question, rows: Sequence[Row], best: Recommendation, wanted: float, sync_every: int
) -> dict[str, Any]:
    """The whole answer, for machines."""
    work = question.workload
    return {
        "mode": "paper" if question.paper else "honest",
        "model": {
            "name": work.name,
            "parameters": work.parameters,
            "layers": work.layers,
            "outside_parameters": work.outside_parameters,
            "ranks": work.ranks,
            "steps": work.steps,
            "step_seconds": [island.step_seconds for island in question.fleet],
        },
        "islands": question.islands,
        "bits_per_second": slowest_bits_per_second(question.fleet),
        "latency_seconds": longest_latency_seconds(question.fleet),
        "sync_every": sync_every,
        "goodput": question.goodput,
        "gbit_per_s": {row.variant.name: row.gbit_per_s for row in rows},
        "methods": {row.variant.name: _row_dict(row) for row in rows},
        "recommendation": {
            "method": best.variant.name,
            "python": best.variant.python,
            "compute_utilization": best.utilisation,
            "wanted_utilization": wanted,
            "reached": best.reached,
            "loss_penalty_percent": best.penalty.percent,
            "quote": best.penalty.quote,
            "reason": best.reason,
        },
    }


def _row_dict(row: Row) -> dict[str, Any]:
    return {
        "compute_utilization": row.utilisation,
        "step_seconds": row.step_seconds,
        "bytes_per_step": row.bytes_per_step,
        "peak_bytes_per_step": row.peak_bytes,
        "days": row.days,
        "device_bytes": row.memory.device_bytes,
        "host_bytes": row.memory.host_bytes,
        "loss_penalty_percent": row.penalty.percent,
        "quote": row.penalty.quote,
        "python": row.variant.python,
        "dense_start": None if row.start is None else _start_dict(row.start),
    }


def _start_dict(start: DenseStart) -> dict[str, Any]:
    return {
        "steps": start.steps,
        "seconds": float(start.seconds),
        "bytes": start.num_bytes,
        "peak_bytes_per_step": start.peak_bytes,
    }


def _start_note(name: str, start: DenseStart) -> str:
    sent, most = units.number_of_bytes(start.num_bytes), units.number_of_bytes(start.peak_bytes)
    return (
        f"{name}: a dense start of {start.steps:,} steps comes before that. It sends {sent}, at most {most} after one "
        f"step, and takes {units.duration(float(start.seconds))}."
    )


_HEADER = ["method", "bytes/step", "peak", "utilisation", "time to train", "device", "host", "loss"]


def _cells(row: Row) -> list[str]:
    return [
        row.variant.name,
        units.number_of_bytes(row.bytes_per_step),
        units.number_of_bytes(row.peak_bytes),
        units.share(row.utilisation),
        units.duration(row.days * 86400 if row.days is not None else None),
        units.number_of_bytes(row.memory.device_bytes),
        units.number_of_bytes(row.memory.host_bytes),
        f"{row.penalty.percent:+.1f} %",
    ]


def _needed(question: Question, row: Row) -> list[str]:
    shown = (f"{gbit:.1f}" if question.paper and gbit else three_digits(gbit) for gbit in row.gbit_per_s.values())
    return [row.variant.name, *shown]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _situation(question: Question, sync_every: int) -> str:
    work = question.workload
    seconds = sorted({island.step_seconds for island in question.fleet})
    step = f"{seconds[0]:.3g} s" if len(seconds) == 1 else f"{seconds[0]:.3g} to {seconds[-1]:.3g} s"
    latency = longest_latency_seconds(question.fleet)
    delay = f", {latency * 1e3:g} ms one way" if latency else ""
    pace = format_bandwidth(slowest_bits_per_second(question.fleet))
    ranks = f", {work.ranks} ranks each" if work.ranks > 1 else ""
    lines = [
        f"model    {work.name}: {units.count(work.parameters)} parameters, {work.layers} layers, {step} a step",
        f"islands  {question.islands}{ranks}, joined at {pace}{delay}",
        f"period   H = {sync_every}",
    ]
    if question.failures:
        lines.append(
            f"goodput  {units.share(question.goodput)} after failures (in the time to train, not in utilisation)"
        )
    return "\n".join(lines)


def _memory_note(question: Question) -> str:
    where = "in host memory" if question.outer_on_host else "on the device"
    return (
        "Bytes are what one island sends (and receives), peak: after one step. Memory is of one island: weights, Adam\n"
        f"and outer state ({where}), without gradients and activations; the host holds payload and mean of every\n"
        "round in flight. Loss: against data-parallel, from the papers' tables, for the nearest published size\n"
        "(distant: the figure of eager)."
    )


def _advice(best: Recommendation, wanted: float) -> str:
    variant = best.variant
    isles = variant.family != "data-parallel"
    name = f"{variant.name}, H = {variant.sync_every}" if isles else variant.name
    return (
        f"For {units.share(wanted)} on this link: {name}  (utilisation {units.share(best.utilisation)})\n"
        f"  {best.reason}\n"
        f"  expected loss {best.penalty.percent:+.1f} %: {best.penalty.quote}\n"
        f"  {'method = ' * isles}{variant.python}"
    )
