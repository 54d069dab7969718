"""A whole round late: eager updates or an overlap of H - 1 steps, and with how much mixing?

    python experiments/late.py --data BOOKS --val BOOKS_HELD_OUT --model micro --seeds 3
    python experiments/late.py --data BOOKS --val BOOKS_HELD_OUT --model mini --seeds 3 --few

Both tolerate the same latency. Prints a table; docs/log.md has the finding, `Method.distant` the answer. Finished runs
are kept, as those of `isles reproduce`.
"""

from __future__ import annotations

import argparse
import statistics

from isles.core.method import Method
from isles.reproduce.job import Job, Text
from isles.reproduce.pool import run_tasks, tasks_of

EAGER_MIXINGS, FEW_EAGER_MIXINGS = (0.0, 0.5, 0.75, 0.9), (0.0, 0.75)
OVERLAP_MIXINGS, FEW_OVERLAP_MIXINGS = (0.5, 0.75, 0.9), (0.75, 0.9)


def settings(every: int, few: bool) -> dict[str, Method | None]:
    """What is compared; few: without the mixings that lost at the smaller size."""
    eager = {
        f"eager, mixing {mixing:g}": Method.eager(sync_every=every, mixing=mixing)
        for mixing in (FEW_EAGER_MIXINGS if few else EAGER_MIXINGS)
    }
    long = {
        f"overlap {every - 1}, mixing {mixing:g}": Method.streaming(sync_every=every, overlap=every - 1, mixing=mixing)
        for mixing in (FEW_OVERLAP_MIXINGS if few else OVERLAP_MIXINGS)
    }
    return {"data-parallel": None, "streaming": Method.streaming(sync_every=every), **eager, **long}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--model", default="micro")
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument("--steps", type=int, default=2100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--few", action="store_true", help="six settings instead of nine")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    text = Text(args.data, args.val)
    jobs = {
        name: Job(method=method, model=args.model, steps=args.steps)
        for name, method in settings(args.sync_every, args.few).items()
    }
    losses: dict[str, list[float]] = {name: [] for name in jobs}
    for task, record in run_tasks(tasks_of(jobs, args.seeds, text), text, workers=args.workers):
        losses[task.name].append(record["val_loss"])
    base = statistics.fmean(losses["data-parallel"])
    print("| setting | validation loss | spread | against data-parallel |\n|---|---|---|---|")
    for name, values in losses.items():
        mean = statistics.fmean(values)
        print(f"| {name} | {mean:.4f} | {max(values) - min(values):.4f} | {100 * (mean / base - 1):+.2f} % |")


if __name__ == "__main__":
    main()
