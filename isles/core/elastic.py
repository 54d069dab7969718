"""Membership where islands come and go: joining a run that may be under way, its clock, leaving.

A fixed set of islands compares notes (`isles.core.handshake`). Here there is nobody to ask: the run is a log that every
island reads by itself. Joining means to take over the global model, which makes the initial weights of all but the
first island irrelevant, and a position in the schedule. Moments of the inner optimizer start anew.

In an island of several ranks each rank brings its own part of the model, and all of them join together. All islands of
a run have the same number of ranks, with the same parts.

Buffers (BatchNorm statistics) stay the island's own; the log has parameters only.
"""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from isles.core.handshake import model_digest, tensor_checksum
from isles.core.method import Method
from isles.core.replica import Replica
from isles.core.rounds import Rounds
from isles.core.schedule import Due, Schedule
from isles.wire.world import ElasticWorld, Joining, World, is_elastic

VERSION = 1
EVERYTHING = Due(0, 0)
"""What joining and leaving are about."""


def check_elastic(world: World, method: Method) -> None:
    """Raises ValueError for what a set of islands that changes cannot do."""
    if not is_elastic(world):
        return
    if method.update == "eager":
        raise ValueError(
            "eager updates keep anchors that differ between islands, and an island that joins could not have them: "
            "with a StoreWorld use Method.distant(), which is as late as eager updates"
        )


class Elastic:
    """One island of a run whose islands come and go."""

    def __init__(self, world: ElasticWorld, rounds: Rounds, replica: Replica) -> None:
        self._world, self._rounds, self._replica = world, rounds, replica
        self.stats = rounds.stats

    def join(self, settings: dict[str, Any], schedule: Schedule) -> int:
        """Takes over the global model. Returns the clock at which this island starts."""
        frozen = [tensor_checksum(tensor) for tensor in self._replica.frozen().values()]
        model = json.dumps({"parameters": model_digest(self._replica), "frozen values": frozen})
        rounds, numels = self._rounds, [fragment.numel for fragment in self._rounds.fragments]
        island = self._replica.island
        shared = json.dumps({**settings.pop("method"), **settings, "ranks_per_island": island.size}, sort_keys=True)
        empty = [index for index, fragment in enumerate(rounds.fragments) if fragment.is_empty]
        joining = Joining(shared, model, schedule, rounds.codec, numels, empty, rounds.outer_state, island.ranks)
        for missed in self._world.join(joining):
            rounds.apply_missed(missed)
        for fragment, anchor in zip(rounds.fragments, rounds.anchors(), strict=True):
            fragment.write(anchor)
        self.stats.catch_up_rounds = 0  # those of joining were before its time
        self.stats.islands = self._world.size
        rounds.tell("join", EVERYTHING)
        return self._world.clock

    def reach(self, clock: int) -> int:
        """The clock after a step. It jumps where an island that is behind would miss a round."""
        return self._world.reach(clock)

    def resume(self, step: int, anchors: list[Tensor] | None) -> None:
        """Nothing to compare: the run is in the store."""

    def finish(self, step: int) -> None:
        """Nothing to compare: others may go on."""

    def average_anchors(self, anchors: list[Tensor]) -> None:
        """All islands have the same ones."""

    def same_model(self, replica: Replica) -> None:
        """The log has made it the same. Leaves the run."""
        self._rounds.tell("leave", EVERYTHING)
        self._world.close()

    # ---- checkpoints: what is not in the store

    def state_dict(self, step: int) -> dict[str, Any]:
        """Inner optimizer and buffers."""
        return {"elastic": VERSION, "step": step, "replica": self._replica.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts them back; the weights are the run's."""
        if not isinstance(state, dict) or state.get("elastic") != VERSION:
            raise ValueError("this is not a state of an island of a StoreWorld: it was saved in another kind of world")
        weights = {name: tensor.clone() for name, tensor in self._replica.trained().items()}
        self._replica.load_state_dict({**state["replica"], "parameters": weights})
