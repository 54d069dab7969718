"""The papers' algorithms in one plain loop over the islands, for the engine to be compared with.

Written from the formulas alone: nothing of `isles.core` or of a world is used, all islands live in one loop, nothing is
ever in flight, and the codec is a black box that a vector goes through. A fragment is a list of parameter names. With
the papers' letters: t step, m island, p fragment, H `sync_every`, t_p `offsets[p]`, tau `overlap`, alpha `mixing`, mu
`outer_momentum`, k `delay_rounds`, w_m `weights[m]`. Ours, not the papers': `dense_start` puts shorter rounds first, in
which the islands are averaged, and over `warmup_rounds` after them lr goes from 1 and mu from 0 to their values.

Below it is the toy problem that both sides train. Its numbers are small multiples of powers of two and its inner
learning rate is one, so that an inner step is rounded in the same way on every processor, with fused multiply-adds or
without.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Weights = dict[str, Tensor]
InnerStep = Callable[[int, int, Weights], None]
"""Called with island, step and the island's weights, which it changes in place."""


@dataclass(kw_only=True)
class Reference:
    """M islands that train by DiLoCo, Streaming DiLoCo, delayed or eager updates."""

    start: Weights
    inner_step: InnerStep
    fragments: Sequence[Sequence[str]]
    offsets: Sequence[int]
    weights: Sequence[float]
    codec: object
    sync_every: int
    overlap: int = 0
    mixing: float = 0.0
    error_feedback: bool = False
    outer_lr: float = 0.4
    outer_momentum: float = 0.9
    nesterov: bool = True
    dense_start: Sequence[tuple[int, int]] = ()
    warmup_rounds: int = 0
    update: str = "fresh"
    delay_rounds: int = 1
    reencode_mean: bool = False
    """Whether the mean goes through the codec too, one piece per island: the reduce-scatter form of the exchange."""

    theta: list[Weights] = field(init=False)
    """theta[m][name]: the weights of island m."""
    anchor: list[list[Tensor]] = field(init=False)
    """anchor[m][p]: the last global value of fragment p, as island m knows it."""
    velocity: list[list[Tensor]] = field(init=False)
    residual: list[list[Tensor]] = field(init=False)
    """residual[m][p]: what the codec lost of the last outer gradient."""
    sent: list[list[list[Tensor]]] = field(init=False)
    """sent[m][p]: the outer gradients of all rounds so far, as the others see them."""
    mean: list[list[Tensor]] = field(init=False)
    """mean[p]: their means over the islands, round by round."""
    used: list[int] = field(init=False)
    """used[p]: how many of the means have been applied."""

    def __post_init__(self) -> None:
        flat = [flatten(self.start, names) for names in self.fragments]
        self.theta = [{name: value.clone() for name, value in self.start.items()} for _ in self.weights]
        self.anchor = [[value.clone() for value in flat] for _ in self.weights]
        self.velocity = [[torch.zeros_like(value) for value in flat] for _ in self.weights]
        self.residual = [[torch.zeros_like(value) for value in flat] for _ in self.weights]
        self.sent = [[[] for _ in flat] for _ in self.weights]
        self.mean = [[] for _ in flat]
        self.used = [0 for _ in flat]
        self.sent_at = [0 for _ in flat]
        self.outer_steps = [[0 for _ in flat] for _ in self.weights]
        self.t = 0

    def run(self, steps: int) -> Iterator[list[Weights]]:
        """Trains; after every step yields the weights of every island. A fragment without names is never sent."""
        sends, applies = self.calendar(steps)
        for t in range(1, steps + 1):
            self.t = t
            for m in range(len(self.weights)):
                self.inner_step(m, t, self.theta[m])
            for p in range(len(self.fragments)):
                if self.fragments[p] and (p, t) in sends:
                    self.send(p)
            for p in range(len(self.fragments)):
                if self.fragments[p] and (p, t) in applies:
                    self.apply(p)
            yield self.theta

    def calendar(self, steps: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        """When fragments are sent, and when results are applied: pairs of fragment and step."""
        sends, applies, begin = set(), set(), 0
        for rounds, h in self.dense_start:
            for p, t_p in enumerate(self.offsets):
                first = t_p * h // self.sync_every or h
                sends |= {(p, begin + first + r * h) for r in range(rounds)}
            begin += rounds * h
        applies |= sends
        for p, t_p in enumerate(self.offsets):
            for t in range(begin + (t_p or self.sync_every), steps + 1, self.sync_every):
                sends.add((p, t))
                applies.add((p, t + self.overlap))
        return sends, applies

    def is_dense(self, p: int) -> bool:
        """Whether the last round that was sent is one of the dense start."""
        return len(self.mean[p]) <= sum(rounds for rounds, _ in self.dense_start)

    def send(self, p: int) -> None:
        """Delta_m = anchor - theta_m, through the codec; and the mean of them over the islands."""
        for m in range(len(self.weights)):
            delta = self.anchor[m][p] - flatten(self.theta[m], self.fragments[p])
            if self.error_feedback:
                delta = delta + self.residual[m][p]
            seen = self.through_codec(delta)
            self.residual[m][p] = delta - seen
            self.sent[m][p].append(seen)
        self.sent_at[p] = self.t
        self.mean[p].append(self.mean_of([sent[p][-1] for sent in self.sent]))

    def mean_of(self, vectors: list[Tensor]) -> Tensor:
        total = torch.zeros_like(vectors[0])
        for w_m, vector in zip(self.weights, vectors, strict=True):
            total = total + w_m * vector
        mean = total / sum(self.weights)
        if self.reencode_mean:
            blocks = math.ceil(mean.numel() / self.codec.block)
            pieces = mean.split(math.ceil(blocks / len(self.weights)) * self.codec.block)
            mean = torch.cat([self.through_codec(piece) for piece in pieces])
        return mean

    def apply(self, p: int) -> None:
        """anchor = OuterOpt(anchor, Delta); theta = alpha * theta + (1 - alpha) * anchor."""
        alpha = 0.0 if self.is_dense(p) else self.mixing
        for m in range(len(self.weights)):
            self.outer_step(m, p, self.outer_gradient(m, p), len(self.mean[p]))
            mixed = alpha * flatten(self.theta[m], self.fragments[p]) + (1 - alpha) * self.anchor[m][p]
            unflatten(mixed, self.theta[m], self.fragments[p])
        late = 0 if self.update == "fresh" or self.is_dense(p) else self.delay_rounds
        self.used[p] = max(self.used[p], len(self.mean[p]) - late)

    def outer_gradient(self, m: int, p: int) -> Tensor:
        """Delta(t), or Delta(t - kH), or Delta(t - kH) + w_m / sum of w * (Delta_m(t) - Delta_m(t - kH))."""
        if self.update == "fresh" or self.is_dense(p):
            return self.mean[p][-1]
        zero = torch.zeros_like(self.anchor[m][p])
        there_is_one = len(self.mean[p]) - sum(rounds for rounds, _ in self.dense_start) > self.delay_rounds
        late_mean = self.mean[p][-1 - self.delay_rounds] if there_is_one else zero
        if self.update == "delayed":
            return late_mean
        share = self.weights[m] / sum(self.weights)
        fresh = self.sent[m][p][-1]
        stale = self.sent[m][p][-1 - self.delay_rounds] if there_is_one else zero
        return late_mean + share * fresh - share * stale

    def outer_step(self, m: int, p: int, delta: Tensor, number: int) -> None:
        """v = mu * v + Delta; anchor = anchor - lr * (Delta + mu * v)."""
        self.outer_steps[m][p] = number
        lr, mu = self.outer_lr, self.outer_momentum
        warm = number - 1 - sum(rounds for rounds, _ in self.dense_start)
        if warm < self.warmup_rounds:
            part = max(0, warm) / max(1, self.warmup_rounds)
            lr, mu = 1 + part * (lr - 1), part * mu
        if 0 < number <= sum(rounds for rounds, _ in self.dense_start):
            self.anchor[m][p] = self.anchor[m][p] - delta
            return
        v = self.velocity[m][p] = mu * self.velocity[m][p] + delta
        direction = delta + mu * v if self.nesterov else v
        self.anchor[m][p] = self.anchor[m][p] - lr * direction

    def finish(self) -> Weights:
        """What has not been applied yet is, without mixing; then one more outer step takes what has not been sent yet
        (in place of a first outer step, the mean is taken as it is); then all islands take the (weighted mean of the)
        anchors.
        """
        result = {name: value.clone() for name, value in self.start.items()}
        for p, names in enumerate(self.fragments):
            closing = self.closing_mean(p)
            for number in range(max(self.used[p], 0), len(self.mean[p])):
                for m, w_m in enumerate(self.weights):
                    own = self.sent[m][p][number] * (w_m / sum(self.weights))
                    delta = self.mean[p][number] - (own if self.update == "eager" else 0.0)
                    self.outer_step(m, p, delta, number + 1 + (self.delay_rounds if self.update != "fresh" else 0))
            for m in range(len(self.weights)) if closing is not None else ():
                if self.outer_steps[m][p] == 0:
                    self.anchor[m][p] = self.anchor[m][p] - closing
                else:
                    self.outer_step(m, p, closing, self.outer_steps[m][p])
            if self.update == "eager":
                total = sum(w_m * self.anchor[m][p] for m, w_m in enumerate(self.weights))
                unflatten(total / sum(self.weights), result, names)
            else:
                unflatten(self.anchor[0][p], result, names)
        return result

    def closing_mean(self, p: int) -> Tensor | None:
        """The mean of what the islands have learned of a fragment since they last sent it."""
        if not self.fragments[p] or self.sent_at[p] == self.t:
            return None
        in_flight = self.update == "fresh" and len(self.mean[p]) > self.used[p]
        deltas = []
        for m in range(len(self.weights)):
            delta = self.anchor[m][p] - flatten(self.theta[m], self.fragments[p])
            if in_flight:
                delta = delta - self.sent[m][p][-1]
            elif self.error_feedback:
                delta = delta + self.residual[m][p]
            deltas.append(self.through_codec(delta))
        return self.mean_of(deltas)

    def through_codec(self, values: Tensor) -> Tensor:
        return self.codec.decode(self.codec.encode(values), values.numel())


def flatten(weights: Weights, names: Sequence[str]) -> Tensor:
    return torch.cat([torch.zeros(0), *(weights[name].reshape(-1) for name in names)])


def unflatten(vector: Tensor, weights: Weights, names: Sequence[str]) -> None:
    for name, part in zip(names, vector.split([weights[name].numel() for name in names]), strict=True):
        weights[name] = part.view(weights[name].shape).clone()


# ---- the toy problem


class Tower(nn.Module):
    """Something outside, and a stack of layers. One piece is longer than the largest block of any codec."""

    def __init__(self, layers: int = 3, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 27)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(layers))
        self.head = nn.Linear(5, 1)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randint(-64, 65, parameter.shape, generator=generator) / 64)


def toy_gradient(island: int, step: int, index: int, weight: Tensor) -> Tensor:
    """A pull towards zero, and a push that is different on every island, at every step, for every value."""
    return weight / 64 + _push(island, step, index, weight.shape)


@functools.lru_cache(maxsize=4096)
def _push(island: int, step: int, index: int, shape: torch.Size) -> Tensor:
    place = torch.arange(shape.numel()).view(shape)
    return ((place * 37 + island * 101 + step * 53 + index * 71 + place * step) % 127 - 63) / 2048


def toy_inner_step(island: int, step: int, weights: Weights) -> None:
    """SGD with learning rate 1, on the reference's side."""
    for index, (name, weight) in enumerate(weights.items()):
        weights[name] = weight - toy_gradient(island, step, index, weight)


def toy_backward(model: nn.Module, island: int, step: int) -> None:
    """Instead of a backward pass, on the engine's side."""
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = toy_gradient(island, step, index, parameter.detach()).to(parameter.dtype)


def weights_of(model: nn.Module) -> Weights:
    """A copy of the weights as they are now."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: Weights, other: Weights) -> bool:
    """Whether two sets of weights are equal, bit for bit but for the sign of zero."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def largest_difference(one: Weights, other: Weights) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
