"""A real browser for tests: Debian's chromium, driven by playwright.

A page that complains (an exception, a chart that could not be drawn, something that the content security policy
refused) fails the test that opened it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PATIENCE_MILLISECONDS = 120_000


def chromium() -> str:
    """The program; without it the test is skipped, and fails under CI."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        _give_up("chromium is missing, and pages are tested in it: apt-get install chromium")
    return str(program)


def need_playwright() -> None:
    try:
        import playwright  # noqa: F401
    except ImportError:
        _give_up("playwright is missing, and drives the browser: pip install playwright")


def _give_up(reason: str) -> None:
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@contextmanager
def started() -> Iterator[Any]:
    """A browser."""
    program = chromium()
    need_playwright()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=program, args=options)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(
    browser: Any, url: str, width: int = 1280, height: int = 900, *, server_dies: bool = False, **options: Any
) -> Iterator[Any]:
    """A page that has shown something. A server that dies may be in the middle of an answer."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    try:
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(url)
        page.wait_for_selector("html[data-ready]", state="attached")
        yield page
        assert page.evaluate("document.documentElement.dataset.error ?? null") is None
        # A server that is away is tested, and the browser's own note about it is no complaint of the page.
        away = "net::ERR_" if server_dies else "ERR_CONNECTION_REFUSED"
        assert not [text for text in complaints if away not in text], complaints
    finally:
        context.close()
