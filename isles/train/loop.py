"""The training loop of one island, in a straight line, on the public API of isles alone.

What comes before the loop builds things (data, model, optimizer, synchronisation), what comes after it
finishes up (global model, final evaluation, sample, summary). The loop itself is the one a user would write.
Everything that happens is written to the event log, and nowhere else.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
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
from isles.train.learning_rate import resolved
from isles.train.model import build_model
from isles.train.place import Place
from isles.train.run_log import RunLog, Totals
from isles.train.shards import ShardedCheckpoints
from isles.train.step import autocast, backward, inner_optimizer, update
from isles.train.synchronise import DataParallel, Islands, Synchroniser
from isles.train.tokens import TokenSet


class Stopped(Exception):
    """The run was asked to stop, and its state is saved."""


class Trainer:
    """One rank of a run."""

    def __init__(self, config: TrainConfig, method: isles.Method | None, place: Place) -> None:
        self.config, self.method, self.place = config, method, place
        self.folder = Path(config.run)
        tokens_per_step = config.batch_size * config.accumulate * config.sequence_length * place.world_size
        self.log = RunLog(self.folder, place, tokens_per_step)
        self.tokens, train = prepare_data(config, place.island)
        self.batches = Batches(
            train,
            seed=config.seed,
            island=place.rank % place.ranks_per_island if config.island_data else place.rank,
            islands=place.ranks_per_island if config.island_data else place.world_size,
            batch_size=config.batch_size * config.accumulate,
            sequence_length=config.sequence_length,
        )
        check_evals(config)
        torch.manual_seed(config.seed)
        self.model = build_model(config.model, self.tokens.vocabulary).to(place.device)
        config = self.config = resolved(config, sum(parameter.numel() for parameter in self.model.parameters()))
        self.segments = evals.takes_segments(self.model)
        self.in_shards = method is not None and place.ranks_per_island > 1 and config.inside == "fsdp"
        if self.in_shards:
            shards.shard(self.model, place.mesh["rank"])
        self.optimizer = inner_optimizer(self.model, config)
        keep, kept_in = config.keep_checkpoints, self.folder / "checkpoints"
        self.checkpoints = Checkpoints(kept_in, place.rank, keep)
        group = place.mesh["rank"].get_group() if place.ranks_per_island > 1 else None
        self.sharded_checkpoints = ShardedCheckpoints(kept_in, place.island, keep, group)

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
            if start:
                self.log.write("resume", step=start)
            if self.place.rank == 0:
                shutil.copyfile(self.tokens.tokenizer_file, self.folder / export.TOKENIZER)
            self.log.start(config.as_dict(), self.method, synchroniser)
            for step in range(start, config.steps):
                begin = time.perf_counter()
                loss = self._pass(synchroniser.model, step)
                pass_seconds = time.perf_counter() - begin
                update(self.model, self.optimizer, config, step)
                seconds, cost = time.perf_counter() - begin, synchroniser.cost_of_step(pass_seconds)
                self.log.step(step + 1, seconds, cost, loss=loss, learning_rate=config.learning_rate_at(step))
                self._between_steps(step + 1, synchroniser)
            self.checkpoints.wait()
        self.log.totals.bytes_sent += synchroniser.closing_bytes
        found = self._evaluate(self.model, None)
        self._log_eval(config.steps, found)
        return self._finish(found)

    def _synchroniser(self) -> Synchroniser:
        if self.method is None:
            return DataParallel(self.model, self.optimizer, self.place, lambda model: self._pass(model, 0))
        world = self.place.world
        if self.place.ranks_per_island > 1:
            world = isles.TorchWorld(
                self.place.mesh["island"], timeout=self.config.timeout_seconds, reduction=self.config.reduction
            )
        return Islands(self.model, self.optimizer, self.method, self.place, world, self.log.events)

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
            totals, ranks = asdict(self.log.totals), self.place.ranks_per_island
            about = {"config": config.as_dict(), "totals": totals, "ranks": ranks}
            checkpoints = self.sharded_checkpoints if self.together else self.checkpoints
            checkpoints.save(done, {**about, "state": synchroniser.state_dict(self.together)})
            self.log.write("checkpoint", step=done, path=str(self.checkpoints.path(done).parent))
        if stopping:
            self.checkpoints.wait()
            raise Stopped(f"stopped at step {done}; everything is saved")

    def _resume(self, synchroniser: Synchroniser) -> int:
        """Loads the newest checkpoint that all ranks hold; returns the step to go on from."""
        if not self.config.resume:
            return 0
        alone = [] if self.together else self.checkpoints.steps()
        held = [*alone, *self.sharded_checkpoints.steps()]
        step = newest_common(every := self.place.gather(held))
        if step is None:
            self._check_nothing_is_lost(every)
            return 0
        if step in self.sharded_checkpoints.steps():
            saved = {**self.sharded_checkpoints.about(step), "state": synchroniser.state_dict(sharded=True)}
            self.sharded_checkpoints.load(step, saved["state"])
        else:
            saved = self.checkpoints.load(step)
        now, then = self.config.as_dict(), saved["config"]
        for name in ("model", "data", "tokenizer", "vocabulary", "sequence_length", "accumulate", "seed", "method"):
            if now[name] != then.get(name):
                flag = "--" + name.replace("_", "-")
                raise ValueError(
                    f"the checkpoint was made with {flag} {then.get(name)}, not {now[name]}: resume with the same"
                )
        if now["islands"] != then["islands"]:
            raise ValueError(
                f"the checkpoint was made by {then['islands']} islands, not {now['islands']}: resume with as many"
            )
        ranks, ranks_then = self.place.ranks_per_island, saved.get("ranks", 1)
        if now["batch_size"] * ranks != then["batch_size"] * ranks_then:
            wanted = then["batch_size"] * ranks_then / ranks
            raise ValueError(
                f"the checkpoint was made with --batch-size {then['batch_size']} on each of {ranks_then} ranks of an "
                f"island: resume with as many sequences per island, --batch-size {wanted:g} on each of {ranks}"
            )
        self.log.totals = Totals(**saved["totals"])
        self.log.totals.bytes_sent = self.log.totals.bytes_sent * ranks_then // ranks
        synchroniser.load_state_dict(saved["state"])
        return step

    def _check_nothing_is_lost(self, held: list[list[int]]) -> None:
        """Raises ValueError if --resume would start anew over something that was trained. `held`: steps, by rank."""
        if self.together and self.checkpoints.steps():
            raise ValueError("the checkpoints were made by islands of one rank each: resume with --ranks-per-island 1")
        islands = {rank // self.place.ranks_per_island for rank, steps in enumerate(held) if steps}
        if islands and len(islands) < self.place.islands:
            few = f"{len(islands)} islands of {self.place.islands} hold checkpoints"
            raise ValueError(f"{few}: resume with as many islands as before")
        if islands:
            raise ValueError(f"there is no step of which all islands hold a checkpoint: they hold {held}")
        if any(self.place.gather((self.folder / export.WEIGHTS).exists())):
            raise ValueError(
                f"the run in {self.folder} has ended, and left no checkpoint to go on from: --overwrite starts it anew"
            )

    # ---- evaluation and summary

    def _evaluate(self, model: nn.Module, most: int | None) -> dict[str, float]:
        """Validation loss and bits per byte; each rank reads a part of the text, then they add up."""
        tokens, config, place = self.tokens, self.config, self.place
        batches = validation_batches(tokens, config.batch_size, config.sequence_length, max_tokens=most)
        with autocast(config, place.device):
            own = evals.total_nats(model, shards.share_out(batches, place.rank, place.world_size))
        nats, count = (sum(part) for part in zip(*place.gather(own), strict=True))
        return evals.quality(nats, count, tokens.validation_bytes * batches.share)

    def _finish(self, found: dict[str, float]) -> dict[str, Any]:
        """Multiple-choice sets, a sample, and the summary of the run."""
        config, place = self.config, self.place
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        if self.in_shards and place.island == 0:
            whole = shards.whole_model(self.model, lambda: build_model(config.model, self.tokens.vocabulary))
            self.model = self.model if whole is None else whole
        more: dict[str, Any] = {}
        if place.rank == 0:
            more = final_evals(self.model, self.tokens, config)
            if config.sample_tokens:
                self.log.write("sample", **final_sample(self.model, self.tokens, config))
        summary = {**found, **more, **self.log.summary(config.as_dict(), parameters)}
        if place.rank == 0:
            export.save_weights(self.model, self.folder / export.WEIGHTS)
        self.log.write("end", **summary)
        return summary

    def _log_eval(self, step: int, found: dict[str, float]) -> None:
        sent, wall = self.log.total()["bytes_sent"], time.time() - self.log.began
        tokens = step * self.log.tokens_per_step
        self.log.write("eval", step=step, tokens=tokens, bytes_sent=sent, wall_seconds=wall, **found)


def check_evals(config: TrainConfig) -> None:
    """Raises ValueError if a multiple-choice set cannot be read: at the start, not when everything is trained."""
    for file in filter(None, config.evals.split(",")):
        for _ in evals.questions(file):
            pass


def final_evals(model: nn.Module, tokens: TokenSet, config: TrainConfig) -> dict[str, Any]:
    """The multiple-choice sets of a run, by name."""
    start, length = tokens.end_of_text, config.sequence_length
    return {
        Path(file).name.split(".")[0]: evals.multiple_choice(
            model, tokens.encode, file, start=start, context_length=length
        )
        for file in filter(None, config.evals.split(","))
    }


def final_sample(model: nn.Module, tokens: TokenSet, config: TrainConfig) -> dict[str, str]:
    """A continuation of the beginning of the validation text, by the global model."""
    prompt = tokens.validation[:32].tolist()  # the first is the end-of-text token that starts a document
    ids = sample.generate(model, prompt, config.sample_tokens, seed=config.seed, context_length=config.sequence_length)
    return {"prompt": tokens.decode(prompt[1:]), "text": tokens.decode(ids)}


def stop_step(folder: Path) -> int | None:
    """The step at which the run is to stop, if it was asked to."""
    try:
        return int((folder / STOP_FILE).read_text())
    except (OSError, ValueError):
        return None
