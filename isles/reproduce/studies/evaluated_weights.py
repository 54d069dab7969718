"""Which weights to evaluate: one replica, the average of replicas, or the outer parameters."""

from __future__ import annotations

from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study, all_of

WEIGHTS = {"one replica": "replica_loss", "average of replicas": "average_loss", "outer parameters": "outer_loss"}


def _configurations(scale: Scale) -> dict[str, Job]:
    methods = {
        "streaming": Method.streaming(sync_every=scale.sync_every),
        "streaming, mixing 0": Method.streaming(sync_every=scale.sync_every, mixing=0.0),
        "eager": Method.eager(sync_every=scale.sync_every),
    }
    return {name: scale.job(method, replicas=True) for name, method in methods.items()}


def _findings(records: Records) -> list[Finding]:
    found = []
    for name in records.names:
        losses = {weights: records.mean(name, what) for weights, what in WEIGHTS.items()}
        replica = records.change(name, name, "replica_loss", "outer_loss")
        average = records.change(name, name, "average_loss", "outer_loss")
        found.append(
            Finding(
                f"{name}: the outer parameters are the best to evaluate, one replica the worst",
                "outer 2.67, average 2.68, one replica 2.77 (A Table 3)",
                f"{', '.join(f'{w} {loss:.3f}' for w, loss in losses.items())}: average {average}, replica {replica}",
                "outer at most 0.1 % above the average, and better than a replica",
                all_of(average.above(-0.001), replica.above(0.0)),
            )
        )
    return found


def _plot(records: Records, figure: Any) -> None:
    panels = figure.subplots(1, len(records.names), squeeze=False)[0]
    for axes, name in zip(panels, records.names, strict=True):
        figures.dots(axes, {weights: records.values(name, what) for weights, what in WEIGHTS.items()})
        figures.quiet(axes, figures.LOSS, "", name)
        axes.locator_params(axis="x", nbins=4)
    for axes in panels[1:]:
        axes.set_yticklabels([])


STUDY = Study(
    name="evaluated-weights",
    title="Which weights to evaluate",
    claim="The outer parameters (2.67) are slightly better than the average of replicas (2.68), one replica is worse.",
    source="A Table 3",
    expectation="The order holds; the average may win where the outer momentum lags in short runs.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
