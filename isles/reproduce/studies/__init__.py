"""The studies, in the order of docs/reproduction.md; each is a module with a `STUDY`."""

from __future__ import annotations

import importlib

from isles.reproduce.study import Study

NAMES = (
    "methods",
    "overlap",
    "bits",
    "fragments",
    "period",
    "islands",
    "overtraining",
    "similarity",
    "evaluated-weights",
    "scaling",
    "non-iid",
    "recipe",
    "worth",
)


def study(name: str) -> Study:
    """A study by its name.

    >>> study("bits").source
    'A Fig. 11'
    """
    if name not in NAMES:
        raise ValueError(f"there is no study {name!r}: choose one of {', '.join(NAMES)} (isles reproduce --list)")
    found: Study = importlib.import_module(f"isles.reproduce.studies.{name.replace('-', '_')}").STUDY
    return found
