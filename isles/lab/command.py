"""`isles lab`: islands on real, slow links, one network namespace each, on this machine.

    isles lab --islands 2 --bandwidth 20Mbit -- --method streaming --model mini --steps 200 --sync-every 20
    isles lab --islands 4 --bandwidth 50Mbit --timed -- --method diloco --parameters 30.8e6 --sync-every 128
    isles lab --sweep --out runs/lab-sweep
    isles lab --store --islands 3 --bandwidth 50Mbit --faults all
    isles lab --bandwidth 5Mbit --command -- sh -c 'torchrun --nnodes {islands} --nproc-per-node 1 \\
        --rdzv-backend c10d --rdzv-endpoint {host}:{port} --rdzv-conf is_host=$((1 - {island})) \\
        --local-addr {address} train.py'

Linux only. As root, or without where the system allows user namespaces.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from isles.lab import namespaces, programs
from isles.lab import run as lab
from isles.lab.elastic import command as elastic
from isles.lab.shaping import parse_share
from isles.plan.quantities import format_bandwidth, parse_bandwidth, parse_seconds
from isles.view import units


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles lab`."""
    links = parser.add_argument_group("the islands and their links")
    links.add_argument("--islands", type=int, default=2, help="how many (default %(default)s)")
    links.add_argument("--bandwidth", default="100Mbit", help="of every link, each way: 20Mbit (default %(default)s)")
    links.add_argument("--latency", default="0", help="one way, half of what ping shows: 25ms; needs netem")
    links.add_argument("--loss", default="0", help="share of frames that get lost: 0.1%% or 0.001; needs netem")
    links.add_argument("--mtu", type=int, default=9000, help="largest packet (default %(default)s: jumbo frames)")
    links.add_argument("--nproc", type=int, default=1, help="processes on each island (default %(default)s)")
    what = parser.add_argument_group("what runs on them")
    kind = what.add_mutually_exclusive_group()
    kind.add_argument("--timed", action="store_true", help="islands whose compute is a timed sleep (isles.lab.timed)")
    kind.add_argument(
        "--command",
        dest="any_command",
        action="store_true",
        help="the command after `--`, on every island, instead of isles train; in it {island}, {islands}, {address}, "
        "{host} (address of island 0), {port} and {interface} are filled in",
    )
    what.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of isles train, after `--`")
    how = parser.add_argument_group("how it is measured")
    how.add_argument("--run", metavar="FOLDER", help="for all that is written (default runs/lab-METHOD-BANDWIDTH)")
    how.add_argument("--overwrite", action="store_true", help="replace a run that is there already")
    how.add_argument(
        "--reference-steps",
        type=int,
        default=20,
        help="steps of every island alone, against which utilisation is measured; 0: none (default %(default)s)",
    )
    how.add_argument(
        "--reference-turns",
        action="store_true",
        help="run and reference in turns of some seconds, for a machine whose speed varies",
    )
    how.add_argument(
        "--sweep", action="store_true", help="all methods at several bandwidths instead: a table and a figure"
    )
    how.add_argument("--out", metavar="FOLDER", default="runs/lab-sweep", help="of the sweep (default %(default)s)")
    how.add_argument("--repeats", type=int, default=2, help="of every cell of the sweep (default %(default)s)")
    how.add_argument("--kind", choices=("compute", "timed"), help="of the sweep: real compute, or timed sleeps only")
    how.add_argument("--bandwidths", metavar="LIST", help="of the sweep, such as 50Mbit,200Mbit, instead of its own")
    how.add_argument("--quick", action="store_true", help="a sweep of a few cells, in some minutes")
    elastic.configure(parser)
    how.add_argument("--timeout", default="1h", help="how long the run may take (default %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints what was measured, returns it for --json."""
    if args.store:
        return elastic.run_command(args, _say)
    if args.sweep:
        return _sweep(args)
    options, program = _options(args)
    namespaces.check()
    lab.claim(options.folder, overwrite=args.overwrite, resume=bool(program and program.chosen.get("resume")))
    record = lab.run(options, program, _say) if program else lab.run_command(options, args.flags, _say)
    print(present(record))
    return record


def exit_code(result: dict[str, Any]) -> int:
    """1 if islands that come and go did not come through."""
    return elastic.exit_code(result)


def _sweep(args: argparse.Namespace) -> dict[str, Any]:
    from isles.lab.cells import KINDS, cells
    from isles.lab.sweep import sweep

    if args.flags or args.timed or args.any_command or args.run:
        raise ValueError("--sweep has its own runs: leave out --run, --timed, --command and all that follows `--`")
    if args.repeats < 1:
        raise ValueError(f"--repeats {args.repeats} must be at least 1")
    namespaces.check()
    kinds = [KINDS[args.kind]] if args.kind else list(KINDS.values())
    rates = [parse_bandwidth(rate, "--bandwidths") for rate in (args.bandwidths or "").split(",") if rate]
    wanted = cells(kinds, repeats=args.repeats, quick=args.quick, bandwidths=rates)
    result = sweep(Path(args.out).absolute(), wanted, _say)
    if result["table"]:
        print(Path(result["table"]).read_text())
        print(f"table: {result['table']}\nfigure: {result['figure']}")
    if result["failed"]:
        raise SystemExit(f"isles lab: {len(result['failed'])} cells failed; the same command tries them again")
    return result


def _options(args: argparse.Namespace) -> tuple[lab.Options, programs.Program | None]:
    """What the flags mean; no program: any command."""
    bandwidth = parse_bandwidth(args.bandwidth, "--bandwidth")
    options = lab.Options(
        folder=Path(args.run or "."),
        islands=args.islands,
        bandwidth=bandwidth,
        latency=parse_seconds(args.latency, "--latency", zero=True),
        loss=parse_share(args.loss),
        mtu=args.mtu,
        ranks=args.nproc,
        reference_steps=args.reference_steps,
        reference_turns=args.reference_turns,
        timeout_seconds=parse_seconds(args.timeout, "--timeout"),
    )
    if args.timed and args.reference_turns:
        raise ValueError("--reference-turns is for real compute: a timed sleep takes as long on a busy machine")
    program = None
    if args.any_command:
        if not args.flags:
            raise ValueError("--command needs a command after `--`, such as -- hostname")
    elif args.islands < 2:
        raise ValueError(f"--islands {args.islands} has no link to measure: give 2 or more")
    else:
        program = programs.timed(args.flags) if args.timed else programs.train(args.flags, args.islands, args.nproc)
    name = program.config.method if program else Path(args.flags[0]).name
    default = f"runs/lab-{name}-{format_bandwidth(bandwidth).removesuffix('/s').replace(' ', '')}"
    return dataclasses.replace(options, folder=Path(args.run or default).absolute()), program


def _say(line: str) -> None:
    print(f"lab: {line}", file=sys.stderr, flush=True)


def present(record: dict[str, Any]) -> str:
    """The figures of a run, as people read them."""
    measured = record["bandwidth_measured"]
    rows = [
        ("links", f"{record['islands']} x {format_bandwidth(record['bandwidth'])} each way, MTU {record['mtu']}"),
        ("payload carried", "-" if measured is None else format_bandwidth(measured)),
        ("TCP", record["congestion_control"]),
    ]
    if "method" in record:
        alone = record["reference_step_seconds"]
        rows += [
            ("method", f"{record['method']}, {units.count(record['parameters'])} parameters, {record['steps']} steps"),
            ("validation loss", units.decimal(record["val_loss"])),
            ("step", f"{1e3 * record['step_seconds']:.4g} ms" + (f", alone {1e3 * alone:.4g} ms" if alone else "")),
            ("utilisation", units.share(record["compute_utilization"])),
            ("in the steady state", units.share(record["steady_utilization"])),
            ("planned", units.share(record.get("planned_utilization"))),
            ("isles sent", units.number_of_bytes(record["bytes_sent"])),
        ]
    per_byte = record.get("kernel_bytes_per_byte_sent")
    ratio = f", {per_byte:.3f} of it" if per_byte else ""
    rows += [
        ("the kernel counted", units.number_of_bytes(record["kernel_bytes"]) + ratio),
        ("wall", units.duration(record["wall_seconds"])),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)
