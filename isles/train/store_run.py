"""A run in a store: the settings that all its islands share, its tokenizer, and the final model.

    train.json                   the resolved configuration          put-if-absent, by whoever makes the run
    tokenizer.json               what turns text into tokens         before it
    final/KKKKKKKK/...           the model after the last round K, and its evaluation

Whoever comes later takes model, method, tokenizer and data from there, so the same command works on every machine at
any time. A flag that says something else than the run is a mistake, and is told.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

import isles
from isles.elastic.store import NoFolderError, ObjectStore, open_store, probe
from isles.train.batches import Batches
from isles.train.config import TrainConfig
from isles.train.data import prepare_data
from isles.train.export import TOKENIZER, WEIGHTS, put_tensors
from isles.train.model import build_model
from isles.train.setup import FILE, Setup
from isles.train.tokenizer import tokenizer_from

SETTINGS, FINAL = "train.json", "final/"
OWN = {
    *("run", "resume", "overwrite", "islands", "store", "quorum", "patience_seconds", "timeout_seconds"),
    *("threads", "device", "tensorboard", "wandb", "watch", "sample_tokens", "evals", "eval_tokens"),
    *("checkpoint_every", "keep_checkpoints"),
}
"""Fields in which islands of one run may differ."""
MAX_MODEL_BYTES = 1 << 40


def resolve(chosen: dict[str, Any], knobs: dict[str, Any]) -> Setup:
    """The run behind `--store` with these flags; makes it if there is none. Raises ValueError for flags that differ."""
    own = {"islands": 1, **chosen}
    if not own.get("run"):
        own["run"] = f"runs/{str(own['store']).rstrip('/').rpartition('/')[2] or 'store'}"
    made = Setup(TrainConfig(**own), knobs)
    made.method()
    data = _settings(own["store"])
    tokenizer = _checked(made) if data is None else b""
    store = open_store(own["store"])
    probe(store)
    own["store"] = store.url
    if data is None:
        text = {"config": {**made.config.as_dict(), "store": store.url}, "knobs": knobs}
        store.put(TOKENIZER, tokenizer, create=True)
        store.put(SETTINGS, json.dumps(text, indent=1).encode(), create=True)  # unless somebody else was faster
        data = store.get(SETTINGS)
        assert data is not None
    there = _parse(data, store.url)
    preset = Setup(TrainConfig(**there["config"]), there["knobs"]).method()
    known = {**(preset.as_dict() if preset else {}), **there["config"]}
    for name, value in {**chosen, **knobs}.items():
        if name not in OWN and value != known[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"the run in {store.url} has {flag} {known[name]}, not {value}: leave {flag} out to join it"
            )
    shared = {name: value for name, value in there["config"].items() if name not in OWN}
    mine = {name: value for name, value in own.items() if name in OWN}
    setup = Setup(TrainConfig(**{**shared, **mine}), there["knobs"])
    return _with_tokenizer(store, setup)


def _settings(url: str) -> bytes | None:
    """Of the run that is there; a folder is not made for that."""
    try:
        return open_store(url, create=False).get(SETTINGS)
    except NoFolderError:
        return None


def _checked(setup: Setup) -> bytes:
    """The tokenizer of a run that can be made. A mistake has to show here: what is in a store stays there, and others
    join it.
    """
    if setup.config.method == "data-parallel":
        raise ValueError("--store joins islands, and --method data-parallel has none: choose another method")
    method = setup.method()
    assert method is not None
    if method.update == "eager":
        raise ValueError("--store does not go with eager updates: use --method distant, which is as late")
    if setup.config.island_data:
        raise ValueError("--island-data names a source per island, and with --store their number is not known")
    tokens, train = prepare_data(setup.config, 0)
    Batches(train, seed=0, island=0, islands=1, batch_size=1, sequence_length=setup.config.sequence_length)
    model = build_model(setup.config.model, tokens.vocabulary)
    isles.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.0), method, world=isles.LocalWorld.alone()).close()
    return Path(tokens.tokenizer_file).read_bytes()


def _parse(data: bytes, url: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
        TrainConfig(**found["config"])
        return {"config": dict(found["config"]), "knobs": dict(found["knobs"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{SETTINGS} in {url} is not the configuration of a run ({error})") from None


def _with_tokenizer(store: ObjectStore, setup: Setup) -> Setup:
    """Makes the local folder, with the run's own tokenizer in it."""
    folder = Path(setup.config.run)
    if folder.exists() and any(folder.iterdir()) and not (folder / FILE).exists():
        raise ValueError(f"--run {folder} exists and is no run: name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    data = store.get(TOKENIZER, limit=1 << 30)
    if data is None:
        raise ValueError(f"{store.url} has a run without {TOKENIZER}: it was removed, start another run")
    (folder / TOKENIZER).write_bytes(data)
    return dataclasses.replace(
        setup, config=dataclasses.replace(setup.config, tokenizer=str((folder / TOKENIZER).absolute()))
    )


def load(url: str) -> tuple[ObjectStore, dict[str, Any]]:
    """The store of a run that is there, and its settings."""
    store = open_store(url, create=False)
    data = store.get(SETTINGS)
    if data is None:
        raise ValueError(f"there is no run of isles train in {url}")
    return store, _parse(data, url)


def load_model(url: str) -> tuple[nn.Module, int, bytes]:
    """The global model of a run in a store, with the clock it is of, and its tokenizer: the final one, or that of the
    log so far. Needs no rights to write.
    """
    store, settings = load(url)
    config, tokenizer = TrainConfig(**settings["config"]), store.get(TOKENIZER, limit=1 << 30) or b""
    model = build_model(config.model, tokenizer_from(tokenizer).vocabulary)
    ended = final(store)
    if ended is not None:
        weights = store.get(f"{FINAL}{ended[0]:08d}/{WEIGHTS}", limit=MAX_MODEL_BYTES)
        put_tensors(model, safetensors.torch.load(weights or b""))
        return model, config.steps, tokenizer
    method = Setup(config, settings["knobs"]).method()
    assert method is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    diloco = isles.DiLoCo(model, optimizer, method, world=isles.StoreWorld(url, observe=True))
    clock = diloco.clock
    diloco.close()
    return model, clock, tokenizer


def publish(store: ObjectStore, number: int, weights: Path, summary: dict[str, Any]) -> None:
    """The final model after round `number`, and what is known of it; the same by whoever writes it."""
    store.put(f"{FINAL}{number:08d}/{WEIGHTS}", weights.read_bytes(), create=True)
    store.put(f"{FINAL}{number:08d}/summary.json", json.dumps(summary).encode(), create=True)


def final(store: ObjectStore) -> tuple[int, dict[str, Any]] | None:
    """The newest final model: its round, and its summary. None if the run has not come to its end."""
    names = [name for name in store.list(FINAL) if name.endswith("/summary.json")]
    if not names:
        return None
    name = max(names)
    return int(name.split("/")[-2]), json.loads(store.get(name) or b"{}")
