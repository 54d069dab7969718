"""Every method on the same tokens: what each step from DiLoCo to eager updates costs in loss."""

from __future__ import annotations

from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Finding, Records, Study, all_of, loss_text

LOW = "delayed, outer lr 0.1"


def _configurations(scale: Scale) -> dict[str, Job]:
    every = scale.sync_every
    methods = {
        "data-parallel": None,
        "DiLoCo": Method.diloco(sync_every=every, outer_lr=0.4),
        "streaming": Method.streaming(sync_every=every, overlap=0, mixing=0.0, codec="fp32"),
        "+ overlap": Method.streaming(sync_every=every, codec="fp32"),
        "+ e3m0": Method.streaming(sync_every=every),
        "delayed": Method.delayed(sync_every=every),
        LOW: Method.delayed(sync_every=every, outer_lr=0.1),
        "eager": Method.eager(sync_every=every),
        "eager, 2 rounds": Method.eager(sync_every=every, delay_rounds=2),
        "eager on DiLoCo": Method.eager(sync_every=every, fragments=1),
        "eager, mixing 0.5": Method.eager(sync_every=every, mixing=0.5),
    }
    return {name: scale.job(method) for name, method in methods.items()}


def _findings(records: Records) -> list[Finding]:
    change = records.change
    to_parallel, to_diloco = change("+ e3m0", "data-parallel"), change("+ e3m0", "DiLoCo")
    bits, overlap = change("+ e3m0", "+ overlap"), change("+ overlap", "streaming")
    delayed, low = change("delayed", "eager"), change(LOW, "eager")
    eager, two, plain = (
        change("eager", "+ e3m0"),
        change("eager, 2 rounds", "eager"),
        change("eager on DiLoCo", "eager"),
    )
    mixed = change("eager, mixing 0.5", "eager")
    return [
        Finding(
            "Streaming DiLoCo (overlap, 4 bits) trains as well as data-parallel",
            "2.67 and 2.67 (A Table 5, 500M, H = 30)",
            f"{to_parallel} ({loss_text(records, 'data-parallel', '+ e3m0')})",
            "within 1 %",
            to_parallel.below(0.01),
        ),
        Finding(
            "Streaming DiLoCo is as good as DiLoCo",
            "2.67 and 2.68 (A Table 5, 500M, H = 30)",
            f"{to_diloco} ({loss_text(records, 'DiLoCo', '+ e3m0')})",
            "not more than 0.5 % worse",
            to_diloco.below(0.005),
        ),
        Finding(
            "One inner step of overlap costs nothing",
            "2.67 and 2.67 (B Table 2)",
            f"{overlap}, with mixing 0.5",
            "not more than 0.5 % worse",
            overlap.below(0.005),
        ),
        Finding(
            "Four bits instead of 32 make no difference",
            "no difference (A Fig. 11)",
            str(bits),
            "within 0.5 %",
            all_of(bits.below(0.005), bits.above(-0.005)),
        ),
        Finding(
            "A whole round late, eager is far better than delayed",
            "2.69 and 3.01 (B Table 2)",
            f"delayed {delayed} against eager",
            "delayed more than 1 % worse",
            delayed.above(0.01),
        ),
        Finding(
            "A lower outer learning rate rescues delayed, not all the way to eager",
            "3.01 to 2.73, eager 2.69 (B Table 2)",
            f"{low} against eager ({loss_text(records, 'delayed', LOW, 'eager')})",
            "better than delayed, worse than eager",
            all_of(low.above(0.0), change(LOW, "delayed").below(0.0)),
        ),
        Finding(
            "Eager, a round late, is close to one inner step late",
            "2.69 and 2.67 (B Table 2)",
            str(eager),
            "within 1.5 %",
            eager.below(0.015),
        ),
        Finding(
            "Two rounds late is worse than one",
            "2.73 and 2.69 (B Table 2)",
            str(two),
            "worse",
            two.above(0.0),
        ),
        Finding(
            "Eager on plain DiLoCo is slightly better than on Streaming",
            "2.69 and 2.71 (B)",
            str(plain),
            "better",
            plain.below(0.0),
        ),
        Finding(
            "Eager gains from mixing (ours)",
            "the papers' eager has no mixing",
            str(mixed),
            "better than without",
            mixed.below(0.0),
        ),
    ]


def _plot(records: Records, figure: Any) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    shown = [name for name in records.names if name != "delayed"]  # far off the scale of the others
    figures.curves(left, records, shown)
    figures.quiet(left, "inner steps", title="mean over seeds")
    rows = [*shown, "delayed"]  # in the colours of the curves
    figures.dots(right, {name: records.values(name) for name in rows}, base="data-parallel")
    figures.quiet(right, figures.LOSS, "", "final, every seed")


STUDY = Study(
    name="methods",
    title="Methods side by side",
    claim="Streaming DiLoCo in 4 bits equals data-parallel; a round late, eager comes close and delayed does not.",
    source="A Table 5, B Tables 2 and 3",
    expectation="The order of the methods holds; the distance to data-parallel is larger, since our runs are short.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
