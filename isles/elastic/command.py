"""`isles simulate`: try the protocol of elastic islands against everything that can go wrong, by seeds.

    isles simulate --islands 16 --rounds 200 --seeds 1000 --faults all
    isles simulate --islands 8 --rounds 50 --seeds 1 --first-seed 4711 --trace failing.txt

A seed decides everything. One that fails is run again with its trace, and the command that repeats it is printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isles.elastic.faults import FAULTS, parse_faults
from isles.elastic.invariants import INVARIANTS, Violation
from isles.elastic.simulator import Simulation


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles simulate`."""
    parser.add_argument("--islands", type=int, default=8, help="the most islands of a run (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=50, help="rounds of a run (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=500, help="how many runs (default %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="K", help="the first seed (default %(default)s)")
    what = "; ".join(f"{kind}: {meaning}" for kind, meaning in FAULTS.items())
    parser.add_argument(
        "--faults", default="all", help=f"all, none, or a list with commas (default %(default)s): {what}"
    )
    parser.add_argument("--trace", metavar="FILE", help="where the trace of a failing seed goes; or of a single seed")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints what was tried and what held."""
    for name in ("islands", "rounds", "seeds"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    faults, count, begin = parse_faults(args.faults), Counter[str](), time.perf_counter()
    failed: dict[int, str] = {}
    for seed in _with_bar(range(args.first_seed, args.first_seed + args.seeds)):
        simulation = Simulation(seed, args.islands, args.rounds, faults)
        try:
            simulation.run()
        except Violation as violation:
            failed[seed] = str(violation)
        count.update(simulation.count)
    seconds = time.perf_counter() - begin
    print(f"{args.seeds} seeds, {args.rounds} rounds each, up to {args.islands} islands, in {seconds:.1f} s: tried")
    print("  " + ", ".join(f"{number} {what}" for what, number in sorted(count.items())))
    for name, meaning in INVARIANTS.items():
        broken = sum(message.startswith(f"{name}:") for message in failed.values())
        print(f"  {name} {f'BROKEN by {broken} seeds' if broken else 'held'}: {meaning}")
    if failed or (args.trace and args.seeds == 1):
        _explain(args, faults, min(failed, default=args.first_seed), failed)
    return {
        "seeds": args.seeds,
        "rounds": args.rounds,
        "violations": len(failed),
        "failing_seeds": sorted(failed)[:100],
        "seconds": round(seconds, 3),
        **{what.replace(" ", "_"): number for what, number in sorted(count.items())},
    }


def exit_code(result: dict[str, Any]) -> int:
    """1 if an invariant was broken."""
    return 1 if result["violations"] else 0


def _explain(args: argparse.Namespace, faults: tuple[str, ...], seed: int, failed: dict[int, str]) -> None:
    """Runs a seed again, writes its trace, and says how to repeat it."""
    trace: list[str] = []
    try:
        Simulation(seed, args.islands, args.rounds, faults, trace=trace).run()
    except Violation as violation:
        trace.append(str(violation))
    path = Path(args.trace or f"simulate-{seed}.txt")
    path.write_text("\n".join([*trace, ""]))
    print(f"seed {seed}: {failed.get(seed, 'nothing was broken')}; its trace is in {path}")
    same = f"--islands {args.islands} --rounds {args.rounds} --seeds 1 --first-seed {seed} --faults {args.faults}"
    print(f"again: isles simulate {same} --trace {path}")


def _with_bar(seeds: range) -> Iterable[int]:
    """The same, with a progress bar on a terminal. `rich` is loaded only for it."""
    if not sys.stderr.isatty():
        return seeds
    from rich.console import Console
    from rich.progress import track

    return track(seeds, "seeds", console=Console(stderr=True))
