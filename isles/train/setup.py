"""From flags to a run's folder, and back: the resolved configuration, written once, read by every island.

`resolve` turns flags into a `Setup`; with --resume they go on top of what the folder says. `claimed` makes the folder,
or refuses to touch what is in it, and saves the Setup there; `load` reads it again. A mistake that shows before
training has begun leaves the folder as it was.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.core.method import Method
from isles.train.config import TrainConfig
from isles.view import events

FILE = "config.json"


@dataclass(frozen=True)
class Setup:
    """A run, resolved: nothing is left to defaults."""

    config: TrainConfig
    knobs: dict[str, Any]
    """The fields of the method that were set on top of its preset."""

    def method(self) -> Method | None:
        """The preset with the knobs on top; None for data-parallel training, which has no knobs."""
        if self.config.method != "data-parallel":
            preset: Method = getattr(Method, self.config.method)(**self.knobs)
            return preset
        for name in self.knobs:
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with --method data-parallel: leave it out")
        return None


def resolve(chosen: dict[str, Any], knobs: dict[str, Any]) -> Setup:
    """What the flags mean, under torchrun for the islands that it has started. Raises ValueError for what cannot be."""
    for name in ("quorum", "patience_seconds"):
        if name in chosen:
            raise ValueError(f"--{name.replace('_', '-')} is for islands that come and go: give their --store too")
    folder = Path(chosen.get("run") or "")
    if chosen.get("resume") and chosen.get("run") and (folder / FILE).exists():
        saved = load(folder)
        chosen = {**saved.config.as_dict(), "overwrite": False, **chosen}
        if chosen["method"] == saved.config.method:
            knobs = {**saved.knobs, **knobs}
    if "RANK" in os.environ:
        from isles.train.place import count_islands

        chosen = {**chosen, "islands": count_islands(chosen.get("ranks_per_island", 0))}
    config = TrainConfig(**chosen)
    if not config.run:
        model = config.model.removeprefix("hf:").strip("/").split("/")[-1]
        config = dataclasses.replace(config, run=f"runs/{config.method}-{model}-{config.seed}")
    setup = Setup(config, knobs)
    setup.method()
    return setup


def check_parts(chosen: dict[str, Any]) -> None:
    """Raises ValueError if a flag needs a package that is not installed: before any text is read."""
    model = chosen.get("model", "")
    needs = [
        (model.startswith("hf:"), f"--model {model}", "transformers", "'isles[hf]'"),
        (chosen.get("tensorboard"), "--tensorboard", "tensorboard", "'isles[tensorboard]'"),
        (chosen.get("wandb"), "--wandb", "wandb", "wandb"),
    ]
    for is_needed, flag, module, package in needs:
        if is_needed and importlib.util.find_spec(module) is None:
            raise ValueError(f"{flag} needs {module}: pip install {package}")


def check_free(config: TrainConfig) -> None:
    """Raises ValueError if the run would be mixed with another one, or if something would be removed that is no run."""
    folder = Path(config.run)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--run {folder} is a file: name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not config.resume:
        if not config.overwrite:
            raise ValueError(
                f"--run {folder} exists: add --resume to go on, --overwrite to replace it, or name another"
            )
        if not (folder / FILE).exists():
            raise ValueError(f"--overwrite replaces runs, and {folder} is none: remove it yourself, or name another")


@contextmanager
def claimed(setup: Setup) -> Iterator[None]:
    """Makes the run's folder, empty unless the run is resumed, with the configuration in it, for a run in the block.

    A ValueError before training has begun is a user's mistake: the folder is then what it was before.
    """
    config, folder = setup.config, Path(setup.config.run)
    check_free(config)
    if folder.is_dir() and not config.resume:
        shutil.rmtree(folder)
    is_new = not folder.is_dir() or not any(folder.iterdir())
    before = (folder / FILE).read_text() if (folder / FILE).exists() else None
    starts = _starts(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save(setup)
    try:
        yield
    except ValueError:
        if _starts(folder) == starts:
            if is_new:
                shutil.rmtree(folder)
            elif before is None:
                (folder / FILE).unlink()
            else:
                _write(folder, before)
        raise


def _starts(folder: Path) -> int:
    """How often training has begun in a folder."""
    try:
        return sum(event["event"] == "config" for event in events.read(folder))
    except ValueError:  # no log yet, or an empty one
        return 0


def save(setup: Setup) -> None:
    """Writes the resolved configuration into the run's folder."""
    method = setup.method()
    text = {"config": setup.config.as_dict(), "knobs": setup.knobs, "method": method.as_dict() if method else None}
    _write(Path(setup.config.run), json.dumps(text, indent=1) + "\n")


def _write(folder: Path, text: str) -> None:
    """Whole or not at all."""
    part = folder / (FILE + ".part")
    part.write_text(text)
    part.rename(part.with_suffix(""))


def load(folder: Path) -> Setup:
    """What `save` wrote."""
    try:
        saved = json.loads((folder / FILE).read_text())
        return Setup(TrainConfig(**saved["config"]), saved["knobs"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / FILE} is not the configuration of a run ({error})") from None
