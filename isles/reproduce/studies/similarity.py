"""How alike are the islands' outer gradients, over training and fragment by fragment?"""

from __future__ import annotations

import statistics
from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study


def _configurations(scale: Scale) -> dict[str, Job]:
    every = scale.sync_every
    methods = {
        "streaming": Method.streaming(sync_every=every, codec="fp32"),
        "DiLoCo": Method.diloco(sync_every=every, outer_lr=0.4),
    }
    return {
        f"{name}, M = {count}": scale.job(method, similarity=True, islands=count)
        for name, method in methods.items()
        for count in (2, 4)
    }


def _by_step(records: Records, name: str, fragment: int | None = None) -> dict[int, list[float]]:
    """Step -> cosines of all seeds, of one fragment or of all."""
    points: dict[int, list[float]] = {}
    for record in records.of(name):
        for number, step, cosine in record["cosines"]:
            if fragment in (None, number):
                points.setdefault(step, []).append(cosine)
    return dict(sorted(points.items()))


def _phases(points: dict[int, list[float]]) -> tuple[float, float, float]:
    """Mean cosine in the first tenth, the middle tenth and the last tenth of training."""
    steps = list(points)
    end = steps[-1]

    def mean(first: float, last: float) -> float:
        inside = [value for step in steps if first * end <= step <= last * end for value in points[step]]
        return statistics.fmean(inside or points[min(steps, key=lambda s: abs(s - (first + last) / 2 * end))])

    return mean(0, 0.1), mean(0.45, 0.55), mean(0.9, 1)


def _findings(records: Records) -> list[Finding]:
    phases = {name: _phases(_by_step(records, name)) for name in records.names}
    start, middle, end = phases["streaming, M = 2"]
    shown = "; ".join(f"{name}: {a:+.2f}, {b:+.2f}, {c:+.2f}" for name, (a, b, c) in phases.items())
    fragments = sorted({number for record in records.of("streaming, M = 2") for number, _, _ in record["cosines"]})
    by_fragment = {p: _phases(_by_step(records, "streaming, M = 2", p)) for p in fragments}
    detail = ", ".join(f"{p}: {a:+.2f} to {c:+.2f}" for p, (a, _, c) in by_fragment.items())
    return [
        Finding(
            "The similarity of outer gradients is low and falls during training",
            "from near 0.1 to 0 (A Fig. 16, 17)",
            f"first, middle and last tenth: {shown}",
            "the middle is lower than the start",
            middle < start,
        ),
        Finding(
            "At the end outer gradients point slightly apart",
            "near -0.1 (A Fig. 16, 17)",
            f"{end:+.2f} for streaming with two islands",
            "below 0",
            end < 0,
        ),
        Finding(
            "All fragments behave alike",
            "per fragment in A Fig. 17; no number in the text at hand",
            f"first to last tenth, by fragment: {detail}",
            "every one falls",
            all(c < a for a, _, c in by_fragment.values()),
        ),
    ]


def _plot(records: Records, figure: Any) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    figures.lines(left, {name: _mean(_by_step(records, name)) for name in records.names})
    fragments = sorted({number for record in records.of("streaming, M = 2") for number, _, _ in record["cosines"]})
    series = {f"fragment {p}": _mean(_by_step(records, "streaming, M = 2", p)) for p in fragments}
    figures.lines(right, series)
    figures.quiet(left, "inner steps", "cosine similarity")
    figures.quiet(right, "inner steps", "cosine similarity", "streaming, M = 2 (fragment 0: embeddings)")


def _mean(points: dict[int, list[float]]) -> dict[int, list[float]]:
    return {step: [statistics.fmean(values)] for step, values in points.items()}


STUDY = Study(
    name="similarity",
    title="How alike outer gradients are",
    claim="The cosine similarity of the islands' outer gradients starts near 0.1, falls to 0 and ends near -0.1.",
    source="A Fig. 16 and 17",
    expectation="It falls; the start is higher, since small models on little text agree on the first steps.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
