"""What an island keeps for each fragment besides its weights, and how that is saved.

The anchor, the outer optimizer's velocity, what the codec lost, and the rounds in flight. A round in flight is saved
as its result: saving waits for the mean, and a resumed run finds it already there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isles.core.device import HAPPENED, Event, Upload
from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.outer import Position
from isles.core.replica import host_copy
from isles.wire.codecs import codecs
from isles.wire.world import Arrived, Handle, Mean, Payload

VERSION = 3


@dataclass
class Sent:
    """A round that this island has sent and not yet used up."""

    share: float = 0.0
    """Eager: which part of the payload the island has added to its anchor ahead of the mean."""
    closing: bool = False
    """Sent by `finish()`."""
    steps: int = 0
    """Inner steps that it contains."""
    residual: Tensor | None = None
    """What error feedback had left before it was sent, in case it is not counted."""
    stepped: Position | None = None
    """Anchor and velocity after the outer step with this round, if that was taken in the background."""
    here: Tensor | None = None
    """Eager: the payload on the device."""
    ready: Event = HAPPENED
    """When it is there."""
    upload: Upload | None = None
    """What an apply on a device needs of the result: payloads of all islands, their mean, or the anchor after the outer
    step. From a thread."""
    row: int | None = None
    """Which of these payloads is the island's own."""
    steps_aside: bool = False
    """The outer step is taken in the background, on the host, if the world has a thread for it."""
    is_next: bool = False
    """It is applied at the coming step: what it needs is to be copied to the device."""
    number: int = 0
    """In the order of sends."""
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
    """In which round, by number, the last one was taken; 0: none yet."""
    was_reset: bool = False
    """The weights were not finite and were reset in the middle of this round, so it does not count."""


VECTORS = ("anchor", "velocity", "residual")
PROGRESS = ("sent_step", "outer_steps", "was_reset")


def vectors_of(state: OuterState) -> dict[str, Tensor]:
    """The vectors that a state has."""
    return {name: vector for name in VECTORS if (vector := getattr(state, name)) is not None}


def feedback_vectors(method: Method) -> tuple[str, ...]:
    """Those that error feedback keeps."""
    return ("residual",) if method.error_feedback else ()


def progress_of(state: OuterState) -> dict[str, Any]:
    """The plain values of a state."""
    return {name: getattr(state, name) for name in PROGRESS}


def load_progress(state: OuterState, saved: dict[str, Any]) -> None:
    """Puts them back."""
    for name in PROGRESS:
        setattr(state, name, saved[name])


def save_state(fragment: Fragment, state: OuterState) -> dict[str, Any]:
    """A copy of a fragment's outer state on the CPU, made of plain values and tensors."""
    rounds = []
    for number, sent in state.rounds.items():
        own = {"share": sent.share, "codec": sent.payload.codec.name, "body": sent.payload.body}
        mean = sent.handle.wait()
        rounds.append({"round": number, **own, "mean": mean.values, "weights": mean.weights})
    vectors = {name: getattr(state, name) for name in VECTORS}
    return host_copy({"names": fragment.names, **vectors, **progress_of(state), "rounds": rounds})


def load_state(state: OuterState, saved: dict[str, Any]) -> None:
    """Puts a saved copy back. The results of rounds in flight are there already."""
    for name, vector in vectors_of(state).items():
        vector.copy_(saved[name])
    load_progress(state, saved)
    state.rounds.clear()
    for flight in saved["rounds"]:
        number, codec = flight["round"], codecs[flight["codec"]]
        sent = state.rounds[number] = Sent(flight["share"])
        sent.payload = Payload(0, number, codec, state.anchor.numel(), 0.0, flight["body"])
        sent.handle = Arrived(Mean(flight["mean"].clone(), dict(flight["weights"])))


def save_outer_state(state: OuterState, memory: dict[str, Any]) -> dict[str, Tensor]:
    """What islands share of a fragment, as tensors alone: `memory` is that of an outer optimizer of torch's."""
    more = {MEMORY + name: torch.as_tensor(value) for name, value in memory.items()}
    own = {"anchor": state.anchor, "outer_steps": torch.tensor(state.outer_steps)}
    velocity = {} if state.velocity is None else {"velocity": state.velocity}
    return {name: host_copy(tensor) for name, tensor in {**own, **velocity, **more}.items()}


def load_outer_state(state: OuterState, saved: dict[str, Tensor]) -> None:
    """Puts it back; before the first round there is an anchor alone."""
    state.anchor.copy_(saved["anchor"])
    if state.velocity is not None:
        state.velocity.copy_(saved["velocity"]) if "velocity" in saved else state.velocity.zero_()
    state.outer_steps = int(saved.get("outer_steps", torch.tensor(0)))


def outer_memory(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of `save_outer_state`: what the outer optimizer remembers. Empty where it has not taken a step."""
    if not int(saved.get("outer_steps", torch.tensor(0))):
        return {}
    return {name.removeprefix(MEMORY): value for name, value in saved.items() if name.startswith(MEMORY)}


MEMORY = "optimizer."


def check_saved(
    state: Any, method: Method, overlap: int, fragments: list[Fragment], rank: int, outer_optimizer: str | None
) -> None:
    """Raises unless what was saved is of this method, this model and, where islands differ, this island."""
    wanted = {"version", "island", "method", "step", "clock", "total_weight", "outer_optimizer", "stats", "fragments"}
    if not isinstance(state, dict) or not wanted <= state.keys() or state["version"] != VERSION:
        raise ValueError(f"this is not a state of isles.DiLoCo (version {VERSION})")
    pairs = ((name, state["method"].get(name), here) for name, here in method.as_dict().items())
    different = [f"{name}={there!r} there, {here!r} here" for name, there, here in pairs if there != here]
    if state.get("overlap", overlap) != overlap:
        different.append(f"this island's overlap={state['overlap']} there, {overlap} here")
    if state["outer_optimizer"] != outer_optimizer:
        names = [name or "the method's own" for name in (state["outer_optimizer"], outer_optimizer)]
        different.append(f"the outer optimizer is {names[0]} there, {names[1]} here")
    if different:
        what = f"the checkpoint was made with another method ({'; '.join(different)})"
        raise ValueError(f"{what}: resume with the same one")
    saved_sizes = [each["anchor"].numel() for each in state["fragments"] if "anchor" in each]
    other_names = [each["names"] for each in state["fragments"]] != [each.names for each in fragments]
    if other_names or (saved_sizes and saved_sizes != [each.numel for each in fragments]):
        raise ValueError("the checkpoint is of another model: its parameters have other names or sizes")
    if method.update == "eager" and state["island"] != rank:
        whose = f"the checkpoint is of island {state['island']}, this is island {rank}"
        raise ValueError(f"{whose}: with eager updates each loads its own")
