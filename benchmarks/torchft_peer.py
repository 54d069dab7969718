"""The peer: the model, data, optimizer and seed of `isles train`, synchronised by torchft's DiLoCo instead of isles.

One process per island, each started like any command, so that it runs in network namespaces as isles does:

    python benchmarks/torchft_peer.py --island 0 --islands 2 --lighthouse 10.0.0.1:29510 FLAGS --json
    python benchmarks/torchft_peer.py --island 1 --islands 2 --lighthouse 10.0.0.1:29510 FLAGS --json

FLAGS are those of `isles train`, for the run and for the method. Fragments are cut as isles cuts them, the outer
optimizer is torch's SGD with Nesterov momentum, `--overlap` is torchft's `fragment_sync_delay` and `--mixing` its
`fragment_update_alpha`. What torchft cannot do is refused: codecs but fp32 (its quantisation needs CUDA), delayed and
eager updates, a period that is no multiple of the number of fragments.

Island 0 also runs torchft's lighthouse, and next to it (one port higher) a store at which the islands meet between the
parts of the run:

    reference     steps on a scratch copy of the model, all islands at the same time, nobody connected: what a step
                  takes on this machine without communication
    warm-up       the first round: connections are made, and it does not count
    measured      all other rounds, from one meeting of the islands to the end of the last outer step
    validation    the global model, by island 0

torchft is given what serves it best: the initial weights are seeded alike and not sent, no checkpoint is taken,
heartbeats are rare, and time-outs are long enough for any link.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import fcntl
import json
import os
import socket
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from isles import flags
from isles.core.fragments import cut
from isles.core.method import Method
from isles.train import evals
from isles.train.batches import Batches, validation_batches
from isles.train.config import TrainConfig
from isles.train.data import prepare_data
from isles.train.learning_rate import resolved
from isles.train.model import build_model
from isles.train.step import backward, inner_optimizer, update

LONG = datetime.timedelta(hours=1)
M = TypeVar("M", bound=Manager)


class Peer:
    """One island."""

    def __init__(self, config: TrainConfig, method: Method, island: int, lighthouse: str, bucketize: bool) -> None:
        self.method, self.island, self.bucketize = method, island, bucketize
        host, _, port = lighthouse.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"--lighthouse {lighthouse} must be HOST:PORT, the address of island 0 and a free port")
        self.lighthouse_host, self.lighthouse_port = host, int(port)
        self.address = own_address(host, int(port))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_of(self.address))
        self.tokens, train = prepare_data(config, island)
        self.batches = Batches(
            train,
            seed=config.seed,
            island=island,
            islands=config.islands,
            batch_size=config.batch_size,
            sequence_length=config.sequence_length,
        )
        torch.manual_seed(config.seed)
        self.model = build_model(config.model, self.tokens.vocabulary)
        self.config = resolved(config, sum(parameter.numel() for parameter in self.model.parameters()))
        self.segments = evals.takes_segments(self.model)
        self.fragments = [fragment.parameters for fragment in cut(self.model, method)]
        check_schedule(method, len(self.fragments))

    def run(self, reference_steps: int) -> dict[str, Any]:
        """Reference, warm-up, measured rounds, validation."""
        config, every, port = self.config, self.method.sync_every, self.lighthouse_port + 1
        host, first = self.lighthouse_host, self.island == 0
        self.store = TCPStore(host, port, is_master=first, wait_for_workers=False, timeout=LONG)
        self.meetings = 0
        self.meet()
        alone = self.reference(reference_steps)
        optimizer = inner_optimizer(self.model, config)
        with self.joined() as manager, self.diloco(manager, optimizer) as diloco:
            self.meet()
            for step in range(every):
                self.step(self.model, optimizer, step)
            self.meet()
            begin = time.perf_counter()
            seconds = [self.step(self.model, optimizer, step) for step in range(every, config.steps)]
            wall = time.perf_counter() - begin
            rounds = manager.current_step()
            self.meet()
            diloco._restore_parameters()  # the global model; torchft has no public way to it
        wanted = config.steps * len(self.fragments) // every
        if rounds != wanted:
            raise RuntimeError(f"torchft has committed {rounds} of {wanted} rounds: the figures mean nothing")
        return {
            "peer": "torchft",
            "island": self.island,
            "islands": config.islands,
            "parameters": sum(parameter.numel() for part in self.fragments for parameter in part),
            "fragments": [sum(parameter.numel() for parameter in part) for part in self.fragments],
            "sync_every": every,
            "overlap": self.method.overlap,
            "steps": config.steps,
            "measured_steps": len(seconds),
            "wall_seconds": wall,
            "step_seconds_alone": alone,
            "median_step_seconds": statistics.median(seconds),
            "compute_utilization": len(seconds) * alone / wall,
            **self.traffic(),
            **(self.validate() if self.island == 0 else {}),
        }

    def traffic(self) -> dict[str, int]:
        """What a ring all-reduce of every fragment, in fp32, sends from one island."""
        islands, size = self.config.islands, sum(parameter.numel() for part in self.fragments for parameter in part)
        per_period = round(2 * (islands - 1) / islands * 4 * size)
        periods = self.config.steps // self.method.sync_every
        return {"bytes_per_period": per_period, "bytes_sent": per_period * periods}

    # ---- training

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
        """One inner step, as `isles train` takes it; returns its seconds."""
        begin = time.perf_counter()
        backward(model, self.batches.at(step), self.config, segments=self.segments)
        update(model, optimizer, self.config, step)
        return time.perf_counter() - begin

    def reference(self, steps: int) -> float:
        """Seconds of a step without communication: the mean over steps and islands."""
        scratch = copy.deepcopy(self.model)
        optimizer = inner_optimizer(scratch, self.config)
        for step in range(3):  # the first ones load and allocate
            self.step(scratch, optimizer, step)
        self.meet()
        return self.mean(statistics.fmean(self.step(scratch, optimizer, step) for step in range(steps)))

    def validate(self) -> dict[str, float]:
        batches = validation_batches(self.tokens, self.config.batch_size, self.config.sequence_length)
        return evals.validation(self.model, batches, self.tokens.validation_bytes)

    # ---- torchft

    @contextmanager
    def joined(self) -> Iterator[Manager]:
        """torchft's manager of this island, and on island 0 the lighthouse."""
        lighthouse = None
        if self.island == 0:
            lighthouse = LighthouseServer(
                bind=f"[::]:{self.lighthouse_port}",
                min_replicas=self.config.islands,
                quorum_tick_ms=10,
                heartbeat_timeout_ms=60_000,
            )
        self.meet()
        manager = self.manager(
            Manager,
            pg=ProcessGroupGloo(timeout=LONG),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=self.config.islands,
            timeout=LONG,
            quorum_timeout=LONG,
            connect_timeout=LONG,
            heartbeat_interval=datetime.timedelta(seconds=5),
        )
        try:
            yield manager
            self.meet()
        finally:
            manager.shutdown(wait=False)
            if lighthouse is not None:
                lighthouse.shutdown()

    def manager(self, kind: type[M], **options: Any) -> M:
        """A manager of an island that is one process, with the store that torchft wants in it."""
        self.own_store = TCPStore(self.address, 0, is_master=True, wait_for_workers=False, timeout=LONG)
        return kind(
            use_async_quorum=False,
            rank=0,
            world_size=1,
            store_addr=self.address,
            store_port=self.own_store.port,
            lighthouse_addr=f"http://{self.lighthouse_host}:{self.lighthouse_port}",
            replica_id=f"island_{self.island}",
            hostname=self.address,
            init_sync=False,
            **options,
        )

    def diloco(self, manager: Manager, optimizer: torch.optim.Optimizer) -> DiLoCo:
        method = self.method
        outer = [
            torch.optim.SGD(
                part,
                lr=method.outer_lr,
                momentum=method.outer_momentum,
                nesterov=method.nesterov and method.outer_momentum > 0,
            )
            for part in self.fragments
        ]
        return DiLoCo(
            manager,
            [nn.ParameterList(part) for part in self.fragments],
            optimizer,
            outer,
            sync_every=method.sync_every,
            use_bucketization=self.bucketize,
            fragment_sync_delay=method.overlap,
            fragment_update_alpha=method.mixing,
        )

    # ---- meeting the other islands, outside of what is measured

    def meet(self) -> None:
        """Returns when all islands have called it."""
        self.mean(0.0)

    def mean(self, value: float) -> float:
        """The mean over islands; all of them call it."""
        self.meetings += 1
        self.store.set(f"{self.meetings}/{self.island}", str(value))
        values = [float(self.store.get(f"{self.meetings}/{island}")) for island in range(self.config.islands)]
        return statistics.fmean(values)


def own_address(host: str, port: int) -> str:
    """The address under which this machine is seen from `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The name of the network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise ValueError(f"no interface has the address {address}: set GLOO_SOCKET_IFNAME")


def check(config: TrainConfig, method: Method, island: int) -> None:
    """Raises ValueError for what torchft cannot do."""
    if not 0 <= island < config.islands:
        raise ValueError(f"--island {island} must be from 0 to {config.islands - 1} (--islands - 1)")
    if method.codec != "fp32" or method.update != "fresh" or method.error_feedback:
        raise ValueError("torchft on CPU knows fresh updates in fp32 only: add --codec fp32 --update fresh")
    if config.accumulate != 1 or config.precision != "fp32":
        raise ValueError("this benchmark trains in fp32 without accumulation: leave --accumulate and --precision out")
    if config.steps % method.sync_every or config.steps < 2 * method.sync_every:
        raise ValueError(
            f"--steps {config.steps} must be a multiple of --sync-every {method.sync_every}, and at least twice that: "
            "the first round is a warm-up"
        )


def check_schedule(method: Method, fragments: int) -> None:
    """Raises ValueError for a period that torchft cannot share out to the fragments."""
    if method.sync_every % fragments or method.overlap >= method.sync_every // fragments:
        raise ValueError(
            f"torchft needs --sync-every {method.sync_every} to be a multiple of the {fragments} fragments, and "
            f"--overlap {method.overlap} to be less than their quotient: it has one fragment in flight"
        )
    if method.offsets is not None:
        raise ValueError("torchft has its own --offsets: leave them out")


def main(arguments: list[str] | None = None) -> int:
    """Runs one island and prints what it measured; returns the exit code."""
    parser = argparse.ArgumentParser(description="The same training as `isles train`, synchronised by torchft.")
    parser.add_argument("--island", type=int, required=True, help="this island's number, from 0")
    parser.add_argument("--lighthouse", required=True, metavar="HOST:PORT", help="island 0's address, and a free port")
    parser.add_argument("--reference-steps", type=int, default=30, help="steps without communication (default: 30)")
    parser.add_argument(
        "--bucketize", action=argparse.BooleanOptionalAction, default=False, help="one all-reduce a fragment"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line, last")
    flags.add(parser, TrainConfig, "the run, as in `isles train`")
    flags.add(parser, Method, "the method (defaults: isles.Method's)", show_defaults=False)
    args = parser.parse_args(arguments)
    try:
        config, method = TrainConfig(**flags.given(args, TrainConfig)), Method(**flags.given(args, Method))
        check(config, method, args.island)
        torch.set_num_threads(config.threads or 1)
        found = Peer(config, method, args.island, args.lighthouse, args.bucketize).run(args.reference_steps)
    except ValueError as error:
        print(f"torchft_peer: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:<22} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torchft's servers keep threads
