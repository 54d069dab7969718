"""The schedule sends every fragment once per period, applies every round exactly `lateness` steps later, and is a pure
function of the step: the same on every island, from whatever step one starts to ask.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import isles
from isles.core.schedule import Due, Schedule
from tests.starts import dense_starts

SWEEP = settings(max_examples=150, deadline=None, derandomize=True)


def sends(schedule: Schedule, steps: int) -> dict[tuple[int, int], int]:
    """(fragment, round) -> the step at which it is sent."""
    return {(due.fragment, due.round): step for step in range(1, steps + 1) for due in schedule.sends(step)}


def applies(schedule: Schedule, steps: int) -> dict[tuple[int, int], int]:
    return {(due.fragment, due.round): step for step in range(1, steps + 1) for due in schedule.applies(step)}


@st.composite
def schedules(draw, updates=("fresh", "delayed", "eager")):
    update = draw(st.sampled_from(updates))
    every = draw(st.integers(1, 40))
    fragments = draw(st.integers(1, 12))
    method = isles.Method(
        sync_every=every,
        fragments=fragments,
        offsets=draw(st.none() | st.lists(st.integers(0, every - 1), min_size=fragments, max_size=fragments)),
        overlap=draw(st.integers(0, every - 1)) if update == "fresh" else 0,
        update=update,
        delay_rounds=1 if update == "fresh" else draw(st.integers(1, 3)),
    )
    return method, Schedule.of(method, fragments)


def test_the_example_of_the_paper():
    schedule = Schedule.of(isles.Method(sync_every=100, fragments=2), 2)
    sent = {0: [], 1: []}
    for step in range(1, 401):
        for due in schedule.sends(step):
            sent[due.fragment].append(step)
    assert sent == {0: [100, 200, 300, 400], 1: [50, 150, 250, 350]}


@pytest.mark.parametrize(
    ("every", "fragments", "offsets"),
    [
        (100, 3, (0, 33, 66)),
        (100, 8, (0, 12, 25, 37, 50, 62, 75, 87)),
        (5, 7, (0, 0, 1, 2, 2, 3, 4)),
        (1, 3, (0, 0, 0)),
    ],
)
def test_fragments_are_spread_evenly_unless_told_otherwise(every, fragments, offsets):
    assert Schedule.of(isles.Method(sync_every=every), fragments).offsets == offsets


@SWEEP
@given(schedules())
def test_every_fragment_is_sent_exactly_once_in_any_period(method_and_schedule):
    method, schedule = method_and_schedule
    every = method.sync_every
    for start in (1, 2, every, 2 * every + 1):
        in_a_period = [due.fragment for step in range(start, start + every) for due in schedule.sends(step)]
        assert sorted(in_a_period) == list(range(method.fragments))


@SWEEP
@given(schedules())
def test_rounds_count_from_one_and_start_at_the_offset(method_and_schedule):
    method, schedule = method_and_schedule
    for fragment, offset in enumerate(schedule.offsets):
        steps = [step for step in range(1, 4 * method.sync_every + 1) if Due(fragment, 1) in schedule.sends(step)]
        assert steps == [offset or method.sync_every], "a short first round, or a whole one where the offset is zero"
        rounds = [due.round for step in range(1, 81) for due in schedule.sends(step) if due.fragment == fragment]
        assert rounds == list(range(1, len(rounds) + 1))


@SWEEP
@given(schedules())
def test_every_round_is_applied_once_exactly_so_late(method_and_schedule):
    method, schedule = method_and_schedule
    lateness = method.overlap if method.update == "fresh" else method.delay_rounds * method.sync_every
    horizon = 6 * method.sync_every
    sent, applied = sends(schedule, horizon), applies(schedule, horizon)
    assert method.lateness == lateness
    assert {key: step for key, step in applied.items() if key[1] >= 1} == {
        key: step + lateness for key, step in sent.items() if step + lateness <= horizon
    }
    if method.update == "fresh":
        assert all(number >= 1 for _, number in applied)
    else:  # an outer step at every send, also in the first rounds, where there is nothing late to use yet
        assert sorted(applied.values()) == sorted(sent.values())


@SWEEP
@given(schedules())
def test_order_is_that_of_the_fragments_and_asking_changes_nothing(method_and_schedule):
    method, schedule = method_and_schedule
    again = Schedule.of(method, method.fragments)
    for step in reversed(range(1, 2 * method.sync_every + 2)):
        for due in (schedule.sends(step), schedule.applies(step)):
            assert [item.fragment for item in due] == sorted({item.fragment for item in due})
        assert (schedule.sends(step), schedule.applies(step)) == (again.sends(step), again.applies(step))
        assert (schedule.sends(step), schedule.applies(step)) == (schedule.sends(step), schedule.applies(step))


@SWEEP
@given(schedules(updates=("fresh",)))
def test_no_fragment_is_sent_again_before_its_last_result_is_in(method_and_schedule):
    _, schedule = method_and_schedule
    in_flight: set[int] = set()
    for step in range(1, 5 * schedule.sync_every + 1):
        for due in schedule.sends(step):
            assert due.fragment not in in_flight
            in_flight.add(due.fragment)
        for due in schedule.applies(step):
            in_flight.remove(due.fragment)


@st.composite
def with_dense_start(draw, updates=("fresh", "delayed", "eager")):
    method, _ = draw(schedules(updates))
    method = dataclasses.replace(method, dense_start=draw(dense_starts(method.sync_every)))
    return method, Schedule.of(method, method.fragments)


@SWEEP
@given(with_dense_start())
def test_every_fragment_has_all_rounds_of_every_stage_of_a_dense_start(method_and_schedule):
    method, schedule = method_and_schedule
    begin, number = 0, 0
    for rounds, every in method.dense_start:
        stage = range(begin + 1, begin + rounds * every + 1)
        for fragment in range(method.fragments):
            sent = [(step, due.round) for step in stage for due in schedule.sends(step) if due.fragment == fragment]
            assert [found for _, found in sent] == list(range(number + 1, number + rounds + 1))
            assert {after - before for (before, _), (after, _) in itertools.pairwise(sent)} <= {every}
        begin, number = begin + rounds * every, number + rounds
    assert schedule.start_steps == begin


@SWEEP
@given(with_dense_start())
def test_after_a_dense_start_all_is_as_without_it(method_and_schedule):
    method, schedule = method_and_schedule
    plain, begin = Schedule.of(dataclasses.replace(method, dense_start=()), method.fragments), schedule.start_steps
    for step in range(1, 3 * method.sync_every):
        for found, expected in ((schedule.sends, plain.sends), (schedule.applies, plain.applies)):
            shifted = [(due.fragment, due.round - method.dense_rounds) for due in found(begin + step)]
            assert shifted == list(expected(step))


@SWEEP
@given(with_dense_start())
def test_in_a_dense_start_every_round_is_applied_at_the_step_at_which_it_is_sent(method_and_schedule):
    _, schedule = method_and_schedule
    for step in range(1, schedule.start_steps + 1):
        assert schedule.applies(step) == schedule.sends(step)


def test_several_fragments_can_be_in_flight():
    schedule = Schedule.of(isles.Method(sync_every=8, fragments=4, overlap=7), 4)
    started = {step: [due.fragment for due in schedule.sends(step)] for step in range(8, 16)}
    ended = {step: [due.fragment for due in schedule.applies(step)] for step in range(8, 16)}
    assert started == {8: [0], 9: [], 10: [1], 11: [], 12: [2], 13: [], 14: [3], 15: []}
    assert ended == {8: [], 9: [1], 10: [], 11: [2], 12: [], 13: [3], 14: [], 15: [0]}


def test_nothing_happens_before_the_first_step():
    schedule = Schedule.of(isles.Method(sync_every=3, fragments=2, offsets=(0, 0)), 2)
    assert schedule.sends(0) == schedule.applies(0) == ()


def test_offsets_must_fit_the_number_of_fragments_that_the_model_turns_out_to_have():
    with pytest.raises(ValueError, match="offsets has 2 entries for 5 fragments"):
        Schedule.of(isles.Method(offsets=(0, 50)), 5)
