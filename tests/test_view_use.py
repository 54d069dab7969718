"""The live page in use: by the keyboard alone, and beside a server that is killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import browser as browsers
from tests.test_view_watch import growing, serve, shown_step, wait_until, write


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.started() as running:
        yield running


FOCUSED = """() => {
  const one = document.activeElement;
  if (one === document.body) return null;
  const figure = one.closest('figure');
  const words = one.getAttribute('aria-label') || one.textContent.trim() || one.className;
  return { where: figure ? figure.id : '', words, ring: getComputedStyle(one).outlineStyle !== 'none' };
}"""


def walk(page: Any) -> list[dict[str, Any]]:
    """What the focus reaches, in order, from the top of the page until it comes back."""
    page.evaluate("document.activeElement.blur()")
    found: list[dict[str, Any]] = []
    while True:
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused is None or focused in found[:1]:
            return found
        found.append(focused)
        assert len(found) < 200, found


def test_everything_is_reached_by_the_keyboard_and_seen(browser: Any, tmp_path: Path):
    write(tmp_path / "a", growing(name="narrow"))
    write(tmp_path / "b", growing(name="wide", islands=3))
    with serve(tmp_path / "a", tmp_path / "b") as server, browsers.opened(browser, server.url) as page:
        page.locator(".rows tbody tr").nth(1).wait_for()
        for chart in page.locator("figure").all():
            chart.scroll_into_view_if_needed()
            chart.locator("svg[data-drawn]").wait_for()
        page.evaluate("scrollTo(0, 0)")
        found = walk(page)
        assert all(each["ring"] for each in found), [each for each in found if not each["ring"]]
        words = [each["words"] for each in found]
        assert "Islands" in words
        assert any("narrow" in each for each in words)
        assert any("Report" in each for each in words)
        charts = page.locator("figure").evaluate_all("all => all.map((one) => one.id)")
        assert {each["where"] for each in found if each["words"].startswith("save the chart")} == set(charts)
        assert not [each for each in words if each.startswith("Save as")]  # a menu that is closed is not in the way
        reading = [each["where"] for each in found if "the arrow keys read its values" in each["words"]]
        assert reading == charts
        page.locator(".state", has_text="wide").focus()
        page.keyboard.press("Enter")
        page.locator(".rows tbody tr").nth(2).wait_for()


def test_charts_are_read_by_the_arrow_keys(browser: Any, tmp_path: Path):
    write(tmp_path / "run", growing())
    with serve(tmp_path / "run") as server, browsers.opened(browser, server.url) as page:
        page.locator(".rows tbody tr").nth(1).wait_for()
        for chart, words in CHARTS.items():
            page.locator(f"#{chart}").scroll_into_view_if_needed()
            page.wait_for_selector(f"#{chart} svg[data-drawn]")
            page.locator(f"#{chart} .plot").focus()
            tip = page.locator(f"#{chart} .tooltip")
            seen: list[str] = []
            for key in (*["ArrowRight"] * 25, *["Shift+ArrowRight"] * 3, *["ArrowLeft"] * 10, "ArrowUp", "ArrowDown"):
                page.keyboard.press(key)
                if tip.is_visible() and tip.inner_text() not in seen:
                    seen.append(tip.inner_text())
            assert len(seen) > 3, (chart, seen)
            assert all(re.search(words, text) for text in seen), (chart, seen)
            page.keyboard.press("Escape")
            assert tip.is_hidden()


CHARTS = {
    "loss-tokens": r"tokens",
    "rounds": r"^round \d+, ",
    "timeline": r"round \d+, island \d",
    "links": r"^island [01], .*\n.*sent",
}


def start(folder: Path, port: int = 0) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    command = [sys.executable, "-m", "isles.cli", "watch", str(folder), "--port", str(port), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def test_a_server_that_is_killed_and_started_again_is_found_by_the_open_page(browser: Any, tmp_path: Path):
    log = growing()
    write(tmp_path / "run", log[:500])
    process, address = start(tmp_path / "run")
    try:
        with browsers.opened(browser, address["url"], server_dies=True) as page:
            wait_until(page, lambda: shown_step(page) > 50, "steps")
            page.evaluate("window.mine = 'still here'")
            process.kill()
            process.wait()
            page.wait_for_selector(".connection[data-state=lost]")
            write(tmp_path / "run", log[500:])
            process, again = start(tmp_path / "run", address["port"])
            assert again == address
            page.wait_for_selector(".connection[data-state=live]")
            wait_until(page, lambda: shown_step(page) == 400, "step 400")
            assert page.evaluate("window.mine") == "still here"
    finally:
        process.kill()
        process.wait()
