"""Does the distance to data-parallel close with more tokens per parameter?"""

from __future__ import annotations

from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study

PAPER = {"streaming": "2.66 / 2.51 / 2.45", "eager": "2.69 / 2.53 / 2.46"}


def _configurations(scale: Scale) -> dict[str, Job]:
    every = scale.sync_every
    methods = {
        "data-parallel": None,
        "streaming": Method.streaming(sync_every=every),
        "eager": Method.eager(sync_every=every),
    }
    jobs = {}
    for factor in scale.token_factors:
        steps = max(2, round(scale.steps * factor / every)) * every  # whole rounds
        for name, method in methods.items():
            jobs[f"{name}, {steps} steps"] = scale.job(method, model=scale.tiny_model, steps=steps)
    return jobs


def _lengths(records: Records) -> list[int]:
    return sorted({int(name.split()[-2]) for name in records.names})


def _per_parameter(records: Records, steps: int) -> float:
    record = records.of(f"data-parallel, {steps} steps")[0]
    return float(record["tokens"] / record["parameters"])


def _findings(records: Records) -> list[Finding]:
    lengths = _lengths(records)
    found = []
    for name in ("streaming", "eager"):
        gaps = [records.change(f"{name}, {steps} steps", f"data-parallel, {steps} steps") for steps in lengths]
        shown = ", ".join(
            f"{_per_parameter(records, steps):.3g}: {gap}" for steps, gap in zip(lengths, gaps, strict=True)
        )
        found.append(
            Finding(
                f"The distance of {name} to data-parallel does not grow with more tokens",
                f"data-parallel 2.67 / 2.52 / 2.45, {name} {PAPER[name]} "
                "at 25 / 100 / 250 B tokens (A Table 1, B; 1B, H = 100)",
                f"at tokens per parameter {shown}",
                "at the longest not larger than at the shortest",
                gaps[-1].mean <= gaps[0].mean,
            )
        )
    return found


def _plot(records: Records, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    lengths = _lengths(records)
    for axes, names in ((left, ("data-parallel", "streaming", "eager")), (right, ("streaming", "eager"))):
        series = {}
        for name in names:
            points = {}
            for steps in lengths:
                base, own = records.values(f"data-parallel, {steps} steps"), records.values(f"{name}, {steps} steps")
                gap = [100 * (value / parallel - 1) for value, parallel in zip(own, base, strict=False)]
                points[_per_parameter(records, steps)] = own if axes is left else gap
            series[name] = points
        figures.lines(axes, series, log_x=True)
    figures.quiet(left, "tokens per parameter")
    figures.quiet(right, "tokens per parameter", "distance to data-parallel (%)")


STUDY = Study(
    name="overtraining",
    title="More tokens per parameter",
    claim="The distance to data-parallel stays at or below 1 % however long the model is trained.",
    source="A Table 1, B",
    expectation="The distance shrinks with the number of rounds.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
