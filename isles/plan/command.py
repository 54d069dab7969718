"""`isles plan`: what bandwidth do I need, what will I get.

    isles plan --preset 1B --bandwidth 1Gbit
    isles plan --params 124M --layers 12 --step-time 0.35 --bandwidth 20Mbit --latency 50ms --islands 4
    isles plan --events runs/demo/isles --bandwidth 100Mbit --plot utilisation.png
    isles plan --paper --params 1e9 --layers 24 --step-time 0.1 --sync-every 100 --json
    isles plan --store aws --params 124M --layers 12 --step-time 0.35 --bandwidth 50Mbit --store-latency 50ms

Lists, where islands differ: `--step-time 0.1,0.12`, `--upload 20Mbit,1Gbit`, one entry per island.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isles.flags import pairs
from isles.plan import present
from isles.plan.coding import Coding, measure
from isles.plan.compare import Question, compare
from isles.plan.fleet import Island, Link
from isles.plan.goodput import Failures
from isles.plan.measured import facts_of_run
from isles.plan.quantities import parse_bandwidth, parse_count, parse_seconds
from isles.plan.recommend import PUBLISHED_PERIODS, recommend
from isles.plan.variants import Variant, custom_variant, standard_variants
from isles.plan.workload import PRESETS, Workload, check_fragments, with_changes

DEFAULT_SYNC_EVERY = 100


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `isles plan`."""
    model = parser.add_argument_group("the model")
    model.add_argument("--preset", choices=list(PRESETS), help="one of the papers' models (default 1B)")
    model.add_argument(
        "--events", metavar="RUN", help="take model and step time from a run: its folder or events.jsonl"
    )
    model.add_argument("--params", help="parameters: 1e9, 124M, 1.3B")
    model.add_argument("--layers", type=int, help="layers of the stack")
    model.add_argument(
        "--step-time", help="time of a step without communication: 0.1, 350ms; a list for unequal islands"
    )
    model.add_argument("--outside-params", help="of the parameters, those outside the layers (embeddings, head)")
    model.add_argument("--ranks", type=int, help="processes per island that share the model (default 1; presets: many)")
    model.add_argument("--tokens", help="how many tokens to train on: 25B")
    model.add_argument("--tokens-per-step", help="of all islands together: 1e6")
    model.add_argument("--steps", type=int, help="how many steps to train, instead of tokens")
    link = parser.add_argument_group("the islands and their links")
    link.add_argument("--islands", type=int, help="how many (default 2)")
    link.add_argument(
        "--bandwidth", default="1Gbit", help="1Gbit, 200Mbit/s, 1e9; a list for unequal islands (default %(default)s)"
    )
    link.add_argument("--upload", help="bandwidth out of an island, where it is another one")
    link.add_argument("--download", help="bandwidth into an island, where it is another one")
    link.add_argument("--latency", default="0", help="one way, half of what ping shows: 25ms (default %(default)s)")
    link.add_argument(
        "--reduction", choices=("auto", "all-gather", "reduce-scatter"), default="auto", help="how islands average"
    )
    method = parser.add_argument_group("the method", "any of the last five adds a row of your own")
    method.add_argument("--sync-every", type=int, help="H (default 100; the recommendation looks at 30 and 100)")
    method.add_argument("--fragments", type=int, help="into how many fragments the model is cut")
    method.add_argument("--fragment-layers", type=int, help="layers per fragment (default 3)")
    method.add_argument(
        "--pattern", choices=("strided", "sequential"), help="which layers share a fragment (default strided)"
    )
    method.add_argument("--overlap", type=int, help="steps between sending and applying")
    method.add_argument("--dense-start", type=pairs, help="shorter rounds at first: 50x3 is fifty rounds of 3 steps")
    method.add_argument("--codec", help="fp32, bf16, int8, e3m0 ...")
    method.add_argument("--update", choices=("fresh", "delayed", "eager"), help="which mean an outer step uses")
    method.add_argument("--delay-rounds", type=int, help="how many rounds late, for delayed and eager")
    costs = parser.add_argument_group("costs besides the link")
    costs.add_argument("--encode-rate", help="parameters encoded per second and rank: 70M (default: no time)")
    costs.add_argument("--decode-rate", help="parameters decoded per second and rank: 200M")
    costs.add_argument("--measure-coding", action="store_true", help="time the codecs on this machine instead")
    costs.add_argument(
        "--outer-state", choices=("device", "host"), default="device", help="where anchor and momentum are kept"
    )
    costs.add_argument("--mtbf", help="mean time between failures of one island: 30d")
    costs.add_argument("--restart-time", default="5min", help="from a failure to training again (default %(default)s)")
    costs.add_argument("--checkpoint-every", default="30min", help="training between checkpoints (default %(default)s)")
    costs.add_argument("--checkpoint-time", default="0", help="what writing one costs the loop (default %(default)s)")
    costs.add_argument(
        "--on-loss",
        choices=("restart", "continue"),
        default="restart",
        help="what the others do when an island is lost",
    )
    store = parser.add_argument_group("islands that come and go", "joined by an object store instead of links")
    store.add_argument(
        "--store",
        nargs="?",
        const="aws",
        choices=("aws", "gcs", "r2", "folder"),
        help="what is asked of a store, and what it costs by this price list (default %(const)s)",
    )
    store.add_argument("--store-latency", help="of a request, there and back (default 50ms; of a folder 1ms)")
    store.add_argument(
        "--patience", help="how long islands wait for each other: 60s (default: as StoreWorld chooses it)"
    )
    store.add_argument("--prices", help="in dollars, where yours differ: writes=5,reads=0.4,storage=0.023,out=0.09")
    answer = parser.add_argument_group("the answer")
    answer.add_argument("--utilisation", "--utilization", default="95", help="wanted, in percent (default %(default)s)")
    answer.add_argument("--paper", action="store_true", help="the papers' conventions, for reproducing their tables")
    answer.add_argument("--plot", metavar="FILE", help="draw utilisation against bandwidth: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints the answer, returns it for --json."""
    _check_together(args)
    facts = facts_of_run(args.events) if args.events else {}
    islands = args.islands if args.islands is not None else int(facts.get("islands", 2))
    if islands < 1:
        raise ValueError(f"--islands {islands} must be at least 1")
    step_seconds = _each(args.step_time, islands, "--step-time", lambda text: parse_seconds(text, "--step-time"))
    workload = _workload(args, facts, max(step_seconds) if step_seconds else None)
    sync_every = DEFAULT_SYNC_EVERY if args.sync_every is None else args.sync_every
    cutting = _given(args, "fragments", "fragment_layers", "pattern")
    _check_cutting(cutting, workload)
    variants = standard_variants(sync_every, **cutting)
    variants += _own_variant(args, sync_every, cutting)
    question = Question(
        workload=workload,
        fleet=_fleet(args, islands, step_seconds or [workload.step_seconds] * islands),
        paper=args.paper,
        cutting=cutting,
        reduction=args.reduction,
        coding={} if args.paper else _coding(args, variants),
        failures=_failures(args),
        outer_on_host=args.outer_state == "host",
    )
    if args.store:
        return _on_a_store(args, question, variants, sync_every)
    wanted = _percent(args.utilisation)
    rows = compare(question, variants)
    best = recommend(question, wanted, PUBLISHED_PERIODS if args.sync_every is None else (sync_every,))
    print(present.text(question, rows, best, wanted, sync_every))
    if args.plot:
        from isles.plan.plot import save

        save(question, rows, sync_every, Path(args.plot))
        print(f"\ndrawn: {args.plot}")
    return present.as_dict(question, rows, best, wanted, sync_every)


def _on_a_store(
    args: argparse.Namespace, question: Question, variants: list[Variant], sync_every: int
) -> dict[str, Any]:
    from isles.plan import store_costs as costs

    latency = _optional(args.store_latency, lambda text: parse_seconds(text, "--store-latency", zero=True))
    patience = _optional(args.patience, lambda text: parse_seconds(text, "--patience", zero=True))
    store = costs.Store.of(args.store, latency, patience, args.prices)
    plan = costs.plan(question, variants, store, sync_every)
    print(costs.text(plan))
    return costs.as_dict(plan)


def _workload(args: argparse.Namespace, facts: dict[str, Any], step_seconds: float | None) -> Workload:
    """The preset, the run or the flags; flags win."""
    count = lambda name: _optional(getattr(args, name), lambda text: parse_count(text, "--" + name.replace("_", "-")))
    parameters, outside, tokens_per_step = count("params"), count("outside_params"), count("tokens_per_step")
    tokens = count("tokens")
    if outside is None and parameters is None:
        outside = facts.get("outside_parameters")
    if args.steps is not None:
        if args.steps < 1:
            raise ValueError(f"--steps {args.steps} must be at least 1")
        tokens, tokens_per_step = float(args.steps), 1.0
    changes = {
        "parameters": _whole(parameters if parameters is not None else facts.get("parameters")),
        "layers": args.layers if args.layers is not None else facts.get("layers"),
        "step_seconds": step_seconds if step_seconds is not None else facts.get("step_seconds"),
        "outside_parameters": _whole(outside),
        "ranks": args.ranks,
        "tokens_per_step": tokens_per_step if tokens_per_step is not None else facts.get("tokens_per_step"),
        "tokens": tokens,
    }
    own_model = args.events or parameters is not None or args.layers is not None
    if args.preset or not own_model:
        return with_changes(PRESETS[args.preset or "1B"], **changes)
    flags = {"parameters": "--params", "layers": "--layers", "step_seconds": "--step-time"}
    missing = [flag for name, flag in flags.items() if changes[name] is None]
    if missing:
        source = f"{args.events} does not say all about the model" if args.events else "the model is not complete"
        raise ValueError(f"{source}: give {' and '.join(missing)} too, or --preset")
    return Workload(
        name=str(facts.get("name", "yours")), **{name: value for name, value in changes.items() if value is not None}
    )


def _fleet(args: argparse.Namespace, islands: int, step_seconds: list[float]) -> list[Island]:
    bandwidth = _each(args.bandwidth, islands, "--bandwidth", lambda text: parse_bandwidth(text, "--bandwidth")) or []
    upload = _each(args.upload, islands, "--upload", lambda text: parse_bandwidth(text, "--upload")) or bandwidth
    download = (
        _each(args.download, islands, "--download", lambda text: parse_bandwidth(text, "--download")) or bandwidth
    )
    latency = parse_seconds(args.latency, "--latency", zero=True)
    return [
        Island(
            step_seconds=seconds,
            link=Link(up_bits_per_second=up, down_bits_per_second=down, latency_seconds=latency),
        )
        for seconds, up, down in zip(step_seconds, upload, download, strict=True)
    ]


def _own_variant(args: argparse.Namespace, sync_every: int, cutting: dict[str, Any]) -> list[Variant]:
    knobs = _given(args, "overlap", "dense_start", "codec", "update", "delay_rounds")
    if not knobs:
        return []
    from isles.core.method import Method

    everything = {"sync_every": sync_every, **cutting, **knobs}
    return [custom_variant(Method(**everything), everything)]


def _coding(args: argparse.Namespace, variants: list[Variant]) -> dict[str, Coding]:
    """Speeds by codec, where the flags say that coding takes time."""
    encode = _optional(args.encode_rate, lambda text: parse_count(text, "--encode-rate"))
    decode = _optional(args.decode_rate, lambda text: parse_count(text, "--decode-rate"))
    if not (args.measure_coding or encode or decode):
        return {}
    found = {}
    for codec in dict.fromkeys(variant.codec for variant in variants):
        speed = measure(codec) if args.measure_coding else Coding.free()
        given = {"encode_per_second": encode, "decode_per_second": decode}
        found[codec] = speed.at(**{name: value for name, value in given.items() if value})
    return found


def _failures(args: argparse.Namespace) -> Failures | None:
    if args.mtbf is None:
        return None
    return Failures(
        mean_seconds_between_failures=parse_seconds(args.mtbf, "--mtbf"),
        restart_seconds=parse_seconds(args.restart_time, "--restart-time", zero=True),
        checkpoint_every_seconds=parse_seconds(args.checkpoint_every, "--checkpoint-every"),
        checkpoint_seconds=parse_seconds(args.checkpoint_time, "--checkpoint-time", zero=True),
        on_loss=args.on_loss,
    )


def _check_cutting(cutting: dict[str, Any], workload: Workload) -> None:
    for name, value in cutting.items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")
    check_fragments(cutting.get("fragments"), workload.layers, outside=workload.outside_parameters > 0)


def _check_together(args: argparse.Namespace) -> None:
    """Finds what can be found before anything is computed; no flag is silently ignored."""
    for one, other in (("preset", "events"), ("steps", "tokens"), ("fragments", "fragment_layers")):
        if getattr(args, one) is not None and getattr(args, other) is not None:
            raise ValueError(f"--{one} and --{other.replace('_', '-')} say the same: give one of them")
    honest_only = {
        "--latency": args.latency != "0",
        "--reduction": args.reduction != "auto",
        "--encode-rate": args.encode_rate is not None,
        "--decode-rate": args.decode_rate is not None,
        "--measure-coding": args.measure_coding,
        "--outside-params": args.outside_params is not None,
        "--ranks": args.ranks is not None,
    }
    islands_only = {
        **honest_only,
        "--paper": args.paper,
        "--plot": args.plot is not None,
        "--mtbf": args.mtbf is not None,
        "--outer-state": args.outer_state != "device",
        "--utilisation": args.utilisation != "95",
    }
    del islands_only["--outside-params"]
    given = [flag for flag, used in islands_only.items() if used]
    if args.store and given:
        raise ValueError(f"{', '.join(given)} and --store do not go together: they are about other kinds of runs")
    about_stores = {"--store-latency": args.store_latency, "--patience": args.patience, "--prices": args.prices}
    for flag, value in about_stores.items():
        if value is not None and not args.store:
            raise ValueError(f"{flag} {value} is about a store: give --store too")
    if args.plot and Path(args.plot).suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {args.plot} must end in .png, .svg or .pdf")
    if args.plot and not Path(args.plot).parent.is_dir():
        raise ValueError(f"--plot {args.plot}: no such folder")
    given = [flag for flag, used in honest_only.items() if used]
    if args.paper and given:
        raise ValueError(
            f"{', '.join(given)} and --paper do not go together: the papers count bandwidth and layers only"
        )


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise ValueError(f"--utilisation {text!r} is not understood: write a number of percent, such as 95") from None
    if not 0 < value <= 100:
        raise ValueError(f"--utilisation {text} must be above 0 and at most 100 (percent)")
    return value / 100


def _each(text: str | None, islands: int, flag: str, parse: Callable[[str], float]) -> list[float] | None:
    """One value for each island, from one value or a list of so many."""
    if text is None:
        return None
    values = [parse(entry) for entry in text.split(",")]
    if len(values) not in (1, islands):
        raise ValueError(f"{flag} {text!r} has {len(values)} entries for {islands} islands: give one, or one for each")
    return values * islands if len(values) == 1 else values


def _optional(text: str | None, parse: Callable[[str], float]) -> float | None:
    return None if text is None else parse(text)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}
