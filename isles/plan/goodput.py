"""What is left of utilisation when islands fail.

An island fails at random, once in `mean_seconds_between_failures` on average (exponential). Two answers to a loss:

    restart    everybody goes back to the last checkpoint: what isles does now. M islands fail M times as often, and all
               of them lose the work since the checkpoint and the time to restart
    continue   the others go on without it, and it comes back later: what a world with elastic membership could do.
               Only the island's own share is lost

For "restart", with failures at rate r = M / mean time between failures, a checkpoint after every C seconds of
training that takes S seconds to write, and R seconds to restart (which may fail in turn), the expected time of one
such stretch is exp(r R) (exp(r (C + S)) - 1) / r, of which C is training. The best C is about sqrt(2 S / r)
(Young). For "continue" an island is there for a share of mean / (mean + R) of the time.

`simulate_losses` simulates the same with random failures; the tests compare the formulas with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from isles.plan.quantities import positive

OnLoss = Literal["restart", "continue"]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often an island fails, and what that costs."""

    mean_seconds_between_failures: float
    """Of one island."""
    restart_seconds: float
    checkpoint_every_seconds: float = 1800.0
    checkpoint_seconds: float = 0.0
    """What the training loop loses when a checkpoint is written."""
    on_loss: OnLoss = "restart"

    def __post_init__(self) -> None:
        positive(self.mean_seconds_between_failures, f"mean time between failures {self.mean_seconds_between_failures}")
        positive(self.restart_seconds, f"restart_seconds={self.restart_seconds}", or_zero=True)
        positive(self.checkpoint_every_seconds, f"checkpoint_every_seconds={self.checkpoint_every_seconds}")
        positive(self.checkpoint_seconds, f"checkpoint_seconds={self.checkpoint_seconds}", or_zero=True)
        if self.on_loss not in ("restart", "continue"):
            raise ValueError(f"on_loss={self.on_loss!r} must be restart or continue")


def goodput(failures: Failures, islands: int) -> float:
    """The share of the time that is not lost to failures and checkpoints.

    >>> day, minute = 86400.0, 60.0
    >>> rare = Failures(mean_seconds_between_failures=30 * day, restart_seconds=5 * minute)
    >>> round(goodput(rare, islands=2), 4), round(goodput(rare, islands=100), 4)
    (0.9991, 0.9546)
    """
    rate = islands / failures.mean_seconds_between_failures
    if failures.on_loss == "continue":
        mean = failures.mean_seconds_between_failures
        here = mean / (mean + failures.restart_seconds)
        return here * failures.checkpoint_every_seconds / _stretch(failures)
    try:
        seconds = math.exp(rate * failures.restart_seconds) * math.expm1(rate * _stretch(failures)) / rate
    except OverflowError:
        return 0.0  # no stretch ever ends
    return failures.checkpoint_every_seconds / seconds


def best_checkpoint_every_seconds(failures: Failures, islands: int) -> float:
    """How often to write a checkpoint, to first order; 0 if writing is free."""
    return math.sqrt(2 * failures.checkpoint_seconds * failures.mean_seconds_between_failures / islands)


def simulate_losses(failures: Failures, islands: int, stretches: int, seed: int) -> float:
    """The same share, simulated: failures at random times, until so many checkpoints are written by all islands."""
    chance = np.random.default_rng(seed)
    mean = failures.mean_seconds_between_failures
    useful = stretches * failures.checkpoint_every_seconds
    if failures.on_loss == "continue":
        up, down = 0.0, 0.0
        while up < useful * islands:
            up += chance.exponential(mean)
            down += failures.restart_seconds
        return up / (up + down) * failures.checkpoint_every_seconds / _stretch(failures)
    elapsed, done, restarting = 0.0, 0, False
    next_failure = chance.exponential(mean / islands)
    while done < stretches:
        task = failures.restart_seconds if restarting else _stretch(failures)
        if elapsed + task <= next_failure:
            elapsed += task
            done += not restarting
            restarting = False
        else:
            elapsed = next_failure
            next_failure += chance.exponential(mean / islands)
            restarting = True
    return useful / elapsed


def _stretch(failures: Failures) -> float:
    return failures.checkpoint_every_seconds + failures.checkpoint_seconds
