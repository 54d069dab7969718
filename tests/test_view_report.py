"""The report in a real browser: headless chromium opens it, and the page it has built is looked at."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from isles.view import links, report, units
from isles.view.runs import Run
from isles.view.series import TRAFFIC_ROWS, loss_curve, traffic
from tests import browser
from tests.test_view_synthetic import save, synthetic

DASH = "\N{EN DASH}"
CHARTS = {"loss-tokens", "loss-bytes", "loss-wall", "utilization", "traffic", "timeline"}


class Page(HTMLParser):
    """What the tests ask about a page: its root's attributes, its charts, its text, its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.root: dict[str, str | None] = {}
        self.charts: set[str] = set()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.tags.append(tag)
        if tag == "html":
            self.root = values
        if tag == "svg" and values.get("data-drawn") == "true":
            self.charts.add(values.get("data-chart") or "")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["script"]:
            self.texts.append(data)


def browse(page: Path) -> Page:
    """The page as chromium has built it."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser.chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        command += ["--disable-component-update", "--disable-sync", "--no-first-run", f"--user-data-dir={profile}"]
        command += ["--window-size=1280,900", "--dump-dom", page.as_uri()]
        done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return Page(done.stdout.decode())


def check_drawn(page: Page) -> None:
    assert page.root.get("data-error") is None
    assert page.root.get("data-ready") == "true"
    assert page.charts == CHARTS


def crashed() -> list[dict[str, Any]]:
    """A run that crashed at step 150, resumed at 100 and crashed again at 120."""
    events = synthetic("streaming", steps=200, eval_every=50)
    first = [event for event in events if event.get("step", 1) <= 150 and event["event"] not in ("end", "sample")]
    second = [event for event in events if 100 < event.get("step", 0) <= 120]
    return [*first, {"event": "resume", "time": first[-1]["time"] + 50, "step": 100}, *second]


def silent() -> list[dict[str, Any]]:
    """A run of one island alone, whose loss ends 0.1 above that of data-parallel training."""
    events = [{**event, "bytes_sent": 0} for event in synthetic("data-parallel", name="alone", steps=200, islands=1)]
    return [{**event, "val_loss": event["val_loss"] + 0.1} if event.get("val_loss") else event for event in events]


CASES = {
    "data-parallel and streaming": [synthetic("data-parallel", steps=400), synthetic("streaming", steps=400)],
    "every method": [synthetic(method, steps=120) for method in ("eager", "diloco", "data-parallel", "streaming")],
    "one run, no evaluation yet": [synthetic("eager", steps=9, eval_every=None, finished=False)],
    "crashed": [crashed(), synthetic("data-parallel", steps=200)],
    "only started": [synthetic("streaming", steps=60)[:1], [{"event": "checkpoint", "time": 1.0, "step": 1}]],
    "one island that sends nothing": [
        [{**event, "bytes_sent": 0} for event in synthetic("data-parallel", steps=30, islands=1)]
    ],
}


@pytest.mark.parametrize("case", CASES)
def test_every_chart_is_drawn(tmp_path: Path, case: str):
    folders = [save(events, tmp_path / f"run {index}") for index, events in enumerate(CASES[case])]
    page = browse(report.write([Run.load(folder) for folder in folders], tmp_path / "report.html"))
    check_drawn(page)
    assert page.tags.count("details") == len(folders)


def test_what_a_run_says_is_text_and_nothing_else(tmp_path: Path):
    attack = "</script><script>document.documentElement.dataset.hacked = 1</script><img src=x onerror=alert(1)>"
    events = synthetic("streaming", name=f"name {attack}", steps=40, sample=f"def {attack} &amp; \u2028 <!-- <script>")
    events[0]["config"] = {attack: [attack, float("nan")]}
    events[0]["method_name"] = attack
    events[0]["fragments"] = [{"numel": 1, "layers": attack}] * 4
    path = report.write([Run(events)], tmp_path / "report.html", title=attack)
    assert attack not in path.read_text()
    page = browse(path)
    check_drawn(page)
    assert "data-hacked" not in page.root
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert f"def {attack} &amp; \u2028 <!-- <script>" in "".join(page.texts)


def test_the_browser_may_run_our_script_only_and_load_nothing(tmp_path: Path):
    text = report.page([Run(synthetic("streaming", steps=20))])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    script = re.search(r"<script>(.*)</script>\n</body>", text, re.DOTALL)
    assert policy
    assert script
    style = re.search(r"<style>(.*)</style>", text, re.DOTALL)
    assert style
    code, look = (base64.b64encode(hashlib.sha256(part[1].encode()).digest()).decode() for part in (script, style))
    inline = f"style-src 'sha256-{look}'; script-src 'sha256-{code}'"
    assert policy[1] == f"default-src 'none'; img-src data:; {inline}"
    assert set(re.findall(r"https?://[^\s'\"]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


ACTIONS = """
const seen = {}, plot = (id) => document.querySelector(`#${id} .plot > svg`);
const point = (kind, id, x, y) => {
  const frame = plot(id).getBoundingClientRect();
  const where = { clientX: frame.left + x * frame.width, clientY: frame.top + y * frame.height, pointerType: 'mouse' };
  plot(id).dispatchEvent(new PointerEvent(kind, { bubbles: true, ...where }));
};
const tip = (id) => document.querySelector(`#${id} .tooltip:not([hidden])`)?.textContent || '';
const named = (text) => (one) => one.textContent === text || one.title === text;
const button = (place, text) => [...document.querySelectorAll(`${place} button`)].find(named(text));
point('pointermove', 'loss-tokens', 0.6, 0.5); seen.loss = tip('loss-tokens');
point('pointermove', 'traffic', 0.6, 0.5); seen.traffic = tip('traffic');
document.querySelector('[data-flight]').dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));
seen.flight = tip('timeline');
seen.lines = document.querySelectorAll('#loss-tokens path.line.main').length;
button('.legend', 'streaming').click();
seen.linesAfterHiding = document.querySelectorAll('#loss-tokens path.line.main').length;
button('.legend', 'streaming').click();
point('pointerdown', 'loss-tokens', 0.4, 0.5);
point('pointermove', 'loss-tokens', 0.7, 0.5);
point('pointerup', 'loss-tokens', 0.7, 0.5);
seen.zoomed = !button('#loss-tokens', 'whole run').hidden;
button('#loss-tokens', 'whole run').click();
seen.unzoomed = button('#loss-tokens', 'whole run').hidden;
seen.window = plot('timeline').getAttribute('aria-label');
button('#timeline', 'later').click();
seen.laterWindow = plot('timeline').getAttribute('aria-label');
const slider = document.querySelector('#timeline input');
slider.value = 0; slider.dispatchEvent(new Event('input'));
seen.firstWindow = plot('timeline').getAttribute('aria-label');
button('#traffic', 'linear').click();
const paper = () => getComputedStyle(document.body).backgroundColor;
seen.light = paper(); document.querySelector('.theme').click(); seen.dark = paper();
document.documentElement.dataset.seen = JSON.stringify(seen);
"""


def test_hover_legend_zoom_timeline_and_theme_do_what_they_should(tmp_path: Path):
    text = report.page([Run(synthetic("data-parallel")), Run(synthetic("streaming"))])
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)  # to let the test's script in
    path = tmp_path / "report.html"
    path.write_text(text.replace("</body>", f"<script>{ACTIONS}</script></body>"))
    page = browse(path)
    check_drawn(page)
    seen = json.loads(page.root["data-seen"] or "")
    assert re.search(r"tokens.*data-parallel, training\d\.\d+.*streaming, validation\d\.\d+", seen["loss"])
    assert re.search(r"steps [\d,]+ to [\d,]+data-parallel10\.5 MB.*streaming348 kB", seen["traffic"])
    assert re.search(r"round \d+, island 0sent after step \d+174 kBapplied after step \d+.*ms later", seen["flight"])
    assert (seen["lines"], seen["linesAfterHiding"]) == (2, 1)
    assert seen["zoomed"]
    assert seen["unzoomed"]
    assert len({seen["window"], seen["laterWindow"], seen["firstWindow"]}) == 3
    assert "steps 0 to" in seen["firstWindow"]
    assert seen["light"] == "rgb(246, 247, 249)"
    assert seen["dark"] == "rgb(15, 19, 24)"


SLIDING = """
const seen = {}, slider = document.querySelector('#link-bandwidth');
const words = () => [...document.querySelectorAll('#loss-wall .words p')].map((line) => line.textContent);
const ticks = () => [...document.querySelectorAll('#loss-wall .axes text')].map((text) => text.textContent);
const look = () => ({
  words: words(), ticks: ticks(), name: document.querySelector('.link b').textContent,
  spoken: slider.getAttribute('aria-valuetext'),
  unzoomed: document.querySelector('#loss-wall .tools button').hidden,
});
const move = (place) => { slider.value = place; slider.dispatchEvent(new Event('input')); return look(); };
seen.measured = look(); seen.slow = move(PLACE); seen.slowest = move(0); seen.fastest = move(Number(slider.max) - 1);
seen.again = move(slider.max);
move(PLACE);
[...document.querySelectorAll('.legend button')].find((one) => one.textContent === 'data-parallel').click();
seen.without = look();
seen.table = [...document.querySelectorAll('table.summary tr')].map((row) => [...row.children].map((c) => c.innerText));
seen.explained = [...document.querySelectorAll('.explained')].map((line) => line.textContent);
document.documentElement.dataset.seen = JSON.stringify(seen);
"""


def slide(runs: list[Run], folder: Path) -> dict[str, Any]:
    """What the page shows while its slider is moved: at first, at 20 Mbit/s, at both ends, and as measured again."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.page(runs))
    script = SLIDING.replace("PLACE", str(links.BANDWIDTHS.index(links.EVERYDAY)))
    path = folder / "report.html"
    path.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    page = browse(path)
    check_drawn(page)
    seen: dict[str, Any] = json.loads(page.root["data-seen"] or "")
    return seen


def test_the_slider_moves_the_curves_to_another_link(tmp_path: Path):
    runs = [Run(synthetic("data-parallel", steps=400)), Run(synthetic("streaming", steps=400))]
    seen = slide(runs, tmp_path)
    baseline, streaming = (units.duration(links.seconds_on(run)) for run in runs)
    assert baseline == "15 min 9 s"  # 400 times 5.24 MB with the headers of TCP: 896 s; some of 22 s computing
    assert seen["measured"]["name"] == seen["measured"]["spoken"] == "as measured"
    assert seen["slow"]["name"] == seen["slow"]["spoken"] == "20 Mbit/s"
    assert seen["slow"]["words"][0] == f"On 20 Mbit/s: streaming {streaming}, data-parallel {baseline}."
    # Streaming ends at 3.103. Data-parallel falls from 3.667 to 3.088 in its last 200 steps: it is there at step 395.
    race = f"All reach a validation loss of 3.103: streaming first, after {streaming}; data-parallel after 14 min 57 s."
    assert seen["slow"]["words"][1] == race
    assert seen["slow"]["words"][2].startswith("Planned: ")
    assert "minutes" in seen["slow"]["ticks"]
    assert seen["slowest"]["name"] == "10 kbit/s"
    assert "hours" in seen["slowest"]["ticks"]
    assert seen["fastest"]["name"] == "100 Gbit/s"
    assert seen["again"] == seen["measured"]
    assert seen["without"]["words"] == [f"On 20 Mbit/s: streaming {streaming}.", seen["slow"]["words"][2]]
    assert [row[-1] for row in seen["table"]] == ["On 20 Mbit/s", baseline, streaming]
    assert len(seen["explained"]) == 1


def test_a_run_that_cannot_be_planned_stays_where_it_was_measured(tmp_path: Path):
    events = synthetic("diloco", steps=60)
    events[0] = {name: value for name, value in events[0].items() if name not in ("parameters", "layers")}
    seen = slide([Run(synthetic("data-parallel", steps=60)), Run(events)], tmp_path)
    measured = re.search(r"diloco ([\d.]+ s)", seen["measured"]["words"][0])
    assert measured
    assert f"diloco {measured[1]}, data-parallel 2 min" in seen["slow"]["words"][0]
    assert "diloco as measured: its log does not say enough to plan with." in seen["slow"]["words"]
    assert [row[-1] for row in seen["table"]] == ["On 20 Mbit/s", "2 min 16 s", DASH]


def test_one_island_alone_shows_what_the_others_are_worth(tmp_path: Path):
    runs = [Run(silent()), Run(synthetic("data-parallel", steps=200)), Run(synthetic("streaming", steps=200))]
    seen = slide(runs, tmp_path)
    assert [row[4] for row in seen["table"]] == ["Worth", DASH, "100 %", "85 %"]
    assert any("what the other islands add, as a share" in line for line in seen["explained"])
    assert seen["table"][1][6] == DASH
    assert "one island alone" in seen["table"][1][1]
    page = browse(report.write(runs, tmp_path / "report.html"))
    check_drawn(page)
    assert sum(text.startswith("peak ") for text in page.texts) == 2  # a strip of traffic for each run that sends


def test_without_a_link_there_is_no_slider(tmp_path: Path):
    page = browse(report.write([Run(silent())], tmp_path / "report.html"))
    check_drawn(page)
    assert "input" not in page.tags


def test_a_run_of_100_000_steps_opens_and_keeps_its_extremes(tmp_path: Path):
    events = synthetic("streaming", steps=100_000, islands=1, eval_every=1000)
    spike = next(event for event in events if event["event"] == "step" and event["step"] == 77_777)
    spike.update(loss=42.0, bytes_sent=987_654_321)
    run = Run(events)
    assert max(row[6] for row in loss_curve(run.steps)) == 42.0
    rows = traffic(run.steps)
    assert len(rows) <= TRAFFIC_ROWS
    assert max(row[2] for row in rows) == 987_654_321
    path = report.write([run], tmp_path / "report.html")
    assert path.stat().st_size < 2_500_000
    check_drawn(browse(path))


def test_the_command_writes_the_report_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    report.configure(parser)
    folders = [str(save(synthetic(method, steps=60), tmp_path / method)) for method in ("data-parallel", "diloco")]
    out = tmp_path / "new folder" / "both.html"
    result = report.run(parser.parse_args([*folders, "--out", str(out), "--title", "A & B"]))
    assert result["report"] == str(out)
    assert [run["name"] for run in result["runs"]] == ["data-parallel", "diloco"]
    assert result["runs"][1]["byte_ratio"] == 30.0
    json.dumps(result, allow_nan=False)
    assert "<title>A &amp; B</title>" in out.read_text()
    printed = capsys.readouterr().out
    assert "30.0x" in printed
    assert str(out) in printed
    assert report.run(parser.parse_args(folders[:1]))["report"] == f"{folders[0]}/report.html"


def test_mistakes_are_one_sentence_and_leave_nothing_behind(tmp_path: Path):
    parser = argparse.ArgumentParser()
    report.configure(parser)
    good = str(save(synthetic(steps=10), tmp_path / "run"))
    with pytest.raises(ValueError, match="is not a run"):
        report.run(parser.parse_args([good, str(tmp_path / "missing")]))
    with pytest.raises(ValueError, match="is a folder"):
        report.run(parser.parse_args([good, "--out", str(tmp_path)]))
    (tmp_path / "odd.jsonl").write_text('{"event": "step", "step": 1, "time": "noon"}\n')
    with pytest.raises(ValueError, match="has an event that is not as"):
        report.run(parser.parse_args([str(tmp_path / "odd.jsonl")]))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["events.jsonl"]
