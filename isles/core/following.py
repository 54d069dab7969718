"""Rounds without this island: the others left it out of one, it has missed some, or a snapshot has taken their place.

It follows the global model. The weights move by as much as the anchor does,

    theta = theta + (anchor_new - anchor_old)

so what the island has learned and nobody has counted stays in anchor - theta, and goes into its next outer gradient.
What delayed updates have taken out of theta when it was sent is put back, and so is what error feedback had left. At
the end, when nothing is trained any more, what was not counted is kept apart (`end`), to be sent once more.
"""

from __future__ import annotations

from isles.core.device import SideStream
from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.offload import Offload
from isles.core.outer import TorchOuter, mix, move_along
from isles.core.outer_steps import OUTER, OuterSteps
from isles.core.schedule import Due
from isles.core.state import Sent, feedback_vectors, load_outer_state, outer_memory
from isles.wire.world import Mean, Snapshot


class Following:
    """What an island does with its weights where others have gone on without it."""

    def __init__(
        self,
        method: Method,
        fragments: list[Fragment],
        offload: Offload,
        sides: list[SideStream],
        steps: OuterSteps,
        torch_outer: TorchOuter | None,
    ) -> None:
        self._method, self._fragments, self._offload, self._sides = method, fragments, offload, sides
        self._steps, self._torch_outer = steps, torch_outer
        self.uncounted = [0] * len(fragments)
        """Steps that were sent in a round without this island, by fragment: they are in its next outer gradient."""
        self.ending, self._excluded = False, list[tuple[int, Sent]]()
        """Whether nothing is trained any more; and what was sent since then and not counted."""

    def follow(self, due: Due, mean: Mean, step: int) -> None:
        """An outer step that this island had no part in. With delayed updates theta gives up what it has just sent."""
        state, fragment = self._offload.take(due.fragment, ()), self._fragments[due.fragment]
        old = state.anchor.clone()
        if not mean.superseded:
            self._steps.step(due, None, mean)
        new = self._offload.take(due.fragment, ()).anchor
        if self._method.update == "delayed" and state.sent_step == step and state.rounds:
            mix(fragment, new, self._method.mixing)
        else:
            move_along(fragment, old, new)

    def put_back(self, index: int, sent: Sent) -> None:
        """What was sent and not counted is this island's again."""
        if self.ending:
            self._excluded.append((index, sent))
            return
        feedback, fragment = feedback_vectors(self._method), self._fragments[index]
        state = self._offload.take(index, feedback, changing=feedback, aside=True)
        self.uncounted[index] += sent.steps
        if state.residual is not None and sent.residual is not None:
            with self._sides[index].follow():
                state.residual.copy_(sent.residual)
        if self._method.update == "delayed" and sent.payload.weight:
            left = self._steps.own(index, sent).mul_(1 - self._method.mixing)
            fragment.write(fragment.read().sub_(left))

    def load(self, snapshot: Snapshot) -> None:
        """A snapshot takes the place of all rounds up to it. Steps that it counts leave theta, others stay there."""
        for index, saved in enumerate(snapshot.fragments):
            state, fragment = self._offload.take(index, OUTER, changing=OUTER), self._fragments[index]
            old = state.anchor.clone()
            load_outer_state(state, saved)
            if self._torch_outer:
                self._torch_outer.load_state(index, outer_memory(saved))
            move_along(fragment, old, state.anchor)
            for number in [round for place, round in snapshot.counted if place == index]:
                sent = state.rounds.pop(number)
                if self._method.update == "fresh" and sent.payload.weight:
                    fragment.write(fragment.read().add_(self._steps.own(index, sent)))
            for number in [round for place, round in snapshot.dropped if place == index]:
                self.put_back(index, state.rounds.pop(number))

    def end(self) -> None:
        """All rounds in flight are over: theta is the anchor and what nobody has counted, which may be sent again."""
        for fragment, state in zip(self._fragments, self._offload.settle(), strict=True):
            fragment.write(state.anchor)
        for index, sent in self._excluded:
            fragment = self._fragments[index]
            fragment.write(fragment.read().sub_(self._steps.own(index, sent)))
            self.uncounted[index] += sent.steps
        self.ending, self._excluded = False, []
