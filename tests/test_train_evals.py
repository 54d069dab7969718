"""Evaluation against hand-computed cases and brute force, and sampling."""

import json
import lzma
import math
import types

import numpy as np
import pytest
import torch
from torch import nn

from isles.train.batches import validation_batches
from isles.train.evals import (
    _windows,
    evaluating,
    log_likelihoods,
    multiple_choice,
    quality,
    questions,
    total_nats,
    validation,
)
from isles.train.sample import generate

torch.set_num_threads(1)


def encode(text):
    return list(text.encode())


def unigram(**odds):
    """A model of bytes that gives letters these probabilities, whatever came before, and shares out the rest."""
    left = (1 - sum(odds.values())) / (257 - len(odds))
    logits = torch.full((257,), math.log(left))
    for letter, probability in odds.items():
        logits[ord(letter)] = math.log(probability)
    return lambda inputs: logits.expand(*inputs.shape, 257)


class Tiny(nn.Module):
    """A causal model whose predictions depend on everything before: logits from running sums of embeddings."""

    def __init__(self, vocabulary=257):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)
        self.drop = nn.Dropout(0.5)

    def forward(self, inputs):
        return self.head(self.drop(self.embed(inputs).cumsum(1).tanh()))


def brute_force(model, tokens, scored):
    """The log-likelihood of the last tokens, one at a time, each from the tokens before it alone."""
    model.eval()
    total = 0.0
    for place in range(len(tokens) - scored, len(tokens)):
        logits = model(torch.tensor([tokens[:place]]))[0, -1].double()
        total += logits.log_softmax(0)[tokens[place]].item()
    return total


def write(file, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file.write_bytes(lzma.compress(text.encode()) if file.suffix == ".xz" else text.encode())
    return file


PIQA = {"goal": "g", "sol1": "aa", "sol2": "b", "label": 0}
ARC = {"question": "q", "choices": {"text": ["x", "y", "z"], "label": ["A", "B", "C"]}, "answerKey": "C"}
HELLASWAG = {
    "ind": 1,
    "activity_label": "Sport",
    "ctx_a": "A man [step] runs. [title] He",
    "ctx_b": "she",
    "ctx": "unused",
    "endings": ["[substeps] stops  now.", "goes on."],
    "label": "1",
}


# ---- validation


def tokens_of(*documents):
    stream = [token for text in documents for token in (256, *text.encode(), 256)]
    return types.SimpleNamespace(validation=np.array(stream, np.uint16), end_of_text=256)


def test_validation_of_a_uniform_model_is_known():
    tokens = tokens_of("hello", "wörld")
    found = validation(lambda inputs: torch.zeros(*inputs.shape, 257), validation_batches(tokens, 2, 4), 11)
    assert found.keys() == {"val_loss", "val_bits_per_byte"}
    assert found["val_loss"] == pytest.approx(math.log(257))
    # 11 bytes and 2 ends are predicted, log2(257) bits each.
    assert found["val_bits_per_byte"] == pytest.approx(13 * math.log2(257) / 11)


def test_validation_by_hand():
    model = unigram(a=0.5, b=0.25)
    rest = 0.25 / 255
    found = validation(model, validation_batches(tokens_of("aab"), 1, 3), 3)
    nats = -(2 * math.log(0.5) + math.log(0.25) + math.log(rest))
    assert found["val_loss"] == pytest.approx(nats / 4)
    assert found["val_bits_per_byte"] == pytest.approx(nats / math.log(2) / 3)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_validation_equals_brute_force(batch_size):
    tokens, model = tokens_of("some text to be predicted", "and more"), Tiny()
    length, total, count = 7, 0.0, 0
    for batch in validation_batches(tokens, 1, length):
        for place, target in enumerate(batch.targets[0].tolist()):
            if target != -100:
                total -= brute_force(model, [*batch.inputs[0, : place + 1].tolist(), target], 1)
                count += 1
    model.train()
    found = validation(model, validation_batches(tokens, batch_size, length), 33)
    assert found["val_loss"] == pytest.approx(total / count, rel=1e-5)
    assert model.training
    assert model.drop.training
    # Two ranks that take every other batch add up to the same.
    every = list(validation_batches(tokens, batch_size, length))
    parts = [total_nats(model, every[rank::2]) for rank in range(2)]
    assert quality(sum(part[0] for part in parts), sum(part[1] for part in parts), 33) == pytest.approx(found)


def test_a_share_of_the_text_gives_bits_per_byte_of_that_share():
    tokens = tokens_of("ab" * 500)
    model = lambda inputs: torch.zeros(*inputs.shape, 257)
    whole = validation(model, validation_batches(tokens, 4, 10), 1000)
    part = validation(model, validation_batches(tokens, 4, 10, max_tokens=200), 1000)
    assert part["val_bits_per_byte"] == pytest.approx(whole["val_bits_per_byte"], rel=2e-3)


def test_models_that_take_segments_get_them_and_outputs_with_logits_work():
    seen = []

    def with_segments(inputs, segments=None):
        seen.append(segments)
        return types.SimpleNamespace(logits=torch.zeros(*inputs.shape, 257))

    found = validation_batches(tokens_of("ab", "cd"), 1, 7)
    assert validation(with_segments, found, 4)["val_loss"] == pytest.approx(math.log(257))
    assert seen[0].tolist() == [[0, 0, 0, 0, 1, 1, 1]]
    validation(with_segments, found, 4, segments=False)
    assert seen[1] is None

    class Masked(nn.Module):
        def forward(self, inputs, segments=None):
            return with_segments(inputs, segments).logits

    validation(Masked(), found, 4)
    assert seen[2].tolist() == seen[0].tolist()


def test_validation_of_nothing_says_so():
    with pytest.raises(ValueError, match="hold no token to predict"):
        validation(unigram(), [], 10)


def evaluate_and_fail(model):
    with evaluating(model):
        assert not model.training
        assert not torch.is_grad_enabled()
        raise RuntimeError("inside")


def test_evaluating_puts_everything_back():
    model = Tiny()
    model.drop.eval()
    with pytest.raises(RuntimeError, match="inside"):
        evaluate_and_fail(model)
    assert model.training
    assert not model.drop.training
    assert torch.is_grad_enabled()


# ---- multiple choice


def test_contexts_are_worded_as_harnesses_do(tmp_path):
    (found,) = questions(write(tmp_path / "h.jsonl", [HELLASWAG]))
    assert found.context == "Sport: A man runs.. He She"
    assert found.choices == [" stops now.", "goes on."]
    assert found.answer == 1
    (found,) = questions(write(tmp_path / "p.jsonl", [PIQA]))
    assert found == ("Question: g\nAnswer:", ["aa", "b"], 0)
    (found,) = questions(write(tmp_path / "a.jsonl.xz", [ARC]))
    assert found == ("Question: q\nAnswer:", ["x", "y", "z"], 2)


@pytest.mark.parametrize("label", [0, 1])
def test_accuracy_by_hand(tmp_path, label):
    # ln p(" ") is common to all. "aa": 2 ln 0.4 = -1.83; "b": ln 0.3 = -1.20: "b" is likelier.
    # Per byte, with ln p(" ") = ln 0.2 = -1.61: "aa" (-1.61 - 1.83) / 2 = -1.72, "b" -1.61 - 1.20 = -2.81: "aa".
    model = unigram(**{"a": 0.4, "b": 0.3, " ": 0.2})
    file = write(tmp_path / "p.jsonl", [PIQA | {"label": label}])
    found = multiple_choice(model, encode, file)
    assert found == {"accuracy": float(label == 1), "accuracy_normalised": float(label == 0), "count": 1}


def test_log_likelihood_by_hand():
    model = unigram(a=0.5, b=0.25)
    rows = [(encode("xab"), 2), (encode("aaaaa"), 1), (encode("ab"), 1)]
    expected = [math.log(0.125), math.log(0.5), math.log(0.25)]
    assert log_likelihoods(model, rows) == pytest.approx(expected, rel=1e-5)


def many_rows(count):
    draw = np.random.default_rng(0)
    word = lambda: "".join(draw.choice(list("abcdefg é"), int(draw.integers(1, 12)))) + "."
    rows = [
        {"goal": word() * 2, "sol1": word(), "sol2": word() * 2, "label": int(draw.integers(2))} for _ in range(count)
    ]
    rows += [
        {
            "question": word(),
            "choices": {"text": [word() for _ in range(n)], "label": list("12345"[:n])},
            "answerKey": "2",
        }
        for n in (2, 3, 4, 5)
    ]
    return rows


@pytest.mark.parametrize("start", [None, 256])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_multiple_choice_equals_brute_force(tmp_path, start, batch_size):
    model, file = Tiny(), write(tmp_path / "mixed.jsonl", many_rows(12))
    right, right_normalised, asked = 0, 0, list(questions(file))
    for question in asked:
        prefix = ([] if start is None else [start]) + encode(question.context)
        values = [brute_force(model, prefix + encode(" " + text), len(encode(" " + text))) for text in question.choices]
        per_byte = [value / len(encode(text)) for value, text in zip(values, question.choices, strict=True)]
        right += int(np.argmax(values)) == question.answer
        right_normalised += int(np.argmax(per_byte)) == question.answer
    found = multiple_choice(model.train(), encode, file, start=start, batch_size=batch_size)
    assert found == {
        "accuracy": right / len(asked),
        "accuracy_normalised": right_normalised / len(asked),
        "count": len(asked),
    }
    assert model.training


def test_a_short_context_is_kept_to_and_scores_every_token_once(tmp_path):
    lengths = []
    uniform = unigram()

    def model(inputs):
        lengths.append(inputs.shape[1])
        return uniform(inputs)

    long = {"goal": "g" * 50, "sol1": "x" * 40, "sol2": "y" * 3, "label": 1}
    found = multiple_choice(model, encode, write(tmp_path / "p.jsonl", [long]), context_length=10, batch_size=2)
    assert max(lengths) <= 10
    # Every byte costs the same, so the shorter choice wins; per byte it is 41 / 40 (with its space) against 4 / 3.
    assert found == {"accuracy": 1.0, "accuracy_normalised": 0.0, "count": 1}
    whole = list(range(100))
    for room in (1, 2, 5, 10, 39, 40, 99, 100, None):
        scored = []
        for tokens, count in _windows(whole[:60], whole[60:], room):
            assert count < len(tokens) <= (room or 100) + 1
            scored += tokens[-count:]
        assert scored == whole[60:]


def test_a_tokenizer_that_joins_context_and_choice_still_works(tmp_path):
    joins = lambda text: [1] if text.endswith(" b") and len(text) > 2 else encode(text)
    found = multiple_choice(unigram(a=0.9), joins, write(tmp_path / "p.jsonl", [PIQA]))
    assert found["count"] == 1


def test_limit_takes_the_first(tmp_path):
    file = write(tmp_path / "p.jsonl", [PIQA] * 5 + [{"bad": 1}])
    assert multiple_choice(unigram(a=0.5), encode, file, limit=5)["count"] == 5
    with pytest.raises(ValueError, match="line 6: neither HellaSwag nor PIQA nor ARC"):
        multiple_choice(unigram(), encode, file)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "holds no questions"),
        ([{"a": 1, "b": 2}], {}, r"line 1: neither HellaSwag nor PIQA nor ARC \(fields: a, b\)"),
        ([PIQA | {"label": 2}], {}, "line 1: the answer is not one of the choices"),
        ([PIQA | {"label": -1}], {}, "line 1: the answer is not one of the choices"),
        ([PIQA | {"sol1": ""}], {}, "or a choice is empty"),
        ([PIQA, {k: v for k, v in PIQA.items() if k != "label"}], {}, "line 2: not a labelled question of piqa"),
        ([HELLASWAG | {"label": ""}], {}, "line 1: not a labelled question of hellaswag"),
        ([ARC | {"answerKey": "Q"}], {}, "line 1: not a labelled question of arc"),
        ([ARC | {"choices": ["x"]}], {}, "line 1: not a labelled question of arc"),
        ([PIQA], {"kind": "mmlu"}, "kind='mmlu' is not known: choose one of hellaswag, piqa, arc"),
        ([PIQA], {"kind": "arc"}, "line 1: not a labelled question of arc"),
        ([PIQA], {"limit": 0}, "limit=0 must be at least 1"),
        (None, {}, "cannot read .*No such file"),
    ],
)
def test_bad_questions_are_one_clear_line(tmp_path, rows, options, message):
    file = tmp_path / "q.jsonl"
    if rows is not None:
        write(file, rows)
    with pytest.raises(ValueError, match=message) as raised:
        multiple_choice(unigram(), encode, file, **options)
    assert "\n" not in str(raised.value)


# ---- sampling


def test_sampling_is_a_function_of_the_seed_and_leaves_other_randomness_alone():
    model = Tiny()
    before = torch.random.get_rng_state()
    options = {"context_length": 6, "top_k": None}
    one = generate(model, [1, 2, 3], 30, seed=5, **options)
    assert one == generate(model, [1, 2, 3], 30, seed=5, **options)
    assert one != generate(model, [1, 2, 3], 30, seed=6, **options)
    assert len(one) == 30
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.training


def test_greedy_sampling_takes_the_most_likely():
    model = Tiny()
    tokens = [7]
    with torch.no_grad():
        model.eval()
        for _ in range(10):
            tokens.append(int(model(torch.tensor([tokens[-4:]]))[0, -1].argmax()))
    assert generate(model, [7], 10, temperature=0, seed=0, context_length=4) == tokens[1:]
    assert generate(model, [7], 10, temperature=1.0, top_k=1, seed=0, context_length=4) == tokens[1:]


def test_sampling_frequencies_follow_temperature_and_top_k():
    model = unigram(a=0.4, b=0.2, c=0.1)
    drawn = generate(model, [0], 2000, temperature=0.5, top_k=2, seed=0, context_length=2)
    # Squared: 0.16 to 0.04.
    assert set(drawn) == {ord("a"), ord("b")}
    assert drawn.count(ord("a")) / 2000 == pytest.approx(0.8, abs=0.03)


def test_sampling_stops_and_keeps_to_its_context():
    lengths = []

    def model(inputs):
        lengths.append(inputs.shape[1])
        return nn.functional.one_hot(inputs + 1, 20).float()

    assert generate(model, [1, 2, 3], 50, temperature=0, seed=0, context_length=4, stop=9) == [4, 5, 6, 7, 8]
    assert lengths == [3, 4, 4, 4, 4, 4]
    assert generate(model, [1], 0, seed=0, context_length=4) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"count": -1}, "count=-1 must be at least 0"),
        ({"temperature": -0.1}, r"temperature=-0\.1 must be 0"),
        ({"temperature": float("nan")}, "temperature=nan must be 0"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"context_length": 0}, "context_length=0 must be at least 1"),
    ],
)
def test_bad_sampling_is_one_clear_line(options, message):
    with pytest.raises(ValueError, match=message):
        generate(unigram(), **{"prompt_ids": [1], "count": 1, "seed": 0, "context_length": 4, **options})
