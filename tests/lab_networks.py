"""For tests of the laboratory: can this system make networks? In CI it has to; elsewhere such tests are skipped."""

import os
import time
from pathlib import Path

import pytest

from isles.lab import namespaces


def require() -> None:
    """Skips the test where namespaces are impossible, and says why; fails it in CI."""
    try:
        namespaces.check()
    except OSError as error:
        if os.environ.get("CI"):
            pytest.fail(f"in CI the laboratory has to work: {error}")
        pytest.skip(str(error))


def wait_until(holds, what: str, seconds: float = 120.0) -> None:
    """Until something holds; the limit is there for what hangs."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.05)


def alive(marker: str) -> bool:
    """Is there a process `sleep MARKER`?"""
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and Path(f"/proc/{entry}/cmdline").read_bytes() == b"sleep\0%s\0" % marker.encode():
                return True
        except OSError:
            pass
    return False
