"""Where events come from: a folder that grows, tears and is replaced, and an object store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from isles import StoreWorld
from isles.cli import main
from isles.elastic.objects import Announcement, Contribution, Seal, island_name, left_name, seal_name
from isles.view import sources, store_source
from isles.view.live import Live
from isles.view.live_rounds import letter_of
from isles.view.runs import Run
from isles.view.sources import Folder
from isles.view.store_source import Store
from isles.view.watcher import Watcher, watcher_of
from tests.test_view_synthetic import save, synthetic


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


def append(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "events.jsonl").open("a") as stream:
        stream.write(text)


def test_a_folder_is_read_from_where_it_was_left(tmp_path: Path):
    source = Folder(tmp_path / "run")
    assert source.read() == []
    assert not source.exists
    append(tmp_path / "run", '{"event": "step", "step": 1}\n{"event": "st')
    assert kinds(source.read()) == ["step"]
    assert source.exists
    assert source.read() == []
    append(tmp_path / "run", 'ep", "step": 2}\n')
    assert source.read() == [{"event": "step", "step": 2}]


def test_a_line_that_is_no_event_is_told_with_its_number(tmp_path: Path):
    append(tmp_path / "run", '{"event": "step", "step": 1}\nnonsense\n\n[1]\n{"event": 3}\n\xff\n')
    found = Folder(tmp_path / "run").read()
    assert kinds(found) == ["step", "torn", "torn", "torn", "torn"]
    assert [event.get("line") for event in found[1:]] == [2, 4, 5, 6]
    assert found[1]["text"] == "nonsense"


@pytest.mark.parametrize("how", ["replaced", "cut", "removed"])
def test_another_run_in_the_same_place_begins_anew(tmp_path: Path, how: str):
    source, file = Folder(tmp_path / "run"), tmp_path / "run" / "events.jsonl"
    append(tmp_path / "run", '{"event": "step", "step": 1}\n{"event": "step", "step": 2}\n')
    source.read()
    if how == "replaced":
        (tmp_path / "new").write_text('{"event": "config"}\n' * 9)
        os.replace(tmp_path / "new", file)
    elif how == "cut":
        file.write_text('{"event": "config"}\n')
    else:
        file.unlink()
    assert kinds(source.read())[:2] == (["reset"] if how == "removed" else ["reset", "config"])


def test_a_long_log_is_read_in_parts_and_a_line_without_end_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(sources, "LONGEST_LINE", 3000)
    save(synthetic("streaming", steps=60), tmp_path / "run")
    source, found, reads = Folder(tmp_path / "run"), [], 0
    while not reads or source.behind:
        found += source.read()
        reads += 1
    assert reads > 10
    assert found == [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").open()]
    append(tmp_path / "run", "x" * 10_000)
    while source.read() or source.behind:
        pass
    assert len(source._rest) <= 4000


def test_a_process_that_is_killed_is_told_with_its_last_words(tmp_path: Path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    start = {"event": "island", "island": 1, "rank": 1, "pid": child.pid, "host": socket.gethostname()}
    elsewhere = {**start, "island": 2, "rank": 2, "pid": 2**22 + 1, "host": "another.host"}
    append(tmp_path / "run", "".join(json.dumps({**each, "time": time.time()}) + "\n" for each in (start, elsewhere)))
    (tmp_path / "run" / "island-1.log").write_text("one\nwhat went wrong\n")
    source = Folder(tmp_path / "run")
    assert kinds(source.read()) == ["island", "island"]
    child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 60
    found: list[dict[str, Any]] = []
    while not found and time.monotonic() < deadline:  # also before its parent has waited for it
        found = source.read()
    child.wait()
    assert [(event["event"], event["island"], event["said"]) for event in found] == [("gone", 1, "what went wrong")]
    assert source.read() == []


def test_a_number_that_belongs_to_a_later_process_is_not_alive():
    assert sources.is_alive(os.getpid(), time.time())
    assert not sources.is_alive(os.getpid(), time.time() - 10**8)


# ---- object stores


class Objects(dict):  # type: ignore[type-arg]
    """A store in memory that counts what it is asked."""

    asked = 0

    def list(self, prefix: str) -> list[str]:
        self.asked += 1
        return [name for name in reversed(self) if name.startswith(prefix)]

    def get(self, name: str) -> bytes:  # type: ignore[override]
        self.asked += 1
        return self[name]  # type: ignore[no-any-return]


class Files:
    """A store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self, prefix: str) -> list[str]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return [name for path in files if (name := path.relative_to(self.folder).as_posix()).startswith(prefix)]

    def get(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


def seal(number: int, inside: tuple[int, ...], missing: tuple[int, ...] = (), fragments: int = 2) -> bytes:
    contributions = tuple(Contribution(island, 1.0, 10, 5000, "0" * 64) for island in inside)
    known = 1 + max((*inside, *missing))
    return Seal(number, (number - 1) % fragments, 15 * number, contributions, missing, known, "0" * 64).pack()


def piece(island: int, steps: range, begin: float = 1000.0) -> bytes:
    base = {"event": "step", "island": 0, "loss": 3.0, "seconds": 0.5, "wait_seconds": 0.0, "bytes_sent": 100}
    lines = [{**base, "own_step": step, "step": step + 5 * island, "time": begin + step} for step in steps]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def elastic_run() -> Objects:
    """Three islands: 1 leaves before round 5, 2 joins at round 4 and misses round 6."""
    store = Objects()
    store["run.json"] = b"{}"
    for island, first in ((0, 1), (1, 1), (2, 4)):
        store[island_name(island)] = Announcement(f"token {island}", first).pack()
    store[left_name(1)] = Announcement("token 1", 5).pack()
    who = {1: (0, 1), 2: (0, 1), 3: (0, 1), 4: (0, 1, 2), 5: (0, 2), 6: (0,)}
    for number, inside in who.items():
        store[seal_name(number)] = seal(number, inside, (2,) if number == 6 else ())
    for island in range(3):
        for part in range(2):
            store[f"events/{island:04d}/{part + 1:08d}.jsonl"] = piece(island, range(10 * part + 1, 10 * part + 11))
    return store


@pytest.mark.parametrize("where", ["memory", "folder", "obstore"])
def test_a_store_run_tells_who_came_who_went_and_who_was_in(tmp_path: Path, where: str):
    reader: Any = elastic_run()
    if where != "memory":
        for name, data in reader.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        reader = Files(tmp_path) if where == "folder" else store_source.open_store(str(tmp_path))
    run = Live("store")
    run.feed_all(Store(reader).read())
    islands = run.islands
    assert [islands[n].joined for n in range(3)] == [1, 1, 4]
    assert (islands[1].left, islands[0].left) == (5, None)
    assert [islands[n].rounds_in for n in range(3)] == [6, 4, 2]
    assert (islands[2].out_in_a_row, islands[2].out_since) == (1, 6)
    rows = run.rounds.rounds.rows()
    assert ["".join(letter_of(row, island) for row in rows) for island in range(3)] == ["iiiiii", "iiii..", "...iix"]
    assert [islands[n].step for n in range(3)] == [20, 20, 20]
    assert islands[2].clock == run.last_step == 30
    assert [islands[n].row(0.0, False, None, None)["sent"] for n in range(3)] == [2000, 2000, 2000]  # by its own log
    assert not run.torn


def test_what_is_new_in_a_store_is_found_with_a_few_requests():
    store = elastic_run()
    source = Store(store)
    source.read()
    source.read()
    store.asked = 0
    assert source.read() == []
    assert store.asked == 4  # islands/, the next seal, the next piece of islands 0 and 2
    store[seal_name(7)] = seal(7, (0, 2))
    store["events/0002/00000003.jsonl"] = piece(2, range(21, 24))
    store.asked = 0
    found = source.read()
    assert store.asked == 4 + 2 + 1  # at most two more for a new seal, and one for a new piece
    assert kinds(found) == ["sealed", "step", "step", "step"]
    assert {event.get("island", 2) for event in found} == {2}


def test_pieces_are_read_in_parts_and_a_request_that_fails_loses_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_source, "PIECES_AT_ONCE", 3)

    class Failing(Objects):
        fails = False

        def get(self, name: str) -> bytes:  # type: ignore[override]
            if self.fails and name.startswith("events/"):
                raise ConnectionError("the line is bad")
            return super().get(name)

    store = Failing(elastic_run())
    watcher = Watcher([(source := Store(store), "s3://bucket/run")])
    source.poll_seconds = 0.0
    store.fails = True
    [run] = watcher.looked_at()
    assert "the line is bad" in run.problems(0.0)[0].what
    store.fails = False
    for _ in range(4):
        watcher.looked_at()
    assert not run.trouble
    assert [run.live.islands[n].rounds_in for n in range(3)] == [6, 4, 2]
    assert [len(run.live.islands[n].seconds) for n in range(3)] == [20, 20, 20]


def test_seals_alone_tell_clock_members_and_bytes():
    store = Objects({name: data for name, data in elastic_run().items() if not name.startswith("events/")})
    run = Live("store")
    run.feed_all(Store(store).read())
    assert run.last_step == 90
    assert [run.islands[n].row(0.0, False, None, None)["sent"] for n in range(3)] == [30_000, 20_000, 10_000]


def test_a_store_without_a_run_and_one_with_a_damaged_object():
    store = Objects()
    source = Store(store)
    assert source.read() == []
    assert not source.exists
    store.update(elastic_run())
    store[seal_name(2)] = b"{damaged"
    store[island_name(1)] = b"[]"
    run = Live("store")
    run.feed_all(source.read())
    assert run.torn == 2
    assert "islands/0001.json" in run.first_torn
    assert run.islands[0].rounds_in == 5


def test_a_store_run_is_finished_when_an_island_has_come_to_its_end():
    store = elastic_run()
    source, run = Store(store), Live("store")
    run.feed_all(source.read())
    assert not run.finished
    store["events/0000/00000003.jsonl"] = b'{"event": "end", "time": 1030.0, "steps": 20}\n'
    run.feed_all(source.read())
    assert run.finished
    report = Run(source.everything(1 << 20) or [])
    assert [step.step for step in report.steps] == list(range(1, 31))
    assert source.everything(100) is None


def test_a_report_of_a_store_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    store = elastic_run()
    monkeypatch.setattr(store_source, "open_store", lambda url: store)
    assert main(["report", "--store", "s3://bucket/mine", "--out", str(tmp_path / "page.html"), "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert (run["name"], run["steps"], run["bytes_sent"]) == ("mine", 30, 6000)
    store.clear()
    assert main(["report", "--store", "s3://bucket/mine", "--out", str(tmp_path / "page.html")]) == 2
    assert main(["report"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "--store s3://bucket/mine has no events of a run" in errors[0]
    assert "give the folders of runs, or --store URL" in errors[1]


def test_whoever_only_reads_makes_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    missing = tmp_path / "mistyped" / "run"
    assert main(["report", "--store", str(missing), "--out", str(tmp_path / "page.html")]) == 2
    assert main(["export", "--store", str(missing), "--out", str(tmp_path / "exported")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith(f"isles report: --store {missing} has no events of a run: check the address")
    assert errors[1] == f"isles export: there is no run in {missing}: there is no such folder"
    assert len(errors) == 2
    with pytest.raises(ValueError, match="there is no run in"):
        StoreWorld(str(missing), observe=True)
    watcher = watcher_of([], str(missing))
    [run] = watcher.looked_at()
    assert run.state(0.0)["phase"] == "absent"
    assert not missing.parent.exists()


def test_a_store_in_a_folder_that_comes_later_is_found(tmp_path: Path):
    watcher = watcher_of([], str(tmp_path / "later"))
    [run] = watcher.looked_at()
    assert run.state(0.0)["phase"] == "absent"
    assert not run.trouble
    for name, data in elastic_run().items():
        (tmp_path / "later" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "later" / name).write_bytes(data)
    run.source.poll_seconds = 0.0
    watcher.looked_at()
    assert [run.live.islands[n].rounds_in for n in range(3)] == [6, 4, 2]


def test_a_store_without_its_library_is_one_clear_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "isles.elastic.store", None)
    with pytest.raises(
        ValueError, match=r"--store s3://b/r needs isles\.elastic\.store, which is missing: pip install"
    ):
        store_source.open_store("s3://b/r")
