"""A store beside torch.distributed: the same timed islands on the same links, joined by each of the two.

The islands are `isles.lab.timed`: a step is a sleep, everything else is real. All of them wait for each other, as a
fixed set does (`--quorum` is their number). Utilisation is what `isles.lab.figures` calls steady, against the same
reference: a step of the islands alone, measured before the run on torch.distributed.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from isles.lab import figures
from isles.lab import run as lab
from isles.lab.elastic.fleet import Fleet, Options, output_of
from isles.lab.elastic.run import Say
from isles.lab.programs import Program
from isles.view import events


def compare(options: lab.Options, program: Program, say: Say) -> dict[str, Any]:
    """Both runs, and the utilisation of one over that of the other."""
    folder = options.folder
    torch = lab.run(dataclasses.replace(options, folder=folder / "torch"), program, say)
    reference = torch["reference_step_seconds"]
    store = _on_a_store(options, program, reference, say)
    ratio = store["steady_utilization"] / torch["steady_utilization"]
    return {"torch": torch, "store": store, "utilization_ratio": ratio}


def _on_a_store(options: lab.Options, program: Program, reference: float, say: Say) -> dict[str, Any]:
    islands, config = options.islands, program.config
    more = (*program.arguments, "--quorum", str(islands))
    own = dataclasses.replace(program, arguments=more)
    fleet_options = Options(
        folder=options.folder / "store",
        program=own,
        islands=islands,
        bandwidth=options.bandwidth,
        latency=options.latency,
        loss=options.loss,
        mtu=options.mtu,
        step_seconds=config.step_seconds,
    )
    say(f"running on {islands} islands and a store: {own.name} {' '.join(more)}")
    with Fleet(fleet_options) as fleet:
        for slot in range(islands):
            fleet.start(slot)
        over = fleet.wait_until(lambda: not fleet.alive(), options.timeout_seconds)
        failures = fleet.failures()
        kernel = [fleet.network.counters(slot) for slot in range(islands)]
        served = fleet.served()
    if failures or not over:
        why = "; ".join(failures.values()) or f"not within --timeout {options.timeout_seconds:g} s"
        raise SystemExit(f"isles lab: the run on a store failed: {why} ({output_of(fleet.lives[0].folder)})")
    logs = [events.read(life.folder) for life in fleet.lives]
    steady = [figures.utilisation(figures.steady_loops(log), [reference]) for log in logs]
    waited = [loop.wait_seconds for log in logs for loop in figures.steady_loops(log)]
    return {
        "steady_utilization": statistics.fmean(steady),
        "steady_utilization_each": steady,
        "event_log_utilization": statistics.fmean(figures.share_outside(log) for log in logs),
        "wait_seconds": statistics.fmean(waited),
        "late_seconds_per_step": statistics.fmean(log[-1]["late_seconds_per_step"] for log in logs),
        "kernel_bytes_by_island": [each.sent_bytes for each in kernel],
        "kernel_bytes_received_by_island": [each.received_bytes for each in kernel],
        "requests": sum(served.values()),
    }


def present(result: dict[str, Any]) -> str:
    """As people read it."""
    lines = []
    for name, about in (("torch.distributed", result["torch"]), ("a store", result["store"])):
        steady, logged = about["steady_utilization"], about["event_log_utilization"]
        waited = f"waited {about['wait_seconds']:.2f} s"
        lines.append(f"{name:<18} utilisation {steady:.1%}, in the log {logged:.1%}, {waited}")
    return "\n".join([*lines, f"{'ratio':<18} {result['utilization_ratio']:.3f}"])
