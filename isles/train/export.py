"""The global model of a run, for `isles export` and `isles sample`.

A finished run has it in `model.safetensors`. Of a run that is still going, or that has crashed, it is in the
newest checkpoint: the anchors of island 0. Of a run in a store it is the state after the last sealed round. An exported
folder holds weights, configuration and tokenizer; for `hf:` models it has the Hugging Face layout and loads with
`from_pretrained`.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isles.core.fragments import Fragment, trainable_parameters, unwrap
from isles.train import setup
from isles.train.checkpoint import Checkpoints
from isles.train.model import Decoder, build_model
from isles.train.shards import ShardedCheckpoints
from isles.train.tokenizer import load_tokenizer

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles export`."""
    parser.add_argument("run", nargs="?", help="folder of a run")
    parser.add_argument("--store", default="", metavar="URL", help="a run in a bucket or folder, instead of RUN")
    parser.add_argument("--out", default="", help="folder to write (default: RUN/export; with --store: export)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Writes the global model of a run; returns where."""
    if bool(args.run) == bool(args.store):
        raise ValueError("give the folder of a run, or --store URL")
    out = Path(args.out or (Path(args.run) / "export" if args.run else "export"))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out} exists: name a new folder")
    if args.store:
        from isles.train.store_run import load_model

        source, (model, step, tokenizer) = args.store, load_model(args.store)
    else:
        source, (model, step) = args.run, load_run(Path(args.run))
        tokenizer = (Path(args.run) / TOKENIZER).read_bytes()
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(model, Decoder):
        save_weights(model, out / WEIGHTS)
        about = {
            "architecture": "isles.train.model.Decoder",
            "shape": asdict(model.shape),
            "vocabulary": model.vocabulary,
        }
        (out / "config.json").write_text(json.dumps(about, indent=1) + "\n")
    else:
        model.save_pretrained(out, safe_serialization=True)  # type: ignore[operator]
    (out / TOKENIZER).write_bytes(tokenizer)
    print(f"the global model of {source} at step {step} is in {out}")
    return {"out": str(out), "step": step, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def save_weights(model: nn.Module, path: Path) -> None:
    """Writes every parameter and buffer once, atomically; tied weights under their first name."""
    part = path.with_suffix(".part")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _own_tensors(model).items()}
    try:
        save_file(tensors, part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load_run(folder: Path) -> tuple[nn.Module, int]:
    """The global model of a run, and the step it is of."""
    config = setup.load(folder).config
    if not (folder / TOKENIZER).exists():
        raise ValueError(f"{folder} holds no model yet: it has not come to its first checkpoint")
    model = build_model(config.model, load_tokenizer(str(folder / TOKENIZER)).vocabulary)
    if (folder / WEIGHTS).exists():
        put_tensors(model, load_file(folder / WEIGHTS))
        return model, config.steps
    checkpoints = Checkpoints(folder / "checkpoints", 0, keep=1)
    sharded = ShardedCheckpoints(checkpoints.folder, 0, keep=1)
    steps = sorted([*checkpoints.steps(), *sharded.steps()])
    if not steps:
        raise ValueError(f"{folder} holds no checkpoint: nothing to export yet")
    if steps[-1] in sharded.steps():
        put_tensors(model, sharded.global_model(steps[-1]))
        return model, steps[-1]
    state = checkpoints.load(steps[-1])["state"]
    if "fragments" not in state:
        model.load_state_dict(state["model"])
    else:
        parameters = trainable_parameters(model)
        with torch.no_grad():
            for saved in state["fragments"]:
                Fragment((name, parameters[name]) for name in saved["names"]).write(saved["anchor"])
        put_tensors(model, state["replica"]["buffers"])
    return model, steps[-1]


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers of a model, tied ones once."""
    plain = unwrap(model)
    kept = set(plain.state_dict())
    return {**dict(plain.named_parameters()), **{name: b for name, b in plain.named_buffers() if name in kept}}


def put_tensors(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Sets parameters and buffers of a model by their names."""
    own = _own_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
