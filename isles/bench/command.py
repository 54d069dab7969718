"""`isles bench`: all measurements, or some of them, as tables, as one JSON line, or as the page docs/performance.md."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isles.bench import (
    codecs,
    device,
    document,
    engine,
    islands,
    memory,
    page,
    peers,
    scaling,
    targets,
    trainer,
    watched,
)
from isles.bench.engine import Load
from isles.bench.tables import tables

PARTS = ("codecs", "engine", "islands", "scaling", "memory")
PEERS, PAGE, TRAINER, DEVICE = "peers", "page", "trainer", "device"
"""Other parts, which need more than isles."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    values: int
    """In the vector that codecs work on."""
    device_values: int
    """In that of kernels on an accelerator."""
    repeats: int
    loads: tuple[Load, ...]
    islands_load: Load
    sync_every: int
    parameters: tuple[int, ...]
    """Of the models whose rounds are measured."""
    fragments: tuple[int, ...]
    fragmented_parameters: tuple[int, ...]
    """Of the models that are cut into so many fragments."""
    rounds: int
    memory_parameters: int
    memory_sync_every: int
    page_islands: int
    page_events: int
    page_updates: int
    watching: watched.Sizes
    trainer: trainer.Sizes


FULL = Sizes(
    values=10_000_000,
    device_values=100_000_000,
    repeats=25,
    loads=(
        Load(parameters=1_000_000, rows=256, periods=5, bare_steps=10),
        Load(parameters=10_000_000, rows=256, periods=3, bare_steps=5),
        Load(parameters=10_000_000, rows=256, periods=2, bare_steps=5, outer_device="cpu"),
        Load(parameters=100_000_000, rows=64, periods=1, bare_steps=2),
    ),
    islands_load=Load(parameters=10_000_000, rows=256, periods=2, bare_steps=5),
    sync_every=100,
    parameters=(1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000),
    fragments=(1, 2, 4, 8, 16, 32, 64),
    fragmented_parameters=(10_000_000, 100_000_000),
    rounds=7,
    memory_parameters=2_400_000,
    memory_sync_every=48,
    page_islands=64,
    page_events=100_000,
    page_updates=9,
    watching=watched.FULL,
    trainer=trainer.FULL,
)
QUICK = Sizes(
    values=100_000,
    device_values=5_000,
    repeats=3,
    loads=(Load(parameters=50_000, rows=4, periods=2, bare_steps=2),),
    islands_load=Load(parameters=50_000, rows=4, periods=2, bare_steps=2),
    sync_every=20,
    parameters=(50_000, 200_000),
    fragments=(1, 4),
    fragmented_parameters=(50_000, 100_000),
    rounds=2,
    memory_parameters=40_000,
    memory_sync_every=24,
    page_islands=8,
    page_events=2_000,
    page_updates=2,
    watching=watched.QUICK,
    trainer=trainer.QUICK,
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles bench`."""
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"what to measure: {', '.join(PARTS)} (default: all of these, in some ten minutes), {PAGE}: the live page "
        f"in chromium, {TRAINER}: Hugging Face's, with the callback and without, {DEVICE}: kernels on an accelerator, "
        f"or {PEERS}: torchft, over the same shaped links",
    )
    parser.add_argument("--peer", metavar="PYTHON", help="of torchft's environment (benchmarks/README.md), for peers")
    parser.add_argument("--quick", action="store_true", help="everything on a small scale, in seconds: a trial")
    parser.add_argument(
        "--document", type=Path, metavar="FILE", help="write the results as a page, such as docs/performance.md"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints a table for each part as it is done, returns the numbers."""
    parts = args.parts or list(PARTS)
    known = (*PARTS, PAGE, PEERS, TRAINER, DEVICE)
    if unknown := [part for part in parts if part not in known]:
        raise ValueError(f"nothing called {unknown[0]!r} to measure: choose from {', '.join(known)}")
    if args.document and set(parts) != set(PARTS):
        raise ValueError("--document needs all parts: leave them out on the command line")
    if args.peer and PEERS not in parts:
        raise ValueError(f"--peer has no meaning without the part {PEERS}: isles bench {PEERS} --peer {args.peer}")
    peer = peers.check(args.peer) if PEERS in parts else None
    if PAGE in parts:
        page.check()
    if DEVICE in parts:
        device.find()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as many cores as the baseline, `copy_`, has
    try:
        result = measure(parts, QUICK if args.quick else FULL)
    finally:
        torch.set_num_threads(threads)
    if peer:
        result[PEERS] = peers.measure(peer)
        print(tables({PEERS: result[PEERS]})[PEERS].text() + "\n")
    result["command"] = " ".join(["isles bench", *(["--quick"] if args.quick else []), *args.parts])
    if args.document:
        result["command"] += f" --document docs/{args.document.name}"  # wherever it is written to this time
        document.write(result, args.document)
        print(f"written: {args.document}")
    return result


def measure(parts: list[str], sizes: Sizes) -> dict[str, Any]:
    """The numbers of some parts, and what they say about the targets."""
    result: dict[str, Any] = {"machine": _machine(), "values": sizes.values}
    for part in (*PARTS, PAGE, TRAINER, DEVICE):
        if part in parts:
            print(f"measuring: {part}", file=sys.stderr, flush=True)
            found = _MEASURES[part](sizes)
            result.update(found)
            for table in tables(found).values():
                print(table.text() + "\n", flush=True)
    result["checks"] = targets.check(result)
    if result["checks"]:
        print(tables({"checks": result["checks"]})["checks"].text())
    return result


def _codecs(sizes: Sizes) -> dict[str, Any]:
    return {"codecs": codecs.measure(sizes.values, sizes.repeats)}


def _engine(sizes: Sizes) -> dict[str, Any]:
    rows = [engine.measure(load, sizes.sync_every) for load in sizes.loads]
    return {"engine": rows, "phases": engine.phases(sizes.islands_load.parameters, sizes.sync_every)}


def _islands(sizes: Sizes) -> dict[str, Any]:
    return {"islands": islands.measure(sizes.islands_load, sizes.sync_every)}


def _scaling(sizes: Sizes) -> dict[str, Any]:
    rows = scaling.measure(sizes.parameters, sizes.fragments, sizes.fragmented_parameters, sizes.rounds)
    return {"scaling": rows}


def _memory(sizes: Sizes) -> dict[str, Any]:
    return {"memory": memory.measure(sizes.memory_parameters, sizes.memory_sync_every)}


def _page(sizes: Sizes) -> dict[str, Any]:
    return {"page": page.measure(sizes.page_islands, sizes.page_events, sizes.page_updates, sizes.watching)}


def _trainer(sizes: Sizes) -> dict[str, Any]:
    return {"trainer": trainer.measure(sizes.trainer)}


def _device(sizes: Sizes) -> dict[str, Any]:
    return {"device": device.measure(sizes.device_values, sizes.repeats)}


_MEASURES: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "codecs": _codecs,
    "engine": _engine,
    "islands": _islands,
    "scaling": _scaling,
    "memory": _memory,
    "page": _page,
    "trainer": _trainer,
    "device": _device,
}


def _machine() -> str:
    """As much as is worth knowing about a number."""
    cores = os.cpu_count() or 1
    return (
        f"{cores} core{'s' * (cores > 1)}, {'with a GPU that is not used' if torch.cuda.is_available() else 'CPU only'}"
    )
