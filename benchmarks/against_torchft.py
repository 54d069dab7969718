"""isles beside torchft: the same model, data, H, fragments and overlap, over the same shaped links, in turns.

    python benchmarks/against_torchft.py --peer .venv-torchft/bin/python [--bandwidth 10Mbit] [--repeats 2]

Runs `isles lab` twice per repeat: once with `torchft_peer.py` as its command, once with `isles train`. Needs what
`isles lab` needs, and the environment of benchmarks/README.md for the peer. Prints a markdown table, writes all
numbers to --out. Wall time and utilisation are those of the steps after the first round, which makes connections and
is not counted on either side; bytes are those of the whole run, as the kernel counted them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from isles.view import events

HERE = Path(__file__).parent
EVERY, FRAGMENTS, OVERLAP, STEPS = 20, 2, 5, 60
FLAGS = f"--model small --vocabulary 1024 --warmup-steps 20 --batch-size 1 --sequence-length 64 --steps {STEPS} "
FLAGS += f"--sync-every {EVERY} --fragments {FRAGMENTS} --overlap {OVERLAP} --mixing 0.5"
OFFSETS = ",".join(str((place + 1) * EVERY // FRAGMENTS - OVERLAP) for place in range(FRAGMENTS))
"""torchft's own: fragment p is applied at (p + 1) H / P."""


def lab(bandwidth: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """A run of `isles lab`: its record."""
    command = [sys.executable, "-m", "isles.cli", "lab", "--islands", "2", "--bandwidth", bandwidth, "--overwrite"]
    done = subprocess.run([*command, "--run", str(folder), "--json", *arguments], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def torchft(peer: str, bandwidth: str, folder: Path) -> dict[str, Any]:
    """The peer's figures."""
    script = [peer, str(HERE / "torchft_peer.py"), "--island", "{island}", "--islands", "{islands}"]
    flags = ["--lighthouse", "{host}:{port}", *FLAGS.split(), "--json"]
    record = lab(bandwidth, folder, "--command", "--", *script, *flags)
    said = [json.loads((folder / f"node-{island}.log").read_text().splitlines()[-1]) for island in (0, 1)]
    return {
        "who": "torchft",
        "kernel_bytes": record["kernel_bytes"],
        "payload_bytes": sum(each["bytes_sent"] for each in said),
        "step_seconds_alone": statistics.fmean(each["step_seconds_alone"] for each in said),
        "wall_seconds": statistics.fmean(each["wall_seconds"] for each in said),
        "val_loss": said[0]["val_loss"],
    }


def isles(bandwidth: str, folder: Path, codec: str) -> dict[str, Any]:
    """The same figures of isles."""
    flags = [*FLAGS.split(), "--method", "streaming", "--offsets", OFFSETS, "--codec", codec]
    record = lab(bandwidth, folder, "--", *flags)
    steps = [event for event in events.read(folder / "run") if event["event"] == "step" and event["island"] == 0]
    times = {event["step"]: event["time"] for event in steps}
    return {
        "who": f"isles, {codec}",
        "kernel_bytes": record["kernel_bytes_with_start"],
        "payload_bytes": record["bytes_sent"],
        "step_seconds_alone": record["reference_step_seconds"],
        "wall_seconds": times[STEPS] - times[EVERY],
        "val_loss": record["val_loss"],
    }


def main() -> None:
    """Both in turns, then a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", required=True, help="the Python of the peer's environment")
    parser.add_argument("--bandwidth", default="10Mbit")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/torchft.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    scratch = args.out.with_suffix("")
    rows = []
    for _ in range(args.repeats):
        rows.append(torchft(args.peer, args.bandwidth, scratch / "torchft"))
        rows.append(isles(args.bandwidth, scratch / "isles", "e3m0"))
        for row in rows:
            row["compute_utilization"] = (STEPS - EVERY) * row["step_seconds_alone"] / row["wall_seconds"]
        args.out.write_text(json.dumps({"bandwidth": args.bandwidth, "flags": FLAGS, "rows": rows}, indent=1) + "\n")
    print(f"{args.bandwidth}, {FLAGS}\n")
    print("| | kernel bytes | payload | step, alone | wall of 40 steps | utilisation | loss |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['who']} | {row['kernel_bytes'] / 1e6:.2f} MB | {row['payload_bytes'] / 1e6:.2f} MB "
            f"| {1e3 * row['step_seconds_alone']:.1f} ms | {row['wall_seconds']:.2f} s "
            f"| {row['compute_utilization']:.1%} | {row['val_loss']:.4f} |"
        )
    for name in ("kernel_bytes", "payload_bytes", "wall_seconds"):
        theirs, ours = (statistics.fmean(row[name] for row in rows[place::2]) for place in (0, 1))
        print(f"\n{name}: isles has {theirs / ours:.2f}x less")


if __name__ == "__main__":
    main()
