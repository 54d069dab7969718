"""A run that ends between two sends: how should what the islands have learned since then enter the global model?

Two islands of 0.2M parameters on bytes, the runs of `isles reproduce` at its cpu scale, ended at an arbitrary step. One
training run gives all rules their chance: at the end rounds in flight are applied, then, for every fragment with inner
steps that were never sent, with Delta the mean over islands of anchor - theta, v the velocity, lr and mu the outer
optimizer's, and s the unsent steps as a share of H:

    nothing        anchor
    outer step     v = mu v + Delta;  anchor - lr (Delta + mu v)
    mean           anchor - Delta: the islands' mean weights
    half           anchor - Delta / 2
    share of step  anchor - s lr (Delta + mu v)
    share of v     the outer step with s v instead of v
    mean and v     anchor - Delta - s lr mu mu v: the mean, and what the momentum alone would still do
    first mean     the mean for fragments that have had no outer step yet, the outer step for others

Delta is sent in e3m0 and in fp32. `island` is island 0's own weights. One line of JSON per run is appended to the
results; what is there is not run again.

    python experiments/closing.py --data BOOKS --val BOOKS_HELD_OUT --seeds 3
    python experiments/closing.py --show            # the table of what is there

docs/log.md has the finding.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import isles
from isles.reproduce.job import Job, Text, shape_of
from isles.reproduce.scale import SCALES
from isles.reproduce.train import EVALUATION_ROWS
from isles.train.batches import Batches, validation_batches
from isles.train.evals import validation
from isles.train.model import Decoder, Shape
from isles.train.step import backward, inner_optimizer, update
from isles.train.tokens import TokenSet
from isles.wire.codecs import codecs

HERE = Path(__file__).parent
SCALE = SCALES["cpu"]
EVALUATION_TOKENS = 32768
WIRES = ("e3m0", "fp32")
FIRST = "first mean"
"""Measured where it is not the outer step: some fragment has had none."""
PRESETS = ("diloco", "streaming", "distant", "eager")


class Setting(NamedTuple):
    """A run: the preset, H, the step it ends at, and the steps its learning rate was planned for (0: the same)."""

    preset: str
    every: int
    steps: int
    planned: int = 0

    @property
    def name(self) -> str:
        planned = f" of {self.planned:,}" if self.planned else ""
        return f"{self.preset}, H = {self.every}, {self.steps:,}{planned} steps"

    @property
    def method(self) -> isles.Method:
        return getattr(isles.Method, self.preset)(sync_every=self.every)  # type: ignore[no-any-return]

    def job(self, seed: int) -> Job:
        planned = self.planned or self.steps
        return SCALE.job(self.method, steps=planned, warmup_steps=min(SCALE.warmup_steps, planned // 10), seed=seed)


SETTINGS = [
    *(Setting(preset, 100, steps) for steps in (60, 99) for preset in ("diloco", "streaming")),
    *(Setting(preset, 30, n) for n in (615, 625) for preset in PRESETS),
    Setting("streaming", 100, 1050),
    *(Setting(preset, 30, 625, planned=2100) for preset in PRESETS),
    Setting("diloco", 30, 600),
]


class End(NamedTuple):
    """Where a run has ended: for each fragment what all islands share, and its weights on every island."""

    anchors: list[Tensor]
    velocities: list[Tensor]
    weights: list[list[Tensor]]
    unsent: list[int]
    """Inner steps of each fragment since it was last sent."""


def train(setting: Setting, tokens: TokenSet, seed: int) -> tuple[Decoder, isles.DiLoCo, End]:
    """The run, with a model and its engine to show other weights in."""
    job = setting.job(seed)

    def island(world: isles.LocalWorld) -> tuple[Decoder, isles.DiLoCo, list[Tensor], list[dict[str, Tensor]]]:
        batches = Batches(
            tokens,
            seed=seed,
            island=world.rank,
            islands=world.size,
            batch_size=job.batch_size,
            sequence_length=job.sequence_length,
        )
        torch.manual_seed(seed)
        layers, heads, width = shape_of(job.model)
        model = Decoder(Shape(layers=layers, heads=heads, width=width), tokens.vocabulary)
        config = job.recipe()
        optimizer = inner_optimizer(model, config, fused=True)
        with isles.DiLoCo(model, optimizer, setting.method, world=world) as diloco:
            for step in range(setting.steps):
                backward(model, batches.at(step), config, segments=False)
                update(model, optimizer, config, step)
            own = [fragment.read() for fragment in diloco.fragments]
            for state in diloco._rounds.offload.states:  # nothing is left to send: finish() without a closing round
                state.sent_step = diloco.step_count
            diloco.finish()  # applies rounds in flight; eager anchors become their mean
            return model, diloco, own, diloco.state_dict(replica=False)["fragments"]

    models, engines, weights, states = zip(*isles.run_local(island, job.islands), strict=True)
    count, offsets = len(states[0]), engines[0].schedule.offsets
    end = End(
        anchors=[states[0][p]["anchor"] for p in range(count)],
        velocities=[torch.stack([state[p]["velocity"] for state in states]).mean(0) for p in range(count)],
        weights=[[own[p] for own in weights] for p in range(count)],
        unsent=[min(setting.steps, (setting.steps - offset) % setting.every) for offset in offsets],
    )
    return models[0], engines[0], end


def endings(end: End, method: isles.Method, wire: str) -> dict[str, list[Tensor]]:
    """The global model under every rule, as the values of its fragments."""
    lr, mu, codec = method.outer_lr, method.outer_momentum, codecs[wire]
    rules: dict[str, list[Tensor]] = {}
    for anchor, velocity, weights, unsent in zip(*end, strict=True):
        sent = [codec.decode(codec.encode(anchor - own), anchor.numel()) for own in weights]
        delta, share = torch.stack(sent).mean(0), unsent / method.sync_every
        step = lr * (delta + mu * (mu * velocity + delta))
        moves = {
            "nothing": torch.zeros_like(anchor),
            "outer step": step,
            "mean": delta,
            "half": delta / 2,
            "share of step": share * step,
            "share of v": lr * (delta + mu * (mu * share * velocity + delta)),
            "mean and v": delta + share * lr * mu * mu * velocity,
            FIRST: step if velocity.any() else delta,
        }
        for rule, move in moves.items():
            rules.setdefault(rule, []).append(anchor - move if unsent else anchor)
    return rules


def measure(setting: Setting, tokens: TokenSet, seed: int) -> dict[str, Any]:
    """Validation losses of all endings of one run."""
    model, diloco, end = train(setting, tokens, seed)

    def loss(values: list[Tensor]) -> float:
        for fragment, flat in zip(diloco.fragments, values, strict=True):
            fragment.write(flat)
        length = setting.job(seed).sequence_length
        batches = validation_batches(tokens, EVALUATION_ROWS, length, max_tokens=EVALUATION_TOKENS)
        return round(validation(model, batches, tokens.validation_bytes, segments=False)["val_loss"], 5)

    losses = {}
    for wire in WIRES:
        for rule, values in endings(end, setting.method, wire).items():
            if rule != "nothing" and (rule != FIRST or not all(v.any() for v in end.velocities)):
                losses[f"{rule}, {wire}"] = loss(values)
    losses["nothing"] = loss(end.anchors)
    losses["island"] = loss([own[0] for own in end.weights])
    return {"setting": setting.name, "seed": seed, "unsent": end.unsent, "losses": losses}


def table(rows: list[dict[str, Any]], wire: str) -> str:
    """The loss without a closing exchange, and the difference to it with one: means over seeds, and half the range.
    `wire`: the codec of Delta; "own": that of each method.
    """
    names = dict.fromkeys(rule.split(", ")[0] for row in rows for rule in row["losses"])
    rules = sorted(names, key=lambda rule: (rule == "island", rule != "nothing"))
    lines = [f"| Delta in {wire} codec | unsent steps | {' | '.join(rules)} |", "|---" * (len(rules) + 2) + "|"]
    for setting in SETTINGS:
        own = [row for row in rows if row["setting"] == setting.name]
        if own:
            suffix = f", {setting.method.codec if wire == 'own' else wire}"
            losses = [{name.removesuffix(suffix): loss for name, loss in row["losses"].items()} for row in own]
            losses = [{FIRST: loss["outer step"], **loss} for loss in losses]
            cells = [_mean_and_spread([loss["nothing"] for loss in losses], "")]
            cells += [_mean_and_spread([loss[rule] - loss["nothing"] for loss in losses], "+") for rule in rules[1:]]
            lines.append(f"| {setting.name} | {', '.join(map(str, own[0]['unsent']))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_and_spread(values: list[float], sign: str) -> str:
    return f"{statistics.fmean(values):{sign}.4f} ± {(max(values) - min(values)) / 2:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", help="training text")
    parser.add_argument("--val", help="held-out text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "closing.jsonl")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in args.results.read_text().splitlines()] if args.results.exists() else []
    done = {(row["setting"], row["seed"]) for row in rows}
    if not args.show:
        tokens = Text(args.data, args.val).tokens()
        for seed in range(args.seeds):
            for setting in SETTINGS:
                if (setting.name, seed) not in done:
                    rows.append(measure(setting, tokens, seed))
                    with args.results.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
                    print(json.dumps(rows[-1]), flush=True)
    for wire in ("own", *WIRES):
        print("\n" + table(rows, wire))


if __name__ == "__main__":
    main()
