"""How many islands: at a constant global batch, and at a constant batch per island, each with its best outer lr."""

from __future__ import annotations

from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study

RATES = (0.4, 0.6, 0.8)
PUBLISHED = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}
GLOBAL, OWN = "global batch", "batch per island"


def _configurations(scale: Scale) -> dict[str, Job]:
    jobs: dict[str, Job] = {}
    together = scale.batch_size * max(scale.island_counts) // 2
    for count in scale.island_counts:
        for kind, rows in ((GLOBAL, together // count), (OWN, scale.batch_size)):
            shape: dict[str, Any] = {"model": scale.small_model, "islands": count, "batch_size": rows}
            for rate in scale.few(RATES):
                method = Method.streaming(sync_every=scale.sync_every, outer_lr=rate)
                jobs[f"{kind}, M = {count}, outer lr {rate:g}"] = scale.job(method, **shape)
            jobs[f"{kind}, M = {count}, data-parallel"] = scale.job(**shape)
    return jobs


def _counts(records: Records) -> list[int]:
    return sorted({int(name.split("M = ")[1].split(",")[0]) for name in records.names})


def _best(records: Records, kind: str, count: int) -> str:
    start = f"{kind}, M = {count}, outer lr"
    return records.best([name for name in records.names if name.startswith(start)])


def _findings(records: Records) -> list[Finding]:
    counts = _counts(records)
    gaps = {
        (kind, count): records.change(_best(records, kind, count), f"{kind}, M = {count}, data-parallel")
        for kind in (GLOBAL, OWN)
        for count in counts
    }
    rates = [float(_best(records, GLOBAL, count).split()[-1]) for count in counts]
    several = [count for count in counts if count > 1]
    shown = {kind: ", ".join(f"M = {count} {gaps[kind, count]}" for count in counts) for kind in (GLOBAL, OWN)}
    last = records.best([_best(records, OWN, count) for count in counts])
    return [
        Finding(
            "At a constant global batch, more islands cost a little more each",
            "2.67 at M = 2, 2.70 at M = 4 (A Table 5, 500M, H = 30)",
            f"against data-parallel: {shown[GLOBAL]}",
            "the distance grows with M",
            gaps[GLOBAL, several[-1]].mean > gaps[GLOBAL, several[0]].mean if len(several) > 1 else None,
        ),
        Finding(
            "At a constant batch per island, more islands are more tokens, and help",
            "A Fig. 12; no number in the text at hand",
            f"best at M = {last.split('M = ')[1].split(',')[0]}; against data-parallel: {shown[OWN]}",
            "the most islands are the best",
            f"M = {counts[-1]}," in last,
        ),
        Finding(
            "The best outer learning rate grows with the number of islands",
            ", ".join(f"{PUBLISHED[count]:g} at M = {count}" for count in counts if count in PUBLISHED) + " (D)",
            ", ".join(f"{rate:g} at M = {count}" for rate, count in zip(rates, counts, strict=True)),
            "never falls, and ends higher than it begins",
            rates == sorted(rates) and rates[-1] > rates[0],
        ),
    ]


def _plot(records: Records, figure: Any) -> None:
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), (GLOBAL, OWN), strict=True):
        series = {
            "streaming, best outer lr": {c: records.values(_best(records, kind, c)) for c in _counts(records)},
            "data-parallel": {c: records.values(f"{kind}, M = {c}, data-parallel") for c in _counts(records)},
        }
        figures.lines(axes, series, log_x=True)
        figures.quiet(axes, "islands", title=f"constant {kind}")


STUDY = Study(
    name="islands",
    title="How many islands",
    claim="More islands cost a little at a constant global batch; the best outer lr grows with their number.",
    source="A Fig. 12 and Table 5, D",
    expectation="The cost grows with M, faster than in the papers, since our runs are short.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
