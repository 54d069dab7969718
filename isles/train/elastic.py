"""The training loop of an island that comes and goes: `isles train --store`.

It is the loop of `isles.train.loop` with three differences. The position is the clock of the run, which all islands
share, not the number of steps that this one has taken: the learning rate follows it, and the run ends by it. What an
island reads is a function of the seed, its number, and its own steps, so no two islands read the same stream. And there
is nobody to gather numbers from: every island writes its own events, here and into the store.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import isles
from isles.elastic.store import ObjectStore
from isles.train import evals, export, store_run
from isles.train.batches import Batches, validation_batches
from isles.train.config import TrainConfig
from isles.train.data import prepare_data
from isles.train.launch import STOP_FILE
from isles.train.learning_rate import resolved
from isles.train.loop import Stopped, check_evals, final_evals, final_sample
from isles.train.model import build_model
from isles.train.place import find_device
from isles.train.step import autocast, backward, inner_optimizer, update
from isles.train.synchronise import Cost, describe
from isles.view import events

PUBLISH_SECONDS = 5.0
"""Between two pieces of events in the store."""


class ElasticTrainer:
    """One island."""

    def __init__(self, config: TrainConfig, method: isles.Method) -> None:
        self.method, self.folder, self._parent = method, Path(config.run), os.getppid()
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // config.islands))
        self.device = find_device(config.device, int(os.environ.get("LOCAL_RANK", 0)))
        check_evals(config)
        self.tokens, self._train = prepare_data(config, 0)
        torch.manual_seed(config.seed)
        self.model = build_model(config.model, self.tokens.vocabulary).to(self.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.config = config = resolved(config, self.parameters)
        self.segments = evals.takes_segments(self.model)
        self.optimizer = inner_optimizer(self.model, config)
        self.tokens_per_step = config.batch_size * config.accumulate * config.sequence_length
        self.world = isles.StoreWorld(
            config.store, quorum=config.quorum, patience=config.patience_seconds, timeout=config.timeout_seconds
        )
        self.log = events.EventLog(self.folder / events.FILE_NAME)
        self._early: list[isles.Event] = []
        self._publisher: Publisher | None = None
        self._numbers: tuple[int, Batches] | None = None
        self._began, self._seconds, self._engine_seconds, self._peak_bytes = time.time(), 0.0, 0.0, 0

    # ---- the run

    def run(self) -> dict[str, Any]:
        """Trains until the run is over; returns a summary. Raises `Stopped` when it was asked to leave."""
        config = self.config
        self.diloco = diloco = isles.DiLoCo(
            self.model, self.optimizer, self.method, world=self.world, on_event=self._record
        )
        self._publisher = Publisher(self.world.store, self.world.rank)
        self._start()
        with diloco:
            while diloco.clock < config.steps and not self._asked_to_stop():
                clock, begin = diloco.clock, time.perf_counter()
                batch = self._batches().at(diloco.step_count).to(self.device)
                loss = backward(self.model, batch, config, segments=self.segments)
                stats = diloco.stats
                spent = Cost(stats.wait_seconds, diloco.engine_seconds, stats.bytes_sent, stats.bytes_received)
                update(self.model, self.optimizer, config, clock)
                self._log_step(loss, clock, time.perf_counter() - begin, spent)
                self._evaluate_if_due(clock)
        self._publisher.stop()
        if diloco.clock < config.steps:
            left = f"island {self.world.rank} has left at clock {diloco.clock} of {config.steps}"
            raise Stopped(f"{left}; the run goes on at clock {max(diloco.clock, self.world.log_clock)}")
        return self._finish()

    def _start(self) -> None:
        about = {"pid": os.getpid(), "host": socket.gethostname()}
        self._write("island", rank=self.world.rank, **about)
        config = self.config.as_dict()
        self._write(
            "config",
            islands=self.world.size,
            name=self.folder.name,
            config=config,
            method=self.method.as_dict(),
            method_name=config["method"],
            tokens_per_step=self.tokens_per_step,
            version=isles.__version__,
            **describe(self.model, self.diloco.fragments),
        )
        for event in self._early:
            self._record(event)

    def _batches(self) -> Batches:
        """Of this island: another number, another stream."""
        number, config = self.world.rank, self.config
        if self._numbers is None or self._numbers[0] != number:
            size = config.batch_size * config.accumulate
            stream = f"{config.seed}/island {number}"
            length = config.sequence_length
            made = Batches(self._train, seed=stream, island=0, islands=1, batch_size=size, sequence_length=length)
            self._numbers = number, made
        return self._numbers[1]

    def _asked_to_stop(self) -> bool:
        """By a Ctrl-C, or because the process that started this one is gone."""
        return (self.folder / STOP_FILE).exists() or os.getppid() != self._parent

    # ---- events

    def _write(self, event: str, **fields: Any) -> None:
        line = self.log.write(event, island=self.world.rank, **fields)
        if self._publisher is not None:
            self._publisher.add(line)

    def _record(self, event: isles.Event) -> None:
        if self._publisher is None:
            self._early.append(event)
            return
        what: dict[str, Any] = {"step": self.diloco.clock, "fragment": event.fragment, "round": event.round}
        if event.kind == "send":
            what["num_bytes"] = event.num_bytes
        if event.kind == "apply":
            what |= {"seconds": event.seconds, "slack_seconds": event.slack_seconds}
            what["islands"] = list(self.world.members)
        if event.kind == "excluded":
            what["late_seconds"] = event.late_seconds
        self._write(event.kind, **what)

    def _log_step(self, loss: float, clock: int, seconds: float, spent: Cost) -> None:
        stats = self.diloco.stats
        cost = Cost(stats.wait_seconds, self.diloco.engine_seconds, stats.bytes_sent, stats.bytes_received) - spent
        self._seconds += seconds
        self._engine_seconds += cost.engine_seconds
        self._peak_bytes = max(self._peak_bytes, cost.bytes_sent)
        self._write(
            "step",
            step=self.diloco.clock,
            own_step=self.diloco.step_count,
            loss=loss,
            learning_rate=self.config.learning_rate_at(clock),
            seconds=seconds,
            tokens=self.diloco.clock * self.tokens_per_step,
            **asdict(cost),
        )

    # ---- evaluation

    def _evaluate_if_due(self, before: int) -> None:
        """One island evaluates for all: the first of those that were in the last round."""
        every, clock = self.config.eval_every, self.diloco.clock
        if every and before // every < clock // every and clock < self.config.steps and self._is_first():
            with self.diloco.global_model():
                self._log_eval(self._evaluate(self.config.eval_tokens))

    def _is_first(self) -> bool:
        return self.world.rank == min(self.world.members, default=self.world.rank)

    def _evaluate(self, most: int | None) -> dict[str, float]:
        config = self.config
        batches = validation_batches(self.tokens, config.batch_size, config.sequence_length, max_tokens=most)
        with autocast(config, self.device):
            nats, count = evals.total_nats(self.model, batches)
        return evals.quality(nats, count, self.tokens.validation_bytes * batches.share)

    def _log_eval(self, found: dict[str, float]) -> None:
        clock, wall = self.diloco.clock, time.time() - self._began
        sent = self.diloco.stats.bytes_sent
        self._write(
            "eval", step=clock, tokens=clock * self.tokens_per_step, bytes_sent=sent, wall_seconds=wall, **found
        )

    def _finish(self) -> dict[str, Any]:
        """Evaluates the final model and publishes it."""
        config, stats = self.config, self.diloco.stats
        found = self._evaluate(None)
        self._log_eval(found)
        found |= final_evals(self.model, self.tokens, config)
        if config.sample_tokens and self._is_first():
            self._write("sample", **final_sample(self.model, self.tokens, config))
        wall = time.time() - self._began
        summary = {
            **found,
            "method": config.method,
            "steps": config.steps,
            "tokens": config.steps * self.tokens_per_step,
            "islands": self.world.size,
            "parameters": self.parameters,
            "bytes_sent": stats.bytes_sent,
            "peak_bytes_per_step": self._peak_bytes,
            "compute_utilization": 1 - self._engine_seconds / self._seconds if self._seconds else 1.0,
            "tokens_per_second": self.diloco.step_count * self.tokens_per_step / self._seconds if self._seconds else 0,
            "wall_seconds": wall,
            "excluded_rounds": stats.excluded_rounds,
            "catch_up_rounds": stats.catch_up_rounds,
            "run_dir": str(self.folder),
        }
        export.save_weights(self.model, self.folder / export.WEIGHTS)
        if self._is_first():
            about = {name: value for name, value in summary.items() if name != "run_dir"}
            store_run.publish(self.world.store, self.world.last_round, self.folder / export.WEIGHTS, about)
        self._write("end", **summary)
        if self._publisher is not None:
            self._publisher.stop()
        return summary


class Publisher:
    """Puts the events of an island into the store, in pieces, by a thread: whoever can read the bucket can watch."""

    def __init__(self, store: ObjectStore, island: int) -> None:
        self._store, self._island = store, island
        self._lines: list[str] = []
        self._pieces = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="isles-events", daemon=True)
        self._thread.start()

    def add(self, line: str) -> None:
        self._lines.append(line)

    def stop(self) -> None:
        """Publishes what is left."""
        self._over.set()
        self._thread.join(timeout=30)
        self._publish()

    def _run(self) -> None:
        while not self._over.wait(PUBLISH_SECONDS):
            self._publish()

    def _publish(self) -> None:
        with self._lock:
            count = len(self._lines)
            if not count:
                return
            name = f"events/{self._island:04d}/{self._pieces + 1:08d}.jsonl"
            try:
                self._store.put(name, "".join(self._lines[:count]).encode())
            except ValueError:
                return  # the next piece has these lines too
            self._pieces += 1
            del self._lines[:count]
