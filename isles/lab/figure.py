"""The figure of a sweep: what was measured, as points with their spread, on the planner's curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from isles.core.method import Method
from isles.lab.cells import KINDS, Kind
from isles.lab.sweep import Group, Record, groups
from isles.plan import Link, alike, predict
from isles.plan.coding import Coding
from isles.plan.exchange import FRAMING
from isles.plan.quantities import format_bandwidth
from isles.plan.workload import workload_of

COLOURS = ("#4a4a4a", "#c2410c", "#d97706", "#15803d", "#0e7490", "#6d28d9", "#be185d")


def draw(records: Sequence[Record], file: Path) -> None:
    """One panel for each kind of islands."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = [kind for kind in KINDS.values() if groups(records, kind)]
    figure, panels = plt.subplots(1, len(kinds), figsize=(6.4 * len(kinds), 4.6), squeeze=False, layout="constrained")
    for kind, panel in zip(kinds, panels[0], strict=True):
        _panel(panel, kind, groups(records, kind))
    figure.savefig(file, dpi=150)
    plt.close(figure)


def _panel(panel: Any, kind: Kind, found: Sequence[Group]) -> None:
    for name, colour in zip((variant.name for variant in kind.variants()), COLOURS, strict=True):
        own = [group for group in found if group.variant == name and group.values("steady_utilization")]
        if not own:
            continue
        rates, shares = curve(kind, own)
        panel.plot(rates, shares, color=colour, linewidth=1.2)
        means = [statistics.fmean(group.values("steady_utilization")) for group in own]
        spread = [
            [mean - min(group.values("steady_utilization")) for mean, group in zip(means, own, strict=True)],
            [max(group.values("steady_utilization")) - mean for mean, group in zip(means, own, strict=True)],
        ]
        at = [group.bandwidth for group in own]
        panel.errorbar(at, means, yerr=spread, fmt="o", markersize=5, capsize=3, color=colour, label=name)
    panel.set_xscale("log")
    panel.set_xticks(kind.bandwidths, [format_bandwidth(rate) for rate in kind.bandwidths])
    panel.set_xticks([], minor=True)
    panel.set_ylim(0, 1.15)
    panel.set_xlabel("bandwidth of every link, each way")
    panel.set_ylabel("compute utilisation")
    panel.set_title(f"{kind.title}\nlines: planned, points: measured", fontsize=9)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=7, loc="best")


def curve(kind: Kind, own: Sequence[Group]) -> tuple[Any, Any]:
    """The planner's utilisation over bandwidth, with the step time and the payload of a line that were measured."""
    record = own[0].records[0]
    alone = [value for group in own for value in group.values("reference_step_seconds")]
    carried = [value / group.bandwidth for group in own for value in group.values("bandwidth_measured")]
    method = Method(**record["knobs"]) if record["knobs"] else None
    workload = workload_of(record, statistics.fmean(alone))
    fleet = alike(kind.islands, workload.step_seconds, Link.symmetric(1e6))
    rates = np.geomspace(min(kind.bandwidths) / 2, max(kind.bandwidths) * 2, 60)
    found = predict(
        workload,
        fleet,
        method,
        reduction=kind.reduction,
        coding=Coding(**record["planned_coding"]) if record.get("planned_coding") else None,
        bits_per_second=rates * FRAMING * statistics.fmean(carried),
    )
    return rates, found.utilisation
