"""One island of a small training under torchrun: writes when each step began and ended, and its weights at the end.

Before some rounds it stops until the test lets it go on, so that what happens to the link happens in a known round
however busy the machine is. `train` is the training itself; a test calls it with threads for islands, on no network at
all, and must get the same weights to the last bit.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import isles

LAYERS, WIDTH, SYNC_EVERY = 4, 160, 4
METHOD = isles.Method.diloco(sync_every=SYNC_EVERY)


def train(world, rounds: int, before_round=lambda number: None, after_step=lambda **times: None) -> torch.Tensor:
    """All weights, after so many rounds in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(world.rank)
    with isles.DiLoCo(model, optimizer, METHOD, world=world):
        for step in range(1, rounds * SYNC_EVERY + 1):
            if step % SYNC_EVERY == 1:
                before_round(step // SYNC_EVERY)
            begin = time.monotonic()
            model(torch.randn(8, WIDTH, generator=data)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(begin=begin, end=time.monotonic())
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gate(folder: Path, number: int) -> Path:
    """The file that lets every island begin this round, where a test holds islands before it."""
    return folder / f"begin-{number}"


def main(folder: Path, rounds: int, held: set[int], timeout_seconds: float) -> None:
    def wait_at_gate(number: int) -> None:
        while number in held and not gate(folder, number).exists():
            time.sleep(0.01)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with (folder / f"steps-{rank}.jsonl").open("w", buffering=1) as steps:
        weights = train(
            isles.TorchWorld(timeout=timeout_seconds),
            rounds,
            wait_at_gate,
            lambda **times: print(json.dumps(times), file=steps),
        )
    torch.save(weights, folder / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), {int(number) for number in sys.argv[3].split(",")}, float(sys.argv[4]))
