"""What is read from the store is checked: exact fields, bounded sizes, digests, and one clear error."""

import dataclasses
import json
import zlib

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from isles import MismatchError
from isles.core.schedule import Schedule
from isles.elastic.documents import MAX_DOCUMENT_BYTES, DamagedError
from isles.elastic.log import Log
from isles.elastic.numbering import Numbering
from isles.elastic.objects import (
    Announcement,
    Contribution,
    Manifest,
    Part,
    Run,
    Seal,
    digest,
    open_payload,
    part_name,
    payload_name,
    round_of,
)
from isles.wire.message import HEADER_BYTES, Header

SHA = digest(b"isles")
PAYLOADS = st.builds(
    Contribution,
    island=st.integers(0, 99),
    weight=st.floats(0, 1e9),
    steps=st.integers(0, 10**6),
    num_bytes=st.integers(HEADER_BYTES, 10**12),
    sha256=st.just(SHA),
)


@st.composite
def seals(draw):
    rows = draw(st.lists(PAYLOADS, min_size=1, max_size=5, unique_by=lambda each: each.island))
    rows.sort(key=lambda each: each.island)
    missing = sorted(draw(st.sets(st.integers(0, 99), max_size=3)) - {each.island for each in rows})
    numbers = (draw(st.integers(1, 10**8)), draw(st.integers(0, 50)), draw(st.integers(1, 10**9)))
    return Seal(*numbers, tuple(rows), tuple(missing), 100, SHA)


def seal(**changes):
    fields = {"round": 1, "fragment": 0, "clock": 2, "contributions": (Contribution(0, 2.0, 2, 200, SHA),)}
    return Seal(**{**fields, "missing": (), "known": 1, "previous": SHA, **changes})


def run():
    part = Part(part_name(0, "state", SHA), 16, SHA)
    return Run("a", "streaming", SHA, 8, Manifest(0, "", (part,)))


DOCUMENTS = [seal(), run(), Manifest(3, SHA, (Part(part_name(3, "x", SHA), 5, SHA),)), Announcement("me", 4)]


@settings(deadline=None)
@given(seals())
def test_a_seal_is_read_as_it_was_written(written):
    assert Seal.parse(written.pack(), "seals/1") == written


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda each: type(each).__name__)
def test_documents_are_read_as_they_were_written_and_not_otherwise(document):
    data, parse = document.pack(), type(document).parse
    assert parse(data, "name") == document
    for end in range(len(data)):
        with pytest.raises(DamagedError, match="name"):
            parse(data[:end], "name")
    fields = json.loads(data)
    for name in fields:
        for wrong in (None, -1, {"a": 1}, True):
            with pytest.raises(MismatchError, match="name"):
                parse(json.dumps({**fields, name: wrong}).encode(), "name")
        with pytest.raises(MismatchError, match="expected the fields"):
            parse(json.dumps({key: value for key, value in fields.items() if key != name}).encode(), "name")
    with pytest.raises(MismatchError, match="expected the fields"):
        parse(json.dumps({**fields, "more": 1}).encode(), "name")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_a_mismatch_and_nothing_else(data):
    for kind in (Seal, Run, Manifest, Announcement):
        with pytest.raises(MismatchError):
            kind.parse(data, "noise")


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"token":"a","round":1,"round":2}', b'{"token":"a","round":' + b"9" * 9999 + b"}", b"\xff"],
    ids=["deep", "twice", "huge", "no text"],
)
def test_hostile_documents(data):
    with pytest.raises(MismatchError, match="islands/0000"):
        Announcement.parse(data, "islands/0000.json")


def test_what_was_written_can_be_read_or_is_not_written():
    """A method that names ten thousand parameters, a model with as many frozen tensors."""
    large = dataclasses.replace(run(), method="p" * 200_000, model="m" * 200_000)
    assert Run.parse(large.pack(), "run.json") == large
    too_large = dataclasses.replace(run(), method="p" * MAX_DOCUMENT_BYTES)
    with pytest.raises(ValueError, match=f"a Run of [0-9]+ bytes: the most is {MAX_DOCUMENT_BYTES}"):
        too_large.pack()


def test_a_document_has_a_bounded_size():
    with pytest.raises(MismatchError, match="the most is"):
        Announcement.parse(b" " * (MAX_DOCUMENT_BYTES + 1), "islands/0000.json")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"contributions": ()}, "contributions"),
        ({"contributions": (Contribution(0, float("inf"), 1, 200, SHA),)}, "damaged|weight"),
        ({"contributions": (Contribution(0, -1.0, 1, 200, SHA),)}, "weight"),
        ({"contributions": (Contribution(0, 1.0, 1, 200, "0" * 63),)}, "sha256"),
        ({"contributions": (Contribution(0, 1.0, 1, 200, SHA),) * 2}, "each once"),
        ({"missing": (0,)}, "each once"),
        ({"missing": (3,)}, "known"),
        ({"round": 0}, "round"),
    ],
)
def test_seals_that_no_island_writes(changes, complaint):
    fields = json.loads(seal().pack())
    fields.update(json.loads(json.dumps({**changes}, default=vars)))
    with pytest.raises(MismatchError, match=complaint):
        Seal.parse(json.dumps(fields).encode(), "seals/00000001.json")


def test_a_snapshot_has_parts():
    with pytest.raises(MismatchError, match=r"parts is \(\), and must be names of the snapshot 3"):
        Manifest.parse(Manifest(3, SHA, ()).pack(), "snapshots/00000003/manifest.json")


def test_payloads_are_whole_or_damaged():
    body = b"outer gradient"
    data = Header("store", "fp32", 1, 7, 3, len(body), 30.0, 30, zlib.crc32(body)).pack() + body
    name = payload_name(7, 12)
    contribution, header = open_payload(name, data)
    assert contribution == Contribution(12, 30.0, 30, len(data), digest(data))
    assert (header.fragment, header.round) == (1, 7)
    for damaged in (data[:-1], data + b"x", data[:20], b"", data[:-3] + b"xxx", b"x" + data[1:]):
        with pytest.raises(DamagedError, match=r"rounds/00000007/0012.*island 12"):
            open_payload(name, damaged)


@settings(deadline=None)
@given(st.text(max_size=40))
def test_strange_names_belong_to_no_round(name):
    assert round_of(name) is None or name.startswith(("rounds/", "snapshots/"))


def test_another_model_or_method_is_refused():
    other = Run("b", "diloco", SHA, 8, run().start)
    with pytest.raises(
        MismatchError, match=r"run\.json: this run has another method \(it='streaming' there, 'diloco' here\)"
    ):
        run().check(other)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"round": 2}, "round is 2"),
        ({"fragment": 1}, "fragment"),
        ({"clock": 10**9}, "clock is 1000000000, and must be 2"),
        ({"previous": digest(b"other")}, "digest of the seal before it"),
    ],
)
def test_the_log_refuses_seals_that_do_not_follow(changes, complaint):
    log = Log(Numbering(Schedule(sync_every=2, offsets=(0,), lateness=0)))
    log.begin(SHA, gone_after=3)
    with pytest.raises(MismatchError, match=f"seals/00000001.json: its {complaint}"):
        log.append(seal(**changes), SHA)


def test_whom_the_log_names():
    """Waited for: who is in the last seal, and newcomers. Looked for: who is named by one of the last three."""
    log = Log(Numbering(Schedule(sync_every=2, offsets=(0,), lateness=0)))
    log.begin(SHA, gone_after=3)
    log.known = 2
    assert log.expected == log.wanted == (0, 1)
    both = tuple(Contribution(island, 2.0, 2, 200, SHA) for island in (0, 1))
    rounds = [(both, (), 2), (both[:1], (1,), 3), (both[:1], (), 3), (both[:1], (), 3), (both[:1], (), 3)]
    seen = []
    for number, (contributions, missing, known) in enumerate(rounds, 1):
        log.append(seal(round=number, clock=2 * number, contributions=contributions, missing=missing, known=known), SHA)
        seen.append((log.expected, log.wanted))
    assert seen == [((0, 1), (0, 1)), ((0,), (0, 1)), ((0,), (0, 1)), ((0,), (0, 1)), ((0,), (0,))]
    log.known = 4
    assert (log.expected, log.wanted) == ((0, 3), (0, 3))
