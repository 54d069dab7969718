"""Which way of running islands is the fastest on this machine? `isles reproduce speed`.

A study is many runs of M islands on a few cores. Ways to share them out:

    one process    the islands of a run in one process, taking turns, and a run on every core
    processes      a process per island, and one run after the other
    stacked        the islands' weights stacked, all trained by one batched forward and backward pass (vmap)

each with plain or compiled kernels. Counted are inner steps of islands per second on the whole machine, from the median
time of a step, so that neither start nor evaluation counts; for the stacked way forward and backward only, beside the
same for two models one after the other. Only the ratios mean something elsewhere, and only if nothing else runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isles.reproduce.job import Job, Text, shape_of
from isles.reproduce.pool import process_context, side_by_side
from isles.reproduce.scale import SCALES

ISLANDS = 2
TIMEOUT_SECONDS = 600


def run(path: Path, *, quick: bool = False) -> dict[str, Any]:
    """Measures every way, prints the table, writes it to a file."""
    scale = SCALES["quick" if quick else "cpu"]
    from isles.core.method import Method

    job = scale.job(Method.streaming(sync_every=scale.sync_every), islands=ISLANDS, steps=scale.steps if quick else 90)
    text = Text(scale.data)
    text.tokens()
    cores = os.cpu_count() or 1
    rates: dict[str, float] = {}
    for kernels, compiled in (("plain", False), ("compiled", True)):
        if quick and compiled:
            continue
        rates[f"one process, {kernels}"] = _one_process(job, text, compiled, cores)
        rates[f"processes, {kernels}"] = _processes(job, text, compiled)
        for way, seconds in _stacked(job, compiled).items():
            rates[f"{way}, {kernels}"] = ISLANDS / seconds
    content = {"model": job.model, "cores": cores, "steps_per_second": {way: round(r, 2) for way, r in rates.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    print(section(path))
    return content


def section(path: Path) -> str:
    """The part of docs/reproduction.md about it."""
    content = json.loads(path.read_text("utf-8"))
    rates = content["steps_per_second"]
    kernels = "compiled" if "processes, compiled" in rates else "plain"
    base, alone = rates["processes, plain"], rates[f"one after the other, {kernels}"]
    rows = [f"| {way} | {rate:.1f} | {rate / base:.2f}x |" for way, rate in rates.items() if "process" in way]
    stacked = rates[f"stacked, {kernels}"] / alone
    return "\n".join(
        [
            "## How the studies are run",
            "",
            f"Model {content['model']}, {ISLANDS} islands, {content['cores']} cores (`isles reproduce speed`). Studies"
            " use one process per run and a run per core, compiled where the run is long enough.",
            "",
            "| way | inner steps a second | against a process per island |",
            "|---|---|---|",
            *rows,
            "",
            f"Stacking the islands' weights and training them in one batched pass is {stacked:.2f} times as fast as one"
            f" after the other ({kernels}, forward and backward on one core)"
            + (": not worth another code path." if stacked < 1.3 else "."),
        ]
    )


def _one_process(job: Job, text: Text, compiled: bool, cores: int) -> float:
    """As many runs as cores, side by side."""
    jobs = [(str(seed), dataclasses.replace(job, seed=seed)) for seed in range(cores)]
    outcomes = [outcome for _, outcome in side_by_side(jobs, text, cores, compiled)]
    return cores / statistics.fmean(outcome["step_seconds"] for outcome in outcomes)


def _processes(job: Job, text: Text, compiled: bool) -> float:
    """One run, with a process per island, on torch.distributed over this machine's loopback."""
    context: Any = process_context()
    with tempfile.TemporaryDirectory() as folder:
        receive, send = context.Pipe(duplex=False)
        store = Path(folder, "store").as_uri()
        islands = [
            context.Process(target=_island, args=(rank, store, job, text, compiled, send if rank == 0 else None))
            for rank in range(ISLANDS)
        ]
        try:
            for island in islands:
                island.start()
            send.close()
            if not receive.poll(TIMEOUT_SECONDS):
                raise RuntimeError("the islands did not finish: is another program using all cores?")
            step_seconds = receive.recv()
            for island in islands:
                island.join(TIMEOUT_SECONDS)
        finally:
            for island in islands:
                island.terminate()
                island.join()
    return float(ISLANDS / step_seconds)


def _island(rank: int, store: str, job: Job, text: Text, compiled: bool, send: Any) -> None:
    import torch
    import torch.distributed as dist

    import isles
    from isles.reproduce.train import Run

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ISLANDS)
    outcome = Run(job, text, compiled).island(isles.TorchWorld())
    if send is not None:
        send.send(outcome["step_seconds"])
    dist.barrier()
    dist.destroy_process_group()


def _stacked(job: Job, compiled: bool) -> dict[str, float]:
    """Seconds of forward and backward for all islands, on one core: stacked, and one after the other."""
    import torch
    from torch.func import functional_call, stack_module_state, vmap

    from isles.train.model import Decoder, Shape, language_loss

    layers, heads, width = shape_of(job.model)
    models = [Decoder(Shape(layers=layers, heads=heads, width=width), 257) for _ in range(ISLANDS)]
    tokens = torch.randint(256, (2, ISLANDS, job.batch_size, job.sequence_length))
    weights = {name: value.detach().requires_grad_() for name, value in stack_module_state(list(models))[0].items()}

    def loss(parameters: dict[str, Any], inputs: Any, targets: Any) -> Any:
        return language_loss(functional_call(models[0], parameters, (inputs,)), targets)

    def all_at_once(inputs: Any, targets: Any) -> Any:
        return vmap(loss)(weights, inputs, targets).sum()

    def one_by_one(inputs: Any, targets: Any) -> Any:
        losses = [language_loss(m(i), t) for m, i, t in zip(forwards, inputs, targets, strict=True)]
        return torch.stack(losses).sum()

    together: Callable[..., Any] = torch.compile(all_at_once) if compiled else all_at_once
    forwards = [torch.compile(model, dynamic=False) if compiled else model for model in models]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    warnings.filterwarnings(
        "ignore", message=".*batching rule"
    )  # attention is not batched, which is part of the answer
    try:
        return {
            "stacked": _median(lambda: together(*tokens).backward()),
            "one after the other": _median(lambda: one_by_one(*tokens).backward()),
        }
    finally:
        torch.set_num_threads(threads)


def _median(work: Callable[[], Any], times: int = 15) -> float:
    durations = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[3:])
