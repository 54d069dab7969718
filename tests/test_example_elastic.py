"""`examples/elastic.py`: islands as programs that join late, are ended, and find the finished model."""

import contextlib
import pathlib
import re
import signal
import sys
import tempfile
import time

from tests import forked

ROOT = pathlib.Path(__file__).parent.parent
LINE = re.compile(r"clock (\d+): islands in the last round (\d+), error (\d\.\d+), sent ([\d,]+) B")


class Program:
    """A program under way, and what it has printed. It is forked."""

    def __init__(self, words, folder):
        self._printed = pathlib.Path(tempfile.mkdtemp(dir=folder)) / "printed"
        with self._printed.open("w") as file:
            self.process = forked.Forked([sys.executable, *words], cwd=folder, stdout=file, stderr=file)

    @property
    def lines(self):
        """Those that are complete."""
        text = self._printed.read_text()
        return text[: text.rfind("\n") + 1].splitlines(keepends=True)

    def until(self, holds, seconds=300.0):
        """Waits until something holds of the lines."""
        deadline = time.monotonic() + seconds
        while not holds(self.lines):
            assert self.process.poll() is None, "".join(self.lines)
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.05)
        return len(self.lines)

    def end(self, number):
        """Sends it a signal, and waits for its end."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self, seconds=300.0):
        return self.process.wait(seconds)

    def reports(self, after=0):
        """(clock, islands, error, bytes) of every line about the run."""
        found = [match.groups() for line in self.lines[after:] if (match := LINE.fullmatch(line.strip()))]
        return [(int(a), int(b), float(c), int(d.replace(",", ""))) for a, b, c, d in found]

    def has_islands(self, count, after=0):
        """Waits until a round of so many islands is told."""
        return self.until(lambda _: any(islands == count for _, islands, *_ in self.reports(after)))


@contextlib.contextmanager
def island(folder, steps="1000000"):
    program = Program([ROOT / "examples" / "elastic.py", folder, steps], folder.parent)
    try:
        yield program
    finally:
        program.process.kill()
        program.wait()


def test_elastic_islands_join_leave_and_come_back(tmp_path):
    folder = tmp_path / "run"
    with island(folder) as first:
        first.has_islands(1)
        with island(folder) as second:
            second.has_islands(2)
            seen = first.has_islands(2)
            assert second.end(signal.SIGINT) == 0
        first.has_islands(1, after=seen)
        assert first.end(signal.SIGINT) == 0
    assert first.lines[0] == "island 0 starts at clock 0\n"
    begun = re.fullmatch(r"island 1 starts at clock (\d+)\n", second.lines[0])
    assert int(begun[1]) >= 140  # the first report of the first island came before it started
    left = re.fullmatch(r"island 1 has left after (\d+) steps of its own\n", second.lines[-1])
    assert int(left[1]) > 0
    assert second.reports()[-1][3] > 0
    clocks, _, errors, sent = zip(*first.reports(), strict=True)
    assert list(clocks) == sorted(clocks)
    assert list(sent) == sorted(sent)
    assert errors[-1] < 0.5 * errors[0]
    with island(folder, "1") as last:  # a run whose clock is further than that: only says how good the model is
        assert last.wait() == 0
    assert last.lines[0].startswith("island 2 starts at clock ")
    assert last.reports()[-1][2] == errors[-1]
    assert last.lines[-1] == "island 2 has left after 0 steps of its own\n"
