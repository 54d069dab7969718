"""Islands that see different text: one domain each against all of it shuffled, and weights by the size of a shard.

With several sources (`--data A,B,C,D --val a,b,c,d`) every island gets one; with a single source, a contiguous part of
it each, which is a much milder difference. Losses are means over the parts' own validation texts.
"""

from __future__ import annotations

import statistics
from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Change, Finding, Records, Study

HEAVY = 3.0
"""The weight of the first island, where weights differ: its domain counts three times as much as any other."""
WEIGHTED = "own domain, weighted"


def _configurations(scale: Scale) -> dict[str, Job]:
    count = min(4, max(scale.island_counts))
    shape: dict[str, Any] = {"model": scale.small_model, "islands": count}
    streaming = Method.streaming(sync_every=scale.sync_every)
    diloco = Method.diloco(sync_every=scale.sync_every, outer_lr=0.4)
    weights = (HEAVY, *[1.0] * (count - 1))
    return {
        "data-parallel": scale.job(shards="measured", **shape),
        "shuffled": scale.job(streaming, shards="measured", **shape),
        "own domain": scale.job(streaming, shards="trained", **shape),
        WEIGHTED: scale.job(streaming, shards="trained", weights=weights, **shape),
        "DiLoCo, shuffled": scale.job(diloco, shards="measured", **shape),
        "DiLoCo, own domain": scale.job(diloco, shards="trained", **shape),
    }


def _losses(records: Records, name: str, first: float = 1.0) -> list[float]:
    """Of every seed: the mean over domains, the first one counted `first` times."""
    losses = []
    for record in records.of(name):
        shares = [float("inf") if loss is None else loss for loss in record["shard_losses"]]
        losses.append((first * shares[0] + sum(shares[1:])) / (first + len(shares) - 1))
    return losses


def _change(records: Records, name: str, base: str, first: float = 1.0) -> Change:
    pairs = zip(_losses(records, name, first), _losses(records, base, first), strict=False)
    ratios = [own / other - 1 for own, other in pairs]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
    return Change(statistics.fmean(ratios), error)


def _findings(records: Records) -> list[Finding]:
    streaming, diloco = (
        _change(records, "own domain", "shuffled"),
        _change(records, "DiLoCo, own domain", "DiLoCo, shuffled"),
    )
    weighted = _change(records, WEIGHTED, "own domain", HEAVY)
    first = {
        name: statistics.fmean(r["shard_losses"][0] for r in records.of(name)) for name in ("own domain", WEIGHTED)
    }
    text = "studied in C; no number in the text at hand"
    return [
        Finding(
            "One domain per island costs little against shuffled domains",
            text,
            f"{streaming} for streaming, {diloco} for DiLoCo",
            "below 2 % for streaming",
            streaming.below(0.02),
        ),
        Finding(
            "Weights by shard size serve unequal shards",
            "C weights outer gradients by shard size; no number in the text at hand",
            f"{weighted} where the first domain counts {HEAVY:g} times; "
            f"on it {first['own domain']:.3f} becomes {first[WEIGHTED]:.3f}",
            "better than equal weights",
            weighted.below(0.0),
        ),
    ]


def _plot(records: Records, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figures.dots(left, {name: _losses(records, name) for name in records.names}, base="data-parallel")
    figures.quiet(left, figures.LOSS, "", "mean over domains")
    shown = ("shuffled", "own domain", WEIGHTED)
    domains = range(len(records.of("shuffled")[0]["shard_losses"]))
    series = {name: {d: [r["shard_losses"][d] for r in records.of(name)] for d in domains} for name in shown}
    figures.lines(right, series)
    right.set_xticks(list(domains))
    figures.quiet(right, "domain")


STUDY = Study(
    name="non-iid",
    title="Islands that see different text",
    claim="Islands may have different data, their outer gradients weighted by the size of their shards.",
    source="C",
    expectation="One domain per island is slightly worse than shuffled; weights favour the heavier domain.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
    note="Losses in the claims are means over the domains' own validation texts; the table below has the loss on the\n"
    "validation text of all domains together.",
)
