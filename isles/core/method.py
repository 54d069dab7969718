"""The knobs of an outer loop, and the papers' settings of them.

One engine runs every method: what differs between DiLoCo, Streaming DiLoCo, delayed and eager updates is five knobs.

    which parameters together     fragments, fragment_layers, pattern
    how often, and when           sync_every, offsets
    how late the result is used   overlap (in inner steps), or update + delay_rounds (in rounds)
    what is kept of one's own     mixing
    what crosses the link         codec, rounding, error_feedback

and the outer optimizer on top (outer_lr, outer_momentum, nesterov). A `Method` is checked when it is made: a value that
cannot work is a `ValueError` that says what to write instead. This module imports no torch, so that a command line can
list the knobs without loading it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

Pattern = Literal["strided", "sequential"]
Update = Literal["fresh", "delayed", "eager"]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """How islands synchronise. Every field has a default; `Method()` alone is Streaming DiLoCo in fp32 without overlap.

    >>> Method.streaming(sync_every=30).codec
    'e3m0'
    >>> Method(sync_every=10, overlap=10)
    Traceback (most recent call last):
        ...
    ValueError: overlap=10 must be an integer from 0 to 9 (sync_every - 1): the result must arrive before the next send
    """

    sync_every: int = 100
    """H: inner steps between two synchronisations of one fragment."""
    fragments: int | Sequence[Sequence[str]] | None = None
    """P: into how many fragments the model is cut, or the parameter names of each; None: `fragment_layers` decides."""
    fragment_layers: int = 3
    """Layers per fragment, used when `fragments` is None. What is outside the layer stack is a fragment of its own."""
    pattern: Pattern = "strided"
    """Which layers share a fragment: every n-th ("strided") or consecutive ones ("sequential")."""
    offsets: Sequence[int] | None = None
    """t_p: the step of the period at which each fragment is sent; None: evenly, floor(p * sync_every / P)."""
    overlap: int = 0
    """tau: inner steps between sending a fragment and applying the result; for update="fresh"."""
    mixing: float = 0.0
    """alpha: the share of its own weights that an island keeps when a result is applied."""
    codec: str = "fp32"
    """How outer gradients are written on the wire: a name in `isles.codecs`."""
    rounding: Rounding = "nearest"
    """How the codec rounds."""
    error_feedback: bool = False
    """Add what the codec lost of one outer gradient to the next one."""
    outer_lr: float = 0.4
    """Learning rate of the outer optimizer; 1 with outer_momentum=0 is plain averaging."""
    outer_momentum: float = 0.9
    """mu: momentum of the outer optimizer."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    update: Update = "fresh"
    """Which mean an outer step uses: this round's ("fresh"), an earlier round's ("delayed"), or an earlier round's with
    the island's own share brought up to date ("eager")."""
    delay_rounds: int = 1
    """k: how many rounds late the mean is, for update="delayed" and "eager"."""

    def __post_init__(self) -> None:
        _integer("sync_every", self.sync_every, 1)
        self._check_fragments()
        _integer("fragment_layers", self.fragment_layers, 1)
        _choice("pattern", self.pattern, ("strided", "sequential"))
        self._check_offsets()
        _choice("update", self.update, ("fresh", "delayed", "eager"))
        self._check_lateness()
        _number("mixing", self.mixing, lambda a: 0 <= a <= 1, "from 0 (take the global weights) to 1 (keep one's own)")
        self._check_codec()
        _choice("rounding", self.rounding, ("nearest", "stochastic"))
        _boolean("error_feedback", self.error_feedback)
        _number("outer_lr", self.outer_lr, lambda lr: lr > 0, "greater than 0 (the papers use 0.4 to 0.8)")
        _number(
            "outer_momentum",
            self.outer_momentum,
            lambda mu: 0 <= mu < 1,
            "from 0 (none) to below 1 (the papers use 0.9)",
        )
        _boolean("nesterov", self.nesterov)

    def _check_fragments(self) -> None:
        fragments = self.fragments
        if fragments is None:
            return
        if _is_list(fragments):
            _require(
                len(fragments) > 0, "fragments=[] names no parameters: give at least one list of names, or a number"
            )
            seen: set[str] = set()
            twice: list[str] = []
            for position, names in enumerate(fragments):
                _require(
                    _is_list(names) and len(names) > 0 and all(isinstance(name, str) for name in names),
                    f"fragments[{position}]={names!r} must be a non-empty list of parameter names",
                )
                twice += [name for name in names if name in seen or names.count(name) > 1]
                seen.update(names)
            _require(
                not twice,
                f"fragments name parameters more than once: {', '.join(sorted(set(twice)))}; each belongs in one",
            )
            object.__setattr__(self, "fragments", tuple(tuple(names) for names in fragments))
        else:
            _integer("fragments", fragments, 1, also=", or a list of lists of parameter names, or None")

    def _check_offsets(self) -> None:
        offsets, last = self.offsets, self.sync_every - 1
        if offsets is None:
            return
        good = (
            _is_list(offsets)
            and len(offsets) > 0
            and all(_is_integer(offset) and 0 <= offset <= last for offset in offsets)
        )
        _require(
            good, f"offsets={offsets!r} must be a list of integers from 0 to {last} (sync_every - 1), one per fragment"
        )
        object.__setattr__(self, "offsets", tuple(offsets))
        count = self.fragments if isinstance(self.fragments, int) else len(self.fragments) if self.fragments else None
        if count is not None:
            self.check_offset_count(count)

    def check_offset_count(self, fragments: int) -> None:
        """Raises unless `offsets`, when given, has one entry per fragment; called again when the model has been cut."""
        if self.offsets is not None:
            _require(
                len(self.offsets) == fragments,
                f"offsets has {len(self.offsets)} entries for {fragments} fragments: give one per fragment, or None",
            )

    def _check_lateness(self) -> None:
        last = self.sync_every - 1
        good = _is_integer(self.overlap) and 0 <= self.overlap <= last
        _require(
            good,
            f"overlap={self.overlap!r} must be an integer from 0 to {last} (sync_every - 1): "
            "the result must arrive before the next send",
        )
        _integer("delay_rounds", self.delay_rounds, 1)
        if self.update == "fresh":
            _require(
                self.delay_rounds == 1,
                f'delay_rounds={self.delay_rounds} has no meaning with update="fresh": use "delayed" or "eager"',
            )
        else:
            _require(
                self.overlap == 0,
                f'overlap={self.overlap} has no meaning with update="{self.update}", which is late by whole rounds: '
                'leave it at 0, or use update="fresh"',
            )

    def _check_codec(self) -> None:
        from isles.wire.codecs import codecs

        _require(
            isinstance(self.codec, str) and self.codec in codecs,
            f"codec={self.codec!r} is not known: choose one of {', '.join(codecs)}",
        )

    # The papers' settings. Any field can be given on top: Method.eager(mixing=0.5).

    @classmethod
    def diloco(cls, **knobs: Any) -> Method:
        """DiLoCo (2311.08105): the whole model at once, in fp32, and everybody waits."""
        return cls(**{"fragments": 1, "outer_lr": 0.7, **knobs})

    @classmethod
    def streaming(cls, **knobs: Any) -> Method:
        """Streaming DiLoCo (2501.18512): three layers at a time, in 4 bits, one inner step late."""
        return cls(**{"overlap": 1, "mixing": 0.5, "codec": "e3m0", **knobs})

    @classmethod
    def delayed(cls, **knobs: Any) -> Method:
        """The naive way to overlap a whole round (2502.12996): every mean is used one round late."""
        return cls(**{"update": "delayed", "codec": "e3m0", **knobs})

    @classmethod
    def eager(cls, **knobs: Any) -> Method:
        """Eager updates (2502.12996): one round late, but for the island's own share, which is fresh."""
        return cls(**{"update": "eager", "codec": "e3m0", **knobs})

    @classmethod
    def distant(cls, **knobs: Any) -> Method:
        """For very slow links, ours: streaming with the longest overlap there can be, so that a result has a whole
        round to arrive. When it does, an island keeps three quarters of its own weights (docs/log.md, "A whole round
        late").

        >>> Method.distant(sync_every=30).overlap
        29
        """
        sync_every = knobs.get("sync_every", cls.sync_every)
        longest = sync_every - 1 if _is_integer(sync_every) else 0
        return cls.streaming(**{"overlap": longest, "mixing": 0.75, **knobs})

    @property
    def lateness(self) -> int:
        """Inner steps between the send of a round and the outer step that uses it."""
        return self.overlap if self.update == "fresh" else self.delay_rounds * self.sync_every

    def describe(self) -> str:
        """The method in a few lines of English.

        >>> print(Method.diloco().describe())
        every 100 steps: the whole model is sent in fp32
        result used:     at once, while every island waits
        then an island:  takes the global weights
        outer optimizer: SGD, lr 0.7, Nesterov momentum 0.9
        """
        if isinstance(self.fragments, int):
            what = (
                "the whole model is sent"
                if self.fragments == 1
                else f"{self.fragments} fragments ({self.pattern} layers) are sent one by one"
            )
        elif self.fragments is not None:
            what = f"{len(self.fragments)} given fragments are sent one by one"
        else:
            layers = f"{self.fragment_layers} layer{'s' * (self.fragment_layers > 1)}"
            what = f"fragments of {layers} ({self.pattern}) are sent one by one"
        how = (
            self.codec
            + (", rounded stochastically" if self.rounding == "stochastic" else "")
            + (", with error feedback" if self.error_feedback else "")
        )
        at = f" at steps {', '.join(map(str, self.offsets))} of each period" if self.offsets is not None else ""
        rounds = "one round" if self.delay_rounds == 1 else f"{self.delay_rounds} rounds"
        used = {
            "fresh": "at once, while every island waits"
            if self.overlap == 0
            else f"{self.overlap} step{'s' * (self.overlap > 1)} later, while training goes on",
            "delayed": f"{rounds} late, while training goes on",
            "eager": f"{rounds} late, with the island's own share fresh",
        }[self.update]
        kept = {0.0: "takes the global weights", 1.0: "keeps its own weights"}.get(
            self.mixing, f"keeps {self.mixing:.0%} of its own weights, takes {1 - self.mixing:.0%} of the global ones"
        )
        if self.outer_momentum == 0:
            outer = "plain averaging" if self.outer_lr == 1 else f"SGD, lr {self.outer_lr:g}, no momentum"
        else:
            outer = f"SGD, lr {self.outer_lr:g}, {'Nesterov ' if self.nesterov else ''}momentum {self.outer_momentum:g}"
        every = f"every {self.sync_every} steps:" if self.sync_every > 1 else "every step:"
        lines = (f"{every:<16} {what} in {how}{at}", f"result used:     {used}", f"then an island:  {kept}")
        return "\n".join([*lines, f"outer optimizer: {outer}"])

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        fields = dataclasses.asdict(self)
        if isinstance(self.fragments, tuple):
            fields["fragments"] = [list(names) for names in self.fragments]
        fields["offsets"] = None if self.offsets is None else list(self.offsets)
        return fields


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(name: str, value: object, least: int, also: str = "") -> None:
    _require(_is_integer(value) and value >= least, f"{name}={value!r} must be an integer of at least {least}{also}")


def _number(name: str, value: object, allowed: Callable[[float], bool], range_text: str) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and allowed(value)
    _require(good, f"{name}={value!r} must be a number {range_text}")


def _choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{name}={value!r} must be one of {', '.join(choices)}")


def _boolean(name: str, value: object) -> None:
    _require(isinstance(value, bool), f"{name}={value!r} must be True or False")
