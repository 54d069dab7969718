"""`isles bench`: the whole of it on a small scale, and the parts whose answers are known."""

import json
import math
import sys

import pytest
import torch

import isles
from isles.bench import codecs, document, engine, memory, peers, scaling, targets
from isles.bench.clock import Marks, fastest
from isles.bench.command import FULL, PARTS, QUICK
from isles.bench.engine import Timings, summary
from isles.bench.kernels import without_kernels
from isles.bench.memory import Ledger
from isles.bench.training import Training
from isles.cli import main
from isles.wire import fused
from tests import forked

RANGES = ("isles.outer_gradient", "isles.encode", "isles.wait", "isles.outer_step", "isles.mix")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run in a process of its own: what it printed, and the page."""
    page = tmp_path_factory.mktemp("bench") / "docs" / "performance.md"
    words = ["-m", "isles.cli", "bench", "--quick", "--json", "--document", page]
    done = forked.run(words, page.parent.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stdout, page.read_text("utf-8")


# ---- the whole


def test_quick_run_measures_every_part(quick):
    result, text, _ = quick
    assert {
        "codecs",
        "engine",
        "phases",
        "islands",
        "scaling",
        "memory",
        "checks",
        "machine",
        "command",
    } <= result.keys()
    for title in ("codecs:", "engine: one island", "engine: two islands", "scaling:", "memory:", "what must hold"):
        assert f"\n{title}" in f"\n{text}"


def test_ratios_are_positive_and_finite(quick):
    result, _, _ = quick
    numbers = [
        row[name] for row in result["codecs"].values() for name in ("encode", "encode_into", "accumulate", "decode")
    ]
    numbers += [
        row[name]
        for row in result["engine"] + result["islands"]
        for name in ("overhead", "overhead_cpu", "longest_step")
    ]
    scaling = result["scaling"]
    numbers += [row["seconds"] for rows in (scaling["parameters"], *scaling["fragments"]) for row in rows]
    assert all(math.isfinite(number) and number > 0 for number in numbers)
    assert all(row["longest_step"] > 1 for row in result["engine"])


def test_all_codecs_are_measured_with_their_bits(quick):
    result, _, _ = quick
    assert set(result["codecs"]) == {*isles.codecs, "e3m0, PyTorch"}
    for name, codec in isles.codecs.items():
        assert result["codecs"][name]["bits"] == 8 * codec.num_bytes(QUICK.values) / QUICK.values
    assert result["codecs"]["e3m0"]["bits"] == result["codecs"]["e3m0, PyTorch"]["bits"]


def test_engine_runs_streaming_in_whole_fragments(quick):
    result, _, _ = quick
    assert [row["fragments"] for row in result["engine"] + result["islands"]] == [8, 8, 8]
    assert len(result["islands"]) == 2


def test_phases_are_measured(quick):
    result, _, _ = quick
    assert {*RANGES, "rest"} <= result["phases"].keys()
    assert all(result["phases"][name] > 0 for name in RANGES)


def test_phases_are_most_of_the_time(monkeypatch):
    """Of the processor's time: what other programs take between two phases is not isles' rest."""

    class ProcessorMarks(Marks):
        def _note(self, *_):
            super()._note()
            self.seconds = self.cpu_seconds

    monkeypatch.setattr(engine, "Marks", ProcessorMarks)
    shares = engine.phases(QUICK.islands_load.parameters, QUICK.sync_every)
    assert {*RANGES, "rest"} <= shares.keys()
    assert shares["rest"] < 0.9


def test_scaling_has_the_sizes_and_the_fragments_that_were_asked_for(quick):
    result, _, _ = quick
    for rows in result["scaling"]["fragments"]:
        assert [row["fragments"] for row in rows] == list(QUICK.fragments)
        assert len({row["parameters"] for row in rows}) == 1
    assert len(result["scaling"]["fragments"]) == len(QUICK.fragmented_parameters)
    sizes = [row["parameters"] for row in result["scaling"]["parameters"]]
    assert sizes == sorted(set(sizes))


def test_page_has_all_tables_and_the_command(quick):
    result, _, page = quick
    assert page == document.markdown(result)
    assert f"\n    {result['command']}\n" in page
    for heading in ("# What isles costs", "## In short", "## Codecs", "## Engine", "## Growth", "## Memory"):
        assert f"{heading}\n" in page
    assert page.count("\n| --- |") == 8
    for row in (*isles.codecs, *RANGES, *memory.SETTINGS):
        assert f"\n| {row} |" in page


# ---- a user's mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing called 'nothing' to measure: choose from codecs, engine, islands, scaling, memory"),
        (["codecs", "--document", "x.md"], "--document needs all parts"),
        (["peers"], "peers need --peer PYTHON"),
        (["peers", "--peer", "no/such/python"], "--peer no/such/python is no program"),
        (["codecs", "--peer", "python"], "isles bench peers --peer python"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_single_parts_and_the_number_of_threads(capsys):
    threads = torch.get_num_threads()
    assert main(["bench", "codecs", "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(PARTS) & result.keys() == {"codecs"}
    assert torch.get_num_threads() == threads


COMPARISON = """
import json, pathlib, sys
row = {"kernel_bytes": 2e6, "payload_bytes": 1e6, "step_seconds_alone": 0.1, "wall_seconds": 8.0, "val_loss": 6.5}
rows = [{**row, "who": who, "compute_utilization": 0.5} for who in ("torchft", "isles, e3m0")]
flags = sys.argv[sys.argv.index("--peer") + 1]
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.write_text(json.dumps({"bandwidth": "10Mbit", "flags": flags, "rows": rows}))
"""


def test_the_trainer_is_measured_with_the_callback_and_without(capsys):
    assert main(["bench", "trainer", "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["trainer"]["ratio"] == result["trainer"]["with_seconds"] / result["trainer"]["without_seconds"] > 0
    assert not set(PARTS) & result.keys()
    assert result["checks"] == [], "a trial says nothing about the bound"


def test_peers_are_measured_by_the_script_of_the_checkout(tmp_path, monkeypatch, capsys):
    assert peers.SCRIPT.exists()
    script = tmp_path / "against.py"
    script.write_text(COMPARISON)
    monkeypatch.setattr(peers, "SCRIPT", script)
    assert main(["bench", "peers", "--peer", sys.executable, "--json"]) == 0
    *shown, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert [row["who"] for row in result["peers"]["rows"]] == ["torchft", "isles, e3m0"]
    assert result["peers"]["flags"] == sys.executable
    assert not set(PARTS) & result.keys()
    assert any(line.split()[:3] == ["torchft", "2", "MB"] and line.endswith("50 %  6.5000") for line in shown)
    script.write_text("raise SystemExit(7)")
    with pytest.raises(SystemExit) as ended:
        main(["bench", "peers", "--peer", sys.executable])
    assert ended.value.code == 7
    script.unlink()
    assert main(["bench", "peers", "--peer", sys.executable]) == 2
    assert "checkout" in capsys.readouterr().err


def test_full_sizes_are_those_that_are_promised():
    assert FULL.sync_every == 100
    assert {load.parameters for load in FULL.loads} == {10**6, 10**7, 10**8}
    assert FULL.fragments == (1, 2, 4, 8, 16, 32, 64)
    assert FULL.fragmented_parameters == (10**7, 10**8)
    assert FULL.parameters[0] * 100 == FULL.parameters[-1]


# ---- memory: exact


@pytest.fixture(scope="module")
def bytes_of(quick):
    return quick[0]["memory"]


def test_bare_loop_holds_weights_and_adam_at_rest_and_gradients_at_the_peak(bytes_of):
    bare = bytes_of["bare loop"]
    values, width = 4 * bare["parameters"], int((bare["parameters"] / memory.LAYERS) ** 0.5)
    batch, counters = 4 * memory.ROWS * width, 4 * memory.LAYERS  # Adam counts the steps of every parameter
    assert bare["rest_bytes"] == 3 * values + batch + counters
    activations = 4 * memory.ROWS * width * memory.LAYERS
    assert 4 * values <= bare["peak_bytes"] <= 4 * values + 4 * activations


@pytest.mark.parametrize("name", ["DiLoCo, one fragment", "streaming", "eager"])
def test_outer_state_on_the_device_is_anchor_and_momentum(bytes_of, name):
    bare, row = bytes_of["bare loop"], bytes_of[name]
    values, fragment = 4 * row["parameters"], 4 * row["parameters"] // row["fragments"]
    more = row["rest_bytes"] - bare["rest_bytes"]
    assert 2 * values <= more <= 2 * values + fragment  # at most room to work on one fragment
    assert row["peak_bytes"] - bare["peak_bytes"] >= 2 * values


@pytest.mark.parametrize(("name", "vectors"), [("streaming", 1), ("eager", 2)])
def test_outer_state_on_the_host_leaves_the_fragment_at_work(bytes_of, name, vectors):
    """Of streaming the anchor alone: the outer step is taken on the host. Of eager updates the momentum, too."""
    bare, naive, row = (bytes_of[key] for key in ("bare loop", name, f"{name}, outer state on the host"))
    values, fragment = 4 * row["parameters"], 4 * row["parameters"] // row["fragments"]
    assert row["fragments"] == 12
    assert naive["rest_bytes"] - row["rest_bytes"] == 2 * values - vectors * fragment
    assert vectors * fragment <= row["rest_bytes"] - bare["rest_bytes"] <= (vectors + 1) * fragment
    assert row["peak_bytes"] - bare["peak_bytes"] <= 3 * vectors * fragment


def test_settings_are_ordered(bytes_of):
    for column in ("rest", "peak", "peak_pytorch"):
        for name in ("streaming", "eager"):
            assert 1 == bytes_of["bare loop"][column] < bytes_of[f"{name}, outer state on the host"][column]
            assert bytes_of[f"{name}, outer state on the host"][column] < bytes_of[name][column]
            assert bytes_of[name][column] <= bytes_of["DiLoCo, one fragment"][column]
    assert all(row["peak_pytorch"] >= row["peak"] for row in bytes_of.values())


def test_ledger_counts_shared_memory_once_and_forgets_what_is_gone():
    with Ledger() as ledger:
        whole = torch.zeros(1000)
        part = whole[:10]
        assert ledger.live_bytes == 4000
        del whole
        assert ledger.live_bytes == 4000
        del part
        assert ledger.live_bytes == 0
        assert ledger.peak_bytes == 4000


def test_ledger_leaves_out_the_host():
    with Ledger() as ledger:
        payload = torch.zeros(100)
        ledger.to_host(payload)
        assert ledger.live_bytes == 0
        payload.add_(1)
        with ledger.on_host():
            mean = torch.ones(100)
        mean.mul_(2)
        assert ledger.live_bytes == 0
        arrived = mean.clone()
        assert ledger.live_bytes == arrived.untyped_storage().nbytes()
        del payload, mean
        assert ledger.live_bytes == 400


# ---- time: from numbers that are known


def test_summary_tells_a_stall_that_comes_back_from_one_that_does_not():
    inside = [0.0, 0.2, 0.0, 5.0, 0.2, 0.0]  # H = 3: the 5 is somebody else
    steps = [1 + each for each in inside]
    values = summary(Timings([1.0] * 3, steps, inside, [1.0] * 6, [0.1] * 6, [2.0] * 3, [2.5] * 6), 3)
    assert values["stall_seconds"] == 0.2
    assert values["longest_step"] == pytest.approx(1.2)
    assert values["longest_step_seen"] == pytest.approx(6.0 / 1.1)
    assert values["overhead"] == pytest.approx(5.4 / 6)
    assert values["overhead_cpu"] == pytest.approx(0.6 / 5.4)
    assert values["overhead_threads"] == pytest.approx(0.25)
    assert values["overhead_wall"] == pytest.approx(0.9)


def test_exponent_of_a_power_law():
    assert scaling.exponent([(x, 3 * x**1.5) for x in (1, 7, 50)]) == pytest.approx(1.5)


def test_fastest_takes_turns_until_the_limit():
    order = []
    actions = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert set(fastest(actions, repeats=3)) == {"a", "b"}
    assert "".join(order) == "ab" * 4
    order.clear()
    fastest(actions, repeats=3, limit_seconds=0.0)
    assert "".join(order) == "ab" * 2


def test_marks_are_around_what_is_hooked_between_them():
    training = Training(1000, 2, rows=1)
    before, seen = Marks(training.optimizer), []
    training.optimizer.register_step_post_hook(lambda *_: seen.append((before.seconds, after.seconds)))
    after = Marks(training.optimizer)
    training.step()
    ((at_before, at_after),) = seen
    assert 0 < at_before <= after.seconds
    assert at_after == 0
    before.remove()
    mark = before.seconds
    training.step()
    assert before.seconds == mark < after.seconds


def test_without_kernels_gives_the_same_payload_and_then_they_are_back():
    ready = fused.warm_up()
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    payload = isles.codecs["e3m0"].encode(values)
    with without_kernels():
        assert fused.kernels("e3m0") is None
        assert torch.equal(isles.codecs["e3m0"].encode(values), payload)
    assert (fused.kernels("e3m0") is not None) == ready


def test_codecs_are_measured_on_their_own():
    rows = codecs.measure(3000, 2)
    assert all(
        row["kernel"] == (isles.codecs[name].kernels != "") for name, row in rows.items() if name in isles.codecs
    )


# ---- targets


def test_targets_are_missed_and_met():
    slow = {"encode_into": 0.69, "accumulate": 0.61}
    row = {"parameters": 10_000_000, "bare_seconds": 0.2, "overhead": 0.02, "longest_step": 1.4, "outer_device": None}
    result = {"codecs": {"e3m0": slow, "topk": slow}, "engine": [row, {**row, "bare_seconds": 0.05}]}
    checks = {check["claim"]: check["met"] for check in targets.check(result)}
    assert checks == {
        "e3m0: encode against memcpy": False,
        "e3m0: decode and accumulate against memcpy": True,
        "engine: share of the step, 10M": False,
        "engine: longest step against the median, 10M": True,
    }


def test_a_copy_of_the_model_is_not_in_the_way_of_the_size():
    assert Training(1_000_000, 24, rows=1).parameters == pytest.approx(1_000_000, rel=0.1)
