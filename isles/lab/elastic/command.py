"""`isles lab --store`: islands that come and go, on shaped links, around an S3 server or a folder.

    isles lab --store --islands 3 --bandwidth 50Mbit --faults all --seed 1
    isles lab --store --faults kill --times 5 -- --overlap 25 --patience-seconds 1.5
    isles lab --store folder --islands 5 --churn 20s -- --steps 6000
    isles lab --store --timed --islands 4 --bandwidth 50Mbit -- --overlap 50

What follows `--` are flags of `isles train`. With --churn it is a run to its last step, and an undisturbed one of as
many rounds and no fewer counted steps; with --timed, islands whose compute is a sleep, on the store and on
torch.distributed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

from isles.lab import namespaces, programs
from isles.lab import run as lab
from isles.lab.elastic import beside, matrix, run
from isles.lab.elastic.faults import FAULTS, parse_faults
from isles.lab.elastic.fleet import Options
from isles.lab.elastic.run import Say
from isles.lab.network import check_islands
from isles.lab.shaping import Shape, parse_share
from isles.plan.quantities import parse_bandwidth, parse_seconds
from isles.view import units

SLACK = 0.05
"""Of an island: so much of its steps may be missing in the run that churn is compared with."""
MOST_MORE = 1
"""Islands beyond those at the start that churn may have at a time; and as many fewer."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles lab --store`."""
    group = parser.add_argument_group("islands that come and go")
    group.add_argument(
        "--store", nargs="?", const="s3", choices=("s3", "folder"), help="join islands by an S3 server, or by a folder"
    )
    what = "; ".join(f"{name}: {fault.what}" for name, fault in FAULTS.items())
    group.add_argument(
        "--faults", default="all", help=f"all, none, or a list with commas (default %(default)s): {what}"
    )
    group.add_argument("--times", type=int, default=3, help="how often each fault (default %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="decides whom and when (default %(default)s)")
    group.add_argument("--seconds", default="30s", help="of the undisturbed run (default %(default)s)")
    group.add_argument("--step-seconds", type=float, default=0.1, help="of an inner step (default %(default)s)")
    group.add_argument("--churn", metavar="SECONDS", help="a kill or a join every so often, instead of --faults")
    group.add_argument("--table", metavar="FILE", help=f"put the table between {matrix.BEGIN} and {matrix.END} in it")


def check(args: argparse.Namespace) -> None:
    """Raises for what cannot be, before anything is built."""
    if args.any_command or args.sweep or args.nproc != 1 or args.reference_turns:
        raise ValueError("--store has its own runs: leave out --command, --sweep, --nproc and --reference-turns")
    for name, value, least in (("times", args.times, 1), ("seed", args.seed, 0)):
        if value < least:
            raise ValueError(f"--{name} {value} must be at least {least}")
    if not 0 <= args.step_seconds < 1e6:
        raise ValueError(f"--step-seconds {args.step_seconds:g} must be 0 or more")
    for module, package in (("moto", "'moto[server]'"), ("obstore", "'isles[store]'")):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"--store needs {module}: pip install {package}")


def run_command(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Prints what was measured, returns it for --json."""
    check(args)
    if args.timed:
        return _timed(args, say)
    wanted, seconds = parse_faults(args.faults), parse_seconds(args.seconds, "--seconds")
    every = parse_seconds(args.churn, "--churn") if args.churn else 0.0
    check_islands(args.islands)
    links = _links(args)
    options = Options(
        folder=Path(args.run or "runs/lab-store").absolute(),
        program=programs.elastic(args.flags),
        **links,
        store=args.store,
        step_seconds=args.step_seconds,
    )
    kinds = matrix.kinds_for(wanted, args.store, explicit=args.faults != "all")
    if every and options.program.config.steps == programs.ELASTIC["steps"]:
        raise ValueError("--churn needs an end: give the run's --steps after `--`")
    namespaces.check()
    lab.claim(options.folder, overwrite=args.overwrite)
    if every:
        return _churn(options, every, args.seed, say)
    records = matrix.matrix(options, kinds, args.times, args.seed, seconds, say)
    matrix.show(records)
    if args.table:
        matrix.write_into(Path(args.table), records)
    result = {"seed": args.seed, "sound": all(map(matrix.is_sound, records)), "runs": records}
    return lab.written(options.folder, result)


def _links(args: argparse.Namespace) -> dict[str, Any]:
    """Of the islands."""
    latency, loss = parse_seconds(args.latency, "--latency", zero=True), parse_share(args.loss)
    shape = Shape(
        bits_per_second=parse_bandwidth(args.bandwidth, "--bandwidth"), latency_seconds=latency, loss=loss, mtu=args.mtu
    )
    links = {"latency": shape.latency_seconds, "loss": shape.loss, "mtu": shape.mtu}
    return {"islands": args.islands, "bandwidth": shape.bits_per_second, **links}


def exit_code(result: dict[str, Any]) -> int:
    """1 if an island failed or hung, or global models differ."""
    return 0 if result.get("sound", True) else 1


def _timed(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Timed islands, joined by torch.distributed and by a store."""
    if args.store != "s3" or args.churn:
        raise ValueError("--timed compares an S3 server with torch.distributed: leave out --store folder and --churn")
    program = programs.timed(args.flags)
    if program.config.method in ("eager", "data-parallel"):
        raise ValueError(f"--method {program.config.method} does not go with a store: use streaming or distant")
    options = lab.Options(
        folder=Path(args.run or "runs/lab-store-timed").absolute(),
        **_links(args),
        reference_steps=max(1, args.reference_steps),
        timeout_seconds=parse_seconds(args.timeout, "--timeout"),
    )
    namespaces.check()
    lab.claim(options.folder, overwrite=args.overwrite)
    for name in ("torch", "store"):
        (options.folder / name).mkdir(exist_ok=True)
    result = beside.compare(options, program, say)
    print(beside.present(result))
    return lab.written(options.folder, result)


def _churn(options: Options, every: float, seed: int, say: Say) -> dict[str, Any]:
    """A run in churn, and an undisturbed one of as many rounds and no fewer counted steps.

    Of the second only the loss is compared, so its steps take half the time.
    """
    own = dataclasses.replace(options, folder=options.folder / "churn", spares=MOST_MORE)
    disturbed = run.churn(own, every, max(1, options.islands - MOST_MORE), seed, say)
    count = max(1, math.ceil(disturbed["counted_steps"] / options.program.config.steps - SLACK))
    half = options.step_seconds / 2
    same = dataclasses.replace(options, folder=options.folder / "calm", islands=count, step_seconds=half)
    calm = run.undisturbed(same, say)
    losses = disturbed["val_loss"], calm["val_loss"]
    ratio = losses[0] / losses[1] if None not in losses else None
    kills = sum(each["kind"] == "kill" for each in disturbed["injected"])
    print(f"churn         {kills} kills, {len(disturbed['injected']) - kills} joins in {_duration(disturbed)}")
    for name, record in (("churn", disturbed), ("undisturbed", calm)):
        print(
            f"{name:<12}  validation loss {record['val_loss']}, {record['rounds']} rounds, "
            f"{record['islands_in_a_round']:.2f} islands in one, {record['counted_steps']:.0f} counted steps, "
            f"identical: {record['identical']} ({record['rounds_compared']} rounds)"
        )
    print(f"ratio         {'-' if ratio is None else f'{ratio:.4f}'}")
    sound = all(map(matrix.is_sound, (disturbed, calm))) and ratio is not None
    return lab.written(options.folder, {"loss_ratio": ratio, "sound": sound, "churn": disturbed, "undisturbed": calm})


def _duration(record: dict[str, Any]) -> str:
    return units.duration(record["wall_seconds"])
