"""Which weights Hugging Face's Trainer shows: the global ones to who evaluates or saves, the island's own to training.

After an exception the island's own are back too, and the other islands hear of it.
"""

from __future__ import annotations

import re
import time

import pytest
import torch
from safetensors.torch import load_file

from isles.integrations.transformers import DiLoCoCallback
from tests import processes
from tests.small_trainer import METHOD, STEPS, On, dataset, new_model, new_trainer
from tests.trainers import FIXED, WORLDS, rows, same, values_of

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
