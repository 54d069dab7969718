"""A machine of the laboratory: a Linux namespace with network, processes and host name of its own.

It is held open by one process, `cat`, which reads from a pipe that only the laboratory holds. When the laboratory
ends, in whatever way, `kill -9` included, the pipe is closed and `cat` ends. It is the first process of its process
namespace, so the kernel then kills all others in there, and the network, whose last user is gone, goes with them.
Nothing has to be found and removed later, nothing has a name that another laboratory could have, and nothing of the
machine's own network is touched.

Root needs no more than that. Everybody else gets a user namespace first, where the system allows it: the first
machine makes one, and the others are made inside of it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "bridge": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
"""What the laboratory calls, and the package that has it."""
KINDS = ("--net", "--pid", "--uts")


class Namespace:
    """One machine; `within` is the machine whose user namespace it shares. Close it, or use it in a `with` block."""

    def __init__(self, name: str, within: Namespace | None = None) -> None:
        self.name = name
        self._user: list[str] = within._user if within else ([] if os.geteuid() == 0 else ["--user"])
        maker = ["unshare", *KINDS, "--fork", "--kill-child"]
        if within and self._user:
            maker = ["nsenter", "--target", str(within.pid), "--user", "--preserve-credentials", *maker]
        elif self._user:
            maker += ["--user", "--map-root-user"]
        self._holder = subprocess.Popen(
            [program_path(maker[0]), *maker[1:], "cat"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.pid: int = self._wait_for_holder()
            self.run(["ip", "link", "set", "lo", "up"])
            self.run(["sh", "-c", f"hostname {shlex.quote(name)} 2>/dev/null || true"])
        except BaseException:
            self.close()
            raise

    def _wait_for_holder(self) -> int:
        """The number, outside, of the first process inside: it echoes a line once it is there."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        assert self._holder.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
            self._holder.stdin.write(b"here\n")
        if self._holder.stdout.readline() != b"here\n":
            lines = self._holder.stderr.read().decode().strip().splitlines()
            raise OSError(why_not(lines[0] if lines else f"exit code {self._holder.wait()}"))
        pid = self._holder.pid
        while Path(f"/proc/{pid}/comm").read_text() != "cat\n":
            pid = children(pid)[0]
        return pid

    def command(self, arguments: Sequence[str], kinds: Sequence[str] = KINDS) -> list[str]:
        """The command that, started outside, runs the arguments inside."""
        user = [*self._user, "--preserve-credentials"] if self._user else []
        return [program_path("nsenter"), "--target", str(self.pid), *user, *kinds, "--", *arguments]

    def run(self, arguments: Sequence[str]) -> str:
        """Runs a program to its end and returns what it printed; raises OSError if it fails. For setting up: the
        program sees the machine's network and host name, and processes by their numbers outside.
        """
        inside = self.command(arguments, kinds=("--net", "--uts"))
        done = subprocess.run(inside, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{' '.join(arguments)} failed on {self.name}: {done.stderr.strip()}")
        return done.stdout

    def start(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts a program inside, in a session of its own: a Ctrl-C in the terminal is for the laboratory."""
        return subprocess.Popen(
            self.command(arguments),
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def kill_all(self) -> None:
        """Ends every process inside but the holder: the machine crashes, and stays plugged in."""
        subprocess.run(self.command(["sh", "-c", "kill -KILL -1"]), stdin=subprocess.DEVNULL, capture_output=True)

    def read(self, file: str) -> str:
        """A file of the machine's /proc, such as `net/dev`."""
        return Path(f"/proc/{self.pid}/{file}").read_text()

    def close(self) -> None:
        """Ends all processes inside, and the namespace with them; again: nothing."""
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            assert pipe is not None
            pipe.close()
        try:
            self._holder.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()

    def __enter__(self) -> Namespace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def children(pid: int) -> list[int]:
    """The processes that a process has started; none if it has ended."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def check() -> None:
    """Raises OSError with one clear line if this system cannot do it."""
    for program in PROGRAMS:
        program_path(program)
    Namespace("check").close()


def why_not(error: str) -> str:
    """One line on what is missing, from the error of `unshare`."""
    if os.geteuid() == 0:
        return f"even root cannot make network namespaces on this system ({error}): in a container, add CAP_SYS_ADMIN"
    return (
        f"you cannot make network namespaces on this system ({error}): run as root, or allow user namespaces "
        "(sysctl user.max_user_namespaces; on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0)"
    )


def program_path(program: str) -> str:
    """The program's path; /usr/sbin is not on everybody's."""
    path = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if path is None:
        raise OSError(f"the laboratory needs `{program}`: install {PROGRAMS[program]}")
    return path
