"""The examples run as they stand, two islands on this machine, with small settings; they print what they promise.

Processes are forked, but for torchrun and its ranks. `test_package.py` starts an example by itself.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests import forked, trainers  # noqa: F401  (so that the server has imported the trainers)
from tests.processes import free_address

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
TRAINERS = {
    "hf_trainer.py": ["--steps", "8", "--sync-every", "4", "--width", "16"],
    "hf_trainer.py --lora": ["--lora", "--steps", "8", "--sync-every", "4", "--width", "16"],
    "lightning_module.py": ["--steps", "8", "--sync-every", "4", "--width", "16"],
    "accelerate_local_sgd.py": ["--steps", "8"],
}


def run(words, folder):
    if words[0] == "-m":
        environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    else:
        done = forked.run(words, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(printed, islands=2):
    """What was sent, and two losses that are numbers."""
    sent = re.search(r"each sent ([\d,]+) bytes", printed)
    assert sent, printed
    assert (int(sent[1].replace(",", "")) > 0) == (islands > 1)
    losses = re.findall(
        r"islands.*(?:loss|error) (\d+\.\d+);|same (?:tokens|samples): (?:loss|error) (\d+\.\d+)", printed
    )
    assert len(losses) == 2, printed


@pytest.mark.parametrize("example", TRAINERS)
def test_an_example_of_a_trainer_starts_two_islands(example, tmp_path):
    script = EXAMPLES / example.partition(" ")[0]
    check(run([script, "--address", free_address(), *TRAINERS[example]], tmp_path))
    folders = {path.name for path in tmp_path.glob("runs/*/*")}
    assert folders == (set() if "local_sgd" in example else {"island-0", "island-1", "without-isles"})


@pytest.mark.parametrize("islands", [1, 2])
def test_the_plain_loop(islands, tmp_path):
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if islands > 1 else []
    settings = ["--steps", "8", "--sync-every", "4", "--width", "16"]
    check(run([*start, EXAMPLES / "nanogpt_style.py", *settings], tmp_path), islands)
