"""The live page in a real browser: a run that goes on, dies, ends, is not there yet; islands that come and go."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from isles.elastic.objects import Announcement, island_name, left_name, seal_name
from isles.view import units
from isles.view.server import Server
from isles.view.store_source import Store
from isles.view.watcher import Watcher, watcher_of
from tests import browser as browsers
from tests import test_train_run as training
from tests import test_train_store as stores
from tests.programs import Program
from tests.test_train_run import SMALL, STEPS, Hold, events, finish, start
from tests.test_view_sources import elastic_run, piece, seal
from tests.test_view_synthetic import synthetic

environment, machines = training.environment, stores.machines  # fixtures


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.started() as running:
        yield running


def serve(*folders: Path, port: int = 0) -> Server:
    return Server(watcher_of([str(folder) for folder in folders]), port=port)


def growing(steps: int = 400, **options: Any) -> list[dict[str, Any]]:
    """A run that goes on: its events, stamped as of now by whoever writes them."""
    log = synthetic("streaming", steps=steps, finished=False, **options)
    log[0]["config"]["steps"] = 10 * steps
    return log


def write(folder: Path, log: list[dict[str, Any]], now: bool = True) -> None:
    """Appends events."""
    folder.mkdir(exist_ok=True)
    shift = time.time() - log[-1]["time"] if now else 0.0
    with (folder / "events.jsonl").open("a") as stream:
        stream.write("".join(json.dumps({**event, "time": event["time"] + shift}) + "\n" for event in log))


def shown_step(page: Any) -> int:
    words = re.match(r"[\d,]+", page.locator(".state .parts b").first.inner_text())
    return int(words[0].replace(",", "")) if words else 0


def wait_until(page: Any, condition: Callable[[], bool], what: str) -> None:
    for _ in range(browsers.PATIENCE_MILLISECONDS // 100):
        if condition():
            return
        page.wait_for_timeout(100)
    pytest.fail(f"the page never showed {what}: {page.locator('main').inner_text()[:2000]}")


def test_the_page_grows_with_the_run_without_reloading(browser: Any, tmp_path: Path):
    log = growing()
    cut = next(index for index, event in enumerate(log) if event.get("step") == 100)
    write(tmp_path / "run", log[:cut])
    with serve(tmp_path / "run") as server, browsers.opened(browser, server.url) as page:
        wait_until(page, lambda: shown_step(page) == 99, "step 99")
        page.evaluate("window.mine = 'still here'")
        curve = page.locator("#loss-tokens path.line").first
        before = curve.get_attribute("d")
        write(tmp_path / "run", log[cut:])
        wait_until(page, lambda: shown_step(page) == 400, "step 400")
        wait_until(page, lambda: curve.get_attribute("d") != before, "a longer curve")
        assert page.evaluate("window.mine") == "still here"
        assert [row.inner_text() for row in page.locator(".rows tbody th > span").all()] == ["island 0", "island 1"]
        states = page.locator(".rows .word").all_inner_texts()
        assert states == ["in", "in"]
        drawn = page.locator("svg[data-drawn]").evaluate_all("charts => charts.map((chart) => chart.dataset.chart)")
        assert "loss-tokens" in drawn


def test_a_run_that_is_not_there_yet_shows_when_it_begins(browser: Any, tmp_path: Path):
    with serve(tmp_path / "later") as server, browsers.opened(browser, server.url) as page:
        assert f"There is no run at {tmp_path / 'later'} yet" in page.locator(".status").inner_text()
        write(tmp_path / "later", growing()[:1])
        page.wait_for_selector(".state[data-phase=starting]")
        write(tmp_path / "later", growing()[1:200])
        page.wait_for_selector(".state[data-phase=running]")
        page.wait_for_selector("#loss-tokens path.line")


def test_a_broken_line_is_told_and_the_rest_is_shown(browser: Any, tmp_path: Path):
    write(tmp_path / "run", growing()[:300])
    with (tmp_path / "run" / "events.jsonl").open("a") as stream:
        stream.write('{"event": "step", "isl\n')
    write(tmp_path / "run", growing()[300:600])
    with serve(tmp_path / "run") as server, browsers.opened(browser, server.url) as page:
        problem = page.locator(".problems li")
        problem.filter(has_text='line 301: {"event": "step", "isl').wait_for()
        assert shown_step(page) > 100


def test_a_server_that_was_away_is_told_and_found_again(browser: Any, tmp_path: Path):
    log = growing()
    write(tmp_path / "run", log[:500])
    with serve(tmp_path / "run") as server:
        port = server.port
        context = browsers.opened(browser, server.url)
        page = context.__enter__()
        wait_until(page, lambda: shown_step(page) > 50, "steps")
        first = shown_step(page)
    try:
        page.wait_for_selector(".connection[data-state=lost]")
        assert (
            "The server does not answer: trying again. What is shown is from"
            in page.locator(".connection").inner_text()
        )
        assert shown_step(page) == first
        write(tmp_path / "run", log[500:])
        with serve(tmp_path / "run", port=port):
            page.wait_for_selector(".connection[data-state=live]")
            wait_until(page, lambda: shown_step(page) == 400, "step 400")
    finally:
        context.__exit__(None, None, None)


def test_another_run_in_the_same_folder_takes_over(browser: Any, tmp_path: Path):
    write(tmp_path / "run", growing(name="first"))
    with serve(tmp_path / "run") as server, browsers.opened(browser, server.url) as page:
        page.locator("h1", has_text="first").wait_for()
        (tmp_path / "run" / "events.jsonl").unlink()
        page.wait_for_selector(".state[data-phase=absent]")
        write(tmp_path / "run", growing(name="second")[:100])
        page.locator("h1", has_text="second").wait_for()
        assert shown_step(page) < 100


def test_a_finished_run_becomes_its_report(browser: Any, tmp_path: Path):
    log = synthetic("streaming", steps=200)
    write(tmp_path / "run", log[:-2])
    with serve(tmp_path / "run") as server, browsers.opened(browser, server.url) as page:
        page.wait_for_selector(".state[data-phase=running]")
        assert page.locator(".cards").count() == 0
        write(tmp_path / "run", log[-2:])
        page.wait_for_selector(".state[data-phase=finished]")
        page.wait_for_selector("main.over .cards")
        assert page.locator(".card strong").first.inner_text() == units.number_of_bytes(log[-1]["bytes_sent"])
        assert "What the models write" in page.locator("main").inner_text()
        page.locator("#link-bandwidth").wait_for()


def test_two_runs_are_compared_and_one_is_chosen(browser: Any, tmp_path: Path):
    write(tmp_path / "a", growing(name="narrow"))
    log = synthetic("data-parallel", name="wide", steps=100, islands=3, finished=False)
    write(tmp_path / "b", log)
    with serve(tmp_path / "a", tmp_path / "b") as server, browsers.opened(browser, server.url) as page:
        page.locator(".summary tbody tr").nth(1).wait_for()
        assert page.locator("h1").inner_text() == "narrow vs wide"
        assert page.locator(".rows tbody tr").count() == 2
        page.locator(".state", has_text="wide").click()
        page.locator(".rows tbody tr").nth(2).wait_for()


def test_what_a_run_says_is_text_and_nothing_else(browser: Any, tmp_path: Path):
    attack = "<script>document.documentElement.dataset.hacked = 1</script><img src=x onerror=alert(1)>"
    log = growing(name=attack)
    log[0].update(method_name=attack, fragments=[{"numel": 1, "layers": attack}] * 4, config={attack: attack})
    start_of = {"event": "island", "island": 0, "rank": 0, "pid": 1, "host": attack, "time": log[0]["time"]}
    write(tmp_path / "run", [start_of, *log])
    with (tmp_path / "run" / "events.jsonl").open("a") as stream:
        stream.write(f"{attack}\n")
    with serve(tmp_path / "run") as server, browsers.opened(browser, server.url) as page:
        page.locator(".problems li", has_text="<script>").wait_for()
        page.wait_for_selector("#loss-tokens path.line")
        assert page.locator("h1").inner_text() == attack
        assert page.evaluate("document.documentElement.dataset.hacked ?? null") is None
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1


LATE = {"event": "excluded", "step": 95, "fragment": 1, "round": 3, "late_seconds": 3.0, "time": 2000.0}


def test_islands_that_come_and_go_in_a_store(browser: Any):
    store = elastic_run()
    watcher = Watcher([(source := Store(store), "s3://bucket/run")])
    source.poll_seconds = 0.1
    with Server(watcher) as server, browsers.opened(browser, server.url) as page:
        page.locator(".rows tbody tr").nth(2).wait_for()
        words = dict(
            zip(*(page.locator(f".rows {what}").all_inner_texts() for what in ("th > span", ".word")), strict=True)
        )
        assert words["island 1"] == "left before round 5"
        page.wait_for_selector("#rounds .plot path.mark-x")
        assert page.locator("#rounds .plot path.joins").get_attribute("d")
        assert page.locator("#rounds .plot path.leaves").get_attribute("d")
        store[island_name(3)] = Announcement("token 3", 7).pack()
        store["events/0003/00000001.jsonl"] = piece(3, range(1, 5), begin=time.time())
        page.locator(".rows tr", has_text="joined, in no round yet").wait_for()
        store[seal_name(7)] = seal(7, (0, 3), (2,))
        store[left_name(0)] = Announcement("token 0", 8).pack()
        page.locator(".rows tr", has_text="left before round 8").wait_for()
        page.locator(".problems li", has_text="Island 2 has been out of 2 rounds").wait_for()
        fresh = piece(2, range(21, 24), begin=time.time())  # it has been silent until now
        store["events/0002/00000003.jsonl"] = fresh + json.dumps(LATE).encode()
        page.locator(".rows tr[data-state=out]", has_text="out of 2 rounds, since 6").wait_for()
        page.locator(".problems li", has_text="out of 2 rounds: its payloads arrive 3.0 s too late").wait_for()


def test_processes_that_train_over_a_store_join_and_leave(browser: Any, tmp_path: Path, machines: list[Any]):
    steps = ["--steps", "100000", "--eval-every", "0", *stores.TINY, *stores.METHOD]
    stores.start(machines, tmp_path, "first", *steps)
    stores.until(lambda: stores.rounds(tmp_path) >= 2, machines[0])
    with Server(watcher_of([], str(tmp_path / "bucket"))) as server, browsers.opened(browser, server.url) as page:
        page.wait_for_selector(".state[data-phase=running]")
        assert page.locator("h1").inner_text() == "bucket"
        second = stores.start(machines, tmp_path, "second")
        page.locator(".rows tr[data-state=in]", has_text="island 1").wait_for()
        page.locator("#rounds").scroll_into_view_if_needed()
        page.wait_for_selector("#rounds .plot path.joins", state="attached")
        wait_until(page, lambda: "ms" in page.locator(".rows tr").nth(2).locator("td").nth(9).inner_text(), "a slack")
        second.send_signal(signal.SIGINT)
        page.locator(
            ".rows tr[data-state=left]", has_text=re.compile(r"island 1.*left before round \d+", re.DOTALL)
        ).wait_for()
        assert page.locator(".rows tr[data-state=left]").count() == 1


def test_sixty_four_islands_fit_a_phone(browser: Any, tmp_path: Path):
    write(tmp_path / "run", growing(60, islands=64))
    with (
        serve(tmp_path / "run") as server,
        browsers.opened(browser, server.url, width=390, height=844, color_scheme="dark") as page,
    ):
        page.locator(".rows tbody tr").nth(63).wait_for()
        for chart in ("rounds", "links", "timeline"):
            page.locator(f"#{chart}").scroll_into_view_if_needed()
            page.wait_for_selector(f"#{chart} svg[data-drawn]")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 24)"


def test_every_chart_can_be_saved_by_its_menu_and_by_keyboard(browser: Any, tmp_path: Path):
    write(tmp_path / "run", growing(name="<b>mine"))
    with serve(tmp_path / "run") as server, browsers.opened(browser, server.url) as page:
        charts = page.locator("figure").evaluate_all("all => all.map((one) => one.id)")
        assert set(charts) >= {"loss-tokens", "loss-bytes", "loss-wall", "utilization", "rounds", "timeline", "links"}
        for chart in charts:
            page.locator(f"#{chart}").scroll_into_view_if_needed()
            page.wait_for_selector(f"#{chart} svg[data-drawn]")
            page.locator(f"#{chart} .opener").click()
            with page.expect_download() as saved:
                page.locator(f"#{chart} [role=menuitem]", has_text="SVG").click()
            text = Path(saved.value.path()).read_text()
            assert saved.value.suggested_filename == f"{chart}.svg"
            assert text.startswith("<svg ")
            assert "var(" not in text
            page.locator(f"#{chart} .opener").click()
            with page.expect_download() as saved:
                page.locator(f"#{chart} [role=menuitem]", has_text="PNG").click()
            assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")
        page.locator("#links .opener").focus()
        page.keyboard.press("Enter")
        page.keyboard.press("ArrowDown")
        assert page.evaluate("document.activeElement.textContent") == "Save as PNG"
        page.keyboard.press("Escape")
        assert page.locator("#links .menu").is_hidden()
        assert page.evaluate("document.activeElement.className") == "opener"


def test_an_island_that_is_killed_is_told(browser: Any, tmp_path: Path, environment: dict[str, str]):
    """Islands as processes. Island 1 is held after step 12, so that the run goes on until it is killed there."""
    folder, gate = tmp_path / "run", tmp_path / "gate"
    process = start([*SMALL, "--run", str(folder)], tmp_path, environment, Hold(12, gate))
    try:
        with serve(folder) as server, browsers.opened(browser, server.url) as page:
            page.wait_for_selector(".state[data-phase=running]")
            wait_until(page, lambda: shown_step(page) >= 12, "step 12")
            slacks = [event["slack_seconds"] for event in events(folder, "apply")]
            assert slacks
            assert all(isinstance(slack, float) for slack in slacks)
            wait_until(page, lambda: page.locator(".rows tr").nth(2).locator("td").first.inner_text() == "in", "it in")
            victim = next(event["pid"] for event in events(folder, "island") if event["island"] == 1)
            os.kill(victim, signal.SIGKILL)
            page.locator(
                ".problems .severe", has_text=re.compile(r"Island 1 \(process \d+\) has ended at step 12")
            ).wait_for()
            page.locator(".rows tr[data-state=gone]", has_text="island 1").wait_for()
            page.wait_for_selector(".state[data-phase=stopped]")  # the other one notices, and ends
    finally:
        gate.touch()
        process.communicate(timeout=240)


def test_train_with_watch_prints_an_address_and_shows_the_end(
    browser: Any, tmp_path: Path, environment: dict[str, str]
):
    folder, gate = tmp_path / "run", tmp_path / "gate"
    process = start([*SMALL, "--run", str(folder), "--watch"], tmp_path, environment, Hold(12, gate))
    told = lambda: re.search(r"^watch: (http://127\.0\.0\.1:\d+/)\n", process.err.read_text(), re.MULTILINE)
    try:
        stores.until(lambda: process.err.exists() and told(), process)
        with browsers.opened(browser, told()[1]) as page:
            wait_until(page, lambda: shown_step(page) >= 12, "step 12")
            gate.touch()
            page.wait_for_selector(".state[data-phase=finished]")
            wait_until(page, lambda: shown_step(page) == STEPS, "the last step")
            page.wait_for_selector(".connection[data-state=lost]")
            assert page.locator("main.over .cards").count() == 1
        assert finish(process)["steps"] == STEPS
    finally:
        gate.touch()
        if process.poll() is None:
            process.communicate(timeout=240)


def test_the_bench_compares_a_full_page_with_an_empty_one(tmp_path: Path):
    browsers.chromium()
    browsers.need_playwright()
    bench = Program(["bench", "page", "--quick", "--json"], tmp_path)
    out, err = bench.communicate(timeout=280)
    assert bench.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    page = result["page"]
    assert (page["islands"], page["events"]) == (8, 2000)
    for kind in ("empty", "full"):
        assert all(value > 0 for value in page[kind].values())
    assert page["server"]["kept_bytes"] > 0
    assert "live page: 8 islands, 2,000 events, against an empty page" in out
    assert {row["claim"].partition(":")[2] for row in result["checks"]} == {
        " seconds to the first paint",
        " seconds until data is drawn",
        " seconds of an update",
        " seconds until it says that an island was killed",
        " pace of a run that is watched against one that is not",
    }
    run = page["watched"]
    assert run["told_seconds"] > 0
    assert len(run["ratios"]) == 2
    assert all(ratio > 0 for ratio in (*run["ratios"], *run["noise"]))
    assert "live page: a run of two islands, watched in turns" in out
