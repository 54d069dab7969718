"""A small disk that can be filled up: a tmpfs that only the islands see.

It is mounted in a mount namespace of its own, held open like the laboratory's machines (`isles.lab.namespaces`) by a
process that ends when the laboratory does: then nothing is left to unmount. The laboratory itself reaches it through
/proc. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from isles.lab.namespaces import program_path

CHUNK_BYTES = 1 << 16
BALLAST = "ballast"


class Disk:
    """A folder with so many bytes of room."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        if os.geteuid() != 0:
            raise ValueError("a disk that is full needs root, to mount a small one: leave disk-full out")
        folder.mkdir(parents=True, exist_ok=True)
        mount = f"mount -t tmpfs -o size={num_bytes} tmpfs '{folder}' && echo here && exec cat"
        self._holder = subprocess.Popen(
            [program_path("unshare"), "--mount", "--propagation", "private", "sh", "-c", mount],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"here\n":
            self.close()
            raise OSError(f"cannot mount a tmpfs on {folder}: in a container, add CAP_SYS_ADMIN")
        self._inside = Path(f"/proc/{self._holder.pid}/root{folder}")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs the arguments where the disk can be seen."""
        target = [program_path("nsenter"), "--target", str(self._holder.pid), "--mount", f"--wd={os.getcwd()}"]
        return [*target, "--", *arguments]

    def fill(self) -> None:
        """Takes all room that is left."""
        with contextlib.suppress(OSError), (self._inside / BALLAST).open("ab", buffering=0) as file:
            while True:
                file.write(bytes(CHUNK_BYTES))

    def free(self) -> None:
        """Gives it back."""
        (self._inside / BALLAST).unlink(missing_ok=True)

    def close(self) -> None:
        """Nobody can reach the disk any more; it is gone when the last process in there has ended."""
        for pipe in (self._holder.stdin, self._holder.stdout):
            assert pipe is not None
            pipe.close()
        self._holder.wait()
