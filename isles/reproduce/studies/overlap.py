"""How late may a result come? Overlap against mixing, islands of unequal overlap, and a long overlap against eager.

An overlap of H - 1 steps and eager updates tolerate the same latency, almost a round. Which is better?
"""

from __future__ import annotations

import inspect
from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study, all_of

MIXINGS = (0.0, 0.25, 0.5, 0.75)
LONG_MIXINGS = (0.5, 0.75, 0.9)
EAGER_MIXINGS = (0.0, 0.3, 0.5, 0.75)


def _configurations(scale: Scale) -> dict[str, Job]:
    every, small = scale.sync_every, scale.small_model
    jobs = {"data-parallel": scale.job(model=small)}
    for overlap in scale.few(sorted({0, 1, min(5, every - 1), every // 2, every - 1})):
        for mixing in scale.few(MIXINGS):
            method = Method.streaming(sync_every=every, overlap=overlap, mixing=mixing)
            jobs[f"overlap {overlap}, mixing {mixing:g}"] = scale.job(method, model=small)
    if has_own_overlap():
        for other in scale.few(sorted({1, min(4, every - 1), every // 2})):
            method = Method.streaming(sync_every=every, overlap=1, mixing=0.5)
            jobs[f"unequal 1 and {other}"] = scale.job(method, model=small, overlaps=(1, other))
    sizes = [(small, every), (scale.model, every), (scale.tiny_model, every), (small, scale.periods[-3:][0])]
    for model, period in dict.fromkeys(sizes):
        for mixing in scale.few(LONG_MIXINGS):
            method = Method.streaming(sync_every=period, overlap=period - 1, mixing=mixing)
            jobs[f"{model}, H = {period}: overlap {period - 1}, mixing {mixing:g}"] = scale.job(method, model=model)
        for mixing in scale.few(EAGER_MIXINGS):
            method = Method.eager(sync_every=period, mixing=mixing)
            jobs[f"{model}, H = {period}: eager, mixing {mixing:g}"] = scale.job(method, model=model)
    return jobs


def has_own_overlap() -> bool:
    """Whether the engine lets an island have an overlap of its own."""
    import isles

    return "overlap" in inspect.signature(isles.DiLoCo.__init__).parameters


def _findings(records: Records) -> list[Finding]:
    grid = _grid(records)
    overlaps, mixings = sorted({place[0] for place in grid}), sorted({place[1] for place in grid})
    half = 0.5 if 0.5 in mixings else mixings[-1]
    short = [o for o in overlaps if 0 < o <= 10] or overlaps[-1:]
    costs = {o: records.change(grid[o, half], grid[0, half]) for o in short}
    worst = max(costs, key=lambda o: costs[o].mean)
    none, kept = (records.change(grid[overlaps[-1], m], grid[0, m]) for m in (mixings[0], half))
    gain = records.change(grid[overlaps[-1], half], grid[overlaps[-1], mixings[0]])
    found = [
        Finding(
            "A moderate overlap changes the loss by less than 0.2 %",
            "below 0.2 % up to 10 steps (A Fig. 8)",
            f"up to overlap {short[-1]}: {costs[worst]} at worst, against no overlap at mixing {half:g}",
            "below 0.5 %",
            costs[worst].below(0.005),
        ),
        Finding(
            "A long overlap needs mixing, or the steps in between are lost",
            "mixing 0 drops them (A Alg. 2)",
            f"overlap {overlaps[-1]} against none: {none} at mixing 0, {kept} at {half:g}",
            "better with mixing",
            gain.below(0.0),
        ),
        _unequal(records),
    ]
    return found + [_long(records, group) for group in _groups(records)]


def _grid(records: Records) -> dict[tuple[int, float], str]:
    """(overlap, mixing) -> name, of the grid."""
    names = [name for name in records.names if name.startswith("overlap ")]
    return {(int(name.split()[1].rstrip(",")), float(name.split()[-1])): name for name in names}


def _groups(records: Records) -> dict[str, list[str]]:
    """Model and H of the comparison with eager -> its configurations."""
    groups: dict[str, list[str]] = {}
    for name in records.names:
        if ": " in name:
            groups.setdefault(name.split(": ")[0], []).append(name)
    return groups


def _unequal(records: Records) -> Finding:
    names = [name for name in records.names if name.startswith("unequal")]
    claim, paper = "Islands may have different overlaps", "robust while overlap < 5 (A Fig. 10)"
    if not names:
        return Finding(claim, paper, "not run: the engine has one overlap for all islands", "within 0.5 %", None)
    near = [name for name in names if int(name.split()[-1]) < 5] or names
    cost = records.change(near[-1], near[0])
    far = f"; {names[-1]}: {records.change(names[-1], names[0])}" if names[-1] != near[-1] else ""
    return Finding(
        claim,
        paper,
        f"{near[-1]}: {cost} against 1 and 1{far}",
        "within 0.5 %",
        all_of(cost.below(0.005), cost.above(-0.005)),
    )


def _long(records: Records, group: str) -> Finding:
    names = _groups(records)[group]
    eager = [name for name in names if ": eager" in name]
    best_overlap = records.best([name for name in names if ": overlap" in name])
    plain, best_eager = eager[0], records.best(eager)
    to_plain, to_best = records.change(best_overlap, plain), records.change(best_overlap, best_eager)
    return Finding(
        f"{group}: a long overlap with mixing against eager at equal latency (ours)",
        "B proposes eager for it, without mixing; A tried mixing 0 and 0.5",
        f"{best_overlap.split(': ')[1]}: {to_plain} against plain eager, {to_best} against {best_eager.split(': ')[1]}",
        "overlap better than plain eager",
        to_plain.below(0.0),
    )


def _plot(records: Records, figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    grid = _grid(records)
    series = {
        f"mixing {mixing:g}": {o: records.values(name) for (o, m), name in grid.items() if m == mixing}
        for mixing in sorted({place[1] for place in grid})
    }
    figures.lines(left, series)
    left.axhline(records.mean("data-parallel"), color="#555555", linewidth=1, linestyle=(0, (4, 3)))
    figures.quiet(left, "overlap (inner steps); dashed: data-parallel")
    rows = {name: records.values(name) for names in _groups(records).values() for name in names}
    figures.dots(right, rows)
    right.tick_params(axis="y", labelsize=6)
    figures.quiet(right, figures.LOSS, "", "a whole round late")


STUDY = Study(
    name="overlap",
    title="How late a result may come",
    claim="The loss hardly changes up to an overlap of 10 steps; islands may have different overlaps below 5.",
    source="A Fig. 8 and 10",
    expectation="Mixing keeps a long overlap usable; with enough of it, it beats plain eager at the same latency.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
