"""The summary of runs as text, for the terminal: one row per run, the same numbers as the report's table."""

from __future__ import annotations

from collections.abc import Sequence

from isles.plan.quantities import format_bandwidth
from isles.view import links, units
from isles.view.runs import Run, Summary, distinct_names, summarize


def table(runs: Sequence[Run]) -> str:
    """Lines of text, without colour, aligned: validation loss, bytes, peak, utilisation and speed of each run.

    Worth, and the planned time on a slow link, need other runs to compare with, and are left out without them.

    >>> print(table([Run([], "first")]))
    run    method   val loss  bits/byte  bytes sent  fewer  peak a step  utilisation  tokens/s   wall
    first  unknown         -          -         0 B      -          0 B            -         -  0.0 s  (not finished)
    """
    summaries = summarize(list(runs))
    names = distinct_names(list(runs))
    rows = [list(HEADER), *(_cells(name, each) for name, each in zip(names, summaries, strict=True))]
    if any(summary.worth is not None for summary in summaries):
        _insert(rows, "worth", [units.rough_share(summary.worth) for summary in summaries], HEADER.index("bytes sent"))
    planned = [links.seconds_on(run) for run in runs] if len(runs) > 1 else []
    if any(seconds is not None for seconds in planned):
        head = f"on {format_bandwidth(links.EVERYDAY)}"
        _insert(rows, head, [units.duration(seconds) for seconds in planned], len(rows[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    notes = ["", *("" if summary.finished else "  (not finished)" for summary in summaries)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + note
        for row, note in zip(rows, notes, strict=True)
    )


HEADER = (
    "run",
    "method",
    "val loss",
    "bits/byte",
    "bytes sent",
    "fewer",
    "peak a step",
    "utilisation",
    "tokens/s",
    "wall",
)


def _insert(rows: list[list[str]], head: str, cells: list[str], column: int) -> None:
    for row, cell in zip(rows, [head, *cells], strict=True):
        row.insert(column, cell)


def _cells(name: str, summary: Summary) -> list[str]:
    printable = ["".join(c if c.isprintable() else "?" for c in text) for text in (name, summary.method)]
    return [
        *printable,  # a name is the user's: no control characters reach the terminal
        units.decimal(summary.val_loss),
        units.decimal(summary.val_bits_per_byte),
        units.number_of_bytes(summary.bytes_sent),
        units.ratio(summary.byte_ratio),
        units.number_of_bytes(summary.peak_bytes_per_step),
        units.share(summary.compute_utilization),
        units.count(summary.tokens_per_second),
        units.duration(summary.wall_seconds),
    ]
