"""torchft under the faults of the crash matrix: the same islands, links, faults and figures, joined by torchft.

    python benchmarks/torchft_faults.py --peer .venv-torchft/bin/python --times 3 --seed 1

is `isles lab --store` with two differences. Where that has an S3 server, here is torchft's lighthouse, in a namespace
of its own, so no island's death takes it away. And islands are `torchft_island.py`. Faults, their victims and moments,
and what is measured are the laboratory's own code (`isles.lab.elastic`), so both tables have the same columns. Faults
of a store have no meaning here.

Every fault is done with torchft's own time-outs, and with the shortest ones that work here (`SETTINGS`). Needs what
`isles lab` needs, and the environment of benchmarks/README.md for the peer. Prints a markdown table, and writes all
numbers to --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.core.method import Method
from isles.lab import namespaces, nodes, programs
from isles.lab.elastic import matrix
from isles.lab.elastic.faults import FAULTS, parse_faults
from isles.lab.elastic.fleet import Fleet, Life, Options, output_of
from isles.plan.quantities import parse_bandwidth, parse_seconds
from isles.view.events import Event

HERE = Path(__file__).parent
PORT = 29510
GENERATION = 1_000_000
"""Added to the numbers of rounds whenever all islands start from nothing."""
ISLANDS, MIN_REPLICAS = 3, 1
POSSIBLE = tuple(kind for kind in FAULTS if not kind.startswith(("store-", "disk-")))
WANTED = "kill,stop,link-down,all-killed"


@dataclass(frozen=True)
class Setting:
    """Time-outs."""

    lighthouse: tuple[str, ...] = ()
    islands: tuple[str, ...] = ()


SETTINGS = {
    "default": Setting(),
    "short": Setting(
        ("--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "10000", "--quorum_tick_ms", "10"),
        ("--timeout", "3", "--quorum-timeout", "20", "--connect-timeout", "5"),
    ),
}
"""torchft's own: heartbeats 5 s, stragglers 60 s, everything else 60 s. Stragglers need longer than a round: an island
that waits for the next quorum would else be let in with whoever asks first, and leave the third out, in turns.
"""


@dataclass(frozen=True, kw_only=True)
class PeerOptions(Options):
    """Of the laboratory, and of torchft."""

    peer: str
    setting: Setting

    def build(self) -> Fleet:
        return PeerFleet(self)


class PeerFleet(Fleet):
    """The laboratory's machines with torchft on them."""

    options: PeerOptions

    def __init__(self, options: PeerOptions) -> None:
        self._generation = 0
        super().__init__(options)

    def _serve(self) -> None:
        """The lighthouse, where the laboratory has its S3 server."""
        program = [str(Path(self.options.peer).with_name("torchft_lighthouse")), "--bind", f"[::]:{PORT}"]
        flags = ["--min_replicas", str(MIN_REPLICAS), *self.options.setting.lighthouse]
        with (self.options.folder / "lighthouse.log").open("wb") as log:
            self._server = self.network.start(self.slots, [*program, *flags], stdout=log, stderr=log)

    def environment(self) -> dict[str, str]:
        return {**nodes.environment(self.network), "OMP_NUM_THREADS": "1"}

    def start(self, slot: int) -> Life:
        """Where nobody is left, nothing is left: the next island begins at the beginning."""
        self._generation += not self.alive()
        return super().start(slot)

    def _run(self, slot: int, folder: Path, *more: str) -> subprocess.Popen[bytes]:
        place = ["--island", str(slot), "--islands", str(self.slots), *more]
        lighthouse = ["--lighthouse", f"{self.network.address(self.slots)}:{PORT}", *self.options.setting.islands]
        first = ["--first-round", str(self._generation * GENERATION)]
        command = [self.options.peer, *self.options.program.flags_of_run(folder), *place, *lighthouse, *first]
        with output_of(folder).open("wb") as log:
            return self.network.start(slot, command, env=self.environment(), stdout=log, stderr=log)

    def audit(self) -> dict[str, Any]:
        """torchft has no log of its own: what its islands have committed."""
        method = self.options.program.method()
        assert method is not None
        rounds = [event for life in self.lives for event in life.of("round")]
        restarts = [event["reason"] for life in self.lives for event in life.of("restart")]
        healed = [event["discarded"] for event in rounds if not event["own"]]
        about = {"restarts": restarts, "discarded_by_healing": healed}
        return {"number": None, "digest": None, "seals": committed(rounds, method), **about}


def committed(events: Sequence[Event], method: Method) -> list[dict[str, Any]]:
    """All rounds that somebody has committed, as `isles.lab.elastic.island.seals` has those of a store. An island that
    died between its part in the mean and the commit was in the round, under a name that nobody knows.
    """
    names, sizes, found = defaultdict[int, list[str]](list), dict[int, int](), list[dict[str, Any]]()
    for event in events:
        if event["own"]:
            names[event["number"]].append(event["island"])
            sizes[event["number"]] = event["members"]
    for number, islands in sorted(names.items()):
        islands += ["?"] * (sizes[number] - len(islands))
        missing = ["?"] * (sizes.get(number - 1, 0) - sizes[number])
        about = {"number": number, "fragment": (number % GENERATION - 1) % int(method.fragments or 1)}
        found.append({**about, "islands": islands, "missing": missing, "steps": [method.sync_every] * len(islands)})
    return found


def measure(options: PeerOptions, kinds: list[str], times: int, seed: int, seconds: float) -> list[dict[str, Any]]:
    """The crash matrix of one setting, with what the laboratory's own has not."""
    say = lambda line: print(f"torchft_faults: {line}", file=sys.stderr, flush=True)
    records = matrix.matrix(options, [(kind, "s3") for kind in kinds], times, seed, seconds, say)
    for record in records:
        folder = options.folder / ("none-s3" if record["fault"] == "none" else record["fault"])
        audit = json.loads((folder / "audit.json").read_text())
        record |= {name: audit[name] for name in ("restarts", "discarded_by_healing")}
        lives = Counter(seal["number"] // GENERATION for seal in audit["seals"])
        record["rounds_from_the_start"] = [lives[generation] for generation in sorted(lives)]
    return records


def row(name: str, record: dict[str, Any]) -> list[str]:
    """Of the table: the laboratory's, with the setting before it and own errors after it."""
    cells = matrix.rows([record])[0]
    *lost, _ = record["rounds_from_the_start"]
    if lost:
        cells[list(matrix.COLUMNS).index("they lost")] = f"all: {', '.join(map(str, lost))}"
    return [name, *cells, str(len(record["restarts"]))]


def table(settings: dict[str, list[dict[str, Any]]]) -> str:
    """As markdown."""
    columns = ["time-outs", *matrix.COLUMNS, "errors"]
    rows = [row(name, record) for name, records in settings.items() for record in records]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows))


def main() -> int:
    """All faults in all settings, then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", required=True, help="the Python of the peer's environment")
    parser.add_argument("--faults", default=WANTED, help=f"of {', '.join(POSSIBLE)} (default %(default)s)")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="time-outs (default %(default)s)")
    parser.add_argument("--times", type=int, default=3, help="how often each fault (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="decides whom and when (default %(default)s)")
    parser.add_argument("--seconds", default="30s", help="of the undisturbed run (default %(default)s)")
    parser.add_argument("--step-seconds", type=float, default=0.1, help="of an inner step (default %(default)s)")
    parser.add_argument("--bandwidth", default="50Mbit", help="of each island's link (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/torchft-faults.json"))
    args = parser.parse_args()
    try:
        result = run(args)
    except (ValueError, OSError) as error:
        print(f"torchft_faults: {error}", file=sys.stderr)
        return 2
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result["settings"]))
    return 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """What --out has. Raises ValueError for what cannot be."""
    kinds, names = parse_faults(args.faults), [name.strip() for name in args.settings.split(",")]
    for kind in kinds:
        if kind not in POSSIBLE:
            raise ValueError(f"--faults {kind} has no meaning without a store: use {', '.join(POSSIBLE)}")
    for name in names:
        if name not in SETTINGS:
            raise ValueError(f"--settings {name!r} is unknown: use {', '.join(SETTINGS)}")
    if args.times < 1 or args.seed < 0:
        raise ValueError(f"--times {args.times} must be at least 1, --seed {args.seed} at least 0")
    peer = shutil.which(args.peer)
    if peer is None or not Path(peer).with_name("torchft_lighthouse").exists():
        raise ValueError(f"--peer {args.peer} has no torchft beside it: make its environment, see benchmarks/README.md")
    seconds, bandwidth = parse_seconds(args.seconds, "--seconds"), parse_bandwidth(args.bandwidth, "--bandwidth")
    namespaces.check()
    folder = args.out.with_suffix("").absolute()
    program = programs.elastic(["--codec", "fp32"])
    options = PeerOptions(
        folder=folder,
        program=dataclasses.replace(program, start=(str(HERE.absolute() / "torchft_island.py"),)),
        islands=ISLANDS,
        bandwidth=bandwidth,
        step_seconds=args.step_seconds,
        peer=str(Path(peer).absolute()),
        setting=Setting(),
    )
    load, found = os.getloadavg(), {}
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)
        own = dataclasses.replace(options, folder=folder / name, setting=SETTINGS[name])
        found[name] = measure(own, kinds, args.times, args.seed, seconds)
    about = {"seed": args.seed, "times": args.times, "load_before": load, "load_after": os.getloadavg()}
    return {**about, "time_outs": {name: dataclasses.asdict(SETTINGS[name]) for name in names}, "settings": found}


if __name__ == "__main__":
    raise SystemExit(main())
