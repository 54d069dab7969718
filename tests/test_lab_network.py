"""Networks of the laboratory: links are what they should be, counters count, and nothing is ever left behind.

Where a rate is measured the links are so slow that their bucket, of two frames, lasts for tens of milliseconds: a
machine whose host takes its cores away for a moment still carries all of it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from isles.lab import Network, Shape, namespaces, transfer
from isles.lab.nodes import Node
from tests import lab_networks
from tests.lab_networks import Meter, alive

RECEIVE = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    total = 0
    while data := connection.recv(1 << 16):
        total += len(data)
    print(total, flush=True)
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as connection:
    print("connected", flush=True)
    for _ in range(int(sys.argv[2])):
        connection.sendall(bytes(1 << 16))
"""


@pytest.fixture(autouse=True)
def possible():
    lab_networks.require()


def start_transfer(network: Network, chunks: int) -> tuple[subprocess.Popen, subprocess.Popen]:
    """From island 0 to island 1, so many times 64 KiB."""
    python = [sys.executable, "-I", "-c"]
    receiver = network.start(1, [*python, RECEIVE, network.address(1)], stdout=subprocess.PIPE)
    receiver.stdout.readline()
    sender = network.start(0, [*python, SEND, network.address(1), str(chunks)], stdout=subprocess.PIPE)
    return sender, receiver


# ---- links


@pytest.mark.parametrize(("islands", "bandwidth", "mtu"), [(2, 2e6, 9000), (3, 0.5e6, 1500)])
def test_a_link_carries_its_bandwidth_in_both_directions_at_once(islands, bandwidth, mtu):
    with Network(islands, bandwidth=bandwidth, mtu=mtu) as network, transfer.filled(network):
        meter = Meter(network)
        meter.wait_until_carried(dict.fromkeys(range(islands), goodput(bandwidth, mtu)), transfer.TOLERANCE)
        meter.check_that_no_link_has_carried_more_than_it_may()


def goodput(bandwidth: float, mtu: int) -> float:
    return Shape(bits_per_second=bandwidth, mtu=mtu).goodput_bits_per_second


def test_a_link_that_is_not_what_it_should_be_is_told():
    with Network(2, bandwidth=8e6) as network:
        network.islands[1].run(["tc", "qdisc", "replace", "dev", "eth0", "root", "handle", "10:", "tbf",
                                "rate", "4mbit", "burst", "20000", "limit", "80000"])  # fmt: skip
        with pytest.raises(OSError, match="too busy, or too slow"):
            transfer.verify(network, attempts=1)


def test_the_kernel_counts_what_was_sent_and_a_little_for_headers():
    with Network(2, bandwidth=50e6) as network:
        before = network.counters(0), network.counters(1)
        chunks = 32
        sender, receiver = start_transfer(network, chunks)
        assert sender.wait() == 0
        assert receiver.communicate()[0] == b"%d\n" % (chunks << 16)
        sent = network.counters(0) - before[0]
        assert 1.0 < sent.sent_bytes / (chunks << 16) < 1.05
        assert sent.sent_frames >= (chunks << 16) / 8948, "no frame is larger than the MTU"
        assert (network.counters(1) - before[1]).received_bytes == pytest.approx(sent.sent_bytes, rel=0.01)


def test_bandwidth_changes_while_programs_run():
    mtu = 6000  # at a tenth of the bandwidth a frame takes a tenth of a second
    with Network(2, bandwidth=5e6, mtu=mtu) as network, transfer.filled(network):
        for bandwidth in (5e6, 0.5e6, 5e6):
            network.set_bandwidth(bandwidth)
            meter = Meter(network)
            meter.wait_until_carried(dict.fromkeys((0, 1), goodput(bandwidth, mtu)), transfer.TOLERANCE)
            meter.check_that_no_link_has_carried_more_than_it_may()


def test_the_bandwidth_of_one_island_slows_only_its_own_link():
    fast, slow = goodput(5e6, 9000), goodput(0.5e6, 9000)
    with Network(3, bandwidth=5e6) as network, transfer.filled(network):
        network.set_bandwidth(0.5e6, island=0)
        meter = Meter(network)
        meter.wait_until_carried({2: fast}, transfer.TOLERANCE)  # from island 1: the link between the two is as it was
        meter.wait_until_carried({0: slow, 1: slow}, 0.5, frames=10)
        meter.check_that_no_link_has_carried_more_than_it_may()  # what island 0 gets is as slow as what it sends


def test_islands_need_not_ask_for_each_other_on_links_that_are_full():
    with Network(3, bandwidth=8e6) as network:
        for island, machine in enumerate(network.islands):
            known = [line.split() for line in machine.read("net/arp").splitlines()[1:]]
            assert {words[0] for words in known} == {network.address(other) for other in range(3)} - {
                network.address(island)
            }
            assert all(int(words[2], 16) & 4 for words in known), "for good"


def test_a_transfer_survives_a_link_that_is_down_for_a_while():
    with Network(2, bandwidth=8e6) as network:
        chunks = 24  # 1.5 s at this rate
        sender, receiver = start_transfer(network, chunks)
        sender.stdout.readline()
        network.link_down(1)
        before = network.counters(1).received_bytes
        time.sleep(0.5)
        assert network.counters(1).received_bytes == before, "nothing gets through"
        network.link_up(1)
        assert receiver.communicate()[0] == b"%d\n" % (chunks << 16), "and nothing is lost"


def test_two_networks_do_not_see_each_other():
    with Network(2, bandwidth=8e6) as one, Network(2, bandwidth=8e6) as other:
        sender, receiver = start_transfer(one, 4)
        assert sender.wait() == 0
        assert receiver.communicate()[0] == b"%d\n" % (4 << 16)
        assert one.counters(0).sent_bytes > 4 << 16
        assert other.counters(0).sent_bytes < 2000


def test_latency_and_loss_need_netem():
    try:
        network = Network(2, bandwidth=8e6, latency=0.05)
    except ValueError as error:
        assert "netem" in str(error)  # noqa: PT017
        assert "--latency" in str(error)  # noqa: PT017
    else:
        with network:
            shown = network.islands[0].run(["tc", "qdisc", "show", "dev", "eth0"])
            assert "netem" in shown
            assert "50ms" in shown
            assert "tbf" in shown


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"islands": 0}, "islands=0"),
        ({"bandwidth": 0}, "greater than 0"),
        ({"bandwidth": 10}, "less than tc can do"),
        ({"loss": 1.0}, "loss 1.0"),
        ({"latency": -1}, "latency -1"),
        ({"mtu": 100}, "mtu 100"),
    ],
)
def test_what_cannot_be_is_said(wrong, words):
    with pytest.raises(ValueError, match=words):
        Network(**wrong)


def test_the_best_goodput_is_that_of_frames_full_of_payload():
    assert Shape(bits_per_second=1e6, mtu=1500).goodput_bits_per_second == pytest.approx(1e6 * 1448 / 1514)


# ---- the end


def test_a_crash_ends_all_programs_of_one_island_and_no_other():
    marker = f"1{os.getpid():08d}1"
    with Network(2, bandwidth=8e6) as network:
        first = network.start(0, ["sh", "-c", f"sleep {marker} & sleep {marker}"])
        second = network.start(1, ["sleep", "1000"])
        lab_networks.wait_until(lambda: alive(marker), "the program starts")
        network.crash(0)
        first.wait()
        lab_networks.wait_until(lambda: not alive(marker), "its children are gone")
        assert second.poll() is None
    second.wait()


def test_what_a_program_has_started_can_be_stopped_and_goes_on(tmp_path):
    """As torchrun starts a training process: the one that was started on the island itself is not stopped."""
    log = tmp_path / "ticks"
    ticks = "while :; do echo tick; sleep 0.01; done"
    with Network(1) as network, log.open("wb") as stream:
        node = Node(0, network.start(0, ["sh", "-c", f"({ticks}); true"], stdout=stream), log)
        lab_networks.wait_until(lambda: log.stat().st_size > 0, "a tick")
        (starter,) = namespaces.children(node.process.pid)
        (worker,) = namespaces.children(starter)
        for _ in range(2):
            node.stop()
            lab_networks.wait_until(lambda: state(worker) == "T", "it is stopped")
            assert state(starter) != "T", "whoever has started it is not stopped"
            before = log.stat().st_size
            time.sleep(0.2)
            assert log.stat().st_size == before
            node.go_on()
            lab_networks.wait_until(lambda before=before: log.stat().st_size > before, "it goes on")
        node.stop()
        assert node.process.poll() is None
    assert node.process.wait(timeout=60), "what is stopped ends with its island too"
    node.stop()  # and then there is nothing to stop


def state(pid):
    """S: sleeping, T: stopped ... (man 5 proc)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_nothing_is_left_when_the_block_ends_with_an_exception():
    marker = f"1{os.getpid():08d}2"

    def fail():
        with Network(2, bandwidth=8e6) as network:
            network.start(0, ["setsid", "sleep", marker])
            lab_networks.wait_until(lambda: alive(marker), "the program starts")
            raise RuntimeError("a mistake")

    with pytest.raises(RuntimeError, match="a mistake"):
        fail()
    lab_networks.wait_until(lambda: not alive(marker), "the program is gone")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_laboratory_is_killed(how):
    marker = f"1{os.getpid():08d}{int(how)}"
    program = (
        "import subprocess, time\n"
        "from isles.lab import Network\n"
        "network = Network(2, bandwidth=8e6)\n"
        f"network.start(0, ['setsid', 'sleep', '{marker}'])\n"
        "print(*(machine.pid for machine in network.islands), flush=True)\n"
        "time.sleep(1000)\n"
    )
    lab = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    holders = lab.stdout.readline().split()
    lab_networks.wait_until(lambda: alive(marker), "the program starts")
    lab.send_signal(how)
    lab.wait()
    lab.stdout.close()
    lab_networks.wait_until(lambda: not alive(marker), "the program is gone")
    gone = lambda: not any(os.path.exists(f"/proc/{pid.decode()}/ns/net") for pid in holders)
    lab_networks.wait_until(gone, "the namespaces are gone")


def test_closing_again_does_nothing():
    network = Network(1, bandwidth=8e6)
    network.close()
    network.close()


# ---- without root


def test_root_is_not_needed_where_user_namespaces_are_allowed():
    """In a child that has given up root, if there was any to give up; from there, frames cross the link."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            with Network(2, bandwidth=8e6) as network:
                send = f"exec 3<>/dev/udp/{network.address(1)}/9; head -c 3000 /dev/zero >&3"
                network.start(0, ["bash", "-c", send]).wait()
                deadline = time.monotonic() + 30
                while network.counters(1).received_bytes < 3000 and time.monotonic() < deadline:
                    time.sleep(0.05)
                os.write(writer, b"%d" % network.counters(1).received_bytes)
        except BaseException as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if not said.isdigit():
        assert "allow user namespaces" in said, said  # the one clear line, on a system that forbids them
    else:
        assert int(said) > 3000


def test_a_system_that_allows_nothing_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    with pytest.raises(OSError, match=r"Operation not permitted.*: (run as root|in a container)") as caught:
        namespaces.check()
    assert "\n" not in str(caught.value)


def test_a_missing_program_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda program, path=None: None)
    with pytest.raises(OSError, match="`ip`: install iproute2"):
        namespaces.check()


def test_networks_made_at_the_same_time_by_threads_are_apart():
    found = []

    def make():
        with Network(2, bandwidth=8e6) as network:
            found.append({machine.pid for machine in network.islands})

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set().union(*found)) == 6
