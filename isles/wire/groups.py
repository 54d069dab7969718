"""Process groups of our own, and which ranks belong together.

Everything between islands, and what isles exchanges inside one, goes over gloo groups that isles makes for itself on a
prefix of the default group's store, or, for islands that share no default group, on a store of its own
(`isles.wire.rendezvous`). Names of groups follow from their members and from how often these members have made a group,
not from how many groups a rank has made: ranks that have made other groups find each other all the same. Nothing is
registered with torch.distributed, so dropping the last reference gives sockets and threads back.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

_numbers: weakref.WeakKeyDictionary[Any, dict[Any, Iterator[int]]] = weakref.WeakKeyDictionary()
"""By default group, which has a store of its own: how many groups have been made for a purpose and these ranks."""


def private_store(purpose: str, ranks: Sequence[int]) -> Store:
    """A part of the default group's store for these ranks; all of them call this, as often as the others."""
    default = dist.distributed_c10d._get_default_group()
    number = next(_numbers.setdefault(default, defaultdict(itertools.count))[purpose, tuple(ranks)])
    members = ",".join(map(str, ranks))
    return PrefixStore(f"isles/{purpose}/{members}/{number}", dist.distributed_c10d._get_default_store())


def private_group(store: Store, ranks: Sequence[int], timeout_seconds: float) -> Any:
    """A gloo group of these ranks; all of them call this at the same time."""
    return gloo_group(store, list(ranks).index(dist.get_rank()), len(ranks), timeout_seconds)


def gloo_group(store: Store, place: int, size: int, timeout_seconds: float) -> Any:
    """A gloo group of whoever calls this at the same time with the same store, each at its own place."""
    return ProcessGroupGloo(store, place, size, datetime.timedelta(seconds=timeout_seconds))


def break_connections(group: Any, others: Sequence[int], tag: int) -> None:
    """Ends all waiting in a group, here and on the other ranks. No message has this tag."""
    for other in others:
        with contextlib.suppress(RuntimeError):  # a receive that times out makes gloo close all connections
            nothing = torch.empty(1, dtype=torch.uint8)
            group.recv([nothing], other, tag).wait(datetime.timedelta(milliseconds=1))


def ranks_of(group_or_mesh: Any) -> list[int]:
    """The global ranks of a process group, a one-dimensional mesh or a list; None: of the default group."""
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names or "its dimensions"
            raise ValueError(
                f"a mesh of {group_or_mesh.ndim} dimensions: choose the one of the islands, as mesh[name], of {names}"
            )
        group_or_mesh = group_or_mesh.get_group()
    if isinstance(group_or_mesh, list):
        ranks = group_or_mesh
    elif group_or_mesh is None or isinstance(group_or_mesh, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(group_or_mesh)
    else:
        raise ValueError(f"TorchWorld takes a process group or a device mesh, not {group_or_mesh!r}")
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"rank {dist.get_rank()} is not in this group of ranks {ranks}: make a TorchWorld on its members only"
        )
    return ranks


def ranks_at_the_same_place(island: Sequence[int]) -> list[int]:
    """The ranks that hold the same place in their islands as this one in its own: those it exchanges with.

    `island`: the ranks that this one trains a replica with; empty if it does so alone. Every rank of the default group
    says which its island is; the islands have to be of one size and share no rank.
    """
    if len(island) <= 1:
        return ranks_of(None)
    size, me = dist.get_world_size(), dist.get_rank()
    store = private_store("islands", range(size))
    store.set(str(me), json.dumps(list(island)))
    islands = sorted({tuple(json.loads(store.get(str(rank)))) for rank in range(size)})
    if len(islands) == 1:
        raise ValueError(
            f"the model is spread over all ranks {list(island)}, so there is no other island: shard or wrap it over "
            'the ranks of one island only (mesh["rank"] of a mesh ("island", "rank")) and pass world=isles.TorchWorld('
            'mesh["island"]), or join islands outside this group, world=isles.TorchWorld.connect(...); for one island '
            "alone pass world=isles.LocalWorld.alone()"
        )
    members = sorted(rank for ranks in islands for rank in ranks)
    if len({len(ranks) for ranks in islands}) > 1 or members != list(range(size)):
        raise ValueError(
            f"the islands {[list(ranks) for ranks in islands]} do not share out all ranks evenly: pass the ranks that "
            'exchange with each other, world=isles.TorchWorld(mesh["island"])'
        )
    place = list(island).index(me)
    return [ranks[place] for ranks in islands]


def check_apart(world: object, island: Sequence[int]) -> None:
    """Raises ValueError if a world joins ranks of one island: each would take the other's shard for its own."""
    shared = sorted(set(getattr(world, "ranks", ())) & set(island) - {dist.get_rank()}) if len(island) > 1 else []
    if shared:
        raise ValueError(
            f"this world joins ranks {shared} of one island {list(island)}, which train one replica together: pass the "
            'ranks at one place of every island, isles.TorchWorld(mesh["island"]), or no world= at all'
        )
