"""How long a reduce-scatter and an all-gather take on a shaped link, against what the link needs for the bytes.

    isles lab --islands 4 --bandwidth 50Mbit --command -- \
        python experiments/exchange.py {island} {islands} {host} {port} {interface}

Every way moves the same bytes: M - 1 pieces out of every island, and into it. Island 0 prints milliseconds, in
node-0.log of the laboratory's folder.
"""

import itertools
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

PIECE_BYTES = 441_000  # a fragment of 3.4M parameters in e3m0, on four islands
REPEATS = 8


def in_slices(start, length, count):
    """Starts one collective for each slice, then waits for all."""
    edges = [length * place // count for place in range(count + 1)]
    for work in [start(slice(*edge)) for edge in itertools.pairwise(edges)]:
        work.wait()


def main() -> None:
    rank, size, host, port, interface = (int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=size)
    pieces = torch.randint(256, (size, PIECE_BYTES), dtype=torch.uint8)
    received = torch.empty_like(pieces)

    def to_all_at_once(cut):
        outgoing = pieces[:, cut].contiguous()
        return dist.all_to_all_single(torch.empty_like(outgoing), outgoing, async_op=True)

    def collect(cut):
        return dist.all_gather([row[cut] for row in received], pieces[rank, cut], async_op=True)

    def in_pairs():
        for distance in range(1, size):
            to, origin = (rank + distance) % size, (rank - distance) % size
            for work in (dist.irecv(received[origin], origin), dist.isend(pieces[to], to)):
                work.wait()

    ways = {
        "scatter, all to all at once": lambda: in_slices(to_all_at_once, PIECE_BYTES, 1),
        "scatter, all to all at once, 8 slices": lambda: in_slices(to_all_at_once, PIECE_BYTES, 8),
        "scatter, in pairs": in_pairs,
        "gather, in a ring": lambda: in_slices(collect, PIECE_BYTES, 1),
        "gather, in a ring, 8 slices": lambda: in_slices(collect, PIECE_BYTES, 8),
    }
    for name, way in ways.items():
        seconds = []
        for _ in range(1 + REPEATS):  # the first one opens connections
            dist.barrier()
            begin = time.perf_counter()
            way()
            seconds.append(time.perf_counter() - begin)
        if rank == 0:
            least, middle, most = min(seconds[1:]), statistics.median(seconds[1:]), max(seconds[1:])
            print(f"{name:<40} {1e3 * least:4.0f} to {1e3 * most:4.0f} ms, median {1e3 * middle:4.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
