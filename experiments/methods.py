"""The methods side by side: the same model, the same tokens, three seeds each.

A decoder of 1.2M parameters on bytes, two islands, H = 30, 2,000 steps, the batches of `isles train`; both
islands in one process (`isles.run_local`), two runs at a time. Data-parallel training of two islands is one
island with both batches. One line of JSON per run is appended to the results; what is there is not run again,
so it can be stopped at any time.

    python experiments/methods.py --data TRAIN --val VAL [--steps 2000] [--seeds 3]
    python experiments/methods.py --show            # table and figure of what is there
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path

import torch

import isles
from isles.train.batches import Batches, validation_batches
from isles.train.config import TrainConfig
from isles.train.evals import validation
from isles.train.model import LADDER, Decoder, language_loss
from isles.train.tokens import prepare

HERE = Path(__file__).parent
BATCH, LENGTH, EVERY = 4, 64, 30
METHODS = {
    "data-parallel": None,
    "DiLoCo": isles.Method.diloco(sync_every=EVERY, outer_lr=0.4),
    "streaming fp32, mixing 0": isles.Method.streaming(sync_every=EVERY, codec="fp32", mixing=0.0),
    "streaming fp32": isles.Method.streaming(sync_every=EVERY, codec="fp32"),
    "streaming e3m0": isles.Method.streaming(sync_every=EVERY),
    "delayed": isles.Method.delayed(sync_every=EVERY),
    "eager": isles.Method.eager(sync_every=EVERY),
}


def train(job: tuple[str, int, int, str, str]) -> dict[str, object]:
    name, seed, steps, data, val = job
    torch.set_num_threads(1)
    tokens = prepare(data, tokenizer="bytes", validation=val)
    method = METHODS[name]
    config = TrainConfig(steps=steps, learning_rate=3e-3, warmup_steps=100)
    curve: list[list[float]] = []

    def evaluate(model: torch.nn.Module, step: int, most: int | None = 65536) -> float:
        batches = validation_batches(tokens, 32, LENGTH, max_tokens=most)
        loss = validation(model, batches, tokens.validation_bytes)["val_loss"]
        curve.append([step, round(loss, 5)])
        return loss

    def island(world: isles.LocalWorld) -> tuple[float, dict[str, float]]:
        batch = BATCH * (2 if method is None else 1)
        batches = Batches(
            tokens, seed=seed, island=world.rank, islands=world.size, batch_size=batch, sequence_length=LENGTH
        )
        torch.manual_seed(seed)
        model = Decoder(LADDER["mini"], tokens.vocabulary)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=1 / steps)
        sync = isles.Method(sync_every=steps + 1) if method is None else method  # data-parallel: nothing to exchange
        with isles.DiLoCo(model, optimizer, sync, world=world) as diloco:
            for step in range(steps):
                optimizer.param_groups[0]["lr"] = config.learning_rate_at(step)
                inputs, targets, segments = batches.at(step)
                language_loss(model(inputs, segments), targets, z_loss=1e-4).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if world.rank == 0 and (step + 1) % 250 == 0 and step + 1 < steps:
                    if method is None:
                        evaluate(model, step + 1)
                    else:
                        with diloco.global_model():
                            evaluate(model, step + 1)
            if method is None:  # the global model is the island's own
                return evaluate(model, steps, None), {"parameters": sum(p.numel() for p in model.parameters())}
        return evaluate(model, steps, None) if world.rank == 0 else 0.0, dict(diloco.stats)

    loss, stats = isles.run_local(island, 1 if method is None else 2)[0]
    sent = stats["bytes_sent"] if method else 4 * stats["parameters"] * steps
    return {"method": name, "seed": seed, "steps": steps, "val_loss": loss, "bytes_sent": sent, "curve": curve}


def table(rows: list[dict]) -> str:
    losses = {name: [row["val_loss"] for row in rows if row["method"] == name] for name in METHODS}
    base = statistics.fmean(losses["data-parallel"])
    head = "method | seeds | validation loss | spread | against data-parallel | bytes an island sends"
    lines = [f"| {head} |", "|---|---|---|---|---|---|"]
    for name, own in losses.items():
        if own:
            mean, sent = statistics.fmean(own), next(row["bytes_sent"] for row in rows if row["method"] == name)
            spread = max(own) - min(own)
            numbers = f"{mean:.4f} | {spread:.4f} | {mean / base - 1:+.2%} | {sent / 1e6:,.1f} MB"
            lines.append(f"| {name} | {len(own)} | {numbers} |")
    return "\n".join(lines)


def plot(rows: list[dict], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), constrained_layout=True)
    for number, name in enumerate(METHODS):
        own = [row for row in rows if row["method"] == name]
        if own:
            colour = f"C{number}"
            steps = [point[0] for point in own[0]["curve"]]
            means = [statistics.fmean(row["curve"][i][1] for row in own) for i in range(len(steps))]
            axes[0].plot(steps, means, label=name, color=colour, marker="o", markersize=3)
            axes[1].scatter([row["bytes_sent"] for row in own], [row["val_loss"] for row in own], color=colour, s=28)
    axes[0].set(xlabel="inner steps", ylabel="validation loss (nats a byte)", title="mean over seeds")
    axes[1].set(xscale="log", xlabel="bytes an island sends", ylabel="final validation loss", title="every seed")
    axes[0].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="training text")
    parser.add_argument("--val", help="held-out text")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "methods.jsonl")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    done = {(row["method"], row["seed"], row["steps"]) for row in rows}
    wanted = [(name, seed, args.steps) for seed in range(args.seeds) for name in METHODS]
    jobs = [(*job, args.data, args.val) for job in wanted if job not in done and not args.show]
    if jobs:
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            for row in pool.imap_unordered(train, jobs):
                rows.append(row)
                with args.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row["method"], row["seed"], round(row["val_loss"], 4), flush=True)
    print(table(rows))
    plot(rows, args.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
