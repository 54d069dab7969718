"""What the callback costs in Hugging Face's Trainer: one island alone, against Trainer without it.

Trainings with and without the callback take turns, each of H steps on the same batches, after one turn that warms up.
CPU time of all threads counts, which does not see what other programs take. At each of the H steps the least of all
turns counts: what happens only once at a step was caused by another program. The H steps are one period: every fragment
is sent and applied once.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

import isles


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much to train."""

    width: int
    layers: int
    rows: int
    length: int
    sync_every: int
    turns: int


FULL = Sizes(width=128, layers=4, rows=8, length=64, sync_every=100, turns=5)
QUICK = Sizes(width=16, layers=2, rows=2, length=16, sync_every=5, turns=1)


def measure(sizes: Sizes) -> dict[str, Any]:
    """CPU seconds of a step with and without the callback, and their ratio."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError("the part trainer needs transformers: pip install 'isles[hf]'") from None
    turns: dict[str, list[list[float]]] = {"without": [], "with": []}
    for turn in range(sizes.turns + 1):
        for name, taken in turns.items():
            steps, parameters = _train(sizes, with_isles=name == "with")
            if turn:
                taken.append(steps)
    least = {name: [min(each) for each in zip(*taken, strict=True)] for name, taken in turns.items()}
    seconds = {name: statistics.fmean(steps) for name, steps in least.items()}
    ratio = seconds["with"] / seconds["without"]
    about = {"parameters": parameters, "sync_every": sizes.sync_every}
    return {**about, "without_seconds": seconds["without"], "with_seconds": seconds["with"], "ratio": ratio}


def _train(sizes: Sizes, with_isles: bool) -> tuple[list[float], int]:
    """CPU seconds of every step but the first, and how many parameters are trained."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from isles.integrations.transformers import DiLoCoCallback

    marks: list[float] = []

    class Mark(TrainerCallback):
        """Before the callback of isles, so that its closing round is not counted."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.process_time())

    torch.manual_seed(0)
    shape = {"n_embd": sizes.width, "n_layer": sizes.layers, "n_head": 4, "n_positions": sizes.length}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **shape))  # type: ignore[arg-type]
    row = torch.randint(0, 256, (sizes.length,), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row}] * sizes.rows
    ours = [DiLoCoCallback(isles.Method.streaming(sync_every=sizes.sync_every))] if with_isles else []
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=sizes.sync_every + 1,
            per_device_train_batch_size=sizes.rows,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            log_level="error",
            use_cpu=True,
        )
        trainer = Trainer(model, args, train_dataset=data, callbacks=[Mark(), *ours])  # type: ignore[arg-type]
        trainer.pop_callback(_printer())
        trainer.train()
    steps = [end - begin for begin, end in itertools.pairwise(marks)]
    return steps, sum(parameter.numel() for parameter in model.parameters())


def _printer() -> Any:
    from transformers import PrinterCallback

    return PrinterCallback
