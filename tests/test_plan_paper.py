"""The papers' tables, cell by cell, and what must hold for any model."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import numpy as np
import pytest

from isles.plan.paper import (
    EAGER_TABLE,
    GRID_GBIT,
    STREAMING_TABLE,
    PaperTiming,
    first_reaching,
    grid_steps_apart,
    published_rounding,
    table,
)
from isles.plan.variants import by_name, standard_variants
from isles.plan.workload import PRESETS, Workload

FIVE = ("data-parallel", "diloco", "streaming", "streaming-overlap", "streaming-overlap-fp4")


def workload(parameters: float, layers: int, step_seconds: float) -> Workload:
    return Workload(name="model", parameters=int(parameters), layers=layers, step_seconds=step_seconds)


MODELS = {"1B": workload(1e9, 24, 0.1), "10B": workload(1e10, 48, 0.8), "100B": workload(1e11, 108, 4.9)}


def test_at_least_45_of_50_published_cells_are_exact_and_all_within_one_grid_step():
    apart = [
        grid_steps_apart(mine, theirs)
        for model, published in STREAMING_TABLE.items()
        for method, row in published.items()
        for mine, theirs in zip(table(MODELS[model], standard_variants(100))[method].values(), row, strict=True)
    ]
    assert len(apart) == 50
    assert sum(steps == 0 for steps in apart) == 46
    assert max(map(abs, apart)) == 1


def test_published_cells_are_points_of_the_grid_rounded_twice():
    grid = {published_rounding(gbit) for gbit in GRID_GBIT}
    tables = [row for published in STREAMING_TABLE.values() for row in published.values()]
    assert all(cell in grid for row in [*tables, *EAGER_TABLE.values()] for cell in row)


@pytest.mark.parametrize("model", list(MODELS))
def test_no_table_depends_on_units_of_time(model):
    """A model with k times the parameters and k times the step time needs the same bandwidth."""
    work = MODELS[model]
    scaled = workload(7 * work.parameters, work.layers, 7 * work.step_seconds)
    assert table(scaled, standard_variants(100)) == table(work, standard_variants(100))


@pytest.mark.parametrize("model", list(MODELS))
def test_each_improvement_needs_less_bandwidth_and_utilisation_grows_with_it(model):
    work, curves = MODELS[model], []
    for variant in standard_variants(100):
        timing = PaperTiming.of(work, variant)
        curve = timing.utilisation(work.step_seconds, np.append(GRID_GBIT, 1e9) * 1e9)
        assert np.all(np.diff(curve) >= -1e-12)
        assert curve[-1] == pytest.approx(1)
        link_limit = GRID_GBIT * 1e9 * timing.schedule.sync_every * work.step_seconds / timing.bits_per_period()
        assert np.all(curve[:-1] <= np.minimum(1, link_limit) + 1e-12), "more than the link can carry"
        curves.append(curve)
    for worse, better in itertools.pairwise(curves):
        assert np.all(better >= worse - 0.01)


def test_fp4_is_16_bits_on_a_link_four_times_as_fast():
    work, variants = MODELS["1B"], by_name(standard_variants(100))
    wide = PaperTiming.of(work, variants["streaming-overlap"]).utilisation(0.1, 4e9 * GRID_GBIT)
    narrow = PaperTiming.of(work, variants["streaming-overlap-fp4"]).utilisation(0.1, 1e9 * GRID_GBIT)
    np.testing.assert_allclose(wide, narrow)


@pytest.mark.parametrize(("model", "period"), [("1B", 30), ("10B", 30), ("1B", 100), ("10B", 100)])
def test_one_outer_step_late_is_the_average_rate(model, period):
    work = MODELS[model]
    timing = PaperTiming.of(work, by_name(standard_variants(period))["eager-fp4"])
    bound = timing.average_rate_gbit(work.step_seconds)
    ours = first_reaching(timing.utilisation(work.step_seconds, GRID_GBIT * 1e9), GRID_GBIT)
    first_above = [GRID_GBIT[gbit <= GRID_GBIT][0] for gbit in bound]
    assert ours == pytest.approx(first_above), "whole rounds of slack reach what no schedule can beat"
    published = EAGER_TABLE[model, period, "outer"]
    if period == 100:
        assert published[-1] < bound[-1], "the published row is below what the link can carry"
        short = first_reaching(timing.cold_utilisation(work.step_seconds, GRID_GBIT * 1e9), GRID_GBIT)
        assert tuple(published_rounding(gbit) for gbit in short) == published


def test_a_long_run_forgets_its_start():
    work = MODELS["1B"]
    timing = PaperTiming.of(work, by_name(standard_variants(30))["eager-fp4"])
    steady = timing.utilisation(0.1, GRID_GBIT * 1e9)
    np.testing.assert_allclose(timing.cold_utilisation(0.1, GRID_GBIT * 1e9, steps=6000), steady, rtol=0.01)


def test_the_peak_falls_with_the_fragments_and_the_total_does_not():
    work, variants = MODELS["1B"], by_name(standard_variants(100))
    whole, cut = (PaperTiming.of(work, variants[name]) for name in ("diloco", "streaming"))
    assert whole.peak_bytes() == pytest.approx(8 * cut.peak_bytes())
    assert whole.bytes_per_step() == pytest.approx(cut.bytes_per_step())
    fewer = PaperTiming.of(work, variants["streaming-overlap-fp4"]).bytes_per_step()
    assert PaperTiming.of(work, variants["data-parallel"]).bytes_per_step() == pytest.approx(400 * fewer)


def test_the_full_table_takes_less_than_a_second():
    begin = time.process_time()
    found = table(MODELS["100B"], standard_variants(100))
    assert time.process_time() - begin < 1
    assert set(FIVE) <= set(found)


def test_the_papers_mode_does_not_load_torch():
    code = (
        "import sys, isles.plan.command; from isles.plan.paper import table; from isles.plan.workload import PRESETS;"
        "from isles.plan.variants import standard_variants; table(PRESETS['1B'], standard_variants(100));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_are_whole(name):
    preset = PRESETS[name]
    assert sum(preset.layer_parameters()) + preset.outside_parameters == preset.parameters
    assert preset.steps
