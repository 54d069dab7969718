"""Events as Weights & Biases metrics, for those who keep their runs there."""

from __future__ import annotations

from typing import Any


class WeightsAndBiases:
    """Feeds the steps of island 0, and the evaluations, to a project."""

    def __init__(self, project: str, config: dict[str, Any]) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise ValueError("--wandb needs wandb: pip install wandb") from None
        self._run: Any = wandb.init(project=project, config=config)

    def feed(self, event: dict[str, Any]) -> None:
        """Takes one event of the log."""
        if event["event"] in ("step", "eval") and event.get("island", 0) == 0:
            numbers = {name: value for name, value in event.items() if isinstance(value, (int, float))}
            self._run.log({f"{event['event']}/{name}": value for name, value in numbers.items()}, step=event["step"])
        elif event["event"] == "end":
            self._run.finish()
