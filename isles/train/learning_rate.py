"""The peak learning rate of the inner optimizer, where none is given: a fit to our own runs, in one place.

    rate = base * (parameters / 1M) ^ -1/2 * (tokens of a step / 1,024) ^ 3/4, the last factor at most 1

The base depends on the inner optimizer and on what a step sees: islands that train on their own between two
synchronisations, and one island alone, want a larger rate than data-parallel training, whose batch is that of all
islands. Very small batches want a smaller one. It was fitted to the best of a grid at the sizes that a CPU can train
(docs/log.md, "Every island counts"), and continued beyond them by the square root, at which the rates of published
models fall. It is a place to start; `--learning-rate` overrides it.
"""

from __future__ import annotations

from dataclasses import replace

from isles.train.config import TrainConfig

LARGEST = 20e-3
"""No smaller model has a larger one."""
BASES = {("adamw", False): 3.5e-3, ("adamw", True): 6e-3, ("muon", False): 8e-3, ("muon", True): 8e-3}
"""(optimizer, whether a step sees the batch of one island) -> rate at 1M parameters."""


def resolved(config: TrainConfig, parameters: int) -> TrainConfig:
    """With a peak learning rate, the one that was given or the one for a model of so many parameters."""
    if config.learning_rate is not None:
        return config
    own_batch = config.method != "data-parallel" or config.islands == 1
    tokens = config.batch_size * config.accumulate * config.sequence_length
    return replace(config, learning_rate=peak(parameters, config.optimizer, tokens, own_batch=own_batch))


def peak(parameters: float, optimizer: str, tokens: int, *, own_batch: bool) -> float:
    """To two digits. `tokens` of one island in a step; `own_batch`: a step sees these, not those of all islands.

    >>> peak(1e9, "adamw", 2**16, own_batch=True)
    0.00019
    """
    rate = BASES[optimizer, own_batch] * (parameters / 1e6) ** -0.5 * min(1.0, tokens / 1024) ** 0.75
    return float(f"{min(rate, LARGEST):.2g}")
