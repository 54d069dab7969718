"""What the ranks of one island say to each other while the first of them, the *root*, is at the store.

In the training loop the root tells all others what came of a call: a number, and a small JSON text where there is more
to tell. An error is told as well, and raised on all of them. Receives for the next few of these messages are always
posted, so the root does not wait for the others, and they wait only where they are ahead of it. (A broadcast would wait
for the slower one at every step.) Beside the loop longer messages go from the root to a rank, and back, each in the
order in which they were sent. All of it goes over a gloo group of isles' own.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from isles.elastic.documents import DamagedError
from isles.wire.groups import break_connections, private_group, private_store
from isles.wire.message import bytes_of, tensor_of
from isles.wire.worker import Worker, stop_all
from isles.wire.world import LostPeerError, MismatchError

TIMEOUT_SECONDS = 86400.0
"""The root may wait for other islands for as long as it has patience. A rank that dies is noticed at once."""
ROOT = 0
TOLD, TEXT, LENGTH, DATA, PROBE = range(1, 6)
"""Tags of messages. No message has the last one."""
HEAD = struct.Struct("<qq")
"""A number, and the length of the text after it."""
MESSAGE_BYTES = 2048
"""Of what the root tells. A text for which there is no room follows by itself."""
POSTED = 8
News = dict[str, Any]
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (DamagedError, MismatchError, LostPeerError, ValueError)
}
"""That reach all ranks as what they are; all others do as RuntimeError."""
NOTHING = torch.empty(0, dtype=torch.uint8)


class Ranks:
    """The connections between the ranks of one island."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._group = private_group(private_store("elastic", ranks), ranks, TIMEOUT_SECONDS)
        self.rank, self.size = self._group.rank(), self._group.size()
        self.others = [other for other in range(self.size) if other != self.rank]
        self.thread = Worker("isles-ranks")
        self._posted: deque[tuple[Any, Tensor]] = deque()
        for _ in range(POSTED if self.rank != ROOT else 0):
            self._post()

    # ---- in the training loop

    def tell(self, value: int, news: News) -> None:
        """The root says what came of a call."""
        text = json.dumps(news).encode() if news else b""
        head = HEAD.pack(value, len(text)) + text
        short = len(head) <= MESSAGE_BYTES
        message = tensor_of(head[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0"))
        for rank in self.others:
            self._send(message, rank, TOLD)
        for rank in [] if short else self.others:
            self._send(tensor_of(text), rank, TEXT)

    def hear(self) -> tuple[int, News]:
        """What the root says, on all other ranks. Raises its errors."""
        work, message = self._posted.popleft() if self._posted else (None, NOTHING)
        self._do(lambda group: work)
        self._post()
        value, length = HEAD.unpack_from(bytes_of(message))
        if not length:
            return value, {}
        text = message[HEAD.size : HEAD.size + length]
        if text.numel() < length:
            text = torch.empty(length, dtype=torch.uint8)
            self._do(lambda group: group.recv([text], ROOT, TEXT))
        news: News = json.loads(bytes_of(text))
        if "error" in news:
            kind, said = news["error"]
            raise ERRORS.get(kind, RuntimeError)(said)
        return value, news

    def tell_error(self, error: BaseException) -> None:
        """The same for an error. Ranks that are gone need not hear it."""
        kind = next((name for name, kind in ERRORS.items() if isinstance(error, kind)), "")
        said = str(error) if kind else f"on the first rank of this island: {type(error).__name__}: {error}"
        with suppress(LostPeerError):
            self.tell(0, {"error": [kind, said]})

    def _post(self) -> None:
        message = torch.empty(MESSAGE_BYTES, dtype=torch.uint8)
        with suppress(RuntimeError):  # the root is gone: what it has said before is still to be heard
            self._posted.append((self._group.recv([message], ROOT, TOLD), message))

    # ---- beside it

    def send(self, data: Tensor, rank: int) -> None:
        """To another rank: the length, then the bytes."""
        self._send(torch.tensor([data.numel()]), rank, LENGTH)
        if data.numel():
            self._send(data, rank, DATA)

    def receive(self, rank: int) -> Tensor:
        """What another rank sends next."""
        length = torch.zeros(1, dtype=torch.int64)
        self._do(lambda group: group.recv([length], rank, LENGTH))
        data = torch.empty(int(length), dtype=torch.uint8)
        if data.numel():
            self._do(lambda group: group.recv([data], rank, DATA))
        return data

    def _send(self, message: Tensor, rank: int, tag: int) -> None:
        self._do(lambda group: group.send([message], rank, tag))

    def _do(self, begin: Callable[[Any], Any]) -> None:
        try:
            work = None if self._group is None else begin(self._group)
            if work is None or work.wait() is False:
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
            self._posted.clear()
