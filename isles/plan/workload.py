"""The model that is trained, as far as the link is concerned: layers, parameters, and the time of a step.

A model is a stack of equal layers and what is outside of it (embeddings, final norm, head). It is cut into
fragments by `isles.core.fragments.cut`, the engine's own, on tensors that take no memory: what the planner counts
is what the engine will send.

`PRESETS` are the papers' models. 1B, 10B and 100B have the step times of their utilisation tables. The others have
none published; theirs is 1B's scaled by the number of parameters, which is a guess: give `--step-time`. All take
2^20 tokens a step, which is what the papers' wall-clock figures come to (25B tokens without communication: 0.67 h).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isles.plan.quantities import positive

if TYPE_CHECKING:
    from isles.core.method import Method

PAPER_TOKENS_PER_STEP = 2**20
VOCABULARY = 32_000
OUTSIDE = "outside the layers"
"""What a run's config event calls the fragment of everything that is in no layer."""
RANK_FLOPS = 4e14
"""What one accelerator of a preset's island really computes in a second: an H100 at 40 %."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained. `parameters` counts everything, `outside_parameters` what is not in the layers.

    >>> Workload(name="mine", parameters=10**9, layers=24, step_seconds=0.1).ranks
    1
    """

    name: str
    parameters: int
    layers: int
    step_seconds: float
    outside_parameters: int = 0
    ranks: int = 1
    """Processes per island that share the model (FSDP): each exchanges, encodes and decodes its own shard."""
    tokens_per_step: float = 0.0
    """Of all islands together; 0: not known."""
    tokens: float = 0.0
    """How many to train on; 0: not known."""

    def __post_init__(self) -> None:
        for name in ("parameters", "layers", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        positive(self.step_seconds, f"step_seconds={self.step_seconds}")
        if not 0 <= self.outside_parameters < self.parameters:
            raise ValueError(
                f"outside_parameters={self.outside_parameters:,} must be from 0 to below parameters={self.parameters:,}"
            )
        if self.parameters - self.outside_parameters < self.layers:
            raise ValueError(f"parameters={self.parameters:,} are too few for {self.layers} layers")

    @property
    def steps(self) -> int | None:
        """Steps of the whole training; None: not known."""
        return math.ceil(self.tokens / self.tokens_per_step) if self.tokens and self.tokens_per_step else None

    def layer_parameters(self) -> list[int]:
        """Parameters of each layer, as equal as whole numbers allow."""
        share, rest = divmod(self.parameters - self.outside_parameters, self.layers)
        return [share + (layer < rest) for layer in range(self.layers)]


def workload_of(config: Mapping[str, Any], step_seconds: float, ranks: int = 1) -> Workload:
    """The model of a run, as its config event describes it."""
    fragments = config.get("fragments") or []
    outside = sum(int(each["numel"]) for each in fragments if each["layers"] == OUTSIDE)
    return Workload(
        name=str(config.get("name") or "run"),
        parameters=int(config["parameters"]),
        layers=max(1, int(config["layers"])),
        step_seconds=step_seconds,
        outside_parameters=int(config.get("outside_parameters", outside)),
        ranks=ranks,
        tokens_per_step=float(config.get("tokens_per_step") or 0.0),
    )


def check_fragments(fragments: object, layers: int, outside: bool = True) -> None:
    """Raises if a model would be cut into more fragments than there are layers, and one for what is outside of them."""
    if isinstance(fragments, int) and fragments > layers + outside:
        raise ValueError(
            f"{fragments} fragments are too many for {layers} layers"
            f"{' and what is outside of them' * outside}: a fragment holds whole layers, use fewer"
        )


@functools.lru_cache(maxsize=64)
def fragment_sizes(workload: Workload, method: Method) -> tuple[int, ...]:
    """Parameters of each fragment under a method, as the engine will cut it."""
    from torch import empty, nn

    from isles.core.fragments import cut

    class Layer(nn.Module):
        def __init__(self, numel: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(empty(numel, device="meta"))

    if isinstance(method.fragments, Sequence):
        raise ValueError("the planner knows layers, not parameter names: give fragments as a number")
    check_fragments(method.fragments, workload.layers, outside=workload.outside_parameters > 0)
    layers = nn.ModuleList(Layer(numel) for numel in workload.layer_parameters())
    model = nn.ModuleDict({"layers": layers})
    if workload.outside_parameters:
        model["outside"] = Layer(workload.outside_parameters)
    return tuple(fragment.numel for fragment in cut(model, method))


def implied_ranks(parameters: float, tokens_per_step: float, step_seconds: float) -> int:
    """Accelerators of an island that a step time implies: 6 operations a parameter and token (shared by two islands).

    >>> implied_ranks(1e9, 2**20, 0.1)
    79
    """
    return max(1, math.ceil(6 * parameters * tokens_per_step / 2 / step_seconds / RANK_FLOPS))


def _preset(name: str, parameters: float, layers: int, width: int, tokens: float, step_seconds: float = 0) -> Workload:
    seconds = step_seconds or 0.1 * parameters / 1e9
    return Workload(
        name=name,
        parameters=int(parameters),
        layers=layers,
        step_seconds=seconds,
        outside_parameters=VOCABULARY * width,
        ranks=implied_ranks(parameters, PAPER_TOKENS_PER_STEP, seconds),
        tokens_per_step=PAPER_TOKENS_PER_STEP,
        tokens=tokens,
    )


PRESETS = {
    preset.name: preset
    for preset in (
        _preset("35M", 35e6, 6, 512, 700e6),
        _preset("100M", 100e6, 9, 768, 1.5e9),
        _preset("200M", 200e6, 12, 1024, 3.5e9),
        _preset("300M", 300e6, 15, 1280, 6e9),
        _preset("500M", 500e6, 18, 1536, 11e9),
        _preset("1B", 1e9, 24, 2048, 25e9, step_seconds=0.1),
        _preset("4B", 4e9, 36, 3072, 83e9),
        # Width and tokens of the last two are not published: width from 12 * width^2 * layers, 20 tokens a parameter.
        _preset("10B", 10e9, 48, 4096, 200e9, step_seconds=0.8),
        _preset("100B", 100e9, 108, 8704, 2e12, step_seconds=4.9),
    )
}


def with_changes(workload: Workload, **changes: object) -> Workload:
    """The workload with some fields replaced; None leaves a field as it is."""
    return dataclasses.replace(workload, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
