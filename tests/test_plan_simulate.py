"""The simulator against formulas, against long runs of itself, and against what no schedule can beat."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import isles
from isles.core.schedule import Schedule
from isles.plan import closed_form
from isles.plan.anatomy import backward_end, forward_start
from isles.plan.goodput import Failures, goodput, simulate_losses
from isles.plan.simulate import Part, actions, run, steady_state

SWEEP = settings(max_examples=60, deadline=None, derandomize=True)
FEW = settings(SWEEP, max_examples=20)

ROOMS = st.sampled_from([1, 2, 4])

seconds = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def situations(draw, updates=("fresh", "eager"), layers=False):
    """A schedule, parts with all kinds of costs, and the time of a step."""
    every = draw(st.integers(1, 16))
    update = draw(st.sampled_from(updates))
    fragments = draw(st.integers(1, 6))
    knobs = (
        {"overlap": draw(st.integers(0, every - 1))} if update == "fresh" else {"delay_rounds": draw(st.integers(1, 3))}
    )
    schedule = Schedule.of(isles.Method(sync_every=every, fragments=fragments, update=update, **knobs), fragments)
    parts = []
    for fragment in range(fragments):
        for _ in range(draw(st.integers(1, 3)) if layers else 1):
            bandwidth_times = np.array([[1.0], [0.3], [0.0]]) * draw(seconds)
            parts.append(
                Part(
                    fragment=fragment,
                    link_seconds=bandwidth_times,
                    ready=-draw(st.integers(0, 6)) / 10 if layers else 0.0,
                    needed=draw(st.integers(0, 3)) / 10 if layers else 0.0,
                    encode_seconds=draw(seconds) / 10,
                    before_seconds=draw(seconds) / 10 if layers else 0.0,
                    agree_seconds=draw(seconds) / 10,
                    delay_seconds=draw(seconds) / 10,
                    decode_seconds=draw(seconds) / 10,
                    after_seconds=draw(seconds) / 10 if layers else 0.0,
                    apply_seconds=draw(seconds) / 10,
                )
            )
    return schedule, parts, draw(st.sampled_from([0.5, 1.0, 3.0]))


@SWEEP
@given(situations())
def test_the_simulator_equals_the_formula_where_there_is_one(situation):
    schedule, parts, step = situation
    formula = closed_form.whole_fragments(schedule, parts, step)
    assume(formula is not None)
    np.testing.assert_allclose(steady_state(schedule, parts, [step]).period_seconds, formula[..., 0], rtol=1e-9)


def test_the_formula_covers_every_method():
    one = [Part(fragment=0, link_seconds=1.0)]
    for method in (isles.Method.diloco(), isles.Method.eager(fragments=1), isles.Method(fragments=1, overlap=20)):
        assert closed_form.whole_fragments(Schedule.of(method, 1), one, 1.0) is not None
    crowded = Schedule(sync_every=10, offsets=(0, 1), lateness=5)
    assert closed_form.whole_fragments(crowded, [*one, Part(fragment=1, link_seconds=1.0)], 1.0) is None


@pytest.mark.parametrize("layers", [1, 2, 7, 24])
@pytest.mark.parametrize("every", [1, 10])
def test_the_papers_whole_model_equals_the_formula(layers, every):
    layer_seconds = np.geomspace(1e-4, 3, 40)
    parts = [
        Part(
            fragment=0,
            link_seconds=layer_seconds[:, None],
            ready=backward_end(layer, layers) - 1,
            needed=forward_start(layer, layers),
        )
        for layer in range(layers)
    ]
    found = steady_state(Schedule(every, (0,), 0), parts, [1.0]).period_seconds
    np.testing.assert_allclose(found, closed_form.whole_model(every, layers, 1.0, layer_seconds), rtol=1e-9)


@FEW
@given(situations(layers=True), ROOMS)
def test_the_steady_state_is_what_a_long_run_comes_to(situation, room):
    schedule, parts, step = situation
    steady = steady_state(schedule, parts, [step], room)
    many, more = 60, 20
    growth = (
        run(schedule, parts, [step], (many + more) * schedule.sync_every, room)
        - run(schedule, parts, [step], many * schedule.sync_every, room)
    )[..., 0] / more
    # A backlog may take longer than that to build up, hence never more than the steady state, and nearly it.
    assert np.all(growth <= steady.period_seconds * (1 + 1e-9))
    np.testing.assert_allclose(growth, steady.period_seconds, rtol=0.06)


@SWEEP
@given(situations(layers=True), ROOMS)
def test_the_answer_is_exact_within_bounds_and_monotone(situation, room):
    schedule, parts, step = situation
    steady = steady_state(schedule, parts, [step], room)
    assert np.all(steady.error_seconds <= 1e-9 * steady.period_seconds)
    assert np.all(steady.period_seconds >= closed_form.least_period(schedule, parts, step)[..., 0] * (1 - 1e-12))
    assert np.all(np.diff(steady.period_seconds) <= 1e-9), "a faster link is never slower"
    assert np.all((steady.utilisation > 0) & (steady.utilisation <= 1))


@SWEEP
@given(situations(layers=True))
def test_nothing_to_wait_for_is_a_utilisation_of_one(situation):
    schedule, parts, step = situation
    free = [Part(fragment=part.fragment, link_seconds=0.0, ready=part.ready, needed=part.needed) for part in parts]
    np.testing.assert_allclose(steady_state(schedule, free, [step]).utilisation, 1.0)


@SWEEP
@given(situations(layers=True))
def test_islands_that_are_alike_are_one_island(situation):
    schedule, parts, step = situation
    one, five = (steady_state(schedule, parts, [step] * islands) for islands in (1, 5))
    np.testing.assert_allclose(one.period_seconds, five.period_seconds)


def test_the_slowest_island_sets_the_pace():
    schedule = Schedule(sync_every=10, offsets=(0,), lateness=1)
    parts = [Part(fragment=0, link_seconds=0.5)]
    steady = steady_state(schedule, parts, [1.0, 2.0, 1.5])
    assert steady.period_seconds == pytest.approx(20)
    assert steady.utilisation == pytest.approx((1 + 0.5 + 0.75) / 3)


def test_an_island_that_decodes_slowly_holds_up_the_others():
    schedule = Schedule(sync_every=10, offsets=(0,), lateness=10)
    slow = [Part(fragment=0, link_seconds=1.0, decode_seconds=np.array([1.0, 19.0]))]
    assert steady_state(schedule, slow, [1.0, 1.0]).period_seconds == pytest.approx(20)


@SWEEP
@given(situations(layers=True))
def test_more_room_never_costs_time(situation):
    schedule, parts, step = situation
    periods = [steady_state(schedule, parts, [step], room).period_seconds for room in (1, 2, 3, 8)]
    assert all(np.all(after <= before * (1 + 1e-9)) for before, after in itertools.pairwise(periods))


def test_with_room_for_two_the_link_does_not_stand_still():
    """Ten fragments, one after every step, a round late: what is held up makes room for the next one."""
    schedule = Schedule(sync_every=10, offsets=tuple(range(10)), lateness=10)
    for held_up in ({"delay_seconds": 0.9}, {"decode_seconds": 0.9}):
        parts = [Part(fragment=fragment, link_seconds=1.0, **held_up) for fragment in range(10)]
        periods = [float(steady_state(schedule, parts, [0.5], room).period_seconds) for room in (1, 2, 4)]
        assert periods == pytest.approx([19, 10, 10])
    slow = [Part(fragment=fragment, link_seconds=1.0, agree_seconds=1.5) for fragment in range(10)]
    assert float(steady_state(schedule, slow, [0.5], 4).period_seconds) == pytest.approx(15), "one agreement at a time"
    far = [Part(fragment=fragment, link_seconds=1.0, delay_seconds=3.0) for fragment in range(10)]
    assert float(steady_state(schedule, far, [0.5], 2).period_seconds) == pytest.approx(20), "two in four seconds"


def test_more_overlap_never_costs_time():
    link = np.geomspace(0.1, 30, 20)[:, None]
    parts = [Part(fragment=fragment, link_seconds=link) for fragment in range(4)]
    periods = [
        steady_state(Schedule(20, (0, 5, 10, 15), late), parts, [1.0]).period_seconds for late in (0, 1, 5, 19, 20)
    ]
    assert all(np.all(after <= before + 1e-9) for before, after in itertools.pairwise(periods))


def test_what_happens_is_what_the_schedule_says():
    method = isles.Method(sync_every=7, fragments=3, overlap=4)
    schedule = Schedule.of(method, 3)
    parts = [Part(fragment=fragment, link_seconds=1.0) for fragment in range(3)]
    found = [(action.position, action.is_wait, action.part) for action in actions(schedule, parts, 30)]
    expected = []
    for step in range(1, 31):
        expected += [(step, False, due.fragment) for due in schedule.sends(step)]
        expected += [(step, True, due.fragment) for due in schedule.applies(step) if due.round >= 1]
    assert found == expected


def test_a_thousand_islands_for_ten_thousand_steps_in_ten_seconds():
    method = isles.Method.streaming(sync_every=100, fragments=9)
    pace = np.random.default_rng(0).uniform(0.9, 1.1, 1000)
    parts = [Part(fragment=fragment, link_seconds=0.3, decode_seconds=0.01) for fragment in range(9)]
    begin = time.process_time()
    done = run(Schedule.of(method, 9), parts, pace, 10_000)
    assert time.process_time() - begin < 10
    assert done.max() == pytest.approx(10_000 * pace.max()), "nothing keeps the slowest island"


@pytest.mark.parametrize("on_loss", ["restart", "continue"])
@pytest.mark.parametrize(("islands", "restart", "saving"), [(1, 600, 0), (4, 60, 30), (20, 1200, 5)])
def test_goodput_is_what_dice_say(on_loss, islands, restart, saving):
    failures = Failures(
        mean_seconds_between_failures=40_000,
        restart_seconds=restart,
        checkpoint_every_seconds=1500,
        checkpoint_seconds=saving,
        on_loss=on_loss,
    )
    assert simulate_losses(failures, islands, 20_000, seed=1) == pytest.approx(goodput(failures, islands), abs=0.01)


def test_hopeless_failures_leave_nothing():
    hopeless = Failures(mean_seconds_between_failures=1.0, restart_seconds=3600.0)
    assert goodput(hopeless, islands=1000) == 0.0
