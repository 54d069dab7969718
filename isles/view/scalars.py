"""The numbers of an event under the names that all dashboards share: TensorBoard, Weights & Biases, Prometheus.

A name is a group and a quantity (`train/loss`). What belongs to an island is told with its number: TensorBoard and
Weights & Biases get `train/loss/island_0`, Prometheus `isles_train_loss{island="0"}`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

# For each kind of event, its fields that become curves, and the curves' names.
SCALARS = {
    "step": {
        "loss": "train/loss",
        "learning_rate": "train/learning_rate",
        "tokens": "train/tokens",
        "seconds": "time/step_seconds",
        "wait_seconds": "time/wait_seconds",
        "bytes_sent": "network/bytes_per_step",
        "bytes_received": "network/bytes_received_per_step",
    },
    "apply": {"slack_seconds": "time/overlap_slack_seconds"},
    "eval": {
        "val_loss": "validation/loss",
        "val_bits_per_byte": "validation/bits_per_byte",
        "bytes_sent": "network/bytes_sent",
    },
}
UTILIZATION = "time/compute_utilization"


def scalars(event: dict[str, Any]) -> Iterator[tuple[str, int | None, float]]:
    """Name, island (None: of the whole run) and value of each number.

    >>> list(scalars({"event": "step", "island": 1, "step": 3, "loss": 2.5, "seconds": 4.0, "wait_seconds": 1.0}))[0]
    ('train/loss', 1, 2.5)
    >>> list(scalars({"event": "eval", "step": 3, "val_loss": 2.0, "val_bits_per_byte": None}))
    [('validation/loss', None, 2.0)]
    """
    kind = event["event"]
    island = None if kind == "eval" else int(event.get("island") or 0)
    for field, name in SCALARS.get(kind, {}).items():
        value = event.get(field)
        if isinstance(value, (int, float)) and math.isfinite(value):
            yield name, island, value
    if kind == "step" and event.get("seconds"):
        yield UTILIZATION, island, 1 - (event.get("wait_seconds") or 0.0) / event["seconds"]


def curve(name: str, island: int | None) -> str:
    """The name of a curve in a dashboard that knows no labels.

    >>> curve("train/loss", 0), curve("validation/loss", None)
    ('train/loss/island_0', 'validation/loss')
    """
    return name if island is None else f"{name}/island_{island}"
