"""A small Trainer of Hugging Face's for tests: a GPT-2 of two layers, data, arguments, and a callback for one event."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import isles
from tests.trainers import rows

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
