"""One inner step: the same in every training loop here (`isles train`, the studies, the benchmarks' peers).

    inner_optimizer   AdamW, or Muon for the matrices inside layers and AdamW for the rest
    backward          forward and backward pass over a batch, in as many parts as `accumulate` says
    update            the learning rate of the step, clipping, the optimizer's step

All of it follows from a `TrainConfig`. A loop may look at gradients, or change them, between the last two.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from isles.train.batches import Batch
from isles.train.config import TrainConfig
from isles.train.evals import Model, predict
from isles.train.model import language_loss
from isles.train.muon import Muon, groups_of


def inner_optimizer(model: nn.Module, config: TrainConfig, *, fused: bool | None = None) -> torch.optim.Optimizer:
    """The optimizer of a run; `fused` is that of torch's AdamW."""
    decay = 1 / config.steps if config.weight_decay is None else config.weight_decay
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": (0.9, config.beta2), "weight_decay": decay}
    if config.optimizer == "muon":
        return Muon(groups_of(model), **settings)
    return torch.optim.AdamW(model.parameters(), fused=fused, **settings)


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """The precision of a forward pass."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=config.precision == "bf16")


def backward(model: Model, batch: Batch, config: TrainConfig, *, segments: bool) -> float:
    """Accumulates gradients of a batch; returns its mean loss. `segments`: whether the model gets document numbers."""
    total = 0.0
    parts = zip(*(tensor.chunk(config.accumulate) for tensor in batch), strict=True)
    for number, (inputs, targets, documents) in enumerate(parts, start=1):
        early = number < config.accumulate and hasattr(model, "no_sync")
        with model.no_sync() if early else nullcontext():  # type: ignore[attr-defined]
            with autocast(config, inputs.device):
                logits = predict(model, inputs, documents if segments else None)
                loss = language_loss(logits, targets, config.z_loss) / config.accumulate
            loss.backward()
        total += loss.item()
    return total


def update(model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    """What is left of a step after `backward`; steps count from 0."""
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate_at(step)
    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    optimizer.zero_grad()
