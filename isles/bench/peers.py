"""isles beside torchft, over the same shaped links: what `benchmarks/against_torchft.py` measures.

The peer has dependencies of its own and lives in an environment of its own, so that script is a part of the checkout,
not of the package (`benchmarks/README.md`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import isles

SCRIPT = Path(isles.__file__).parents[1] / "benchmarks" / "against_torchft.py"


def check(peer: str | None) -> str:
    """The Python of the peer. Raises ValueError if there is none, or no script to compare with."""
    if not peer:
        raise ValueError("peers need --peer PYTHON, the Python of torchft's environment: see benchmarks/README.md")
    if shutil.which(peer) is None:
        raise ValueError(f"--peer {peer} is no program: make torchft's environment, as benchmarks/README.md says")
    if not SCRIPT.exists():
        raise ValueError("peers are measured from a checkout of isles: there is no benchmarks/against_torchft.py here")
    return peer


def measure(peer: str) -> dict[str, Any]:
    """Wall time, bytes, utilisation and loss of both, in turns. Raises SystemExit if a run fails, which says why."""
    with tempfile.TemporaryDirectory(prefix="isles-") as folder:
        out = Path(folder) / "peers.json"
        command = [sys.executable, str(SCRIPT), "--peer", peer, "--out", str(out)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(done.returncode)
        found: dict[str, Any] = json.loads(out.read_text())
    return found
