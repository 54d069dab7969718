"""Utilisation against bandwidth, as the papers draw it: a log axis, one line for each method.

Lines are coloured along the order of the table, from the method that needs the link most to the one that needs it
least. The names are to the right of the axes, each with the bandwidth from which the method is 95 % busy computing,
where they cover no line. The link that was asked about is a vertical line with a dot on every curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isles.plan.compare import Question, Row
from isles.plan.fleet import slowest_bits_per_second
from isles.plan.quantities import format_bandwidth
from isles.plan.simulate import Array

COLOURS = ("#8c8c8c", "#b5544d", "#dd8434", "#c9a227", "#2f8f6b", "#2b7bba", "#5b4a9c", "#111111")
QUIET = "#555555"


def figure(question: Question, rows: Sequence[Row], sync_every: int) -> Any:
    """A matplotlib figure of all rows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    drawn = Figure(figsize=(11, 5.4), layout="constrained")
    axes = drawn.add_subplot()
    link = slowest_bits_per_second(question.fleet) / 1e9
    axes.axvline(link, color=QUIET, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    note: dict[str, Any] = {"color": QUIET, "fontsize": 9, "ha": "center", "textcoords": "offset points"}
    axes.annotate(f"this link, {format_bandwidth(link * 1e9)}", (link, 1.03), (0, 4), **note)
    widths = np.linspace(4.0, 1.8, len(rows))
    for index, (row, colour, width) in enumerate(zip(rows, COLOURS, widths, strict=False)):
        hides = index > 0 and np.abs(row.curve - rows[index - 1].curve).max() < 0.01  # dashed, so that both are seen
        style = (0, (5, 3)) if hides else "solid"
        axes.plot(question.grid_gbit, row.curve, color=colour, linewidth=width, linestyle=style)
        axes.plot([link], [row.utilisation], "o", color=colour, markersize=6, markeredgecolor="white", zorder=5)
    _name_lines(axes, rows)
    axes.set_xscale("log")
    axes.set_xlim(*_interesting(question.grid_gbit, rows, link))
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda gbit, _: format_bandwidth(gbit * 1e9)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_yticks([0, 0.25, 0.5, 0.8, 0.9, 1.0])
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_xlabel("bandwidth between islands")
    axes.set_ylabel("compute utilisation")
    axes.set_title(_title(question, sync_every), loc="left", fontsize=12, pad=20)
    return drawn


def save(question: Question, rows: Sequence[Row], sync_every: int, path: Path) -> None:
    """Draws into a file; its ending says in which format."""
    try:
        figure(question, rows, sync_every).savefig(path, dpi=160)
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None


def _title(question: Question, sync_every: int) -> str:
    work = question.workload
    mode = "papers' conventions" if question.paper else "honest bytes"
    step = f"{max(island.step_seconds for island in question.fleet):.3g} s a step"
    return f"{work.name}: {work.layers} layers, {step}, {question.islands} islands, H = {sync_every}  ({mode})"


def _interesting(grid: Array, rows: Sequence[Row], link: float) -> tuple[float, float]:
    """The part of the axis where something happens, the link included."""
    curves = np.stack([row.curve for row in rows])
    slowest = curves.min(axis=0)
    moving = grid[(curves.max(axis=0) > 0.1) & (slowest < 0.985 * slowest.max())]
    if not len(moving):
        moving = grid
    return max(min(moving[0], link / 2), grid[0] / 10), min(max(moving[-1], link * 2), grid[-1] * 10)


def _name_lines(axes: Any, rows: Sequence[Row]) -> None:
    """The names to the right of the axes, the method that needs least on top."""
    heights = np.linspace(0.93, 0.13, max(len(rows), 6))
    for row, colour, height in zip(reversed(rows), reversed(COLOURS[: len(rows)]), heights, strict=False):
        need = row.gbit_per_s["95"]
        says = f"95 % from {format_bandwidth(need * 1e9)}" if need is not None else "95 % at no bandwidth"
        place: dict[str, Any] = {"transform": axes.transAxes, "va": "top", "in_layout": True}
        axes.text(1.02, height, row.variant.name, color=colour, fontsize=10.5, fontweight="bold", **place)
        axes.text(1.02, height - 0.045, says, color=QUIET, fontsize=9, **place)
