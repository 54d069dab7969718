"""From accelerate's LocalSGD to isles: one line changes, and `local_sgd.step()` goes.

    -   with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=20) as local_sgd:
    +   with isles.DiLoCo(model, optimizer, isles.Method.gradual(sync_every=20), world=world):

    python examples/accelerate_local_sgd.py                                    both islands on this machine
    accelerate launch examples/accelerate_local_sgd.py --island 0 --address HOST:29500     on the first machine, HOST
    accelerate launch examples/accelerate_local_sgd.py --island 1 --address HOST:29500     on the second

LocalSGD averages the weights of all processes of one launch, in full precision, while all of them wait. With isles each
launch is an island, and accelerate works inside it as ever: DDP over its GPUs, mixed precision, gradient accumulation.
Between the islands 4 bits of each weight go over the link while training goes on. Island 0 then trains the same model
without isles for the same samples, and prints both errors.
"""

import argparse
import contextlib
import subprocess
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import isles

parser = argparse.ArgumentParser()
parser.add_argument("--island", type=int, help="this one's number; left out: start all of them here")
parser.add_argument("--islands", type=int, default=2)
parser.add_argument("--address", default="127.0.0.1:29500", help="HOST:PORT of island 0's machine")
parser.add_argument("--steps", type=int, default=400)
BATCH, WIDTH = 64, 64


def target(points):
    """Something wavy, on the square from -1 to 1."""
    return torch.sin(4 * points[:, :1]) * torch.cos(3 * points[:, 1:])


def points(count, seed):
    """Random points of the square."""
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def train(data, batch_size, world=None):
    """The loop of accelerate's manual; without a world, without isles."""
    torch.manual_seed(0)  # the same model on every island
    accelerator = Accelerator(gradient_accumulation_steps=2)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(nn.Linear(2, WIDTH), *layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size, shuffle=True))
    method = isles.Method.gradual(sync_every=20)
    with isles.DiLoCo(model, optimizer, method, world=world) if world else contextlib.nullcontext() as diloco:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - target(batch)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    everywhere = points(4096, 9).to(accelerator.device)
    with torch.no_grad():
        return (model(everywhere) - target(everywhere)).square().mean().item(), diloco


def main(args):
    """One island."""
    torch.set_num_threads(1)
    data = points(args.islands * args.steps * 2 * BATCH, 1)
    world = isles.TorchWorld.connect(args.address, args.island, args.islands)
    error, diloco = train(data[args.island :: args.islands], BATCH, world)
    world.close()
    if args.island == 0:
        print(f"{args.islands} islands: error {error:.5f}; each sent {diloco.stats.bytes_sent:,} bytes")
        print(f"without isles, for the same samples: error {train(data, args.islands * BATCH)[0]:.5f}")


if __name__ == "__main__":
    arguments = parser.parse_args()
    if arguments.island is not None:
        main(arguments)
    else:
        commands = [[sys.executable, *sys.argv, "--island", str(number)] for number in range(arguments.islands)]
        started = [subprocess.Popen(command) for command in commands]
        sys.exit(max(process.wait() for process in started))
