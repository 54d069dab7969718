"""Hugging Face's Trainer as an island: two of them are the same two islands as a plain loop with isles.DiLoCo.

Real Trainers with small models, in two processes that share no process group, with gradient accumulation, clipping,
fp16's skipped steps, adapters. Without the callback nothing differs from Trainer. What it shows of the weights is in
test_transformers_weights.py, what it finds again after a kill in test_transformers_resume.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import TrainerCallback, get_scheduler

import isles
from isles.integrations.transformers import DiLoCoCallback
from tests import processes
from tests.small_trainer import ACCUMULATE, BATCH, METHOD, STEPS, On, new_model, new_trainer
from tests.trainers import WORLDS, digest, rows, same, values_of

# ---- the same as a plain loop


def as_trainer(island, place, name, folder):
    world = WORLDS[name].join(place, island)
    callback = DiLoCoCallback(METHOD, world, weight=1.0 + island)
    trainer = new_trainer(folder / str(island), island, callback)
    trainer._get_train_sampler = lambda *_: SequentialSampler(trainer.train_dataset)  # the argument has many names
    trainer.train()
    world.close()
    return digest(trainer.model), callback.diloco.step_count, callback.diloco.stats.bytes_sent


def as_loop(island, place, name):
    model, world = new_model(), WORLDS[name].join(place, island)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    batches = iter(rows(island, 64).split(BATCH))
    with isles.DiLoCo(model, optimizer, METHOD, world=world, weight=1.0 + island) as diloco:
        for _ in range(STEPS):
            for _ in range(ACCUMULATE):
                ids = next(batches)
                (model(input_ids=ids, labels=ids).loss / ACCUMULATE).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    world.close()
    return digest(model), diloco.step_count, diloco.stats.bytes_sent


@pytest.mark.parametrize("world", WORLDS)
def test_two_trainers_are_the_same_two_islands_as_a_plain_loop(world, tmp_path):
    """With gradient accumulation, a learning-rate schedule, clipping and unequal weights."""
    loops = processes.values(as_loop, 2, tmp_path, WORLDS[world].place(tmp_path), world, ranks=0)
    trainers = processes.values(as_trainer, 2, tmp_path, WORLDS[world].place(tmp_path), world, tmp_path, ranks=0)
    assert [found[:2] for found in trainers] == [found[:2] for found in loops]
    assert trainers[0][0] == trainers[1][0], "one model in the end"
    assert trainers[0][1] == STEPS, "optimizer steps, not micro-batches"
    assert trainers[0][2] > 0


# ---- without it, and beside it


def test_without_the_callback_nothing_differs(tmp_path):
    plain = new_trainer(tmp_path)
    plain.train()
    removed = new_trainer(tmp_path, 0, DiLoCoCallback(METHOD))
    removed.remove_callback(DiLoCoCallback)
    removed.train()
    assert removed.state.log_history[:-1] == plain.state.log_history[:-1]
    assert same(values_of(removed.model), values_of(plain.model))


def test_with_it_the_inner_steps_are_those_of_trainer(tmp_path):
    """One island alone that never comes to a round: the same losses, gradient norms and learning rates."""
    plain, alone = new_trainer(tmp_path), new_trainer(tmp_path, 0, DiLoCoCallback(isles.Method.diloco(sync_every=100)))
    plain.train()
    alone.train()
    for entry, expected in zip(alone.state.log_history[:-1], plain.state.log_history[:-1], strict=True):
        assert {name: value for name, value in entry.items() if not name.startswith("isles/")} == expected
    assert alone.state.log_history[0]["isles/sends"] == 0


def test_statistics_go_through_trainers_own_logging(tmp_path):
    seen = []

    class Reporter(TrainerCallback):
        """In front of the callback, as those of TensorBoard and others are."""

        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer = new_trainer(tmp_path, 0, Reporter(), DiLoCoCallback(METHOD), eval_strategy="steps", eval_steps=6)
    trainer.train()
    logged = [entry for entry in seen if "loss" in entry]
    assert [entry["isles/sends"] for entry in logged] == sorted(entry["isles/sends"] for entry in logged)
    assert logged[-1]["isles/sends"] > 0
    assert not any(name.startswith("isles/") for entry in seen if "eval_loss" in entry for name in entry)
    assert trainer.state.log_history[-3]["isles/applies"] == logged[-1]["isles/applies"]


def skips_some(island, place, name, folder, optim):
    """fp16's gradient scaler, on a CPU: on island 1 two steps overflow."""
    world = WORLDS[name].join(place, island)
    callback = DiLoCoCallback(METHOD, world)
    trainer = new_trainer(folder / str(island), island, callback, optim=optim)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.accelerator.native_amp = True
    skipped = []

    def overflow(state):
        if island == 1 and state.global_step in (3, 4):
            trainer.model.transformer.wte.weight.grad.fill_(torch.inf)

    trainer.add_callback(On("on_substep_end", overflow))
    trainer.add_callback(
        On("on_step_end", lambda _: skipped.append(bool(trainer.accelerator.optimizer_step_was_skipped)))
    )
    trainer.train()
    world.close()
    return digest(trainer.model), callback.diloco.step_count, sum(skipped)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("optim", "skipped"), [("adamw_torch", 2), ("adamw_torch_fused", 0)])
def test_steps_that_a_gradient_scaler_skips_are_counted(optim, skipped, world, tmp_path):
    """A fused optimizer is called for them too, and leaves the weights alone."""
    place = WORLDS[world].place(tmp_path)
    one, other = processes.values(skips_some, 2, tmp_path, place, world, tmp_path, optim, ranks=0)
    assert (one[1], other[1]) == (STEPS, STEPS)
    assert (one[2], other[2]) == (0, skipped), "it did overflow"
    assert one[0] == other[0]


# ---- adapters


def with_adapters(island, place, name, folder):
    from peft import LoraConfig, get_peft_model

    world = WORLDS[name].join(place, island)
    model = get_peft_model(new_model(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    callback = DiLoCoCallback(dataclasses.replace(METHOD, fragments=2), world)  # adapters are in the two layers only
    more = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    best = {"load_best_model_at_end": True}
    trainer = new_trainer(folder / str(island), island, callback, model=model, **more, **best)
    globals_ = {}

    def expect(state):
        with callback.diloco.global_model():
            globals_[state.global_step] = {n: v for n, v in values_of(trainer.model).items() if "lora" in n}

    trainer.add_callback(On("on_step_end", expect))
    trainer.train()
    saved = load_file(folder / str(island) / "checkpoint-8/adapter_model.safetensors")
    inside = {name.replace(".default", ""): value for name, value in globals_[8].items()}
    assert saved.keys() == inside.keys()
    assert all(torch.equal(saved[name], inside[name]) for name in saved), "the adapter that was saved is the global one"
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return digest(model), trained, callback.diloco.stats.payload_parameters, callback.diloco.stats.sends


@pytest.mark.parametrize("world", WORLDS)
def test_adapters_are_synchronised_and_nothing_else(world, tmp_path):
    place = WORLDS[world].place(tmp_path)
    one, other = processes.values(with_adapters, 2, tmp_path, place, world, tmp_path, ranks=0)
    assert one == other
    _, trained, sent, sends = one
    assert 0 < sent <= trained * sends
    assert trained < 1000


# ---- what cannot work


@pytest.mark.parametrize(
    ("more", "message"), [({"auto_find_batch_size": True}, "auto_find_batch_size=True")], ids=["batch size"]
)
def test_what_cannot_work_is_one_sentence(more, message, tmp_path):
    with pytest.raises(ValueError, match=message) as refused:
        new_trainer(tmp_path, 0, DiLoCoCallback(METHOD), **more).train()
    assert len(str(refused.value).splitlines()) == 1


def test_a_callback_that_no_trainer_calls():
    with pytest.raises(RuntimeError, match=r"transformers\.Trainer"):
        DiLoCoCallback(METHOD).on_train_begin(None, None, None)
