"""Hugging Face's Trainer as an island: two of them are the same two islands as a plain loop with isles.DiLoCo.

Real Trainers with small models, in two processes that share no process group. They evaluate and save global weights,
resume exactly after one of them was killed, and leave loudly. Without the callback nothing differs from Trainer.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, get_scheduler

import isles
from isles.integrations.transformers import DiLoCoCallback
from tests import processes
from tests.trainers import FIXED, LONG, WORLDS, be_a_rank_of_two, digest, rows, same, values_of

torch.set_num_threads(1)
STEPS, BATCH, ACCUMULATE = 12, 2, 2
METHOD = isles.Method.streaming(sync_every=4, fragments=3, overlap=2, codec="fp32")  # 4 bits would hide small mistakes


def new_model(dropout=0.0):
    torch.manual_seed(0)
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, **drop, **ends))


def dataset(island, count=64):
    return [{"input_ids": row, "labels": row} for row in rows(island, count)]


def arguments(folder, **more):
    settings = {
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": 1e-2, "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "seed": 7,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**settings, **more})


def new_trainer(folder, island=0, *callbacks, model=None, **more):
    model = model or new_model()
    data = {"train_dataset": dataset(island), "eval_dataset": dataset(9, 8)}
    trainer = Trainer(model, arguments(folder, **more), **data, callbacks=list(callbacks))
    trainer.model_accepts_loss_kwargs = False  # the loss is the mean over a batch, in all versions alike
    return trainer


def losses_of(trainer):
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class On(TrainerCallback):
    """Does something at one event, at one step or at all."""

    def __init__(self, event, action, step=None):
        def call(args, state, control, **kwargs):
            if step is None or state.global_step == step:
                action(state)

        setattr(self, event, call)


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


def of_ranks(rank, place, name, folder, resume):
    island = be_a_rank_of_two(rank)
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


# ---- evaluation and saving


def test_what_is_evaluated_and_saved_are_the_global_weights(tmp_path):
    callback, seen = DiLoCoCallback(METHOD), []

    def note(what):
        return lambda state: seen.append((what, state.global_step, values_of(trainer.model)))

    def expect(state):
        seen.append(("own", state.global_step, values_of(trainer.model)))
        with callback.diloco.global_model():
            seen.append(("global", state.global_step, values_of(trainer.model)))

    watchers = [
        On("on_step_end", expect),
        On("on_prediction_step", note("evaluated")),
        On("on_step_begin", note("next")),
    ]
    more = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    trainer = new_trainer(tmp_path, 0, callback, *watchers, **more)
    trainer.train()
    by_kind = {what: {step: values for kind, step, values in seen if kind == what} for what, _, _ in seen}
    assert sorted(by_kind["evaluated"]) == [2, 4, 6, 8, 10, 12]
    for step, values in by_kind["evaluated"].items():
        assert same(values, by_kind["global"][step])
    for step, values in by_kind["next"].items():
        if step:
            assert same(values, by_kind["own"][step]), "after an evaluation the island's own are back"
    assert not same(by_kind["own"][6], by_kind["global"][6])
    for step in (3, 6, 9, 12):
        saved = load_file(tmp_path / f"checkpoint-{step}/model.safetensors")
        assert all(torch.equal(saved[name], by_kind["global"][step][name]) for name in saved)
    assert same(by_kind["global"][12], values_of(trainer.model)), "the model after train() is the global one"
    assert {"evaluate", "predict", "save_model", "log"}.isdisjoint(vars(trainer)), "Trainer is as it was"


def test_evaluate_and_save_model_see_the_global_weights_whoever_calls_them(tmp_path):
    """Also several evaluation sets, for which `evaluate` calls itself."""
    callback, found = DiLoCoCallback(METHOD), {}

    def act(state):
        with callback.diloco.global_model():
            found["global"] = values_of(trainer.model)
        found["metrics"] = trainer.evaluate({"a": dataset(5, 4), "b": dataset(6, 4)})
        trainer.save_model(str(tmp_path / "model"))

    trainer = new_trainer(tmp_path, 0, callback, On("on_step_end", act, 5))
    trainer.train()
    saved = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(saved[name], found["global"][name]) for name in saved)
    assert not (tmp_path / "model/isles_0.pt").exists()
    model = new_model()
    model.load_state_dict(found["global"], strict=False)
    ids = rows(5, 4)
    assert found["metrics"]["eval_a_loss"] == pytest.approx(model(input_ids=ids, labels=ids).loss.item(), rel=1e-4)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    """The best by the metric, not the last: what it evaluated and saved then."""
    scores = iter([0.1, 0.9, 0.2, 0.3])
    more = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": True}
    callback = DiLoCoCallback(METHOD)
    trainer = new_trainer(tmp_path, 0, callback, **more, **best)
    trainer.compute_metrics = lambda _: {"score": next(scores)}
    trainer.train()
    saved = load_file(tmp_path / "checkpoint-6/model.safetensors")
    found = values_of(trainer.model)
    assert all(torch.equal(saved[name], found[name]) for name in saved)
    assert trainer.state.best_global_step == 6


# ---- leaving


def goes_wrong(island, place, name, folder, where):
    world = WORLDS[name].join(place, island)
    callback = DiLoCoCallback(METHOD, world)

    def trouble(state):
        raise ZeroDivisionError("the user's own mistake")

    callbacks = [callback, *([On(where, trouble, 4)] if island == 1 else [])]
    trainer = new_trainer(folder / str(island), island, *callbacks, eval_strategy="steps", eval_steps=2, max_steps=400)
    try:
        trainer.train()
    except ZeroDivisionError:
        time.sleep(1000)  # alive, so that no connection breaks


@pytest.mark.parametrize("world", FIXED)
@pytest.mark.parametrize("where", ["on_substep_end", "on_prediction_step"], ids=["in training", "in an evaluation"])
def test_a_trainer_that_is_left_by_an_exception_tells_the_others(where, world, tmp_path):
    place = WORLDS[world].place(tmp_path)
    outcome = processes.run(goes_wrong, 2, tmp_path, place, world, tmp_path, where, until=(0,), ranks=0)[0]
    assert outcome.error == "LostPeerError", outcome.text
    assert re.search(r"island 1 left at step 4: .*Trainer\.train\(\) was left", outcome.message), outcome.message


@pytest.mark.timeout(60)
def test_after_an_exception_the_weights_are_the_islands_own_and_one_can_train_again(tmp_path):
    callback, own = DiLoCoCallback(METHOD), {}

    def trouble(state):
        if state.global_step == 6 and "left" not in own:
            own["left"] = True
            raise KeyboardInterrupt

    callbacks = [callback, On("on_step_end", lambda _: own.update(values=values_of(trainer.model)), 6)]
    trainer = new_trainer(
        tmp_path, 0, *callbacks, On("on_prediction_step", trouble), eval_strategy="steps", eval_steps=2
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert same(values_of(trainer.model), own["values"])
    trainer.train()
    assert callback.diloco.step_count == STEPS
    assert {"evaluate", "predict", "save_model", "log"}.isdisjoint(vars(trainer))


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
