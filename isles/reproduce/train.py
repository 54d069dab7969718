"""A job becomes a record: one training run, all its islands in this process (`isles.run_local`).

The record is a plain dict, ready for JSON: the final validation loss of the outer parameters, the curve on the way
there, what an island sent, how long it took, and what the job's probes saw.

The loop is that of `isles train` without what a study does not need: no event log, no checkpoints, few evaluations.
Two things make it fast on a CPU: one thread per run with a run on every core, and `torch.compile`, which takes a third
off a step and costs seconds to start, so short runs do without (`isles reproduce speed` has the numbers).
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import isles
from isles.reproduce import probes
from isles.reproduce.job import Job, Text, shape_of
from isles.train.batches import Batches, validation_batches
from isles.train.evals import validation
from isles.train.model import Decoder, Shape
from isles.train.step import backward, inner_optimizer, update
from isles.train.tokens import TokenSet
from isles.wire.world import World

EVALUATION_ROWS = 32
COMPILING_PAYS_FROM = 500
"""Inner steps of all islands together."""


def train(job: Job, text: Text, *, compile_model: bool | None = None) -> dict[str, Any]:
    """Runs a job. `compile_model`: None decides by the length of the run, and by whether there is a compiler."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    run = Run(job, text, _worth_compiling(job) if compile_model is None else compile_model)
    islands = 1 if job.method is None else job.islands
    outcome = isles.run_local(run.island, islands)[0]
    return {
        **outcome,
        "curve": run.curve,
        "tokens": job.tokens,
        "compiled": run.compiled,
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(time.process_time() - cpu_begin, 2),
    }


def _worth_compiling(job: Job) -> bool:
    has_compiler = torch.cuda.is_available() or any(shutil.which(name) for name in ("g++", "c++", "clang++"))
    return has_compiler and job.steps * job.islands >= COMPILING_PAYS_FROM


@dataclass
class Run:
    """What the islands of one run share."""

    job: Job
    text: Text
    compiled: bool
    curve: list[list[float | None]] = field(default_factory=list)
    similarity: probes.Similarity = field(default_factory=probes.Similarity)
    replica_average: probes.ReplicaAverage = field(default_factory=probes.ReplicaAverage)

    def __post_init__(self) -> None:
        self.tokens = self.text.tokens(self.job.vocabulary)
        self.shards = self.text.shards(self.job.islands, self.job.vocabulary) if self.job.shards else []
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def island(self, world: World) -> dict[str, Any]:
        """One island, from the first step to the final evaluation."""
        job, config = self.job, self.job.recipe()
        batches = self._batches(world)
        torch.manual_seed(job.seed)
        layers, heads, width = shape_of(job.model)
        model = Decoder(Shape(layers=layers, heads=heads, width=width), self.tokens.vocabulary).to(self.device)
        forward = self._compile(model)
        optimizer = inner_optimizer(model, config, fused=True)
        durations: list[float] = []
        with self._engine(model, optimizer, world) as diloco:
            for step in range(job.steps):
                begin = time.perf_counter()
                backward(forward, batches.at(step).to(self.device), config, segments=False)
                if job.frozen and diloco is not None:
                    probes.freeze(diloco, step + 1)
                update(model, optimizer, config, step)
                durations.append(time.perf_counter() - begin)
                if world.rank == 0 and self._evaluation_is_due(step + 1):
                    with diloco.global_model() if diloco else nullcontext():
                        self.curve.append([step + 1, self._loss(model, self.tokens, job.curve_tokens)])
            probed = self._probe(world, model, diloco)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        if world.rank > 0:
            return {}
        final = self._loss(model, self.tokens, job.final_tokens)
        self.curve.append([job.steps, final])
        shares = [self._loss(model, shard, job.final_tokens // len(self.shards)) for shard in self.shards]
        return {
            "val_loss": final,
            "parameters": parameters,
            "step_seconds": round(statistics.median(durations), 6),
            "bytes_sent": diloco.stats.bytes_sent if diloco else ring_bytes(parameters, job.islands) * job.steps,
            **({"bits_per_parameter": round(diloco.stats.payload_bits_per_parameter, 3)} if diloco else {}),
            **({"nonfinite_rounds": diloco.stats.nonfinite_rounds} if diloco and diloco.stats.nonfinite_rounds else {}),
            **({"shard_losses": shares} if shares else {}),
            **probed,
        }

    def _batches(self, world: World) -> Batches:
        job, alone = self.job, self.job.method is None
        where: dict[str, Any] = {"seed": job.seed, "sequence_length": job.sequence_length}
        if job.shards == "trained" and not alone:
            return Batches(self.shards[world.rank], island=0, islands=1, batch_size=job.batch_size, **where)
        rows = job.batch_size * (job.islands if alone else 1)
        return Batches(self.tokens, island=world.rank, islands=world.size, batch_size=rows, **where)

    def _compile(self, model: nn.Module) -> Callable[..., torch.Tensor]:
        if not self.compiled:
            return model
        import torch._dynamo

        torch._dynamo.config.suppress_errors = True  # a compiler that does not work costs speed, not the run
        return torch.compile(model, dynamic=False)  # type: ignore[no-any-return]

    def _engine(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
    ) -> AbstractContextManager[isles.DiLoCo | None]:
        job = self.job
        if job.method is None:
            return nullcontext()
        options: dict[str, Any] = {}
        if job.weights is not None:
            options["weight"] = job.weights[world.rank]
        if job.overlaps is not None:
            options["overlap"] = job.overlaps[world.rank]
        link: World = probes.Watched(world, self.similarity) if job.similarity else world
        return isles.DiLoCo(model, optimizer, job.method, world=link, **options)

    def _evaluation_is_due(self, step: int) -> bool:
        every = max(1, self.job.steps // self.job.evaluations)
        return step % every == 0 and step < self.job.steps

    def _loss(self, model: nn.Module, tokens: TokenSet, most: int) -> float | None:
        """Of the model as it is, in nats a token; None where it is not a number."""
        batches = validation_batches(tokens, EVALUATION_ROWS, self.job.sequence_length, max_tokens=max(1, most))
        loss = validation(model, batches, tokens.validation_bytes, segments=False)["val_loss"]
        return round(loss, 5) if math.isfinite(loss) else None

    def _probe(self, world: World, model: nn.Module, diloco: isles.DiLoCo | None) -> dict[str, Any]:
        """What the probes find, while the islands still have weights of their own."""
        seen: dict[str, Any] = {}
        if diloco is not None and self.job.replicas:
            average = self.replica_average.of(world, model)
            if world.rank == 0:
                most = self.job.final_tokens
                seen["replica_loss"] = self._loss(model, self.tokens, most)
                with probes.holding(model, average):
                    seen["average_loss"] = self._loss(model, self.tokens, most)
                with diloco.global_model():
                    seen["outer_loss"] = self._loss(model, self.tokens, most)
        if diloco is not None and self.job.similarity:
            world.gather(b"")  # everybody has sent its last round
            offsets, every = diloco.schedule.offsets, diloco.schedule.sync_every
            seen["cosines"] = [
                [fragment, offsets[fragment] + (number - (offsets[fragment] > 0)) * every, round(cosine, 5)]
                for fragment, number, cosine in self.similarity.cosines
            ]
        return seen


def ring_bytes(parameters: int, islands: int) -> int:
    """What an island sends to average its fp32 gradients once, in a ring.

    >>> ring_bytes(1000, 2), ring_bytes(1000, 4)
    (4000, 6000)
    """
    return 2 * (islands - 1) * 4 * parameters // islands
