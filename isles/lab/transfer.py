"""A transfer before the run: does every link carry what it should, in both directions at once?

Every island sends to the next one, all at the same time, so that each uplink and each downlink is full, as in the
rings of a collective. What counts is what the receiver gets of TCP's payload, after a warm-up in which TCP finds the
rate. This file is also the program that runs on the islands; it needs nothing but Python.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isles.lab.network import Network

PORT = 29400
SECONDS, WARM_UP_SECONDS = 1.5, 0.75
CHUNK_BYTES = 1 << 16
TOLERANCE = 0.1
"""How far a link may be from its nominal rate, headers taken off."""


def measure(network: Network, seconds: float = SECONDS, warm_up_seconds: float = WARM_UP_SECONDS) -> list[float]:
    """Bits of payload per second from each island to the next one."""
    islands = range(len(network.islands))
    if len(islands) < 2:
        return []
    try:
        with filled(network, seconds, warm_up_seconds) as receivers:
            found = [json.loads(receiver.communicate(timeout=60 + 10 * seconds)[0]) for receiver in receivers]
    except (subprocess.TimeoutExpired, ValueError):
        raise OSError("nothing came through in a transfer from island to island before the run") from None
    return [found[(island + 1) % len(islands)]["bits_per_second"] for island in islands]


@contextlib.contextmanager
def filled(
    network: Network, seconds: float = math.inf, warm_up_seconds: float = 0.0
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """In the block every island sends to the next one all the time, or until its receiver has counted for so long."""
    islands = range(len(network.islands))
    program = [sys.executable, "-I", __file__]
    receivers: list[subprocess.Popen[bytes]] = []
    senders: list[subprocess.Popen[bytes]] = []
    try:
        for island in islands:
            receive = [*program, "receive", network.address(island), str(seconds), str(warm_up_seconds)]
            receivers.append(network.start(island, receive, stdout=subprocess.PIPE))
        for receiver in receivers:
            assert receiver.stdout is not None
            receiver.stdout.readline()  # it listens
        for island in islands:
            senders.append(network.start(island, [*program, "send", network.address((island + 1) % len(islands))]))
        yield receivers
    finally:
        for process in (*receivers, *senders):
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


class LinkError(OSError):
    """A link does not carry its nominal rate."""


def verify(network: Network, attempts: int = 3) -> list[float]:
    """As `measure`; raises LinkError if a link is not what it should be. Several attempts: machines are busy."""
    for attempt in range(1, attempts + 1):
        measured = measure(network)
        wanted = [shape.goodput_bits_per_second for shape in network.shapes]
        slowest = [min(own, wanted[(island + 1) % len(wanted)]) for island, own in enumerate(wanted)]
        off = max((abs(is_ / should - 1) for is_, should in zip(measured, slowest, strict=True)), default=0.0)
        if off <= TOLERANCE or any(shape.loss for shape in network.shapes):
            break
        if attempt == attempts:
            rates = ", ".join(f"{rate / 1e6:.4g}" for rate in measured)
            raise LinkError(
                f"the links carry {rates} Mbit/s where {min(slowest) / 1e6:.4g} were expected: this machine is too "
                "busy, or too slow, to shape them so; try a lower --bandwidth"
            )
    return measured


def _receive(address: str, seconds: float, warm_up_seconds: float) -> None:
    """Counts what one sender sends, for so long, after a warm-up."""
    with socket.create_server((address, PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.recv(CHUNK_BYTES)
        begin = time.monotonic()
        while time.monotonic() < begin + warm_up_seconds:
            connection.recv(CHUNK_BYTES)
        num_bytes, begin = 0, time.monotonic()
        while (now := time.monotonic()) < begin + seconds or num_bytes < CHUNK_BYTES:
            num_bytes += len(connection.recv(CHUNK_BYTES))
    print(json.dumps({"bits_per_second": 8 * num_bytes / (now - begin)}))


def _send(address: str) -> None:
    """Sends until the receiver closes the connection."""
    data = bytes(CHUNK_BYTES)
    try:
        with socket.create_connection((address, PORT)) as connection:
            while True:
                connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
    else:
        _send(sys.argv[2])
