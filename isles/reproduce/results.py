"""results/NAME.json: a study's runs with all that is needed to judge them, written whole or not at all.

Findings are not taken from the file but made from its runs again, so that text and criteria can be improved without
running anything.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

import isles
from isles.reproduce.job import Text
from isles.reproduce.pool import Task
from isles.reproduce.scale import Scale
from isles.reproduce.study import Records, Study
from isles.reproduce.train import ring_bytes


def record_of(task: Task, outcome: dict[str, Any]) -> dict[str, Any]:
    """A run as it stands in the file."""
    if task.job.method is None:  # the run itself does not know how many islands it stands for
        sent = ring_bytes(outcome["parameters"], task.job.islands) * task.job.steps
        outcome = {**outcome, "bytes_sent": sent}
    return {"name": task.name, "key": task.key, "job": task.job.as_dict(), **outcome}


def write(study: Study, scale: Scale, text: Text, records: list[dict[str, Any]], command: str, path: Path) -> None:
    """Writes results and findings of a study. Other runs that are there already stay beside it: they may be of a later
    seed.
    """
    left = _others(records, path)
    found = [vars(finding) for finding in study.findings(Records(records))]
    content = {
        "study": study.name,
        "claim": study.claim,
        "source": study.source,
        "expectation": study.expectation,
        "command": command,
        "text": text.names(),
        "scale": scale.as_dict(),
        "versions": {"isles": isles.__version__, "torch": str(torch.__version__)},
        "run_seconds": round(sum(record["seconds"] for record in records), 1),
        "findings": found,
    }
    head = json.dumps(content, indent=1)[:-2]
    rows = ",\n  ".join(json.dumps(record) for record in records)  # a run per line: readable, and small in a diff
    if left:
        _write(_unfinished(path), _lines(left))
    _write(path, f'{head},\n "records": [\n  {rows}\n ]\n}}\n')
    if not left:
        _unfinished(path).unlink(missing_ok=True)


def keep(records: list[dict[str, Any]], path: Path) -> None:
    """Writes the runs of a study that has not run every configuration yet, one per line, beside where it will be. Runs
    that are there already stay: they may be of a later seed.
    """
    _write(_unfinished(path), _lines([*records, *_others(records, path)]))


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """Outcomes by key, as far as they have been written: on another machine a study goes on where it was left."""
    about = ("name", "key", "job")
    return {r["key"]: {name: v for name, v in r.items() if name not in about} for r in _others([], path)}


def _others(records: list[dict[str, Any]], path: Path) -> list[dict[str, Any]]:
    """What has been written of a study, besides these."""
    lines = _unfinished(path).read_text("utf-8").splitlines() if _unfinished(path).exists() else []
    written = [*(read(path)["records"] if path.exists() else []), *(json.loads(line) for line in lines)]
    known = {record["key"] for record in records}
    return list({record["key"]: record for record in written if record["key"] not in known}.values())


def _lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _unfinished(path: Path) -> Path:
    return path.with_suffix(".part.jsonl")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, "utf-8")
    os.replace(partial, path)


def read(path: Path) -> dict[str, Any]:
    """The content of such a file."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): run the study again, finished runs are kept") from error
    if not isinstance(content, dict) or not {"study", "records", "command"} <= content.keys():
        raise ValueError(f"{path} is no result of isles reproduce: remove it")
    return content
