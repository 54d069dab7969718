"""The cells of a sweep: methods x bandwidths, on two kinds of islands. Pure: no network, no clock.

    compute   two islands that really train a decoder of 5.8M parameters on this machine's cores
    timed     four islands of 30.8M parameters whose compute is a timed sleep: more islands than cores

A cell is at least two periods long, after the steps in which nothing can be due yet (a whole period with eager
updates), and as long as its kind says if its method allows. Where results are due late and the link is all but full,
it is longer: a backlog could grow for many periods before an island waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isles.core.method import Method
from isles.lab.figures import warm_up_steps
from isles.plan import Link, Workload, alike, predict
from isles.plan.exchange import FRAMING

if TYPE_CHECKING:
    from isles.wire.reduction import Reduction

FULL_LINK, LONG_PERIODS = 0.9, 24
"""From this load on a backlog is given so many periods to show itself: enough if each adds a twentieth of a period."""


@dataclass(frozen=True)
class Variant:
    """A method as `isles train` names it, with knobs on top."""

    name: str
    preset: str
    knobs: Mapping[str, int | str] = field(default_factory=dict)

    def method(self) -> Method | None:
        """None: data-parallel."""
        if self.preset == "data-parallel":
            return None
        made: Method = getattr(Method, self.preset)(**self.knobs)
        return made


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A workload of the sweep."""

    name: str
    title: str
    islands: int
    workload: Workload
    """Roughly: what is measured is put in its place later."""
    sync_every: int
    overlap: int
    """The larger one of the two that are tried."""
    bandwidths: tuple[float, ...]
    flags: tuple[str, ...]
    timed: bool = False
    cell_seconds: float = 30.0
    """About how long the training loop of a cell takes, if its method allows."""
    reference_steps: int = 15
    """Alone, before the run. With real compute there are more, in turns with it."""
    fragment_layers: int = 3
    reduction: Reduction = "auto"

    def variants(self) -> list[Variant]:
        """The methods that are put side by side, in the order of their need for bandwidth."""
        every = {"sync_every": self.sync_every}
        parts = {**every, "fragment_layers": self.fragment_layers}
        return [
            Variant("data-parallel", "data-parallel"),
            Variant("diloco fp32", "diloco", every),
            Variant("streaming fp32", "streaming", {**parts, "codec": "fp32"}),
            Variant("streaming e3m0", "streaming", parts),
            Variant(f"streaming e3m0, overlap {self.overlap}", "streaming", {**parts, "overlap": self.overlap}),
            Variant("eager e3m0", "eager", parts),
            Variant("distant e3m0", "distant", parts),
        ]


COMPUTE = Kind(
    name="compute",
    title="two islands that train 5.8M parameters, H = 40",
    islands=2,
    workload=Workload(name="small", parameters=5_770_000, layers=6, step_seconds=0.2, outside_parameters=1_050_000),
    sync_every=40,
    overlap=20,
    bandwidths=(8e6, 20e6, 50e6, 200e6),
    cell_seconds=60.0,
    reference_steps=30,
    flags=(
        "--model",
        "small",
        "--data",
        "synthetic:2",
        "--vocabulary",
        "4096",
        "--batch-size",
        "2",
        "--warmup-steps",
        "9",
    ),
)
TIMED = Kind(
    name="timed",
    title="four islands of 30.8M parameters, step of 30 ms (a timed sleep), H = 128",
    islands=4,
    workload=Workload(name="timed", parameters=30_800_000, layers=8, step_seconds=0.03),
    sync_every=128,
    overlap=20,
    bandwidths=(50e6, 100e6, 200e6, 400e6),
    flags=("--parameters", "30.8e6", "--layers", "8", "--step-seconds", "0.03", "--reduction", "reduce-scatter"),
    timed=True,
    fragment_layers=1,
    reduction="reduce-scatter",
)
KINDS = {kind.name: kind for kind in (COMPUTE, TIMED)}


@dataclass(frozen=True)
class Cell:
    """One repeat of one method at one bandwidth."""

    kind: Kind
    variant: Variant
    bandwidth: float
    repeat: int

    @property
    def key(self) -> tuple[str, str, float, int]:
        """Identifies the cell."""
        return self.kind.name, self.variant.name, self.bandwidth, self.repeat

    def flags(self) -> list[str]:
        """Flags of the program on the islands."""
        method = ["--method", self.variant.preset]
        knobs = [f"--{name.replace('_', '-')}={value}" for name, value in self.variant.knobs.items()]
        return [*self.kind.flags, *method, *knobs, "--steps", str(self.steps())]

    def steps(self) -> int:
        """Whole periods, after the steps that warm up: two at least, more if there is time."""
        kind, method = self.kind, self.variant.method()
        fleet = alike(kind.islands, kind.workload.step_seconds, Link.symmetric(self.bandwidth))
        predicted = predict(kind.workload, fleet, method, reduction=kind.reduction)
        seconds = float(predicted.step_seconds)
        if method is None:
            return max(2, min(100, int(kind.cell_seconds / seconds)))
        periods = max(2, min(8, int(kind.cell_seconds / seconds / method.sync_every)))
        load = 8 * FRAMING * predicted.bytes_per_step / seconds / self.bandwidth
        if load > FULL_LINK and 2 * method.lateness > method.sync_every:
            periods = LONG_PERIODS
        return periods * method.sync_every + warm_up_steps(method.as_dict())


def cells(
    kinds: Sequence[Kind] = tuple(KINDS.values()),
    *,
    repeats: int = 2,
    quick: bool = False,
    bandwidths: Sequence[float] | None = None,
) -> list[Cell]:
    """All cells of a sweep, repeat after repeat, so that it can be looked at early. `quick`: a few of them."""
    found = []
    for repeat in range(1 if quick else repeats):
        for kind in kinds:
            for bandwidth in sorted(bandwidths or (kind.bandwidths[1:2] if quick else kind.bandwidths), reverse=True):
                for variant in kind.variants():
                    if not quick or variant.name in ("data-parallel", "diloco fp32", "streaming e3m0"):
                        found.append(Cell(kind, variant, bandwidth, repeat))
    return found
