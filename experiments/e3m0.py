"""Which E3M0? The papers say 4 bits, sign and three exponent bits, and nothing about scale, rounding, zero or blocks.

Trains a small decoder on real text with plain DiLoCo in fp32, keeps the islands' outer gradients of several
rounds, and asks of every variant what it does to the *mean*, which is what the outer optimizer sees:

    error   |mean of decoded - mean| / |mean|
    gain    <mean of decoded, mean> / <mean, mean>: 1 is unbiased, below 1 the outer step is shortened

    python experiments/e3m0.py --data FILE [--islands 2] [--rounds 12]

Prints a table; docs/log.md has the finding.
"""

from __future__ import annotations

import argparse
import itertools
import lzma
from pathlib import Path

import torch
from torch import Tensor

import isles
from isles.train.model import LADDER, Decoder, language_loss


def outer_gradients(text: bytes, islands: int, rounds: int, sync_every: int) -> list[list[Tensor]]:
    """[round][island] -> flat outer gradient of the whole model."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    kept: dict[int, dict[int, Tensor]] = {}

    def train(world: isles.LocalWorld) -> None:
        torch.manual_seed(0)
        model = Decoder(LADDER["micro"], vocabulary=256)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99))
        generator = torch.Generator().manual_seed(world.rank)
        send = world.start

        def start(payload):  # look at what goes by
            if payload.round:
                kept.setdefault(payload.round, {})[world.rank] = payload.codec.decode(payload.body, payload.numel)
            return send(payload)

        world.start = start
        with isles.DiLoCo(model, optimizer, isles.Method.diloco(sync_every=sync_every), world=world):
            for _ in range(rounds * sync_every):
                at = torch.randint(len(tokens) - 129, (16, 1), generator=generator) + torch.arange(129)
                batch = tokens[at].long()
                language_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    isles.run_local(train, islands)
    return [[kept[r][i] for i in range(islands)] for r in sorted(kept)]


def quantise(x: Tensor, *, block: int, zero: bool, rounding: str, scale: str, top: float) -> Tensor:
    """Encode and decode: 7 powers of two and zero, or 8; the largest level is `top` times the largest magnitude."""
    rows = torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)
    largest = rows.abs().amax(1, keepdim=True)
    if scale == "bf16":
        unit = (largest * top).to(torch.bfloat16).float()
    else:  # a power of two: one byte
        unit = torch.exp2(torch.ceil(torch.log2(largest * top)))
    unit = torch.where(unit > 0, unit, 1.0)
    y = rows.abs() / unit
    lowest = -6 if zero else -7
    if rounding == "stochastic":
        exponent = torch.floor(torch.log2(y.clamp(min=1e-30)))
        level = exponent + (torch.rand_like(y) < y / torch.exp2(exponent) - 1)
    else:
        exponent = torch.floor(torch.log2(y.clamp(min=1e-30)))
        level = exponent + (y / torch.exp2(exponent) >= {"nearest": 1.5, "log": 2**0.5}[rounding])
    value = torch.exp2(level.clamp(lowest, 0))
    if zero:
        small = y < 2.0**lowest
        keep = torch.rand_like(y) < y * 2.0**-lowest if rounding == "stochastic" else y >= 2.0 ** (lowest - 1)
        value = torch.where(small, torch.where(keep, 2.0**lowest, 0.0), value)
    return (value * unit * rows.sign()).view(-1)[: len(x)]


def judge(rounds: list[list[Tensor]], **variant) -> tuple[float, float, float]:
    torch.manual_seed(1)
    errors, gains, single = [], [], []
    for gradients in rounds:
        decoded = [quantise(g, **variant) for g in gradients]
        mean, seen = torch.stack(gradients).mean(0), torch.stack(decoded).mean(0)
        errors.append(((seen - mean).norm() / mean.norm()).item())
        gains.append((seen @ mean / (mean @ mean)).item())
        single.append(((decoded[0] - gradients[0]).norm() / gradients[0].norm()).item())
    average = lambda values: sum(values) / len(values)
    return average(errors), average(gains), average(single)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a text file, plain or .xz")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sync-every", type=int, default=30)
    args = parser.parse_args()
    text = lzma.decompress(args.data.read_bytes()) if args.data.suffix == ".xz" else args.data.read_bytes()
    rounds = outer_gradients(text, args.islands, args.rounds, args.sync_every)
    print(f"{args.islands} islands, {len(rounds[0][0]):,} parameters, rounds of {args.sync_every} steps")
    for name, part in (("first 3 rounds", rounds[:3]), ("last 3 rounds", rounds[-3:])):
        print(f"\n{name}\nblock   bits  zero   rounding  scale   top   error   gain    one")
        for block, zero, rounding, (scale, top) in itertools.product(
            (64, 128, 256, 512),
            (True, False),
            ("nearest", "log", "stochastic"),
            (("bf16", 1.0), ("bf16", 0.9), ("bf16", 0.8), ("bf16", 0.7), ("power", 1.0)),
        ):
            bits = 4 + (16 if scale == "bf16" else 8) / block
            if block != 128 and (top not in (1.0, 0.8) or rounding == "log" or not zero):
                continue
            error, gain, single = judge(part, block=block, zero=zero, rounding=rounding, scale=scale, top=top)
            variant = f"{block:>5} {bits:>6.3f} {zero!s:>5} {rounding:>10} {scale:>6} {top:>5}"
            print(f"{variant} {error:>7.3f} {gain:>6.3f} {single:>6.3f}")


if __name__ == "__main__":
    main()
