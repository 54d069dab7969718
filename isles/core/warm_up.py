"""Kernels are ready before training begins: compiled, or loaded from their caches on disk, when DiLoCo is made.

On a CPU that is one group of kernels for the codec and one for the outer step (`isles.wire.fused`). On an accelerator a
kernel has variants, by codec, momentum, mixing and size of the vector. The first launch of each would compile it, in
the training loop, for a second or so. Here each that the method may need is called once with the fragment's own
tensors, without running (`device_kernels.compiling`):

    encode      anchor - theta -> payload
    step        outer step and mixing, from payloads and from a mean
    mean        payloads -> mean, where the step is another one: dense start, closing round, an optimizer of torch's
    add         an own payload to a vector (eager updates, before the first mean is there), or as one
"""

from __future__ import annotations

import torch
from torch import Tensor

from isles.core.device import SideStream
from isles.core.fragments import Fragment
from isles.core.method import Method
from isles.core.offload import Offload
from isles.core.outer import OuterSGD, thetas_on_device
from isles.core.outer_steps import OUTER
from isles.wire import device_kernels, fused
from isles.wire.codec import Codec
from isles.wire.reduction import Gathered


def warm_up(
    method: Method,
    codec: Codec,
    fragments: list[Fragment],
    offload: Offload,
    sides: list[SideStream],
    sgd: OuterSGD | None,
) -> None:
    """All of them, for the devices that the fragments are on. `sgd`: the outer optimizer, if it is taken there."""
    fused.warm_up({codec.kernels, fused.OUTER})
    for index, (fragment, side) in enumerate(zip(fragments, sides, strict=True)):
        if side.asynchronous and fragment.numel and device_kernels.available(side.device):
            try:
                with device_kernels.compiling(), side.follow():
                    _compile(method, codec, fragment, index, offload, side, sgd)
                side.join()
            except Exception as error:  # whatever is wrong with Triton here, there is a way without it
                device_kernels.give_up(side.device, error)
    offload.write_back()


def _compile(
    method: Method,
    codec: Codec,
    fragment: Fragment,
    index: int,
    offload: Offload,
    side: SideStream,
    sgd: OuterSGD | None,
) -> None:
    state = offload.take(index, OUTER if sgd else (), aside=True)
    anchor, thetas = state.anchor, thetas_on_device(fragment, state.anchor)
    payload = torch.empty(codec.num_bytes(fragment.numel), dtype=torch.uint8, device=side.device)
    gathered = Gathered([payload], [1.0], codec, fragment.numel)
    decodes, means = device_kernels.decodes(codec, anchor), list[Tensor | Gathered]([anchor])
    if thetas is not None and device_kernels.encodes(codec, anchor):
        finite = torch.ones(1, dtype=torch.int32, device=side.device)
        device_kernels.encode_difference(codec, anchor, thetas, payload, finite)
    if decodes:
        means.append(gathered)
        device_kernels.weighted_mean(gathered, anchor)
        for fresh in (True, False) if method.update == "eager" else (True,):
            device_kernels.accumulate(codec, payload, anchor, 1.0, fresh=fresh)
    if thetas is not None and sgd is not None:
        for mean in means:
            sgd.update_and_mix(anchor, mean, state.velocity, *method.outer_at(1), thetas, method.mixing)
