"""What an island keeps for each fragment besides its weights, and how that is saved.

The anchor, the outer optimizer's velocity, what the codec lost, and the rounds in flight. A round in flight is saved
as its result: saving waits for the mean to arrive, which the other islands have sent or are about to, and a resumed
run finds it already there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.outer import Position
from isles.core.replica import host_copy
from isles.wire.codecs import Codec, codecs
from isles.wire.world import Arrived, Handle, Mean, Payload

VERSION = 3


@dataclass
class Sent:
    """A round that this island has sent and not yet used up."""

    share: float = 0.0
    """Eager: which part of the payload the island has added to its anchor ahead of the mean."""
    closing: bool = False
    """Sent by `finish()`."""
    stepped: Position | None = None
    """Anchor and velocity after the outer step with this round, if that was taken in the background."""
    payload: Payload = field(init=False)
    handle: Handle = field(init=False)

    def decoded(self, device: torch.device) -> Tensor:
        """The own outer gradient, as the others got it."""
        return self.payload.codec.decode(self.payload.body.to(device), self.payload.numel)


@dataclass
class OuterState:
    """What an island keeps for one fragment besides its weights."""

    anchor: Tensor
    velocity: Tensor | None
    residual: Tensor | None
    """Error feedback: what the codec lost of the last outer gradient."""
    rounds: dict[int, Sent] = field(default_factory=dict)
    """In flight, by round, oldest first."""
    sent_step: int = 0
    """The step at which it was last sent: what was learned since then is in no mean yet."""
    outer_steps: int = 0
    """How many were taken."""
    was_reset: bool = False
    """The weights were not finite and were reset in the middle of this round, so it does not count."""


PROGRESS = ("sent_step", "outer_steps", "was_reset")


def save_state(fragment: Fragment, state: OuterState) -> dict[str, Any]:
    """A copy of a fragment's outer state on the CPU, made of plain values and tensors."""
    rounds = []
    for number, sent in state.rounds.items():
        mean = sent.handle.wait()
        rounds.append(
            {
                "round": number,
                "share": sent.share,
                "codec": sent.payload.codec.name,
                "body": host_copy(sent.payload.body),
                "mean": host_copy(mean.values),
                "weights": dict(mean.weights),
            }
        )
    tensors = {"anchor": state.anchor, "velocity": state.velocity, "residual": state.residual}
    return {"names": list(fragment.names), **host_copy(tensors), **progress_of(state), "rounds": rounds}


def progress_of(state: OuterState) -> dict[str, Any]:
    """The plain values of a state."""
    return {name: getattr(state, name) for name in PROGRESS}


def load_progress(state: OuterState, saved: dict[str, Any]) -> None:
    """Puts them back."""
    for name in PROGRESS:
        setattr(state, name, saved[name])


def load_state(state: OuterState, saved: dict[str, Any]) -> None:
    """Puts a saved copy back."""
    state.anchor.copy_(saved["anchor"])
    for mine, theirs in ((state.velocity, saved["velocity"]), (state.residual, saved["residual"])):
        if mine is not None:
            mine.copy_(theirs)
    load_progress(state, saved)
    state.rounds.clear()
    for flight in saved["rounds"]:
        mean = Mean(flight["mean"].clone(), dict(flight["weights"]))
        arrive(state, flight, codecs[flight["codec"]], flight["body"], mean)


def arrive(state: OuterState, flight: Mapping[str, Any], codec: Codec, body: Tensor, mean: Mean) -> None:
    """Puts back a round in flight whose result is there."""
    number = flight["round"]
    sent = state.rounds[number] = Sent(flight["share"])
    sent.payload = Payload(0, number, codec, state.anchor.numel(), 0.0, body)
    sent.handle = Arrived(mean)


def check_saved(
    state: Any, method: Method, overlap: int, fragments: list[Fragment], rank: int, outer_optimizer: str | None
) -> None:
    """Raises unless what was saved is of this method, this model and, where islands differ, this island."""
    wanted = {"version", "island", "method", "step", "total_weight", "outer_optimizer", "stats", "fragments"}
    if not isinstance(state, dict) or not wanted <= state.keys() or state["version"] != VERSION:
        raise ValueError(f"this is not a state of isles.DiLoCo (version {VERSION})")
    mine, theirs = method.as_dict(), state["method"]
    different = [
        f"{name}={theirs.get(name)!r} there, {mine[name]!r} here" for name in mine if theirs.get(name) != mine[name]
    ]
    if state.get("overlap", overlap) != overlap:
        different.append(f"this island's overlap={state['overlap']} there, {overlap} here")
    if state["outer_optimizer"] != outer_optimizer:
        names = [name or "the method's own" for name in (state["outer_optimizer"], outer_optimizer)]
        different.append(f"the outer optimizer is {names[0]} there, {names[1]} here")
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
