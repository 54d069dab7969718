"""The inner optimizers of the studies: AdamW, or Muon for the matrices inside layers and AdamW for the rest.

The learning rate follows the papers' schedule (warm-up, then a cosine); `set_rate` sets it for a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isles.reproduce.job import Job
from isles.train.config import TrainConfig
from isles.train.muon import Muon, groups_of


def inner_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """The papers' AdamW (betas 0.9 and 0.99, weight decay 1 / steps), alone or beside Muon."""
    decay: dict[str, Any] = {"lr": job.learning_rate, "weight_decay": 1 / job.steps}
    if job.inner == "muon":
        return Muon(groups_of(model), **decay)
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), fused=True, **decay)


def set_rate(job: Job, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The learning rate of a step, counted from 0."""
    config = TrainConfig(steps=job.steps, learning_rate=job.learning_rate, warmup_steps=job.warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
