"""`isles plan --store`: what a run on an object store costs, method by method.

Requests and bytes are counted by `isles.plan.store`. What is stored follows from when things are deleted: whoever
writes a snapshot deletes the payloads that the snapshot before it contains, and what is older than that. So the store
holds the payloads of one to two intervals between snapshots, those in flight, and two to three snapshots.

`PRICES` are public list prices without discounts, free allowances and taxes: S3 Standard in us-east-1, Cloud Storage
Standard in us-central1, R2 Standard. They were looked up in 2026 and change: give your own with `--prices`. Data that
stays in the region of the bucket is not charged as data out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from isles.core.schedule import Schedule
from isles.elastic.world import LOCAL_POLL, PERIODS_BETWEEN_SNAPSHOTS, POLL
from isles.plan.compare import Question
from isles.plan.fleet import slowest_bits_per_second
from isles.plan.present import table
from isles.plan.quantities import format_bandwidth
from isles.plan.store import STATE_BYTES, SlowLinkError, Traffic, payload_sizes, simulate
from isles.plan.variants import Variant
from isles.plan.workload import fragment_sizes
from isles.view import units

SHOWN = ("diloco", "streaming-overlap-fp4", "streaming-overlap-5-fp4", "distant-fp4", "yours")
"""Rows of the table; the other methods cost what one of these does, or are refused by a StoreWorld."""
EVENT_SECONDS = 5.0
"""Between two pieces of events, which `isles train --store` writes besides."""
HOUR, DAY, MONTH_DAYS = 3600.0, 86400.0, 30


@dataclass(frozen=True, kw_only=True)
class Prices:
    """In dollars."""

    writes: float
    """A million puts, creates and lists."""
    reads: float
    """A million gets, also of what is not there."""
    deletes: float = 0.0
    storage: float
    """A GB for a month."""
    out: float
    """A GB that leaves the store."""


PRICES = {
    "aws": Prices(writes=5.0, reads=0.4, storage=0.023, out=0.09),
    "gcs": Prices(writes=5.0, reads=0.4, storage=0.020, out=0.12),
    "r2": Prices(writes=4.5, reads=0.36, storage=0.015, out=0.0),
    "folder": Prices(writes=0.0, reads=0.0, storage=0.0, out=0.0),
}


def parse_prices(text: str, base: Prices) -> Prices:
    """
    >>> parse_prices("out=0,storage=0.03", PRICES["aws"]).storage
    0.03
    """
    names = [each.name for each in fields(Prices)]
    changes = {}
    for entry in text.split(","):
        name, _, value = entry.partition("=")
        try:
            changes[name.strip()] = float(value)
        except ValueError:
            changes[name.strip()] = -1.0
        if name.strip() not in names or not 0 <= changes[name.strip()] < float("inf"):
            raise ValueError(
                f"--prices {entry!r} is not understood: write dollars like writes=5, of {', '.join(names)}"
            )
    return replace(base, **changes)


@dataclass(frozen=True, kw_only=True)
class Store:
    """What joins the islands."""

    kind: str
    """One of `PRICES`."""
    prices: Prices
    latency_seconds: float
    patience_seconds: float | None

    @classmethod
    def of(cls, kind: str, latency_seconds: float | None, patience_seconds: float | None, prices: str | None) -> Store:
        """With what is usual where nothing is given."""
        usual = 0.001 if kind == "folder" else 0.05
        return cls(
            kind=kind,
            prices=PRICES[kind] if prices is None else parse_prices(prices, PRICES[kind]),
            latency_seconds=usual if latency_seconds is None else latency_seconds,
            patience_seconds=patience_seconds,
        )

    @property
    def poll(self) -> float:
        return LOCAL_POLL if self.kind == "folder" else POLL


@dataclass(frozen=True)
class Row:
    """One method. Requests and bytes are of one island; what is stored, and money, of the run."""

    variant: Variant
    traffic: Traffic
    islands: int
    step_seconds: float
    """With waiting."""
    interval_bytes: int
    """Payloads between two snapshots."""
    snapshot_bytes: int

    def per_hour(self, what: float) -> float:
        return what / self.islands * HOUR / self.traffic.seconds

    @property
    def stored_bytes(self) -> float:
        """On average; seals besides."""
        return 1.5 * self.interval_bytes + 2 * self.snapshot_bytes

    @property
    def most_stored_bytes(self) -> int:
        return 2 * self.interval_bytes + 3 * self.snapshot_bytes

    def dollars_per_day(self, prices: Prices) -> float:
        traffic = self.traffic
        requests = traffic.writes * prices.writes + traffic.reads * prices.reads
        requests += traffic.requests["delete"] * prices.deletes
        used = requests / 1e6 + traffic.bytes_down / 1e9 * prices.out
        return used * DAY / traffic.seconds + self.stored_bytes / 1e9 * prices.storage / MONTH_DAYS


@dataclass(frozen=True)
class Plan:
    """The answer."""

    question: Question
    store: Store
    sync_every: int
    rows: list[Row]
    too_slow: dict[str, str]
    """Methods that this link cannot carry, and why."""


def plan(question: Question, variants: Sequence[Variant], store: Store, sync_every: int) -> Plan:
    """A row for each variant that is shown."""
    rows, too_slow = [], {}
    for variant in variants:
        if variant.name in SHOWN:
            try:
                rows.append(_row(question, variant, store))
            except SlowLinkError as error:
                too_slow[variant.name] = str(error)
    if not rows:
        raise ValueError(list(too_slow.values())[-1])
    return Plan(question, store, sync_every, rows, too_slow)


def _row(question: Question, variant: Variant, store: Store) -> Row:
    if variant.family == "eager":
        raise ValueError("--update eager does not go with --store: Method.distant is as late, and does")
    method = variant.method()
    sizes = fragment_sizes(question.workload, method)
    schedule, payloads = Schedule.of(method, len(sizes)), payload_sizes(sizes, method.codec)
    states = [STATE_BYTES * numel for numel in sizes]
    traffic = simulate(
        schedule,
        payloads,
        states,
        question.fleet,
        latency_seconds=store.latency_seconds,
        patience_seconds=store.patience_seconds,
        poll=store.poll,
    )
    steps = traffic.rounds / len(sizes) * schedule.sync_every
    interval = PERIODS_BETWEEN_SNAPSHOTS * question.islands * sum(payloads)
    return Row(variant, traffic, question.islands, traffic.seconds / steps, interval, sum(states))


def text(plan: Plan) -> str:
    """The answer, for reading."""
    question, store = plan.question, plan.store
    work, prices = question.workload, store.prices
    seconds = max(island.step_seconds for island in question.fleet)
    link = format_bandwidth(slowest_bits_per_second(question.fleet))
    patience = "chosen by itself" if store.patience_seconds is None else f"{store.patience_seconds:g} s"
    events, last = HOUR / EVENT_SECONDS, plan.rows[-1]
    given = ", ".join(f"{name} {value:g}" for name, value in asdict(prices).items())
    parts = [
        f"model    {work.name}: {units.count(work.parameters)} parameters, {work.layers} layers, "
        f"{seconds:.3g} s a step\n"
        f"islands  {question.islands} of one rank, each with {link} to the store\n"
        f"store    {store.kind}, {store.latency_seconds * 1e3:g} ms a request; patience {patience}\n"
        f"period   H = {plan.sync_every}",
        table([_HEADER, *(_cells(row, prices) for row in plan.rows)]),
        *(f"{name}: {why}" for name, why in plan.too_slow.items()),
        "Requests and bytes are of one island, counted on the real protocol without failures; lists are writes.\n"
        "Stored and $ are of the run. In rounds: the share of islands that a round contains. HTTP headers, about 1 kB\n"
        f"a request, and the events of isles train, {events:,.0f} writes an hour and island, come on top.",
        _joining(last),
        f"Prices ({store.kind}), in dollars: {given}. Requests\n"
        "by the million, storage by GB and month, out by GB; list prices looked up in 2026, --prices takes yours.",
    ]
    return "\n\n".join(parts)


_HEADER = ["method", "reads/h", "writes/h", "up/h", "down/h", "stored", "in rounds", "utilisation", "$/day"]


def _cells(row: Row, prices: Prices) -> list[str]:
    traffic = row.traffic
    return [
        row.variant.name,
        f"{row.per_hour(traffic.reads):,.0f}",
        f"{row.per_hour(traffic.writes):,.0f}",
        units.number_of_bytes(row.per_hour(traffic.bytes_up)),
        units.number_of_bytes(row.per_hour(traffic.bytes_down)),
        units.number_of_bytes(row.stored_bytes),
        units.share(traffic.included),
        units.share(traffic.utilisation),
        f"{row.dollars_per_day(prices):.2f}",
    ]


def _joining(row: Row) -> str:
    snapshot, payloads = units.number_of_bytes(row.snapshot_bytes), units.number_of_bytes(row.interval_bytes)
    most, seals = units.number_of_bytes(row.most_stored_bytes), row.traffic.seal_bytes * DAY / row.traffic.seconds
    return (
        f"{row.variant.name}: an island that joins downloads a snapshot of {snapshot}, and up to {payloads} of\n"
        f"payloads after it. The store holds {most} at most, and {units.number_of_bytes(seals)} of seals more each day."
    )


def as_dict(plan: Plan) -> dict[str, Any]:
    """The answer, for machines."""
    work, store = plan.question.workload, plan.store
    return {
        "mode": "store",
        "store": store.kind,
        "store_latency_seconds": store.latency_seconds,
        "patience_seconds": store.patience_seconds,
        "model": {"name": work.name, "parameters": work.parameters, "layers": work.layers},
        "islands": plan.question.islands,
        "bits_per_second": slowest_bits_per_second(plan.question.fleet),
        "sync_every": plan.sync_every,
        "prices": asdict(store.prices),
        "methods": {row.variant.name: _row_dict(row, store.prices, work.steps) for row in plan.rows},
        "too_slow": plan.too_slow,
    }


def _row_dict(row: Row, prices: Prices, steps: int | None) -> dict[str, Any]:
    traffic, dollars = row.traffic, row.dollars_per_day(prices)
    each = traffic.rounds * row.islands
    return {
        "compute_utilization": traffic.utilisation,
        "step_seconds": row.step_seconds,
        "included": traffic.included,
        "reads_per_round": traffic.reads / each,
        "writes_per_round": traffic.writes / each,
        "reads_per_hour": row.per_hour(traffic.reads),
        "writes_per_hour": row.per_hour(traffic.writes),
        "bytes_up_per_hour": row.per_hour(traffic.bytes_up),
        "bytes_down_per_hour": row.per_hour(traffic.bytes_down),
        "stored_bytes": row.stored_bytes,
        "most_stored_bytes": row.most_stored_bytes,
        "snapshot_bytes": row.snapshot_bytes,
        "dollars_per_day": dollars,
        "dollars": None if steps is None else dollars * steps * row.step_seconds / DAY,
        "python": row.variant.python,
    }
