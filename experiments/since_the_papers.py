"""What others have proposed since the papers, each as small as it can be, on top of a gradual start.

Plain DiLoCo in one process, written out: four islands train a round from the global weights, their outer gradients are
averaged in fp32, and one outer step is taken. Fifty rounds of 3 steps are averaged plainly, then 55 rounds of 30 steps
have momentum 0.9 and an outer learning rate of 0.9, both warmed up over 20 rounds. A candidate changes one thing.
Bytes of the standard library, AdamW, 4 x 64 tokens a step and island, 41k (nano) and 213k (micro) parameters.

    python experiments/since_the_papers.py nano micro [--seeds N]    # runs what is not there yet
    python experiments/since_the_papers.py --show                    # worth of the three other islands, by candidate

One line of JSON per run is appended to the results. docs/log.md has the findings.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from isles.train.batches import Batches, validation_batches
from isles.train.config import TrainConfig
from isles.train.data import prepare_data
from isles.train.evals import quality, takes_segments, total_nats
from isles.train.learning_rate import peak
from isles.train.model import build_model
from isles.train.step import backward, inner_optimizer, update

RESULTS = Path(__file__).parent / "results" / "since-the-papers.jsonl"
ISLANDS, ROWS, LENGTH = 4, 4, 64
DENSE, ROUNDS, EVERY, WARMUP, OUTER_LR, MOMENTUM = (50, 3), 55, 30, 20, 0.9, 0.9
STEPS = DENSE[0] * DENSE[1] + ROUNDS * EVERY


@dataclass(frozen=True)
class Candidate:
    """One thing that is different from plain DiLoCo with a gradual start."""

    islands: int = ISLANDS
    rows: int = ROWS
    """Of a batch: one island with the batches of all is data-parallel training."""
    rate: float = 1.0
    """Inner learning rate, times what `isles train` would take."""
    slow_moment: bool = False
    """Half of the inner update comes from a first moment that remembers about a round (MT-DAO)."""
    restart: int = 0
    """Outer momentum starts anew every so many rounds."""
    preserve_norm: bool = False
    """The mean is scaled to the islands' mean norm."""
    top: float = 0.0
    """Outer gradients are their largest values, this share of them, with error feedback; no momentum (SparseLoCo)."""
    share_moments: int = 0
    """Adam's moments are averaged every so many rounds."""
    mixing: float = 0.0
    """Share of its own weights that an island keeps at first; it falls to zero with the inner learning rate."""
    growing: bool = False
    """The second half has rounds of 60 steps instead of 30 (QSR: longer rounds as the learning rate falls)."""


CANDIDATES = {
    "alone": Candidate(islands=1),
    "data-parallel": Candidate(islands=1, rows=ISLANDS * ROWS),
    "gradual": Candidate(),
    "slow first moment": Candidate(slow_moment=True),
    "momentum restarts every 15 rounds": Candidate(restart=15),
    "norm-preserving mean": Candidate(preserve_norm=True),
    "top 10 % with error feedback, no momentum": Candidate(top=0.1),
    "moments averaged every 5 rounds": Candidate(share_moments=5),
    "inner rate times sqrt(M)": Candidate(rate=ISLANDS**0.5),
    "mixing from 0.25 down to 0": Candidate(mixing=0.25),
    "rounds of 60 steps in the second half": Candidate(growing=True),
}


class SlowMoment(torch.optim.AdamW):
    """AdamW whose gradient is half replaced by a mean of gradients over about a round."""

    def __init__(self, like: torch.optim.Optimizer) -> None:
        settings = {name: like.defaults[name] for name in ("lr", "betas", "weight_decay")}
        super().__init__(like.param_groups[0]["params"], **settings)
        self._slow: dict[Tensor, Tensor] = {}  # not in `state`, which AdamW takes for its own

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                memory = self._slow.setdefault(parameter, torch.zeros_like(parameter))
                memory.lerp_(parameter.grad, 1 / EVERY)
                parameter.grad.lerp_(memory, 0.5)
        return super().step(closure)


def plan(growing: bool) -> Iterator[tuple[int, int]]:
    """The rounds: how many steps, and the number of the outer step with momentum, 0 for plain averages."""
    yield from [(DENSE[1], 0)] * DENSE[0]
    lengths = [EVERY] * (ROUNDS // 2 + 1) + [2 * EVERY] * (ROUNDS // 4) if growing else [EVERY] * ROUNDS
    lengths += [STEPS - DENSE[0] * DENSE[1] - sum(lengths)] * (sum(lengths) < ROUNDS * EVERY)
    yield from ((length, number) for number, length in enumerate(lengths, start=1))


def run(size: str, candidate: Candidate, seed: int) -> dict[str, Any]:
    config = TrainConfig(
        model=size, data="stdlib", tokenizer="bytes", steps=STEPS, batch_size=ROWS, sequence_length=LENGTH, seed=seed
    )
    tokens, train = prepare_data(config, 0)
    torch.manual_seed(seed)
    model = build_model(config.model, tokens.vocabulary)
    parameters = list(model.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    rate = peak(numel, "adamw", ROWS * LENGTH, own_batch=candidate.rows == ROWS) * candidate.rate
    config = TrainConfig(**{**config.as_dict(), "learning_rate": rate})
    anchor = parameters_to_vector(parameters).detach().clone()
    thetas = [anchor.clone() for _ in range(candidate.islands)]
    residuals = [torch.zeros_like(anchor) for _ in thetas]
    velocity, done, segments = torch.zeros_like(anchor), 0, takes_segments(model)
    optimizers = [inner_optimizer(model, config) for _ in thetas]
    if candidate.slow_moment:
        optimizers = [SlowMoment(optimizer) for optimizer in optimizers]
    batches = [
        Batches(train, seed=seed, island=i, islands=len(thetas), batch_size=candidate.rows, sequence_length=LENGTH)
        for i in range(len(thetas))
    ]
    for length, number in plan(candidate.growing):
        deltas = []
        for island, optimizer in enumerate(optimizers):
            vector_to_parameters(thetas[island].clone(), parameters)  # a copy: parameters become views of it
            for step in range(done, done + length):
                backward(model, batches[island].at(step), config, segments=segments)
                update(model, optimizer, config, step)
            thetas[island] = parameters_to_vector(parameters).detach().clone()
            deltas.append(anchor - thetas[island])
        done += length
        if candidate.islands == 1:
            continue
        if number and candidate.top:
            deltas = [_largest(*pair, candidate.top) for pair in zip(deltas, residuals, strict=True)]
        if number and candidate.share_moments and number % candidate.share_moments == 0:
            _share_moments(optimizers)
        anchor, velocity = _outer_step(anchor, velocity, deltas, number, candidate)
        falls = config.learning_rate_at(min(done, STEPS - 1)) / rate
        kept = candidate.mixing * falls if number else 0.0
        thetas = [kept * theta + (1 - kept) * anchor for theta in thetas]
    vector_to_parameters(thetas[0].clone() if candidate.islands == 1 else anchor, parameters)
    found = validation_batches(tokens, 16, LENGTH, max_tokens=131072)
    return quality(*total_nats(model, found), tokens.validation_bytes * found.share)


def _outer_step(
    anchor: Tensor, velocity: Tensor, deltas: list[Tensor], number: int, candidate: Candidate
) -> tuple[Tensor, Tensor]:
    mean = torch.stack(deltas).mean(0)
    if number and candidate.preserve_norm:
        mean = mean * (statistics.fmean(float(delta.norm()) for delta in deltas) / max(float(mean.norm()), 1e-30))
    if not number or candidate.top:
        return anchor - mean, velocity
    if candidate.restart and number % candidate.restart == 0:
        velocity = torch.zeros_like(velocity)
    share = min(1.0, (number - 1) / WARMUP)
    lr, mu = 1 + share * (OUTER_LR - 1), share * MOMENTUM
    velocity = mu * velocity + mean
    return anchor - lr * (mean + mu * velocity), velocity


def _largest(delta: Tensor, residual: Tensor, share: float) -> Tensor:
    """The largest values of delta + residual; the others stay in the residual."""
    residual.add_(delta)
    places = residual.abs().topk(math.ceil(share * residual.numel())).indices
    sent = torch.zeros_like(residual).index_copy_(0, places, residual[places])
    residual.sub_(sent)
    return sent


def _share_moments(optimizers: list[torch.optim.Optimizer]) -> None:
    """Every island gets the mean of all islands' moments."""
    for parameter in optimizers[0].state:
        for name in ("exp_avg", "exp_avg_sq"):
            mean = torch.stack([optimizer.state[parameter][name] for optimizer in optimizers]).mean(0)
            for optimizer in optimizers:
                optimizer.state[parameter][name].copy_(mean)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def show() -> None:
    """Losses, and the worth of the other islands seed by seed, with its standard error."""
    losses: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows():
        losses[row["size"]][row["name"]][row["seed"]] = row["val_loss"]
    for size, found in losses.items():
        for name, own in found.items():
            seeds = sorted(set(own) & set(found["alone"]) & set(found["data-parallel"]))
            sides = [(found["alone"][seed], own[seed], found["data-parallel"][seed]) for seed in seeds]
            shares = [100 * (alone - loss) / (alone - parallel) for alone, loss, parallel in sides]
            error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else math.nan
            mean = statistics.fmean(own.values())
            print(
                f"{size:6} {name:45} {mean:.4f}  worth {statistics.fmean(shares):5.1f} ± {error:.1f} % ({len(seeds)})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sizes", nargs="*", choices=["nano", "micro", []])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for size in args.sizes:
        for seed in range(args.seeds):
            for name, candidate in CANDIDATES.items():
                if (size, name, seed) not in {(row["size"], row["name"], row["seed"]) for row in rows()}:
                    row = {"size": size, "name": name, "seed": seed, **run(size, candidate, seed)}
                    with RESULTS.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    if args.show:
        show()


if __name__ == "__main__":
    main()
