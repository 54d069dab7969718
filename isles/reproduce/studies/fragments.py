"""How the model is cut: size of fragments, strided or sequential; and what freezing the others would cost."""

from __future__ import annotations

from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job, shape_of
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study

PATTERNS = ("strided", "sequential")
FROZEN = "frozen"
NOISE = 0.002
"""A difference of one seed that is no larger says nothing."""


def _configurations(scale: Scale) -> dict[str, Job]:
    model = scale.deep_model
    layers = shape_of(model)[0]
    jobs = {"data-parallel": scale.job(model=model)}
    for size in sorted({size for size in (1, 2, 3, 6, layers) if layers % size == 0}):
        for pattern in PATTERNS if 1 < size < layers else PATTERNS[:1]:  # else there is nothing to choose
            method = Method.streaming(sync_every=scale.sync_every, fragment_layers=size, pattern=pattern)
            jobs[_name(size, pattern)] = scale.job(method, model=model)
    usual = Method.streaming(sync_every=scale.sync_every, fragment_layers=_usual(layers))
    jobs[FROZEN] = scale.job(usual, model=model, frozen=True)
    return jobs


def _name(size: int, pattern: str) -> str:
    return f"{size} layer{'s' * (size > 1)}, {pattern}"


def _usual(layers: int) -> int:
    """The papers' three layers, or what comes near."""
    return 3 if layers % 3 == 0 and layers > 3 else 2


def _sizes(records: Records) -> list[int]:
    return sorted({int(name.split()[0]) for name in records.names if "layer" in name})


def _findings(records: Records) -> list[Finding]:
    sizes = _sizes(records)
    usual = _usual(sizes[-1])
    strided = {size: _name(size, "strided") for size in sizes}
    pattern = records.change(strided[usual], _name(usual, "sequential"))
    by_size = {size: records.change(name, strided[usual]) for size, name in strided.items()}
    best, worst = min(by_size, key=lambda s: by_size[s].mean), max(by_size, key=lambda s: by_size[s].mean)
    frozen = records.change(FROZEN, strided[usual])
    return [
        Finding(
            f"Strided is slightly better than sequential at {usual} layers",
            "slightly better at 3 layers (A Fig. 6)",
            f"{pattern} for strided",
            f"better (one seed: by more than {100 * NOISE:g} %)",
            None if pattern.error is None and abs(pattern.mean) <= NOISE else pattern.below(0.0),
        ),
        Finding(
            "One fragment size does for all: it matters little",
            "3 layers at every model size (A)",
            f"from {best} layers ({by_size[best]}) to {worst} ({by_size[worst]}), against {usual}",
            "all within 1 %",
            records.change(strided[worst], strided[best]).below(0.01),
        ),
        Finding(
            "Freezing all but the fragment whose turn it is costs much",
            "20 % (A)",
            str(frozen),
            "above 5 %",
            frozen.above(0.05),
        ),
    ]


def _plot(records: Records, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    sizes = _sizes(records)
    named = {p: {s: _name(s, p) for s in sizes if _name(s, p) in records.names} for p in PATTERNS}
    figures.lines(left, {p: {s: records.values(n) for s, n in own.items()} for p, own in named.items()})
    figures.quiet(left, "layers in a fragment")
    shown = ["data-parallel", _name(_usual(sizes[-1]), "strided"), FROZEN]
    figures.dots(right, {name: records.values(name) for name in shown}, base="data-parallel")
    figures.quiet(right, figures.LOSS, "", "what freezing costs")


STUDY = Study(
    name="fragments",
    title="How the model is cut",
    claim="Strided fragments of three layers are slightly the best; freezing the rest of the model costs 20 %.",
    source="A Fig. 6",
    expectation="Size and pattern are within noise; freezing is clearly worse.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
