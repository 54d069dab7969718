"""Text from a model: one token at a time, drawn from what it predicts.

Logits are divided by the temperature (0: always the most likely token), all but the `top_k` largest are left out, and
a token is drawn with a generator of its own: sampling neither depends on nor disturbs the randomness of training. The
draw is made on the CPU, so that a seed gives the same text wherever logits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isles.train.evals import Model, evaluating, predict


def generate(
    model: Model,
    prompt_ids: Sequence[int],
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int,
    context_length: int,
    stop: int | None = None,
) -> list[int]:
    """The `count` tokens that follow the prompt (fewer if `stop`, which is left out, comes up).

    A prompt that is to start a document starts with the end-of-text token. The model sees the last `context_length`
    tokens.

    >>> always_next = lambda inputs: torch.nn.functional.one_hot((inputs + 1) % 10, 10).float()
    >>> generate(always_next, [3], 4, temperature=0, seed=0, context_length=8)
    [4, 5, 6, 7]
    """
    _check(prompt_ids, count, temperature, top_k, context_length)
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt_ids)
    with evaluating(model) as device:
        while len(tokens) < len(prompt_ids) + count:
            inputs = torch.tensor([tokens[-context_length:]], device=device)
            logits = predict(model, inputs)[0, -1].float().cpu()
            if temperature == 0:
                token = int(logits.argmax())
            else:
                likely = logits.topk(min(top_k or len(logits), len(logits)))
                odds = (likely.values / temperature).softmax(0)
                token = int(likely.indices[torch.multinomial(odds, 1, generator=generator)])
            if token == stop:
                break
            tokens.append(token)
    return tokens[len(prompt_ids) :]


def _check(prompt_ids: Sequence[int], count: int, temperature: Any, top_k: int | None, context_length: int) -> None:
    if not prompt_ids:
        raise ValueError("the prompt is empty: start it with the end-of-text token")
    if count < 0:
        raise ValueError(f"count={count} must be at least 0")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature!r} must be 0 (the most likely token) or greater")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1, or None for all tokens")
    if context_length < 1:
        raise ValueError(f"context_length={context_length} must be at least 1")
