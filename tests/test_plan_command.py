"""`isles plan`: the shape of the answer, every kind of bad input, and the page that is made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import isles
from isles import cli
from isles.plan.compare import Question, compare
from isles.plan.document import markdown
from isles.plan.fleet import Link, alike
from isles.plan.paper import STREAMING_TABLE, grid_steps_apart
from isles.plan.penalty import penalty
from isles.plan.quantities import parse_bandwidth, parse_count, parse_seconds
from isles.plan.recommend import recommend
from isles.plan.variants import standard_variants
from isles.plan.workload import PRESETS

ROOT = Path(__file__).parent.parent
FIVE = ["data-parallel", "diloco", "streaming", "streaming-overlap", "streaming-overlap-fp4"]
SMALL = ["--params", "1M", "--layers", "4", "--step-time", "0.1"]


@pytest.fixture
def plan(monkeypatch, capsys):
    """Runs the command; gives the exit code, the text, the JSON and what went to standard error."""
    monkeypatch.setitem(cli.COMMANDS, "plan", ("isles.plan.command", "what bandwidth do I need, what will I get"))

    def call(*flags: str):
        try:
            code = cli.main(["plan", *flags])
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return code, out, json.loads(out.splitlines()[-1]) if "--json" in flags and code == 0 else None, err

    return call


@pytest.mark.parametrize(("model", "flags"), [("1B", "1e9 24 0.1"), ("10B", "10B 48 800ms")])
def test_the_papers_table_on_the_command_line(plan, model, flags):
    params, layers, step = flags.split()
    _, text, answer, _ = plan(
        *("--paper", "--params", params, "--layers", layers, "--step-time", step, "--sync-every", "100", "--json")
    )
    table = answer["gbit_per_s"]
    assert list(table)[:5] == FIVE
    apart = [
        grid_steps_apart(table[method][str(target)], cell)
        for method, row in STREAMING_TABLE[model].items()
        for target, cell in zip((50, 80, 90, 95, 99), row, strict=True)
    ]
    assert sum(steps == 0 for steps in apart) == 23
    assert max(map(abs, apart)) <= 1
    assert "papers' conventions" in text


def test_the_default_is_honest_and_says_so(plan):
    code, text, answer, _ = plan("--preset", "1B", "--bandwidth", "1Gbit", "--json")
    assert code == 0
    assert text.startswith("Honest mode")
    assert answer["mode"] == "honest"
    assert list(answer["gbit_per_s"])[:5] == FIVE
    row = answer["methods"]["streaming-overlap-fp4"]
    assert {
        "compute_utilization",
        "bytes_per_step",
        "peak_bytes_per_step",
        "days",
        "device_bytes",
        "host_bytes",
    } <= set(row)
    assert 0 < row["compute_utilization"] < 1
    assert row["device_bytes"] == 20e9
    best = answer["recommendation"]
    assert best["reached"]
    assert best["compute_utilization"] >= 0.95
    assert best["python"] in text
    assert best["quote"] in text
    assert eval(best["python"], {"isles": isles}).sync_every in (30, 100)


def test_the_bandwidth_it_asks_for_is_enough(plan):
    _, _, answer, _ = plan(*SMALL, "--json")
    for method, cells in answer["gbit_per_s"].items():
        for target, gbit in cells.items():
            if gbit is not None:
                _, _, there, _ = plan(*SMALL, "--bandwidth", f"{gbit * 1.0001}Gbit", "--json")
                assert there["methods"][method]["compute_utilization"] >= int(target) / 100
        break


def test_a_row_of_ones_own(plan):
    _, _, answer, _ = plan(*SMALL, "--sync-every", "40", "--overlap", "10", "--codec", "int8", "--json")
    own = answer["methods"]["yours"]
    assert own["python"] == "isles.Method(sync_every=40, overlap=10, codec='int8')"
    assert own["bytes_per_step"] > answer["methods"]["streaming-overlap-fp4"]["bytes_per_step"]


def test_unequal_islands(plan):
    flags = ("--islands", "3", "--upload", "20Mbit,1Gbit,1Gbit", "--download", "1Gbit", "--json")
    _, _, answer, _ = plan("--params", "1M", "--layers", "4", "--step-time", "0.1,0.2,0.1", *flags)
    assert answer["bits_per_second"] == 20e6
    assert answer["methods"]["eager-fp4"]["compute_utilization"] <= (0.5 + 1 + 0.5) / 3


def test_failures_cost_time_and_not_utilisation(plan):
    _, _, safe, _ = plan("--preset", "35M", "--json")
    _, text, risky, _ = plan("--preset", "35M", "--mtbf", "4h", "--restart-time", "10min", "--json")
    assert risky["goodput"] < 0.9
    assert "goodput" in text
    one, other = (answer["methods"]["diloco"] for answer in (safe, risky))
    assert one["compute_utilization"] == other["compute_utilization"]
    assert other["days"] == pytest.approx(one["days"] / risky["goodput"])


def test_outer_state_in_host_memory(plan):
    _, _, answer, _ = plan(*SMALL, "--outer-state", "host", "--json")
    row = answer["methods"]["streaming-overlap-fp4"]
    assert row["device_bytes"] < 20e6
    assert row["host_bytes"] > 8e6


def events(path: Path, *lines: dict) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_says_how_long_a_step_takes(plan, tmp_path):
    config = {
        "event": "config",
        "name": "demo",
        "parameters": 3_000_000,
        "layers": 6,
        "outside_parameters": 1_200_000,
        "islands": 3,
        "tokens_per_step": 512,
    }
    steps = [
        {"event": "step", "island": 0, "step": number, "seconds": seconds, "wait_seconds": 0.05}
        for number, seconds in enumerate((9.0, 0.25, 0.35, 0.25, 0.25), start=1)
    ]
    events(tmp_path / "events.jsonl", config, *steps, {"event": "something new"})
    _, _, answer, _ = plan("--events", str(tmp_path), "--tokens", "1M", "--json")
    assert answer["model"]["parameters"] == 3_000_000
    assert answer["model"]["outside_parameters"] == 1_200_000
    assert plan("--events", str(tmp_path), "--params", "1M", "--json")[2]["model"]["outside_parameters"] == 0
    assert answer["model"]["step_seconds"] == [pytest.approx(0.2)] * 3
    assert answer["model"]["steps"] == 1954
    _, _, faster, _ = plan("--events", str(tmp_path / "events.jsonl"), "--step-time", "0.1", "--islands", "2", "--json")
    assert faster["model"]["step_seconds"] == [0.1, 0.1]


def test_a_run_that_does_not_say_enough(plan, tmp_path):
    path = events(tmp_path / "events.jsonl", {"event": "config"}, {"event": "step", "step": 1, "seconds": 0.5})
    code, _, _, error = plan("--events", str(path))
    assert code == 2
    assert "--params and --layers" in error
    assert plan("--events", str(path), "--params", "1M", "--layers", "3")[0] == 0
    code, _, _, error = plan("--events", str(events(path, {"event": "config"})))
    assert code == 2
    assert "--step-time" in error


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--bandwidth 0", "--bandwidth '0' must be greater than 0"),
        ("--bandwidth -5", "must be greater than 0"),
        ("--bandwidth fast", "such as 1Gbit"),
        ("--bandwidth 1Gbot", "is not understood"),
        ("--bandwidth 1e999", "must be greater than 0"),
        ("--bandwidth 1Gbit,2Gbit,3Gbit", "3 entries for 2 islands"),
        ("--latency soon", "50ms"),
        ("--latency=-1ms", "must be 0 or more"),
        ("--step-time 0", "must be greater than 0"),
        ("--params none", "1.3B"),
        ("--params 1e9 --layers 24", "--step-time"),
        ("--preset 1B --layers 0", "layers=0"),
        ("--layers x", "invalid int"),
        ("--preset 7T", "invalid choice"),
        ("--preset 1B --fragments 26", "26 fragments are too many for 24 layers"),
        ("--paper --preset 1B --fragments 26", "26 fragments are too many for 24 layers"),
        ("--params 1e9 --layers 24 --step-time 1 --fragments 25", "25 fragments are too many for 24 layers"),
        ("--paper --params 1e9 --layers 24 --step-time 1 --fragments 25", "25 fragments are too many for 24 layers"),
        ("--fragments 0", "--fragments 0 must be at least 1"),
        ("--fragment-layers 0", "--fragment-layers 0 must be at least 1"),
        ("--fragments 3 --fragment-layers 2", "give one of them"),
        ("--sync-every 0", "sync_every=0"),
        ("--overlap 100", "overlap=100"),
        ("--codec fp1", "codec='fp1'"),
        ("--update eager --overlap 2", "overlap=2"),
        ("--islands 0", "--islands 0"),
        ("--ranks 0", "ranks=0"),
        ("--outside-params 2B", "outside_parameters"),
        ("--utilisation 0", "above 0"),
        ("--utilisation most", "percent"),
        ("--mtbf 0", "must be greater than 0"),
        ("--mtbf 3 weeks", "unrecognized arguments"),
        ("--steps 0", "--steps 0"),
        ("--steps 5 --tokens 5", "give one of them"),
        ("--events nowhere.jsonl", "nowhere.jsonl"),
        ("--events x --preset 1B", "give one of them"),
        ("--paper --latency 5ms", "--latency and --paper"),
        ("--paper --measure-coding --ranks 2", "--measure-coding, --ranks and --paper"),
        ("--plot picture.xyz", "picture.xyz must end in .png, .svg or .pdf"),
        ("--plot no/such/folder.png", "no such folder"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(plan, tmp_path, monkeypatch, flags, said):
    monkeypatch.chdir(tmp_path)
    code, _, _, error = plan(*flags.split())
    assert code == 2
    assert said in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1Gbit", 1e9),
        ("200Mbit/s", 2e8),
        ("20 Mbit", 2e7),
        ("1e9", 1e9),
        ("1.5 Gbps", 1.5e9),
        ("10kbit", 1e4),
        ("1MB/s", 8e6),
    ],
)
def test_bandwidths_as_people_write_them(text, bits):
    assert parse_bandwidth(text) == pytest.approx(bits)


def test_other_quantities_as_people_write_them():
    assert [parse_seconds(text) for text in ("5", "5s", "5 ms", "2h")] == [5, 5, 0.005, 7200]
    assert [parse_count(text) for text in ("5", "5k", "1_000", "2.5B")] == [5, 5000, 1000, 2.5e9]


def question(bandwidth: float, preset: str = "1B", islands: int = 2, paper: bool = True) -> Question:
    work = PRESETS[preset]
    return Question(workload=work, fleet=alike(islands, work.step_seconds, Link.symmetric(bandwidth)), paper=paper)


def test_the_slower_the_link_the_higher_the_price():
    found = [recommend(question(bandwidth), 0.95) for bandwidth in (1e12, 1e10, 1e9, 4e8, 1e8)]
    prices = [max(0.0, best.penalty.percent) for best in found]
    assert prices == sorted(prices)
    assert recommend(question(1e12), 0.95).variant.family == "data-parallel"
    slow = recommend(question(1e8), 0.95)
    assert slow.reached
    assert slow.variant.family == "distant"
    assert slow.variant.sync_every > 100
    assert "beyond what is published" in slow.penalty.quote


@pytest.mark.parametrize("bandwidth", [3e12, 1e10, 1e9, 5e8])
@pytest.mark.parametrize("paper", [True, False])
def test_nothing_that_reaches_it_is_better_than_what_is_recommended(bandwidth, paper):
    asked = question(bandwidth, paper=paper)
    best = recommend(asked, 0.8)
    rows = [row for period in (30, 100) for row in compare(asked, standard_variants(period))]
    reaching = [max(0.0, row.penalty.percent) for row in rows if row.utilisation >= 0.8]
    assert best.reached
    assert max(0.0, best.penalty.percent) == min(reaching)
    assert best.utilisation >= 0.8


@pytest.mark.parametrize("bandwidth", [1e8, 1e7])
def test_the_longest_overlap_is_recommended_with_mixing(bandwidth):
    best = recommend(question(bandwidth), 0.95)
    assert best.variant.family == "distant"
    every = best.variant.sync_every
    assert best.variant.method() == isles.Method.streaming(sync_every=every, overlap=every - 1, mixing=0.75)
    assert "not published" in best.penalty.quote


def test_what_cannot_be_reached_is_said():
    best = recommend(question(1e3), 0.99)
    assert not best.reached
    assert "closest" in best.reason


def test_penalties_are_the_papers():
    assert penalty("data-parallel", 1, 0, 2, 1e9).percent == 0
    assert penalty("streaming", 30, 1, 2, 35e6).percent == pytest.approx(100 * (3.53 / 3.51 - 1), abs=0.05)
    assert penalty("eager", 30, 30, 2, 500e6).percent == pytest.approx(100 * (2.71 / 2.67 - 1), abs=0.05)
    assert penalty("streaming", 100, 1, 4, 1e9).percent == pytest.approx(100 * (2.53 / 2.49 - 1), abs=0.05)
    assert penalty("streaming", 100, 1, 2, 70e9).quote.startswith("streaming at 4B")
    assert "not published" in penalty("diloco", 100, 0, 2, 1e9).quote
    assert penalty("delayed", 30, 30, 2, 1e9).percent > 10
    small = {family: penalty(family, 100, 1, 2, 30e6).percent for family in ("streaming", "eager")}
    assert small["eager"] > small["streaming"]


def test_the_picture_is_drawn(plan, tmp_path):
    for name in ("curves.png", "curves.svg"):
        code, out, _, _ = plan(*SMALL, "--overlap", "3", "--plot", str(tmp_path / name))
        assert code == 0
        assert name in out
    assert (tmp_path / "curves.png").stat().st_size > 20_000
    text = (tmp_path / "curves.svg").read_text()
    assert "<svg" in text
    assert len(re.findall("95 % from", text)) >= 5


def test_a_dense_start_is_told_beside_the_table(plan):
    code, text, answer, _ = plan("--preset", "1B", "--bandwidth", "1Gbit", "--dense-start", "10x5,5x20", "--json")
    assert code == 0
    start = answer["methods"]["yours"]["dense_start"]
    assert start["steps"] == 10 * 5 + 5 * 20
    assert start["bytes"] == pytest.approx(15 * 100 * answer["methods"]["yours"]["bytes_per_step"])
    assert start["seconds"] > start["steps"] * 0.1
    assert "yours: a dense start of 150 steps comes before that" in text
    assert answer["methods"]["streaming"]["dense_start"] is None
    code, _, _, err = plan("--preset", "1B", "--dense-start", "ten")
    assert code == 2
    assert "'ten' is no list of pairs such as 50x3,25x6" in err


def test_the_page_is_what_the_command_writes():
    page = ROOT / "docs" / "planning.md"
    assert page.read_text() == markdown(), "run: python -m isles.plan.document > docs/planning.md"
