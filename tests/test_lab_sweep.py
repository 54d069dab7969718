"""The sweep: its cells are possible, it goes on where it stopped, and shows what it has."""

import json

import pytest

from isles.lab import programs, sweep
from isles.lab.cells import COMPUTE, KINDS, TIMED, cells
from isles.lab.figures import warm_up_steps
from isles.lab.sweep import RESULTS

ALL = cells(repeats=2)


def record_of(cell, utilisation=0.5):
    method = cell.variant.method()
    return {
        "kind": cell.kind.name,
        "variant": cell.variant.name,
        "repeat": cell.repeat,
        "bandwidth": cell.bandwidth,
        "bandwidth_measured": 0.98 * cell.bandwidth,
        "steady_utilization": utilisation,
        "planned_utilization": 0.6,
        "event_log_utilization": 0.55,
        "reference_step_seconds": cell.kind.workload.step_seconds,
        "step_seconds": 0.2,
        "wait_seconds": 1.25,
        "steps": cell.steps(),
        "val_loss": 7.0,
        "bytes_sent": 1_000_000,
        "planned_bytes_sent": 1_000_000,
        "peak_bits_per_second": 0.9 * cell.bandwidth,
        "kernel_bytes_per_byte_sent": 1.012,
        "parameters": cell.kind.workload.parameters,
        "layers": cell.kind.workload.layers,
        "fragments": [],
        "knobs": method.as_dict() if method else None,
    }


@pytest.mark.parametrize("cell", cells(repeats=1), ids=lambda cell: "-".join(map(str, cell.key[:3])).replace(" ", ""))
def test_a_cell_is_possible_and_reaches_its_steady_state(cell):
    program = programs.timed(cell.flags()) if cell.kind.timed else programs.train(cell.flags(), cell.kind.islands)
    assert program.config.steps == cell.steps()
    assert program.config.method == cell.variant.preset
    method = cell.variant.method()
    if method is None:
        assert cell.steps() >= 2
    else:
        periods, rest = divmod(cell.steps() - warm_up_steps(method.as_dict()), method.sync_every)
        assert rest == 0
        assert periods >= 2


def test_a_backlog_on_a_full_link_has_time_to_show():
    """Whoever may be a whole period late waits for nobody until a backlog of a period has grown."""
    steps = {(cell.variant.preset, cell.bandwidth): cell.steps() for cell in cells([KINDS["timed"]], repeats=1)}
    for preset in ("eager", "distant"):
        assert steps[preset, 50e6] >= 3 * steps[preset, 200e6], "30.8M parameters in 128 steps: 98 % of it"
    assert steps["streaming", 50e6] == steps["streaming", 200e6], "which may be a few steps late"


def test_cells_are_told_apart():
    assert len({cell.key for cell in ALL}) == len(ALL) == 2 * len(cells(repeats=1))
    assert 0 < len(cells(quick=True)) < 10
    assert {cell.bandwidth for cell in cells(bandwidths=[1e6, 2e6])} == {1e6, 2e6}
    assert {cell.key for cell in cells(quick=True)} < {cell.key for cell in ALL}
    for kind in KINDS.values():
        assert len(kind.bandwidths) >= 4
        presets = [variant.preset for variant in kind.variants()]
        assert set(presets) == {"data-parallel", "diloco", "streaming", "eager", "distant"}


def test_a_sweep_goes_on_where_it_stopped_and_tries_again_what_failed(tmp_path, monkeypatch):
    wanted, ran, broken = cells(quick=True), [], {2}

    def fake(folder, cell, say):
        ran.append(cell.key)
        if len(ran) in broken:
            raise SystemExit("isles lab: the run failed")
        if len(ran) == 4:
            raise KeyboardInterrupt
        return record_of(cell)

    monkeypatch.setattr(sweep, "_run", fake)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(tmp_path, wanted, say=lambda line: None)
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"kind": "comp')  # a crash cut it short
    with (tmp_path / RESULTS).open("a") as file:
        file.write("\n")
    assert [sweep.key_of(record) for record in sweep.read(tmp_path)] == [wanted[0].key, wanted[2].key]
    result = sweep.sweep(tmp_path, wanted, say=lambda line: None)
    assert ran[4:] == [cell.key for cell in wanted if cell not in (wanted[0], wanted[2])]
    assert {sweep.key_of(record) for record in sweep.read(tmp_path)} == {cell.key for cell in wanted}
    assert result["failed"] == []
    assert (tmp_path / sweep.FIGURE).read_bytes().startswith(b"\x89PNG")


def test_a_run_that_the_host_disturbed_is_done_again(tmp_path, monkeypatch):
    """The quietest run is kept, whatever came out of it; links that were not what they should be count as disturbed."""
    cell = cells([KINDS["timed"]], repeats=1, quick=True)[0]
    stolen, said = [0.2, None, 0.01, 0.0], []

    def fake(folder, cell, say):
        share = stolen.pop(0)
        if share is None:
            raise sweep.LinkError("the links carry less")
        return {**record_of(cell), "cpu_stolen": share, "steady_utilization": 1 - share}

    monkeypatch.setattr(sweep, "_run", fake)
    found = sweep._undisturbed(tmp_path, cell, said.append)
    assert found["cpu_stolen_each"] == [0.2, 0.01]
    assert found["cpu_stolen"] == 0.01
    assert said == ["the host took 20 % of the cores: once more", "the links carry less: once more"]
    stolen[:] = [0.2, 0.06, 0.1, 0.0]
    assert sweep._undisturbed(tmp_path, cell, said.append)["cpu_stolen"] == 0.06
    assert stolen == [0.0], "there is an end to it"
    stolen[:] = [None] * 3
    with pytest.raises(sweep.LinkError):
        sweep._undisturbed(tmp_path, cell, said.append)


def test_failures_are_told(tmp_path, monkeypatch):
    def fake(folder, cell, say):
        raise OSError("the links carry nothing")

    monkeypatch.setattr(sweep, "_run", fake)
    said = []
    result = sweep.sweep(tmp_path, cells(quick=True), say=said.append)
    assert len(result["failed"]) == len(cells(quick=True))
    assert result["table"] is None
    assert any("the links carry nothing" in line for line in said)


def test_the_table_has_measured_beside_planned_and_the_spread_of_repeats(tmp_path):
    chosen = [cell for cell in ALL if cell.variant.name == "diloco fp32" and cell.kind is COMPUTE]
    records = [record_of(cell, utilisation=0.4 + 0.1 * cell.repeat) for cell in chosen]
    text = sweep.table(records)
    row = next(line for line in text.splitlines() if "| 50 Mbit/s |" in line)
    cells_of_row = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells_of_row[:6] == ["diloco fp32", "50 Mbit/s", "2", "45 %", "40 to 50 %", "60 %"]
    assert cells_of_row[9:14] == ["1.25 s", "1 MB", "1 MB", "1.012", "45 Mbit/s"]
    assert cells_of_row[15] == "7.000"
    assert TIMED.title.split()[0].capitalize() not in text, "nothing is said of what was not measured"
    assert text.count("\n|") == 2 + len(COMPUTE.bandwidths)


def test_a_torn_line_is_no_result(tmp_path):
    (tmp_path / RESULTS).write_text(json.dumps(record_of(ALL[0])) + '\n{"kind"')
    assert len(sweep.read(tmp_path)) == 1
