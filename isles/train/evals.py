"""How good a language model is: bits per byte of held-out text, and multiple-choice questions.

Validation loss is nats per predicted token. It cannot be compared between tokenizers; bits per byte can: all nats of
the validation text, end-of-text tokens included, divided by ln 2 and by the UTF-8 bytes of that text.

A multiple-choice question (HellaSwag, PIQA, ARC) is answered with the choice that the model finds most likely after the
context: the largest sum of log-likelihoods of its tokens (`accuracy`), or the largest per byte of the choice
(`accuracy_normalised`), which does not favour short ones. Contexts are worded as evaluation harnesses do:

    HellaSwag   {activity}: {context}                 then " {ending}", with [title] and other brackets taken out
    PIQA, ARC   Question: {question}\\nAnswer:         then " {choice}"

A model is any callable from tokens [B, T] to logits [B, T, V], or to an object with `.logits`.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isles.core.fragments import unwrap
from isles.train.batches import IGNORED, Batch
from isles.train.text import json_lines

Model = Callable[..., Any]


def validation(
    model: Model, batches: Iterable[Batch], validation_bytes: int, *, segments: bool | None = None
) -> dict[str, float]:
    """Mean loss in nats per token, and bits per byte, over validation batches.

    `validation_bytes` belongs to the whole validation text; where the batches are only a share of it
    (`validation_batches(max_tokens=...)`), that share of the bytes is taken.
    """
    nats, count = total_nats(model, batches, segments=segments)
    return quality(nats, count, validation_bytes * getattr(batches, "share", 1.0))


def total_nats(model: Model, batches: Iterable[Batch], *, segments: bool | None = None) -> tuple[float, int]:
    """The sum of losses over some batches, and how many tokens were predicted; ranks that share the work add them up.

    Document numbers go to the model if it has an argument `segments`; True or False decides it instead.
    """
    pass_segments = takes_segments(model) if segments is None else segments
    nats, count = 0.0, 0
    with evaluating(model) as device:
        for batch in batches:
            inputs, targets, numbers = batch.to(device)
            logits = predict(model, inputs, numbers if pass_segments else None)
            nats += float(_losses(logits, targets).double().sum())
            count += int((targets != IGNORED).sum())
    return nats, count


def quality(nats: float, count: int, text_bytes: float) -> dict[str, float]:
    """What the nats of `count` tokens that stand for `text_bytes` bytes of text say about a model.

    >>> quality(nats=80 * math.log(2), count=10, text_bytes=40)["val_bits_per_byte"]
    2.0
    """
    if not count or not text_bytes:
        raise ValueError("the validation batches hold no token to predict: give more validation text")
    return {"val_loss": nats / count, "val_bits_per_byte": nats / math.log(2) / text_bytes}


class Question(NamedTuple):
    """A context and what may follow it."""

    context: str
    choices: list[str]
    answer: int


def multiple_choice(
    model: Model,
    encode: Callable[[str], list[int]],
    file: str | Path,
    kind: str | None = None,
    limit: int | None = None,
    *,
    start: int | None = None,
    context_length: int | None = None,
    batch_size: int = 16,
) -> dict[str, float]:
    """Accuracy on a JSON-lines file (also .gz, .xz) of questions, or on its first `limit` ones.

    `kind` is "hellaswag", "piqa" or "arc"; None: the fields tell. `start` is a token put before every context (the
    end-of-text token, for models trained on `isles.train.tokens`). No row is longer than `context_length`: contexts
    lose their beginning, and a choice that is longer by itself is scored in parts.
    """
    asked = list(questions(file, kind, limit))
    rows: list[tuple[int, int, list[int], int]] = []
    for number, question in enumerate(asked):
        for choice, text in enumerate(question.choices):
            prefix, continuation = _tokens(encode, question.context, " " + text, start)
            rows += [(number, choice, *row) for row in _windows(prefix, continuation, context_length)]
    scores = [[0.0] * len(question.choices) for question in asked]
    rows.sort(key=lambda row: -len(row[2]))  # rows of like length share a batch; the largest batch comes first
    with evaluating(model) as device:
        for first in range(0, len(rows), batch_size):
            part = rows[first : first + batch_size]
            found = log_likelihoods(model, [(tokens, scored) for _, _, tokens, scored in part], device)
            for (number, choice, _, _), value in zip(part, found, strict=True):
                scores[number][choice] += value
    plain = normalised = 0
    for question, values in zip(asked, scores, strict=True):
        per_byte = [value / len(text.encode()) for value, text in zip(values, question.choices, strict=True)]
        plain += values.index(max(values)) == question.answer
        normalised += per_byte.index(max(per_byte)) == question.answer
    return {"accuracy": plain / len(asked), "accuracy_normalised": normalised / len(asked), "count": len(asked)}


def log_likelihoods(model: Model, rows: list[tuple[list[int], int]], device: torch.device | str = "cpu") -> list[float]:
    """For rows (tokens, n): the log-likelihood of the last n tokens, given those before them."""
    longest = max(len(tokens) for tokens, _ in rows) - 1
    inputs = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets = torch.full_like(inputs, IGNORED)
    for row, (tokens, scored) in enumerate(rows):  # filled up on the right, where a causal model does not look
        end = len(tokens) - 1
        inputs[row, :end] = torch.tensor(tokens[:-1])
        targets[row, end - scored : end] = torch.tensor(tokens[len(tokens) - scored :])
    losses = _losses(predict(model, inputs.to(device)), targets.to(device))
    return [-value for value in losses.double().sum(1).tolist()]


def questions(file: str | Path, kind: str | None = None, limit: int | None = None) -> Iterator[Question]:
    """The questions of a file."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known: choose one of {', '.join(KINDS)}, or None to go by the fields")
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1, or None for all questions")
    count = 0
    for line, row in json_lines(Path(file).expanduser()):
        if count == limit:
            return
        of = kind or next((name for name, (fields, _) in KINDS.items() if fields <= row.keys()), None)
        if of is None:
            raise ValueError(f"{file}, line {line}: neither HellaSwag nor PIQA nor ARC (fields: {', '.join(row)})")
        try:
            question = KINDS[of][1](row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file}, line {line}: not a labelled question of {of} ({error!r})") from error
        if not 0 <= question.answer < len(question.choices) or not all(question.choices):
            raise ValueError(f"{file}, line {line}: the answer is not one of the choices, or a choice is empty")
        count += 1
        yield question
    if not count:
        raise ValueError(f"{file} holds no questions")


def _hellaswag(row: dict[str, Any]) -> Question:
    def clean(text: str) -> str:
        text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
        return text.replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return Question(clean(context), [clean(ending) for ending in row["endings"]], int(row["label"]))


def _piqa(row: dict[str, Any]) -> Question:
    return Question(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"]))


def _arc(row: dict[str, Any]) -> Question:
    labels, texts = row["choices"]["label"], row["choices"]["text"]
    return Question(f"Question: {row['question']}\nAnswer:", list(texts), labels.index(row["answerKey"]))


KINDS: dict[str, tuple[set[str], Callable[[dict[str, Any]], Question]]] = {
    "hellaswag": ({"ctx_a", "ctx_b", "endings"}, _hellaswag),
    "piqa": ({"goal", "sol1", "sol2"}, _piqa),
    "arc": ({"question", "choices", "answerKey"}, _arc),
}


def _tokens(
    encode: Callable[[str], list[int]], context: str, choice: str, start: int | None
) -> tuple[list[int], list[int]]:
    """Tokens of the context and of what follows, cut out of both together, as the model would have seen them."""
    prefix, whole = encode(context), encode(context + choice)
    together = len(whole) > len(prefix) and whole[: len(prefix)] == prefix
    prefix = prefix if start is None else [start, *prefix]
    if not prefix:
        raise ValueError(f"a context is empty, so nothing predicts the first token of {choice!r}: give a start token")
    return prefix, whole[len(prefix) - (start is not None) :] if together else encode(choice)


def _windows(prefix: list[int], continuation: list[int], length: int | None) -> Iterator[tuple[list[int], int]]:
    """Rows of at most length + 1 tokens, with how many at the end of each to score: every continuation token once."""
    whole, room = prefix + continuation, len(prefix) + len(continuation) if length is None else length
    stride = max(1, len(continuation) if len(continuation) <= room else room // 2)
    for first in range(len(prefix), len(whole), stride):
        last = min(first + stride, len(whole))
        yield whole[max(0, last - room - 1) : last], last - first


def predict(model: Model, inputs: Tensor, segments: Tensor | None = None) -> Tensor:
    """The logits of a model; `segments`, if given, number the documents that it keeps apart."""
    output = model(inputs) if segments is None else model(inputs, segments=segments)
    return output.logits if hasattr(output, "logits") else output


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every target in nats, 0 where there is none."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


def takes_segments(model: Model) -> bool:
    """Whether a model has an argument for the document numbers of its inputs."""
    function = unwrap(model).forward if isinstance(model, nn.Module) else model
    return "segments" in inspect.signature(function).parameters


@contextmanager
def evaluating(model: Model) -> Iterator[torch.device]:
    """Without gradients and with dropout off; afterwards the model is as it was. Gives the device it is on."""
    if not isinstance(model, nn.Module):
        with torch.no_grad():
            yield torch.device("cpu")
        return
    was_training = [module for module in model.modules() if module.training]
    parameter = next(model.parameters(), None)
    model.eval()
    try:
        with torch.no_grad():
            yield torch.device("cpu") if parameter is None else parameter.device
    finally:
        for module in was_training:
            module.training = True
