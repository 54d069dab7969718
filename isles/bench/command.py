"""How fast isles is, as ratios measured side by side: codecs against memcpy, the engine against the bare training loop.

Codecs: encode, and decode, of a vector in fp32, on one thread, against `copy_` of the same fp32 bytes into
existing memory. Engine: the time that isles takes out of an inner step (encode, exchange with nobody, apply),
on average over whole periods and at its longest, against the step itself. It is read from two hooks on the
optimizer, one before and one after isles' own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import isles


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles bench`."""
    parser.add_argument(
        "--parameters", type=float, default=10e6, help="size of the model and of the vector (default 10e6)"
    )
    parser.add_argument("--sync-every", type=int, default=100, help="H, for the engine (default 100)")
    parser.add_argument("--batch", type=int, default=256, help="rows in a training batch (default 256)")
    parser.add_argument("--periods", type=int, default=2, help="periods of H steps to measure (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measures, prints two tables, returns the numbers."""
    for name in ("parameters", "sync_every", "batch", "periods", "threads"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name):g} must be at least 1")
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        codecs = bench_codecs(int(args.parameters))
        print(f"codecs, {args.parameters:,.0f} values, speed against copy_ of the same fp32 bytes\n")
        print(f"{'codec':<12} {'bits/value':>10} {'encode':>8} {'decode':>8}")
        for name, row in codecs.items():
            print(f"{name:<12} {row['bits']:>10.3f} {row['encode']:>7.3f}x {row['decode']:>7.3f}x")
        engine = bench_engine(int(args.parameters), args.sync_every, args.batch, args.periods)
    finally:
        torch.set_num_threads(threads)
    print(
        f"\nengine, {engine['parameters']:,} parameters, H = {args.sync_every}, streaming in e3m0, one island alone\n"
    )
    print(f"bare step             {engine['step_seconds'] * 1e3:9.2f} ms")
    print(f"isles, mean per step  {engine['isles_seconds'] * 1e3:9.2f} ms  {engine['overhead']:7.2%} of the bare step")
    print(f"isles, longest step   {engine['longest_seconds'] * 1e3:9.2f} ms")
    return {"codecs": codecs, "engine": engine}


def bench_codecs(numel: int) -> dict[str, dict[str, float]]:
    """For every codec: bits a value, and the speed of encode and decode as a fraction of memcpy's."""
    source = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    target = torch.empty_like(source)
    result = {}
    for name, codec in isles.codecs.items():
        payload = codec.encode(source)
        copy, encode, decode = _fastest(
            lambda: target.copy_(source), lambda: codec.encode(source), lambda: codec.decode(payload, numel)  # noqa: B023
        )  # fmt: skip
        result[name] = {"bits": 8 * payload.numel() / numel, "encode": copy / encode, "decode": copy / decode}
    return result


def bench_engine(parameters: int, sync_every: int, batch: int, periods: int) -> dict[str, float]:
    """The cost of isles in a training step, against the step without it."""
    width = max(8, int((parameters / 8) ** 0.5))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    rows = torch.randn(batch, width, generator=torch.Generator().manual_seed(0))
    marks: list[float] = []
    note = lambda *_: marks.append(time.perf_counter())
    before = optimizer.register_step_post_hook(note)
    steps, inside = [], []
    with isles.DiLoCo(model, optimizer, isles.Method.streaming(sync_every=sync_every)):
        after = optimizer.register_step_post_hook(note)
        for step in range(1 + periods * sync_every):
            begin = time.perf_counter()
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            total = time.perf_counter() - begin
            spent = marks[-1] - marks[-2]
            if step:  # the first step allocates
                steps.append(total - spent)
                inside.append(spent)
        before.remove()
        after.remove()
    bare, spent = statistics.median(steps), statistics.fmean(inside)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_seconds": bare,
        "isles_seconds": spent,
        "longest_seconds": max(inside),
        "overhead": spent / bare,
    }


def _fastest(*actions: Callable[[], object], repeats: int = 5) -> list[float]:
    """Seconds of each action at its best, taken in turns so that all see the same machine."""
    best = [float("inf")] * len(actions)
    for _ in range(repeats):
        for index, action in enumerate(actions):
            begin = time.perf_counter()
            action()
            best[index] = min(best[index], time.perf_counter() - begin)
    return best
