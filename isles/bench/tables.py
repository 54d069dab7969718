"""The results as tables: a title, a head and rows of text, for the terminal and for the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isles.bench.engine import label
from isles.view import units


@dataclass(frozen=True)
class Table:
    """Text in rows; the first column is words, the others are numbers."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """For the terminal.

        >>> print(Table("two", ("name", "x"), [("one", "1.00"), ("three", "33.00")]).text())
        two
        <BLANKLINE>
        name       x
        one     1.00
        three  33.00
        """
        grid = [self.head, *self.rows]
        widths = [max(len(row[column]) for row in grid) for column in range(len(self.head))]
        lines = [
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in grid
        ]
        return "\n".join([self.title, "", *lines])

    def markdown(self) -> str:
        """For the page, without the title."""
        rule = ["---", *["---:"] * (len(self.head) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [self.head, rule, *self.rows])


def tables(result: Mapping[str, Any]) -> dict[str, Table]:
    """A table for each part that was measured, by name."""
    makers = {
        "codecs": _codecs, "engine": _engine, "islands": _islands, "phases": _phases,
        "parameters": lambda result: _sizes(result["scaling"]["parameters"]),
        "fragments": lambda result: _fragments(result["scaling"]["fragments"]),
        "memory": _memory, "page": _page, "watched": _watched, "checks": _checks, "peers": _peers, "trainer": _trainer,
        "device": _device,
    }  # fmt: skip
    there = {**result, **dict.fromkeys(("parameters", "fragments"), result.get("scaling"))}
    there["watched"] = result.get("page")
    return {name: make(result) for name, make in makers.items() if there.get(name)}


def _codecs(result: Mapping[str, Any]) -> Table:
    head = ("codec", "bits", "encode", "encode, into", "accumulate", "decode")
    columns = ("encode", "encode_into", "accumulate", "decode")
    rows = [
        (name, f"{row['bits']:.3f}", *(f"{row[column]:.3f}x" for column in columns))
        for name, row in result["codecs"].items()
    ]
    return Table("codecs: speed against copy_ of the same fp32 bytes, one thread", head, rows)


def _device(result: Mapping[str, Any]) -> Table:
    found = result["device"]
    rows = [
        (name, _milliseconds(row["seconds"]), f"{row['bytes_a_value']:.2f}", f"{row['against_copy']:.3f}x")
        for name, row in found["rows"].items()
    ]
    speeds = {"copy_ on it": found["copy_bytes_per_second"], **found["host"]}
    words = ", ".join(f"{name.replace('_', ' ')} {speed / 1e9:.1f} GB/s" for name, speed in speeds.items())
    title = f"kernels on {found['device']}, {units.count(found['values'])} values; {words}"
    return Table(title, ("kernel", "time", "bytes a value", "against copy_"), rows)


def _engine(result: Mapping[str, Any]) -> Table:
    return Table("engine: one island alone, streaming in e3m0", ENGINE_HEAD, list(_engine_rows(result["engine"])))


def _islands(result: Mapping[str, Any]) -> Table:
    head = ("island", *ENGINE_HEAD[1:], "waiting")
    rows = [
        (str(rank), *cells[1:], f"{row['wait_share']:.2%}")
        for rank, (row, cells) in enumerate(zip(result["islands"], _engine_rows(result["islands"]), strict=True))
    ]
    return Table("engine: two islands, two processes on this machine", head, rows)


ENGINE_HEAD = (
    "parameters",
    "bare step",
    "isles, mean",
    "overhead",
    "CPU time",
    "all threads",
    "wall",
    "longest stall",
    "longest step",
)


def _engine_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        yield (
            label(row),
            _milliseconds(row["bare_seconds"]),
            _milliseconds(row["isles_seconds"]),
            f"{row['overhead']:.2%}",
            f"{row['overhead_cpu']:.2%}",
            f"{row['overhead_threads']:+.1%}",
            f"{row['overhead_wall']:+.1%}",
            _milliseconds(row["stall_seconds"]),
            f"{row['longest_step']:.2f}x",
        )


def _phases(result: Mapping[str, Any]) -> Table:
    rows = [(name, f"{share:.1%}") for name, share in result["phases"].items()]
    return Table("engine: where isles' time goes (torch.profiler ranges)", ("range", "share"), rows)


def _sizes(rows: Sequence[Mapping[str, Any]]) -> Table:
    head = ("parameters", "a round", "per million parameters")
    cells = [
        (
            units.count(row["parameters"]),
            _milliseconds(row["seconds"]),
            _milliseconds(row["seconds"] / row["parameters"] * 1e6),
        )
        for row in rows
    ]
    return Table("scaling: cost of a round against parameters", head, cells)


def _fragments(sizes: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """A row for each number of fragments, columns for each size of model."""
    head = ["fragments"]
    for rows in sizes:
        head += [f"{units.count(rows[0]['parameters'])}: a round", "against one", "a fragment"]
    cells = [
        (
            str(alike[0]["fragments"]),
            *(
                cell
                for row, rows in zip(alike, sizes, strict=True)
                for cell in (
                    _milliseconds(row["seconds"]),
                    f"{row['seconds'] / rows[0]['seconds']:.2f}x",
                    _each(row),
                )
            ),
        )
        for alike in zip(*sizes, strict=True)
    ]
    return Table("scaling: cost of a round against the number of fragments", tuple(head), cells)


def _each(row: Mapping[str, Any]) -> str:
    return _milliseconds(row["seconds"] / row["fragments"])


def _memory(result: Mapping[str, Any]) -> Table:
    head = ("setting", "fragments", "at rest", "against bare", "peak", "against bare", "without kernels")
    rows = [
        (
            name,
            str(row["fragments"]),
            units.number_of_bytes(row["rest_bytes"]),
            f"{row['rest']:.3f}x",
            units.number_of_bytes(row["peak_bytes"]),
            f"{row['peak']:.3f}x",
            f"{row['peak_pytorch']:.3f}x",
        )
        for name, row in result["memory"].items()
    ]
    return Table("memory: on the device, against the bare loop (= data-parallel)", head, rows)


def _page(result: Mapping[str, Any]) -> Table:
    page = result["page"]
    empty, full, server = page["empty"], page["full"], page["server"]
    rows = [
        (what, form(empty[name]), form(full[name]), f"{full[name] / empty[name]:.1f}x" if empty[name] else "-")
        for what, name, form in (
            ("first paint", "paint_seconds", _milliseconds),
            ("ready", "ready_seconds", _milliseconds),
            ("an update, main thread", "update_seconds", _milliseconds),
            ("memory of the page", "heap_bytes", units.number_of_bytes),
        )
    ]
    rows.append(("the server reads the log", "-", _milliseconds(server["read_seconds"]), "-"))
    rows.append(("the server keeps", "-", units.number_of_bytes(server["kept_bytes"]), "-"))
    rows.append(("an answer", "-", units.number_of_bytes(server["answer_bytes"]), "-"))
    rows.append(("memory of the page, a log twice as long", "-", "-", f"{page['growth']['heap']:.2f}x"))
    rows.append(("the server keeps, a log twice as long", "-", "-", f"{page['growth']['kept']:.2f}x"))
    title = f"live page: {page['islands']} islands, {page['events']:,} events, against an empty page"
    return Table(title, ("", "empty", "full", "ratio"), rows)


def _watched(result: Mapping[str, Any]) -> Table:
    run = result["page"]["watched"]
    rows = [
        ("steps per second, nobody watches", f"{run['steps_per_second']:.1f}"),
        ("with the page open, against without", f"{run['ratio']:.3f}x ({_range(run['ratios'])})"),
        ("nobody watches, against the turn before", f"{_range(run['noise'])}"),
        (f"an island is killed until the page says so, the longest of {run['kills']}", f"{run['told_seconds']:.2f} s"),
    ]
    return Table("live page: a run of two islands, watched in turns", ("", "measured"), rows)


def _range(values: Sequence[float]) -> str:
    """
    >>> _range([0.98, 1.02])
    '0.98 to 1.02'
    """
    return f"{min(values):.2f} to {max(values):.2f}"


def _checks(result: Mapping[str, Any]) -> Table:
    rows = [
        (row["claim"], row["bound"], f"{row['value']:.4g}", "yes" if row["met"] else "no") for row in result["checks"]
    ]
    return Table("what must hold", ("claim", "bound", "measured", "holds"), rows)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _trainer(result: Mapping[str, Any]) -> Table:
    row = result["trainer"]
    head = ("model", "Trainer", "with DiLoCoCallback", "ratio")
    times = (f"{1e3 * row[name]:.2f} ms" for name in ("without_seconds", "with_seconds"))
    cells = [(units.count(row["parameters"]), *times, f"{row['ratio']:.4f}x")]
    return Table(f"trainer: CPU time of a step, one island alone, H = {row['sync_every']}", head, cells)


def _peers(result: Mapping[str, Any]) -> Table:
    peers = result["peers"]
    head = ("", "bytes, by the kernel", "payload", "step, alone", "wall", "utilisation", "loss")
    rows = [
        (
            row["who"],
            units.number_of_bytes(row["kernel_bytes"]),
            units.number_of_bytes(row["payload_bytes"]),
            f"{1e3 * row['step_seconds_alone']:.1f} ms",
            f"{row['wall_seconds']:.2f} s",
            units.share(row["compute_utilization"]),
            f"{row['val_loss']:.4f}",
        )
        for row in peers["rows"]
    ]
    return Table(f"peers: two islands over {peers['bandwidth']}, {peers['flags']}", head, rows)
