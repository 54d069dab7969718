"""Which tokens an island trains on at which step: a pure function of the seed, the island and the step.

The training tokens are cut into sequences of equal length. In epoch e they are taken in the order of a pseudo-random
permutation given by (seed, e), and row i of island m's batch at a step is number

    n = (step * islands + m) * batch_size + i,      epoch n // sequences,      place n % sequences

of that order. So, with no state anywhere:

    resuming at a step needs nothing but the step;
    within an epoch every sequence is used once, by one island: no two islands see the same tokens;
    M islands of batch B and one island of batch M * B see the same rows at every step: data-parallel and DiLoCo get
    the same data.

Targets are the inputs shifted by one. Two end-of-text tokens in a row are a boundary between documents (see
`isles.train.tokens`): the second is not predicted from the first (target -100, which cross-entropy ignores), and
`segments` numbers the documents of a row, so that a model can keep attention inside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isles.train.tokens import TokenSet

IGNORED = -100


class Batch(NamedTuple):
    """Rows of tokens, all [rows, sequence_length] int64."""

    inputs: Tensor
    targets: Tensor
    """The token that follows each input; -100 where nothing is to be predicted."""
    segments: Tensor
    """The document each input belongs to, numbered from 0 in every row."""

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(part.to(device, non_blocking=True) for part in self))


class Batches:
    """The training batches of one island.

    An island that has a source of its own (non-iid) is alone with it: `island=0, islands=1`. So is one of a set that
    changes, which reads all of the text in an order of its own: its number is then in the seed.
    """

    def __init__(
        self, tokens: TokenSet, *, seed: int | str, island: int, islands: int, batch_size: int, sequence_length: int
    ) -> None:
        for name, value in (("islands", islands), ("batch_size", batch_size), ("sequence_length", sequence_length)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= island < islands:
            raise ValueError(f"island={island} must be from 0 to {islands - 1} (islands - 1)")
        self.sequences = max(0, len(tokens.train) - 1) // sequence_length
        """Sequences in an epoch. The last one needs a token after it, to be predicted from its end."""
        if self.sequences < islands * batch_size:
            raise ValueError(
                f"{len(tokens.train)} training tokens are {self.sequences} sequences of {sequence_length}, but one step"
                f" of {islands} island{'s' * (islands > 1)} with batch size {batch_size} takes {islands * batch_size}:"
                " use more text, fewer islands, smaller batches or shorter sequences"
            )
        self.seed, self.island, self.islands, self.batch_size = seed, island, islands, batch_size
        self.sequence_length = sequence_length
        self._tokens = tokens

    def at(self, step: int) -> Batch:
        """The batch of a step, counted from 0."""
        starts = self.sequence_numbers(step) * self.sequence_length
        return _cut(self._tokens.train[starts[:, None] + np.arange(self.sequence_length + 1)], self._tokens.end_of_text)

    def sequence_numbers(self, step: int) -> NDArray[np.int64]:
        """Which sequences of the training tokens make up the batch of a step."""
        if step < 0:
            raise ValueError(f"step={step} must be at least 0")
        first = (step * self.islands + self.island) * self.batch_size
        epochs, places = np.divmod(np.arange(first, first + self.batch_size), self.sequences)
        numbers = np.empty_like(places)
        for epoch in np.unique(epochs):  # two at most, since an epoch is at least one global batch
            chosen = epochs == epoch
            numbers[chosen] = permuted(places[chosen], self.sequences, f"{self.seed}/{epoch}")
        return numbers


def permuted(places: NDArray[np.int64], count: int, key: str) -> NDArray[np.int64]:
    """Where a pseudo-random permutation of 0 ... count - 1, chosen by `key`, sends some of them.

    A Feistel network permutes the numbers of 2h bits, at most four times `count` of them; a number that lands outside
    is sent on until it lands inside, which permutes the numbers inside. No table is needed, however many there are.

    >>> sorted(permuted(np.arange(5), 5, "any key").tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    rounds = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=64).digest(), "<u8")
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for secret in rounds:
            left, right = right, left ^ (_mixed(right ^ secret) & mask)
        values[outside] = left << half | right
        outside = values >= count
    return values.astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the value (the finaliser of splitmix64)."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class ValidationBatches:
    """The validation tokens in order, cut into rows without overlap; can be gone through again and again."""

    def __init__(self, tokens: TokenSet, batch_size: int, sequence_length: int, max_tokens: int | None) -> None:
        for name, value in (("batch_size", batch_size), ("sequence_length", sequence_length)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens={max_tokens} must be at least 1, or None for all")
        predicted = len(tokens.validation) - 1
        rows = -(-predicted // sequence_length)
        taken = rows if max_tokens is None else max(1, min(rows, max_tokens // sequence_length))
        # Some of them: spread evenly, since the first ones may all be of one document.
        self._starts = np.arange(taken) * rows // taken * sequence_length
        self.share = float(np.minimum(sequence_length, predicted - self._starts).sum() / predicted)
        """Which part of the validation tokens this is."""
        self._tokens, self._batch_size, self._sequence_length = tokens, batch_size, sequence_length

    def __len__(self) -> int:
        return -(-len(self._starts) // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        stream = self._tokens.validation
        for first in range(0, len(self._starts), self._batch_size):
            starts = self._starts[first : first + self._batch_size]
            places = starts[:, None] + np.arange(self._sequence_length + 1)
            batch = _cut(stream[np.minimum(places, len(stream) - 1)], self._tokens.end_of_text)
            batch.targets[torch.from_numpy(places[:, 1:] >= len(stream))] = IGNORED
            yield batch


def validation_batches(
    tokens: TokenSet, batch_size: int, sequence_length: int, max_tokens: int | None = None
) -> ValidationBatches:
    """The validation tokens, or about `max_tokens` of them: every token is predicted once."""
    return ValidationBatches(tokens, batch_size, sequence_length, max_tokens)


def _cut(window: NDArray[Any], end_of_text: int) -> Batch:
    """Rows of one token more than the sequence length become inputs, targets and segments."""
    tokens = torch.from_numpy(window.astype(np.int64))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    boundary = (inputs == end_of_text) & (targets == end_of_text)
    targets[boundary] = IGNORED
    segments = boundary.long().cumsum(1) - boundary.long()  # the document changes after the boundary's first token
    return Batch(inputs.contiguous(), targets, segments)
