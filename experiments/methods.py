"""The methods side by side: the same model, the same tokens, three seeds each.

Runs `isles train` for every method and seed (two islands, H = 30, a decoder of 1.2M parameters on bytes), keeps one line of JSON
per run in the results file, and draws the figure. Stop it whenever you like: what is there is not run again.

    python experiments/methods.py --data TRAIN --val VAL [--steps 2000] [--seeds 3]
    python experiments/methods.py --plot-only
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
METHODS = {
    "data-parallel": ["--method", "data-parallel"],
    "DiLoCo": ["--method", "diloco", "--outer-lr", "0.4"],
    "streaming fp32": ["--method", "streaming", "--codec", "fp32"],
    "streaming e3m0": ["--method", "streaming"],
    "delayed": ["--method", "delayed"],
    "eager": ["--method", "eager"],
}


def train(name: str, seed: int, args: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "isles.cli", "train", "--run", f"{folder}/run", "--json", "--seed", str(seed)]
        command += ["--data", args.data, "--val-data", args.val, "--tokenizer", "bytes", "--model", "mini"]
        command += ["--steps", str(args.steps), "--batch-size", "4", "--sequence-length", "128", "--warmup-steps", "100"]
        command += ["--learning-rate", "3e-3", "--eval-every", "500", "--checkpoint-every", "0", "--sample-tokens", "0"]
        if name != "data-parallel":
            command += ["--sync-every", "30"]
        output = subprocess.run(command + METHODS[name], stdout=subprocess.PIPE, text=True, check=True).stdout
        events = [json.loads(line) for line in (Path(folder) / "run" / "events.jsonl").read_text().splitlines()]
    summary = json.loads(output.splitlines()[-1])
    curve = [[event["step"], round(event["val_loss"], 5)] for event in events if event["event"] == "eval"]
    kept = ("val_loss", "val_bits_per_byte", "steps", "tokens", "bytes_sent", "peak_bytes_per_step")
    return {"method": name, "seed": seed, **{key: summary[key] for key in kept}, "curve": curve}


def plot(rows: list[dict], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for number, name in enumerate(METHODS):
        own = [row for row in rows if row["method"] == name]
        if not own:
            continue
        colour = f"C{number}"
        steps = [point[0] for point in own[0]["curve"]]
        means = [statistics.fmean(row["curve"][i][1] for row in own) for i in range(len(steps))]
        axes[0].plot(steps, means, label=name, color=colour, marker="o", markersize=3)
        for row in own:
            axes[1].scatter(row["bytes_sent"], row["val_loss"], color=colour, s=28)
        x, y = statistics.fmean(row["bytes_sent"] for row in own), statistics.fmean(row["val_loss"] for row in own)
        axes[1].annotate(name, (x, y), xytext=(6, 5), textcoords="offset points", color=colour, fontsize=9)
    axes[0].set(xlabel="inner steps", ylabel="validation loss (nats a byte)", title="mean over seeds")
    axes[0].legend(frameon=False)
    axes[1].set(xscale="log", xlabel="bytes sent, both islands", ylabel="final validation loss", title="every seed")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(out, dpi=150)


def table(rows: list[dict]) -> str:
    base = statistics.fmean(row["val_loss"] for row in rows if row["method"] == "data-parallel")
    lines = ["| method | seeds | validation loss | spread | against data-parallel | bytes sent | peak in a step |", "|---|---|---|---|---|---|---|"]
    for name in METHODS:
        own = [row for row in rows if row["method"] == name]
        if own:
            losses = [row["val_loss"] for row in own]
            mean, spread = statistics.fmean(losses), max(losses) - min(losses)
            sent, peak = own[0]["bytes_sent"] / 1e6, own[0]["peak_bytes_per_step"] / 1e6
            lines.append(f"| {name} | {len(own)} | {mean:.4f} | {spread:.4f} | {mean / base - 1:+.2%} | {sent:,.1f} MB | {peak:.2f} MB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="training text")
    parser.add_argument("--val", help="held-out text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "methods.jsonl")
    parser.add_argument("--plot-only", action="store_true")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    for seed in range(0 if args.plot_only else args.seeds):
        for name in METHODS:
            if not any((row["method"], row["seed"], row["steps"]) == (name, seed, args.steps) for row in rows):
                rows.append(train(name, seed, args))
                with args.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(name, seed, rows[-1]["val_loss"], flush=True)
    print(table(rows))
    plot(rows, args.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
