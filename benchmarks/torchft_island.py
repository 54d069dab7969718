"""An island of the crash matrix, joined to the others by torchft: `isles.lab.elastic.island` with the peer in it.

    python benchmarks/torchft_island.py --run-dir FOLDER --island 0 --islands 3 --lighthouse HOST:PORT FLAGS

FLAGS are those of `isles train`. The lighthouse is a process of its own. A step that was faster than `--step-seconds`
sleeps for the rest. The island trains until a file `stop` is in its folder, and writes events by which
`isles.lab.elastic.figures` measures isles too:

    join       it has torchft's manager, and trains
    apply      seconds that the training loop spent in torchft for one round: quorum, all-reduce, commit
    round      number, members (how many islands are in it), digest of the global model after it; own: this island is
               in it, else it was healed with it, and has discarded so many steps of its own
    excluded   a round that torchft did not commit: the fragment goes back to its last global values
    step       step is the number of steps taken and of steps thrown away, so these show as a jump
    restart    torchft raised an error

torchft is given what serves it best. A restarted island is healed with model, moments of the inner optimizer and outer
state of another one. Whoever stops with an error starts again at once, in the same process, as a launcher would do it.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import hashlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing import HTTPTransport
from torchft.local_sgd import DiLoCo
from torchft_peer import Peer

from isles import flags
from isles.core.method import Method
from isles.train.config import TrainConfig
from isles.train.launch import STOP_FILE
from isles.train.setup import Setup
from isles.train.step import backward, inner_optimizer, update
from isles.view import events

SECONDS = 60.0
"""torchft's own time-outs."""


class Witness(Manager):
    """torchft's manager, which notes what became of a round."""

    asked, healed, committed = False, False, None

    def forget(self) -> None:
        """Until something new happens."""
        self.asked, self.healed, self.committed = False, False, None

    def start_quorum(self, *arguments: Any, **options: Any) -> None:
        """Who is in the next round; may load the state of another island."""
        before = self.current_step()
        super().start_quorum(*arguments, **options)
        self.asked, self.healed = True, self.current_step() != before

    def should_commit(self, timeout: datetime.timedelta | None = None) -> bool:
        """Whether the round counts."""
        self.committed = super().should_commit(timeout)
        return self.committed


class Checkpoints(HTTPTransport[Any]):
    """torchft's own way to heal, by address: names of machines mean nothing to other machines here."""

    def __init__(self, host: str, timeout: datetime.timedelta) -> None:
        self._host = host
        super().__init__(timeout=timeout, num_chunks=0)

    def address(self) -> str:
        """Where a checkpoint can be fetched."""
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}/checkpoint/"


class Island(Peer):
    """One island, at a pace."""

    def __init__(self, config: TrainConfig, method: Method, args: argparse.Namespace) -> None:
        super().__init__(config, method, args.island, args.lighthouse, bucketize=False)
        self.folder, self.first_round, self.pace = Path(config.run), args.first_round, args.pace
        self.limits = {name: datetime.timedelta(seconds=getattr(args, name)) for name in LIMITS}
        self.log = events.EventLog(self.folder / events.FILE_NAME)
        self.optimizer = inner_optimizer(self.model, self.config)
        self.every = method.sync_every // len(self.fragments)
        """Steps between two rounds."""
        self.steps = self.since_round = self.discarded = 0
        self.begun = [0] * len(self.fragments)
        """By fragment: the step at which it was last set to global values."""
        self.waited, self.received = 0.0, received_bytes()

    def train(self) -> None:
        """Until it is asked to stop."""
        manager = self.manager(
            Witness,
            pg=ProcessGroupGloo(timeout=self.limits["timeout"]),
            min_replica_size=1,
            load_state_dict=self.load,
            state_dict=self.state,
            checkpoint_transport=Checkpoints(self.address, self.limits["timeout"]),
            **self.limits,
        )
        with self.diloco(manager, self.optimizer) as diloco:
            self.write("join")
            while not (self.folder / STOP_FILE).exists():
                self.paced_step(manager, diloco)

    def paced_step(self, manager: Witness, diloco: DiLoCo) -> None:
        """One inner step, and what torchft does at it."""
        manager.forget()
        begin = time.perf_counter()
        backward(self.model, self.batches.at(self.steps), self.config, segments=self.segments)
        computed = time.perf_counter()
        update(self.model, self.optimizer, self.config, manager.current_step() * self.every + self.since_round)
        end = time.perf_counter()
        self.steps, self.since_round = self.steps + 1, self.since_round + 1
        engine = end - computed if manager.asked or manager.committed is not None else 0.0
        self.waited += engine
        time.sleep(max(0.0, self.pace - (end - begin - engine)))
        if manager.healed:
            before = self.discarded
            self.discard(*range(len(self.fragments)))
            self.tell_round(manager, diloco, own=False, discarded=self.discarded - before)
        if manager.committed is not None:
            self.tell_outcome(manager, diloco)
        seconds = time.perf_counter() - begin
        self.write("step", step=self.steps + self.discarded, seconds=seconds, engine_seconds=engine)

    # ---- events

    def tell_outcome(self, manager: Witness, diloco: DiLoCo) -> None:
        """How a round ended."""
        place = manager.current_step() - bool(manager.committed)
        fragment, number = place % len(self.fragments), place // len(self.fragments) + 1
        self.write("apply", fragment=fragment, round=number, seconds=self.waited)
        if manager.committed:
            self.begun[fragment] = self.steps
            self.tell_round(manager, diloco, own=True)
        else:
            self.discard(fragment)
            self.write("excluded", fragment=fragment, round=number)
        self.waited, self.since_round = 0.0, 0

    def tell_round(self, manager: Witness, diloco: DiLoCo, *, own: bool, discarded: int = 0) -> None:
        number, received = self.first_round + manager.current_step(), received_bytes() - self.received
        about = {"members": manager.num_participants(), "bytes_received": received, "discarded": discarded}
        self.write("round", number=number, digest=digest(diloco), own=own, **about)

    def discard(self, *fragments: int) -> None:
        """Counts the steps of fragments that are set back, as a part of the whole model's."""
        for fragment in fragments:
            self.discarded += (self.steps - self.begun[fragment]) // len(self.fragments)
            self.begun[fragment] = self.steps

    def write(self, event: str, **fields: Any) -> None:
        """To the log, under the name of this life: a restarted island is another one."""
        self.log.write(event, island=self.folder.name, **fields)

    # ---- healing

    def state(self) -> dict[str, Any]:
        """Copies, since training goes on while they are sent."""
        model: dict[str, Tensor] = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"model": model, "optimizer": copy.deepcopy(self.optimizer.state_dict())}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def digest(diloco: DiLoCo) -> str:
    """Of the global model, to the last bit; torchft has no public way to it."""
    found = hashlib.sha256()
    for fragment in diloco._fragments:
        for name, value in sorted(fragment.original_parameters.items()):
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def received_bytes() -> int:
    """All that has come in at the interface between islands, by the kernel's count."""
    rows = (line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines())
    return next(int(rest.split()[0]) for name, _, rest in rows if name.strip() == os.environ["GLOO_SOCKET_IFNAME"])


LIMITS = ("timeout", "quorum_timeout", "connect_timeout")


def main() -> int:
    """One island; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--island", type=int, required=True, help="this island's number, from 0")
    parser.add_argument("--lighthouse", required=True, metavar="HOST:PORT")
    parser.add_argument("--first-round", type=int, default=0, help="added to the numbers of rounds")
    parser.add_argument("--step-seconds", dest="pace", type=float, default=0.0)
    for name in LIMITS:
        flag = name.replace("_", "-")
        parser.add_argument(f"--{flag}", type=float, default=SECONDS, help=f"torchft's {name} (default %(default)g s)")
    flags.add(parser, TrainConfig, "the run, as in `isles train`")
    parser.add_argument("--run-dir", dest="run", required=True)
    flags.add(parser, Method, "the method (defaults: those of --method)", show_defaults=False)
    args = parser.parse_args()
    try:
        config = TrainConfig(**flags.given(args, TrainConfig))
        method = Setup(config, flags.given(args, Method)).method()
        if method is None:
            raise ValueError("--method data-parallel is not DiLoCo: use streaming or diloco")
        torch.set_num_threads(config.threads or 1)
        island = Island(config, method, args)
    except ValueError as error:
        print(f"torchft_island: {error}", file=sys.stderr)
        return 2
    try:
        island.train()
    except Exception as error:
        traceback.print_exc()
        if not (island.folder / STOP_FILE).exists():
            island.write("restart", reason=str(error).splitlines()[0] if str(error) else type(error).__name__)
            sys.stderr.flush()
            os.execv(sys.executable, [sys.executable, *sys.argv])
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torchft's servers keep threads, and its shutdown was seen to hang
