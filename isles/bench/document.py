"""docs/performance.md, from the results of one run of `isles bench`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isles.bench import engine
from isles.bench.tables import tables

PAGE = """# What isles costs

Made by one command, in one run:

    {command}

{machine}. Times mean something on that machine only; ratios are of things measured side by side, in turns. A
machine that does other things at the same time makes single times longer, and ratios a little unsteady.

## In short

{checks}

## Codecs

Speed of one thread on {values:,} values, as a fraction of `copy_` of the same fp32 bytes into memory that exists: 1 is
as fast as memory can be copied. *encode, into* writes to a payload that exists, *encode* to a new one, which also pays
for fresh pages of memory; *accumulate* decodes a payload and adds it to a sum, with a weight; *decode* makes a new
vector. Kernels are compiled by numba, one pass over memory (`isles/wire/kernels.py`); without numba PyTorch does the
same, bit for bit ("e3m0, PyTorch"). fp16, fp8, int2, topk, random-drop and dare have no kernels.

{codecs}

## Engine

A stack of {layers} layers with fused AdamW on one thread, H = {sync_every}, streaming in e3m0, {engine_fragments}
fragments; bare steps and steps with isles take turns in one process. *Overhead* is the time inside isles against the
rest of the step, over whole periods; *CPU time* is the same in CPU time. *All threads* and *wall* compare steps with
isles and bare ones from outside, in CPU time and in wall time: nothing is left out, and the noise of the machine is in
them. *Longest stall* is the most that isles takes out of one step, and *longest step*
the median bare step with that stall in it, against the median bare step. One island is alone here: the link is of
unlimited speed, and decoding, which otherwise is done in the background, is counted.

{engine}

The longest step that was seen, whatever the cause, against the median: {seen}.

Two islands, each a process with one thread for training and others that communicate and decode, over loopback,
{islands_parameters} parameters. *Waiting* is the share of the time in which an island waits for a mean, because it has
not come or because the other island is behind; it is in *overhead*, and in the longest stall.

{islands}

Where isles' time goes. The ranges are those that a profile of any training with isles shows (`torch.profiler`);
*isles.encode* is the outer gradient and its encoding in one pass, *isles.outer_gradient* what is around that pass, and
*isles.wait* decoding, as the island is alone; the rest is the schedule, handing payloads over, giving memory back, and
what profiling takes.

{phases}

## Growth

What isles takes out of the training loop in one round of all fragments. Cost goes with the number of parameters to the
power of {exponent:.2f} (fit over all sizes, 8 fragments):

{parameters}

and, at equal size, not with the number of fragments, but for a fixed cost of Python, a tenth or two of a millisecond
for each fragment in each round, which shows where fragments are many and very small, and new memory for the mean, which
shows where they are few and large. The longest stall shrinks with the fragments:

{fragments}

## Memory

All tensors on the device, counted one by one as they come and go ({memory_parameters} parameters; ratios do not depend
on the size). *At rest* is what stays between steps: weights and Adam are 3 times the weights, anchor and outer momentum
make it 5, which is the papers' 5/3. With `DiLoCo(..., outer_device="cpu")` the outer state is in host memory and only
the fragment at work is on the device. *Peak* is the most at any moment, with gradients, activations and temporaries.
The bare loop is what each rank holds in data-parallel training with `gradient_as_bucket_view=True`; plain DDP has the
gradients twice. The last column is the peak with codecs in PyTorch.

{memory}
"""


def write(result: Mapping[str, Any], path: Path) -> None:
    """Writes the page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(markdown(result), "utf-8")


def markdown(result: Mapping[str, Any]) -> str:
    """The page, from the results of all parts."""
    seen = [
        f"{engine.label(row)}: {row['longest_step_seen']:.1f}x with isles, {row['longest_bare_step_seen']:.1f}x without"
        for row in result["engine"]
    ]
    return PAGE.format(
        **{name: table.markdown() for name, table in tables(result).items()},
        command=result["command"],
        machine=result["machine"],
        values=result["values"],
        layers=engine.LAYERS,
        sync_every=result["engine"][0]["sync_every"],
        engine_fragments=result["engine"][0]["fragments"],
        islands_parameters=f"{result['islands'][0]['parameters'] / 1e6:.1f}M",
        seen="; ".join(seen),
        exponent=result["scaling"]["exponent"],
        memory_parameters=f"{result['memory']['bare loop']['parameters'] / 1e6:.2f}M",
    )
