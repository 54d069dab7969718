"""One run in the laboratory, from the bare machine to one record.

    build      namespaces, bridge, shaped links
    verify     a transfer from every island to the next one, at the same time
    reference  every island trains alone for a few steps
    run        torchrun on every island; the kernel's counters are read along the way. The reference may go on in turns
               with it
    predict    the planner, with the step time and the bandwidth that were measured

All files are in one folder: `run/` is the run itself, as `isles train` leaves it, `node-I.log` what each island
printed, `reference/` the same of the reference, `lab.json` the record.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import isles
from isles.lab import figures, nodes, prediction, reference, transfer
from isles.lab.network import DEVICE, Network, check_islands
from isles.lab.programs import Program
from isles.lab.reference import Alone, Turn
from isles.lab.shaping import Shape
from isles.lab.turns import ENVIRONMENT, TURNS_IN_A_TIMEOUT, Turns, moved, running, turn_seconds, without_pauses
from isles.plan.quantities import format_bandwidth
from isles.train.config import TrainConfig
from isles.train.launch import watching
from isles.view import events, units
from isles.view.events import Event

RECORD = "lab.json"
GRACE_SECONDS = 20.0
"""How long after its timeout an island may need to report that it has lost the others."""
LEAST_TURNS = 3
"""Of the reference during a run. With fewer, those before and after the run count."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the islands and their links are like, and how to measure."""

    folder: Path
    islands: int = 2
    bandwidth: float = 100e6
    """Of every link, in each direction, bit/s."""
    latency: float = 0.0
    loss: float = 0.0
    mtu: int = 9000
    ranks: int = 1
    """Processes on each island."""
    reference_steps: int = 20
    """0: no reference, and then neither utilisation nor prediction."""
    reference_turns: bool = False
    """In turns with the run, for a machine whose speed varies."""
    timeout_seconds: float = 3600.0
    """How long the run may take."""

    def __post_init__(self) -> None:
        check_islands(self.islands)
        Shape(bits_per_second=self.bandwidth, latency_seconds=self.latency, loss=self.loss, mtu=self.mtu)
        for flag, value, least in (("nproc", self.ranks, 1), ("reference-steps", self.reference_steps, 0)):
            if value < least:
                raise ValueError(f"--{flag} {value} must be at least {least}")

    def network(self) -> Network:
        """Builds it."""
        return Network(self.islands, self.bandwidth, latency=self.latency, loss=self.loss, mtu=self.mtu)


def claim(folder: Path, *, overwrite: bool, resume: bool = False) -> None:
    """Makes the folder, or refuses to touch what is in it."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--run {folder} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not resume:
        if not overwrite:
            raise ValueError(f"--run {folder} exists: add --overwrite to replace it, or name another")
        if not any((folder / name).exists() for name in ("lab.json", "node-0.log", "reference")):
            raise ValueError(f"--overwrite replaces runs of the laboratory, and {folder} is none: name another")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def run(options: Options, program: Program, say: Say) -> dict[str, Any]:
    """A program of isles on the islands: the record, with all that was measured and predicted."""
    folder, alone = options.folder, None
    with options.network() as network:
        record = _described(options, network, say)
        if options.reference_steps:
            shutil.rmtree(folder / "reference", ignore_errors=True)  # of a run that is resumed
            env = ENVIRONMENT if options.reference_turns else None
            alone = Alone(network, program, folder / "reference", ranks=options.ranks, env=env)
            _take_a_turn(alone, options, say)
            if not options.reference_turns:
                alone.close()
        ran = _run(options, network, program, alone if alone and _in_turns(options, program, alone, say) else None, say)
        log = events.read(folder / "run")
        references = _references(options, alone, log, say) if alone else []
    log = without_pauses(log, ran.pauses)
    record |= {"program": program.name, "flags": list(program.arguments), "run_dir": str(folder / "run")}
    record |= {"cpu_stolen": ran.cpu_stolen, "paused_seconds": sum(pause.seconds for pause in ran.pauses)}
    record |= {"bytes_while_paused": ran.bytes_while_paused}
    step_seconds = reference.mean(references)
    record |= {"reference_step_seconds_each": references}
    record |= figures.of_run(log, ran.samples, step_seconds or None)
    config = next(event for event in log if event["event"] == "config")
    record |= {"knobs": config["method"], "layers": config["layers"], "fragments": config["fragments"]}
    if step_seconds and record["bandwidth_measured_by_island"]:
        rates = record["bandwidth_measured_by_island"]
        record |= prediction.predicted(
            config, step_seconds, rates, latency_seconds=options.latency, ranks=options.ranks
        )
    return written(folder, record)


def _in_turns(options: Options, program: Program, alone: Alone, say: Say) -> bool:
    """Whether the run is to be stopped for the reference now and then."""
    if not options.reference_turns:
        return False
    possible = TURNS_IN_A_TIMEOUT * turn_seconds(alone) <= program.config.timeout_seconds
    if not possible:
        say(f"--timeout-seconds {program.config.timeout_seconds:g} is too short for turns: before and after the run")
    return possible


def _take_a_turn(alone: Alone, options: Options, say: Say) -> None:
    """The reference, while nothing else runs."""
    say(f"reference: every island alone, {options.reference_steps} steps")
    alone.go_on()
    alone.work(options.reference_steps)
    alone.stop()
    say(f"reference: {', '.join(f'{1e3 * each:.4g}' for each in alone.step_seconds(alone.turns[-1]))} ms a step")


def _references(options: Options, alone: Alone, log: list[Event], say: Say) -> list[list[float]]:
    """What a step takes on each island, in each of the turns that count: those of the steady part of the run if there
    were enough, or else the one before the run and, if it is to be in turns, one more after it.
    """
    during = [alone.step_seconds(turn) for turn in alone.turns if turn.within(*figures.steady_time(log))]
    during = [each for each in during if each]
    if len(during) >= LEAST_TURNS:
        return during
    before = alone.step_seconds(alone.turns[0])
    if not options.reference_turns:
        return [before]
    try:
        _take_a_turn(alone, options, say)
    except OSError as error:
        say(f"{error}; the turn before the run counts alone")
        return [before]
    return [before, alone.step_seconds(alone.turns[-1])]


@dataclass(frozen=True)
class _Ran:
    """A run that has ended well."""

    samples: list[figures.Sample]
    """By the run's own clock, which stands still in pauses."""
    pauses: list[Turn]
    bytes_while_paused: int
    cpu_stolen: float


def _run(options: Options, network: Network, program: Program, alone: Alone | None, say: Say) -> _Ran:
    """The run, in turns with its reference if that is given."""
    folder = options.folder / "run"
    flags = program.flags_of_run(folder)
    commands = [nodes.torchrun(network, island, flags, ranks=options.ranks) for island in range(options.islands)]
    say(f"running on {options.islands} islands: {program.name} {' '.join(program.arguments)}")
    begin = _processor_ticks()
    with watching(TrainConfig(run=str(folder), steps=program.config.steps)):
        samples, pauses = _run_to_the_end(network, options, commands, program.config.timeout_seconds, alone)
    own = [(running(when, pauses), counted) for when, counted in samples]
    return _Ran(own, pauses, moved(samples, pauses), _stolen(begin, _processor_ticks()))


def _processor_ticks() -> list[int]:
    """What all cores have done since the start, by kind (man 5 proc, /proc/stat)."""
    return [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


def _stolen(begin: list[int], end: list[int]) -> float:
    """The share of a time in which the host of a virtual machine ran something else: a figure of such a run is noise.

    >>> _stolen([0] * 10, [50, 0, 10, 30, 0, 0, 0, 10, 0, 0])
    0.1
    """
    spent = [after - before for before, after in zip(begin, end, strict=True)]
    return spent[7] / max(1, sum(spent[:8]))


def run_command(options: Options, command: Sequence[str], say: Say) -> dict[str, Any]:
    """Any command on every island; {island}, {islands}, {address}, {host} (the address of island 0), {port} and
    {interface} are filled in.
    """
    with options.network() as network:
        record = _described(options, network, say)
        commands = [[_filled(word, network, island) for word in command] for island in range(options.islands)]
        say(f"running on {options.islands} islands: {' '.join(command)}")
        begin = time.monotonic()
        samples, _ = _run_to_the_end(network, options, commands, GRACE_SECONDS)
        counted = figures.between(samples, 0.0, float("inf"))
    record |= {
        "command": list(command),
        "wall_seconds": time.monotonic() - begin,
        "kernel_bytes": sum(each.sent_bytes for each in counted),
        "kernel_bytes_by_island": [each.sent_bytes for each in counted],
        "kernel_bytes_received_by_island": [each.received_bytes for each in counted],
    }
    return written(options.folder, record)


def _described(options: Options, network: Network, say: Say) -> dict[str, Any]:
    """What the links are and what they carry."""
    say(f"built {options.islands} islands, {format_bandwidth(options.bandwidth)} each way")
    measured, wanted = transfer.verify(network), network.shapes[0].goodput_bits_per_second
    rates = ", ".join(f"{each / 1e6:.4g}" for each in measured)
    say(f"verified: the links carry {rates} Mbit/s of payload ({wanted / 1e6:.4g} expected, MTU {options.mtu})")
    return {
        "version": isles.__version__,
        "islands": options.islands,
        "ranks": options.ranks,
        "bandwidth": options.bandwidth,
        "latency_seconds": options.latency,
        "loss": options.loss,
        "mtu": options.mtu,
        "congestion_control": network.congestion_control(),
        "bandwidth_expected": wanted,
        "bandwidth_measured": min(measured, default=None),
        "bandwidth_measured_by_island": measured,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def _run_to_the_end(
    network: Network,
    options: Options,
    commands: Sequence[Sequence[str]],
    patience_seconds: float,
    alone: Alone | None = None,
) -> tuple[list[figures.Sample], list[Turn]]:
    """Runs a command on each island; returns what the kernel counted meanwhile, and when the run was stopped for the
    reference's turns. Ends the program if one of them fails.
    """
    samples: list[figures.Sample] = []

    def sample() -> None:
        samples.append((time.time(), [network.counters(island) for island in range(options.islands)]))

    sample()
    started = nodes.start(network, options.folder, commands, ENVIRONMENT if alone else None)
    turns = Turns(started, alone, options.folder / "run", latency_seconds=options.latency) if alone else None

    def tick() -> None:
        sample()
        if turns:
            turns.tick(samples)

    codes = nodes.wait(
        started, seconds=options.timeout_seconds, grace_seconds=patience_seconds + GRACE_SECONDS, tick=tick
    )
    sample()
    if any(codes):
        why = "\n".join(f"  island {node.island}: {node.complaint()}" for node in started if node.process.poll() != 0)
        raise SystemExit(f"isles lab: the run failed; full output: {options.folder}/node-*.log\n{why}")
    if None in codes:
        raise SystemExit(
            f"isles lab: the run did not end within {units.duration(options.timeout_seconds)}: give it a longer "
            f"--timeout, or fewer steps (full output: {options.folder}/node-*.log)"
        )
    return samples, turns.pauses if turns else []


def _filled(word: str, network: Network, island: int) -> str:
    values = {
        "island": str(island),
        "islands": str(len(network.islands)),
        "address": network.address(island),
        "host": network.address(0),
        "port": str(nodes.PORT),
        "interface": DEVICE,
    }
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def written(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record, which is now in the folder too."""
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    return record
