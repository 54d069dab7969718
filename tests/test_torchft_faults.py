"""The peer's crash matrix: what its driver makes of events, without the peer."""

import sys

import pytest

from benchmarks import torchft_faults
from isles.core.method import Method
from isles.lab.elastic import figures, matrix

METHOD = Method.streaming(sync_every=40, fragments=2, overlap=15)


class Island:
    """A process that has been."""

    killed = False

    def __init__(self, name: str, ended: float, *events: dict) -> None:
        self.slot, self.started, self.ended, self.name = int(name[-3]), 0.0, ended, name
        self.events = [{"island": name, **event} for event in events]

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]


def round_(number: int, members: int, digest: str = "same", own: bool = True) -> dict:
    return {"event": "round", "number": number, "members": members, "digest": digest, "own": own}


def test_rounds_are_those_that_somebody_committed_and_say_who_was_in_them():
    """The second island dies after its part in round 2, and a new life of it is healed with round 3."""
    first, second, again = "island-0.0", "island-1.0", "island-1.1"
    events = [{"island": first, **round_(number, members)} for number, members in ((1, 2), (2, 2), (3, 1), (4, 2))]
    events += [{"island": second, **round_(1, 2)}]
    events += [{"island": again, **round_(3, 2, own=False)}, {"island": again, **round_(4, 2)}]
    found = torchft_faults.committed(events, METHOD)
    assert [each["number"] for each in found] == [1, 2, 3, 4]
    assert [each["fragment"] for each in found] == [0, 1, 0, 1]
    assert [each["islands"] for each in found] == [[first, second], [first, "?"], [first], [first, again]]
    assert [each["missing"] for each in found] == [[], [], ["?"], []]


def test_rounds_after_a_start_from_nothing_are_other_rounds():
    generation = torchft_faults.GENERATION
    lives = [
        Island("island-0.0", 3.0, round_(1, 1, "a"), round_(2, 1, "b")),
        Island("island-0.1", 9.0, round_(generation + 1, 2, "c")),
        Island("island-1.1", 9.0, round_(generation + 1, 2, "c")),
    ]
    found = torchft_faults.committed([event for life in lives for event in life.events], METHOD)
    assert [each["fragment"] for each in found] == [0, 1, 0]
    identity = figures.identity(lives, {"number": None, "digest": None, "seals": found})
    assert identity["identical"]
    assert identity["rounds_compared"] == 1


def test_the_table_says_what_was_lost_when_all_were_killed():
    names = ("survivor_waited_in_vain_seconds", "survivor_waited_seconds")
    waited = {f"{name}{more}": None for name in names for more in ("", "_most")}
    about = {"fault": "all-killed", "times": 2, "store": "s3", "rounds": 12, "islands_in_a_round": 3.0}
    nobody = {"islands_alive": 3.0, "survivors": [], "joiners": [], "joiner_seconds": None, "hanging": []}
    same = {"joiner_seconds_after_joining": None, "identical": True, "rounds_compared": 12, "failures": {}}
    record = {**about, **waited, **nobody, **same, "injected": [{}, {}]}
    own = {"rounds_from_the_start": [5, 4, 3], "restarts": ["a time-out"]}
    cells = torchft_faults.row("short", {**record, **own})
    assert dict(zip(("time-outs", *matrix.COLUMNS, "errors"), cells, strict=True))["they lost"] == "all: 5, 4"
    assert cells[0] == "short"
    assert cells[-1] == "1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--peer", sys.executable], "--peer"),
        (["--peer", "no/such/python"], "no/such/python"),
        (["--peer", sys.executable, "--faults", "store-down"], "--faults store-down has no meaning"),
        (["--peer", sys.executable, "--settings", "long"], "'long'"),
        (["--peer", sys.executable, "--times", "0"], "--times 0"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["torchft_faults.py", *arguments])
    assert torchft_faults.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torchft_faults: ")
    assert said in line
