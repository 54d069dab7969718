"""Event logs of made-up runs, as a trainer would write them, for the tests of everything that looks at runs.

Losses fall like a power law with noise; what is sent, when, and when it is applied follows the schedule of the papers:
fragment p of P at floor(p * H / P) of every period, applied `lateness` steps later.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from isles.view.runs import Run, distinct_names, reference, summarize
from isles.view.table import table

PARAMETERS = 1_310_720
METHODS: dict[str, dict[str, Any] | None] = {
    "data-parallel": None,
    "diloco": {"sync_every": 30, "overlap": 0, "codec": "fp32", "update": "fresh", "delay_rounds": 1},
    "streaming": {"sync_every": 30, "overlap": 1, "codec": "e3m0", "update": "fresh", "delay_rounds": 1},
    "eager": {"sync_every": 30, "overlap": 0, "codec": "e3m0", "update": "eager", "delay_rounds": 1},
}
FINAL_LOSS = {"data-parallel": 3.05, "diloco": 3.08, "streaming": 3.065, "eager": 3.11}
SAMPLE = """def read(path):
    'Returns the lines of a file.'
    with open(path, encoding="utf-8") as stream:
        return [line.rstrip() for line in stream]


class Reader:
    def __init__(self, source, buffer_size=8192):
        self.source = source
        self._closed = False
"""


def synthetic(
    method_name: str = "streaming",
    *,
    name: str | None = None,
    steps: int = 2000,
    islands: int = 2,
    eval_every: int | None = 200,
    finished: bool = True,
    seed: int = 0,
    sample: str = SAMPLE,
    start_time: float = 1_750_000_000.0,
) -> list[dict[str, Any]]:
    """The events of one run."""
    chance = random.Random(f"{method_name} {seed}")
    method = METHODS[method_name]
    period = method["sync_every"] if method else 1
    layers = [] if method is None else ["all"] if method_name == "diloco" else ["embeddings", "0,3", "1,4", "2,5"]
    fragments = [{"numel": PARAMETERS // len(layers), "layers": text} for text in layers]
    offsets = [p * period // len(fragments) for p in range(len(fragments))]
    lateness = 0 if method is None else method["overlap"] if method["update"] == "fresh" else period
    bits = {"fp32": 32, "e3m0": 4.25}[method["codec"]] if method else 32
    now, total_bytes, tokens_per_step = start_time, 0, 8192
    peak, waits, seconds_total = 0, 0.0, 0.0
    events: list[dict[str, Any]] = []

    def write(event: str, **fields: Any) -> None:
        events.append({"event": event, "time": now, **fields})

    write(
        "config",
        island=0,
        islands=islands,
        name=name or method_name,
        config={"data": "stdlib", "steps": steps, "batch": 16, "seed": seed, "learning_rate": 4e-4},
        method=method,
        method_name=method_name,
        parameters=PARAMETERS,
        layers=6,
        fragments=fragments,
        tokens_per_step=tokens_per_step,
    )
    for step in range(1, steps + 1):
        curve = FINAL_LOSS[method_name] + 5.9 * math.exp(-step / 60) + 1.5 * (1 - step / (steps + 1)) ** 2
        sent_in_step, now = 0, now + 0.055
        for island in range(islands):
            waited, sent = 0.0, 0
            if method is None:
                waited, sent = abs(chance.gauss(0.031, 0.003)), PARAMETERS * 4
            for p, offset in enumerate(offsets):
                first = step - offset
                if first % period == 0:
                    num_bytes = int(fragments[p]["numel"] * bits / 8)
                    sent += num_bytes
                    write(
                        "send",
                        island=island,
                        step=step,
                        fragment=p,
                        round=first // period + (offset > 0),
                        num_bytes=num_bytes,
                    )
                late = step - lateness - offset
                if late % period == 0 and (late + offset >= 1 or lateness >= period):
                    pause = 0.4 + abs(chance.gauss(0, 0.05)) if lateness == 0 else abs(chance.gauss(0, 0.0012))
                    pause += 0.02 if chance.random() < 0.03 else 0
                    waited += pause
                    round_number = late // period + (offset > 0)
                    write("apply", island=island, step=step, fragment=p, round=round_number, seconds=pause)
            seconds = 0.055 + waited
            write(
                "step",
                island=island,
                step=step,
                loss=curve + chance.gauss(0, 0.09),
                learning_rate=4e-4,
                seconds=seconds,
                wait_seconds=waited,
                bytes_sent=sent,
                tokens=step * tokens_per_step,
            )
            total_bytes, sent_in_step = total_bytes + sent, sent_in_step + sent
            waits, seconds_total = waits + waited, seconds_total + seconds
        now += waited
        peak = max(peak, sent_in_step)
        if eval_every and (step % eval_every == 0 or step == steps):
            write(
                "eval",
                island=0,
                step=step,
                tokens=step * tokens_per_step,
                val_loss=curve + 0.03,
                val_bits_per_byte=(curve + 0.03) / 2.17,
                bytes_sent=total_bytes,
                wall_seconds=now - start_time,
            )
            write("checkpoint", step=step, path=f"checkpoints/{step}")
    if finished:
        wall = now - start_time
        write("sample", prompt="def read(path):", text=sample)
        write(
            "end",
            val_loss=curve + 0.03 if eval_every else None,
            val_bits_per_byte=(curve + 0.03) / 2.17 if eval_every else None,
            steps=steps,
            tokens=steps * tokens_per_step,
            islands=islands,
            bytes_sent=total_bytes,
            peak_bytes_per_step=peak,
            compute_utilization=1 - waits / seconds_total,
            wall_seconds=wall,
            tokens_per_second=steps * tokens_per_step / wall,
            run_dir="runs/made-up",
        )
    return events


def save(events: list[dict[str, Any]], folder: Path) -> Path:
    """Writes a run's folder and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def test_bytes_are_compared_with_the_data_parallel_run():
    runs = [Run(synthetic("diloco", steps=60)), Run(synthetic("data-parallel", steps=60))]
    diloco, baseline = summarize(runs)
    assert reference(runs) == 1
    assert diloco.byte_ratio == 30.0
    assert baseline.byte_ratio == 1.0


def test_without_a_data_parallel_run_bytes_are_compared_with_the_largest():
    runs = [Run(synthetic("streaming", steps=60)), Run(synthetic("diloco", steps=60))]
    assert reference(runs) == 1
    assert summarize(runs)[1].byte_ratio == 1.0


def test_one_run_alone_is_compared_with_nothing():
    runs = [Run(synthetic("streaming", steps=60))]
    assert reference(runs) is None
    assert summarize(runs)[0].byte_ratio is None


def test_an_unfinished_run_is_summed_up_from_its_steps():
    events = synthetic("streaming", steps=300, eval_every=100)
    whole, crashed = summarize([Run(events), Run([event for event in events if event["event"] != "end"])])
    assert whole.finished
    assert not crashed.finished
    for name in ("val_loss", "bytes_sent", "peak_bytes_per_step", "steps", "tokens"):
        assert getattr(crashed, name) == getattr(whole, name), name
    for name in ("compute_utilization", "wall_seconds", "tokens_per_second"):
        assert math.isclose(getattr(crashed, name), getattr(whole, name), rel_tol=0.02), name


def test_time_between_a_crash_and_its_resume_does_not_count():
    before = synthetic("streaming", steps=100, finished=False)
    again = synthetic("streaming", steps=200, start_time=before[-1]["time"] + 86_400)
    resumed = [again[0], {"event": "resume", "time": again[0]["time"], "step": 100}]
    after = [event for event in again[1:] if event.get("step", 200) > 100]
    run = Run(before + resumed + after)
    assert [step.step for step in run.steps] == list(range(1, 201))
    assert run.steps[-1].wall_seconds < 60


def test_rounds_pair_sends_with_applies():
    streaming = Run(synthetic("streaming", steps=90))
    assert all(each.applied_step in (None, each.sent_step + 1) for each in streaming.rounds)
    eager = Run(synthetic("eager", steps=90))
    assert all(each.applied_step in (None, each.sent_step + 30) for each in eager.rounds)
    assert any(each.applied_step is None for each in eager.rounds)


def test_runs_of_the_same_name_are_told_apart():
    assert distinct_names([Run([], "a"), Run([], "a"), Run([], "a")]) == ["a", "a (2)", "a (3)"]


def test_the_table_has_a_line_per_run_and_no_control_characters():
    runs = [
        Run(synthetic("data-parallel", steps=40)),
        Run(synthetic(name="bad\x1b[31m\nname", steps=40, finished=False)),
    ]
    lines = table(runs).split("\n")
    assert len(lines) == 3
    assert lines[1].startswith("data-parallel ")
    assert "\x1b" not in lines[2]
    assert lines[2].endswith("(not finished)")
