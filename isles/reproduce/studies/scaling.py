"""Loss against model size, and the slopes of power laws through it: does the distance to data-parallel close?"""

from __future__ import annotations

import math
import statistics
from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study

PAPER = {
    "streaming": "+0.6 % at 35M, -0.4 % at 1B (A Table 5, H = 30: 3.51 and 3.53, 2.49 and 2.48)",
    "eager": "+3.1 % at 35M, +0.4 % at 1B (B Table 6, H = 30: 3.51 and 3.62, 2.49 and 2.50)",
}


def _configurations(scale: Scale) -> dict[str, Job]:
    every = scale.sync_every
    methods = {
        "data-parallel": None,
        "streaming": Method.streaming(sync_every=every),
        "eager": Method.eager(sync_every=every),
    }
    return {
        f"{name}, {model}": scale.job(method, model=model) for model in scale.ladder for name, method in methods.items()
    }


def _models(records: Records) -> list[str]:
    """By size."""
    models = {name.split(", ")[1]: records.of(name)[0]["parameters"] for name in records.names}
    return sorted(models, key=lambda model: models[model])


def _points(records: Records, name: str) -> dict[float, list[float]]:
    names = [f"{name}, {model}" for model in _models(records)]
    return {float(records.of(each)[0]["parameters"]): records.values(each) for each in names}


def slope(points: dict[float, list[float]]) -> float:
    """The exponent of the power law through the means: least squares in logarithms.

    >>> round(slope({1e6: [4.0], 1e8: [2.0]}), 4)
    -0.1505
    """
    finite = {size: statistics.fmean(values) for size, values in points.items() if math.isfinite(sum(values))}
    x = [math.log(size) for size in finite]
    y = [math.log(loss) for loss in finite.values()]
    return statistics.linear_regression(x, y).slope if len(finite) > 1 else math.nan


def _findings(records: Records) -> list[Finding]:
    models = _models(records)
    slopes = {name: slope(_points(records, name)) for name in ("data-parallel", "streaming", "eager")}
    found = []
    for name in ("streaming", "eager"):
        gaps = [records.change(f"{name}, {model}", f"data-parallel, {model}") for model in models]
        found.append(
            Finding(
                f"The distance of {name} to data-parallel shrinks with size",
                PAPER[name],
                ", ".join(f"{model} {gap}" for model, gap in zip(models, gaps, strict=True)),
                "smaller at the largest size than at the smallest",
                gaps[-1].mean < gaps[0].mean,
            )
        )
    found.append(
        Finding(
            "All methods follow power laws of much the same slope, low-communication ones slightly steeper",
            "no exponent in the text at hand; from 35M to 1B 3.51 to 2.49 and 3.53 to 2.48 (A Table 5)",
            "exponents " + ", ".join(f"{name} {value:.4f}" for name, value in slopes.items()),
            "streaming at least as steep as data-parallel",
            slopes["streaming"] <= slopes["data-parallel"],
        )
    )
    return found


def _plot(records: Records, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    series = {name: _points(records, name) for name in ("data-parallel", "streaming", "eager")}
    named = {f"{name}, exponent {slope(points):.3f}": points for name, points in series.items()}
    figures.lines(left, named, log_x=True)
    left.set_yscale("log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    figures.quiet(left, "parameters")
    base = series.pop("data-parallel")
    gaps = {
        name: {n: [100 * (v / b - 1) for v, b in zip(values, base[n], strict=False)] for n, values in points.items()}
        for name, points in series.items()
    }
    figures.lines(right, gaps, log_x=True)
    figures.quiet(right, "parameters", "distance to data-parallel (%)")


STUDY = Study(
    name="scaling",
    title="Loss against model size",
    claim="The distance to data-parallel shrinks with model size, to nothing at 1B.",
    source="A Table 5, B Table 6",
    expectation="Less clear: all sizes see the same tokens here, so larger ones are less trained than in the papers.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
