"""All methods on one link: what each gets, what it sends and keeps, and the bandwidth it would need.

A `Question` is everything that is asked about: the model, the islands, and in which of the two modes. *Honest* is
isles as it is (`honest`); *paper* follows the papers' conventions (`paper`). Both give a row the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from isles.plan import honest, memory
from isles.plan.coding import Coding
from isles.plan.exchange import payload_bytes
from isles.plan.fleet import Island, slowest_bits_per_second
from isles.plan.goodput import Failures, goodput
from isles.plan.honest import DenseStart
from isles.plan.memory import Memory
from isles.plan.paper import GRID_GBIT, TARGETS, PaperTiming, first_reaching, published_rounding
from isles.plan.penalty import Penalty, penalty
from isles.plan.simulate import Array
from isles.plan.variants import Variant
from isles.plan.workload import Workload, fragment_sizes

if TYPE_CHECKING:
    from isles.wire.reduction import Reduction

HONEST_GRID_GBIT = np.logspace(-5, 3, 99)
"""The papers' grid, continued down to 10 kbit/s: not everybody trains 1B parameters."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked. `cutting`: knobs of isles.Method that say how fragments are made."""

    workload: Workload
    fleet: Sequence[Island]
    paper: bool = False
    cutting: Mapping[str, Any] = field(default_factory=dict)
    reduction: Reduction = "auto"
    coding: Mapping[str, Coding] = field(default_factory=dict)
    """Speed by codec; coding takes no time where it is not known."""
    failures: Failures | None = None
    outer_on_host: bool = False

    @property
    def islands(self) -> int:
        return len(self.fleet)

    @property
    def grid_gbit(self) -> Array:
        return GRID_GBIT if self.paper else HONEST_GRID_GBIT

    @property
    def goodput(self) -> float:
        return goodput(self.failures, self.islands) if self.failures else 1.0


@dataclass(frozen=True)
class Row:
    """One method's answers."""

    variant: Variant
    utilisation: float
    step_seconds: float
    bytes_per_step: float
    peak_bytes: float
    memory: Memory
    penalty: Penalty
    days: float | None
    """To train on all tokens, failures included; None: how many steps is not known."""
    curve: Array
    """Utilisation at each bandwidth of the grid."""
    gbit_per_s: dict[str, float | None]
    """Bandwidth for each target utilisation; None: no bandwidth of the grid is enough."""
    start: DenseStart | None = None
    """What comes before all that: the other figures are those of the steady state."""


def compare(question: Question, variants: Sequence[Variant]) -> list[Row]:
    """A row for each variant."""
    return [_paper_row(question, variant) if question.paper else _honest_row(question, variant) for variant in variants]


def utilisation(question: Question, variant: Variant) -> float:
    """Of one variant, on the links of the fleet."""
    return float(_utilisations(question, variant, np.array([slowest_bits_per_second(question.fleet)]))[0])


def _utilisations(question: Question, variant: Variant, bits_per_second: Array) -> Array:
    if question.paper:
        timing = _paper_timing(question, variant)
        return timing.utilisation(_paper_step_seconds(question), bits_per_second)
    return _predict(question, variant, bits_per_second).utilisation


def _honest_row(question: Question, variant: Variant) -> Row:
    link = slowest_bits_per_second(question.fleet)
    prediction = _predict(question, variant, np.array([*question.grid_gbit * 1e9, link]))
    *curve, here = prediction.utilisation
    if variant.family == "data-parallel":
        kept = memory.data_parallel(question.workload.parameters)
    else:
        method = variant.method()
        sizes = fragment_sizes(question.workload, method)
        payloads = tuple(float(payload_bytes(numel, method.codec, question.workload.ranks)) for numel in sizes)
        schedule, _ = honest.rounds_of(question.workload, question.islands, method)
        kept = memory.of_fragments(schedule, sizes, payloads, on_host=question.outer_on_host)
    seconds = float(prediction.seconds(question.workload.steps or 0)[-1])
    dense, step_seconds = prediction.start, float(prediction.step_seconds[-1])
    sent = (prediction.bytes_per_step, prediction.peak_bytes)
    row = _row(question, variant, here, step_seconds, seconds, *sent, kept, np.array(curve))
    return replace(row, start=replace(dense, seconds=dense.seconds[-1])) if dense.steps else row


def _paper_row(question: Question, variant: Variant) -> Row:
    timing = _paper_timing(question, variant)
    link = slowest_bits_per_second(question.fleet)
    compute = _paper_step_seconds(question)
    *curve, here = timing.utilisation(compute, np.array([*question.grid_gbit * 1e9, link]))
    if variant.family == "data-parallel":
        kept = memory.data_parallel(question.workload.parameters)
    else:
        counts = [timing.fragment_of.count(fragment) for fragment in range(max(timing.fragment_of) + 1)]
        share = question.workload.parameters / question.workload.layers
        sizes = tuple(round(count * share) for count in counts)
        payloads = tuple(count * timing.bits_per_layer / 8 for count in counts)
        kept = memory.of_fragments(timing.schedule, sizes, payloads, on_host=question.outer_on_host)
    seconds = (question.workload.steps or 0) * compute / here
    sent = (timing.bytes_per_step(), timing.peak_bytes())
    return _row(question, variant, here, compute / here, seconds, *sent, kept, np.array(curve))


def _row(
    question: Question,
    variant: Variant,
    here: float,
    step_seconds: float,
    seconds: float,
    bytes_per_step: float,
    peak_bytes: float,
    kept: Memory,
    curve: Array,
) -> Row:
    reached = first_reaching(curve, question.grid_gbit)
    shown = [published_rounding(gbit) for gbit in reached] if question.paper else reached
    steps, parameters = question.workload.steps, question.workload.parameters
    return Row(
        variant=variant,
        utilisation=float(here),
        step_seconds=step_seconds,
        bytes_per_step=bytes_per_step,
        peak_bytes=peak_bytes,
        memory=kept,
        penalty=penalty(variant.family, variant.sync_every, variant.lateness, question.islands, parameters),
        days=seconds / question.goodput / 86400 if steps and question.goodput else None,
        curve=curve,
        gbit_per_s={str(target): gbit for target, gbit in zip(TARGETS, shown, strict=True)},
    )


def _predict(question: Question, variant: Variant, bits_per_second: Array) -> honest.Prediction:
    return honest.predict(
        question.workload,
        question.fleet,
        None if variant.family == "data-parallel" else variant.method(),
        reduction=question.reduction,
        coding=question.coding.get(variant.codec),
        bits_per_second=bits_per_second,
    )


def _paper_timing(question: Question, variant: Variant) -> PaperTiming:
    return PaperTiming.of(question.workload, variant, **question.cutting)


def _paper_step_seconds(question: Question) -> float:
    return max(island.step_seconds for island in question.fleet)
