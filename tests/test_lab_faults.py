"""Faults on the link: it goes down and comes back, it becomes slow, it goes down for good."""

import json
import time
from pathlib import Path

import pytest
import torch

import isles
from isles.lab import Network, nodes
from isles.train.checkpoint import Checkpoints, newest_common
from isles.view import events
from tests import lab_island, lab_networks

TIMEOUT = 20.0
"""Of islands that lose each other: longer than a busy machine may hold one of them up while it starts and trains."""


@pytest.fixture(autouse=True)
def possible():
    lab_networks.require()


def start(network: Network, folder: Path, program: list[str]) -> list[nodes.Node]:
    return nodes.start(network, folder, [nodes.torchrun(network, island, program) for island in (0, 1)])


def steps_of(folder: Path, island: int) -> list[dict]:
    file = folder / f"steps-{island}.jsonl"
    whole, _, _ = (file.read_text() if file.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def wait_for_step(folder: Path, started: list[nodes.Node], number: int) -> None:
    """Until both islands have done so many steps."""

    def reached() -> bool:
        assert all(node.process.poll() is None for node in started), started[0].output() + started[1].output()
        return all(len(steps_of(folder, island)) >= number for island in (0, 1))

    lab_networks.wait_until(reached, f"step {number}")


def test_an_outage_and_a_slow_link_change_the_time_and_nothing_else(tmp_path):
    """The link is down while both islands want to exchange, then works, then has a tenth of its bandwidth. The weights
    at the end are those of threads that have no network.
    """
    rounds, outage, slow_from, every = 12, 4, 8, lab_island.SYNC_EVERY
    held = f"{outage},{slow_from}"
    with Network(2, bandwidth=20e6) as network:
        started = start(network, tmp_path, [lab_island.__file__, str(tmp_path), str(rounds), held, "60"])
        wait_for_step(tmp_path, started, outage * every)
        network.link_down(1)
        lab_island.gate(tmp_path, outage).touch()
        wait_for_step(tmp_path, started, (outage + 1) * every - 1)  # the last step of a round exchanges
        time.sleep(2.0)
        link_up = time.monotonic()
        network.link_up(1)
        wait_for_step(tmp_path, started, slow_from * every)
        network.set_bandwidth(2e6)
        lab_island.gate(tmp_path, slow_from).touch()
        assert nodes.wait(started, seconds=120, grace_seconds=10) == [0, 0], started[0].output() + started[1].output()
    wanted = isles.run_local(lambda world: lab_island.train(world, rounds), 2)[0]
    for island in (0, 1):
        assert torch.equal(torch.load(tmp_path / f"weights-{island}.pt"), wanted), "the same result, bit for bit"
    exchanges = list(zip(*(steps_of(tmp_path, island)[every - 1 :: every] for island in (0, 1)), strict=True))
    assert len(exchanges) == rounds
    assert all(step["end"] > link_up for step in exchanges[outage]), "training waited for the link to come back"
    # From the first island's beginning to the last one's end: a link never takes less than its bandwidth allows, and a
    # busy machine takes more now and then, so the shortest of several is what the link makes of it.
    seconds = [max(step["end"] for step in both) - min(step["begin"] for step in both) for both in exchanges]
    fast = [*seconds[1:outage], *seconds[outage + 1 : slow_from]]
    assert min(seconds[slow_from:]) > 4 * min(fast), "and was slower"


@pytest.mark.timeout(900)  # two runs, and every wait has a limit of its own
def test_a_link_that_stays_down_is_one_clear_error_on_every_island_and_the_run_resumes(tmp_path):
    flags = ["--data", "synthetic:0.1", "--vocabulary", "300", "--model", "nano", "--threads", "1", "--batch-size", "2"]
    flags += ["--sync-every", "4", "--eval-every", "0", "--sample-tokens", "0", "--checkpoint-every", "10"]
    program = ["-m", "isles.cli", "train", "--run-dir", str(tmp_path / "run"), *flags]
    with Network(2, bandwidth=20e6) as network:
        endless = [*program, "--steps", "1000000", "--timeout-seconds", str(TIMEOUT)]
        started = start(network, tmp_path / "first", endless)

        def saved() -> bool:
            assert all(node.process.poll() is None for node in started), started[0].output() + started[1].output()
            held = [Checkpoints(tmp_path / "run" / "checkpoints", island, keep=2).steps() for island in (0, 1)]
            return newest_common(held) is not None and last_step(tmp_path / "run") > 20

        lab_networks.wait_until(saved, "a checkpoint of both islands")
        network.link_down(1)
        begin = time.monotonic()
        told = lambda: all("isles train: " in node.output() for node in started)
        lab_networks.wait_until(told, "every island says that it has lost the other")
        assert time.monotonic() - begin < 5 * TIMEOUT, "within the time-out, and a while for a busy machine"
        for node in started:
            assert f"island {node.island} lost another island" in node.complaint()
            assert "--resume" in node.complaint()
            network.crash(node.island)  # torchrun itself may wait much longer for the rendezvous it has lost
            node.process.wait()
        network.link_up(1)
        lost_at = last_step(tmp_path / "run")
        started = start(network, tmp_path / "second", [*program, "--steps", str(lost_at + 20), "--resume"])
        assert nodes.wait(started, seconds=150, grace_seconds=10) == [0, 0], started[0].output() + started[1].output()
    log = events.read(tmp_path / "run")
    resumed = next(event["step"] for event in log if event["event"] == "resume")
    assert 10 <= resumed <= lost_at
    assert log[-1]["event"] == "end"
    assert log[-1]["steps"] == lost_at + 20


def last_step(folder: Path) -> int:
    return max((event["step"] for event in events.read(folder) if event["event"] == "step"), default=0)
