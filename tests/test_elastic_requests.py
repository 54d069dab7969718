"""Operations in flight, on a store that answers with what a test puts in its mouth."""

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
