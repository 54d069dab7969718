"""The training loop of one island, in a straight line, on the public API of isles alone.

What comes before the loop builds things (data, model, optimizer, synchronisation), what comes after it
finishes up (global model, final evaluation, sample, summary). The loop itself is the one a user would write.
What happens is written to the event log and nowhere else; whoever wants to see it reads that.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import isles
from isles.train import evals, export, sample, shards
from isles.train.batches import Batches, validation_batches
from isles.train.checkpoint import Checkpoints, newest_common
from isles.train.config import TrainConfig
from isles.train.data import prepare_data
from isles.train.launch import STOP_FILE
from isles.train.model import build_model
from isles.train.place import Place
from isles.train.shards import ShardedCheckpoints
from isles.train.step import autocast, backward, inner_optimizer, update
from isles.train.synchronise import Cost, DataParallel, Islands, Synchroniser
from isles.view.events import EventLog


class Stopped(Exception):
    """The run was asked to stop, and its state is saved."""


@dataclass
class Totals:
    """Sums over the steps of one rank; part of a checkpoint."""

    steps: int = 0
    seconds: float = 0.0
    engine_seconds: float = 0.0
    bytes_sent: int = 0
    peak_bytes_per_step: int = 0

    def add(self, seconds: float, cost: Cost) -> None:
        self.steps += 1
        self.seconds += seconds
        self.engine_seconds += cost.engine_seconds
        self.bytes_sent += cost.bytes_sent
        self.peak_bytes_per_step = max(self.peak_bytes_per_step, cost.bytes_sent)


class Trainer:
    """One rank of a run."""

    def __init__(self, config: TrainConfig, method: isles.Method | None, place: Place) -> None:
        self.config, self.method, self.place = config, method, place
        self.began = time.time()
        self.folder = Path(config.run)
        self.log = EventLog(self.folder / "events.jsonl")
        self.log.write("island", island=place.island, rank=place.rank, pid=os.getpid(), host=socket.gethostname())
        self.tokens, train = prepare_data(config, place.island)
        self.batches = Batches(
            train,
            seed=config.seed,
            island=place.rank % place.ranks_per_island if config.island_data else place.rank,
            islands=place.ranks_per_island if config.island_data else place.world_size,
            batch_size=config.batch_size * config.accumulate,
            sequence_length=config.sequence_length,
        )
        torch.manual_seed(config.seed)
        self.model = build_model(config.model, self.tokens.vocabulary).to(place.device)
        self.segments = evals.takes_segments(self.model)
        self.in_shards = method is not None and place.ranks_per_island > 1 and config.inside == "fsdp"
        if self.in_shards:
            shards.shard(self.model, place.mesh["rank"])
        self.optimizer = inner_optimizer(self.model, config)
        keep, kept_in = config.keep_checkpoints, self.folder / "checkpoints"
        self.checkpoints = Checkpoints(kept_in, place.rank, keep)
        group = place.mesh["rank"].get_group() if place.ranks_per_island > 1 else None
        self.sharded_checkpoints = ShardedCheckpoints(kept_in, place.island, keep, group)
        self.totals = Totals()
        self.tokens_per_step = config.batch_size * config.accumulate * config.sequence_length * place.world_size

    @property
    def together(self) -> bool:
        """Whether the ranks of an island save their state together."""
        return self.method is not None and self.place.ranks_per_island > 1

    # ---- the run

    def run(self) -> dict[str, Any]:
        """Trains to the end; returns the summary."""
        config = self.config
        with self._synchroniser() as synchroniser:
            start = self._resume(synchroniser)
            self._log_start(synchroniser, start)
            for step in range(start, config.steps):
                begin = time.perf_counter()
                loss = self._pass(synchroniser.model, step)
                pass_seconds = time.perf_counter() - begin
                update(self.model, self.optimizer, config, step)
                self._log_step(step, loss, time.perf_counter() - begin, synchroniser.cost_of_step(pass_seconds))
                self._between_steps(step + 1, synchroniser)
            self.checkpoints.wait()
        self.totals.bytes_sent += synchroniser.closing_bytes
        found = self._evaluate(self.model, None)
        self._log_eval(config.steps, found)
        return self._finish(found)

    def _synchroniser(self) -> Synchroniser:
        if self.method is None:
            parallel = DataParallel(self.model, self.optimizer, self.place)
            parallel.measure_alone(lambda: self._pass(parallel.model, 0))
            return parallel
        world = self.place.world
        if self.place.ranks_per_island > 1:
            world = isles.TorchWorld(
                self.place.mesh["island"], timeout=self.config.timeout_seconds, reduction=self.config.reduction
            )
        return Islands(self.model, self.optimizer, self.method, self.place, world, self.log)

    def _pass(self, model: nn.Module, step: int) -> float:
        """Forward and backward of one inner step; returns the mean loss."""
        batch = self.batches.at(step).to(self.place.device)
        return backward(model, batch, self.config, segments=self.segments)

    def _between_steps(self, done: int, synchroniser: Synchroniser) -> None:
        config = self.config
        if config.eval_every and done % config.eval_every == 0 and done < config.steps:
            with synchroniser.global_model() as model:
                found = self._evaluate(model, config.eval_tokens)
            self._log_eval(done, found)
        stopping = stop_step(self.folder) == done
        if stopping or (config.checkpoint_every and done % config.checkpoint_every == 0):
            about = {"config": config.as_dict(), "totals": asdict(self.totals), "ranks": self.place.ranks_per_island}
            checkpoints = self.sharded_checkpoints if self.together else self.checkpoints
            checkpoints.save(done, {**about, "state": synchroniser.state_dict(self.together)})
            self._write("checkpoint", step=done, path=str(self.checkpoints.path(done).parent))
        if stopping:
            self.checkpoints.wait()
            raise Stopped(f"stopped at step {done}; everything is saved")

    def _resume(self, synchroniser: Synchroniser) -> int:
        """Loads the newest checkpoint that all ranks hold; returns the step to go on from."""
        if not self.config.resume:
            return 0
        alone = [] if self.together else self.checkpoints.steps()
        held = [*alone, *self.sharded_checkpoints.steps()]
        step = newest_common(json.loads(note) for note in self.place.world.gather(json.dumps(held).encode()))
        if step is None:
            if self.together and self.checkpoints.steps():
                raise ValueError(
                    "the checkpoints were made by islands of one rank each: resume with --ranks-per-island 1"
                )
            return 0
        if step in self.sharded_checkpoints.steps():
            saved = {**self.sharded_checkpoints.about(step), "state": synchroniser.state_dict(sharded=True)}
            self.sharded_checkpoints.load(step, saved["state"])
        else:
            saved = self.checkpoints.load(step)
        now, then = self.config.as_dict(), saved["config"]
        same = (
            "model",
            "data",
            "tokenizer",
            "vocabulary",
            "sequence_length",
            "accumulate",
            "seed",
            "method",
        )
        for name in same:
            if now[name] != then.get(name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"the checkpoint was made with {flag} {then.get(name)}, not {now[name]}: resume with the same"
                )
        ranks, ranks_then = self.place.ranks_per_island, saved.get("ranks", 1)
        if now["batch_size"] * ranks != then["batch_size"] * ranks_then:
            wanted = then["batch_size"] * ranks_then / ranks
            raise ValueError(
                f"the checkpoint was made with --batch-size {then['batch_size']} on each of {ranks_then} ranks of an "
                f"island: resume with as many sequences per island, --batch-size {wanted:g} on each of {ranks}"
            )
        self.totals = Totals(**saved["totals"])
        self.totals.bytes_sent = self.totals.bytes_sent * ranks_then // ranks
        synchroniser.load_state_dict(saved["state"])
        return step

    # ---- looking at it

    def _evaluate(self, model: nn.Module, most: int | None) -> dict[str, float]:
        """Validation loss and bits per byte; each rank reads a part of the text, then they add up."""
        tokens, config, place = self.tokens, self.config, self.place
        batches = validation_batches(tokens, config.batch_size, config.sequence_length, max_tokens=most)
        with autocast(config, place.device):
            own = evals.total_nats(model, shards.share_out(batches, place.rank, place.world_size))
        sums = [json.loads(note) for note in place.world.gather(json.dumps(own).encode())]
        nats, count = (sum(part) for part in zip(*sums, strict=True))
        return evals.quality(nats, count, tokens.validation_bytes * batches.share)

    def _sum_of_totals(self) -> list[dict[str, Any]]:
        return [json.loads(note) for note in self.place.world.gather(json.dumps(asdict(self.totals)).encode())]

    def _finish(self, found: dict[str, float]) -> dict[str, Any]:
        """Multiple-choice sets, a sample, and the summary of the run."""
        config, place = self.config, self.place
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if self.in_shards and place.island == 0:
            whole = shards.whole_model(self.model, lambda: build_model(config.model, self.tokens.vocabulary))
            self.model = self.model if whole is None else whole
        more: dict[str, Any] = {}
        if place.rank == 0:
            for file in filter(None, config.evals.split(",")):
                more[Path(file).name.split(".")[0]] = evals.multiple_choice(
                    self.model,
                    self.tokens.encode,
                    file,
                    start=self.tokens.end_of_text,
                    context_length=config.sequence_length,
                )
            if config.sample_tokens:
                self._write("sample", **self._sample())
        totals = self._sum_of_totals()
        seconds = sum(part["seconds"] for part in totals)
        tokens = config.steps * self.tokens_per_step
        summary = {
            **found,
            **more,
            "method": config.method,
            "steps": config.steps,
            "tokens": tokens,
            "islands": place.islands,
            "parameters": parameters,
            "bytes_sent": sum(part["bytes_sent"] for part in totals),
            "peak_bytes_per_step": sum(part["peak_bytes_per_step"] for part in totals),
            "compute_utilization": 1 - sum(part["engine_seconds"] for part in totals) / seconds if seconds else 1.0,
            "tokens_per_second": tokens / (seconds / place.world_size) if seconds else 0.0,
            "wall_seconds": time.time() - self.began,
            "run_dir": config.run,
        }
        if place.rank == 0:
            export.save_weights(self.model, self.folder / export.WEIGHTS)
        self._write("end", **summary)
        return summary

    def _sample(self) -> dict[str, str]:
        """What the global model makes of the beginning of the validation text."""
        prompt = self.tokens.validation[:32].tolist()  # the first is the end-of-text token that starts a document
        ids = sample.generate(
            self.model,
            prompt,
            self.config.sample_tokens,
            seed=self.config.seed,
            context_length=self.config.sequence_length,
        )
        return {"prompt": self.tokens.decode(prompt[1:]), "text": self.tokens.decode(ids)}

    # ---- the event log

    def _write(self, event: str, **fields: Any) -> None:
        """An event of the whole run: rank 0 speaks for all."""
        if self.place.rank == 0:
            self.log.write(event, island=0, **fields)

    def _log_start(self, synchroniser: Synchroniser, start: int) -> None:
        if start:
            self._write("resume", step=start)
        if self.place.rank == 0:
            shutil.copyfile(self.tokens.tokenizer_file, self.folder / export.TOKENIZER)
        self._write(
            "config",
            islands=self.place.islands,
            name=self.folder.name,
            config=self.config.as_dict(),
            method=self.method.as_dict() if self.method else None,
            method_name=self.config.method,
            tokens_per_step=self.tokens_per_step,
            version=isles.__version__,
            **synchroniser.describe(),
        )

    def _log_step(self, step: int, loss: float, seconds: float, cost: Cost) -> None:
        self.totals.add(seconds, cost)
        if self.place.is_first_of_island:
            self.log.write(
                "step",
                island=self.place.island,
                step=step + 1,
                loss=loss,
                learning_rate=self.config.learning_rate_at(step),
                seconds=seconds,
                tokens=(step + 1) * self.tokens_per_step,
                **asdict(cost),
            )

    def _log_eval(self, step: int, found: dict[str, float]) -> None:
        sent = sum(part["bytes_sent"] for part in self._sum_of_totals())
        wall = time.time() - self.began
        self._write("eval", step=step, tokens=step * self.tokens_per_step, bytes_sent=sent, wall_seconds=wall, **found)


def stop_step(folder: Path) -> int | None:
    """The step at which the run is to stop, if it was asked to."""
    try:
        return int((folder / STOP_FILE).read_text())
    except (OSError, ValueError):
        return None
