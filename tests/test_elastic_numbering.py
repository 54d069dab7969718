"""Rounds of all fragments in one sequence: computed numbers agree with counting through the schedule."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

import isles
from isles.core.schedule import Due, Schedule
from isles.elastic.numbering import Numbering


@st.composite
def schedules(draw):
    sync_every = draw(st.integers(1, 12))
    offsets = tuple(draw(st.lists(st.integers(0, sync_every - 1), min_size=1, max_size=5)))
    whole_rounds = sync_every * draw(st.integers(0, 3))
    lateness = whole_rounds or draw(st.integers(0, sync_every - 1))
    stages = st.tuples(st.integers(1, 3), st.integers(1, sync_every))
    return Schedule(sync_every, offsets, lateness, tuple(draw(st.lists(stages, max_size=2))))


@settings(deadline=None)
@given(schedules())
def test_numbers_count_the_sends_of_the_schedule(schedule):
    numbering, number = Numbering(schedule), 0
    for clock in range(80):
        sent = []
        for due in schedule.sends(clock):
            number += 1
            sent.append(number)
            place = numbering.place(number)
            assert (place.fragment, place.round, place.send_clock) == (*due, clock)
            assert numbering.number(*due) == number
        assert list(numbering.sent_at(clock)) == sent
        assert numbering.last_sent(clock) == number


@settings(deadline=None)
@given(schedules())
def test_rounds_are_applied_in_the_order_of_their_numbers_where_the_schedule_applies_them(schedule):
    numbering, applied = Numbering(schedule), []
    for clock in range(80):
        # A delayed outer step in its first rounds has nothing to apply: no round, or one of the dense start.
        due = [due for due in schedule.applies(clock) if due.round > 0 and Due(*due) not in applied]
        assert [Due(*numbering.place(k)[:2]) for k in numbering.applied_at(clock)] == due
        assert all(numbering.place(k).apply_clock == clock for k in numbering.applied_at(clock))
        applied += due
        assert numbering.last_applied(clock) == len(applied)
    assert [numbering.number(*due) for due in applied] == list(range(1, len(applied) + 1))


@settings(deadline=None)
@given(schedules(), st.integers(1, 60))
def test_whoever_starts_behind_the_log_is_in_time_for_the_next_round(schedule, number):
    numbering = Numbering(schedule)
    clock = numbering.clock_after(number)
    assert numbering.place(number).send_clock - 1 <= clock < numbering.place(number + 1).send_clock
    assert numbering.clock_after(0) == 0


@settings(deadline=None)
@given(schedules())
def test_no_more_rounds_are_in_flight_than_it_says(schedule):
    numbering = Numbering(schedule)
    flying = [numbering.last_sent(clock) - numbering.last_applied(clock - 1) for clock in range(1, 100)]
    assert max(flying) <= max(numbering.most_in_flight, len(schedule.offsets))


@pytest.mark.parametrize("update", ["fresh", "delayed"])
def test_methods_with_a_dense_start(update):
    """Rounds of the dense start are applied at once, the first ordinary one as late as the method says."""
    method = isles.Method(sync_every=10, fragments=2, update=update, dense_start=[(2, 3)])
    numbering = Numbering(Schedule.of(method, 2))
    assert [numbering.place(k) for k in (1, 4, 5)] == [
        (1, 1, 1, 1),
        (0, 2, 6, 6),
        (1, 3, 11, 11 + method.lateness),
    ]
