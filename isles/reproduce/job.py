"""What defines one training run: a `Job`, and the `Text` it runs on.

A run is a pure function of the two (up to rounding: another processor, or compiled instead of plain kernels, adds in
another order). So a finished run is kept under a hash of both and never run again, whichever study asks for it. Of the
text only the content counts, not where it lies.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isles.core.method import Method
from isles.train import text as sources
from isles.train.config import TrainConfig
from isles.train.tokens import TokenSet, prepare

RECORD_VERSION = 2
"""Raised when the engine or the trainer changes so that older records no longer stand for what a run gives now."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run."""

    method: Method | None = None
    """None: data-parallel, which is one island that takes the batches of all."""
    model: str = "mini"
    """A name of the ladder, or LAYERSxHEADSxWIDTH."""
    islands: int = 2
    steps: int = 2100
    batch_size: int = 4
    """Sequences in a batch of one island."""
    sequence_length: int = 64
    vocabulary: int = 0
    """Size of the vocabulary that is trained on the text; 0: bytes."""
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    inner: Literal["adamw", "muon"] = "adamw"
    seed: int = 0
    evaluations: int = 6
    """Points of the loss curve, the last one included."""
    curve_tokens: int = 16384
    """Validation tokens behind a point of the curve."""
    final_tokens: int = 131072
    """Validation tokens behind the final loss."""

    overlaps: tuple[int, ...] | None = None
    """The overlap of each island, where they differ."""
    shards: Literal["trained", "measured"] | None = None
    """Every island trains on a part of the text of its own (a source each, or a contiguous part of the only source), or
    the loss on each part is measured only."""
    weights: tuple[float, ...] | None = None
    """Each island's weight in the mean."""
    frozen: bool = False
    """Only the fragment that is sent next is trained (an ablation)."""
    similarity: bool = False
    """Record the cosine similarity of the islands' outer gradients."""
    replicas: bool = False
    """Evaluate one replica and the average of replicas too."""

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values; of the method, what is not at its default, and no option that is off."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        kept = {name: value for name, value in fields.items() if value is not None and value is not False}
        if self.method is not None:
            default = Method().as_dict()
            kept["method"] = {name: v for name, v in self.method.as_dict().items() if v != default.get(name)}
        return json.loads(json.dumps(kept))  # type: ignore[no-any-return]

    def recipe(self) -> TrainConfig:
        """The inner optimizer, its schedule, clipping and loss: those of `isles train`."""
        return TrainConfig(
            steps=self.steps, learning_rate=self.learning_rate, warmup_steps=self.warmup_steps, optimizer=self.inner
        )

    @property
    def tokens(self) -> int:
        """What all islands train on together."""
        return self.steps * self.islands * self.batch_size * self.sequence_length

    @property
    def parameters(self) -> int:
        """Of the model, but for its few norms."""
        layers, _, width = shape_of(self.model)
        return 12 * layers * width**2 + (self.vocabulary or 257) * width

    @property
    def cost(self) -> float:
        """About how much work it is, in no particular unit: multiplications and calls."""
        layers, _, width = shape_of(self.model)
        per_step = 12 * layers * width**2 * self.batch_size * self.sequence_length / 25e6 + layers
        return per_step * self.steps * self.islands


@dataclass(frozen=True)
class Text:
    """Where training and validation text come from; `A,B` are several sources (see `isles.train.text`)."""

    data: str = "stdlib"
    validation: str | None = None

    def tokens(self, vocabulary: int = 0) -> TokenSet:
        """All of it."""
        tokenizer = None if vocabulary else "bytes"
        return prepare(self.data, tokenizer=tokenizer, vocabulary=vocabulary or 4096, validation=self.validation)

    def shards(self, count: int, vocabulary: int = 0) -> list[TokenSet]:
        """One part for each of `count` islands, with validation text of its own: the first sources, or, where there
        are fewer, equal contiguous parts of everything.
        """
        together = self.tokens(vocabulary)
        parts = sources.parts(self.data)
        held_out = sources.parts(self.validation) if self.validation else [None] * len(parts)
        if len(parts) < count or len(held_out) != len(parts):
            return [_part(together, number, count) for number in range(count)]
        tokenizer = str(together.tokenizer_file)
        pairs = list(zip(parts, held_out, strict=True))[:count]
        return [prepare(part, tokenizer=tokenizer, validation=own) for part, own in pairs]

    def names(self) -> list[str]:
        """What a result says about its text: the beginning of each file's name, never its path.

        >>> Text("corpora/books.train.txt.xz,stdlib").names()
        ['books', 'stdlib']
        """
        return [re.split(r"[.]", Path(part).name)[0] or "text" for part in sources.parts(self.data)]


def key_of(job: Job, text: Text, digest: str) -> str:
    """The name of a run. `digest` is that of the text's tokens; where islands have shards, the sources count too."""
    shards = [tokens.digest for tokens in text.shards(job.islands, job.vocabulary)] if job.shards else []
    if job.method is None:  # data-parallel does not know how many islands share a batch: all are the same run
        job = dataclasses.replace(job, islands=1, batch_size=job.islands * job.batch_size)
    written = json.dumps([RECORD_VERSION, digest, shards, job.as_dict()], sort_keys=True)
    return hashlib.blake2b(written.encode(), digest_size=16).hexdigest()


def shape_of(model: str) -> tuple[int, int, int]:
    """Layers, heads and width of a model.

    >>> shape_of("12x4x64"), shape_of("nano")
    ((12, 4, 64), (2, 2, 32))
    """
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", model)
    if match:
        layers, heads, width = map(int, match.groups())
        return layers, heads, width
    from isles.train.model import LADDER

    if model not in LADDER:
        raise ValueError(f"--model {model} is not known: choose one of {', '.join(LADDER)}, or LAYERSxHEADSxWIDTH")
    shape = LADDER[model]
    return shape.layers, shape.heads, shape.width


def _part(tokens: TokenSet, number: int, count: int) -> TokenSet:
    def cut(stream: Any) -> Any:
        return stream[number * len(stream) // count : (number + 1) * len(stream) // count]

    return dataclasses.replace(tokens, train=cut(tokens.train), validation=cut(tokens.validation))
