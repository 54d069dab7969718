"""`isles report RUN [RUN ...]`: one HTML file that compares runs.

The file needs nothing but a browser: styles, scripts and data are inside. A run's data is JSON in an
inert script element, with `<`, `>` and `&` escaped, and is put on the page as text only; on top of that the page's
content security policy lets the browser run our one script, known by its hash, and load nothing from anywhere.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import math
import os
import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from isles.plan.quantities import format_bandwidth
from isles.view import links, series
from isles.view.runs import Run, distinct_names, reference, summarize
from isles.view.table import table

SCRIPTS = (
    "dom.js",
    "format.js",
    "scale.js",
    "save.js",
    "keys.js",
    "chart.js",
    "links.js",
    "loss.js",
    "traffic.js",
    "timeline.js",
    "summary.js",
    "parts.js",
    "page.js",
)
STYLES = ("theme.css", "page.css", "summary.css", "chart.css", "links.css", "print.css")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles report`."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run's folder, or its events.jsonl")
    parser.add_argument("--store", metavar="URL", help="a run in an object store: a bucket, or a folder")
    parser.add_argument(
        "--out", metavar="FILE", help="where to write (default: report.html, in the run's folder if there is one run)"
    )
    parser.add_argument("--title", metavar="T", help="the page's title (default: the names of the runs)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the report, prints the summary table and where the report is."""
    if not args.runs and not args.store:
        raise ValueError("give the folders of runs, or --store URL")
    runs = [Run.load(path) for path in args.runs] + ([_stored(args.store)] if args.store else [])
    alone = len(runs) == len(args.runs) == 1 and Path(args.runs[0]).is_dir()
    out = Path(args.out) if args.out else Path(args.runs[0]) / "report.html" if alone else Path("report.html")
    path = write(runs, out, args.title)
    print(table(runs))
    print(f"report: {path}")
    summaries = zip(distinct_names(runs), summarize(runs), strict=True)
    return {"report": str(path), "runs": [{**vars(summary), "name": name} for name, summary in summaries]}


def _stored(url: str) -> Run:
    from isles.view.store_source import load

    return load(url)


def write(runs: Sequence[Run], out: str | os.PathLike[str], title: str | None = None) -> Path:
    """Writes the report of these runs to a file, complete or not at all."""
    path = Path(out)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give --out the name of a file, such as {path / 'report.html'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(page(runs, title))
        os.chmod(draft, 0o644)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    return path


def page(runs: Sequence[Run], title: str | None = None) -> str:
    """The report as one HTML text."""
    code, look = script(SCRIPTS), style(STYLES)
    names = distinct_names(list(runs))
    heading = title or (" vs ".join(names) if len(names) <= 3 else f"{len(names)} runs compared")
    return TEMPLATE.format(
        title=html.escape(heading),
        policy=f"default-src 'none'; img-src data:; style-src {_digest(look)}; script-src {_digest(code)}",
        style=look,
        data=_inert_json({"title": heading, **contents(runs)}),
        script=code,
    )


def script(names: Sequence[str]) -> str:
    """Some of the page's scripts as one."""
    return "(() => {\n'use strict';\n" + "\n".join(_asset(name) for name in names) + "\n})();\n"


def style(names: Sequence[str]) -> str:
    """Some of the page's style sheets as one."""
    return "\n".join(_asset(name) for name in names)


def _digest(text: str) -> str:
    """How a content security policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def contents(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the page shows, as plain values; long series are already shortened."""
    runs = list(runs)
    names, summaries = distinct_names(runs), summarize(runs)
    return {
        "reference": reference(runs),
        **bandwidths(),
        "runs": [
            {
                "name": name,
                "method": run.method_name,
                "dataParallel": run.data_parallel,
                "islands": run.islands,
                "alone": run.alone,
                "parameters": run.config.get("parameters"),
                "layers": run.config.get("layers"),
                "fragments": run.config.get("fragments") or [],
                "syncEvery": run.method.get("sync_every"),
                "lateness": run.lateness,
                "knobs": run.method,
                "summary": vars(summary),
                "firstStep": run.steps[0].step if run.steps else 0,
                "lastStep": run.steps[-1].step if run.steps else 0,
                "curve": series.loss_curve(run.steps),
                "evals": _evals(run),
                "traffic": series.traffic(run.steps),
                "utilization": series.utilization(run),
                "flights": series.flights(run),
                "stepSeconds": _mean_step_seconds(run),
                "link": _link(run),
                "sample": run.sample,
                "config": run.config.get("config") or {},
            }
            for name, run, summary in zip(names, runs, summaries, strict=True)
        ],
    }


def bandwidths() -> dict[str, Any]:
    """The links for which times are planned, and which of them the table shows."""
    named = [[bandwidth, format_bandwidth(bandwidth)] for bandwidth in links.BANDWIDTHS]
    return {"bandwidths": named, "everyday": links.BANDWIDTHS.index(links.EVERYDAY)}


def _evals(run: Run) -> list[list[Any]]:
    """Rows of [step, tokens, bytes so far, wall seconds, loss, bits per byte]."""
    return [
        [
            event.get("step"),
            event.get("tokens"),
            event.get("bytes_sent"),
            wall_seconds,
            event.get("val_loss"),
            event.get("val_bits_per_byte"),
        ]
        for event, wall_seconds in run.wall_clock()
        if event["event"] == "eval" and event.get("val_loss") is not None
    ]


def _link(run: Run) -> dict[str, Any] | None:
    """Planned times on each of `links.BANDWIDTHS`; None: this run cannot be planned."""
    found = links.times(run)
    if found is None:
        return None
    return {"step": found.step_seconds, "startSteps": found.start_steps, "start": found.start_seconds}


def _mean_step_seconds(run: Run) -> float | None:
    seconds = [step.step_seconds / run.islands for step in run.steps]
    return sum(seconds) / len(seconds) if seconds else None


def _asset(name: str) -> str:
    return resources.files("isles.view").joinpath("page").joinpath(name).read_text(encoding="utf-8")


def _inert_json(value: Any) -> str:
    """JSON that cannot end the element it stands in, whatever strings it holds."""
    text = json.dumps(short(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def short(value: Any, digits: int = 7) -> Any:
    """Floats to seven digits, which is finer than a pixel; what is not finite becomes null."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): short(item, digits) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(item, digits) for item in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This report draws its charts with JavaScript, which is switched off here.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""
