"""A workload out of a run's `events.jsonl`: the model that was trained, and how long a step really took.

The time of a step is the median over the steps of what was not spent waiting for the network, so that neither the
first step nor an evaluation in between counts.
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from isles.view.events import read

Event = dict[str, Any]


def facts_of_run(run: str | os.PathLike[str]) -> dict[str, Any]:
    """What a run says about itself: step_seconds; parameters, layers, outside_parameters (embeddings and the like),
    tokens_per_step, islands if it recorded them.
    """
    events: list[Event] = read(run)
    seconds = [_computing(event) for event in events if event.get("event") == "step"]
    known = [value for value in seconds if value is not None and value > 0]
    if not known:
        raise ValueError(f"{os.fspath(run)} has no step with its seconds: give --step-time instead, or a longer run")
    config: Event = next((event for event in events if event.get("event") == "config"), {})
    names = ("parameters", "layers", "outside_parameters", "tokens_per_step", "islands")
    facts = {name: config[name] for name in names if isinstance(config.get(name), (int, float)) and config[name] > 0}
    return {**facts, "step_seconds": statistics.median(known), "name": str(config.get("name") or "run")}


def _computing(event: Event) -> float | None:
    seconds, waited = event.get("seconds"), event.get("wait_seconds")
    if not isinstance(seconds, (int, float)):
        return None
    return seconds - waited if isinstance(waited, (int, float)) else seconds
