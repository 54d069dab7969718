"""`isles reproduce`: runs a study, prints the paper's claim next to ours, writes results/NAME.json and a figure.

    isles reproduce --list
    isles reproduce methods
    isles reproduce bits --seeds 1 --data 'books/*.txt' --val held-out.txt
    isles reproduce --document          docs/reproduction.md and all figures, from the results that are there

Ctrl-C stops it; the same command goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isles.reproduce import studies
from isles.reproduce.scale import SCALES, Scale
from isles.reproduce.study import Finding, Records, Study
from isles.train import text as sources

SPEED = "speed"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles reproduce`."""
    parser.add_argument("study", nargs="?", metavar="NAME", help="the study to run, or speed: see --list")
    parser.add_argument("--list", action="store_true", help="list the studies with what the papers claim")
    parser.add_argument("--document", action="store_true", help="write the page of all results, and their figures")
    parser.add_argument("--scale", choices=list(SCALES), default="cpu", help="how large (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="inner steps of a run, instead of the scale's")
    parser.add_argument("--seeds", type=int, help="runs of each configuration, instead of the scale's")
    parser.add_argument("--model", help="nano, micro ... 4B, or LAYERSxHEADSxWIDTH, instead of the scale's")
    parser.add_argument("--data", help="training text, as for isles train (default: the scale's; cpu: stdlib)")
    parser.add_argument("--val", help="validation text; without it a part of the documents is held out")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder of results (default: %(default)s)"
    )
    parser.add_argument(
        "--page", type=Path, default=Path("docs/reproduction.md"), help="what --document writes (default: %(default)s)"
    )
    parser.add_argument("--workers", type=int, help="runs at a time (default: one per core, one on a GPU)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: if it pays)")
    parser.add_argument("--again", action="store_true", help="run everything anew, finished runs too")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Does what was asked for; returns what --json prints."""
    if args.list:
        return {"studies": _list()}
    if args.document:
        from isles.reproduce import document

        page = document.write(args.results, args.page)
        print(page)
        return {"page": str(page)}
    if args.study is None:
        raise ValueError("name a study, or ask for --list or --document")
    if args.study == SPEED:
        from isles.reproduce import speed

        return speed.run(args.results / "speed.json", quick=args.scale == "quick")
    return _run(studies.study(args.study), args)


def _list() -> list[dict[str, str]]:
    rows = []
    for name in studies.NAMES:
        study = studies.study(name)
        print(f"{name:<18} {study.claim}  [{study.source}]")
        rows.append({"name": name, "claim": study.claim, "source": study.source})
    print(f"{SPEED:<18} which way of running islands is the fastest on this machine")
    return rows


def _run(study: Study, args: argparse.Namespace) -> dict[str, Any]:
    from isles.reproduce import figures, results
    from isles.reproduce.job import Text
    from isles.reproduce.pool import Task, run_tasks, tasks_of

    scale = SCALES[args.scale].changed(steps=args.steps, seeds=args.seeds, model=args.model)
    text = Text(args.data or scale.data, args.val)
    workers = _workers(args.workers, scale)
    print(f"paper:  {study.claim}  [{study.source}]\nexpect: {study.expectation}", flush=True)
    jobs = study.configurations(scale)
    path, command = args.results / f"{study.name}.json", _command(study, args, text)
    records: list[dict[str, Any]] = []

    def run(tasks: Sequence[Task]) -> None:
        options = {"workers": workers, "compile_model": args.compile, "again": args.again}
        for task, outcome in run_tasks(tasks, text, done=results.finished(path), **options):
            records.append(results.record_of(task, outcome))
            records.sort(key=lambda record: (record["job"]["seed"], list(jobs).index(record["name"])))
            if {record["name"] for record in records} == jobs.keys():  # at least one seed of each
                results.write(study, scale, text, records, command, path)
            else:
                results.keep(records, path)

    if study.chosen is None:
        run(tasks_of(jobs, range(scale.seeds), text))
    else:
        more = jobs
        while more:
            run(tasks_of(more, range(1), text))
            more = {} if study.extended is None else study.extended(jobs, Records(records))
            jobs.update(more)
        chosen = {name: jobs[name] for name in study.chosen(Records(records))}
        run(tasks_of(chosen, range(1, scale.seeds), text))
    figures.save(study, Records(records), path.with_suffix(".png"))
    found = study.findings(Records(records))
    print(_table(found))
    print(f"{path}, {path.with_suffix('.png')}")
    return {"study": study.name, "results": str(path), "runs": len(records), "findings": [vars(each) for each in found]}


def _workers(given: int | None, scale: Scale) -> int:
    if given is not None:
        if given < 1:
            raise ValueError(f"--workers {given} must be at least 1")
        return given
    if scale.name == "quick":
        return 1
    import torch

    return (
        1
        if torch.cuda.is_available()
        else len(os.sched_getaffinity(0))
        if sys.platform == "linux"
        else os.cpu_count() or 1
    )


def _command(study: Study, args: argparse.Namespace, text: Any) -> str:
    """The command as another machine would write it: files by a word in capitals, not by path."""
    words = ["isles", "reproduce", study.name]
    for flag, default in (("scale", "cpu"), ("steps", None), ("seeds", None), ("model", None)):
        if getattr(args, flag) != default:
            words += [f"--{flag}", str(getattr(args, flag))]
    if args.data:
        words += ["--data", ",".join(map(_placeholder, sources.parts(text.data), text.names()))]
    if args.val:
        words += ["--val", "HELD_OUT"]
    return shlex.join(words)


def _placeholder(part: str, name: str) -> str:
    """What stands for a source: itself if it has no path (see `isles.train.text`), else its name in capitals.

    >>> _placeholder("stdlib", "stdlib"), _placeholder("corpora/books.train.txt.xz", "books")
    ('stdlib', 'BOOKS')
    """
    return part if part.partition(":")[0] in ("stdlib", "hf", "synthetic") else name.upper()


def _table(found: Sequence[Finding]) -> str:
    """Claim by claim, for the terminal."""
    lines = []
    for finding in found:
        rows = {"claim": finding.claim, "paper": finding.paper, "ours": finding.ours}
        rows["verdict"] = f"{verdict_of(finding.agrees)} (agrees if: {finding.criterion})"
        lines.append("")
        for label, content in rows.items():
            lines += textwrap.wrap(content, 110, initial_indent=f"  {label:<9}", subsequent_indent=" " * 11)
    return "\n".join(lines)


def verdict_of(agrees: bool | None) -> str:
    """In one word."""
    return "open" if agrees is None else "agrees" if agrees else "differs"
