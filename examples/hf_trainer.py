"""Hugging Face's Trainer on two islands: a small GPT-2 learns the source of Python's standard library, byte by byte.

    python examples/hf_trainer.py                                              both islands on this machine
    python examples/hf_trainer.py --lora                                       the same, training adapters only
    python examples/hf_trainer.py --island 0 --address HOST:29500              on the first machine, which is HOST
    python examples/hf_trainer.py --island 1 --address HOST:29500              on the second

Needs `pip install 'isles[hf]'`. Each island trains with its own half of the text, in a folder of its own; the three
lines that isles adds are marked. Island 0 then trains the same model without isles, on both halves in batches twice as
large, so for the same tokens and steps, and prints both losses.
"""

import argparse
import itertools
import subprocess
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import isles
from isles.integrations.transformers import DiLoCoCallback  # 1
from isles.train.text import documents

parser = argparse.ArgumentParser()
parser.add_argument("--island", type=int, help="this one's number; left out: start all of them here")
parser.add_argument("--islands", type=int, default=2)
parser.add_argument("--address", default="127.0.0.1:29500", help="HOST:PORT of island 0's machine")
parser.add_argument("--lora", action="store_true", help="train low-rank adapters (peft)")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--sync-every", type=int, default=20)
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--output", default="runs/hf_trainer")
LENGTH, BATCH, HELD_OUT = 64, 8, 64


def read_rows(count):
    """So many rows of bytes, as token ids."""
    text = itertools.chain.from_iterable(document.text.encode() for document in documents("stdlib"))
    return torch.tensor(list(itertools.islice(text, count * LENGTH))).view(-1, LENGTH)


def new_model(args):
    """GPT-2 in small."""
    set_seed(0)  # the same model on every island
    size = {"n_embd": args.width, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "vocab_size": 256}
    model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
    return model


def train(args, rows, held_out, batch_size, name, callbacks=()):
    """An ordinary Trainer."""
    settings = TrainingArguments(
        f"{args.output}/{name}",  # every island its own
        max_steps=args.steps,
        per_device_train_batch_size=batch_size,
        learning_rate=3e-3,
        warmup_steps=args.steps // 20,
        lr_scheduler_type="cosine",
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 4),
        save_steps=max(1, args.steps // 2),
        report_to=[],
        disable_tqdm=True,
    )
    data = {"train_dataset": examples(rows), "eval_dataset": examples(held_out)}
    trainer = Trainer(new_model(args), settings, **data, callbacks=list(callbacks))
    trainer.train()
    return trainer.model, trainer.evaluate()["eval_loss"]


def examples(rows):
    """As Trainer wants them."""
    return [{"input_ids": row, "labels": row} for row in rows]


def main(args):
    """One island."""
    torch.set_num_threads(1)
    rows = read_rows(args.islands * BATCH * args.steps + HELD_OUT)
    rows, held_out = rows[:-HELD_OUT], rows[-HELD_OUT:]
    world = isles.TorchWorld.connect(args.address, args.island, args.islands)  # 2
    isles_callback = DiLoCoCallback(isles.Method.gradual(sync_every=args.sync_every), world)  # 3
    own = rows[args.island :: args.islands]
    model, loss = train(args, own, held_out, BATCH, f"island-{args.island}", [isles_callback])
    world.close()
    if args.island == 0:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        sent = isles_callback.diloco.stats.bytes_sent
        _, without = train(args, rows, held_out, args.islands * BATCH, "without-isles")
        print(f"{args.islands} islands: loss {loss:.4f}; each sent {sent:,} bytes for {trained:,} parameters,")
        print(f"{4 * trained * args.steps / sent:.0f}x fewer than fp32 gradients every step")
        print(f"without isles, for the same tokens: loss {without:.4f}")


if __name__ == "__main__":
    arguments = parser.parse_args()
    if arguments.island is not None:
        main(arguments)
    else:
        commands = [[sys.executable, *sys.argv, "--island", str(number)] for number in range(arguments.islands)]
        started = [subprocess.Popen(command) for command in commands]
        sys.exit(max(process.wait() for process in started))
