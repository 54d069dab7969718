"""Lightning's Trainer as an island: two of them are the same two islands as a plain loop with isles.DiLoCo.

Real Trainers with a small module, in two processes that share no process group. They validate and save global weights,
resume exactly after one of them was killed, and leave loudly. Without the callback nothing differs from Lightning.
"""

from __future__ import annotations

import logging
import re
import signal
import time
import warnings

import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader

import isles
from isles.integrations.lightning import DiLoCoCallback
from tests import processes
from tests.trainers import FIXED, WORLDS, be_a_rank_of_two, digest, same, values_of

torch.set_num_threads(1)
warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
BATCHES, EPOCHS, ACCUMULATE = 8, 3, 2
STEPS = EPOCHS * BATCHES // ACCUMULATE
METHOD = isles.Method.streaming(sync_every=4, fragments=3, overlap=2, codec="fp32")  # 4 bits would hide small mistakes


class Module(lightning.LightningModule):
    def __init__(self, optimizers=1):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.num_optimizers = optimizers

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def training_step(self, batch, index):
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self(batch).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        if self.num_optimizers > 1:
            return [optimizer, torch.optim.SGD(self.parameters(), lr=0.1)]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(island, count=BATCHES):
    return torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(100 + island))


def loader(island, count=BATCHES):
    return DataLoader(batches(island, count).flatten(0, 1), batch_size=4)


class Record(Logger):
    name = version = "record"

    def __init__(self):
        super().__init__()
        self.seen = []

    def log_hyperparams(self, *args, **kwargs): ...

    def log_metrics(self, metrics, step=None):
        self.seen.append((step, dict(metrics)))


def new_trainer(folder, *callbacks, **more):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "num_sanity_val_steps": 0}
    settings = {
        "max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.5, "accelerator": "cpu",
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks), "log_every_n_steps": 1,
    }  # fmt: skip
    return lightning.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**quiet, **settings, **more})


class On(Callback):
    """Does something at one hook."""

    def __init__(self, hook, action):
        setattr(self, hook, lambda trainer, module, *_: action(trainer, module))


# ---- the same as a plain loop


def as_trainer(island, place, name, folder, precision):
    world, module = WORLDS[name].join(place, island), Module()
    callback = DiLoCoCallback(METHOD, world, weight=1.0 + island)
    new_trainer(folder / str(island), callback, precision=precision).fit(module, loader(island))
    world.close()
    return digest(module), callback.diloco.step_count, callback.diloco.stats.bytes_sent


def as_loop(island, place, name, precision):
    module, world = Module(), WORLDS[name].join(place, island)
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    with isles.DiLoCo(module, optimizer, METHOD, world=world, weight=1.0 + island) as diloco:
        for batch in [pair for _ in range(EPOCHS) for pair in batches(island).split(ACCUMULATE)]:
            for part in batch:
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = module(part).square().mean()
                (loss / ACCUMULATE).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    world.close()
    return digest(module), diloco.step_count, diloco.stats.bytes_sent


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_trainers_are_the_same_two_islands_as_a_plain_loop(precision, world, tmp_path):
    """With gradient accumulation, a learning-rate schedule, clipping and unequal weights."""
    loops = processes.values(as_loop, 2, tmp_path, WORLDS[world].place(tmp_path), world, precision, ranks=0)
    place = WORLDS[world].place(tmp_path)
    trainers = processes.values(as_trainer, 2, tmp_path, place, world, tmp_path, precision, ranks=0)
    assert [found[:2] for found in trainers] == [found[:2] for found in loops]
    assert trainers[0][0] == trainers[1][0], "one model in the end"
    assert trainers[0][1] == STEPS, "optimizer steps, not batches"
    assert trainers[0][2] > 0


# ---- resuming

METHODS = {
    "streaming": isles.Method.streaming(sync_every=5, fragments=3, overlap=2),
    "eager": isles.Method.eager(sync_every=3, fragments=2),
}


def trains(island, place, name, folder, method, kill_at=None, resume=False):
    world, module, losses = WORLDS[name].join(place, island), Module(), {}
    callback = DiLoCoCallback(METHODS[method], world)

    def note(trainer, module):
        losses[trainer.fit_loop.total_batch_idx] = trainer.callback_metrics["loss"].item()
        if island == 1 and trainer.global_step == kill_at:
            signal.raise_signal(signal.SIGKILL)

    saver = ModelCheckpoint(folder / str(island), save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    trainer = new_trainer(folder, callback, On("on_train_batch_end", note), saver)
    path = folder / str(island) / "epoch=0.ckpt" if resume else None
    trainer.fit(module, loader(island), loader(9, 2), ckpt_path=path)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    stats = callback.diloco.stats
    return losses, rate, digest(module), (callback.diloco.step_count, stats.sends, stats.bytes_sent)


@pytest.mark.parametrize("world", FIXED)
@pytest.mark.parametrize("method", METHODS)
def test_after_a_kill_resumed_trainers_are_as_if_nothing_had_happened(method, world, tmp_path):
    def run(folder, **more):
        place = WORLDS[world].place(tmp_path)
        return processes.run(trains, 2, tmp_path, place, world, tmp_path / folder, method, *more.values(), ranks=0)

    whole = run("whole")
    assert [outcome.error for outcome in whole] == ["", ""], [outcome.trace for outcome in whole]
    killed = run("stopped", kill_at=6)
    assert killed[0].error == "LostPeerError", killed[0].text
    assert killed[1].exit_code == -signal.SIGKILL
    assert not (tmp_path / "stopped/0/epoch=1.ckpt").exists()
    resumed = run("stopped", kill_at=None, resume=True)
    assert [outcome.error for outcome in resumed] == ["", ""], [outcome.trace for outcome in resumed]
    for after, before in zip(resumed, whole, strict=True):
        assert after.value[0] == {step: loss for step, loss in before.value[0].items() if step >= BATCHES}
        assert after.value[1:] == before.value[1:]
    assert whole[0].value[2] == whole[1].value[2]


def test_a_checkpoint_without_the_state_of_isles(tmp_path):
    trainer = new_trainer(tmp_path)
    trainer.fit(Module(), loader(0))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"plain\.ckpt has no state of isles"):
        new_trainer(tmp_path, DiLoCoCallback(METHOD), max_epochs=9).fit(
            Module(), loader(0), ckpt_path=tmp_path / "plain.ckpt"
        )


# ---- several ranks in an island


def of_ranks(rank, place, name, folder, resume):
    island = be_a_rank_of_two(rank)
    world, module = WORLDS[name].join(place, island), Module()
    callback = DiLoCoCallback(METHOD, world)
    saver = ModelCheckpoint(folder / str(island), save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    ranks = {"devices": 2, "strategy": DDPStrategy(process_group_backend="gloo"), "accumulate_grad_batches": 1}
    trainer = new_trainer(folder, callback, saver, **ranks)
    path = folder / str(island) / "epoch=0.ckpt" if resume else None
    trainer.fit(module, loader(island), loader(9, 2), ckpt_path=path)
    numel = sum(parameter.numel() for parameter in module.parameters())
    return digest(module), callback.diloco.stats.payload_parameters, numel, callback.diloco.step_count


@pytest.mark.parametrize("world", FIXED)
def test_ranks_of_an_island_share_out_what_is_sent_and_resume(world, tmp_path):
    """Two islands of two ranks, under Lightning's own DDP."""
    first, second = (
        processes.values(of_ranks, 4, tmp_path, WORLDS[world].place(tmp_path), world, tmp_path, resume, ranks=2)
        for resume in (False, True)
    )
    assert second == first, "resumed after the first epoch"
    assert len({digest_ for digest_, _, _, _ in first}) == 1, "one model on all ranks"
    for _, sent, numel, steps in first:
        assert steps == STEPS, "every rank has half of the batches, and takes a step for each"
        assert sent == pytest.approx(steps / METHOD.sync_every * numel / 2, rel=0.05)


# ---- validation and checkpoints


@pytest.mark.parametrize("weights_only", [False, True])
def test_what_is_validated_and_saved_are_the_global_weights(weights_only, tmp_path):
    callback, module, seen = DiLoCoCallback(METHOD), Module(), {}

    def note(what):
        return lambda trainer, module: seen.setdefault(what, {}).update({trainer.global_step: values_of(module)})

    def expect(trainer, module):
        note("own")(trainer, module)
        with callback.diloco.global_model():
            note("global")(trainer, module)

    def save_in_between(trainer, module):
        trainer.save_checkpoint(tmp_path / f"validated-{trainer.global_step}.ckpt", weights_only)

    watchers = [
        On("on_train_batch_end", expect), On("on_validation_batch_start", note("validated")),
        On("on_validation_epoch_end", save_in_between), On("on_train_batch_start", note("next")),
    ]  # fmt: skip
    saver = ModelCheckpoint(
        tmp_path, save_top_k=-1, every_n_train_steps=3, filename="{step}", save_weights_only=weights_only
    )
    trainer = new_trainer(tmp_path, callback, *watchers, saver, val_check_interval=4)
    trainer.fit(module, loader(0), loader(9, 2))
    assert sorted(seen["validated"]) == [2, 4, 6, 8, 10, 12]
    for step, values in seen["validated"].items():
        assert same(values, seen["global"][step])
        assert same(load(tmp_path / f"validated-{step}.ckpt"), seen["global"][step])
    for step, values in seen["next"].items():
        if step:
            assert same(values, seen["own"][step]), "after a validation the island's own are back"
    for step in (3, 6, 9, 12):
        assert same(load(tmp_path / f"step={step}.ckpt"), seen["global"][step])
    assert not same(seen["own"][6], seen["global"][6])
    assert "save_checkpoint" not in vars(trainer), "the trainer is as it was"


def load(path):
    return torch.load(path, weights_only=False)["state_dict"]


# ---- leaving


def goes_wrong(island, place, name, folder, where):
    world = WORLDS[name].join(place, island)

    def trouble(trainer, module):
        if trainer.global_step >= 4:
            raise ZeroDivisionError("the user's own mistake")

    callbacks = [DiLoCoCallback(METHOD, world), *([On(where, trouble)] if island == 1 else [])]
    trainer = new_trainer(folder / str(island), *callbacks, max_epochs=100)
    try:
        trainer.fit(Module(), loader(island), loader(9, 2))
    except ZeroDivisionError:
        time.sleep(1000)  # alive, so that no connection breaks


@pytest.mark.parametrize("world", FIXED)
@pytest.mark.parametrize("where", ["on_train_batch_end", "on_validation_batch_end"])
def test_a_trainer_that_is_left_by_an_exception_tells_the_others(where, world, tmp_path):
    place = WORLDS[world].place(tmp_path)
    outcome = processes.run(goes_wrong, 2, tmp_path, place, world, tmp_path, where, until=(0,), ranks=0)[0]
    assert outcome.error == "LostPeerError", outcome.text
    assert re.search(r"island 1 left at step 4: ZeroDivisionError: the user", outcome.message), outcome.message


# ---- without it, and beside it


def test_without_the_callback_nothing_differs_and_with_it_the_inner_steps_are_lightnings(tmp_path):
    """One island alone that never comes to a round: the same losses."""
    runs = []
    for callbacks in ([], [DiLoCoCallback(isles.Method.diloco(sync_every=100))]):
        record, module = Record(), Module()
        new_trainer(tmp_path, *callbacks, logger=record).fit(module, loader(0))
        runs.append([metrics["loss"] for _, metrics in record.seen if "loss" in metrics])
    assert runs[0] == runs[1]
    assert len(runs[0]) > 1


def test_statistics_go_to_the_logger(tmp_path):
    record, module = Record(), Module()
    new_trainer(tmp_path, DiLoCoCallback(METHOD), logger=record, log_every_n_steps=2).fit(module, loader(0))
    logged = [(step, metrics["isles/sends"]) for step, metrics in record.seen if "isles/sends" in metrics]
    assert [step for step, _ in logged] == [2, 4, 6, 8, 10, 12]
    assert logged[-1][1] > 0


def test_several_optimizers_are_refused(tmp_path):
    module = Module(optimizers=2)
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="one optimizer, and this module has 2"):
        new_trainer(tmp_path, DiLoCoCallback(METHOD), accumulate_grad_batches=1, gradient_clip_val=None).fit(
            module, loader(0)
        )
