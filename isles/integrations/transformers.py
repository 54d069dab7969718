"""Hugging Face's Trainer as an island, and what is built on it, such as TRL's SFTTrainer.

    world = isles.TorchWorld.connect("HOST:29500", island=0, islands=2)
    callback = DiLoCoCallback(isles.Method.gradual(sync_every=100), world)
    Trainer(model, args, train_dataset=..., callbacks=[callback]).train()

Optimizer steps are counted, not micro-batches. While it trains, `evaluate`, `predict` and `save_model` of the trainer
see the global weights, whoever calls them; the island's own are back afterwards. At the last step all islands come to
the identical global model with every step in it, which is evaluated and saved last and is the model after `train()`
(with `load_best_model_at_end`: the best of those that were evaluated). A checkpoint holds `isles_RANK.pt` besides what
Trainer saves, and `train(resume_from_checkpoint=...)` goes on exactly. Statistics are logged as `isles/...`.

Two things a callback is not told, so they are looked up. Trainer hands out everything but itself: it is found among the
callers of `on_train_begin`. And there is no event for an exception: a thread sees twice a second whether the training
thread is still inside `train()`; when it is not, this island has left, and tells the others.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch

from isles.core.diloco import DiLoCo
from isles.core.method import Method
from isles.integrations.session import Session, load_state
from isles.wire.world import World

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(
        f"isles.integrations.transformers needs transformers: pip install 'isles[hf]' ({error})"
    ) from None

POLL_SECONDS = 0.5


class DiLoCoCallback(TrainerCallback):
    """Joins the islands of `world` while the trainer trains; None: one island alone. `options` are those of
    `isles.DiLoCo`. `diloco` is the engine, from the beginning of the training on.
    """

    diloco: DiLoCo | None = None

    def __init__(self, method: Method, world: World | None = None, **options: Any) -> None:
        self._method, self._world, self._options = method, world, options
        self._session: Session | None = None
        self._watch: _Watch | None = None
        self._args: Any = None
        self._steps_before = 0

    # ---- events of Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._watch is not None:  # of a training that ended by an exception a moment ago
            self._watch.join()
        trainer, loop = _trainer_of(self)
        _check(args, state, trainer)
        saved = None
        if state.global_step:
            checkpoint = loop.f_locals.get("resume_from_checkpoint")
            saved = _load(checkpoint or os.path.join(args.output_dir, f"checkpoint-{state.global_step}"), args)
        session = Session(trainer.model_wrapped, trainer.optimizer, self._method, self._world, self._options, saved)
        self._session, self.diloco, self._args, self._steps_before = session, session.diloco, args, state.global_step
        self._watch = _Watch(loop, self._leave)
        for name in ("evaluate", "predict"):
            session.wrap(trainer, name, self._with_global_weights)
        session.wrap(trainer, "save_model", self._save)
        session.wrap(trainer, "log", self._log)
        if state.global_step >= state.max_steps:  # resumed at its end
            session.finish()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._session is not None:
            self._session.follow(state.global_step - self._steps_before)
            if state.global_step >= state.max_steps:
                self._session.finish()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._session is not None and control.should_training_stop:
            self._session.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        session, watch = self._session, self._watch
        if session is None or watch is None:
            return
        if args.load_best_model_at_end and state.best_model_checkpoint and not session.is_finished:
            raise RuntimeError(
                "a callback after DiLoCoCallback stopped the training, and the best model was loaded over weights that "
                "were not sent yet: put DiLoCoCallback last in callbacks="
            )
        session.finish()
        session.close()
        self._session = self._watch = None
        watch.end()

    def _leave(self) -> None:
        """The training has ended without `on_train_end`."""
        if self._session is not None:
            self._session.leave(RuntimeError("Trainer.train() was left by an exception"))
            self._session = None

    # ---- methods of Trainer

    def _with_global_weights(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        with self._session.global_weights() if self._session else nullcontext():
            return method(*args, **kwargs)

    def _save(
        self, save_model: Any, output_dir: str | None = None, _internal_call: bool = False, **kwargs: Any
    ) -> None:
        """A checkpoint of Trainer's (an internal call), or the model alone, for whoever calls `save_model`."""
        if self._session and _internal_call and output_dir and not self._args.save_only_model:
            state = self._session.state()
            os.makedirs(output_dir, exist_ok=True)
            torch.save(state, _file_in(output_dir, self._args))
        self._with_global_weights(save_model, output_dir, _internal_call=_internal_call, **kwargs)

    def _log(self, log: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self._session and "loss" in logs:
            logs.update(self._session.scalars())
        log(logs, *args, **kwargs)


class _Watch(threading.Thread):
    """Calls `on_leave` once a frame of the thread that makes this is no longer on its stack. Not a daemon: a program
    that ends by an exception waits for it, and the other islands hear of it.
    """

    def __init__(self, frame: FrameType, on_leave: Callable[[], None]) -> None:
        super().__init__(name="isles-watch", daemon=False)
        self._frame: FrameType | None = frame
        self._on_leave, self._watched, self._ended = on_leave, threading.get_ident(), threading.Event()
        self.start()

    def run(self) -> None:
        while self._is_inside():
            if self._ended.wait(POLL_SECONDS):
                break
        else:
            self._on_leave()
        self._frame = None  # and with it all that the training loop refers to

    def _is_inside(self) -> bool:
        frame = sys._current_frames().get(self._watched)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None

    def end(self) -> None:
        self._ended.set()
        self.join()


def _trainer_of(callback: TrainerCallback) -> tuple[Any, FrameType]:
    """The trainer that calls, and the frame of its loop."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller, frame
        frame = frame.f_back
    raise RuntimeError("DiLoCoCallback is for transformers.Trainer: pass it in callbacks=, or by add_callback()")


def _check(args: Any, state: Any, trainer: Any) -> None:
    """Raises ValueError for what cannot work."""
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True starts again with other batches on one island alone: leave it out")
    if state.is_hyper_param_search:
        raise ValueError("hyperparameter_search() trains other settings on every island: search without DiLoCoCallback")
    if trainer.is_deepspeed_enabled:
        raise ValueError("DeepSpeed's optimizer cannot be synchronised: use DDP or FSDP2 inside an island")
    if trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise ValueError("FSDP 1 flattens parameters, which cannot be synchronised: set fsdp_version to 2")


def _file_in(folder: str, args: Any) -> str:
    return os.path.join(folder, f"isles_{args.process_index}.pt")


def _load(checkpoint: str, args: Any) -> dict[str, Any]:
    path = _file_in(checkpoint, args)
    if not os.path.exists(path):
        raise ValueError(
            f"{checkpoint} has no {os.path.basename(path)}, so this island cannot go on from it: it was saved without "
            "DiLoCoCallback, with save_only_model=True or on another number of ranks"
        )
    return load_state(path)
