"""Two islands learn one function, each from its own half of the data, and agree on one model.

    torchrun --nproc-per-node 2 examples/two_islands.py      two processes, joined by torch.distributed
    python examples/two_islands.py                           the same in two threads of one process

Both print the same numbers. The three lines that isles adds to the loop are marked.
"""

import os

import torch
from torch import nn

import isles

STEPS, SYNC_EVERY = 600, 30


def train(world=None):
    """An ordinary training loop; `world` is None under torchrun, where isles finds the other islands by itself."""
    island = world.rank if world else torch.distributed.get_rank()
    torch.manual_seed(0)  # the same model everywhere ...
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(nn.Linear(2, 64), *layers, nn.Linear(64, 1))
    torch.manual_seed(1 + island)  # ... and different data
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    method = isles.Method.streaming(sync_every=SYNC_EVERY, fragments=3)  # 1
    with isles.DiLoCo(model, optimizer, method, world=world) as diloco:  # 2
        for step in range(1, STEPS + 1):
            points = own_half(island)
            loss = (model(points) - target(points)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 150 == 0:
                with diloco.global_model():  # 3
                    everywhere = torch.rand(4096, 2, generator=torch.Generator().manual_seed(9)) * 2 - 1
                    error = (model(everywhere) - target(everywhere)).square().mean().item()
                if island == 0:
                    sent = diloco.stats.bytes_sent
                    print(f"step {step}: global model's error on both halves {error:.4f}, sent {sent:,} bytes")
    # After the with block every island has the identical global model.
    if island == 0:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        ratio = 4 * parameters * STEPS / diloco.stats.bytes_sent
        bits = diloco.stats.payload_bits_per_parameter
        print(f"{parameters:,} parameters at {bits:.2f} bits: {ratio:.0f}x fewer bytes than fp32 gradients every step")
    return [parameter.detach().clone() for parameter in model.parameters()]


def own_half(island):
    """Random points: island 0 sees x from 0 to 1, island 1 from -1 to 0."""
    return torch.rand(256, 2) * torch.tensor([1.0, 2.0]) - torch.tensor([float(island), 1.0])


def target(points):
    """Something wavy, on the square from -1 to 1."""
    return torch.sin(4 * points[:, :1]) * torch.cos(3 * points[:, 1:])


if __name__ == "__main__":
    if "RANK" in os.environ:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        train()
        torch.distributed.destroy_process_group()
    else:
        left, right = isles.run_local(train, islands=2)
        same = all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
        print(f"both islands hold the same model: {same}")
