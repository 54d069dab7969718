"""The knobs of an outer loop, and the papers' settings of them.

One engine runs every method: what differs between DiLoCo, Streaming DiLoCo, delayed and eager updates is five knobs.

    which parameters together     fragments, fragment_layers, pattern
    how often, and when           sync_every, offsets
    how late the result is used   overlap (in inner steps), or update + delay_rounds (in rounds)
    what is kept of one's own     mixing
    what crosses the link         codec, rounding, error_feedback

and the outer optimizer on top (outer_lr, outer_momentum, nesterov), with what is different in the first rounds
(dense_start, warmup_rounds). A `Method` is checked when it is made: a value that cannot work is a `ValueError` that
says what to write instead. This module imports no torch, so that a command line can list the knobs without loading it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard, get_args

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
    dense_start: Sequence[tuple[int, int]] = ()
    """Shorter rounds before the ordinary ones, as (rounds, steps of each): ((50, 3),) are fifty rounds of three steps.
    In them islands become their mean at once: no overlap, no mixing, no momentum, whatever the method."""
    warmup_rounds: int = 0
    """Over so many rounds after the dense start the outer optimizer goes from plain averaging (learning rate 1, no
    momentum) to its own settings, linearly."""
    update: Update = "fresh"
    """Which mean an outer step uses: this round's ("fresh"), an earlier round's ("delayed"), or an earlier round's with
    the island's own share brought up to date ("eager")."""
    delay_rounds: int = 1
    """k: how many rounds late the mean is, for update="delayed" and "eager"."""

    def __post_init__(self) -> None:
        from isles.wire.codecs import codecs

        for name in ("sync_every", "fragment_layers", "delay_rounds"):
            self._must(name, _is_integer(getattr(self, name), 1), "an integer of at least 1")
        self._must("warmup_rounds", _is_integer(self.warmup_rounds, 0), "an integer of at least 0")
        for name, kind in {"pattern": Pattern, "update": Update, "rounding": Rounding}.items():
            self._must(name, getattr(self, name) in get_args(kind), f"one of {', '.join(get_args(kind))}")
        if self.codec not in list(codecs):
            raise ValueError(f"codec={self.codec!r} is not known: choose one of {', '.join(codecs)}")
        for name in ("error_feedback", "nesterov"):
            self._must(name, isinstance(getattr(self, name), bool), "True or False")
        mixing, lr, momentum, last = self.mixing, self.outer_lr, self.outer_momentum, self.sync_every - 1
        mixes = _is_number(mixing) and 0 <= mixing <= 1
        self._must("mixing", mixes, "a number from 0 (take the global weights) to 1 (keep one's own)")
        self._must("outer_lr", _is_number(lr) and lr > 0, "a number greater than 0 (the papers use 0.4 to 0.8)")
        decays = _is_number(momentum) and 0 <= momentum < 1
        self._must("outer_momentum", decays, "a number from 0 (none) to below 1 (the papers use 0.9)")
        in_time = f"an integer from 0 to {last} (sync_every - 1): the result must arrive before the next send"
        self._must("overlap", _is_integer(self.overlap, 0, last), in_time)
        self._check_fragments()
        self._check_offsets()
        self._check_dense_start()
        if self.update == "fresh" and self.delay_rounds != 1:
            given = f"delay_rounds={self.delay_rounds}"
            raise ValueError(f'{given} has no meaning with update="fresh": use "delayed" or "eager"')
        if self.update != "fresh" and self.overlap != 0:
            what = f'overlap={self.overlap} has no meaning with update="{self.update}"'
            raise ValueError(f'{what}, which is late by whole rounds: leave it at 0, or use update="fresh"')

    def _must(self, name: str, good: bool, be: str) -> None:
        if not good:
            raise ValueError(f"{name}={getattr(self, name)!r} must be {be}")

    def _check_fragments(self) -> None:
        fragments = self.fragments
        if not _is_list(fragments):
            good = fragments is None or _is_integer(fragments, 1)
            self._must("fragments", good, "an integer of at least 1, or a list of lists of parameter names, or None")
            return
        if not fragments:
            raise ValueError("fragments=[] names no parameters: give at least one list of names, or a number")
        for position, names in enumerate(fragments):
            if not (_is_list(names) and names and all(isinstance(name, str) for name in names)):
                raise ValueError(f"fragments[{position}]={names!r} must be a non-empty list of parameter names")
        counts = Counter(name for names in fragments for name in names)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"fragments name parameters more than once: {', '.join(twice)}; each belongs in one")
        object.__setattr__(self, "fragments", tuple(tuple(names) for names in fragments))

    def _check_offsets(self) -> None:
        offsets, last = self.offsets, self.sync_every - 1
        if offsets is None:
            return
        good = _is_list(offsets) and len(offsets) > 0 and all(_is_integer(offset, 0, last) for offset in offsets)
        self._must("offsets", good, f"a list of integers from 0 to {last} (sync_every - 1), one per fragment")
        object.__setattr__(self, "offsets", tuple(offsets))
        if self.fragments is not None:
            self.check_offset_count(self.fragments if isinstance(self.fragments, int) else len(self.fragments))

    def _check_dense_start(self) -> None:
        start, longest = self.dense_start, self.sync_every
        good = _is_list(start) and all(
            _is_list(part) and len(part) == 2 and _is_integer(part[0], 1) and _is_integer(part[1], 1, longest)
            for part in start
        )
        wanted = f"a list of pairs (rounds, steps of each), the steps from 1 to {longest} (sync_every)"
        self._must("dense_start", good, wanted)
        object.__setattr__(self, "dense_start", tuple((rounds, every) for rounds, every in start))

    def check_offset_count(self, fragments: int) -> None:
        """Raises unless `offsets`, when given, has one entry per fragment; called again when the model has been cut."""
        if self.offsets is not None and len(self.offsets) != fragments:
            entries = f"offsets has {len(self.offsets)} entries for {fragments} fragments"
            raise ValueError(f"{entries}: give one per fragment, or None")

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
    def gradual(cls, **knobs: Any) -> Method:
        """Streaming DiLoCo with a gradual start, ours, for short runs as well as long ones: fifty to a hundred rounds
        of three steps, plainly averaged, then 600 steps, at most twenty rounds, over which momentum grows
        (docs/log.md, "Every island counts").

        >>> method = Method.gradual(sync_every=100)
        >>> method.dense_start, method.warmup_rounds
        (((100, 3),), 6)
        """
        sync_every = knobs.get("sync_every", cls.sync_every)
        every = sync_every if _is_integer(sync_every, 1) else 30  # what cannot be is refused where it is checked
        dense = (min(100, max(50, every)), min(3, max(1, every // 10)))
        start = {"dense_start": [dense], "warmup_rounds": min(20, max(1, 600 // every))}
        return cls.streaming(**{**start, "outer_lr": 0.9, "mixing": 0.25, **knobs})

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
        """For very slow links, ours: streaming, with a whole round for a result to arrive. Then an island keeps three
        quarters of its own weights (docs/log.md, "A whole round late").

        >>> Method.distant(sync_every=30).overlap
        29
        """
        sync_every = knobs.get("sync_every", cls.sync_every)
        longest = sync_every - 1 if _is_integer(sync_every, 1) else 0
        return cls.streaming(**{"overlap": longest, "mixing": 0.75, **knobs})

    def outer_at(self, number: int) -> tuple[float, float]:
        """Learning rate and momentum of the outer step that a fragment takes in its round of this number, from 1 on.

        >>> method = Method(dense_start=[(50, 3)], warmup_rounds=10, outer_lr=0.5)
        >>> method.outer_at(50), method.outer_at(56), method.outer_at(61)
        ((1.0, 0.0), (0.75, 0.45), (0.5, 0.9))
        """
        after = max(0, number - 1) - self.dense_rounds
        if after >= self.warmup_rounds:
            return self.outer_lr, self.outer_momentum
        part = max(0, after) / self.warmup_rounds if self.warmup_rounds else 0.0
        return 1 + part * (self.outer_lr - 1), part * self.outer_momentum

    @functools.cached_property
    def dense_rounds(self) -> int:
        """Rounds of the dense start."""
        return sum(rounds for rounds, _ in self.dense_start)

    @property
    def lateness(self) -> int:
        """Inner steps between the send of a round and the outer step that uses it."""
        return self.overlap if self.update == "fresh" else self.delay_rounds * self.sync_every

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        fields = dataclasses.asdict(self)
        if isinstance(self.fragments, tuple):
            fields["fragments"] = [list(names) for names in self.fragments]
        fields["offsets"] = None if self.offsets is None else list(self.offsets)
        fields["dense_start"] = [list(part) for part in self.dense_start]
        return fields


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_integer(value: object, least: int, most: float = math.inf) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
