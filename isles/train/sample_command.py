"""`isles sample`: lets the global model of a run go on with a text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from isles.train import setup
from isles.train.export import TOKENIZER, load_run
from isles.train.sample import generate
from isles.train.tokenizer import load_tokenizer


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles sample`."""
    parser.add_argument("run", help="folder of a run")
    parser.add_argument("--prompt", default="", help="the beginning (default: none, a new document)")
    parser.add_argument("--tokens", type=int, default=200, help="how many tokens to generate (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the most likely token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="choose among so many (default 50)")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the prompt and what follows it."""
    folder = Path(args.run)
    model, step = load_run(folder)
    tokenizer = load_tokenizer(str(folder / TOKENIZER))
    config = setup.load(folder).config
    prompt = [tokenizer.end_of_text, *(int(token) for token in tokenizer.encode_batch([args.prompt])[0])]
    ids = generate(
        model,
        prompt,
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
        context_length=config.sequence_length,
        stop=tokenizer.end_of_text,
    )
    text = tokenizer.decode(ids)
    print(args.prompt + text)
    return {"prompt": args.prompt, "text": text, "step": step}
