"""Command-line flags out of dataclasses: every field is a flag, and the string under it is its help.

    @dataclass(frozen=True, kw_only=True)
    class Config:
        steps: int = 1000
        '''Inner steps of each island.'''

becomes `--steps STEPS  Inner steps of each island (default: 1000)`. A flag that was not given does not appear in what
`given` returns, so that the dataclass's own default, or a preset's value, stays in force.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal


def add(parser: argparse.ArgumentParser, config: type, title: str, *, show_defaults: bool = True) -> None:
    """Adds a flag for every field of a dataclass, in a group of their own."""
    group = parser.add_argument_group(title)
    hints, texts = typing.get_type_hints(config), documentation(config)
    for item in dataclasses.fields(config):
        flag = "--" + item.name.replace("_", "-")
        text = texts.get(item.name, "").replace("%", "%%")
        if show_defaults and item.default not in (None, "", dataclasses.MISSING):
            text += f" (default: {item.default})"
        keywords: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": text}
        hint = hints[item.name]
        if hint is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(hint) is Literal:
            keywords["choices"] = typing.get_args(hint)
        else:
            keywords["type"] = _reader(hint)
            keywords["metavar"] = item.name.split("_")[-1].upper()
        group.add_argument(flag, **keywords)


def given(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """The fields of a dataclass that were given on the command line."""
    return {item.name: getattr(args, item.name) for item in dataclasses.fields(config) if hasattr(args, item.name)}


def documentation(config: type) -> dict[str, str]:
    """The string under each field of a dataclass.

    >>> from isles.core.method import Method
    >>> documentation(Method)["outer_momentum"]
    'mu: momentum of the outer optimizer.'
    """
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[statement.target.id] = " ".join(value.value.split())
    return texts


def _reader(hint: Any) -> Callable[[str], Any]:
    """How a flag of this type is read."""
    options = [option for option in _options(hint) if option is not type(None)]
    if len(options) == 1 and options[0] in (int, float, str):
        return options[0]  # type: ignore[no-any-return]
    assert any(typing.get_origin(option) is Sequence for option in options), f"no way to read {hint} from a flag"
    if Sequence[tuple[int, int]] in options:
        return pairs
    return _number_or_list if int in options else _list


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _number_or_list(text: str) -> Any:
    """A number, or a list in JSON."""
    try:
        return json.loads(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a JSON list") from None


def pairs(text: str) -> list[tuple[int, int]]:
    """Pairs of whole numbers: 50x3,25x6."""
    try:
        return [(int(first), int(second)) for first, second in (part.split("x") for part in text.split(",") if part)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of pairs such as 50x3,25x6") from None


def _list(text: str) -> list[int]:
    """Whole numbers, separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers separated by commas") from None
