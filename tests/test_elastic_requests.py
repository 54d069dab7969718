"""Operations in flight, on a store that answers with what a test puts in its mouth."""

import pytest

from isles import MismatchError
from isles.elastic.decisions import Settings
from isles.elastic.requests import Answer, Requests


def attempts(requests, reply, most):
    """Answers every operation, and lets time pass, until nothing is left to do; returns the kinds that were tried."""
    kinds, now = [], 0.0
    while len(kinds) < most:
        ready, requests.ready = requests.ready, []
        for operation in ready:
            kinds.append(operation.kind)
            requests.answer(operation, reply(operation), now)
        if not requests.ready:
            if not requests._later:
                break
            now = requests.wake_at
            requests.wake(now)
    return kinds, now


def test_a_store_may_be_away_for_days():
    requests = Requests(Settings(timeout=1e6), "seed")
    requests.start(0.0, "get", "run.json", lambda answer, now: None)
    kinds, now = attempts(requests, lambda operation: Answer("again", "503"), 5000)
    assert len(kinds) == 5000
    assert now < 5000 * Settings().longest_backoff


def test_a_document_that_is_damaged_on_its_way_is_read_again():
    """With a key the store client sees that bytes are wrong, and not the protocol: the next read may be right."""
    requests, got = Requests(Settings(), "seed"), []
    requests.start(0.0, "get", "seals/00000001.json", lambda answer, now: got.append(answer.value))
    replies = [Answer("damaged", "a wrong tag"), Answer("again", "503"), Answer("ok", b"seal")]
    assert attempts(requests, lambda operation: replies.pop(0), 10)[0] == ["get"] * 3
    assert got == [b"seal"]


def test_a_document_that_stays_damaged_is_an_error_soon():
    requests = Requests(Settings(), "seed")
    requests.start(0.0, "get", "seals/00000001.json", lambda answer, now: None)
    with pytest.raises(MismatchError, match="not written with this key"):
        attempts(requests, lambda operation: Answer("damaged", "it was not written with this key"), 10)
