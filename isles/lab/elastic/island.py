"""An island of the crash matrix: `isles train --store` at a pace, and a witness of what its log of rounds gives.

    python -m isles.lab.elastic.island --store URL --run FOLDER --step-seconds 0.1 [flags of isles train]
    python -m isles.lab.elastic.island --store URL --run FOLDER --audit

The trainer is the product's own (`isles.train.elastic`). A step that was faster than `--step-seconds` sleeps for the
rest, so several islands on few cores take turns computing, and what isles waits for can be told from what they wait for
each other. Two events are added to its log:

    round      number (the last round in the global model), digest (of the global model), islands (in that round), own
               (this island is in it), bytes_received (so far)
    final      number, digest: of the model that it leaves

The global model is a function of the log, so two islands that write the same number must write the same digest.
`--audit` takes no part. It replays the log as an observer and writes `audit.json`: all seals, and the last digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import isles
from isles import flags
from isles.core.method import Method
from isles.elastic.objects import Seal
from isles.elastic.store import ObjectStore, open_store
from isles.lab.elastic.fleet import AUDIT
from isles.train import setup, store_run
from isles.train.config import TrainConfig
from isles.train.elastic import ElasticTrainer
from isles.train.loop import Stopped
from isles.train.synchronise import Cost
from isles.train.worker import exit_code


class PacedTrainer(ElasticTrainer):
    """An island that takes its time, and says what it has got."""

    def __init__(self, config: TrainConfig, method: Method, step_seconds: float = 0.0) -> None:
        super().__init__(config, method)
        self._step_seconds, self._seen = step_seconds, -1

    def _start(self) -> None:
        super()._start()
        self._look()

    def _log_step(self, loss: float, clock: int, seconds: float, spent: Cost) -> None:
        engine = self.diloco.engine_seconds - spent.engine_seconds
        left = self._step_seconds + engine - seconds
        if left > 0:
            time.sleep(left)
        super()._log_step(loss, clock, max(seconds, seconds + left), spent)
        self._look()

    def _look(self) -> None:
        """Writes what the global model is, if there is a new one."""
        number = self.world.last_round
        if number == self._seen:
            return
        self._seen = number
        with self.diloco.global_model() as model:
            found = digest(model)
        members, received = self.world.members, self.diloco.stats.bytes_received
        about = {"islands": list(members), "own": self.world.rank in members, "bytes_received": received}
        self._write("round", number=number, digest=found, clock=self.diloco.clock, **about)

    def run(self) -> dict[str, Any]:
        """As the trainer does; the last event says which model it has left behind."""
        try:
            return super().run()
        finally:
            if sys.exc_info()[0] in (None, Stopped):
                self._write("final", number=self.world.last_round, digest=digest(self.model))


def digest(model: nn.Module) -> str:
    """Of all parameters, to the last bit."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        found.update(name.encode())
        found.update(parameter.detach().to(torch.float32).contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def audit(config: TrainConfig, method: Method) -> dict[str, Any]:
    """The log of a run, and what it gives to somebody who has no part in it."""
    trainer = ElasticTrainer(config, method)
    trainer.world = isles.StoreWorld(config.store, observe=True)
    diloco = isles.DiLoCo(trainer.model, trainer.optimizer, method, world=trainer.world)
    with diloco.global_model() as model:
        found = {"number": trainer.world.last_round, "digest": digest(model)}
    diloco.close()
    return {**found, "seals": seals(open_store(config.store))}


def seals(store: ObjectStore) -> list[dict[str, Any]]:
    """All rounds that were sealed, in order: who was in them, with how many steps."""
    found = []
    for name in sorted(store.list("seals/")):
        seal = Seal.parse(store.get(name) or b"", name)
        steps = [each.steps for each in seal.contributions]
        about = {"number": seal.round, "fragment": seal.fragment, "clock": seal.clock, "missing": list(seal.missing)}
        found.append({**about, "islands": list(seal.islands), "steps": steps})
    return found


def main(arguments: list[str] | None = None) -> int:
    """One island; returns the exit code of `isles train`'s own islands."""
    parser = argparse.ArgumentParser(prog="python -m isles.lab.elastic.island", description=__doc__.splitlines()[0])
    parser.add_argument("--step-seconds", dest="pace", type=float, default=0.0)
    parser.add_argument("--audit", action="store_true")
    flags.add(parser, TrainConfig, "the run")
    parser.add_argument("--run-dir", dest="run", default=argparse.SUPPRESS, help="the same as --run")
    flags.add(parser, Method, "the method (defaults: those of --method)", show_defaults=False)
    args = parser.parse_args(arguments)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    wanted = store_run.resolve(flags.given(args, TrainConfig), flags.given(args, Method))
    setup.save(wanted)
    method = wanted.method()
    assert method is not None, "a run in a store has a method"
    if args.audit:
        text = json.dumps(audit(wanted.config, method))
        (Path(wanted.config.run) / AUDIT).write_text(text)
    else:
        PacedTrainer(wanted.config, method, args.pace).run()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may still wait for a store
