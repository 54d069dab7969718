"""Small JSON documents, read strictly.

What another island has written is checked before it is used: a bounded size, exactly the expected fields, every value
of its type and in its range, nothing evaluated. A document is a dataclass. The types of its fields, those of this file,
say what they accept; `rules` says what must hold between fields. What does not fit is a `MismatchError` that names the
object in the store, the field and its value.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

from isles.wire.world import MismatchError

MAX_DOCUMENT_BYTES = 1 << 20
MAX_NUMBER = 1 << 53
MAX_FLOAT = sys.float_info.max
D = TypeVar("D", bound="Document")


class DamagedError(MismatchError):
    """What was read cannot be what was written. Reading it again may help."""


class Rule(NamedTuple):
    """What a field accepts."""

    holds: Callable[[Any], bool]
    wanted: str


def at_least(least: int) -> Rule:
    """Integers."""
    return Rule(lambda value: type(value) is int and least <= value <= MAX_NUMBER, f"an integer from {least} on")


Count = Annotated[int, at_least(0)]
Positive = Annotated[int, at_least(1)]
Weight = Annotated[
    float, Rule(lambda value: type(value) in (int, float) and 0 <= value <= MAX_FLOAT, "a finite number, not negative")
]
Flag = Annotated[bool, Rule(lambda value: type(value) is bool, "true or false")]
Text = Annotated[str, Rule(lambda value: type(value) is str, "a text")]
Name = Annotated[str, Rule(lambda value: type(value) is str and bool(value), "a text that is not empty")]
SHA256 = re.compile(r"[0-9a-f]{64}")
Sha256 = Annotated[
    str, Rule(lambda value: type(value) is str and SHA256.fullmatch(value) is not None, "a sha256 in hex")
]


class Document:
    """A dataclass that is stored as JSON."""

    def pack(self) -> bytes:
        document = asdict(self)  # type: ignore[call-overload]
        data = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        if len(data) > MAX_DOCUMENT_BYTES:  # nobody could read it, and some documents are written once and for ever
            raise ValueError(f"a {type(self).__name__} of {len(data)} bytes: the most is {MAX_DOCUMENT_BYTES}")
        return data

    @classmethod
    def parse(cls: type[D], data: bytes, name: str) -> D:
        """Reads the object `name`, or raises."""
        kind: Any = cls
        read: D = _parse(kind, data, name)
        return read

    def rules(self) -> dict[str, Rule]:
        """What must hold between fields, by the field that is to blame."""
        return {}


@functools.lru_cache(maxsize=16)  # islands of one process read the same objects at about the same time
def _parse(kind: type, data: bytes, name: str) -> Any:
    if len(data) > MAX_DOCUMENT_BYTES:
        raise MismatchError(f"{name} has {len(data)} bytes: the most is {MAX_DOCUMENT_BYTES}")
    try:
        document = json.loads(data.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{name} is damaged, or not an object of isles: {str(error)[:200]}") from None
    return _read_object(kind, document, name)


def _read_object(kind: Any, document: Any, name: str) -> Any:
    types = _types(kind)
    if not isinstance(document, dict) or document.keys() != types.keys():
        found = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise MismatchError(f"{name}: expected the fields {', '.join(sorted(types))}, found {str(found)[:200]}")
    read = kind(**{field: _read(types[field], value, name, field) for field, value in document.items()})
    for field, rule in read.rules().items():
        _check(rule, getattr(read, field), name, field)
    return read


def _read(kind: Any, value: Any, name: str, field: str) -> Any:
    if is_dataclass(kind):
        return _read_object(kind, value, name)
    if isinstance(rule := get_args(kind)[-1], Rule):
        _check(rule, value, name, field)
        return value
    _check(Rule(lambda value: type(value) is list, "a list"), value, name, field)
    return tuple(_read(get_args(kind)[0], each, name, field) for each in value)


def _check(rule: Rule, value: Any, name: str, field: str) -> None:
    if not rule.holds(value):
        raise MismatchError(f"{name}: {field} is {str(value)[:200]}, and must be {rule.wanted}")


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a field is there twice")
    return document


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not a number")
