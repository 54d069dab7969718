"""The planner: what bandwidth do I need, what will I get.

    quantities   numbers with units, as people write them: 1Gbit, 50 ms, 1.3B
    workload     the model that is trained: layers, parameters, time of a step; the papers' presets
    fleet        the islands: how fast each computes, and its link
    anatomy      one training step, layer by layer: when a gradient is there, when a weight is needed
    simulate     the simulator: islands that compute, one queue to the link, exact in steady state
    closed_form  the same answers by formula, where there is one
    exchange     what one round costs on a real link: bytes, hops, seconds
    coding       what encoding and decoding cost
    honest       isles as it is, put into the simulator
    paper        the papers' conventions and published tables
    variants     the methods that are put side by side
    penalty      what each costs in loss, quoted from the papers
    memory       what each keeps, on the device and in host memory
    goodput      what is left when islands fail
    compare      all methods on one link; the bandwidth each needs
    recommend    the method with the least loss that is fast enough
    shared_link  a queue of events, and a link that is shared evenly
    store        islands that come and go: the real protocol, run on a store of names and sizes
    store_costs  what they ask of the store, what it stores, what that costs
    measured     a workload out of a run's events.jsonl
    present      the answer as text and as JSON
    plot, command, document     drawing it, `isles plan`, and docs/planning.md

Read them in this order. Everything up to `recommend` is pure, but for `coding.measure`, which looks at the clock. The
papers' mode does not even load torch.
"""

from isles.plan.fleet import Island, Link, alike
from isles.plan.honest import predict
from isles.plan.workload import PRESETS, Workload

__all__ = ["PRESETS", "Island", "Link", "Workload", "alike", "predict"]
