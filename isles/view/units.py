"""Numbers with units, as people read them: bytes, counts, durations, shares."""

from __future__ import annotations

from typing import Any


def number_of_bytes(value: float | None) -> str:
    """Decimal units, as networks have them.

    >>> number_of_bytes(8_912_345), number_of_bytes(512), number_of_bytes(None)
    ('8.91 MB', '512 B', '-')
    """
    if value is None:
        return "-"
    return f"{value:,.0f} B" if value < 1000 else _scaled(value, (" kB", " MB", " GB", " TB", " PB"))


def count(value: float | None) -> str:
    """
    >>> count(20_480_000), count(1_310_720_000), count(512)
    ('20.5M', '1.31B', '512')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if value < 1000 else _scaled(value, ("k", "M", "B", "T"))


def duration(seconds: float | None) -> str:
    """
    >>> duration(7.25), duration(134), duration(5000), duration(200_000)
    ('7.2 s', '2 min 14 s', '1 h 23 min', '2 d 7 h')
    """
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // smaller} {smaller_name}"
    return f"{seconds:.1f} s"


def brief(seconds: float | None) -> str:
    """A duration that may be far below a second.

    >>> brief(0.0123), brief(0.75), brief(-2.5), brief(200), brief(None)
    ('12 ms', '0.75 s', '-2.5 s', '3 min 20 s', '-')
    """
    if seconds is None:
        return "-"
    size = abs(seconds)
    text = f"{1000 * size:.0f} ms" if size < 0.0995 else f"{size:.2g} s" if size < 10 else duration(size)
    return f"-{text}" if seconds < 0 else text


def share(value: float | None) -> str:
    """
    >>> share(0.98765), share(1.0)
    ('98.8 %', '100 %')
    """
    return "-" if value is None else f"{100 * value:.3g} %"


def rough_share(value: float | None) -> str:
    """
    >>> rough_share(0.9371), rough_share(1.0), rough_share(-0.004)
    ('94 %', '100 %', '0 %')
    """
    return "-" if value is None else f"{round(100 * value)} %"


def ratio(value: float | None) -> str:
    """
    >>> ratio(402.3), ratio(8.04), ratio(1)
    ('402x', '8.0x', '1.0x')
    """
    return "-" if value is None else f"{value:,.0f}x" if value >= 100 else f"{value:.1f}x"


def decimal(value: Any, digits: int = 3) -> str:
    """
    >>> decimal(3.21456), decimal(None)
    ('3.215', '-')
    """
    return "-" if value is None else f"{value:.{digits}f}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    unit = units[0]
    for unit in units:  # noqa: B007  (the last unit stays for whatever is larger)
        value /= 1000
        if value < 999.5:
            break
    return f"{value:.3g}{unit}" if value < 999.5 else f"{value:,.0f}{unit}"
