"""The inner optimizers of the studies: AdamW, or Muon for the matrices inside layers and AdamW for the rest.

The learning rate follows the papers' schedule (warm-up, then a cosine); `set_rate` sets it for a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isles.reproduce.job import Job
from isles.train.config import TrainConfig


class Together(torch.optim.Optimizer):
    """Several optimizers that step as one, so that the engine has one optimizer to hook."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers  # with whom the groups are shared

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        for optimizer in self.optimizers:
            with _portable_products():
                optimizer.step()
        return None


@contextmanager
def _portable_products() -> Iterator[None]:
    """Muon multiplies in bf16, for which oneDNN takes AMX instructions wherever the processor lists them; a virtual
    machine may list them and not have them, and then the process dies. The other way is slower and always works.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TF32, which is not touched
        with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
            yield


def inner_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """The papers' AdamW (betas 0.9 and 0.99, weight decay 1 / steps), alone or beside Muon."""
    decay: dict[str, Any] = {"lr": job.learning_rate, "weight_decay": 1 / job.steps}
    if job.inner == "adamw":
        return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), fused=True, **decay)
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and "layers." in name]
    others = [p for name, p in named.items() if not (p.dim() == 2 and "layers." in name)]
    if not hasattr(torch.optim, "Muon"):
        raise ValueError('inner="muon" needs torch.optim.Muon, of torch 2.9 or newer: use "adamw"')
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **decay)
    return Together([muon, torch.optim.AdamW(others, betas=(0.9, 0.99), fused=True, **decay)])


def set_rate(job: Job, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate of a step, counted from 0."""
    config = TrainConfig(steps=job.steps, learning_rate=job.learning_rate, warmup_steps=job.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
