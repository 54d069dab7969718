"""The crash matrix: faults of every kind, each in a run of its own, and one table of what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from isles.lab.elastic import run
from isles.lab.elastic.faults import FAULTS
from isles.lab.elastic.fleet import Options
from isles.lab.elastic.run import Say
from isles.view import units

DISK_BYTES = 64 << 20
"""Of the disk that is filled up."""
BEGIN, END = "<!-- crash matrix -->", "<!-- end -->"
"""Around the table in a page."""
COLUMNS = {
    "fault": "what was done, and how often",
    "rounds": "sealed in the run",
    "in a round": "islands that the seal lists, of those alive, on average",
    "waited in vain": "seconds that a survivor waited per fault for rounds whose seal names who was missing; the most",
    "waited in all": "the same for all rounds until the fault was over, beyond an undisturbed run",
    "they lost": "rounds that were sealed without a survivor, steps that it skipped",
    "in a round again": "seconds from the start of a process until a round lists it; of these after joining; rounds",
    "it fetched": "bytes until then",
    "identical": "global models after the same round, by digest: on how many rounds two or more islands agreed",
}


def kinds_for(wanted: Sequence[str], store: str, *, explicit: bool) -> list[tuple[str, Literal["s3", "folder"]]]:
    """Which faults on which kind of store. A disk is filled up behind a folder, whatever the others use."""
    found: list[tuple[str, Literal["s3", "folder"]]] = []
    for kind in wanted:
        needs = FAULTS[kind].store
        if needs == "s3" and store == "folder":
            if explicit:
                raise ValueError(f"--faults {kind} needs a server between the islands: use --store s3")
            continue
        found.append((kind, "folder" if needs == "folder" or store == "folder" else "s3"))
    return found


def matrix(
    options: Options,
    kinds: Sequence[tuple[str, Literal["s3", "folder"]]],
    times: int,
    seed: int,
    seconds: float,
    say: Say,
) -> list[dict[str, Any]]:
    """Runs all of them; an undisturbed run on each kind of store comes first."""
    records, waiting = [], {}
    for store in dict.fromkeys([store for _, store in kinds] or [options.store]):
        say(f"undisturbed, {store}")
        own = dataclasses.replace(options, folder=options.folder / f"none-{store}", store=store)
        record = {"fault": "none", "times": 0, **run.calm(own, seconds, say)}
        waiting[store] = record["wait_seconds_per_apply"]
        records.append(record)
    for kind, store in kinds:
        say(f"{kind}: {FAULTS[kind].what}")
        disk = DISK_BYTES if kind == "disk-full" else 0
        own = dataclasses.replace(options, folder=options.folder / kind, store=store, disk_bytes=disk)
        record = run.faults(own, [kind] * (1 if kind == "slow-island" else times), seed, waiting[store], say)
        records.append({**record, "times": len(record["injected"])})
    return records


def is_sound(record: Mapping[str, Any]) -> bool:
    """Whether nothing went wrong: nobody failed or hung, faults were over, global models are the same."""
    over = all(each["over"] for each in record["injected"])
    whole = record["identical"] and not record["failures"] and not record["hanging"] and not record["audit_failure"]
    return bool(over and whole)


def rows(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The table's cells."""
    return [_row(record) for record in records]


def _row(record: Mapping[str, Any]) -> list[str]:
    kind, disturbed = record["fault"], bool(record["injected"])
    times = f" x {record['times']}" if record.get("times", 0) > 1 else ""
    name = f"{kind}{times}" + (" (folder)" if record["store"] == "folder" else "")
    survivors, joined = bool(record["survivors"]), bool(record["joiners"])
    vain = [record[f"survivor_waited_in_vain_seconds{more}"] for more in ("", "_most")]
    waited = [record[f"survivor_waited_seconds{more}"] for more in ("", "_most")]
    back = f"{_seconds(record['joiner_seconds'])} ({_seconds(record['joiner_seconds_after_joining'])})"
    agreed = f"{record['rounds_compared']} rounds" if record["identical"] else f"NO: {record['rounds_differing']}"
    broken = "; ".join([*record["failures"].values(), *(f"{name} hangs" for name in record["hanging"])])
    return [
        name,
        str(record["rounds"]),
        f"{record['islands_in_a_round'] or 0:.2f} of {record['islands_alive'] or 0:.2f}",
        *("{} ({})".format(*map(_seconds, pair)) if disturbed and survivors else "-" for pair in (vain, waited)),
        f"{record['survivor_lost_rounds']}, {record['survivor_skipped_steps']}" if disturbed and survivors else "-",
        f"{back}, {record['joiner_rounds']} rounds" if joined else "-",
        units.number_of_bytes(round(record["joiner_bytes"])) if joined else "-",
        agreed + (f" ({broken})" if broken else ""),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """The table for a page."""
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *rows(records)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def show(records: Sequence[Mapping[str, Any]]) -> None:
    """The table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, title="crash matrix")
    for cells in rows(records):
        table.add_row(*cells)
    Console(width=None if Console().is_terminal else 170).print(table)


def write_into(page: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Puts the table into a page, between its marks."""
    text = page.read_text() if page.exists() else ""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"--table {page} has no lines {BEGIN} and {END}: add them where the table should be")
    page.write_text(f"{before}{BEGIN}\n{markdown(records)}\n{END}{after}")
