"""How the studies' figures look: quiet axes, every seed a dot, the mean a line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isles.reproduce.study import Records, Study
from isles.view import units

COLOURS = (
    "#2b7bba",
    "#dd8434",
    "#2f8f6b",
    "#b5544d",
    "#5b4a9c",
    "#c9a227",
    "#111111",
    "#8c8c8c",
    "#6fb3e0",
    "#8a6d3b",
    "#7cb342",
    "#c2185b",
)
LOSS = "validation loss (nats a token)"

Points = Mapping[Any, Sequence[float]]
"""x -> the values of all seeds."""


def save(study: Study, records: Records, path: Path) -> None:
    """Draws a study's figure into a file."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4.6), layout="constrained")
    drawn.suptitle(study.title, x=0.01, ha="left", fontsize=12)
    study.plot(records, drawn)
    drawn.savefig(path, dpi=120, metadata={"Software": None})


def quiet(axes: Any, x: str, y: str = LOSS, title: str = "") -> None:
    """Labels, a light grid, no frame on top and to the right."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def lines(axes: Any, series: Mapping[str, Points], *, log_x: bool = False) -> None:
    """A line through the means of each series, with the seeds as dots; what diverged is left out."""
    for (label, points), colour in zip(series.items(), _colours(len(series)), strict=True):
        finite = {x: [v for v in values if math.isfinite(v)] for x, values in points.items()}
        places = sorted(x for x, values in finite.items() if values)
        means = [statistics.fmean(finite[x]) for x in places]
        axes.plot(places, means, color=colour, label=label, marker="o", markersize=4)
        scattered = [(x, value) for x in places for value in finite[x] if len(finite[x]) > 1]
        axes.scatter(*zip(*scattered, strict=True), color=colour, s=10, alpha=0.5) if scattered else None
    if log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
        places = sorted({x for points in series.values() for x in points})
        axes.set_xticks(places, [units.count(x) if x >= 1 else f"{x:.2g}" for x in places])
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8)


def dots(axes: Any, rows: Mapping[str, Sequence[float]], *, base: str | None = None) -> None:
    """One row per configuration: seeds as dots, the mean as a bar mark; `base` gets a vertical line."""
    for height, ((_, values), colour) in enumerate(zip(rows.items(), _colours(len(rows)), strict=True)):
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            axes.scatter(finite, [-height] * len(finite), color=colour, s=18, alpha=0.6)
            axes.plot([statistics.fmean(finite)], [-height], marker="|", markersize=16, color=colour)
    axes.set_yticks([-height for height in range(len(rows))], list(rows))
    if base is not None:
        axes.axvline(statistics.fmean(rows[base]), color="#555555", linewidth=1, linestyle=(0, (4, 3)))


def curves(axes: Any, records: Records, names: Sequence[str]) -> None:
    """Loss against steps, the mean over seeds."""
    series: dict[str, dict[int, list[float]]] = {}
    for name in names:
        points: dict[int, list[float]] = {}
        for record in records.of(name):
            for step, loss in record["curve"]:
                points.setdefault(step, []).append(math.inf if loss is None else loss)
        series[name] = {step: [statistics.fmean(values)] for step, values in points.items()}
    lines(axes, series)


def _colours(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]
