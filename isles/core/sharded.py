"""An island's state in a form that fits any number of ranks, for torch.distributed.checkpoint.

Everything is kept by parameter, in the parameter's own shape and shards (a DTensor where it is one), so that what four
ranks have saved two can load. What has no shape (step, method, statistics, who took part in a round) is one JSON
text. Which entries there are does not depend on the step: a round that is not in flight has its place too, with zeros
in it. So a new DiLoCo's state is the form into which a saved one is loaded:

    state = diloco.state_dict(sharded=True)
    dcp.save(state, checkpoint_id=folder, process_group=group_of_the_island)        # or dcp.load, and then
    diloco.load_state_dict(state)

An own outer gradient in flight is saved decoded, and stays so until its mean has come: its blocks are cut differently
on another number of ranks, and what eager updates have added to the anchor must be taken back to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isles.core.fragments import Fragment
from isles.core.island import Island, like, local
from isles.core.outer import TorchOuter
from isles.core.replica import host_copy
from isles.core.state import VERSION, OuterState, arrive, load_progress, progress_of
from isles.core.stats import Stats
from isles.wire.codecs import codecs
from isles.wire.world import Mean

Named = dict[str, Tensor]


def save_sharded(
    about: dict[str, Any],
    fragments: list[Fragment],
    states: list[OuterState],
    stats: Stats,
    island: Island,
    outer: TorchOuter | None,
) -> dict[str, Any]:
    """The outer state of an island; all its ranks call this at the same time. Waits for rounds in flight."""
    places = rounds_in_flight(about["method"])
    parts = [_save_fragment(fragment, state, places) for fragment, state in zip(fragments, states, strict=True)]
    counted = dataclasses.asdict(stats)
    notes = {
        **about,
        "stats": dict(zip(counted, island.sum(list(counted.values())), strict=True)),
        "fragments": [{"names": part.names, **note} for part, (_, note) in zip(fragments, parts, strict=True)],
    }
    tensors = {str(index): tensors for index, (tensors, _) in enumerate(parts)}
    if outer is not None:
        for index, fragment in enumerate(fragments):
            notes["fragments"][index]["outer"] = outer.has_stepped(index)
            tensors[str(index)]["outer"] = {
                name: _by_name(fragment, value) if _is_vector(fragment, value) else host_copy(value)
                for name, value in outer.state_of(index).items()
            }
    return {"notes": json.dumps(notes), "fragments": tensors}


def load_sharded(
    state: Mapping[str, Any],
    fragments: list[Fragment],
    states: list[OuterState],
    island: Island,
    outer: TorchOuter | None,
) -> Stats:
    """Puts it back. Returns the statistics: each rank goes on with its part of what the island has sent."""
    notes = read_notes(state)
    for index, (fragment, own) in enumerate(zip(fragments, states, strict=True)):
        tensors, note = state["fragments"][str(index)], notes["fragments"][index]
        _load_fragment(fragment, own, tensors, note)
        if outer is not None:
            saved = tensors["outer"] if note.get("outer") else {}
            values = {n: _flat(fragment, v).to(own.anchor) if isinstance(v, Mapping) else v for n, v in saved.items()}
            outer.load_state(index, values)
    share = {name: value / island.size for name, value in notes["stats"].items()}
    return Stats(**{name: value if name.endswith("seconds") else int(value) for name, value in share.items()})


def _is_vector(fragment: Fragment, value: Any) -> bool:
    """Whether this is one value for every value of a fragment."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == fragment.numel


def rounds_in_flight(method: Mapping[str, Any]) -> int:
    """The most rounds of one fragment that are under way after a step, whatever an island's overlap."""
    return 1 if method["update"] == "fresh" else int(method["delay_rounds"])


def _save_fragment(fragment: Fragment, state: OuterState, places: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by parameter, and notes for the JSON text."""
    tensors: dict[str, Any] = {"anchor": _by_name(fragment, state.anchor)}
    for name, vector in (("velocity", state.velocity), ("residual", state.residual)):
        if vector is not None:
            tensors[name] = _by_name(fragment, vector)
    rounds = list(state.rounds.items())
    notes = []
    for place in range(places):
        mean = own = torch.zeros_like(state.anchor)
        if place < len(rounds):
            number, sent = rounds[place]
            arrived = sent.handle.wait()
            mean = arrived.values.to(state.anchor.device)
            own = sent.decoded(state.anchor.device)
            weights = {str(rank): weight for rank, weight in arrived.weights.items()}
            notes.append({"round": number, "share": sent.share, "weights": weights})
        tensors[f"mean {place}"], tensors[f"own {place}"] = _by_name(fragment, mean), _by_name(fragment, own)
    return tensors, {**progress_of(state), "rounds": notes}


def _load_fragment(fragment: Fragment, state: OuterState, tensors: Mapping[str, Any], note: dict[str, Any]) -> None:
    state.anchor.copy_(_flat(fragment, tensors["anchor"]))
    for name, vector in (("velocity", state.velocity), ("residual", state.residual)):
        if vector is not None:
            vector.copy_(_flat(fragment, tensors[name]))
    load_progress(state, note)
    state.rounds.clear()
    exact = codecs["fp32"]
    for place, flight in enumerate(note["rounds"]):
        weights = {int(rank): weight for rank, weight in flight["weights"].items()}
        mean = Mean(_flat(fragment, tensors[f"mean {place}"]).cpu(), weights)
        body = exact.encode(_flat(fragment, tensors[f"own {place}"]).cpu())
        arrive(state, flight, exact, body, mean)


def read_notes(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the JSON text of a sharded state says."""
    try:
        notes = json.loads(state["notes"])
        if notes["version"] != VERSION:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"this is not a sharded state of isles.DiLoCo (version {VERSION})") from None
    return notes  # type: ignore[no-any-return]


def _by_name(fragment: Fragment, flat: Tensor) -> Named:
    parts = zip(fragment.names, fragment.parameters, fragment.unflatten(flat), strict=True)
    return {name: like(parameter, values.clone()) for name, parameter, values in parts}


def _flat(fragment: Fragment, named: Mapping[str, Tensor]) -> Tensor:
    return fragment.flatten([local(named[name]) for name in fragment.names])
