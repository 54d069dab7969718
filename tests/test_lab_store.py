"""Islands that come and go, in the laboratory: what befalls real processes around a real S3 server, and its figures."""

import errno
import json
import os
import random
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import isles
from isles import cli
from isles.elastic.store import open_store
from isles.lab import programs
from isles.lab.elastic import command, figures, matrix, run
from isles.lab.elastic.disk import CHUNK_BYTES, Disk
from isles.lab.elastic.faults import FAULTS, Injected, parse_faults
from isles.lab.elastic.fleet import Options
from isles.lab.elastic.server import ANY, BUCKET, OF_A_CREATE, Moody
from tests import lab_networks

FLAGS = ["--sync-every", "20", "--overlap", "7", "--patience-seconds", "1"]


def quiet(line: str) -> None:
    """Nobody listens."""


# ---- real islands


@pytest.mark.timeout(600)
def test_islands_come_through_kills_outages_and_errors_with_one_global_model(tmp_path):
    """One run, all that can be done to islands, links and an S3 server, one after the other."""
    lab_networks.require()
    kinds = ["store-errors", "kill", "link-down", "store-down", "stop"]
    options = Options(folder=tmp_path, program=programs.elastic(FLAGS), islands=2, bandwidth=50e6, step_seconds=0.05)
    record = run.faults(options, kinds, 7, None, quiet)
    assert matrix.is_sound(record), record["failures"] or record["hanging"] or record["injected"]
    assert [each["kind"] for each in record["injected"]] == kinds
    assert record["identical"]
    assert record["rounds_compared"] > 10
    assert record["replay_is_the_final_model"], "whoever replays the log gets what the last island left with"
    assert 1 <= record["islands_in_a_round"] <= 2
    (joiner,) = record["joiners"]
    assert joiner["rounds_until_in"] >= 1
    assert joiner["bytes_received"] > 0
    failed = {way for way in record["requests"] if way != "ok"}
    assert failed & set(OF_A_CREATE), "the store did answer with errors"
    assert json.loads((tmp_path / run.RECORD).read_text())["rounds"] == record["rounds"]


@pytest.mark.timeout(600)
def test_a_disk_that_is_full_for_a_while_costs_time_and_nothing_else(tmp_path):
    lab_networks.require()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    program = programs.elastic(FLAGS)
    options = Options(
        folder=tmp_path, program=program, islands=2, store="folder", disk_bytes=matrix.DISK_BYTES, step_seconds=0.05
    )
    record = run.faults(options, ["disk-full"], 1, None, quiet)
    assert matrix.is_sound(record), record["failures"] or record["hanging"]
    assert record["replay_is_the_final_model"]
    assert not list(Path(options.folder / "store").iterdir()), "the disk went with the laboratory"


# ---- the store and the disk


def answers(moody: Moody, method: str, **headers: str) -> list[str]:
    """How so many requests end."""
    found = []
    for _ in range(100):
        ours, theirs = socket.socketpair()
        said: list[str] = []
        environ = {"REQUEST_METHOD": method, "wsgi.input": ours.makefile("rb"), "werkzeug.socket": ours, **headers}
        with ours, theirs:
            body = b"".join(moody(environ, lambda status, *_, said=said: said.append(status.split()[0])))
            found.append(said[0] if said else "lost" if theirs.recv(1) == b"" else "?")
            assert not said or said[0] == "200" or said[0].encode() in body
    return found


def test_a_store_in_a_bad_mood_fails_as_stores_do_and_the_seed_decides(tmp_path):
    calls: list[str] = []

    def store(environ, start):
        calls.append(environ["REQUEST_METHOD"])
        start("200 OK", [])
        return [b""]

    mood = tmp_path / "mood.json"
    assert set(answers(Moody(store, mood), "GET")) == {"200"}, "no mood, no errors"
    mood.write_text(json.dumps({"errors": 0.5, "seed": 3}))
    creates = [answers(Moody(store, mood), "PUT", HTTP_IF_NONE_MATCH="*") for _ in range(2)]
    assert creates[0] == creates[1], "by the seed"
    assert set(creates[0]) == {"200", *OF_A_CREATE}
    assert set(answers(Moody(store, mood), "GET")) == {"200", *ANY}, "409 and 412 are for creates alone"
    calls.clear()
    moody = Moody(store, mood)
    found = answers(moody, "PUT")
    assert len(calls) == found.count("200") + found.count("lost"), "an answer is lost after the request was carried out"
    assert json.loads(mood.with_suffix(".served").read_text()) == dict(moody.served)
    mood.write_text(json.dumps({"refuses": True}))
    calls.clear()
    assert set(answers(moody, "GET")) == {"lost"}
    assert not calls


def test_a_store_that_fails_now_and_then_is_insisted_on_and_not_accused(tmp_path):
    """409 or 412 with nothing written, 503, lost answers: probing, reading and writing come through, by any seed."""
    mood = tmp_path / "mood.json"
    command = [sys.executable, "-m", "isles.lab.elastic.server", "127.0.0.1", "0", str(mood)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{server.stdout.readline().split()[1]}"
            urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"))
            own = {"endpoint": address, "access_key_id": "id", "secret_access_key": "secret", "region": "us-east-1"}
            for seed in range(5):
                mood.write_text(json.dumps({"errors": 0.4, "seed": seed}))
                isles.probe_store(f"s3://{BUCKET}/run", **own)
                store = open_store(f"s3://{BUCKET}/run", **own)
                assert store.get(f"nothing-{seed}") is None
                assert store.put(f"object-{seed}", b"mine", create=True), "it is ours, whatever the answer was"
                assert not store.put(f"object-{seed}", b"another's", create=True)
                assert store.get(f"object-{seed}") == b"mine"
        finally:
            server.kill()


def test_a_disk_can_be_filled_up_and_has_room_again(tmp_path):
    lab_networks.require()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = Disk(tmp_path / "disk", 1 << 20)
    inside = disk._inside / "file"
    inside.write_bytes(b"before")
    disk.fill()
    with pytest.raises(OSError, match="space") as full:
        inside.write_bytes(bytes(CHUNK_BYTES))
    assert full.value.errno == errno.ENOSPC
    disk.free()
    inside.write_bytes(bytes(CHUNK_BYTES))
    disk.close()
    assert not (tmp_path / "disk" / "file").exists(), "nobody else ever saw it"


# ---- figures


class Lived:
    """What an island has written."""

    def __init__(self, slot, started, ended, events):
        self.slot, self.started, self.ended, self.killed, self.events = slot, started, ended, False, events

    def of(self, kind):
        return [event for event in self.events if event["event"] == kind]


def life(slot, island, rounds, started=0.0, ended=100.0, wait=0.0):
    """An island with a round every second: it waits `wait` for number 5, takes a step for each."""
    events = [{"event": "join", "time": started + 1, "island": island}]
    for number, own in rounds:
        at = {"time": float(number), "island": island}
        events.append(
            {"event": "round", "number": number, "digest": f"d{number}", "own": own, "bytes_received": 9, **at}
        )
        seconds = wait if number == 5 else 0.1
        events.append({"event": "apply", "fragment": 0, "round": number, "seconds": seconds, **at})
        events.append({"event": "step", "step": number, "seconds": 1.0, "engine_seconds": seconds, **at})
    return Lived(slot, started, ended, events)


def seal(number, islands, missing=()):
    about = {"number": number, "fragment": 0, "clock": number, "islands": islands, "missing": list(missing)}
    return {**about, "steps": [1] * len(islands)}


def test_figures_of_a_kill():
    survivor = life(0, 0, [(number, True) for number in range(1, 11)], wait=2.1)
    killed = life(1, 1, [(number, True) for number in range(1, 4)], ended=4.0)
    again = life(1, 2, [(7, False), (8, True), (9, True)], started=5.5)
    seals = [seal(n, [0, 1]) for n in (1, 2, 3, 4)] + [seal(5, [0], [1])]
    seals += [seal(6, [0]), seal(7, [0]), *(seal(n, [0, 2]) for n in (8, 9, 10))]
    audit = {"number": 10, "digest": "d10", "seals": seals}
    fault = Injected("kill", 4.0, 8.0, (1,))
    found = figures.of_run([survivor, killed, again], [fault], audit, 0.1, patience=1.0)
    assert found["rounds"] == 10
    assert found["islands_in_a_round"] == pytest.approx(1.7)
    assert found["survivor_waited_seconds"] == pytest.approx(2.0), "beyond what it waits anyhow"
    assert found["survivor_waited_in_vain_seconds"] == pytest.approx(2.1)
    assert (found["survivor_lost_rounds"], found["survivor_skipped_steps"]) == (0, 0)
    assert found["joiner_rounds"] == 1
    assert found["joiner_seconds"] == pytest.approx(2.5)
    assert found["joiner_bytes"] == 9
    assert found["identical"]
    assert found["replay_is_the_final_model"]
    assert figures.presence([survivor, killed, again], seals)[1] == pytest.approx(0.7)
    assert figures.counted_steps(seals) == 17
    assert [each["slot"] for each in found["survivors"]] == [0]
    late = life(2, 3, [(7, False), (8, True)], started=3.0)
    found = figures.of_run([survivor, killed, again, late], [fault], audit, 0.1, patience=1.0)
    assert [each["slot"] for each in found["survivors"]] == [0], "whoever was in no round before has survived nothing"


def test_one_bit_of_difference_is_seen():
    one, other = life(0, 0, [(1, True), (2, True)]), life(1, 1, [(1, True), (2, True)])
    audit = {"number": 2, "digest": "d2", "seals": [seal(1, [0, 1]), seal(2, [0, 1])]}
    assert figures.identity([one, other], audit)["identical"]
    other.of("round")[0]["digest"] = "another"
    found = figures.identity([one, other], audit)
    assert (found["identical"], found["rounds_differing"]) == (False, [1])
    assert not figures.identity([one, other], {**audit, "digest": "another"})["replay_is_the_final_model"]


# ---- churn, and the run it is compared with


@pytest.mark.parametrize(("counted", "islands"), [(463.0, 5), (500.0, 5), (402.0, 4), (406.0, 5), (30.0, 1)])
def test_the_undisturbed_run_has_as_many_rounds_and_no_fewer_counted_steps(counted, islands, tmp_path, monkeypatch):
    record = {"rounds": 5, "val_loss": 2.0, "wall_seconds": 1.0, "islands_in_a_round": 4.6, "counted_steps": counted}
    record |= {"identical": True, "rounds_compared": 5, "injected": [], "failures": {}, "hanging": []}
    record |= {"audit_failure": None}
    ran = []
    monkeypatch.setattr(run, "churn", lambda *arguments: record)
    monkeypatch.setattr(run, "undisturbed", lambda options, say: ran.append(options) or record)
    options = Options(folder=tmp_path, program=programs.elastic(["--steps", "100"]), islands=5, step_seconds=0.2)
    assert command._churn(options, 20.0, 0, quiet)["loss_ratio"] == 1.0
    assert [(same.islands, same.program.config.steps, same.step_seconds) for same in ran] == [(islands, 100, 0.1)]


# ---- the table and the flags


def test_faults_of_a_matrix_and_the_stores_they_need():
    assert parse_faults("all") == list(FAULTS)
    kinds = dict(matrix.kinds_for(parse_faults("all"), "s3", explicit=False))
    assert kinds.pop("disk-full") == "folder"
    assert set(kinds.values()) == {"s3"}
    assert "link-down" not in dict(matrix.kinds_for(parse_faults("all"), "folder", explicit=False))


def test_the_seed_decides_whom_and_when():
    draws = [random.Random(f"kill {seed}").random() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_the_table_goes_between_its_marks(tmp_path):
    audit = {"number": 1, "digest": "d1", "seals": [seal(1, [0])]}
    figure = figures.of_run([life(0, 0, [(1, True)])], [], audit, None, 1.0)
    record = {"fault": "none", "store": "s3", "injected": [], "failures": {}, "hanging": [], **figure}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n")
    matrix.write_into(page, [record])
    text = page.read_text()
    assert text.startswith(f"before\n{matrix.BEGIN}\n| fault | rounds |")
    assert text.endswith(f"|\n{matrix.END}\nafter\n")
    assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no lines <!-- crash matrix -->"):
        matrix.write_into(page, [record])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--faults", "flood"], "--faults 'flood' is unknown"),
        (["--times", "0"], "--times 0 must be at least 1"),
        (["--churn", "20s"], "--churn needs an end"),
        (["--command", "--", "hostname"], "leave out --command"),
        (["--", "--method", "eager"], "eager does not go with a store"),
        (["--", "--store", "x"], "--store is set by the laboratory"),
        (["--faults", "kill", "--timed", "--", "--method", "eager"], "eager does not go with a store"),
    ],
)
def test_a_mistake_is_one_clear_line(flags, said, capsys):
    assert cli.main(["lab", "--store", "s3", *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert "\n" not in error


def test_a_folder_has_no_links_to_cut(capsys):
    assert cli.main(["lab", "--store", "folder", "--faults", "link-down"]) == 2
    assert "needs a server" in capsys.readouterr().err
