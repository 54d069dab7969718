"""What the other islands are worth: one island alone, data-parallel training and isles, each at its own best rate.

    worth = (alone - isles) / (alone - data-parallel)

in final validation loss, for the same steps of every island: 0 is one island alone, 1 is data-parallel training. Inner
learning rates are chosen on the first seed, each side from a grid of its own. It begins around what `isles train` would
take and is extended until its best rate is not at its end. The other seeds run what was chosen.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Change, Finding, Records, Study, all_of
from isles.train.learning_rate import peak

GRID = (0.7, 1.0, 1.4)
"""Of learning rates, times what `isles train` would take, at first."""
FURTHER, WIDEST = 1.4, 4.1
"""The next rate beyond an end of the grid, and how many times its smallest rate the largest may be."""
OPTIMIZERS = {"AdamW": "adamw", "Muon": "muon"}
ALONE, PARALLEL, PAPER, OURS = "alone", "data-parallel", "streaming", "gradual"
FEWEST_TIMES = 100
"""How many times fewer bytes than data-parallel training it has to be."""


def _configurations(scale: Scale) -> dict[str, Job]:
    settings, jobs = scale.settings(), {}
    groups = [(name, optimizer, 2) for optimizer in OPTIMIZERS for name in settings]
    for name, optimizer, islands in [*groups, (*groups[0][:2], 4)]:
        setting, inner = settings[name], OPTIMIZERS[optimizer]
        for side, method in _sides(scale, islands).items():
            count = 1 if side == ALONE else islands
            for rate in _rates(scale, setting, inner, side):
                own = {**setting, "inner": inner, "islands": count, "learning_rate": rate}
                jobs[f"{name}, {optimizer}, M = {count}: {side} at {rate:g}"] = scale.job(method, **own)
    return jobs


def _sides(scale: Scale, islands: int) -> dict[str, Method | None]:
    streaming, gradual = (make(sync_every=scale.sync_every) for make in (Method.streaming, Method.gradual))
    found: dict[str, Method | None] = {PARALLEL: None, OURS: gradual}
    return {ALONE: None, **found, PAPER: streaming} if islands == 2 else found


def _rates(scale: Scale, setting: dict[str, Any], inner: str, side: str) -> list[float]:
    job = scale.job(**setting)
    rate = peak(job.parameters, inner, job.batch_size * job.sequence_length, own_batch=side != PARALLEL)
    return [float(f"{rate * factor:.2g}") for factor in ((1.0,) if side == PAPER else scale.few(GRID))]


def _extended(jobs: dict[str, Job], records: Records) -> dict[str, Job]:
    """The next rate for every side whose best rate is at an end of its grid."""
    sides: dict[str, list[str]] = {}
    for name in jobs:
        sides.setdefault(name.rpartition(" at ")[0], []).append(name)
    more = {}
    for side, names in sides.items():
        if len(names) < 3:  # no grid
            continue
        names.sort(key=lambda name: jobs[name].learning_rate)
        rates = [jobs[name].learning_rate for name in names]
        best = min(names, key=lambda name: records.values(name)[0])
        factor = 1 / FURTHER if best == names[0] else FURTHER if best == names[-1] else 1.0
        rate = float(f"{jobs[best].learning_rate * factor:.2g}")
        if factor != 1.0 and max(rate, *rates) / min(rate, *rates) <= WIDEST:
            more[f"{side} at {rate:g}"] = dataclasses.replace(jobs[best], learning_rate=rate)
    return more


# ---- reading names


def _side(group: str, side: str, records: Records) -> str:
    """The chosen run of a side: the best of the first seed. `group` is "demo, AdamW, M = 4"."""
    if side == ALONE:
        group = group.rpartition("M = ")[0] + "M = 1"
    names = [name for name in records.names if name.startswith(f"{group}: {side} at ")]
    return min(names, key=lambda name: records.values(name)[0])


def _groups(records: Records) -> list[str]:
    """Settings in which islands are compared."""
    return [group for group in dict.fromkeys(_group(name) for name in records.names) if not group.endswith("M = 1")]


def _group(name: str) -> str:
    return name.partition(":")[0]


def _chosen(records: Records) -> Iterable[str]:
    """What the other seeds run."""
    for group in _groups(records):
        for side in (ALONE, PARALLEL, PAPER, OURS):
            if side != PAPER or any(f"{group}: {PAPER}" in name for name in records.names):
                yield _side(group, side, records)


def worth(records: Records, group: str, side: str = OURS) -> Change:
    """Of the other islands of a group, with its standard error over seeds."""
    values = [records.values(_side(group, each, records)) for each in (ALONE, side, PARALLEL)]
    shares = [(alone - own) / (alone - together) for alone, own, together in zip(*values, strict=False)]
    error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else None
    return Change(statistics.fmean(shares), error)


def _percent(share: Change) -> str:
    around = "" if share.error is None else f" ± {100 * share.error:.1f}"
    return f"{100 * share.mean:.0f}{around} %"


def _fewer(records: Records, group: str) -> float:
    sent = [records.mean(_side(group, side, records), "bytes_sent") for side in (PARALLEL, OURS)]
    return sent[0] / sent[1]


def _findings(records: Records) -> list[Finding]:
    groups = _groups(records)
    two, more = ([g for g in groups if g.endswith("M = 2") == wanted] for wanted in (True, False))
    gaps = {g: records.change(_side(g, OURS, records), _side(g, PARALLEL, records)) for g in groups}
    shares, papers = {g: worth(records, g) for g in groups}, {g: worth(records, g, PAPER) for g in two}
    fewer = {g: _fewer(records, g) for g in groups}
    found = [
        Finding(
            "Two islands that start gradually end where data-parallel training ends",
            "not in the papers, whose runs are long",
            "; ".join(f"{g}: {gaps[g]}, {fewer[g]:.0f} times fewer bytes" for g in two),
            f"not above it beyond two standard errors, in {FEWEST_TIMES} times fewer bytes",
            all_of(*(gaps[g].above(0.0) is not True and fewer[g] >= FEWEST_TIMES for g in two)),
        ),
        Finding(
            "The second island is worth nearly what it is worth in data-parallel training",
            "not in the papers",
            "; ".join(f"{g}: {_percent(shares[g])}, the papers' settings {_percent(papers[g])}" for g in two),
            "95 % or more",
            all_of(*(shares[g].mean >= 0.95 for g in two)),
        ),
    ]
    for group in more:
        ours = f"{group}: {_percent(shares[group])} ({gaps[group]}, {fewer[group]:.0f} times fewer bytes)"
        agrees = shares[group].mean >= 0.9
        found.append(Finding("So are the three others of four", "not in the papers", ours, "90 % or more", agrees))
    return found


def _plot(records: Records, figure: Any) -> None:
    groups = _groups(records)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        series: dict[str, dict[float, list[float]]] = {}
        for side in (ALONE, PARALLEL, PAPER, OURS):
            own = group.rpartition("M = ")[0] + "M = 1" if side == ALONE else group
            start = f"{own}: {side} at "
            points = {float(n.removeprefix(start)): records.values(n) for n in records.names if n.startswith(start)}
            if points:
                series[side] = points
        figures.lines(axes, series, log_x=True)
        figures.quiet(axes, "inner learning rate", figures.LOSS if axes is panels[0] else "", group)


STUDY = Study(
    name="worth",
    title="What the other islands are worth, H = 30, e3m0",
    claim="(ours) With a gradual start, the other islands are worth nearly what they add in data-parallel training.",
    source="not in the papers",
    expectation="Most of the gap of a short run is made early, where islands drift fast and momentum amplifies it.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
    extended=_extended,
    chosen=_chosen,
)
