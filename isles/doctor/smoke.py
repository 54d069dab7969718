"""Two islands learn something, as threads of this process and as two processes over gloo on the loopback interface.

They end with the same model, to the last bit, in threads and in processes: that is compared. `python -m
isles.doctor.smoke` is one of the two processes.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import isles
from isles.wire.world import World

STEPS, SYNC_EVERY = 10, 4
SECONDS = 120.0
"""After so long, two processes that have not come to their end are given up."""
FINE = "ok"


def train(device: torch.device, world: World | None = None) -> str:
    """One island: an ordinary loop. Returns a digest of the model."""
    island = world.rank if world else torch.distributed.get_rank()
    torch.manual_seed(0)  # the same model everywhere
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.Generator().manual_seed(1 + island)
    method = isles.Method.streaming(sync_every=SYNC_EVERY, fragments=2)
    with isles.DiLoCo(model, optimizer, method, world=world):
        for _ in range(STEPS):
            batch = torch.randn(8, 16, generator=batches).to(device)
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])
    if not torch.isfinite(state).all():
        raise ValueError("the weights are not finite")
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


def threads(device: torch.device) -> tuple[str, str]:
    """What became of two islands in threads, in words, and the digest of their model."""
    try:
        first, second = isles.run_local(lambda world: train(device, world), islands=2)
    except Exception as error:  # of whatever kind: it goes into the report
        return _line(error), ""
    return (FINE if first == second else "the two islands end with different models"), first


def processes(device: torch.device, expected: str, loopback: str | None) -> str:
    """The same for two processes; on a CPU they have to end with the model of the threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = loopback
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "isles.doctor.smoke", str(Path(folder) / "store"), str(device)]
        started = [
            subprocess.Popen(
                [*command, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=SECONDS) for process in started]
        except subprocess.TimeoutExpired:
            return f"no end after {SECONDS:.0f} seconds"
        finally:
            for process in started:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            last = errors.strip().splitlines() or ["no message"]
            return f"exit code {process.returncode}: {last[-1][:200]}"
    digests = {output.strip().splitlines()[-1] for output, _ in outputs}
    if len(digests) > 1:
        return "the two islands end with different models"
    if expected and digests != {expected}:
        return "processes end with another model than threads"
    return FINE


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}".splitlines()[0][:200]


def main() -> None:
    """One of the two processes."""
    store, device, rank = sys.argv[1], torch.device(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    print(train(device))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
