"""The server of the live page: fixed addresses, read-only, for this machine; and metrics, and the terminal."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.cli import main
from isles.view import report, terminal
from isles.view.server import Server
from isles.view.sources import Folder
from isles.view.watcher import Watcher, watcher_of
from tests.test_view_synthetic import save, synthetic

ATTACK = '</script><img src=x onerror=alert(1)>"\n'


def watcher(*folders: Path) -> Watcher:
    return watcher_of([str(folder) for folder in folders])


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    return answer, answer.read()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    events = synthetic("streaming", steps=120, name=f"mine {ATTACK}", finished=False)
    save(events, tmp_path / "run")
    (tmp_path / "secret.txt").write_text("secret")
    with Server(watcher(tmp_path / "run")) as running:
        yield running


def test_the_page_loads_nothing_from_elsewhere_and_no_inline_script(server: Server):
    answer, body = ask(server, "/")
    policy = answer.headers["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert policy.startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
    )
    assert re.findall(rb"(?:src|href)=\"([^\"]*)\"", body) == [b"data:,", b"/live.css", b"/live.js"]
    assert b"style=" not in body
    assert not re.search(rb"<script>|\son\w+=", body)
    for path in ("/live.js", "/live.css"):
        answer, body = ask(server, path)
        assert answer.status == 200
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert set(re.findall(rb"https?://[^\s'\"]*", body)) <= {b"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    "path", ["/../secret.txt", "/%2e%2e/secret.txt", "/run/../../secret.txt", "//etc/passwd", "/x"]
)
def test_there_is_nothing_but_the_fixed_addresses(server: Server, path: str):
    answer, body = ask(server, path)
    assert answer.status == 404
    assert b"secret" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_get_is_answered(server: Server, method: str):
    answer, _ = ask(server, "/data", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"
    assert ask(server, "/data", "HEAD")[1] == b""


def test_a_browser_that_was_led_here_under_another_name_is_refused(server: Server):
    assert ask(server, "/data", Host="evil.example")[0].status == 403
    assert ask(server, "/data", Host=f"localhost:{server.port}")[0].status == 200
    assert ask(server, "/data", Host="")[0].status == 403


def test_what_is_new_is_little_and_a_stranger_gets_everything(server: Server):
    first = json.loads(ask(server, "/data")[1])
    again = json.loads(ask(server, f"/data?boot={first['boot']}&since={first['version']}")[1])
    assert len(first["runs"][0]["steps"][1]) > 100
    assert "steps" not in again["runs"][0]
    stranger = json.loads(ask(server, f"/data?boot=another&since={first['version']}")[1])
    assert stranger["runs"][0]["steps"] == first["runs"][0]["steps"]
    for query in ("since=-1", "since=x", "since=" + "9" * 1000, "boot=%00"):
        assert ask(server, f"/data?{query}")[0].status == 200


def test_the_report_is_one_file_at_any_time(server: Server, tmp_path: Path):
    answer, body = ask(server, "/report.html")
    assert "attachment" in answer.headers["Content-Disposition"]
    assert b"<!doctype html>" in body
    assert ATTACK.strip().encode() not in body
    with Server(watcher(tmp_path / "nothing")) as empty:
        assert ask(empty, "/report.html")[0].status == 404


def test_metrics_have_the_names_of_the_other_dashboards(server: Server):
    answer, body = ask(server, "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    text = body.decode()
    line = r'[a-z_]+\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*\} -?[\d.e+-]+'
    assert all(re.fullmatch(rf"# TYPE [a-z_]+ (gauge|counter)|{line}", each) for each in text.splitlines())
    name = r'run="mine </script><img src=x onerror=alert\(1\)>\\"\\n"'
    assert re.search(rf'^isles_train_loss\{{{name},island="1"\}} [\d.]+$', text, re.MULTILINE)
    assert re.search(r'^isles_network_bytes_sent_total\{.*island="0"\} \d+$', text, re.MULTILINE)
    names = re.findall(r"# TYPE (\S+)", text)
    assert len(names) == len(set(names))


def test_a_finished_run_becomes_its_report(tmp_path: Path):
    save(synthetic("streaming", steps=90), tmp_path / "run")
    both = watcher(tmp_path / "run")
    update = both.update()
    assert update["runs"][0]["state"]["phase"] == "finished"
    wanted = report.contents([report.Run.load(tmp_path / "run")])
    assert update["report"] == wanted
    assert "report" not in both.update(update["boot"], update["version"])


def test_serving_beyond_this_machine_is_told(tmp_path: Path):
    with Server(watcher(tmp_path / "run"), "0.0.0.0") as server:
        assert "everybody who can reach 0.0.0.0" in server.warning
    with Server(watcher(tmp_path / "run"), "127.0.0.1") as server:
        assert not server.warning


MISTAKES = {
    "nothing to watch": ([], "give the folders of runs, or --store URL"),
    "both": (["runs/x", "--store", "s3://b/r"], "give the folders of runs, or --store URL"),
    "port": (["runs/x", "--port", "70000"], "--port 70000 must be from 0 to 65535"),
    "host": (["runs/x", "--host", "256.1.1.1"], "cannot serve on 256.1.1.1"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake: str, capsys: pytest.CaptureFixture[str]):
    arguments, message = MISTAKES[mistake]
    assert main(["watch", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_the_command_prints_its_address_and_ends_with_ctrl_c(tmp_path: Path):
    command = [sys.executable, "-m", "isles.cli", "watch", str(tmp_path / "later"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())
        assert address["host"] == "127.0.0.1"
        connection = http.client.HTTPConnection(address["host"], address["port"], timeout=60)
        connection.request("GET", "/data")
        state = json.loads(connection.getresponse().read())["runs"][0]["state"]
        assert state["phase"] == "absent"
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "", "")


# ---- the terminal


def test_the_terminal_shows_state_islands_and_problems(tmp_path: Path):
    events = synthetic("streaming", steps=120, islands=3, name="bad\x1b[31m", finished=False)
    events[0]["config"]["steps"] = 500
    save(events, tmp_path / "run")
    with (tmp_path / "run" / "events.jsonl").open("a") as stream:
        stream.write("broken \x1b[2J\n")
    [run] = watcher(tmp_path / "run").looked_at()
    text = terminal.block([run], events[-1]["time"])
    assert "\x1b" not in text
    lines = text.splitlines()
    assert re.match(
        r"bad\?\[31m  running  step 120/500  loss \d\.\d+  .* a step, \d+x less than data-parallel  ", lines[0]
    )
    assert [re.match(r"(\d) +in +120 +\d\.\d{3} ", line)[1] for line in lines[2:5]] == ["0", "1", "2"]  # type: ignore[index]
    assert "1 line of the event log could not be read" in lines[5]


def test_the_terminal_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(synthetic("streaming", steps=60), tmp_path / "run")
    assert main(["watch", "--terminal", str(tmp_path / "run"), "--json"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    assert text[0].startswith("streaming  finished  step 60/60")
    assert json.loads(last)["runs"][0]["phase"] == "finished"


def test_on_a_terminal_the_block_is_drawn_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    save(synthetic("streaming", steps=60), tmp_path / "run")
    screen = Screen()
    terminal.show(Watcher([(Folder(tmp_path / "run"), "run")]), screen)
    shown: Any = screen.getvalue()
    assert "streaming  finished  step 60/60" in shown
