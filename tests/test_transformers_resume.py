"""Hugging Face's Trainer resumes: after a kill both islands are as if nothing had happened.

Real Trainers and their checkpoints, in processes that share no process group; with several ranks in an island; on a
store, where the run has gone on meanwhile. A checkpoint that cannot be resumed from is refused in one sentence.
"""

from __future__ import annotations

import signal

import pytest
import torch

import isles
from isles.integrations.transformers import DiLoCoCallback
from tests import processes
from tests.small_trainer import METHOD, STEPS, On, losses_of, new_model, new_trainer
from tests.trainers import FIXED, LONG, WORLDS, be_a_rank_of_two, digest, same

# ---- resuming


def trains(island, place, name, folder, method, kill_at=None, resume=False):
    """Dropout, shuffled data, an evaluation now and then: everything that a resumed run has to find again."""
    world = WORLDS[name].join(place, island)
    callback = DiLoCoCallback(METHODS[method], world)
    killer = On("on_step_end", lambda state: signal.raise_signal(signal.SIGKILL), kill_at or -1)
    more = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 3}
    callbacks = [callback, *([killer] if island == 1 else [])]
    trainer = new_trainer(folder / str(island), island, *callbacks, model=new_model(dropout=0.1), **more)
    trainer.train(resume_from_checkpoint=resume or None)
    evaluated = {each["step"]: each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each}
    rates = [each["learning_rate"] for each in trainer.state.log_history if "learning_rate" in each]
    stats = callback.diloco.stats
    return losses_of(trainer), evaluated, rates, digest(trainer.model), (stats.sends, stats.bytes_sent)


METHODS = {
    "streaming": isles.Method.streaming(sync_every=4, fragments=3, overlap=2),
    "eager": isles.Method.eager(sync_every=3, fragments=2),
}


@pytest.mark.parametrize("world", FIXED)
@pytest.mark.parametrize("method", METHODS)
def test_after_a_kill_resumed_trainers_are_as_if_nothing_had_happened(world, method, tmp_path):
    def run(folder, **more):
        place = WORLDS[world].place(tmp_path)
        return processes.run(trains, 2, tmp_path, place, world, tmp_path / folder, method, *more.values(), ranks=0)

    whole = run("whole")
    assert [outcome.error for outcome in whole] == ["", ""], [outcome.trace for outcome in whole]
    killed = run("stopped", kill_at=7)
    assert killed[0].error == "LostPeerError", killed[0].text
    assert killed[1].exit_code == -signal.SIGKILL
    assert not (tmp_path / "stopped/0/checkpoint-10").exists()
    resumed = run("stopped", kill_at=None, resume=True)
    assert [outcome.error for outcome in resumed] == ["", ""], [outcome.trace for outcome in resumed]
    assert [outcome.value for outcome in resumed] == [outcome.value for outcome in whole]
    assert whole[0].value[0] != whole[1].value[0], "the islands had different data"
    assert whole[0].value[3] == whole[1].value[3]


def on_a_store(island, url, folder, kill_at=None, resume=False):
    """Rounds go on without an island that is missing. What the training found at its first step, and what it became."""
    found = {}

    def look(state):
        if not found:
            moments = trainer.optimizer.optimizer.state_dict()["state"]
            moments = {number: values["exp_avg"].clone() for number, values in moments.items()}
            found.update(step=state.global_step, weights=digest(trainer.model), moments=moments)

    killer = On("on_step_end", lambda state: signal.raise_signal(signal.SIGKILL), kill_at or -1)
    callback = DiLoCoCallback(METHOD, isles.StoreWorld(url, patience=0.1, timeout=LONG))
    more = {"save_strategy": "steps", "save_steps": 5}
    trainer = new_trainer(folder / str(island), island, callback, On("on_step_begin", look), killer, **more)
    trainer.train(resume_from_checkpoint=resume or None)
    rates = {each["step"]: each["learning_rate"] for each in trainer.state.log_history if "learning_rate" in each}
    return found, digest(trainer.model), rates, callback.diloco.stats.sends


def test_on_a_store_a_resumed_trainer_is_a_new_island_of_the_run(tmp_path):
    """Step, data, learning rate and moments are the checkpoint's; the weights are the run's, which has gone on."""
    url = str(tmp_path / "store")
    (killed,) = processes.run(on_a_store, 1, tmp_path, url, tmp_path, 7, ranks=0)
    assert killed.exit_code == -signal.SIGKILL
    _, run, rates, _ = on_a_store(1, url, tmp_path)
    found, became, resumed_rates, sends = on_a_store(0, url, tmp_path, resume=True)
    assert found["step"] == 5
    assert found["weights"] == run, "of the island that went on, not of the checkpoint"
    saved = torch.load(tmp_path / "0/checkpoint-5/optimizer.pt", weights_only=True)["state"]
    assert same(found["moments"], {number: values["exp_avg"] for number, values in saved.items()})
    assert resumed_rates == rates, "Trainer's log of the first five steps, and the same schedule after them"
    assert became != run
    assert sends > 0


def test_a_checkpoint_without_the_state_of_isles(tmp_path):
    new_trainer(tmp_path, save_strategy="steps", save_steps=5, max_steps=5).train()
    with pytest.raises(ValueError, match=r"checkpoint-5 has no isles_0\.pt") as refused:
        new_trainer(tmp_path, 0, DiLoCoCallback(METHOD)).train(resume_from_checkpoint=True)
    assert "DiLoCoCallback" in str(refused.value)


def test_the_checkpoint_of_another_island(tmp_path):
    new_trainer(tmp_path, 0, DiLoCoCallback(METHOD), save_strategy="steps", save_steps=5, max_steps=5).train()
    path = tmp_path / "checkpoint-5/isles_0.pt"
    torch.save({**torch.load(path), "island": 1}, path)
    with pytest.raises(ValueError, match=r"of island 1, this is island 0.*folder of its own"):
        new_trainer(tmp_path, 0, DiLoCoCallback(METHOD)).train(resume_from_checkpoint=True)


# ---- several ranks in an island


def on_the_cpu(storage, location):
    """What torch.load makes of "cpu:0", where Trainer before 5.18 wants the optimizer if DDP runs on a CPU. torch knows
    "cuda:0" and "cpu", so the same Trainer resumes on accelerators.
    """
    return storage if location.startswith("cpu:") else None


def of_ranks(rank, place, name, folder, resume):
    island = be_a_rank_of_two(rank)
    torch.serialization.register_package(0, lambda storage: None, on_the_cpu)
    world = WORLDS[name].join(place, island)
    callback = DiLoCoCallback(METHOD, world)
    more = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 6, "ddp_backend": "gloo"}
    trainer = new_trainer(folder / str(island), island, callback, model=new_model(dropout=0.1), **more)
    trainer.train(resume_from_checkpoint=str(folder / str(island) / "checkpoint-6") if resume else None)
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    numel = sum(parameter.numel() for parameter in trainer.model.parameters())
    return digest(trainer.model), callback.diloco.stats.payload_parameters, numel, losses_of(trainer)


@pytest.mark.parametrize("world", FIXED)
def test_ranks_of_an_island_share_out_what_is_sent_and_resume(world, tmp_path):
    """Two islands of two ranks, under Trainer's own DDP."""
    first, second = (
        processes.values(of_ranks, 4, tmp_path, WORLDS[world].place(tmp_path), world, tmp_path, resume, ranks=2)
        for resume in (False, True)
    )
    assert second == first, "resumed at step 6"
    assert len({digest_ for digest_, _, _, _ in first}) == 1, "one model on all ranks"
    for _, sent, numel, _ in first:
        rounds = STEPS / METHOD.sync_every
        assert sent == pytest.approx(rounds * numel / 2, rel=0.01), "every value once, by one of the ranks"
