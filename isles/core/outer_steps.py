"""One outer step of one fragment: from the mean of a round to the new anchor.

    anchor = OuterOpt(anchor, Delta)

Delta is the mean of the round that is due or, with eager updates, that mean with the island's own stale share replaced
by its fresh one. `isles.core.outer` has the arithmetic, `isles.core.rounds` knows which round is due. Here is what lies
between them: where the vectors are. On a CPU, with fresh updates, the step is taken ahead of time in the thread in
which the mean arrives, into other memory, and takes effect when it is due. On an accelerator the mean is copied to the
device on the side stream, and the step is taken there, in one pass over memory with mixing where there is a kernel for
it. With `outer_device="cpu"` the step is taken on the host, and the new anchor is copied to the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isles.core.device import SideStream, Upload, pinned, pinned_rows
from isles.core.encoding import add_decoded, decoded, mean_of
from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.offload import Offload
from isles.core.outer import OuterSGD, TorchOuter, thetas_on_device
from isles.core.schedule import Due
from isles.core.state import OuterState, Sent
from isles.core.stats import phase
from isles.wire import device_kernels
from isles.wire.codec import Codec
from isles.wire.reduction import Gathered
from isles.wire.world import Mean

Delta = Tensor | Gathered | None
"""The mean of a round, or the payloads that it is to be made of, where the fragment is."""
Shares = list[tuple[Sent, float]]
"""Own contributions that eager updates add to it, each with its share."""
OUTER = ("anchor", "velocity")
"""What an outer step changes."""


class OuterSteps:
    """Takes the outer steps of an island. Anchors are in `offload`, beside what a step changes otherwise."""

    def __init__(
        self,
        method: Method,
        fragments: list[Fragment],
        offload: Offload,
        sides: list[SideStream],
        sgd: OuterSGD,
        torch_outer: TorchOuter | None,
    ) -> None:
        self._method, self._fragments, self._offload, self._sides = method, fragments, offload, sides
        self._sgd, self._torch_outer = sgd, torch_outer
        on_host = all(state.anchor.is_cpu for state in offload.states)
        overlaps = method.update == "fresh" and method.overlap > 0
        self.in_background = on_host and overlaps and torch_outer is None
        """Whether they are taken on the host, as soon as a mean has arrived, if the world has a thread for it."""
        if any(side.asynchronous for side in sides):
            sgd.room = lambda numel, device: pinned(numel, torch.float32)

    def arrive(self, due: Due, sent: Sent, mean: Mean) -> None:
        """In the background, as soon as a mean has arrived: takes the outer step, or gets the mean ready for a device.

        The step takes effect when it is due. Nothing reads an anchor between the step at which its fragment is sent and
        the one at which the result is applied, but for whoever looks at the global model, and that must not change
        before its time: so it goes to other memory.
        """
        if not mean.weights:
            return
        side = self._sides[due.fragment]
        if sent.steps_aside:
            state, settings = self._offload.at_home(due.fragment), self._method.outer_at(due.round)
            sent.stepped = self._sgd.update_aside(state.anchor, mean.values, state.velocity, *settings)
        if side.asynchronous:
            sent.upload = Upload(side, self._pinned(sent, mean) if sent.stepped is None else sent.stepped[0])
            if sent.is_next:
                sent.upload.start()

    def gathers(self, index: int, sent: Sent, codec: Codec) -> bool:
        """Whether a device averages the payloads of a round: it has kernels for that, and takes the outer step."""
        at_home = sent.steps_aside or (self._torch_outer is not None and self._offload.in_use)
        side = self._sides[index]
        return side.asynchronous and not at_home and device_kernels.decodes(codec, side.device)

    def _pinned(self, sent: Sent | None, mean: Mean) -> Tensor:
        """What of a mean is copied to the device: payloads as rows of one table, which takes their place; or values."""
        if isinstance(mean.result, Tensor):
            return mean.result
        table = pinned_rows(mean.result.bodies)
        if sent is not None:
            sent.row = next((row for row, body in enumerate(mean.result.bodies) if body is sent.payload.body), None)
        mean.result = mean.result._replace(bodies=list(table))
        return table

    def step(
        self, due: Due, sent: Sent | None, mean: Mean | None, fresh: Sent | None = None, alpha: float | None = None
    ) -> bool:
        """anchor = OuterOpt(anchor, Delta), where Delta is the mean of the round that is due.

        With eager updates, Delta = mean + share * own fresh contribution - share * own contribution in the mean. Given
        alpha, theta may be mixed in the same pass over memory: returns whether it was.
        """
        if sent is not None and sent.stepped is not None and not (mean and mean.missed):
            self._sgd.give_back(*self._offload.replace(due.fragment, sent.stepped, sent.upload))
            self._offload.peek(due.fragment).outer_steps = due.round
            return False
        state = self._offload.take(due.fragment, OUTER, changing=OUTER)
        method, closing = self._method, mean is not None and mean.closing
        dense = mean is not None and 0 < due.round <= method.dense_rounds
        late = 0 if dense or method.update == "fresh" else method.delay_rounds
        delta = self._mean_here(due.fragment, sent, mean) if mean is not None and mean.weights else None
        eager = method.update == "eager" and not closing and not dense
        own = [(each, sign * each.share) for each, sign in ((fresh, 1.0), (sent, -1.0)) if eager and each is not None]
        if delta is None and not own:
            return False
        with phase("isles.outer_step"):
            averaged = dense or (closing and state.outer_steps <= method.dense_rounds)
            if not closing:
                state.outer_steps = due.round + late
            if alpha is not None and not averaged and self._step_and_mix(due.fragment, state, delta, own, alpha):
                return True
            values = self._added_up(due.fragment, delta, own)
            if averaged:
                state.anchor.sub_(values)
            elif self._torch_outer is not None:
                self._offload.step_at_home(due.fragment, self._torch_outer.update, values)
            else:
                self._sgd.update(state.anchor, values, state.velocity, *method.outer_at(state.outer_steps))
        return False

    def _step_and_mix(self, index: int, state: OuterState, delta: Delta, own: Shares, alpha: float) -> bool:
        """Both in one pass over the memory of a device, straight from payloads where these are there. Returns whether
        it was done: the device must have kernels for that.
        """
        thetas = None if self._torch_outer else thetas_on_device(self._fragments[index], state.anchor)
        if thetas is None:
            return False
        codec = own[0][0].payload.codec if own else None
        if delta is None and codec and device_kernels.decodes(codec, state.anchor):
            delta = Gathered((), (), codec, state.anchor.numel())  # no mean yet
        if not isinstance(delta, Gathered) or any(sent.payload.codec != delta.codec for sent, _ in own):
            delta, own = self._added_up(index, delta, own), []
        among = delta.bodies if isinstance(delta, Gathered) else ()
        more = [(self._own_payload(index, sent, among), share) for sent, share in own]
        settings = self._method.outer_at(state.outer_steps)
        self._sgd.update_and_mix(state.anchor, delta, state.velocity, *settings, thetas, alpha, more)
        return True

    def _mean_here(self, index: int, sent: Sent | None, mean: Mean) -> Tensor | Gathered:
        """The mean of a round, or its payloads, on the device of its fragment."""
        upload = None if sent is None or sent.stepped is not None else sent.upload
        here = (upload or Upload(self._sides[index], self._pinned(sent, mean))).result()
        return here if isinstance(mean.result, Tensor) else mean.result._replace(bodies=list(here))

    def _added_up(self, index: int, delta: Delta, own: Shares) -> Tensor:
        """One vector: the mean, and these shares of own contributions. Where there is no mean, the first one begins."""
        mean = mean_of(delta) if isinstance(delta, Gathered) else delta
        for sent, share in own:
            codec = sent.payload.codec
            if mean is None:
                mean = self.own(index, sent).mul_(share)
            elif self._sides[index].asynchronous:
                add_decoded(codec, self._own_payload(index, sent), mean, share)
            else:
                codec.accumulate(sent.payload.body, mean, share)
        assert mean is not None
        return mean

    def own(self, index: int, sent: Sent) -> Tensor:
        """An outer gradient of this island, as the others got it, where the fragment is."""
        if not self._sides[index].asynchronous:
            return sent.decoded(self._offload.states[index].anchor.device)
        return decoded(sent.payload.codec, self._own_payload(index, sent), sent.payload.numel)

    def _own_payload(self, index: int, sent: Sent, among: Sequence[Tensor] = ()) -> Tensor:
        """The payload of an outer gradient of this island, on the device of the fragment: where it was made, `among`
        those of all islands, or copied once more.
        """
        if sent.here is not None:
            self._sides[index].hold(sent.ready, sent.here)
            return sent.here
        if among and sent.row is not None:
            return among[sent.row]
        return Upload(self._sides[index], sent.payload.body).result()
