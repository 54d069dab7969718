"""The protocol under faults: hundreds of seeds hold, and protocols that are broken on purpose do not."""

import dataclasses
import json
import math

import pytest

from isles import cli
from isles.elastic.faults import FAULTS
from isles.elastic.invariants import Violation
from isles.elastic.objects import seal_name
from isles.elastic.protocol import Member
from isles.elastic.simulator import Simulation
from isles.elastic.toy import State, Toy, read_payload

ALL = tuple(FAULTS)


def first_violation(member, faults=ALL, seeds=60):
    for seed in range(seeds):
        try:
            Simulation(seed, 6, 40, faults, member).run()
        except Violation as violation:
            return str(violation)
    return None


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_five_hundred_seeds_of_everything(first):
    """Fifty at a time. What happens more than 5 times in each fifty happens more than 50 times in all of them."""
    counts = {}
    for seed in range(first, first + 50):
        simulation = Simulation(seed, 8, 50, ALL)
        try:
            simulation.run()
        except Violation as violation:
            again = f"isles simulate --islands 8 --rounds 50 --seeds 1 --first-seed {seed}"
            pytest.fail(f"{violation}; {again}")
        for what, number in simulation.count.items():
            counts[what] = counts.get(what, 0) + number
    for what in ("crash", "blackout", "stall", "partition", "leave", "collector", "lost answers", "jumps", "excluded"):
        assert counts[what] > 5, counts
    assert counts["reloads"] > 0, counts  # islands that were away until payloads had been deleted
    assert counts["seals"] > 0.9 * 50 * 50, counts


def test_a_seed_replays_exactly():
    traces = ([], [], [])
    for seed, trace in zip((7, 7, 8), traces, strict=True):
        Simulation(seed, 6, 20, ALL, trace=trace).run()
    assert traces[0] == traces[1] != traces[2]
    assert len(traces[0]) > 100


# ---- the checker works


class Overwrites(Member):
    """Seals with an ordinary put: the last one wins, and others have read the first."""

    def _create_seal(self, number, data, then, now):
        self._looks.ask(now, seal_name(number), then, "put", data)


class Skips(Member):
    """Replays a round without a payload that is missing."""

    def _on_deleted(self, number, listed, now):
        seal = self.log[number]
        rest = tuple(each for each in seal.contributions if each != listed)
        if not rest:
            return super()._on_deleted(number, listed, now)
        self.log._seals[number] = dataclasses.replace(seal, contributions=rest)
        return None


class Trudges(Member):
    """Its clock counts its own steps, whatever it hears."""

    def reach(self, clock, now):
        self.clock = clock
        return clock


class CountsTwice(Member):
    """Believes that an island that was left out was in."""

    def _is_in(self, number):
        return self._rounds[number].sent is not None


@pytest.mark.parametrize(
    ("member", "invariant"),
    [(Overwrites, "I1"), (Skips, "I2"), (Trudges, "I4"), (CountsTwice, "I3")],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_a_broken_protocol_is_caught(member, invariant):
    assert (first_violation(member) or "").startswith(f"{invariant}:")


# ---- nobody is left out


@pytest.mark.parametrize("seed", range(12))
def test_with_unlimited_patience_it_is_a_world_of_a_fixed_size(seed):
    """A store that delays, loses, refuses and lies; islands of unequal speed: the bits of islands in lockstep."""
    rounds = 25
    simulation = Simulation(seed, 4, rounds, ("slow", "delay", "lost", "errors", "twice", "lies"))
    islands = simulation.most_islands
    simulation.settings = dataclasses.replace(simulation.settings, patience=math.inf, quorum=islands)
    simulation.run()
    states = lockstep(simulation.numbering, simulation.fragments, islands, rounds)
    assert simulation.checker.states[: rounds + 1] == states
    assert {seal.islands for seal in simulation.checker.seals[1:]} == {tuple(range(islands))}
    assert simulation.count["jumps"] == simulation.count["excluded"] == 0


def lockstep(numbering, fragments, islands, rounds):
    """Islands that take every step together, as `LocalWorld` has them."""
    toys, states, clock, payloads = [Toy(numbering) for _ in range(islands)], [], 0, {}
    for toy in toys:
        toy.load(State.initial(fragments), (), 0)
    states.append(toys[0].state)
    while len(states) <= rounds:
        clock += 1
        for rank, toy in enumerate(toys):
            toy.learn(rank)
        for number in numbering.sent_at(clock):
            payloads[number] = [read_payload(toy.send(number)) for toy in toys]
        for number in numbering.applied_at(clock):
            for toy in toys:
                toy.apply(number, payloads[number], True)
            states.append(toys[0].state)
    return states[: rounds + 1]


# ---- the command


def test_the_command_says_what_was_tried(capsys):
    assert cli.main(["simulate", "--islands", "3", "--rounds", "10", "--seeds", "5", "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    answer = json.loads(last)
    assert (answer["seeds"], answer["rounds"], answer["violations"]) == (5, 10, 0)
    assert answer["operations"] > 500
    assert sum("held" in line for line in text) == 7


def test_a_violation_is_exit_code_1_with_the_seed_and_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Member, "reach", Trudges.reach)
    trace = tmp_path / "trace.txt"
    flags = ["--islands", "4", "--rounds", "40", "--seeds", "20", "--faults", "slow,stall", "--trace", str(trace)]
    assert cli.main(["simulate", *flags, "--json"]) == 1
    out = capsys.readouterr().out
    answer = json.loads(out.splitlines()[-1])
    seed = answer["failing_seeds"][0]
    assert f"--seeds 1 --first-seed {seed} --faults slow,stall" in out
    assert "I4" in trace.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [(["--faults", "gremlins"], "unknown fault 'gremlins'"), (["--islands", "0"], "--islands 0 must be at least 1")],
)
def test_a_users_mistake_is_one_line(flags, complaint, capsys):
    assert cli.main(["simulate", *flags]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
