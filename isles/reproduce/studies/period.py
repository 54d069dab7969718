"""How often: the loss against H, for every way of using the result."""

from __future__ import annotations

from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study


def _configurations(scale: Scale) -> dict[str, Job]:
    jobs = {"data-parallel": scale.job(model=scale.small_model)}
    for every in scale.periods:
        methods = {
            "DiLoCo": Method.diloco(sync_every=every, outer_lr=0.4),
            "streaming": Method.streaming(sync_every=every),
            "eager": Method.eager(sync_every=every),
            "delayed": Method.delayed(sync_every=every),
        }
        for name, method in methods.items():
            jobs[f"{name}, H = {every}"] = scale.job(method, model=scale.small_model)
    return jobs


def _periods(records: Records) -> list[int]:
    return sorted({int(name.split(" = ")[1]) for name in records.names if " = " in name})


def _findings(records: Records) -> list[Finding]:
    periods = _periods(records)
    gap = {
        (name, every): records.change(f"{name}, H = {every}", "data-parallel")
        for name in ("DiLoCo", "streaming", "eager", "delayed")
        for every in periods
    }
    best = {name: min(periods, key=lambda every: gap[name, every].mean) for name in ("DiLoCo", "streaming")}
    first, last = periods[0], periods[-1]
    rise = {name: gap[name, first].mean - gap[name, best[name]].mean for name in best}
    behind = [every for every in periods if gap["eager", every].mean < gap["delayed", every].mean]
    text = ", ".join(f"H = {every} {gap['streaming', every]}" for every in periods)
    return [
        Finding(
            "H too large lets islands drift apart",
            "drift (A Fig. 13); 2.67 at H = 30, 2.69 at 100 (A Table 5, 500M)",
            f"streaming against data-parallel: {text}",
            "the largest H is worse than the best",
            records.change(f"streaming, H = {last}", f"streaming, H = {best['streaming']}").above(0.0),
        ),
        Finding(
            "H too small makes outer gradients noisy",
            "noisy outer gradients (A Fig. 13)",
            f"best H: DiLoCo {best['DiLoCo']}, streaming {best['streaming']}",
            "the best H is not the smallest",
            best["DiLoCo"] != first,
        ),
        Finding(
            "Streaming is more robust at small H than DiLoCo",
            "more robust (A Fig. 13); no number in the text at hand",
            f"from the best H to {first} the distance to data-parallel grows by "
            f"{100 * rise['DiLoCo']:.2f} points (DiLoCo), {100 * rise['streaming']:.2f} (streaming)",
            "it grows less for streaming",
            rise["streaming"] < rise["DiLoCo"] if max(rise.values()) > 0 else None,
        ),
        Finding(
            "Eager is better than delayed at every H",
            "2.69 and 3.01 at H = 30 (B Table 2; other H in B Fig. 5, 6, not in the text at hand)",
            f"at {len(behind)} of {len(periods)}: H = {', '.join(map(str, behind)) or 'none'}",
            "at all",
            behind == periods,
        ),
    ]


def _plot(records: Records, figure: Any) -> None:
    axes = figure.subplots()
    series = {
        name: {every: records.values(f"{name}, H = {every}") for every in _periods(records)}
        for name in ("DiLoCo", "streaming", "eager", "delayed")
    }
    figures.lines(axes, series, log_x=True)
    axes.axhline(records.mean("data-parallel"), color="#555555", linewidth=1, linestyle=(0, (4, 3)))
    figures.quiet(axes, "H, inner steps between synchronisations; dashed: data-parallel")


STUDY = Study(
    name="period",
    title="How often to synchronise",
    claim="Too small an H is noisy, too large an H drifts; streaming is robust at small H, and eager beats delayed.",
    source="A Fig. 13, B Fig. 5 and 6",
    expectation="Drift dominates in short runs, so the best H is small.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
