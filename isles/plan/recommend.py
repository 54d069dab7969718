"""The method with the least expected loss that is fast enough on this link.

Candidates are the variants at the published settings (H = 30 and 100, or the H that was asked for). Of those that
reach the wanted utilisation, the one with the least penalty wins; of equals the simplest, which is the order of the
table. A method that looks better than data-parallel by a rounding error counts as equal to it. Two are not recommended,
as one of ours asks no more of the link and loses less: eager updates (`distant`, the longest overlap with more mixing),
and the papers' streaming in 4 bits (`gradual`, the same with a gradual start).

If none reaches it, distant updates at a longer period will, as long as it is the link that is in the way: nothing
hides more, and the traffic falls as H grows. That is beyond what the papers published, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isles.plan.compare import Question, utilisation
from isles.plan.penalty import Penalty, penalty
from isles.plan.variants import Variant, standard_variants

PUBLISHED_PERIODS = (30, 100)
LONGER_PERIODS = (200, 500, 1000, 2000, 5000)
SUPERSEDED = ("streaming-overlap-fp4", "eager-fp4")


@dataclass(frozen=True)
class Recommendation:
    """What to use, and why."""

    variant: Variant
    utilisation: float
    penalty: Penalty
    reached: bool
    reason: str


def recommend(question: Question, wanted: float, periods: Sequence[int] = PUBLISHED_PERIODS) -> Recommendation:
    """`wanted`: the least utilisation that will do, from 0 to 1."""
    candidates = [
        variant
        for period in periods
        for variant in standard_variants(period, **question.cutting)
        if variant.name not in SUPERSEDED and (variant.family != "data-parallel" or period == periods[0])
    ]
    found = [_judge(question, variant) for variant in candidates]
    good = [judged for judged in found if judged.utilisation >= wanted]
    if good:
        best = min(good, key=lambda judged: max(0.0, judged.penalty.percent))
        return _because(best, True, "the least published loss penalty of all that reach it")
    for period in LONGER_PERIODS:
        if period > max(periods):
            distant = _judge(question, standard_variants(period, **question.cutting)[-1])
            if distant.utilisation >= wanted:
                return _because(
                    distant, True, f"nothing reaches it at H = {max(periods)} or below: a longer period does"
                )
    best = max(found, key=lambda judged: judged.utilisation)
    return _because(best, False, "nothing reaches it; this comes closest")


def _judge(question: Question, variant: Variant) -> Recommendation:
    cost = penalty(variant.family, variant.sync_every, variant.lateness, question.islands, question.workload.parameters)
    return Recommendation(variant, utilisation(question, variant), cost, False, "")


def _because(judged: Recommendation, reached: bool, reason: str) -> Recommendation:
    return Recommendation(judged.variant, judged.utilisation, judged.penalty, reached, reason)
