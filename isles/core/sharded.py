"""An island's state in a form that fits any number of ranks, for torch.distributed.checkpoint.

Everything is kept by parameter, in the parameter's own shape and shards (a DTensor where it is one), so that what four
ranks have saved two can load. What has no shape (step, method, statistics, who took part in a round) is one JSON
text. Which entries there are does not depend on the step: a round that is not in flight has its place too, with zeros
in it. So a new DiLoCo's state is the form into which a saved one is loaded:

    state = diloco.state_dict(sharded=True)
    dcp.save(state, checkpoint_id=folder, process_group=group_of_the_island)        # or dcp.load, and then
    diloco.load_state_dict(state)

An own outer gradient on its way (eager) is saved decoded, and stays so until its mean has come: its blocks are cut
differently on another number of ranks, and what was added to the anchor must be taken back to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isles.core.fragments import Fragment
from isles.core.state import OuterState, Sent
from isles.core.stats import Stats
from isles.wire.codecs import codecs
from isles.wire.island import Island, like, local
from isles.wire.world import Arrived, Mean

Named = dict[str, Tensor]


def save_sharded(
    about: dict[str, Any], fragments: list[Fragment], states: list[OuterState], stats: Stats, island: Island
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
    return {"notes": json.dumps(notes), "fragments": tensors}


def load_sharded(
    state: Mapping[str, Any], fragments: list[Fragment], states: list[OuterState], island: Island
) -> Stats:
    """Puts it back. Returns the statistics: each rank goes on with its part of what the island has sent."""
    notes = read_notes(state)
    for index, (fragment, outer) in enumerate(zip(fragments, states, strict=True)):
        _load_fragment(fragment, outer, state["fragments"][str(index)], notes["fragments"][index])
    share = {name: value / island.size for name, value in notes["stats"].items()}
    return Stats(**{name: value if name == "wait_seconds" else int(value) for name, value in share.items()})


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
            if sent.body is not None:
                own = sent.codec.decode(sent.body, fragment.numel).to(state.anchor.device)
            weights = {str(rank): weight for rank, weight in arrived.weights.items()}
            notes.append({"round": number, "share": sent.share, "own": sent.body is not None, "weights": weights})
        tensors[f"mean {place}"], tensors[f"own {place}"] = _by_name(fragment, mean), _by_name(fragment, own)
    return tensors, {"void": state.void, "rounds": notes}


def _load_fragment(fragment: Fragment, state: OuterState, tensors: Mapping[str, Any], note: Mapping[str, Any]) -> None:
    state.anchor.copy_(_flat(fragment, tensors["anchor"]))
    for name, vector in (("velocity", state.velocity), ("residual", state.residual)):
        if vector is not None:
            vector.copy_(_flat(fragment, tensors[name]))
    state.void = note["void"]
    state.rounds.clear()
    exact = codecs["fp32"]
    for place, flight in enumerate(note["rounds"]):
        weights = {int(rank): weight for rank, weight in flight["weights"].items()}
        mean = Mean(_flat(fragment, tensors[f"mean {place}"]).cpu(), weights)
        body = exact.encode(_flat(fragment, tensors[f"own {place}"]).cpu()) if flight["own"] else None
        state.rounds[flight["round"]] = Sent(Arrived(mean), exact, body, flight["share"])


def read_notes(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the JSON text of a sharded state says."""
    try:
        notes = json.loads(state["notes"])
        if notes["version"] != 1:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError("this is not a sharded state of isles.DiLoCo (version 1)") from None
    return notes  # type: ignore[no-any-return]


def _by_name(fragment: Fragment, flat: Tensor) -> Named:
    parts = zip(fragment.names, fragment.parameters, fragment.unflatten(flat), strict=True)
    return {name: like(parameter, values.clone()) for name, parameter, values in parts}


def _flat(fragment: Fragment, named: Mapping[str, Tensor]) -> Tensor:
    return fragment.flatten([local(named[name]) for name in fragment.names])
