"""An island that leaves says so, and why: the others learn it at once, not after a time-out, and can tell their users.

Whoever leaves the with block by an exception stays alive here, asleep, so that no connection breaks; the worlds have a
time-out that is longer than `processes.run` waits for anybody. Islands whose loops have unlike lengths are told who was
where. The same for the threads of `run_local`.
"""

import re
import time

import pytest
import torch

import isles
from tests import processes

torch.set_num_threads(1)
LONG = 600.0
"""A time-out that nobody lives to see."""


def train(world, steps, after_step=lambda step: None, **knobs):
    """A training in which something goes wrong after a step: everything of that step has been sent then."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = isles.Method(**{"sync_every": 2, "fragments": 1, **knobs})
    with isles.DiLoCo(model, optimizer, method, world=world):
        for step in range(1, steps + 1):
            model(torch.ones(8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(step)


def attempt(action):
    """(name of the exception, message) of an action that should fail."""
    try:
        action()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# ---- by an exception

MISTAKES = {
    "exception": (ZeroDivisionError, "the user's own mistake", "ZeroDivisionError: the user's own mistake"),
    "Ctrl-C": (KeyboardInterrupt, "", "KeyboardInterrupt"),
    "exit": (SystemExit, "3", "SystemExit"),
}


def mistake_of(kind, culprit, rank):
    def trouble(step):
        if (rank, step) == (culprit, 4):
            error, text, _ = MISTAKES[kind]
            raise error(text)

    return trouble


def check_told(outcome, kind):
    error, message = outcome
    assert error == "LostPeerError", f"{error}: {message}"
    assert re.search(r"island 1\b.*\bstep 4\b", message), message
    assert MISTAKES[kind][2] in message, message


def leave_and_stay(rank, kind, overlap):
    knobs = {"overlap": overlap}
    outcome = attempt(lambda: train(isles.TorchWorld(timeout=LONG), 40, mistake_of(kind, 1, rank), **knobs))
    if rank == 1:
        time.sleep(1000)
    return outcome


@pytest.mark.parametrize(("kind", "overlap"), [("exception", 0), ("exception", 1), ("Ctrl-C", 1)])
def test_an_island_that_leaves_by_an_exception_tells_the_others_though_it_lives(kind, overlap, tmp_path):
    outcomes = processes.run(leave_and_stay, 3, tmp_path, kind, overlap, until=(0, 2))
    for rank in (0, 2):
        assert outcomes[rank].reported, "it waits for the time-out"
        check_told(outcomes[rank].value, kind)


def fail_before_anything_is_sent(rank):
    """All others are at the end of their loops when they hear of it: they have sent nothing and waited for nothing."""
    outcome = attempt(
        lambda: train(isles.TorchWorld(timeout=LONG), 6, mistake_of("exception", 1, rank), sync_every=100)
    )
    if rank == 1:
        time.sleep(1000)
    return outcome


def test_an_island_that_leaves_before_the_first_round_tells_those_who_finish(tmp_path):
    outcomes = processes.run(fail_before_anything_is_sent, 2, tmp_path, until=(0,))
    assert outcomes[0].reported, "it waits for the time-out"
    check_told(outcomes[0].value, "exception")


@pytest.mark.parametrize("kind", MISTAKES)
def test_an_island_in_a_thread_tells_the_others(kind):
    seen = {}

    def island(world):
        try:
            train(world, 40, mistake_of(kind, 1, world.rank))
        except BaseException as error:
            seen[world.rank] = type(error).__name__, str(error)
            raise

    with pytest.raises(MISTAKES[kind][0]):
        isles.run_local(island, 3)
    for rank in (0, 2):
        check_told(seen[rank], kind)


# ---- by an end of its loop

LENGTHS = {
    "a round too early": ({0: 4, 1: 8}, {"sync_every": 2}),
    "a round too late": ({0: 8, 1: 4}, {"sync_every": 2}),
    "in the middle of a period": ({0: 4, 1: 5}, {"sync_every": 100}),
    "with an overlap": ({0: 9, 1: 7}, {"sync_every": 4, "overlap": 2}),
}


def check_lengths(outcome, case):
    """Both islands and both steps: of the longer loop the step at which it found out, which is not its last."""
    lengths, _ = LENGTHS[case]
    error, message = outcome
    assert error in ("MismatchError", "LostPeerError"), f"{error}: {message}"
    shorter, longer = sorted(lengths.values())
    steps = {int(number) for number in re.findall(r"\d+", message)}
    assert re.search(r"islands? 0\b", message), message
    assert re.search(r"(islands?|and) 1\b", message), message
    assert shorter in steps, message
    assert steps & set(range(shorter + 1, longer + 1)), message
    assert "same number of steps" in message, message


def unlike_lengths(rank):
    outcomes = {}
    for case, (lengths, knobs) in LENGTHS.items():
        outcomes[case] = attempt(lambda: train(isles.TorchWorld(timeout=LONG), lengths[rank], **knobs))  # noqa: B023
    return outcomes


@pytest.fixture(scope="module")
def by_process(tmp_path_factory):
    return processes.run(unlike_lengths, 2, tmp_path_factory.mktemp("lengths"))


@pytest.mark.parametrize("case", LENGTHS)
def test_loops_of_unlike_length_in_processes(case, by_process):
    for outcome in by_process:
        assert outcome.reported, f"exit code {outcome.exit_code} (None: it hung)"
        check_lengths(outcome.value[case], case)


@pytest.mark.parametrize("case", LENGTHS)
def test_loops_of_unlike_length_in_threads(case):
    lengths, knobs = LENGTHS[case]
    outcomes = isles.run_local(lambda world: attempt(lambda: train(world, lengths[world.rank], **knobs)), 2)
    for outcome in outcomes:
        check_lengths(outcome, case)


def three_of_unlike_length(rank):
    return attempt(lambda: train(isles.TorchWorld(timeout=LONG), 4 if rank == 2 else 8))


def test_an_island_of_three_whose_loop_is_shorter_is_named_on_all(tmp_path):
    for outcome in processes.run(three_of_unlike_length, 3, tmp_path):
        assert outcome.reported, f"exit code {outcome.exit_code} (None: it hung)"
        error, message = outcome.value
        assert error in ("MismatchError", "LostPeerError"), f"{error}: {message}"
        assert re.search(r"(islands?|and) 2\b", message), message
        assert re.search(r"\b4\b", message), message
        assert "same number of steps" in message, message
