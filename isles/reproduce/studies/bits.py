"""How few bits? Number formats against sparse ones of the same size, for streaming and for eager."""

from __future__ import annotations

from typing import Any

from isles.core.method import Method
from isles.reproduce import figures
from isles.reproduce.job import Job
from isles.reproduce.scale import Scale
from isles.reproduce.study import Change, Finding, Records, Study, all_of

FORMATS = ("bf16", "fp8", "int8", "int4", "e3m0")
SPARSE = ("topk", "random-drop", "dare")
UPDATES = {"streaming": Method.streaming, "eager": Method.eager}


def _configurations(scale: Scale) -> dict[str, Job]:
    from isles.wire.codecs import codecs

    jobs = {"data-parallel": scale.job(model=scale.small_model)}
    plain = [codec for codec in ("fp32", *FORMATS, *SPARSE, "int2") if codec in codecs]
    fed_back = [codec for codec in ("int2", "topk") if codec in codecs]
    for update, make in UPDATES.items():
        for codec, feedback in [*((c, False) for c in plain), *((c, True) for c in fed_back)]:
            method = make(sync_every=scale.sync_every, codec=codec, error_feedback=feedback)
            name = f"{update}: {codec}{' with feedback' * feedback}"
            jobs[name] = scale.job(method, model=scale.small_model)
    return jobs


def _findings(records: Records) -> list[Finding]:
    return [finding for update in UPDATES for finding in _of(records, update)]


def _of(records: Records, update: str) -> list[Finding]:
    def change(codec: str, base: str) -> Change:
        return records.change(f"{update}: {codec}", f"{update}: {base}")

    dense = {codec: change(codec, "fp32") for codec in FORMATS}
    sparse = {codec: change(codec, "e3m0") for codec in SPARSE}
    worst = max(dense, key=lambda codec: dense[codec].mean)
    worst_sparse = max(sparse, key=lambda codec: sparse[codec].mean)
    found = [
        Finding(
            f"{update}: from fp32 down to 4 bits nothing changes",
            "no difference (A Fig. 11); int4 +0.09 % in later work",
            f"{worst} is the worst: {dense[worst]}; e3m0 {dense['e3m0']}, int4 {dense['int4']}",
            "all within 0.5 %",
            dense[worst].below(0.005),
        ),
        Finding(
            f"{update}: at the bytes of 4 bits, dropping values is worse",
            "topk, DARE and random dropping worse (A Fig. 11)",
            ", ".join(f"{codec} {cost}" for codec, cost in sparse.items()) + " against e3m0",
            "all worse",
            all_of(*(cost.above(0.0) for cost in sparse.values())),
        ),
        Finding(
            f"{update}: random dropping is the worst",
            "FedDropout the worst (A Fig. 11)",
            f"the worst is {worst_sparse}",
            "random-drop",
            worst_sparse == "random-drop",
        ),
    ]
    if f"{update}: int2" in records.names:
        two, fed = change("int2", "fp32"), change("int2 with feedback", "fp32")
        found.append(
            Finding(
                f"{update}: two bits are too few without error feedback, and enough with it (the latter ours)",
                "+32 % without (later work)",
                f"{two} without, {fed} with",
                "above 1 % without, below 1 % with",
                all_of(two.above(0.01), fed.below(0.01)),
            )
        )
    return found


def _plot(records: Records, figure: Any) -> None:
    for axes, update in zip(figure.subplots(1, 2), UPDATES, strict=True):
        names = [name for name in records.names if name.startswith(f"{update}: ")]
        rows = {
            f"{name.split(': ')[1]}, {records.of(name)[0]['bits_per_parameter']:.3g} bits": records.values(name)
            for name in names
        }
        figures.dots(axes, rows, base=next(iter(rows)))
        figures.quiet(axes, figures.LOSS, "", update)


STUDY = Study(
    name="bits",
    title="Bits on the wire",
    claim="Outer gradients in 4 bits lose nothing against fp32; dropping values at the same size is worse.",
    source="A Fig. 11",
    expectation="The same; two bits need error feedback.",
    configurations=_configurations,
    findings=_findings,
    plot=_plot,
)
