"""A run that is stopped and resumed in new processes is the same run, bit for bit, over a real process group.

Two islands train in two processes and save with torch.save at a step with fragments in flight; two new processes load
and go on. Their parameters at every later step, and the model that finish() leaves, are those of a run that never
stopped. The inner optimizer has momentum, the codec is e3m0 or a sparse one, rounding is stochastic in places, and one
island has more weight than the other.
"""

import hashlib

import pytest
import torch
from torch import nn

import isles
from tests import processes

torch.set_num_threads(1)
STEPS = 14

METHODS = {
    "overlap, three in flight": isles.Method.streaming(sync_every=5, fragments=4, overlap=4),
    "stochastic, error feedback": isles.Method.streaming(
        sync_every=4, fragments=3, overlap=3, codec="int4", rounding="stochastic", error_feedback=True
    ),
    "delayed": isles.Method.delayed(sync_every=3, fragments=2, codec="dare"),
    "delayed by two rounds": isles.Method.delayed(sync_every=2, fragments=3, delay_rounds=2),
    "eager": isles.Method.eager(sync_every=3, fragments=2),
    "eager by two rounds": isles.Method.eager(sync_every=2, fragments=2, delay_rounds=2, mixing=0.5, codec="topk"),
}


def new_island():
    torch.manual_seed(0)
    layers = [nn.Linear(12, 12) for _ in range(3)]
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), *layers, nn.Linear(12, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def digest(model):
    total = hashlib.sha256()
    for tensor in model.state_dict().values():
        total.update(tensor.numpy().tobytes())
    return total.hexdigest()[:16]


def train(name, world, save_at=(), saved=None, folder=None):
    """From the beginning, or from a saved state, to the end; the notes are digests by step."""
    model, optimizer = new_island()
    notes = {}
    if saved is not None:
        # The model of a new process is not the one that was saved: all of it has to come from the state.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
    diloco = isles.DiLoCo(model, optimizer, METHODS[name], world=world, weight=1.0 + 2 * world.rank)
    with diloco:
        if saved is not None:
            diloco.load_state_dict(saved)
        while diloco.step_count < STEPS:
            step = diloco.step_count + 1
            generator = torch.Generator().manual_seed(100 * world.rank + step)
            model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            notes[step] = digest(model)
            if step in save_at:
                torch.save(diloco.state_dict(), folder / f"{name}-{step}-{world.rank}.pt")
        with diloco.global_model():
            notes["global"] = digest(model)
    notes["end"] = digest(model)
    notes["stats"] = (diloco.stats.sends, diloco.stats.applies, diloco.stats.bytes_sent, diloco.stats.bytes_received)
    return notes


def never_stops(rank, folder, save_at):
    world = isles.TorchWorld(timeout=60)
    return {name: train(name, world, save_at, folder=folder) for name in METHODS}


def goes_on(rank, folder, step):
    world = isles.TorchWorld(timeout=60)
    notes = {}
    for name in METHODS:
        saved = torch.load(folder / f"{name}-{step}-{rank}.pt", weights_only=True)
        notes[name] = train(name, world, saved=saved)
    return notes


def in_flight(folder, name, step):
    saved = torch.load(folder / f"{name}-{step}-0.pt", weights_only=True)
    return sum(len(fragment["rounds"]) for fragment in saved["fragments"])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    whole = processes.values(never_stops, 2, folder, folder, ())
    assert processes.values(never_stops, 2, folder, folder, tuple(range(1, STEPS))) == whole, "saving changed the run"
    return folder, whole


@pytest.mark.parametrize("steps", [(1, 2, 3), (5, 6, 9), (7, 10, 13)], ids=str)
def test_resuming_in_new_processes_is_never_having_stopped(uninterrupted, steps):
    folder, whole = uninterrupted
    for step in steps:
        resumed = processes.values(goes_on, 2, folder, folder, step)
        for rank in range(2):
            for name, notes in resumed[rank].items():
                expected = {key: note for key, note in whole[rank][name].items() if isinstance(key, str) or key > step}
                different = [key for key in expected if notes[key] != expected[key]]
                assert not different, f"{name}, stopped after step {step}: island {rank} differs at {different}"


def test_there_was_something_in_flight(uninterrupted):
    """Otherwise the test above would be an easy one."""
    folder, whole = uninterrupted
    for name in METHODS:
        assert max(in_flight(folder, name, step) for step in range(1, STEPS)) >= 2, name
        assert whole[0][name]["end"] == whole[1][name]["end"]
        assert whole[0][name][STEPS - 3] != whole[1][name][STEPS - 3], "the islands did not train on different data"


def resumes_elsewhere(rank, folder):
    """Island 1 takes the checkpoint of another step."""
    world = isles.TorchWorld(timeout=60)
    saved = torch.load(folder / f"eager-{5 + rank}-{rank}.pt", weights_only=True)
    train("eager", world, saved=saved)


def test_checkpoints_of_different_steps(uninterrupted, tmp_path):
    for outcome in processes.run(resumes_elsewhere, 2, tmp_path, uninterrupted[0]):
        assert outcome.error == "MismatchError", outcome.text
        assert "5" in outcome.message
        assert "6" in outcome.message
