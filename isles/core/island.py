"""The ranks of one island: who of them holds what, and who exchanges it.

An island may be several ranks that train one replica together: its parameters are sharded over them (FSDP2, tensor
parallelism), copied (DDP), or both. Each rank exchanges what it holds with its peers in the other islands, those at the
same place. What several ranks of an island hold alike is shared out among them: each exchanges a part, and they give
each other the results, over the fast links inside the island. So an island sends every value once, however many ranks
it has, and copies stay copies, bit for bit.

Who holds what is read off the model: the meshes and placements of its DTensors, the process group of DDP. A plain
tensor in a sharded model (a norm, under tensor parallelism) is a copy on every rank. Ranks of an island talk over gloo
groups of isles' own, from host memory (`isles.wire.groups`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isles.wire.groups import private_group, private_store
from isles.wire.world import MismatchError

TIMEOUT_SECONDS = 1800.0
"""Of collectives inside an island, as torch.distributed has it."""


@dataclass(eq=False)
class Copies:
    """The ranks that hold the same values, and the part of them that this rank exchanges."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def part_numel(self, numel: int) -> int:
        """How much of so many values is this rank's part: the same for everybody, the last one filled up."""
        return -(-numel // self.size)

    def part(self, flat: Tensor) -> Tensor:
        """This rank's part of values that all of them hold."""
        if self.size == 1:
            return flat
        length = self.part_numel(flat.numel())
        own = flat[self.rank * length : (self.rank + 1) * length]
        return torch.cat([own, own.new_zeros(length - own.numel())])

    def whole(self, part: Tensor, numel: int) -> Tensor:
        """The values again, from everybody's part; all of them call this at the same time."""
        if self.size == 1:
            return part
        own = part.cpu().contiguous()
        parts = own.new_empty(self.size * own.numel())
        self.group._allgather_base(parts, own).wait()
        return parts[:numel].to(part.device)


SOLE = Copies()
"""Nobody else holds these values."""


class Island:
    """The ranks that train one replica; most often a single one."""

    def __init__(
        self,
        ranks: Sequence[int] = (),
        group: Any = None,
        copies: Mapping[str, Copies] | None = None,
        beside: Any = None,
    ) -> None:
        self.ranks, self.size, self.group, self._beside = list(ranks), max(1, len(ranks)), group, beside
        self._copies = copies or {}

    @classmethod
    def of(cls, model: nn.Module, named_parameters: Iterable[tuple[str, Tensor]]) -> Island:
        """The island of a model; all its ranks call this at the same time."""
        parameters = dict(named_parameters)
        ranks = _ranks_of(model, parameters.values())
        if len(ranks) <= 1:
            return cls()
        store = private_store("island", ranks)
        group = private_group(store, ranks, TIMEOUT_SECONDS)
        own = {name: _place_of(parameter) for name, parameter in parameters.items()}
        store.set(f"places/{dist.get_rank()}", json.dumps(own))
        held = {rank: json.loads(store.get(f"places/{rank}")) for rank in ranks}
        for rank, places in held.items():
            if places.keys() != own.keys():
                raise MismatchError(f"ranks {ranks[0]} and {rank} of an island have different parameters")
        here = [name for name, parameter in parameters.items() if local(parameter).numel()]
        holders = {name: tuple(rank for rank in ranks if held[rank][name] == own[name]) for name in here}
        rank, several = dist.get_rank(), sorted({who for who in holders.values() if len(who) > 1})
        groups = {who: Copies(who.index(rank), len(who), _group_of(who)) for who in several}
        copies = {name: groups[who] for name, who in holders.items() if who in groups}
        return cls(ranks, group, copies, beside=_group_of(ranks))

    def copies(self, name: str) -> Copies:
        """Who else holds a parameter."""
        return self._copies.get(name, SOLE)

    def any(self, flags: Sequence[bool], *, beside: bool = False) -> list[bool]:
        """Which of these are true on some rank of the island; all its ranks ask at the same time, in the training loop
        or, in an order of its own, in a thread `beside` it.

        >>> Island().any([True, False])
        [True, False]
        """
        return [total > 0 for total in self.sum(flags, beside=beside)]

    def sum(self, counts: Sequence[float], *, beside: bool = False) -> list[float]:
        """Sums over the ranks of the island; all of them ask at the same time."""
        if self.size == 1:
            return list(counts)
        totals = torch.tensor(counts, dtype=torch.float64)
        group = self._beside if beside else self.group
        if group is None:
            raise RuntimeError("this island is closed")
        group.allreduce([totals]).wait()
        return totals.tolist()

    def close(self) -> None:
        """Gives sockets and threads back."""
        self.group = self._beside = None
        for copies in self._copies.values():
            copies.group = None


def local(parameter: Tensor) -> Tensor:
    """The part of a parameter that lives on this rank: the shard of a DTensor, or the parameter itself."""
    tensor = parameter.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def like(parameter: Tensor, values: Tensor) -> Tensor:
    """Values of the local part of a parameter as what the parameter is: a DTensor with the same shards, or a tensor."""
    if not hasattr(parameter, "to_local"):
        return values
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(values, mesh, placements, run_check=False, shape=shape, stride=stride)


def is_sharded(model: nn.Module) -> bool:
    """Whether some of the model's parameters are shards."""
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def reshard(model: nn.Module) -> None:
    """Lets FSDP2 forget gathered parameters: it would go on using them after the shards were changed."""
    for module in model.modules():
        if hasattr(module, "set_reshard_after_backward"):  # an FSDPModule; importing the class takes a second
            module.reshard()  # type: ignore[operator]


def _ranks_of(model: nn.Module, parameters: Iterable[Tensor]) -> list[int]:
    """All ranks that the model is spread over, as far as its parts tell."""
    ranks: set[int] = set()
    for parameter in parameters:
        if hasattr(parameter, "device_mesh"):
            ranks.update(parameter.device_mesh.mesh.flatten().tolist())
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ranks.update(dist.get_process_group_ranks(module.process_group))
    return sorted(ranks)


def _place_of(parameter: Tensor) -> list[list[int]] | None:
    """Which part of the whole parameter is here: ranks with equal answers hold equal values."""
    if not hasattr(parameter, "to_local"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise ValueError("a parameter is a partial sum (DTensor Partial): redistribute it before training")
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return [list(shape), list(offset)]


def _group_of(ranks: Sequence[int]) -> Any:
    return private_group(private_store("island", ranks), ranks, TIMEOUT_SECONDS)
