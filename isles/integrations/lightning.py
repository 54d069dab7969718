"""Lightning's Trainer as an island.

    world = isles.TorchWorld.connect("HOST:29500", island=0, islands=2)
    callback = DiLoCoCallback(isles.Method.gradual(sync_every=100), world)
    lightning.Trainer(..., callbacks=[callback]).fit(module, loader)

Lightning has no hook after an optimizer step, so the engine hooks the optimizer itself when the training starts.
Validation and checkpoints see the global weights, whoever asks for them; the island's own are back afterwards. The end
of the training leaves the identical global model, with every step in it, on every island. A checkpoint holds the state
of isles among those of other callbacks, and `fit(ckpt_path=...)` goes on exactly. Statistics are logged as `isles/...`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from isles.core.diloco import DiLoCo
from isles.core.method import Method
from isles.integrations.session import Session
from isles.wire.world import World

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    try:
        from pytorch_lightning.callbacks import Callback  # type: ignore[assignment]
    except ImportError as error:
        raise ImportError(
            f"isles.integrations.lightning needs lightning: pip install 'isles[lightning]' ({error})"
        ) from None


class DiLoCoCallback(Callback):
    """Joins the islands of `world` while the trainer fits; None: one island alone. `options` are those of
    `isles.DiLoCo`. `diloco` is the engine, from the beginning of the training on.
    """

    diloco: DiLoCo | None = None

    def __init__(self, method: Method, world: World | None = None, **options: Any) -> None:
        self._method, self._world, self._options = method, world, options
        self._session: Session | None = None
        self._validating = ExitStack()
        self._loaded: Mapping[str, Any] | None = None
        self._saving: dict[str, Any] = {}
        self._steps_before = self._logged_step = 0

    # ---- training

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        _check(trainer)
        saved, self._loaded = _saved_by_this_rank(self._loaded, trainer), None
        model, optimizer = trainer.strategy.model, trainer.optimizers[0]
        self._session = session = Session(model, optimizer, self._method, self._world, self._options, saved)
        self.diloco = session.diloco
        self._steps_before = self._logged_step = trainer.global_step
        session.wrap(trainer, "save_checkpoint", functools.partial(self._save, trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._session is not None:
            self._session.follow(trainer.global_step - self._steps_before)
            is_due = trainer.global_step - self._logged_step >= max(1, trainer.log_every_n_steps)
            for logger in trainer.loggers if is_due else ():
                self._logged_step = trainer.global_step
                logger.log_metrics(self._session.scalars(), step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None:
            self._session.finish()
            self._session.close()
            self._session = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._validating.close()
        if self._session is not None:
            self._session.leave(exception)
            self._session = None

    # ---- the global weights

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._session is not None:
            self._validating.enter_context(self._session.global_weights())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._validating.close()

    def _save(self, trainer: Any, save_checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        assert self._session is not None
        self._saving = {"ranks": _of_all_ranks(self._session.state(), trainer)}
        try:
            with self._session.global_weights():
                save_checkpoint(*args, **kwargs)
        finally:
            self._saving = {}

    # ---- the callback's own state in Lightning's checkpoint

    def state_dict(self) -> dict[str, Any]:
        return self._saving

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict


def _check(trainer: Any) -> None:
    """Raises ValueError for what cannot work."""
    if len(trainer.optimizers) != 1:
        raise ValueError(f"DiLoCoCallback is for one optimizer, and this module has {len(trainer.optimizers)}")
    strategy = type(trainer.strategy).__name__
    if strategy not in ("SingleDeviceStrategy", "DDPStrategy"):
        raise ValueError(f"DiLoCoCallback is for one device or DDP inside an island, not for Lightning's {strategy}")


def _of_all_ranks(state: dict[str, Any], trainer: Any) -> list[Any]:
    """The states of an island's ranks, on the one that writes the checkpoint."""
    if trainer.world_size == 1:
        return [state]
    states = [None] * trainer.world_size if trainer.global_rank == 0 else None
    dist.gather_object(state, states)
    return states or []


def _saved_by_this_rank(loaded: Mapping[str, Any] | None, trainer: Any) -> Any:
    if not loaded:
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"{trainer.ckpt_path} has no state of isles, so this island cannot go on from it: it was saved without "
                "DiLoCoCallback, or on an exception"
            )
        return None
    if len(loaded["ranks"]) != trainer.world_size:
        raise ValueError(f"the checkpoint is of {len(loaded['ranks'])} ranks, this island has {trainer.world_size}")
    return loaded["ranks"][trainer.global_rank]
