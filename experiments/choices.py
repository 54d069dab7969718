"""Choices that the papers leave open, made by training: mixing of Streaming DiLoCo, and the form of the reduction.

Trains a small decoder (0.2M parameters, bytes) on real text for each setting and seed, and evaluates the
outer parameters on held-out text. One line of JSON per run is appended to the results file; what is there
already is not run again.

    python experiments/choices.py --data TRAIN --val VAL --results results/choices.jsonl [--steps 1000] [--seeds 2]
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path

import torch

import isles
from isles.train.model import LADDER, Decoder, language_loss

SETTINGS = {
    "mixing 0": (2, "auto", isles.Method.streaming(sync_every=30, mixing=0.0)),
    "mixing 0.5": (2, "auto", isles.Method.streaming(sync_every=30, mixing=0.5)),
    "4 islands, all-gather": (4, "all-gather", isles.Method.streaming(sync_every=30)),
    "4 islands, reduce-scatter": (4, "reduce-scatter", isles.Method.streaming(sync_every=30)),
    "4 islands, fp32": (4, "all-gather", isles.Method.streaming(sync_every=30, codec="fp32")),
}


def read(path: Path) -> torch.Tensor:
    text = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def windows(tokens: torch.Tensor, generator: torch.Generator, count: int) -> torch.Tensor:
    at = torch.randint(len(tokens) - 129, (count, 1), generator=generator) + torch.arange(129)
    return tokens[at].long()


def run(
    texts: tuple[torch.Tensor, torch.Tensor], islands: int, reduction: str, method: isles.Method, steps: int, seed: int
):
    train, val = texts

    def island(world: isles.LocalWorld) -> float:
        torch.manual_seed(seed)
        model = Decoder(LADDER["micro"], vocabulary=256)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1, t / 100) * (1 - 0.95 * t / steps))
        generator = torch.Generator().manual_seed(seed * 100 + world.rank)
        with isles.DiLoCo(model, optimizer, method, world=world) as diloco:
            for _ in range(steps):
                batch = windows(train, generator, 32 // islands)  # as many tokens in total, however many islands
                language_loss(model(batch[:, :-1]), batch[:, 1:], z_loss=1e-4).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            if world.rank:
                return 0.0
            with diloco.global_model(), torch.no_grad():
                batches = [windows(val, torch.Generator().manual_seed(7 + i), 64) for i in range(16)]
                return sum(language_loss(model(b[:, :-1]), b[:, 1:]).item() for b in batches) / len(batches)

    return isles.run_local(island, islands, reduction=reduction)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="training text, plain or .xz")
    parser.add_argument("--val", type=Path, required=True, help="held-out text, plain or .xz")
    parser.add_argument("--results", type=Path, default=Path("experiments/results/choices.jsonl"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    train, val = read(args.data), read(args.val)
    for seed in range(args.seeds):
        for name, (islands, reduction, method) in SETTINGS.items():
            if any((row["setting"], row["seed"], row["steps"]) == (name, seed, args.steps) for row in done):
                continue
            loss = run((train, val), islands, reduction, method, args.steps, seed)
            row = {"setting": name, "seed": seed, "steps": args.steps, "val_loss": round(loss, 5)}
            print(json.dumps(row), flush=True)
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
