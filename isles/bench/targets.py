"""What the numbers must show, one row each: the claim, the bound, what was measured, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isles.bench.engine import label
from isles.view import units

BOUNDED_EVENTS = 50_000
"""Memory is promised not to grow beyond what a log of this length takes."""
OVERHEAD_PARAMETERS, OVERHEAD_STEP_SECONDS = (9e6, 11e6), 0.1
"""The overhead is promised for models of this size, where a bare step takes at least so long."""


def check(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All claims that can be checked with these results.

    >>> rows = [{"fragments": 64, "parameters": 10_000_000}]
    >>> [row["met"] for row in check({"scaling": {"exponent": 1.02, "fragments": [rows], "growth": [1.2]}})]
    [True, False]
    """
    groups = (_engine, _scaling, _memory, _page, _trainer)
    return [*_codecs(result.get("codecs", {})), *(row for group in groups for row in group(result))]


def _codecs(codecs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in ("e3m0", "int8", "bf16"):
        if name in codecs:
            yield _at_least(f"{name}: encode against memcpy", codecs[name]["encode_into"], 0.7)
            yield _at_least(f"{name}: decode and accumulate against memcpy", codecs[name]["accumulate"], 0.6)


def _engine(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for row in result.get("engine", []):
        smallest, largest = OVERHEAD_PARAMETERS
        if smallest <= row["parameters"] <= largest and row["bare_seconds"] >= OVERHEAD_STEP_SECONDS:
            yield _at_most(f"engine: share of the step, {label(row)}", row["overhead"], 0.01)
            yield _at_most(f"engine: longest step against the median, {label(row)}", row["longest_step"], 1.5)


def _scaling(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if scaling := result.get("scaling"):
        yield _at_most("cost of a round: exponent in the number of parameters", scaling["exponent"], 1.1)
        for rows, growth in zip(scaling["fragments"], scaling["growth"], strict=True):
            most, size = rows[-1]["fragments"], units.count(rows[-1]["parameters"])
            yield _at_most(f"cost of a round: {most} fragments against one, {size}", growth, 1.15)


def _memory(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if memory := result.get("memory"):
        naive, shelved = memory["DiLoCo, one fragment"], memory["streaming, outer state on the host"]
        yield _at_most("memory at rest against data-parallel, in one fragment (5/3)", naive["rest"], 1.67)
        yield _at_most("memory at rest against data-parallel, outer state on the host", shelved["rest"], 1.05)
        yield _at_most("peak memory against data-parallel, outer state on the host", shelved["peak"], 1.05)


def _page(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if page := result.get("page"):
        size = f"{page['islands']} islands, {page['events']:,} events"
        yield _at_most(f"live page, {size}: seconds to the first paint", page["full"]["paint_seconds"], 2.0)
        yield _at_most(f"live page, {size}: seconds until data is drawn", page["full"]["ready_seconds"], 2.0)
        yield _at_most(f"live page, {size}: seconds of an update", page["full"]["update_seconds"], 0.1)
        if page["events"] >= BOUNDED_EVENTS:
            yield _at_most(f"live page, {size}: its memory, a log twice as long", page["growth"]["heap"], 1.1)
            yield _at_most(f"live page, {size}: the server's memory, a log twice as long", page["growth"]["kept"], 1.1)
        run = page["watched"]
        yield _at_most("live page: seconds until it says that an island was killed", run["told_seconds"], 3.0)
        yield _at_least("live page: pace of a run that is watched against one that is not", run["ratio"], 0.95)


def _trainer(result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if (trainer := result.get("trainer")) and trainer["sync_every"] >= 100:
        yield _at_most("Hugging Face Trainer: with the callback against without, one island", trainer["ratio"], 1.01)


def _at_least(claim: str, value: float, bound: float) -> dict[str, Any]:
    return {"claim": claim, "bound": f"at least {bound:g}", "value": value, "met": value >= bound}


def _at_most(claim: str, value: float, bound: float) -> dict[str, Any]:
    return {"claim": claim, "bound": f"at most {bound:g}", "value": value, "met": value <= bound}
