"""Islands that come and go learn one function, joined by nothing but a folder or a bucket.

    python examples/elastic.py                         in one terminal
    python examples/elastic.py                         in another one, at any time: it joins
    python examples/elastic.py s3://bucket/run         islands on any machines that reach the bucket

Ctrl-C ends one of them, and the others go on. Start it again: it joins again. End all of them: the next one goes on
where they were. kill -9 is no different, but for the steps that nobody has seen and a pause of one `patience`. The run
is over when its clock is at 3000; another run needs another folder. Install isles[store] for it.
"""

import signal
import sys
import threading
import time

import torch
from torch import nn

import isles


def train(url, steps):
    """An ordinary training loop that ends after Ctrl-C, or when the clock of the run is at `steps`."""
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # it ends after a step, so nothing is half done
    torch.set_num_threads(1)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(nn.Linear(2, 64), *layers, nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    world = isles.StoreWorld(url)  # 1
    method = isles.Method.streaming(sync_every=30, fragments=3, overlap=5)  # 2
    with isles.DiLoCo(model, optimizer, method, world=world) as diloco:  # 3: now the weights are the run's
        torch.manual_seed(world.rank)  # a number is given once: no two islands ever see the same data
        print(f"island {world.rank} starts at clock {diloco.clock}", flush=True)
        while diloco.clock < steps and not stop.is_set():  # the clock is the run's, not this island's
            before = diloco.clock
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - before / steps)
            points = torch.rand(256, 2) * 2 - 1
            loss = (model(points) - target(points)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)  # as if the model were larger
            if before // 150 < diloco.clock // 150:
                report(diloco, model)
    report(diloco, model)  # here the model is the global one
    print(f"island {world.rank} has left after {diloco.step_count} steps of its own", flush=True)


def report(diloco, model):
    """One line about the run, as this island sees it."""
    with diloco.global_model():
        everywhere = torch.rand(4096, 2, generator=torch.Generator().manual_seed(9)) * 2 - 1
        error = (model(everywhere) - target(everywhere)).square().mean().item()
    islands, sent = diloco.stats.islands, diloco.stats.bytes_sent
    print(f"clock {diloco.clock}: islands in the last round {islands}, error {error:.5f}, sent {sent:,} B", flush=True)


def target(points):
    """Something wavy, on the square from -1 to 1."""
    return torch.sin(4 * points[:, :1]) * torch.cos(3 * points[:, 1:])


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "runs/elastic"
    train(url, steps=int(sys.argv[2]) if len(sys.argv) > 2 else 3000)
