"""What kernels cost on a device: launches, and bytes of its memory that are read and written.

Without a GPU both can be counted all the same. In Triton's interpreter every load and store of a kernel goes through
two functions, which see the masks: what a lane leaves out is not counted. Loads of the same address count each time,
because caches are no part of this; so does a table that a kernel looks something up in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Traffic:
    """Launches, and bytes of device memory that they have read and written; bytes only where they are interpreted."""

    launches: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    @property
    def num_bytes(self) -> int:
        return self.bytes_read + self.bytes_written


_counts: list[Traffic] = []


@contextmanager
def counting() -> Iterator[Traffic]:
    """Counts what is launched inside."""
    traffic = Traffic()
    _counts.append(traffic)
    try:
        yield traffic
    finally:
        _counts.remove(traffic)


def count(launches: int = 0, read: int = 0, written: int = 0) -> None:
    """Adds to what is being counted."""
    for traffic in _counts:
        traffic.launches += launches
        traffic.bytes_read += read
        traffic.bytes_written += written


@contextmanager
def counted_interpreter() -> Iterator[None]:
    """Looks at what Triton's interpreter loads and stores, if somebody counts."""
    if not _counts:
        yield
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    masked_load, masked_store = builder.create_masked_load, builder.create_masked_store

    def counted_load(pointers: Any, mask: Any, *rest: Any) -> Any:
        loaded = masked_load(pointers, mask, *rest)
        count(read=int(mask.data.sum()) * loaded.data.itemsize)
        return loaded

    def counted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        count(written=int(mask.data.sum()) * value.data.itemsize)
        return masked_store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield
    finally:
        del builder.create_masked_load, builder.create_masked_store
