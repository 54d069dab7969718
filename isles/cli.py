"""The command line. Every command lives beside what it does and is loaded only when it is called.

A command is a module with two functions: `configure(parser)` adds its flags, `run(args)` does the work and returns what
`--json` prints, a dict; a third one, `exit_code(result)`, if that may mean failure. A user's mistake is a `ValueError`
(or `OSError`) with one clear sentence: it is printed without a traceback, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

import isles

COMMANDS = {
    "train": ("isles.train.command", "train a language model on islands, here or as one of many under torchrun"),
    "plan": ("isles.plan.command", "what bandwidth do I need, what will I get"),
    "lab": ("isles.lab.command", "train over real, slow links: one network namespace per island, on this machine"),
    "simulate": ("isles.elastic.command", "islands that come and go: try their protocol against faults, by seeds"),
    "watch": ("isles.view.watch", "see runs while they go on: a page that grows, or the terminal"),
    "report": ("isles.view.report", "compare runs in one self-contained HTML page"),
    "export": ("isles.train.export", "write the global model of a run as safetensors"),
    "sample": ("isles.train.sample_command", "let the global model of a run generate text"),
    "reproduce": ("isles.reproduce.command", "the papers' findings on one machine, claim by claim"),
    "doctor": ("isles.doctor.command", "what isles finds on this machine, whether it works, what is missing"),
    "bench": ("isles.bench.command", "measure codecs against memcpy, and the engine against the bare loop"),
}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"isles {isles.__version__}")
        parser.exit()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What `isles ...` was told; a mistake ends the program with one line and code 2."""
    parser = _Parser(prog="isles", description="Train one model on islands of compute joined by slow links.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, (home, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in arguments[:1]:  # the others are only listed: their modules stay unloaded
            importlib.import_module(home).configure(command)
            command.add_argument("--json", action="store_true", help="print the result as one JSON line, last")
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `isles COMMAND ...` and returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    module = importlib.import_module(COMMANDS[args.command][0])
    try:
        result = module.run(args)
    except (ValueError, OSError) as error:
        print(f"isles {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"isles {args.command}: interrupted", file=sys.stderr)
        return 130
    if args.json and result is not None:  # under torchrun rank 0 speaks for all
        print(json.dumps(result))
    return module.exit_code(result) if hasattr(module, "exit_code") else 0


if __name__ == "__main__":
    sys.exit(main())
