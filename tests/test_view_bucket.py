"""Watching a run in a bucket, on a real S3 server, by its address alone: in the browser, in the terminal, and what it
asks of the bucket.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.elastic.objects import Announcement, island_name
from isles.elastic.store import ObjectStore, open_store
from isles.view.store_source import Store
from tests import browser as browsers
from tests import test_train_store as stores
from tests.programs import Program
from tests.stores import s3_server
from tests.test_view_sources import elastic_run
from tests.test_view_watch import wait_until

machines = stores.machines  # a fixture
URL = "s3://bucket/some/run"
LIST, GET = r"GET /bucket\?\S*prefix=some(?:/|%2F)run(?:/|%2F)islands", r"GET /bucket/some/run/(\S+) HTTP"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.started() as running:
        yield running


@contextlib.contextmanager
def bucket(log: list[str] | None = None) -> Iterator[dict[str, str]]:
    """An empty one: the environment in which `URL` is in it."""
    with s3_server(log) as address:
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT"))
        own = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        yield {**os.environ, **own, "AWS_ENDPOINT_URL": address, "OMP_NUM_THREADS": "1"}


def isles(machines: list[Any], environment: dict[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "isles.cli", *arguments]
    with (folder / f"{arguments[0]}.err").open("ab") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    machines.append(process)
    return process


def opened_here(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return open_store(URL)


def address_of(watching: subprocess.Popen[str]) -> str:
    assert watching.stdout is not None
    return str(json.loads(watching.stdout.readline())["url"])


def test_a_run_in_a_bucket_is_seen_in_the_browser_and_in_the_terminal(
    browser: Any, tmp_path: Path, machines: list[Any], monkeypatch: pytest.MonkeyPatch
):
    with bucket() as environment:
        url = address_of(isles(machines, environment, tmp_path, "watch", "--store", URL, "--json"))
        terminal = isles(machines, environment, tmp_path, "watch", "--store", URL, "--terminal", "--json")
        with browsers.opened(browser, url) as page:
            assert f"There is no run at {URL} yet" in page.locator(".status").inner_text()
            first = terminal.stdout.readline()
            flags = ["--steps", "100000", "--eval-every", "0", *stores.TINY, *stores.METHOD]
            training = Program(["train", "--store", URL, *flags], tmp_path, environment)
            machines.append(training)
            store = opened_here(environment, monkeypatch)
            stores.until(lambda: store.list("seals/") and store.list("events/"), training)
            page.wait_for_selector(".state[data-phase=running]")
            assert page.locator("h1").inner_text() == "run"
            page.locator(".rows tr[data-state=in]", has_text="island 0").wait_for()
            page.wait_for_selector("#loss-tokens path.line")
            training.send_signal(signal.SIGINT)
            assert training.wait() == 130
            page.wait_for_selector(".state[data-phase=stopped]")
            page.locator(".rows tr[data-state=left]", has_text="island 0").wait_for()
        out = terminal.stdout.read()
        assert terminal.wait() == 0
    assert first == f"there is no run at {URL} yet\n"
    assert re.search(r"^run  stopped  clock \d+/100000  loss [\d.]+", out, re.MULTILINE)
    assert re.search(r"^0 +left +\d+ .* ago$", out, re.MULTILINE)
    [run] = json.loads(out.splitlines()[-1])["runs"]
    assert (run["name"], run["phase"]) == ("run", "stopped")
    assert "Traceback" not in (tmp_path / "watch.err").read_text()


def test_a_look_at_a_bucket_is_one_list_and_a_few_small_reads(
    browser: Any, tmp_path: Path, machines: list[Any], monkeypatch: pytest.MonkeyPatch
):
    """What docs/watch.md promises, counted by the server."""
    log: list[str] = []
    with bucket(log) as environment:
        store = opened_here(environment, monkeypatch)
        for name, data in elastic_run().items():
            store.put(name, data)
        url = address_of(isles(machines, environment, tmp_path, "watch", "--store", URL, "--json"))
        with browsers.opened(browser, url) as page, browsers.opened(browser, url):
            page.locator(".rows tr", has_text="left before round 5").wait_for()
            begin, looks = time.monotonic(), len(looks_in(log))
            wait_until(page, lambda: len(looks_in(log)) >= looks + 4, "what comes of four looks")
            seconds = time.monotonic() - begin
            quiet = looks_in(log)[looks:-1]
            store.put(island_name(3), Announcement("token 3", 7).pack())
            page.locator(".rows tr", has_text="joined, in no round yet").wait_for()
    names = ["events/0000/00000003.jsonl", "events/0002/00000003.jsonl", "seals/00000007.json"]
    assert quiet[1:] == [names, names]  # island 1 has left; the second page asks nothing more
    assert len(quiet) <= seconds / Store.poll_seconds + 1


def looks_in(log: list[str]) -> list[list[str]]:
    """What was read in each look: a look begins with a list of `islands/`."""
    found: list[list[str]] = []
    for line in list(log):
        if re.search(LIST, line):
            found.append([])
        elif found and (match := re.search(GET, line)):
            found[-1] = sorted([*found[-1], match[1]])
    return found
