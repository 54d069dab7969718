"""Everything that defines a training run, as one dataclass; the flags of `isles train` are its fields.

Checked when made. The resolved configuration is the first event of a run and is saved with it, so that `--resume` needs
no other flag.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

MethodName = Literal["gradual", "streaming", "diloco", "delayed", "eager", "distant", "data-parallel"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A run: model, data, optimizer, islands."""

    run: str = ""
    """Folder of the run: configuration, events, checkpoints, report (default: runs/METHOD-MODEL-SEED)."""
    resume: bool = False
    """Continue the run in that folder from its last checkpoint, with as many islands; start it if there is none."""
    overwrite: bool = False
    """Remove a run that is there already."""
    islands: int = 2
    """Islands to start on this machine; under torchrun they are counted from the ranks, with --store it is 1 by
    default.
    """
    store: str = ""
    """A bucket or folder that joins islands which come and go: s3://bucket/run, gs://, az://, a path. The first one
    makes the run, the next ones join it; --steps is then the clock at which it ends.
    """
    quorum: int = 1
    """With --store: the least number of islands in a round."""
    patience_seconds: float | None = None
    """With --store: how long to wait for an island that is late (default: by the step and the overlap)."""
    ranks_per_island: int = 0
    """Under torchrun: ranks that make one island and share its model (0: all ranks of a node; if there is only one
    node, each rank is an island).
    """
    inside: Literal["fsdp", "ddp"] = "fsdp"
    """In an island of several ranks: its model in shards (FSDP2), or a copy on each (DDP)."""
    method: MethodName = "gradual"
    """How islands synchronise; the fields of the method below can be set on top."""
    timeout_seconds: float = 600.0
    """How long another island may be silent before it counts as lost."""
    reduction: Literal["auto", "all-gather", "reduce-scatter"] = "auto"
    """How islands average: everybody gets everything, or each averages a piece, in fewer bytes beyond two islands
    and with one more rounding (auto: all-gather up to four islands).
    """

    model: str = "mini"
    """nano, micro, mini, small, 35M, 100M ... 4B, or hf:NAME, hf:FOLDER, hf:CONFIG.json for a Hugging Face
    causal model.
    """
    data: str = "stdlib"
    """stdlib (the source of Python's standard library), files, folders or globs, hf:DATASET, synthetic."""
    val_data: str = ""
    """Validation text; without it a part of the documents is held out."""
    island_data: str = ""
    """One source per island, separated by ';', if they are to see different text."""
    tokenizer: str = ""
    """A tokenizers JSON file, or `bytes`; without it a vocabulary is trained on the data."""
    vocabulary: int = 4096
    """Size of the vocabulary that is trained."""

    steps: int = 1000
    """Inner steps of each island."""
    batch_size: int = 8
    """Sequences in a batch of one island (of one rank)."""
    accumulate: int = 1
    """Batches whose gradients make one inner step."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The inner optimizer; muon: Muon for the matrices inside layers, AdamW for the rest."""
    learning_rate: float | None = None
    """Peak learning rate (default: by the model's size, the optimizer and the method)."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    final_learning_rate: float = 0.05
    """Where the cosine ends, as a fraction of the peak."""
    weight_decay: float | None = None
    """Of the inner optimizer (default: 1 / steps)."""
    beta2: float = 0.99
    """Of AdamW; beta1 is 0.9."""
    clip: float = 1.0
    """Largest norm of a gradient."""
    z_loss: float = 1e-4
    """Weight of the squared log-partition in the loss."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the forward pass; bf16 uses autocast, for hardware that has it."""
    seed: int = 0
    """Of initial weights and of the order of the data."""

    eval_every: int = 200
    """Steps between evaluations of the global model (0: only at the end)."""
    eval_tokens: int = 32768
    """Validation tokens in an evaluation; the one at the end uses all."""
    evals: str = ""
    """Multiple-choice sets for the end: HellaSwag, PIQA or ARC as JSON lines, separated by commas."""
    checkpoint_every: int = 200
    """Steps between checkpoints (0: none)."""
    keep_checkpoints: int = 2
    """How many checkpoints stay."""
    sample_tokens: int = 200
    """Length of the text that is generated at the end (0: none)."""
    threads: int = 0
    """Threads of torch per island (0: the cores shared out)."""
    device: str = ""
    """cpu, cuda ... (default: cuda where there is one)."""
    tensorboard: bool = False
    """Write TensorBoard files into the run's folder."""
    wandb: str = ""
    """Weights & Biases project to log to."""
    watch: bool = False
    """Serve the live page of `isles watch` on this machine while the run goes on; its address is printed."""

    def __post_init__(self) -> None:
        for name in ("islands", "quorum", "steps", "batch_size", "accumulate", "sequence_length", "keep_checkpoints"):
            self._require(name, lambda value: value >= 1, "at least 1")
        whole = ("ranks_per_island", "warmup_steps", "eval_every", "eval_tokens", "checkpoint_every", "threads")
        for name in (*whole, "sample_tokens", "weight_decay", "z_loss", "seed"):
            if getattr(self, name) is not None:
                self._require(name, lambda value: value >= 0, "0 or more")
        for name in ("learning_rate", "clip", "timeout_seconds", "patience_seconds"):
            if getattr(self, name) is not None:
                self._require(name, lambda value: value > 0, "greater than 0")
        self._require("final_learning_rate", lambda value: 0 <= value <= 1, "from 0 to 1, a fraction of the peak")
        self._require("beta2", lambda value: 0 <= value < 1, "from 0 to below 1")
        sources = self.island_sources()
        if sources and len(sources) != self.islands:
            raise ValueError(
                f"--island-data names {len(sources)} sources for {self.islands} islands: give one for each"
            )

    def _require(self, name: str, holds: Any, wanted: str) -> None:
        value = getattr(self, name)
        if not math.isfinite(value) or not holds(value):
            raise ValueError(f"--{name.replace('_', '-')} {value} must be {wanted}")

    def island_sources(self) -> list[str]:
        """The source of each island, where they differ."""
        return [source.strip() for source in self.island_data.split(";") if source.strip()]

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return dataclasses.asdict(self)

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a fraction of the peak; steps count from 0."""
        assert self.learning_rate is not None, "the peak is chosen when the model is there: isles.train.learning_rate"
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        low = self.final_learning_rate
        return self.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
