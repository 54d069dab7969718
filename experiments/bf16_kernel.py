"""bf16 on one thread: the kernels that numba compiles against `tensor.to` alone and against the codec in PyTorch.

    python experiments/bf16_kernel.py

CPU time, the best of 25 turns: other programs on the machine disturb it less than wall time.
"""

import time

import torch

from isles.bench.kernels import without_kernels
from isles.wire import fused
from isles.wire.codecs import codecs

VALUES, TURNS = 10_000_000, 25


def main():
    torch.set_num_threads(1)
    fused.warm_up()
    codec, values = codecs["bf16"], torch.randn(VALUES) * 1e-3
    payload = codec.encode(values)
    out, back, total = torch.empty_like(payload), torch.empty(VALUES), torch.zeros(VALUES)
    half = torch.empty(VALUES, dtype=torch.bfloat16)

    def in_pytorch(action, *arguments):
        with without_kernels():
            action(*arguments)

    actions = {
        "copy_": lambda: back.copy_(values),
        "to bfloat16": lambda: half.copy_(values),
        "encode, kernel": lambda: codec.encode(values, out),
        "encode, PyTorch": lambda: in_pytorch(codec.encode, values, out),
        "to float32": lambda: back.copy_(half),
        "decode, kernel": lambda: codec.decode(payload, VALUES, back),
        "accumulate, kernel": lambda: codec.accumulate(payload, total, 0.5),
        "accumulate, PyTorch": lambda: in_pytorch(codec.accumulate, payload, total, 0.5),
    }
    best = dict.fromkeys(actions, float("inf"))
    for _ in range(TURNS):
        for name, action in actions.items():
            begin = time.thread_time()
            action()
            best[name] = min(best[name], time.thread_time() - begin)
    for name, seconds in best.items():
        print(f"{name:<20} {seconds * 1e3:7.2f} ms   {best['copy_'] / seconds:6.2f}x")


if __name__ == "__main__":
    main()
