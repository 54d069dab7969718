"""Events as Weights & Biases metrics, for those who keep their runs there."""

from __future__ import annotations

from typing import Any

from isles.view.scalars import curve, scalars


class WeightsAndBiases:
    """Feeds all curves of a run to a project, under the names that TensorBoard has too."""

    def __init__(self, project: str, config: dict[str, Any]) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise ValueError("--wandb needs wandb: pip install wandb") from None
        self._run: Any = wandb.init(project=project, config=config)
        # wandb's own step must never fall, and islands are not all at the same one: steps are a metric of ours.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def feed(self, event: dict[str, Any]) -> None:
        """Takes one event of the log."""
        numbers = {curve(name, island): value for name, island, value in scalars(event)}
        if numbers:
            self._run.log({"step": event.get("step"), **numbers})
        elif event["event"] == "end":
            self._run.finish()
