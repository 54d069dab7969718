"""torchrun on every island, as docs/multi-machine.md tells a user to start it on several machines.

What an island prints goes to `node-I.log` in a folder of the run. `wait` returns when all have ended; when one has
failed, the others get as long as the timeout says, since each of them has to notice by itself.

The processes that torchrun has started can be stopped and resumed. torchrun itself keeps running: its heartbeats tell
the others that it is alive.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from isles.lab.namespaces import children
from isles.lab.network import DEVICE, Network

PORT = 29500
PORT_ALONE = 29501
"""Of an island that trains alone, maybe while the run is stopped."""


@dataclass
class Node:
    """A command on an island."""

    island: int
    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace")

    def complaint(self) -> str:
        """The line that says why it failed: isles' own one, or else the last."""
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        own = [line for line in lines if re.match(r"isles[\w. ]*: ", line)]
        return (own or lines or ["no message"])[-1]

    def stop(self) -> None:
        """Stops the processes that torchrun has started, wherever they are, until `go_on`."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resumes them."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        starters = children(self.process.pid) if self.process.poll() is None else []
        for starter in starters:  # nsenter has started torchrun, and torchrun the workers
            for worker in children(starter):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, number)


def torchrun(
    network: Network, island: int, program: Sequence[str], *, ranks: int = 1, alone: bool = False
) -> list[str]:
    """The command that starts a program (`-m module` or a file, and its flags) on one island; on it `alone`, or as
    one of all.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1" if alone else str(len(network.islands))),
        *("--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d"),
        *("--rdzv-endpoint", f"{network.address(island if alone else 0)}:{PORT_ALONE if alone else PORT}"),
        *("--rdzv-conf", f"is_host={int(alone or island == 0)}"),
        *("--rdzv-id", "isles"),
        *("--local-addr", network.address(island)),
        *program,
    ]


def environment(network: Network) -> dict[str, str]:
    """Variables of an island's processes: the interface that leads to the others, and its share of the cores."""
    cores = max(1, (os.cpu_count() or 1) // len(network.islands))
    plain = {name: value for name, value in os.environ.items() if name not in FORGOTTEN}
    return {"OMP_NUM_THREADS": str(cores), **plain, "GLOO_SOCKET_IFNAME": DEVICE}


FORGOTTEN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "ISLES_RENDEZVOUS")
"""Variables of another launcher, which a process must not inherit."""


def start(
    network: Network, folder: Path, commands: Sequence[Sequence[str]], env: Mapping[str, str] | None = None
) -> list[Node]:
    """Starts one command on each island."""
    folder.mkdir(parents=True, exist_ok=True)
    variables = {**environment(network), **(env or {})}
    nodes = []
    for island, command in enumerate(commands):
        log = folder / f"node-{island}.log"
        with log.open("wb") as stream:
            process = network.start(island, command, env=variables, stdout=stream, stderr=stream)
        nodes.append(Node(island, process, log))
    return nodes


def wait(
    nodes: Sequence[Node], *, seconds: float, grace_seconds: float, tick: Callable[[], None] = lambda: None
) -> list[int | None]:
    """Waits until all have ended; returns their exit codes. After `seconds`, or `grace_seconds` after the first has
    failed, a node that still runs has None. `tick` is called now and then.
    """
    deadline = time.monotonic() + seconds
    failed = False
    while any(node.process.poll() is None for node in nodes) and time.monotonic() < deadline:
        if not failed and any(node.process.poll() for node in nodes):
            failed, deadline = True, min(deadline, time.monotonic() + grace_seconds)
        tick()
        time.sleep(0.05)
    return [node.process.poll() for node in nodes]
