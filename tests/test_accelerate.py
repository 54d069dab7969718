"""isles.DiLoCo takes what `accelerator.prepare` returned; TRL's trainer takes the callback for Trainer."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import isles
from tests import processes
from tests.trainers import FIXED, WORLDS, be_a_rank_of_two, digest, rows

torch.set_num_threads(1)
METHOD = isles.Method.streaming(sync_every=3, fragments=2, overlap=1, codec="fp32")


def new_training():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def data(island):
    return torch.randn(48, 8, generator=torch.Generator().manual_seed(island))


def prepared(rank, place, name, ranks):
    """The loop of accelerate's manual, with gradient accumulation."""
    island = be_a_rank_of_two(rank) if ranks == 2 else rank
    world = WORLDS[name].join(place, island)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = new_training()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(island), batch_size=4 // ranks))
    with isles.DiLoCo(model, optimizer, METHOD, world=world) as diloco:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    return digest(model), diloco.step_count, diloco.stats.payload_parameters


def plain(island, place, name):
    world = WORLDS[name].join(place, island)
    model, optimizer = new_training()
    with isles.DiLoCo(model, optimizer, METHOD, world=world) as diloco:
        for pair in data(island).split(8):
            for batch in pair.split(4):
                (model(batch).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest(model), diloco.step_count, diloco.stats.payload_parameters


@pytest.mark.parametrize("world", WORLDS)
def test_what_accelerate_has_prepared_trains_as_a_plain_loop(world, tmp_path):
    loops = processes.values(plain, 2, tmp_path, WORLDS[world].place(tmp_path), world, ranks=0)
    found = processes.values(prepared, 2, tmp_path, WORLDS[world].place(tmp_path), world, 1, ranks=0)
    assert found == loops
    assert found[0][1] == 6, "steps of the optimizer, not calls of step()"


@pytest.mark.parametrize("world", FIXED)
def test_ranks_that_accelerate_has_wrapped_share_out_what_is_sent(world, tmp_path):
    found = processes.values(prepared, 4, tmp_path, WORLDS[world].place(tmp_path), world, 2, ranks=2)
    alone = processes.values(plain, 2, tmp_path, WORLDS[world].place(tmp_path), world, ranks=0)
    assert len({digest_ for digest_, _, _ in found}) == 1
    assert all(steps == 6 for _, steps, _ in found)
    assert all(sent <= alone[0][2] / 2 + 3 for _, _, sent in found)


def fine_tune(island, place, name, folder):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from isles.integrations.transformers import DiLoCoCallback

    world = WORLDS[name].join(place, island)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    words = {f"w{number}": number for number in range(50)}
    library = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=library, eos_token="w0", pad_token="w0", unk_token="w1")
    ids = Dataset.from_dict({"input_ids": rows(island, 32).tolist()})
    settings = {"max_steps": 8, "per_device_train_batch_size": 2, "use_cpu": True, "report_to": [], "bf16": False}
    args = SFTConfig(str(folder / str(island)), save_strategy="no", logging_steps=2, disable_tqdm=True, **settings)
    callback = DiLoCoCallback(METHOD, world)
    trainer = SFTTrainer(
        GPT2LMHeadModel(config), args, train_dataset=ids, processing_class=tokenizer, callbacks=[callback]
    )
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logged[-1]["isles/bytes_sent"] > 0
    return digest(trainer.model), callback.diloco.step_count


@pytest.mark.parametrize("world", WORLDS)
def test_trls_trainer_is_an_island_too(world, tmp_path):
    place = WORLDS[world].place(tmp_path)
    one, other = processes.values(fine_tune, 2, tmp_path, place, world, tmp_path, ranks=0)
    assert one == other
    assert one[1] == 8
