"""Golden trajectories: a few weights of a tiny fixed run, step by step, for every preset in fp32 and in e3m0.

A change of the engine that is meant to leave the numbers alone has to leave every bit of them alone; a change that is
meant to change them shows in the difference of these files. To write them again, after having made sure of that:

    python -m tests.golden

The run has no matrix product, no random generator but for whole numbers, and an inner learning rate of one, so it gives
the same bits on every processor. Each preset is one file, `golden/PRESET.json`: for each codec, for each island, for
each step, some weights as hexadecimal floats, and a checksum of all of them; the last is the model after `finish()`.
"""

from __future__ import annotations

import json
import pathlib
import zlib

import torch

import isles
from tests.reference import Tower, toy_backward

FOLDER = pathlib.Path(__file__).parent / "golden"
CODECS = ("fp32", "e3m0")
METHODS = {
    "diloco": lambda codec: isles.Method.diloco(sync_every=4, codec=codec),
    "streaming": lambda codec: isles.Method.streaming(sync_every=5, fragments=3, overlap=2, codec=codec),
    "gradual": lambda codec: isles.Method.gradual(
        sync_every=5, fragments=3, overlap=2, dense_start=[(2, 1), (2, 2)], warmup_rounds=3, codec=codec
    ),
    "delayed": lambda codec: isles.Method.delayed(sync_every=4, fragments=2, codec=codec),
    "eager": lambda codec: isles.Method.eager(sync_every=4, fragments=2, codec=codec),
}
ISLANDS, STEPS = 2, 14


def look_at(model: torch.nn.Module) -> list[str]:
    """One weight from outside the layers and one from each layer, so that every fragment is seen; and all together."""
    chosen = (model.embedding.weight[7, 3], model.layers[0].weight[2, 5], model.layers[1].weight[4, 1])
    all_bytes = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return [*(weight.item().hex() for weight in chosen), f"{zlib.crc32(all_bytes):08x}"]


def trajectory(preset: str, codec: str) -> list[list[list[str]]]:
    """[island][step][weight]."""

    def island(world: isles.LocalWorld) -> list[list[str]]:
        model = Tower(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        seen = []
        with isles.DiLoCo(model, optimizer, METHODS[preset](codec), world=world, weight=1.0 + world.rank):
            for step in range(1, STEPS + 1):
                toy_backward(model, world.rank, step)
                optimizer.step()
                seen.append(look_at(model))
        return [*seen, look_at(model)]

    return isles.run_local(island, ISLANDS)


def file_of(preset: str) -> pathlib.Path:
    return FOLDER / f"{preset}.json"


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for preset in METHODS:
        found = {codec: trajectory(preset, codec) for codec in CODECS}
        # One line per step, so that a difference can be read.
        text = json.dumps(found).replace("[[[", "[\n[\n[").replace("]], [[", "]\n], [\n[").replace("], [", "],\n[")
        file_of(preset).write_text(text.replace("]]]", "]\n]\n]") + "\n")


if __name__ == "__main__":
    write()
