"""A study: the claim of a paper, the runs that test it, what they say, and a figure.

    configurations(scale)   name -> job, of seed 0; the framework runs every one with every seed
    findings(records)       claim by claim: the paper's number, ours, and whether they agree
    plot(records, axes)     the figure

Runs of one seed share initial weights and the order of the data, so methods are compared seed by seed: a `Change` is
the mean of these differences with its standard error, which is smaller than the spread of the losses themselves. A
claim comes with its criterion, so that "agrees" is not a matter of taste.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from isles.reproduce.job import Job
from isles.reproduce.scale import Scale


@dataclass(frozen=True)
class Finding:
    """One row of docs/reproduction.md."""

    claim: str
    paper: str
    """The paper's number, with its source; or that there is none in the text at hand."""
    ours: str
    criterion: str
    agrees: bool | None
    """None: these runs cannot decide it."""


@dataclass(frozen=True)
class Change:
    """A relative difference of losses, seed by seed."""

    mean: float
    error: float | None
    """Standard error of the mean; None with one seed."""

    def below(self, limit: float) -> bool | None:
        """Whether it is smaller than a limit; None where two standard errors leave it open.

        >>> Change(0.002, 0.0005).below(0.005), Change(0.002, 0.001).below(0.0), Change(0.001, 0.001).below(0.0)
        (True, None, None)
        """
        if math.isfinite(self.mean) and self.error is not None and abs(self.mean - limit) <= 2 * self.error:
            return None
        return self.mean < limit

    def above(self, limit: float) -> bool | None:
        """The opposite."""
        below = self.below(limit)
        return None if below is None else not below

    def __str__(self) -> str:
        """
        >>> str(Change(0.00194, 0.00021)), str(Change(-0.03, None)), str(Change(math.inf, None))
        ('+0.19 ± 0.02 %', '-3.00 %', 'diverged')
        """
        if not math.isfinite(self.mean):
            return "diverged"
        around = "" if self.error is None else f" ± {100 * self.error:.2f}"
        return f"{100 * self.mean:+.2f}{around} %"


def all_of(*verdicts: bool | None) -> bool | None:
    """False if one is false, else None if one is open.

    >>> all_of(True, None), all_of(None, False), all_of(True, True)
    (None, False, True)
    """
    return False if False in verdicts else None if None in verdicts else True


class Records:
    """The finished runs of a study."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.all = list(records)
        self.names = list(dict.fromkeys(record["name"] for record in self.all))

    def of(self, name: str) -> list[dict[str, Any]]:
        """The runs of a configuration, in the order of seeds."""
        own = [record for record in self.all if record["name"] == name]
        if not own:
            raise ValueError(f"no run is called {name!r}: the results are of another version of the study, run it anew")
        return sorted(own, key=lambda record: record["job"]["seed"])

    def values(self, name: str, what: str = "val_loss") -> list[float]:
        """A number of each run of a configuration; infinity where it diverged."""
        return [math.inf if record[what] is None else float(record[what]) for record in self.of(name)]

    def mean(self, name: str, what: str = "val_loss") -> float:
        return statistics.fmean(self.values(name, what))

    def change(self, name: str, base: str, what: str = "val_loss", base_what: str | None = None) -> Change:
        """How much larger a configuration's loss is than another's, over the seeds that both have."""
        own = {
            record["job"]["seed"]: value for record, value in zip(self.of(name), self.values(name, what), strict=True)
        }
        other = dict(
            zip(
                [record["job"]["seed"] for record in self.of(base)],
                self.values(base, base_what or what),
                strict=True,
            )
        )
        ratios = [own[seed] / other[seed] - 1 for seed in own if seed in other]
        if not ratios or not all(map(math.isfinite, ratios)):
            return Change(math.inf, None)
        error = statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None
        return Change(statistics.fmean(ratios), error)

    def best(self, names: Sequence[str]) -> str:
        """The configuration with the lowest mean loss."""
        return min(names, key=self.mean)

    def seeds(self) -> int:
        """Seeds that every configuration has."""
        return min(len(self.of(name)) for name in self.names)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything about a study; each file in `studies` holds one, called STUDY."""

    name: str
    title: str
    claim: str
    """What the paper claims, in one sentence."""
    source: str
    """Which table or figure of which paper."""
    expectation: str
    """What we expect at this size, in one sentence."""
    configurations: Callable[[Scale], dict[str, Job]]
    findings: Callable[[Records], list[Finding]]
    plot: Callable[[Records, Any], None]
    """Draws on a matplotlib figure."""
    extended: Callable[[dict[str, Job], Records], dict[str, Job]] | None = None
    """More configurations, after a look at the first seed: asked again and again, until there are none."""
    chosen: Callable[[Records], Iterable[str]] | None = None
    """Of the runs of the first seed, those that the other seeds run as well; None: all."""
    note: str = ""
    """What else a reader of its section has to know."""


def loss_text(records: Records, *names: str) -> str:
    """Losses side by side: "fp32 1.714, e3m0 1.717"."""
    return ", ".join(f"{name} {records.mean(name):.3f}" for name in names)
