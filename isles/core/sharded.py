"""An island's state in a form that fits any number of ranks, for torch.distributed.checkpoint.

Everything is kept by parameter, in the parameter's own shape and shards (a DTensor where it is one), so that what four
ranks have saved two can load. What has no shape (step, method, statistics, who took part in a round) is one JSON text.
A round that is not in flight has its place too, with zeros in it. So a new DiLoCo's state is the form into which a
saved one is loaded:

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
from isles.core.state import VERSION, OuterState, load_state, progress_of, vectors_of
from isles.core.stats import Stats
from isles.wire.codecs import codecs


def save_sharded(
    about: dict[str, Any],
    fragments: list[Fragment],
    states: list[OuterState],
    stats: Stats,
    island: Island,
    outer: TorchOuter | None,
) -> dict[str, Any]:
    """The outer state of an island; all its ranks call this at the same time. Waits for rounds in flight."""
    most = about["method"]["delay_rounds"]  # rounds of one fragment in flight after a step: 1 with fresh updates
    notes, tensors = [], {}
    for index, (fragment, state) in enumerate(zip(fragments, states, strict=True)):
        own, note = _save_fragment(fragment, state, most)
        if outer is not None:
            note["outer"] = outer.has_stepped(index)
            own["outer"] = {name: _save_outer(fragment, value) for name, value in outer.state_of(index).items()}
        notes.append({"names": fragment.names, **note})
        tensors[str(index)] = own
    counted = dataclasses.asdict(stats)
    totals = dict(zip(counted, island.sum(list(counted.values())), strict=True))
    return {"notes": json.dumps({**about, "stats": totals, "fragments": notes}), "fragments": tensors}


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


def _save_outer(fragment: Fragment, value: Any) -> Any:
    """What an optimizer remembers of a fragment: by parameter, if it is one value for every value of the fragment."""
    is_vector = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == fragment.numel
    return _by_name(fragment, value) if is_vector else host_copy(value)


def _save_fragment(fragment: Fragment, state: OuterState, places: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by parameter, and notes for the JSON text."""
    tensors: dict[str, Any] = {name: _by_name(fragment, vector) for name, vector in vectors_of(state).items()}
    rounds, notes, device = list(state.rounds.items()), [], state.anchor.device
    for place in range(places):
        mean = own = torch.zeros_like(state.anchor)
        if place < len(rounds):
            number, sent = rounds[place]
            arrived = sent.handle.wait()
            mean, own = arrived.values.to(device), sent.decoded(device)
            weights = {str(rank): weight for rank, weight in arrived.weights.items()}
            notes.append({"round": number, "share": sent.share, "weights": weights})
        tensors[f"mean {place}"], tensors[f"own {place}"] = _by_name(fragment, mean), _by_name(fragment, own)
    return tensors, {**progress_of(state), "rounds": notes}


def _load_fragment(fragment: Fragment, state: OuterState, tensors: Mapping[str, Any], note: dict[str, Any]) -> None:
    """By way of the plain form, with own outer gradients in fp32."""
    rounds = []
    for place, flight in enumerate(note["rounds"]):
        mean, own = (_flat(fragment, tensors[f"{which} {place}"]).cpu() for which in ("mean", "own"))
        result = {"mean": mean, "weights": {int(rank): weight for rank, weight in flight["weights"].items()}}
        rounds.append({**flight, "codec": "fp32", "body": codecs["fp32"].encode(own), **result})
    vectors = {name: _flat(fragment, tensors[name]) for name in vectors_of(state)}
    load_state(state, {**note, **vectors, "rounds": rounds})


def read_notes(state: Mapping[str, Any]) -> dict[str, Any]:
    """What the JSON text of a sharded state says."""
    try:
        notes = json.loads(state["notes"])
        if notes["version"] != VERSION:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"this is not a sharded state of isles.DiLoCo (version {VERSION})") from None
    return notes


def _by_name(fragment: Fragment, flat: Tensor) -> dict[str, Tensor]:
    parts = zip(fragment.names, fragment.parameters, fragment.unflatten(flat), strict=True)
    return {name: like(parameter, values.clone()) for name, parameter, values in parts}


def _flat(fragment: Fragment, named: Mapping[str, Tensor]) -> Tensor:
    return fragment.flatten([local(named[name]) for name in fragment.names])
