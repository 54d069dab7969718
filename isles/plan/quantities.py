"""Numbers with units, as people write them: `1Gbit`, `200Mbit/s`, `50ms`, `1.3B`.

Bandwidth is in bits per second, as networks are sold: a plain number is bit/s. A capital B stands for bytes, so
`25MB/s` is 200 Mbit/s. Prefixes are powers of ten. What does not parse is a `ValueError` that shows what does.
"""

from __future__ import annotations

import math
import re

PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}

_NUMBER = r"([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_BANDWIDTH = re.compile(_NUMBER + r"\s*([kKMGT]?)(bits?|b|bytes?|B)?(?:/s|ps|/sec)?")
_QUANTITY = re.compile(_NUMBER + r"\s*([A-Za-z]*)")


def parse_bandwidth(text: str, name: str = "bandwidth") -> float:
    """Bits per second.

    >>> parse_bandwidth("1Gbit"), parse_bandwidth("200Mbit/s"), parse_bandwidth("20 Mbit"), parse_bandwidth("1e9")
    (1000000000.0, 200000000.0, 20000000.0, 1000000000.0)
    >>> parse_bandwidth("25MB/s")
    200000000.0
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    if not found:
        raise ValueError(
            f"{name} {text!r} is not understood: "
            "write a number and a unit, such as 1Gbit, 200Mbit/s, 20 Mbit or 1e9 (bit/s)"
        )
    number, prefix, unit = found.groups()
    bits = 8.0 if (unit and unit[0] in "B") or unit in ("byte", "bytes") else 1.0
    return positive(float(number) * PREFIXES[prefix] * bits, f"{name} {text!r}")


def format_bandwidth(bits_per_second: float) -> str:
    """
    >>> format_bandwidth(2e7), format_bandwidth(1.5e9), format_bandwidth(1e5)
    ('20 Mbit/s', '1.5 Gbit/s', '100 kbit/s')
    """
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_second >= size * 0.9999:  # a tick of a log axis may be a hair below its power of ten
            return f"{bits_per_second / size:.3g} {unit}"
    return f"{bits_per_second:.3g} bit/s"


def three_digits(value: float | None) -> str:
    """
    >>> three_digits(0.37276), three_digits(1000.0), three_digits(None)
    ('0.373', '1000', '-')
    """
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def parse_seconds(text: str, name: str = "time", zero: bool = False) -> float:
    """Seconds; a plain number is seconds. `zero`: nothing at all is allowed.

    >>> parse_seconds("50ms"), parse_seconds("0.1"), parse_seconds("2 min"), parse_seconds("30d")
    (0.05, 0.1, 120.0, 2592000.0)
    """
    value = _scaled(text, name, SECONDS, "s", "50ms, 0.1 (seconds), 2min, 3h or 30d")
    if zero and value == 0:
        return 0.0
    return positive(value, f"{name} {text!r}", or_zero=zero)


def parse_count(text: str, name: str = "count") -> float:
    """How many.

    >>> parse_count("1e9"), parse_count("1.3B"), parse_count("124M")
    (1000000000.0, 1300000000.0, 124000000.0)
    """
    return positive(_scaled(text, name, COUNTS, "", "1e9, 1.3B, 124M or 350_000"), f"{name} {text!r}")


def positive(value: float, what: str, or_zero: bool = False) -> float:
    """The value, if it is a finite number above zero; `what` it is, for the error."""
    if not math.isfinite(value) or value < 0 or (value == 0 and not or_zero):
        raise ValueError(f"{what} must be {'0 or more' if or_zero else 'greater than 0'}")
    return value


def _scaled(text: str, name: str, units: dict[str, float], default: str, examples: str) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    unit = found.group(2) or default if found else None
    if found is None or unit not in units:
        raise ValueError(f"{name} {text!r} is not understood: write it like {examples}")
    return float(found.group(1)) * units[unit]
