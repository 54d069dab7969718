"""How much of the distance to data-parallel is the outer optimizer's, in a short run?

A decoder of 0.3M parameters on the source of Python's standard library, two islands, 600 steps, one seed.

    python experiments/outer.py

Prints a table; docs/log.md has the finding.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

import isles
from isles.train.batches import Batches, validation_batches
from isles.train.config import TrainConfig
from isles.train.evals import validation
from isles.train.model import LADDER, Decoder
from isles.train.step import backward, inner_optimizer, update
from isles.train.tokens import TokenSet, prepare

STEPS, BATCH, LENGTH = 600, 4, 64
SETTINGS = {
    "data-parallel": None,
    "outer lr 0.4, momentum 0.9": isles.Method.streaming(sync_every=30),
    "outer lr 0.2, momentum 0.9": isles.Method.streaming(sync_every=30, outer_lr=0.2),
    "outer lr 0.7, momentum 0.5": isles.Method.streaming(sync_every=30, outer_lr=0.7, outer_momentum=0.5),
    "outer lr 1, no momentum": isles.Method.streaming(sync_every=30, outer_lr=1.0, outer_momentum=0.0),
    "0.4 and 0.9, H = 10": isles.Method.streaming(sync_every=10),
    "0.4 and 0.9, mixing 0": isles.Method.streaming(sync_every=30, mixing=0.0),
    "0.4 and 0.9, fp32": isles.Method.streaming(sync_every=30, codec="fp32"),
}


def train(tokens: TokenSet, method: isles.Method | None, config: TrainConfig) -> float:
    """Validation loss of the global model; data-parallel is one island with the batches of both."""
    islands = 1 if method is None else 2

    def island(world: isles.LocalWorld) -> float:
        batch = BATCH * 2 // islands
        batches = Batches(tokens, seed=0, island=world.rank, islands=islands, batch_size=batch, sequence_length=LENGTH)
        torch.manual_seed(0)
        model = Decoder(LADDER["micro"], tokens.vocabulary)
        optimizer = inner_optimizer(model, config)
        with isles.DiLoCo(model, optimizer, method, world=world) if method else nullcontext():
            for step in range(config.steps):
                backward(model, batches.at(step), config, segments=True)
                update(model, optimizer, config, step)
        seen = validation_batches(tokens, 32, LENGTH, max_tokens=32768)
        return validation(model, seen, tokens.validation_bytes)["val_loss"]

    return isles.run_local(island, islands)[0]


def main() -> None:
    torch.set_num_threads(1)
    tokens = prepare("stdlib", vocabulary=1024)
    for rate in (3e-3, 1e-3):
        print(f"inner learning rate {rate:g}")
        config, base = TrainConfig(steps=STEPS, learning_rate=rate, warmup_steps=60), 0.0
        for name, method in SETTINGS.items():
            loss = train(tokens, method, config)
            base = base or loss
            print(f"{name:<28} {loss:.4f}  {loss / base - 1:+.1%}", flush=True)


if __name__ == "__main__":
    main()
