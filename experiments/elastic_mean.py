"""How to average islands whose number changes, which take unequal numbers of steps, or of which one is bad.

Plain DiLoCo in one process, written out: whoever is there in a round trains H steps from the global weights, the outer
gradients are averaged, and one outer step is taken. 41k parameters on bytes of the standard library, AdamW, H = 30, 60
rounds, outer momentum 0.9 with a warm-up over 20 rounds. Joiners have fresh moments, unless it is said.

    python experiments/elastic_mean.py [--seeds N] [GROUP ...]     # runs what is not there yet
    python experiments/elastic_mean.py --show [--figure FILE]      # the losses; the group `bad` as curves

Groups: `changing` (2, then 4, then 2 islands), `slow` (one of two islands takes a tenth of the steps), `bad` (one of
four islands sends noise a thousand times too large). docs/log.md has the findings.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isles.reproduce.figures import COLOURS, quiet
from isles.train.batches import Batches, validation_batches
from isles.train.config import TrainConfig
from isles.train.data import prepare_data
from isles.train.evals import quality, takes_segments, total_nats
from isles.train.model import build_model
from isles.train.step import backward, inner_optimizer, update

RESULTS = Path(__file__).parent / "results" / "elastic-mean.jsonl"
ROUNDS, EVERY, WARMUP, OUTER_LR, MOMENTUM = 60, 30, 20, 0.9, 0.9


@dataclass(frozen=True)
class Setting:
    """Who is there in which round, how outer gradients are averaged, and what may be wrong."""

    islands: tuple[int, int, int] = (2, 2, 2)
    mean: str = "plain"
    slow: bool = False
    bad: bool = False
    keep_moments: bool = False


GROUPS: dict[str, dict[str, Setting]] = {
    "changing": {
        "always 2": Setting(),
        "always 4": Setting((4, 4, 4)),
        "2-4-2, plain mean": Setting((2, 4, 2)),
        "2-4-2, norm-preserving": Setting((2, 4, 2), "norm-preserving"),
        "2-4-2, outer lr by sqrt(M / 2)": Setting((2, 4, 2), "sqrt"),
        "2-4-2, norms limited to the median": Setting((2, 4, 2), "median"),
        "2-4-2, joiners with moments": Setting((2, 4, 2), keep_moments=True),
    },
    "slow": {
        "one takes a tenth, weights by steps": Setting(mean="steps", slow=True),
        "one takes a tenth, equal weights": Setting(slow=True),
        "one alone": Setting((1, 1, 1)),
        "one alone, half the outer learning rate": Setting((1, 1, 1), "half"),
        "two of equal speed, half the outer learning rate": Setting((2, 2, 2), "half"),
    },
    "bad": {
        "four, all well": Setting((4, 4, 4)),
        "four, all well, norms limited to the median": Setting((4, 4, 4), "median"),
        "one of four bad, plain mean": Setting((4, 4, 4), bad=True),
        "one of four bad, norms limited to the median": Setting((4, 4, 4), "median", bad=True),
    },
}


def run(setting: Setting, seed: int) -> dict[str, Any]:
    config = TrainConfig(
        model="nano", data="stdlib", tokenizer="bytes", steps=ROUNDS * EVERY, batch_size=4, sequence_length=64,
        learning_rate=8e-3, seed=seed, method="diloco",
    )  # fmt: skip
    tokens, train = prepare_data(config, 0)
    torch.manual_seed(seed)
    model = build_model(config.model, tokens.vocabulary)
    segments, parameters = takes_segments(model), list(model.parameters())
    anchor = torch.nn.utils.parameters_to_vector(parameters).detach().clone()
    velocity = torch.zeros_like(anchor)
    optimizers: dict[int, torch.optim.Optimizer] = {}
    own_steps: dict[int, int] = defaultdict(int)
    curve, noise = [], torch.Generator().manual_seed(seed)
    for number in range(1, ROUNDS + 1):
        members = range(setting.islands[min(2, 3 * (number - 1) // ROUNDS)])
        deltas, weights = [], []
        for island in members:
            if island not in optimizers or (number % (ROUNDS // 3) == 1 and number > 1 and island >= 2):
                optimizers[island] = inner_optimizer(model, config)
                if setting.keep_moments and island >= 2:
                    optimizers[island].load_state_dict(optimizers[0].state_dict())
            batches = Batches(train, seed=f"{seed}/{island}", island=0, islands=1, batch_size=4, sequence_length=64)
            steps = EVERY // 10 if setting.slow and island == 1 else EVERY
            torch.nn.utils.vector_to_parameters(anchor.clone(), parameters)  # else they share memory
            for step in range(steps):
                backward(model, batches.at(own_steps[island]), config, segments=segments)
                update(model, optimizers[island], config, (number - 1) * EVERY + step)
                own_steps[island] += 1
            delta = anchor - torch.nn.utils.parameters_to_vector(parameters).detach()
            if setting.bad and island == 3:
                delta = torch.randn(delta.shape, generator=noise) * 1000 * delta.norm() / delta.numel() ** 0.5
            deltas.append(delta)
            weights.append(float(steps) if setting.mean == "steps" else 1.0)
        mean, scale = averaged(deltas, weights, setting.mean)
        share = min(1.0, number / WARMUP)
        lr, mu = scale * (1 + share * (OUTER_LR - 1)), share * MOMENTUM
        velocity = mu * velocity + mean
        anchor = anchor - lr * (mean + mu * velocity)
        if number % 10 == 0:
            torch.nn.utils.vector_to_parameters(anchor.clone(), parameters)  # else they share memory
            found = validation_batches(tokens, 16, 64, max_tokens=65536)
            curve.append(quality(*total_nats(model, found), tokens.validation_bytes * found.share)["val_loss"])
    return {"val_loss": curve[-1], "curve": curve}


def averaged(deltas: list[torch.Tensor], weights: list[float], kind: str) -> tuple[torch.Tensor, float]:
    """The mean, and a factor for the outer learning rate."""
    if kind == "median":
        limit = torch.stack([delta.norm() for delta in deltas]).median()
        deltas = [delta * min(1.0, float(limit / delta.norm().clamp(min=1e-30))) for delta in deltas]
    mean = sum(w * delta for w, delta in zip(weights, deltas, strict=True)) / sum(weights)
    assert isinstance(mean, torch.Tensor)
    if kind == "norm-preserving":
        norms = statistics.fmean(float(delta.norm()) for delta in deltas)
        mean = mean * (norms / max(float(mean.norm()), 1e-30))
    return mean, {"sqrt": (len(deltas) / 2) ** 0.5, "half": 0.5}.get(kind, 1.0)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def draw(path: str) -> None:
    """What one bad island does: the loss over the rounds, every seed a line; beside it those that still learn."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(10, 4), layout="constrained")
    panels = drawn.subplots(1, 2)
    for name, colour in zip(GROUPS["bad"], COLOURS, strict=False):
        for index, row in enumerate(row for row in rows() if row["name"] == f"bad: {name}"):
            places = range(10, 10 * len(row["curve"]) + 1, 10)
            for axes in panels if max(row["curve"]) < 10 else panels[:1]:
                axes.plot(places, row["curve"], color=colour, label=None if index else name, marker=".")
    panels[0].set_yscale("log")
    quiet(panels[0], "round", title="one of four islands sends noise, a thousand times too large")
    quiet(panels[1], "round", "", title="the same without the plain mean")
    panels[0].legend(fontsize=8, frameon=False)
    drawn.savefig(path, dpi=120, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--figure", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = {(row["name"], row["seed"]) for row in rows()}
    for seed in range(args.seeds):
        for group in args.groups:
            for name, setting in GROUPS[group].items():
                if (f"{group}: {name}", seed) not in known:
                    row = {"name": f"{group}: {name}", "seed": seed, **run(setting, seed)}
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    if args.show:
        found = defaultdict(list)
        for row in rows():
            found[row["name"]].append(row["val_loss"])
        for name, losses in found.items():
            spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
            print(f"{name:60} {statistics.fmean(losses):.4f}{spread} ({len(losses)})")
    if args.figure:
        draw(args.figure)


if __name__ == "__main__":
    main()
