"""When an island dies, hangs, raises or ends early, every other one gets one clear error in time, and nobody hangs.

The islands are real processes; one is killed with SIGKILL, put to sleep, or made to raise: before a round, in the
middle of one, or while the worlds are being made. Where an island leaves, its connections break and nobody waits for a
time-out: those worlds have one that is longer than `processes.run` waits for anybody. Where an island stays and is
silent, times are compared with the time-out that was asked for. The same for the threads of `run_local`, which need no
time-out.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import isles
from isles.wire import torch_world
from isles.wire.exchange import Kind
from isles.wire.torch_world import GlooTransport
from isles.wire.world import Payload
from tests import processes

torch.set_num_threads(1)
FORMS = ["all-gather", "reduce-scatter"]
LONG = 600.0
"""A time-out that nobody lives to see."""
TIMEOUT = 10.0
"""Of islands that lose a silent one: none may be held up for so long by a busy machine while all is well."""
SLACK = 5
"""A survivor may take this many time-outs: the machine may be busy with something else."""


def payload(numel=3000, round=1):
    codec = isles.codecs["e3m0"]
    return Payload(0, round, codec, numel, 1.0, codec.encode(torch.ones(numel)))


def train(world, steps, before_step=lambda step: None, **knobs):
    """A training whose islands synchronise at every second step; `before_step` is where things go wrong."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = isles.Method(sync_every=2, fragments=1, **knobs)
    with isles.DiLoCo(model, optimizer, method, world=world):
        for step in range(1, steps + 1):
            before_step(step)
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def after(action):
    """(seconds, name of the exception, message) of an action that should fail."""
    begin = time.monotonic()
    try:
        action()
    except Exception as error:
        return time.monotonic() - begin, type(error).__name__, str(error)
    return time.monotonic() - begin, "nothing", ""


def check_lost(outcome, where=""):
    seconds, error, message = outcome
    assert error == "LostPeerError", f"{where}: {error}: {message}"
    assert "lost" in message, f"{where}: {message}"
    assert seconds < SLACK * TIMEOUT, where


def check_left(outcome, where=""):
    """Lost, and known by the connection: nobody has waited for a time-out."""
    check_lost(outcome, where)
    assert "a connection broke" in outcome[2], f"{where}: {outcome[2]}"


def check_said(outcome, step, reason):
    """Lost, and told why by the island that left."""
    check_lost(outcome)
    assert f"island 1 left at step {step}: {reason}" in outcome[2], outcome[2]


# ---- killed

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
import isles
torch.set_num_threads(1)
rank, rendezvous, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=3)
model = torch.nn.Linear(50, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
method = isles.Method.streaming(sync_every=3, overlap=2)
world = isles.TorchWorld(timeout=seconds)
with isles.DiLoCo(model, optimizer, method, world=world, sync_initial=True):
    for step in range(10**9):
        if step == 20 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(50)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_killed_process_ends_the_programs_of_all_others(tmp_path):
    """Whole programs, as a user writes them, so that the end of the interpreter is part of the test."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = str(pathlib.Path(isles.__file__).parents[1])
    islands = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path / "rendezvous"), str(LONG)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root},
        )
        for rank in range(3)
    ]
    try:
        islands[1].communicate(timeout=120)
        said = {rank: islands[rank].communicate(timeout=120)[1] for rank in (0, 2)}
    finally:
        for island in islands:
            island.kill()
            island.wait()
    assert islands[1].returncode == -signal.SIGKILL
    for rank, text in said.items():
        assert islands[rank].returncode == 1, f"not an ordinary exception: {islands[rank].returncode}\n{text}"
        assert text.count("LostPeerError: ") == 1, text
        assert f"island {rank} lost" in text.splitlines()[-1], text
        assert "a connection broke" in text.splitlines()[-1], "a broken connection need not be waited for"


def die_within_a_round(rank, form, message):
    """Island 1 dies when it is about to send the n-th message of a round: to two others, a header each first."""
    world = isles.TorchWorld(timeout=LONG, reduction=form)
    world.start(payload()).wait()
    if rank == 1:
        calls = []
        begin = GlooTransport._begin

        def fatal(transport, what, part, other, kind):
            calls.append(what)
            if what == "send" and calls.count("send") == message:
                os.kill(os.getpid(), signal.SIGKILL)
            return begin(transport, what, part, other, kind)

        GlooTransport._begin = fatal
    first = after(world.start(payload(round=2)).wait)
    return first, after(world.start(payload(round=3)).wait), after(lambda: world.gather(b"hello"))


@pytest.mark.parametrize(
    ("form", "message"),
    [("all-gather", 1), ("all-gather", 2), ("all-gather", 3), ("reduce-scatter", 3), ("reduce-scatter", 5)],
)
def test_a_process_killed_within_a_round(form, message, tmp_path):
    outcomes = processes.run(die_within_a_round, 3, tmp_path, form, message)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].exit_code == 0, "a survivor crashed or hung"
        assert not outcomes[rank].error, outcomes[rank].trace
        for where, outcome in zip(("this round", "the next round", "gather"), outcomes[rank].value, strict=True):
            check_left(outcome, where)


def die_within_a_message(rank):
    """Island 1 dies when a large message has begun to go: gloo does not tell whoever waits for the rest of it."""
    torch_world.PROBE_SECONDS, torch_world.SLICE_BYTES = 1.0, 1 << 30
    world = isles.TorchWorld(timeout=LONG, reduction="all-gather")
    world.start(payload()).wait()
    if rank == 1:
        begin = GlooTransport._begin

        def fatal(transport, what, part, other, kind):
            begun = begin(transport, what, part, other, kind)
            if what == "send" and kind == Kind.BODY:
                os.kill(os.getpid(), signal.SIGKILL)
            return begun

        GlooTransport._begin = fatal
    codec = isles.codecs["fp32"]
    large = Payload(0, 2, codec, 1 << 26, 1.0, codec.encode(torch.ones(1 << 26)))
    first = after(world.start(large).wait)
    return first, after(world.start(payload(round=3)).wait), after(lambda: world.gather(b"hello"))


def test_a_process_killed_within_a_message(tmp_path):
    survivor, killed = processes.run(die_within_a_message, 2, tmp_path)
    assert killed.exit_code == -signal.SIGKILL
    assert survivor.exit_code == 0, "it crashed or hung"
    assert not survivor.error, survivor.trace
    for where, outcome in zip(("this round", "the next round", "gather"), survivor.value, strict=True):
        check_left(outcome, where)


# ---- silent


def stall(rank, form):
    world = isles.TorchWorld(timeout=TIMEOUT, reduction=form)
    world.start(payload()).wait()
    if rank == 1:
        time.sleep(1000)
    first = after(world.start(payload(round=2)).wait)
    return first, after(world.start(payload(round=3)).wait)


@pytest.mark.parametrize("form", FORMS)
def test_a_silent_peer_is_lost_after_the_time_out(form, tmp_path):
    outcomes = processes.run(stall, 3, tmp_path, form, until=(0, 2))
    for rank in (0, 2):
        assert outcomes[rank].reported, outcomes[rank]
        first, later = outcomes[rank].value
        check_lost(first)
        check_lost(later)
        assert later[0] < TIMEOUT / 2, "what is lost is not waited for again"
    # The last to notice may owe it to the first one's leaving; the first one has waited, and says how long.
    patient = max((outcomes[rank].value[0] for rank in (0, 2)), key=lambda first: first[0])
    assert patient[0] > TIMEOUT / 2
    assert any(f"{TIMEOUT:g} s" in outcomes[rank].value[0][2] for rank in (0, 2))


def never_comes(rank):
    if rank == 1:
        time.sleep(1000)
    return after(lambda: isles.TorchWorld(timeout=TIMEOUT))


def test_a_peer_that_never_makes_its_world(tmp_path):
    outcome = processes.run(never_comes, 2, tmp_path, until=(0,))[0]
    assert outcome.reported
    check_lost(outcome.value)


# ---- raising, and ending early


def raise_in_the_block(rank, stays):
    def trouble(step):
        if step == 4 and rank == 1:
            raise ZeroDivisionError("the user's own mistake")

    outcome = after(lambda: train(isles.TorchWorld(timeout=LONG), 20, trouble, overlap=1))
    if rank == 1 and stays:
        time.sleep(1000)
    return outcome


@pytest.mark.parametrize("stays", [False, True], ids=["ends", "stays"])
def test_an_exception_in_one_process(stays, tmp_path):
    outcomes = processes.run(raise_in_the_block, 3, tmp_path, stays, until=(0, 2) if stays else (0, 1, 2))
    for rank in (0, 2):
        assert outcomes[rank].reported
        assert outcomes[rank].exit_code == 0
        check_said(outcomes[rank].value, 3, "ZeroDivisionError: the user's own mistake")
    if not stays:
        assert outcomes[1].value[1:] == ("ZeroDivisionError", "the user's own mistake")


def end_early(rank):
    return after(lambda: train(isles.TorchWorld(timeout=LONG), 4 if rank == 0 else 8))


def test_loops_of_different_length(tmp_path):
    """One island is at its end and compares notes, the others send a fragment: nothing to average, and no crash."""
    outcomes = processes.run(end_early, 3, tmp_path)
    for outcome in outcomes:
        assert outcome.exit_code == 0, "crashed (negative) or hung (None)"
        assert outcome.value[1] in ("LostPeerError", "MismatchError"), outcome.value
    assert any(outcome.value[1] == "MismatchError" for outcome in outcomes), "the cause is known, and should be said"


# ---- threads


def no_island_threads():
    return not [thread for thread in threading.enumerate() if thread.name.startswith("island")]


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_run_local_raises_what_an_island_raised(kind, culprit):
    seen = {}

    def island(world):
        def trouble(step):
            if step == 4 and world.rank == culprit:
                raise kind("mistake")

        try:
            train(world, 20, trouble)
        except BaseException as error:
            seen[world.rank] = error
            raise

    with pytest.raises(kind, match="mistake"):
        isles.run_local(island, 3)
    assert no_island_threads()
    for rank in {0, 1, 2} - {culprit}:
        assert isinstance(seen[rank], isles.LostPeerError)
        assert f"island {culprit} left at step 3: {kind.__name__}: mistake" in str(seen[rank])


@pytest.mark.parametrize("short", [0, 1])
def test_run_local_with_an_island_that_ends_early(short):
    names = ["island 0, at step 4, is done", "island 1, at step 6, sends"]
    if short == 1:
        names = ["island 0, at step 6, sends", "island 1, at step 4, is done"]
    with pytest.raises(isles.MismatchError, match=f"{names[0]}.*{names[1]}.*same number of steps"):
        isles.run_local(lambda world: train(world, 4 if world.rank == short else 8), 2)
    assert no_island_threads()


def test_run_local_with_an_island_that_does_nothing():
    for action in (lambda world: world.gather(b"x"), lambda world: world.start(payload()).wait()):
        with pytest.raises(isles.LostPeerError, match="ended"):
            isles.run_local(lambda world, act=action: act(world) if world.rank == 1 else None, 2)
        with pytest.raises(isles.MismatchError, match="islands disagree"):
            isles.run_local(lambda world: world.gather(b"") if world.rank else world.start(payload()).wait(), 2)
    assert no_island_threads()


def test_run_local_works_again_after_a_failure():
    with pytest.raises(ZeroDivisionError):
        isles.run_local(lambda world: 1 // world.rank, 3)
    assert isles.run_local(lambda world: world.gather(b"%d" % world.rank), 3) == [[b"0", b"1", b"2"]] * 3
