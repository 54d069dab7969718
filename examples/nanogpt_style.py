"""A training loop of the kind that everybody has, on two islands: what isles adds to it are the lines marked with +.

    torchrun --nproc-per-node 2 examples/nanogpt_style.py                      both islands on this machine
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/nanogpt_style.py
                                                                               the same line on two machines
    python examples/nanogpt_style.py                                           one island alone

The diff:

    +   method = isles.Method.gradual(sync_every=20)
    +   with isles.DiLoCo(model, optimizer, method) as diloco:
            for step in range(steps):
                ...                                      the loop as it was
                if step % eval_every == 0:
    +               with diloco.global_model():
                        evaluate(model)

A small GPT learns the source of Python's standard library, byte by byte. Island 0 then trains the same model without
isles, with batches as large as those of all islands together, so for the same tokens and steps, and prints both losses.
"""

import argparse
import contextlib
import itertools
import math
import os

import torch
import torch.distributed as dist
from torch import nn

import isles
from isles.train.text import documents

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--sync-every", type=int, default=20)
parser.add_argument("--width", type=int, default=96)
args = parser.parse_args()
LENGTH, BATCH, LAYERS, HEADS, LEARNING_RATE = 64, 8, 4, 4, 3e-3


class Block(nn.Module):
    """A layer."""

    def __init__(self, width):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Bytes and the bytes after them in, the loss out."""

    def __init__(self, width):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x, y):
        h = self.bytes(x) + self.places.weight
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def get_batch(data, size, generator):
    """Rows from random places."""
    starts = torch.randint(len(data) - LENGTH, (size,), generator=generator)
    rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def evaluate(model, data):
    """The mean loss over the same 64 rows each time."""
    generator = torch.Generator().manual_seed(0)
    return sum(model(*get_batch(data, 8, generator)).item() for _ in range(8)) / 8


def train(data, held_out, batch_size, island, with_isles):
    """The loop."""
    torch.manual_seed(0)  # the same model on every island
    model = GPT(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1 + island)
    joined = contextlib.nullcontext()
    if with_isles:
        method = isles.Method.gradual(sync_every=args.sync_every)  # +
        joined = isles.DiLoCo(model, optimizer, method)  # +
    with joined as diloco:  # +
        for step in range(args.steps):
            warm, done = min(1.0, (step + 1) / 20), step / args.steps
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * warm * (0.55 + 0.45 * math.cos(math.pi * done))
            model(*get_batch(data, batch_size, generator)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % max(1, args.steps // 4) == 0:
                with diloco.global_model() if diloco else contextlib.nullcontext():  # +
                    loss = evaluate(model, held_out)
                if island == 0:
                    print(f"step {step + 1}: loss {loss:.4f}")
    return model, evaluate(model, held_out), diloco


if __name__ == "__main__":
    torch.set_num_threads(1)
    island, islands = 0, 1
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        island, islands = dist.get_rank(), dist.get_world_size()
    text = itertools.chain.from_iterable(document.text.encode() for document in documents("stdlib"))
    data = torch.tensor(list(itertools.islice(text, 1_000_000)))
    data, held_out = data[:-50_000], data[-50_000:]
    own = data.chunk(islands)[island]  # its own part of the text
    model, loss, diloco = train(own, held_out, BATCH, island, with_isles=True)
    if island == 0:
        parameters, sent = sum(parameter.numel() for parameter in model.parameters()), diloco.stats.bytes_sent
        _, without, _ = train(data, held_out, islands * BATCH, island, with_isles=False)
        fewer = f", {4 * parameters * args.steps / sent:.0f}x fewer than fp32 gradients every step" if sent else ""
        print(f"islands: {islands}, loss {loss:.4f}; each sent {sent:,} bytes for {parameters:,} parameters{fewer}")
        print(f"without isles, for the same tokens: loss {without:.4f}")
    if islands > 1:
        dist.destroy_process_group()
