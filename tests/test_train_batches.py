"""Batches: who sees which tokens when."""

import hashlib
import itertools
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.train.batches import IGNORED, Batches, permuted, validation_batches

END = 0


def stream_of(lengths, first=1):
    """Documents of these lengths, every token different, each between two end-of-text tokens."""
    tokens, following = [], itertools.count(first)
    for length in lengths:
        tokens += [END, *itertools.islice(following, length), END]
    return np.array(tokens, np.uint32)


def token_set(train=None, validation=None):
    return types.SimpleNamespace(train=train, validation=validation, end_of_text=END)


def batches(train, **options):
    defaults = {"seed": 0, "island": 0, "islands": 1, "batch_size": 2, "sequence_length": 8}
    return Batches(token_set(train), **{**defaults, **options})


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- the permutation


@given(st.integers(1, 3000), st.text(max_size=8))
@settings(max_examples=60, deadline=None)
def test_permutation_permutes(count, key):
    assert sorted(permuted(np.arange(count), count, key).tolist()) == list(range(count))


def test_permutation_of_a_part_is_a_part_of_the_permutation():
    whole = permuted(np.arange(1000), 1000, "key")
    places = np.array([999, 3, 3, 500])
    assert (permuted(places, 1000, "key") == whole[places]).all()


@pytest.mark.parametrize("count", [2, 5, 17])
def test_permutation_looks_random(count):
    draws = 600
    seen = np.zeros((count, count))
    for key in range(draws):
        seen[np.arange(count), permuted(np.arange(count), count, f"{key}")] += 1
    expected = draws / count
    # Chi-square over a row has count - 1 degrees of freedom; seven standard deviations is far out.
    chi = ((seen - expected) ** 2 / expected).sum(1)
    assert (chi < count - 1 + 7 * (2 * (count - 1)) ** 0.5).all()


def permuted_in_plain_python(value, count, key):
    """The same in Python's own integers, one place at a time."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, digest = 2**half - 1, hashlib.blake2b(key.encode(), digest_size=64).digest()
    while True:
        left, right = value >> half, value & mask
        for n in range(0, 64, 8):
            mixed = right ^ int.from_bytes(digest[n : n + 8], "little")
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (mixed ^ mixed >> 31) & mask
        value = left << half | right
        if value < count:
            return value


def test_permutation_is_fixed_for_ever():
    """A resumed run, on another machine or another version of numpy, must see the same data."""
    for count, places in ((10, range(10)), (10**9, [0, 1, 10**9 - 1])):
        expected = [permuted_in_plain_python(place, count, "0/3") for place in places]
        assert permuted(np.array(places), count, "0/3").tolist() == expected
    assert permuted(np.arange(10), 10, "0/0").tolist() == [8, 7, 9, 1, 0, 6, 5, 3, 2, 4]


# ---- theorems


@given(sequences=st.integers(1, 60), islands=st.integers(1, 5), batch_size=st.integers(1, 5), seed=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_over_an_epoch_the_islands_share_out_all_sequences(sequences, islands, batch_size, seed):
    length = 4
    if sequences < islands * batch_size:
        return
    train = np.arange(1, sequences * length + 2, dtype=np.uint32)
    mine = [
        batches(train, seed=seed, island=m, islands=islands, batch_size=batch_size, sequence_length=length)
        for m in range(islands)
    ]
    epochs = 3
    order = []
    for step in range(-(-epochs * sequences // (islands * batch_size))):
        for island in mine:
            order += [tuple(row) for row in island.at(step).inputs.tolist()]
    every = sorted(tuple(range(n * length + 1, (n + 1) * length + 1)) for n in range(sequences))
    for epoch in range(epochs):
        assert sorted(order[epoch * sequences : (epoch + 1) * sequences]) == every


def test_a_batch_is_a_function_of_seed_island_and_step():
    train = stream_of([5, 30, 7, 90, 60])
    one = batches(train, seed=3, island=1, islands=2)
    in_order = [one.at(step) for step in range(20)]
    other = batches(train.copy(), seed=3, island=1, islands=2)
    for step in [19, 0, 7, 7, 3]:  # any order, any number of times: resume is exact
        assert same(other.at(step), in_order[step])
    other.at(2).inputs.zero_()
    assert same(other.at(2), in_order[2])
    assert not all(same(batches(train, seed=4, island=1, islands=2).at(n), in_order[n]) for n in range(20))
    assert not all(same(batches(train, seed=3, island=0, islands=2).at(n), in_order[n]) for n in range(20))


@pytest.mark.parametrize("islands", [2, 3])
def test_data_parallel_and_islands_see_the_same_global_batches(islands):
    train = stream_of([40, 3, 200, 17])
    whole = batches(train, batch_size=2 * islands)
    parts = [batches(train, island=m, islands=islands, batch_size=2) for m in range(islands)]
    for step in range(50):
        together = [torch.cat(pieces) for pieces in zip(*(part.at(step) for part in parts), strict=True)]
        assert same(together, whole.at(step))


def test_epochs_have_different_orders():
    island = batches(np.arange(1, 8 * 50 + 2, dtype=np.uint16), batch_size=50)
    assert not torch.equal(island.at(0).inputs, island.at(1).inputs)
    assert not torch.equal(island.at(0).inputs, torch.arange(1, 401).view(50, 8))


@given(st.lists(st.integers(1, 12), min_size=4, max_size=12), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_nothing_is_predicted_across_a_boundary_and_segments_are_documents(lengths, length):
    train = stream_of(lengths).astype(np.int64)
    # Which document a place belongs to: its two end-of-text tokens are its own.
    document = np.repeat(np.arange(len(lengths)), np.array(lengths) + 2)
    island = batches(train, batch_size=1, sequence_length=length)
    for step in range(island.sequences):
        start = int(island.sequence_numbers(step)[0]) * length
        inputs, targets, segments = (part[0].numpy() for part in island.at(step))
        own = document[start : start + length]
        crosses = own != document[start + 1 : start + length + 1]
        assert (inputs == train[start : start + length]).all()
        assert (targets == np.where(crosses, IGNORED, train[start + 1 : start + length + 1])).all()
        assert (segments == own - own[0]).all()
    assert inputs.dtype == targets.dtype == segments.dtype == np.int64


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_validation_token_is_predicted_once(lengths, length, batch_size):
    stream = stream_of(lengths)
    found = validation_batches(token_set(validation=stream), batch_size, length)
    targets = torch.cat([batch.targets for batch in found]).flatten()
    predicted = targets[targets != IGNORED].tolist()
    # All but the end-of-text tokens at the beginning of documents, in order, once.
    assert predicted == [
        int(token) for place, token in enumerate(stream) if place and not (token == END and stream[place - 1] == END)
    ]
    assert len(predicted) == len(stream) - len(lengths)
    assert found.share == 1.0
    assert len(list(found)) == len(found)
    assert all(same(one, two) for one, two in zip(found, found, strict=True))
    assert all(batch.inputs.shape[1] == length for batch in found)
    inputs = torch.cat([batch.inputs for batch in found]).flatten()[: len(stream)]
    assert inputs[: len(stream) - 1].tolist() == stream[:-1].tolist()


def test_some_of_the_validation_tokens_are_spread_over_all():
    stream = stream_of([1000])
    found = validation_batches(token_set(validation=stream), 2, 10, max_tokens=55)
    rows = torch.cat([batch.inputs for batch in found])
    assert rows.shape == (5, 10)
    assert rows[:, 0].tolist() == [0, 200, 400, 600, 800]
    assert found.share == pytest.approx(50 / 1001)
    assert validation_batches(token_set(validation=stream), 2, 10, max_tokens=10**9).share == 1.0
    assert len(validation_batches(token_set(validation=stream), 2, 10, max_tokens=1)) == 1


def test_to_moves_all_parts():
    batch = batches(stream_of([100])).at(0).to("meta")
    assert {part.device.type for part in batch} == {"meta"}


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"islands": 4, "batch_size": 4},
            "102 training tokens are 12 sequences of 8, but one step of 4 islands with batch size 4 takes 16: use more",
        ),
        ({"sequence_length": 102}, "102 training tokens are 0 sequences of 102, but one step of 1 island with"),
        ({"islands": 2, "island": 2}, r"island=2 must be from 0 to 1 \(islands - 1\)"),
        ({"island": -1}, "island=-1 must be from 0 to 0"),
        ({"islands": 0}, "islands=0 must be at least 1"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"sequence_length": 0}, "sequence_length=0 must be at least 1"),
    ],
)
def test_bad_batches_are_one_clear_line(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        batches(stream_of([100]), **options)
    assert "\n" not in str(raised.value)


def test_bad_steps_and_sizes():
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        batches(stream_of([100])).at(-1)
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        validation_batches(token_set(validation=stream_of([5])), 1, 4, max_tokens=0)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        validation_batches(token_set(validation=stream_of([5])), 0, 4)
