"""docs/reproduction.md: one table, claim by claim, and a section for each study; made from results/*.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from isles.reproduce import figures, results, studies
from isles.reproduce.command import SPEED, verdict_of
from isles.reproduce.study import Finding, Records, Study
from isles.view import units

INTRODUCTION = """# The papers' findings on one machine

What the papers claim, what comes out here, and the command that shows it. The page is generated from `results/*.json`:
`isles reproduce --document`. Every study runs by itself, `isles reproduce NAME`, stops and continues, and says what it
finds: see `isles reproduce --list`.

Words in capitals in a command stand for text files of yours. Ours were English books, public domain (BOOKS), and for
islands that see different text also papers of the *Foreign Relations of the United States* (FRUS), news (NEWS) and
encyclopaedia articles (WIKI). HELD_OUT is text of the same kind that is not trained on; with several sources, as many
files of it in the same order. Without `--data` the text is the source of Python's standard library.

A: Streaming DiLoCo (arXiv 2501.18512); B: eager updates (2502.12996); C: DiLoCo (2311.08105); D: scaling laws for
DiLoCo (2503.09799).

The models here are a thousand times smaller than the papers' and the runs are short, a few dozen outer rounds. What
can be checked is the order of things, not their size: a claim *agrees* if it meets the criterion beside it, which is
written down with the study. Differences are relative, in validation loss, seed by seed on the same tokens, ± the
standard error of their mean over seeds. Negative results stay.
"""


def write(folder: Path, page: Path) -> Path:
    """Writes the page, and draws every figure anew."""
    found = {name: folder / f"{name}.json" for name in studies.NAMES if (folder / f"{name}.json").exists()}
    if not found:
        raise ValueError(f"{folder} holds no results: run a study first, such as isles reproduce methods")
    parts, rows = [], []
    for name, path in found.items():
        study, content = studies.study(name), results.read(path)
        records = Records(content["records"])
        findings = study.findings(records)
        figures.save(study, records, path.with_suffix(".png"))
        figure = os.path.relpath(path.with_suffix(".png"), page.parent)
        rows += [_row(finding, content["command"]) for finding in findings]
        parts.append(_section(study, content, records, findings, Path(figure).as_posix()))
    missing = [name for name in studies.NAMES if name not in found]
    table = ["| claim | paper | ours | agrees if | | command |", "|---|---|---|---|---|---|", *rows]
    text = [INTRODUCTION, "\n".join(table), *parts]
    if missing:
        text.append(f"Not run to the end yet: {', '.join(missing)}.")
    if (folder / f"{SPEED}.json").exists():
        from isles.reproduce import speed

        text.append(speed.section(folder / f"{SPEED}.json"))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(part.strip() for part in text) + "\n", "utf-8")
    return page


def _row(finding: Finding, command: str) -> str:
    cells = (finding.claim, finding.paper, finding.ours, finding.criterion, verdict_of(finding.agrees), f"`{command}`")
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _section(study: Study, content: dict[str, Any], records: Records, findings: list[Finding], figure: str) -> str:
    scale = content["scale"]
    seeds = max(len(records.of(name)) for name in records.names) if study.chosen else records.seeds()
    sizes = sorted({record["parameters"] for record in records.all})
    size = units.count(sizes[0]) if len(sizes) == 1 else f"{units.count(sizes[0])} to {units.count(sizes[-1])}"
    runs = f"{len(records.all)} runs, {units.duration(content['run_seconds'])} of one core"
    agreeing = sum(finding.agrees is True for finding in findings)
    note = f"\n{study.note}" if study.note else ""
    return f"""## {study.title}

Paper: {study.claim} ({study.source})
We expected: {study.expectation}
Came out: {agreeing} of {len(findings)} claims agree.

{size} parameters, {scale["steps"]} steps, batches of {scale["batch_size"]} x {scale["sequence_length"]} an island,
text: {", ".join(content["text"])}; {seeds} seed{"s" * (seeds > 1)}; {runs}.{note}

![{study.title}]({figure})

{_losses(records)}
"""


def _losses(records: Records) -> str:
    """All configurations: mean loss over seeds and what an island sends."""
    lines = ["| configuration | seeds | validation loss | smallest to largest | bytes sent |", "|---|---|---|---|---|"]
    for name in records.names:
        values = records.values(name)
        sent = units.number_of_bytes(records.of(name)[0]["bytes_sent"])
        around = f"{min(values):.4f} to {max(values):.4f}"
        lines.append(f"| {name} | {len(values)} | {records.mean(name):.4f} | {around} | {sent} |")
    return "<details><summary>every configuration</summary>\n\n" + "\n".join(lines) + "\n\n</details>"
