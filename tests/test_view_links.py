"""What a run would take on another link, and what the other islands are worth, against numbers worked out by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest

from isles.plan.exchange import FRAMING
from isles.view import links
from isles.view.runs import Run, reference, summarize
from isles.view.table import table
from tests.test_view_synthetic import synthetic

DILOCO = {"sync_every": 10, "overlap": 0, "codec": "fp32", "update": "fresh", "delay_rounds": 1, "fragments": 1}


def made_up(
    val_loss: float | None = 3.0, *, islands: int = 2, method: dict[str, Any] | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """A run of 40 steps, each of 0.3 s, of which 0.1 s are waiting."""
    config = {"islands": islands, "name": "made up", "method": method, "method_name": "made up", "layers": 4}
    config |= {"parameters": 100_000, "outside_parameters": 0, "fragments": [], "config": {}} | changes
    step = {"event": "step", "time": 1.0, "loss": 5.0, "seconds": 0.3, "wait_seconds": 0.1, "bytes_sent": 7}
    return [
        {"event": "config", "time": 0.0, "island": 0, **config},
        *({**step, "island": island, "step": n, "tokens": n} for n in range(1, 41) for island in range(islands)),
        {"event": "end", "time": 2.0, "val_loss": val_loss, "bytes_sent": 0 if islands == 1 else None},
    ]


def worths(*runs: list[dict[str, Any]]) -> list[float | None]:
    return [summary.worth for summary in summarize([Run(events) for events in runs])]


def test_worth_is_the_share_of_what_data_parallel_gains():
    alone, together, method = made_up(4.0, islands=1), made_up(3.0), made_up(3.25, method=DILOCO)
    assert worths(alone, together, method) == [None, 1.0, 0.75]
    assert worths(method, together, alone) == [0.75, 1.0, None]
    assert worths(alone, together, made_up(4.5, method=DILOCO)) == [None, 1.0, -0.5]
    assert worths(made_up(4.0, islands=1, method=DILOCO), together, method) == [None, 1.0, 0.75]


@pytest.mark.parametrize(
    "others",
    {
        "nothing alone": [made_up(3.0)],
        "no data-parallel": [made_up(4.0, islands=1)],
        "other islands": [made_up(4.0, islands=1), made_up(3.0, islands=4)],
        "no gain": [made_up(3.0, islands=1), made_up(3.0)],
        "not evaluated": [made_up(None, islands=1), made_up(3.0)],
        "not finished": [made_up(4.0, islands=1)[:-1], made_up(3.0)],
        "shorter alone": [[e for e in made_up(4.0, islands=1) if e.get("step", 0) < 40], made_up(3.0)],
        "another model alone": [made_up(4.0, islands=1, parameters=5), made_up(3.0)],
    }.items(),
    ids=lambda each: each[0],
)
def test_worth_is_not_known_where_the_runs_do_not_compare(others: tuple[str, list[list[dict[str, Any]]]]):
    assert worths(made_up(3.25, method=DILOCO), *others[1])[0] is None


def test_a_run_alone_is_never_the_reference():
    alone, together, method = (Run(made_up(4.0, islands=1)), Run(made_up()), Run(made_up(method=DILOCO)))
    assert reference([alone, method, together]) == 2
    assert reference([alone, method]) == 1
    assert reference([alone, alone]) is None
    assert [summary.byte_ratio for summary in summarize([alone, together])] == [None, 1.0]


def test_the_table_has_the_columns_only_where_they_say_something():
    alone, together, method = made_up(4.0, islands=1), made_up(3.0), made_up(3.25, method=DILOCO)
    lines = table([Run(alone), Run(together), Run(method)]).split("\n")
    start, end = lines[0].index("worth"), lines[0].index("worth") + len("worth")
    assert [line[start:end].strip() for line in lines] == ["worth", "-", "100 %", "75 %"]
    assert lines[0].endswith("wall  on 20 Mbit/s")
    assert lines[1].endswith(" 8.0 s")
    assert "worth" not in table([Run(together), Run(method)])
    assert "on 20" not in table([Run(together)])
    assert "on 20" not in table([Run([], "a"), Run([], "b")])


def test_bandwidths_go_from_10_kbit_to_100_gbit_in_small_steps():
    assert (links.BANDWIDTHS[0], links.BANDWIDTHS[-1]) == (1e4, 1e11)
    assert links.EVERYDAY in links.BANDWIDTHS
    ratios = [b / a for a, b in zip(links.BANDWIDTHS, links.BANDWIDTHS[1:], strict=False)]
    assert all(1.1 < ratio < 1.26 for ratio in ratios)


def test_a_method_that_waits_for_the_whole_model_takes_computing_and_the_link():
    run = Run(made_up(method=DILOCO, fragments=[{"numel": 100_000, "layers": "0,1,2,3"}]))
    exchange = 8 * FRAMING * 400_000 / 1e6
    assert links.compute_seconds(run) == pytest.approx([0.2, 0.2])
    found = links.times(run, [1e6, 1e15])
    assert found is not None
    assert found.start_steps == 0
    assert found.step_seconds == pytest.approx([0.2 + exchange / 10, 0.2], rel=1e-3)
    assert links.seconds_on(run, 1e6) == pytest.approx(40 * 0.2 + 4 * exchange, rel=1e-3)


def test_data_parallel_sends_every_gradient_at_every_step():
    found = links.times(Run(made_up()), [1e5])
    assert found is not None
    assert found.step_seconds == pytest.approx([0.2 + 8 * FRAMING * 400_000 / 1e5], rel=0.01)


def test_the_fragments_are_those_of_the_run():
    """Half of the model in one fragment, half in another, whatever the planner would cut: one of them at a time."""
    method = {**DILOCO, "fragments": None}
    run = Run(made_up(method=method, fragments=[{"numel": 50_000, "layers": "0"}, {"numel": 50_000, "layers": "1"}]))
    exchange = 8 * FRAMING * 200_000 / 1e6
    assert links.seconds_on(run, 1e6) == pytest.approx(40 * 0.2 + 8 * exchange, rel=1e-3)


def test_the_slower_island_sets_the_pace():
    events = made_up(method=DILOCO)
    for event in events:
        if event["event"] == "step" and event["island"] == 1:
            event["seconds"] = 0.6
    assert links.compute_seconds(Run(events)) == pytest.approx([0.2, 0.5])
    assert links.seconds_on(Run(events), 1e15) == pytest.approx(40 * 0.5, rel=1e-3)


def test_a_dense_start_has_a_pace_of_its_own():
    fragments = [{"numel": 100_000, "layers": "0,1,2,3"}]
    run = Run(made_up(method={**DILOCO, "dense_start": [[5, 2]]}, fragments=fragments))
    exchange = 8 * FRAMING * 400_000 / 1e6
    found = links.times(run, [1e6])
    assert found is not None
    assert found.start_steps == 10
    assert found.start_seconds == pytest.approx([10 * 0.2 + 5 * exchange], rel=1e-3)
    assert found.seconds(5) == pytest.approx([5 * 0.2 + 2.5 * exchange], rel=1e-3)
    assert found.seconds(40) == pytest.approx([40 * 0.2 + (5 + 3) * exchange], rel=1e-3)


def test_one_island_alone_only_computes():
    run = Run(made_up(islands=1))
    assert links.times(run) == links.Times([pytest.approx(0.2)] * 106, 0, [0.0] * 106)  # type: ignore[list-item]
    assert links.seconds_on(run, 1e4) == pytest.approx(8.0)


@pytest.mark.parametrize(
    "events",
    [
        [],
        made_up()[:1],
        made_up(parameters=None),
        made_up(method={"unknown": 1}),
        made_up(method={**DILOCO, "codec": "morse"}),
        [event for event in made_up() if event["event"] != "config"],
        [event for event in made_up() if event.get("island") != 1],
        [{"event": "island", "time": 0.0, "island": 0, "rank": rank} for rank in (0, 1)] + made_up(),
    ],
    ids=["empty", "no steps", "no size", "unknown knob", "unknown codec", "no config", "half a log", "many ranks"],
)
def test_a_log_that_does_not_say_enough_is_not_planned(events: list[dict[str, Any]]):
    assert links.times(Run(events)) is None
    assert links.seconds_on(Run(events)) is None


def test_planning_is_fast():
    runs = [Run(synthetic(method, steps=500)) for method in ("data-parallel", "diloco", "streaming", "eager")]
    assert links.times(runs[1]) is not None  # loads what is needed
    begin = time.process_time()
    assert all(links.times(run) for run in runs)
    assert time.process_time() - begin < 1.0
