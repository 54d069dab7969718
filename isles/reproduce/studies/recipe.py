"""Better than the papers: Muon as the inner optimizer, the rest of the recipe unchanged, at two sizes.

What else was tried, and did not earn its place, is in docs/log.md.
"""

from __future__ import annotations

from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study, all_of, loss_text

OPTIMIZERS = {"AdamW": "adamw", "Muon": "muon"}


def _configurations(scale: Scale) -> dict[str, Job]:
    streaming = Method.streaming(sync_every=scale.sync_every)
    return {
        f"{model}: {name}, {optimizer}": scale.job(method, model=model, inner=inner)
        for model in dict.fromkeys((scale.model, scale.ladder[-2]))
        for optimizer, inner in OPTIMIZERS.items()
        for name, method in (("data-parallel", None), ("streaming", streaming))
    }


def _models(records: Records) -> list[str]:
    return list(dict.fromkeys(name.split(": ")[0] for name in records.names))


def _findings(records: Records) -> list[Finding]:
    models = _models(records)
    ahead = {m: records.change(f"{m}: streaming, Muon", f"{m}: data-parallel, AdamW") for m in models}
    gap = {
        (m, o): records.change(f"{m}: streaming, {o}", f"{m}: data-parallel, {o}") for m in models for o in OPTIMIZERS
    }
    losses = "; ".join(loss_text(records, f"{m}: data-parallel, AdamW", f"{m}: streaming, Muon") for m in models)
    return [
        Finding(
            "Islands with Muon in 4 bits are at or below data-parallel AdamW, for the same tokens",
            "not in the papers, which use AdamW",
            ", ".join(f"{m} {ahead[m]}" for m in models) + f" ({losses})",
            "not above at any size",
            all_of(*(ahead[m].below(0.0) for m in models)),
        ),
        Finding(
            "Beside data-parallel training with Muon too, islands are still behind",
            "not in the papers",
            ", ".join(f"{m} {gap[m, 'Muon']}" for m in models),
            "above at all sizes",
            all_of(*(gap[m, "Muon"].above(0.0) for m in models)),
        ),
        Finding(
            "With Muon islands lose less against data-parallel training than with AdamW",
            "not in the papers",
            ", ".join(f"{m}: {gap[m, 'Muon']} with Muon, {gap[m, 'AdamW']} with AdamW" for m in models),
            "smaller at all sizes",
            all(gap[m, "Muon"].mean < gap[m, "AdamW"].mean for m in models),
        ),
    ]


def _plot(records: Records, figure: Any) -> None:
    models = _models(records)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        names = [name for name in records.names if name.startswith(f"{model}: ")]
        rows = {name.split(": ")[1]: records.values(name) for name in names}
        parameters = records.of(names[0])[0]["parameters"]
        figures.dots(axes, rows, base="data-parallel, AdamW")
        figures.quiet(axes, figures.LOSS, "", f"{parameters / 1e6:.2f}M parameters")
    for axes in panels[1:]:
        axes.set_yticklabels([])


STUDY = Study(
    name="recipe",
    title="Muon as the inner optimizer, M = 2, streaming in e3m0",
    claim="(ours) With Muon as inner optimizer, islands in 4 bits are at or below data-parallel AdamW.",
    source="not in the papers",
    expectation="Steps of equal length in all directions differ less between islands, so averaging loses less.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
