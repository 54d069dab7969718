"""The peak learning rate of the inner optimizer, where none is given: a fit to our own runs, in one place.

    rate = base * (parameters / 1M) ^ -power

The base depends on the inner optimizer and on what a step sees: islands that train on their own between two
synchronisations want a larger rate than data-parallel training, whose batch is that of all islands. It was fitted to
the best of a grid at the sizes that a CPU can train (docs/log.md, "Learning rates"), and continued beyond them with the
power at which published recipes fall. It is a place to start; `--learning-rate` overrides it.
"""

from __future__ import annotations

from dataclasses import replace

from isles.train.config import TrainConfig

POWER = 0.25
LARGEST = 12e-3
"""No smaller model has a larger one."""
BASES = {("adamw", False): 5e-3, ("adamw", True): 8e-3, ("muon", False): 10e-3, ("muon", True): 10e-3}
"""(optimizer, whether islands are averaged rather than gradients) -> rate at 1M parameters."""


def resolved(config: TrainConfig, parameters: int) -> TrainConfig:
    """With a peak learning rate, the one that was given or the one for a model of so many parameters."""
    if config.learning_rate is not None:
        return config
    averaged = config.method != "data-parallel"
    return replace(config, learning_rate=peak(parameters, config.optimizer, averaged=averaged))


def peak(parameters: float, optimizer: str, *, averaged: bool) -> float:
    """To two digits. `averaged`: islands train on their own for several steps, and are averaged then.

    >>> peak(1e9, "adamw", averaged=False)
    0.00089
    """
    rate = BASES[optimizer, averaged] * (parameters / 1e6) ** -POWER
    return float(f"{min(rate, LARGEST):.2g}")
