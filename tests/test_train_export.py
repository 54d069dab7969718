"""A Hugging Face model is trained, exported, loaded again by `from_pretrained`; `isles sample` goes on with a text."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from isles.cli import main
from tests import ranks


def run(arguments: list[str], capsys) -> dict:
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ISLES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ranks.be_the_only_one(monkeypatch)


def test_train_export_load_and_sample(tmp_path, capsys):
    tiny = GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    tiny.save_pretrained(tmp_path / "config")
    folder, out = tmp_path / "run", tmp_path / "out"
    common = ["--data", "synthetic:0.1", "--tokenizer", "bytes", "--threads", "1", "--sequence-length", "32"]
    model = ["--model", f"hf:{tmp_path / 'config'}", "--steps", "6", "--batch-size", "2", "--sync-every", "3"]
    run(["train", "--run-dir", str(folder), *common, *model, "--eval-every", "0", "--sample-tokens", "0"], capsys)
    exported = run(["export", str(folder), "--out", str(out)], capsys)
    assert exported["step"] == 6
    assert (out / "tokenizer.json").exists()

    loaded = AutoModelForCausalLM.from_pretrained(out)
    from isles.train.export import load_run

    kept, _ = load_run(folder)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), kept.parameters(), strict=True))

    sampled = run(["sample", str(folder), "--prompt", "The", "--tokens", "5", "--seed", "1"], capsys)
    assert (
        sampled["text"]
        == run(["sample", str(folder), "--prompt", "The", "--tokens", "5", "--seed", "1"], capsys)["text"]
    )

    os.remove(folder / "model.safetensors")  # as if it had not come to its end: the last checkpoint, if there is one
    assert main(["export", str(folder), "--out", str(tmp_path / "other")]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    assert main(["export", str(folder), "--out", str(out)]) == 2
    assert "exists" in capsys.readouterr().err


def test_what_is_no_run_is_a_mistake(tmp_path, capsys):
    for command in ("export", "sample"):
        assert main([command, str(tmp_path)]) == 2
        said = capsys.readouterr().err
        assert "not the configuration of a run" in said
        assert len(said.splitlines()) == 1
