"""The methods that are put side by side, from the one that needs the link most to the one that needs it least.

A variant is a Python line that sets it, and what matters for the link: is the model cut into fragments, in how many
bits does a value cross the link, how late is the result used. (The papers' mode needs no more than that, and does not
load torch; `method()` makes the real `isles.Method`, which does.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isles.core.method import Method

NOMINAL_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8}
"""Of codecs that are not 4 bits a value."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One row of the table.

    >>> standard_variants(sync_every=30)[4].python
    'isles.Method.streaming(sync_every=30)'
    """

    name: str
    family: str
    """Whose quality it has in the papers' tables: data-parallel, diloco, streaming, delayed or eager; distant: ours."""
    constructor: str = ""
    """Which preset of isles.Method makes it; "": isles.Method itself."""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    sync_every: int = 1
    fragmented: bool = True
    codec: str = "fp32"
    lateness: int = 0
    """Inner steps between sending and applying."""

    def __hash__(self) -> int:
        return hash((self.name, self.sync_every))

    @property
    def python(self) -> str:
        """The line that sets it."""
        if self.family == "data-parallel":
            return "torch.nn.parallel.DistributedDataParallel(model)"
        knobs = ", ".join(f"{name}={value!r}" for name, value in self.knobs.items())
        return f"isles.Method{'.' * bool(self.constructor)}{self.constructor}({knobs})"

    def method(self) -> Method:
        """The isles.Method that the line makes."""
        from isles.core.method import Method

        assert self.family != "data-parallel", "data-parallel training is no isles method"
        return (getattr(Method, self.constructor) if self.constructor else Method)(**self.knobs)


DATA_PARALLEL = Variant(name="data-parallel", family="data-parallel", fragmented=False)


def standard_variants(sync_every: int, **cutting: Any) -> list[Variant]:
    """The papers' five, longer overlap, eager updates, and ours: `gradual` and `distant`.

    `cutting`: knobs on how to cut the model.
    """
    if sync_every < 1:
        raise ValueError(f"sync_every={sync_every} must be at least 1")
    knobs = {"sync_every": sync_every, **cutting}

    def in_4_bits(name: str, family: str, constructor: str, lateness: int, **more: Any) -> Variant:
        return Variant(
            name=name,
            family=family,
            constructor=constructor,
            knobs={**knobs, **more},
            sync_every=sync_every,
            codec="e3m0",
            lateness=lateness,
        )

    found = [
        DATA_PARALLEL,
        Variant(
            name="diloco",
            family="diloco",
            constructor="diloco",
            knobs={"sync_every": sync_every},
            sync_every=sync_every,
            fragmented=False,
        ),
        Variant(name="streaming", family="streaming", knobs=knobs, sync_every=sync_every),
        Variant(
            name="streaming-overlap",
            family="streaming",
            knobs={**knobs, "overlap": 1, "mixing": 0.5},
            sync_every=sync_every,
            lateness=1,
        ),
        in_4_bits("streaming-overlap-fp4", "streaming", "streaming", lateness=1),
        in_4_bits("gradual-fp4", "streaming", "gradual", lateness=1),
        in_4_bits("streaming-overlap-5-fp4", "streaming", "streaming", lateness=5, overlap=5),
        in_4_bits("eager-fp4", "eager", "eager", lateness=sync_every),
        in_4_bits("distant-fp4", "distant", "distant", lateness=sync_every - 1),
    ]
    return [variant for variant in found if _possible(variant)]


def _possible(variant: Variant) -> bool:
    """A result must be used before the fragment is sent again, or whole rounds late."""
    return variant.family != "streaming" or variant.lateness < variant.sync_every


def custom_variant(method: Method, knobs: Mapping[str, Any], name: str = "yours") -> Variant:
    """A row for a method of the user's own."""
    whole = method.fragments == 1
    family = "diloco" if whole and method.lateness == 0 else "streaming"
    return Variant(
        name=name,
        family=family if method.update == "fresh" else method.update,
        knobs=knobs,
        sync_every=method.sync_every,
        fragmented=not whole,
        codec=method.codec,
        lateness=method.lateness,
    )


def by_name(variants: Iterable[Variant]) -> dict[str, Variant]:
    """The variants, to be looked up."""
    return {variant.name: variant for variant in variants}
