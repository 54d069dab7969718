"""How large a study is: the dial that a user with more hardware turns up.

    quick   seconds: does every study still work?  Its numbers mean nothing.
    cpu     decoders of 0.2M parameters, in the study of scaling of up to 1.2M, on bytes, 2,100 steps: whole rounds of
            30 and of 100
    paper   the papers' models and settings, for GPUs (not run by us)

`model` carries the main comparisons, `small_model` the grids of many runs, `tiny_model` the runs that are long for
their size, `deep_model` what needs many layers, and `ladder` the sizes of the scaling study.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from isles.core.method import Method
from isles.reproduce.job import Job, shape_of

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes of all studies."""

    name: str
    data: str
    model: str
    small_model: str
    tiny_model: str
    deep_model: str
    ladder: tuple[str, ...]
    steps: int
    batch_size: int
    sequence_length: int
    sync_every: int
    periods: tuple[int, ...]
    island_counts: tuple[int, ...]
    token_factors: tuple[float, ...]
    """How much longer or shorter the runs of the overtraining study are."""
    demo: dict[str, Any] | None = None
    """About what `make demo` trains, where it is not a job of this scale already."""
    seeds: int = 3
    vocabulary: int = 0
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    evaluations: int = 6
    curve_tokens: int = 16384
    final_tokens: int = 131072

    def job(self, method: Method | None = None, **changes: Any) -> Job:
        """A job of this scale."""
        same = {item.name for item in dataclasses.fields(self)} & {item.name for item in dataclasses.fields(Job)}
        return Job(**{"method": method, **{name: getattr(self, name) for name in same}, **changes})

    def settings(self) -> dict[str, dict[str, Any]]:
        """Changes of a job, by name: that of `make demo`, and the largest model of the ladder."""
        sizes = {} if self.demo is None else {"demo": self.demo}
        return {**sizes, self.ladder[-1]: {"model": self.ladder[-1]}}

    def few(self, values: Sequence[T]) -> list[T]:
        """Of a grid, its ends where the scale is quick, and all of it elsewhere."""
        distinct = list(dict.fromkeys(values))
        return [distinct[0], distinct[-1]] if self.name == "quick" and len(distinct) > 2 else distinct

    def changed(self, *, steps: int | None = None, seeds: int | None = None, model: str | None = None) -> Scale:
        """With what was given on the command line. A model that is given carries every run but those of the ladder."""
        changes: dict[str, Any] = {}
        if steps is not None:
            if steps < 2 * self.sync_every:
                raise ValueError(
                    f"--steps {steps} is too short to compare anything: give at least two rounds, {2 * self.sync_every}"
                )
            changes.update(steps=steps, warmup_steps=min(self.warmup_steps, steps // 10))
        if seeds is not None:
            if seeds < 1:
                raise ValueError(f"--seeds {seeds} must be at least 1")
            changes["seeds"] = seeds
        if model is not None:
            shape_of(model)
            changes.update(model=model, small_model=model, tiny_model=model, deep_model=model, demo=None)
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values, without the text."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "data"}


SCALES = {
    "quick": Scale(
        name="quick",
        data="synthetic:0.1",
        model="nano",
        small_model="nano",
        tiny_model="nano",
        deep_model="4x2x16",
        ladder=("1x2x8", "1x2x16", "2x2x16", "2x2x24", "nano"),
        steps=8,
        batch_size=2,
        sequence_length=16,
        sync_every=4,
        periods=(2, 4),
        island_counts=(1, 2),
        token_factors=(1.0, 2.0),
        seeds=1,
        warmup_steps=2,
        evaluations=2,
        curve_tokens=256,
        final_tokens=512,
    ),
    "cpu": Scale(
        name="cpu",
        data="stdlib",
        model="micro",
        small_model="micro",
        tiny_model="nano",
        deep_model="12x4x64",
        ladder=("nano", "3x4x48", "micro", "5x4x96", "mini"),
        steps=2100,
        batch_size=4,
        sequence_length=64,
        sync_every=30,
        periods=(5, 10, 30, 100, 300, 525),
        island_counts=(1, 2, 4, 8),
        token_factors=(0.25, 1.0, 4.0, 8.0),
        demo={"model": "micro", "vocabulary": 1024, "steps": 1500, "batch_size": 8, "sequence_length": 128},
    ),
    "paper": Scale(
        name="paper",
        data="hf:allenai/c4@en",
        model="500M",
        small_model="35M",
        tiny_model="35M",
        deep_model="300M",
        ladder=("35M", "100M", "200M", "300M", "500M", "1B"),
        steps=24000,
        batch_size=256,
        sequence_length=1024,
        sync_every=30,
        periods=(5, 10, 30, 100, 300, 500),
        island_counts=(1, 2, 4, 8),
        token_factors=(1.0, 4.0, 10.0),
        vocabulary=32000,
        learning_rate=4e-4,
        warmup_steps=1000,
        evaluations=20,
        curve_tokens=1 << 20,
        final_tokens=1 << 23,
    ),
}
