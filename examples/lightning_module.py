"""Lightning on two islands: a small language model learns the source of Python's standard library, byte by byte.

    python examples/lightning_module.py                                        both islands on this machine
    python examples/lightning_module.py --island 0 --address HOST:29500        on the first machine, which is HOST
    python examples/lightning_module.py --island 1 --address HOST:29500        on the second

Needs `pip install 'isles[lightning]'`. Each island trains with its own half of the text, in a folder of its own; the
three lines that isles adds are marked. Island 0 then trains the same model without isles, on both halves in batches
twice as large, so for the same tokens and steps, and prints both losses.
"""

import argparse
import itertools
import subprocess
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import isles
from isles.integrations.lightning import DiLoCoCallback  # 1
from isles.train.text import documents

parser = argparse.ArgumentParser()
parser.add_argument("--island", type=int, help="this one's number; left out: start all of them here")
parser.add_argument("--islands", type=int, default=2)
parser.add_argument("--address", default="127.0.0.1:29500", help="HOST:PORT of island 0's machine")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--sync-every", type=int, default=20)
parser.add_argument("--width", type=int, default=96)
parser.add_argument("--output", default="runs/lightning_module")
LENGTH, BATCH, HELD_OUT = 64, 8, 64


class LanguageModel(lightning.LightningModule):
    """Bytes in, the next byte out."""

    def __init__(self, width, steps):
        super().__init__()
        torch.manual_seed(0)  # the same model on every island
        self.steps = steps
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def loss(self, rows):
        past = nn.Transformer.generate_square_subsequent_mask(LENGTH - 1)
        x = self.bytes(rows[:, :-1]) + self.places.weight[: LENGTH - 1]
        logits = self.head(self.layers(x, mask=past, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, rows, index):
        return self.loss(rows)

    def validation_step(self, rows, index):
        self.log("val_loss", self.loss(rows), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=self.steps + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def read_rows(count):
    """So many rows of bytes."""
    text = itertools.chain.from_iterable(document.text.encode() for document in documents("stdlib"))
    return torch.tensor(list(itertools.islice(text, count * LENGTH))).view(-1, LENGTH)


def train(args, rows, held_out, batch_size, name, callbacks=()):
    """An ordinary Trainer."""
    model, saver = LanguageModel(args.width, args.steps), ModelCheckpoint(monitor="val_loss")
    trainer = lightning.Trainer(
        default_root_dir=f"{args.output}/{name}",  # every island its own
        max_steps=args.steps,
        val_check_interval=max(1, args.steps // 4),
        gradient_clip_val=1.0,
        callbacks=[*callbacks, saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = DataLoader(rows, batch_size, shuffle=True), DataLoader(held_out, batch_size)
    trainer.fit(model, *loaders)
    return model, trainer.validate(model, loaders[1], verbose=False)[0]["val_loss"]


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
        trained = sum(parameter.numel() for parameter in model.parameters())
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
