"""What an island keeps for each fragment besides its weights, and how that is saved.

The anchor, the outer optimizer's velocity, what the codec lost, and the rounds in flight. A round in flight is saved
as its result: saving waits for the mean to arrive, which the other islands have sent or are about to, and a resumed
run finds it already there.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.wire.codecs import Codec, codecs
from isles.wire.world import Arrived, Handle, Mean


@dataclass
class Sent:
    """A round that this island has sent and not yet used up."""

    handle: Handle
    codec: Codec
    body: Tensor | None
    """Eager: the own outer gradient, encoded, as it went over the wire."""
    share: float
    """Eager: which part of `body` the island has added to its anchor ahead of the mean."""
    ahead: Future[tuple[Mean, Tensor, Tensor | None]] | None = None
    """The outer step with this round, if it is taken beside the training loop (`isles.core.ahead`)."""


@dataclass
class OuterState:
    """What an island keeps for one fragment besides its weights."""

    anchor: Tensor
    velocity: Tensor | None
    residual: Tensor | None
    """Error feedback: what the codec lost of the last outer gradient."""
    rounds: dict[int, Sent] = field(default_factory=dict)
    """In flight, by round, oldest first."""
    void: bool = False
    """The weights were reset in the middle of this round, so it does not count."""


def save_state(fragment: Fragment, state: OuterState) -> dict[str, Any]:
    """A copy of a fragment's outer state, made of plain values and tensors."""
    rounds = []
    for number, sent in state.rounds.items():
        mean = sent.handle.wait()
        rounds.append(
            {
                "round": number,
                "share": sent.share,
                "codec": sent.codec.name,
                "body": sent.body,
                "mean": mean.values,
                "weights": dict(mean.weights),
            }
        )
    saved = {"names": fragment.names, "anchor": state.anchor, "velocity": state.velocity, "residual": state.residual}
    return copy.deepcopy({**saved, "void": state.void, "rounds": rounds})


def load_state(state: OuterState, saved: dict[str, Any]) -> None:
    """Puts a saved copy back."""
    state.anchor.copy_(saved["anchor"])
    for mine, theirs in ((state.velocity, saved["velocity"]), (state.residual, saved["residual"])):
        if mine is not None:
            mine.copy_(theirs)
    state.void = saved["void"]
    state.rounds = {
        flight["round"]: Sent(
            Arrived(Mean(flight["mean"].clone(), dict(flight["weights"]))),
            codecs[flight["codec"]],
            flight["body"],
            flight["share"],
        )
        for flight in saved["rounds"]
    }


def check_saved(state: Any, method: Method, overlap: int, fragments: list[Fragment], rank: int) -> None:
    """Raises unless what was saved is of this method, this model and, where islands differ, this island."""
    wanted = {"version", "island", "method", "step", "total_weight", "stats", "fragments"}
    if not isinstance(state, dict) or not wanted <= state.keys() or state["version"] != 1:
        raise ValueError("this is not a state of isles.DiLoCo (version 1)")
    mine, theirs = method.as_dict(), state["method"]
    different = [
        f"{name}={theirs.get(name)!r} there, {mine[name]!r} here" for name in mine if theirs.get(name) != mine[name]
    ]
    if state.get("overlap", overlap) != overlap:
        different.append(f"this island's overlap={state['overlap']} there, {overlap} here")
    if different:
        raise ValueError(
            f"the checkpoint was made with another method ({'; '.join(different)}): resume with the same one"
        )
    same = len(fragments) == len(state["fragments"]) and all(
        saved["names"] == own.names and ("anchor" not in saved or saved["anchor"].numel() == own.numel)
        for saved, own in zip(state["fragments"], fragments, strict=True)
    )
    if not same:
        raise ValueError("the checkpoint is of another model: its parameters have other names or sizes")
    if method.update == "eager" and state["island"] != rank:
        whose = f"the checkpoint is of island {state['island']}, this is island {rank}"
        raise ValueError(f"{whose}: with eager updates each loads its own")
