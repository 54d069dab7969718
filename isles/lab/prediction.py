"""What the planner says about a run in the laboratory, given what was measured of it: step time and bandwidth.

The planner's bandwidth is that of the line, and it adds the headers of Ethernet, IP and TCP itself. What the transfer
measured is payload. So the planner is given a line that would carry just that payload.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

from isles.core.method import Method
from isles.core.schedule import Schedule
from isles.plan import Island, Link, predict
from isles.plan.coding import Coding, measure
from isles.plan.exchange import FRAMING, fragment_round
from isles.plan.workload import workload_of
from isles.view.events import Event
from isles.wire.reduction import Reduction


def coding_of(config: Event, processes: int, timed: bool) -> Coding | None:
    """How fast this machine encodes and decodes for a run, measured at the size of its largest fragment.

    Islands that wait for each other's rounds encode at the same time, on the same cores, so that is how it is measured.
    Those that do not wait, with delayed and eager updates, are soon out of step; of them, as many as there are cores
    are taken to encode at a time. Background threads slow down a loop that trains, not one that sleeps, unless there
    are two cores for each process.
    """
    if not config["method"]:
        return None
    largest = max((int(each["numel"]) for each in config["fragments"]), default=int(config["parameters"]))
    cores = os.cpu_count() or 1
    at_once = processes if config["method"]["update"] == "fresh" else min(processes, cores)
    found = _measured(config["method"]["codec"], largest, at_once=at_once)
    return dataclasses.replace(found, spare_cores=timed or 2 * processes <= cores)


_measured = functools.lru_cache(maxsize=None)(measure)


def predicted(
    config: Event,
    reference: Sequence[float],
    payload_bits_per_second: Sequence[float],
    *,
    latency_seconds: float = 0.0,
    ranks: int = 1,
) -> dict[str, Any]:
    """`planned_utilization` and what goes with it; None where the planner has no model of the run."""
    method = Method(**config["method"]) if config["method"] else None
    if ranks > 1 and method is None:
        return dict.fromkeys(("planned_utilization", "planned_step_seconds", "planned_bytes_sent", "planned_coding"))
    rates = [FRAMING * rate for rate in payload_bits_per_second]
    slowest = [min(rate, rates[island - 1]) for island, rate in enumerate(rates)]
    fleet = [
        Island(step_seconds=seconds, link=Link.symmetric(rate, latency_seconds))
        for seconds, rate in zip(reference, slowest, strict=True)
    ]
    reduction = (config.get("config") or {}).get("reduction", "auto")
    coding = coding_of(config, len(fleet) * ranks, timed="step_seconds" in config["config"])
    found = predict(
        workload_of(config, max(reference), ranks),
        fleet,
        method,
        reduction=reduction,
        coding=coding,
    )
    steps, islands = int(config["config"]["steps"]), len(fleet)
    step_seconds = found.seconds(steps) / steps if found.start.steps else found.step_seconds
    closing = _closing_bytes(config, method, islands, reduction)
    return {
        "planned_utilization": float(found.utilisation * (found.step_seconds / step_seconds)),
        "planned_step_seconds": float(step_seconds),
        "planned_bytes_sent": round(found.bytes_sent(steps) * islands) + closing,
        "planned_coding": None if coding is None else dataclasses.asdict(coding),
    }


def _closing_bytes(config: Event, method: Method | None, islands: int, reduction: Reduction) -> int:
    """What all islands send after the last step: a closing round of the fragments that were not sent at that step; with
    eager updates they also average their anchors once, in fp32.
    """
    if method is None:
        return 0
    sizes = [int(each["numel"]) for each in config["fragments"]]
    sent = {due.fragment for due in Schedule.of(method, len(sizes)).sends(int(config["config"]["steps"]))}
    last = [(numel, method.codec) for index, numel in enumerate(sizes) if index not in sent]
    last += [(numel, "fp32") for numel in sizes if method.update == "eager"]
    rounds = [fragment_round(*each, islands, reduction=reduction, coding=Coding.free()) for each in last]
    return islands * sum(each.num_bytes for each in rounds)
