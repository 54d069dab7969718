"""What the ranks of one island say to each other while the first of them, the *root*, is at the store.

In the training loop the root tells all others what came of a call: two numbers, and a small JSON text where there is
more to tell. An error is told as well, and raised on all of them. Beside the loop messages go from the root to a rank,
and back, each in the order in which they were sent. All of it goes over a gloo group of isles' own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from isles.elastic.objects import DamagedError
from isles.wire.groups import break_connections, private_group, private_store
from isles.wire.message import bytes_of, tensor_of
from isles.wire.worker import Worker, stop_all
from isles.wire.world import LostPeerError, MismatchError

TIMEOUT_SECONDS = 86400.0
"""The root may wait for other islands for as long as it has patience. A rank that dies is noticed at once."""
ROOT, LENGTH, DATA, PROBE = 0, 1, 2, 3
"""The rank of the root; and the tags of messages. No message has the last one."""
News = dict[str, Any]
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (DamagedError, MismatchError, LostPeerError, ValueError)
}
"""That reach all ranks as what they are; all others do as RuntimeError."""


class Ranks:
    """The connections between the ranks of one island."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._group = private_group(private_store("elastic", ranks), ranks, TIMEOUT_SECONDS)
        self.rank, self.size = self._group.rank(), self._group.size()
        self.others = [other for other in range(self.size) if other != self.rank]
        self.thread = Worker("isles-ranks")

    # ---- in the training loop

    def tell(self, value: int, news: News) -> None:
        """The root says what came of a call."""
        text = json.dumps(news).encode() if news else b""
        self._broadcast(torch.tensor([value, len(text)]))
        if text:
            self._broadcast(tensor_of(text))

    def hear(self) -> tuple[int, News]:
        """What the root says, on all other ranks. Raises its errors."""
        head = torch.zeros(2, dtype=torch.int64)
        self._broadcast(head)
        value, length = head.tolist()
        if not length:
            return value, {}
        text = torch.empty(length, dtype=torch.uint8)
        self._broadcast(text)
        news: News = json.loads(bytes_of(text))
        if "error" in news:
            kind, message = news["error"]
            raise ERRORS.get(kind, RuntimeError)(message)
        return value, news

    def tell_error(self, error: BaseException) -> None:
        """The same for an error. Ranks that are gone need not hear it."""
        kind = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "")
        said = str(error) if kind else f"on the first rank of this island: {type(error).__name__}: {error}"
        with suppress(LostPeerError):
            self.tell(0, {"error": [kind, said]})

    def _broadcast(self, tensor: Tensor) -> None:
        self._do(lambda group: group.broadcast([tensor]))

    # ---- beside it

    def send(self, data: Tensor, rank: int) -> None:
        """To another rank: the length, then the bytes."""
        length = torch.tensor([data.numel()])
        self._do(lambda group: group.send([length], rank, LENGTH))
        if data.numel():
            self._do(lambda group: group.send([data], rank, DATA))

    def receive(self, rank: int) -> Tensor:
        """What another rank sends next."""
        length = torch.zeros(1, dtype=torch.int64)
        self._do(lambda group: group.recv([length], rank, LENGTH))
        data = torch.empty(int(length), dtype=torch.uint8)
        if data.numel():
            self._do(lambda group: group.recv([data], rank, DATA))
        return data

    def _do(self, begin: Callable[[Any], Any]) -> None:
        try:
            if self._group is None or begin(self._group).wait() is False:
                raise RuntimeError("closed")
        except RuntimeError as error:
            raise LostPeerError(
                f"rank {self.rank} of an island lost another rank of it: restart this island"
            ) from error

    def close(self) -> None:
        """Breaks the connections, which ends all waiting."""
        group, self._group = self._group, None
        if group is not None:
            break_connections(group, self.others, PROBE)
            stop_all([self.thread])
