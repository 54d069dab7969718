"""Cutting a model into fragments, the parts that are synchronised separately.

A fragment is made of whole layers: either every n-th one (strided, the papers' default: fresh layers are spread over
the depth) or consecutive ones (sequential). What is outside the layer stack, embeddings, final norm and head, is a
fragment of its own, the first. Every trainable parameter is in exactly one fragment, tied weights once, frozen ones in
none. To the engine a fragment is one flat fp32 vector that can be read from the model and written back, whatever the
shapes and precisions of its tensors, shards or not.

Finding the layer stack needs no names. A ModuleList is a group of layers; in a Sequential or a ModuleDict, children of
the same class are one. The kind of group that holds the most trainable parameters is the stack: all its outermost
members, in model order. That finds the blocks of GPT-2 and Llama, layers that alternate, both stacks of an
encoder-decoder, the stages of a ResNet and the Linear layers of a plain Sequential, and passes over the experts inside
a block.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from isles.core.island import SOLE, Copies, Island, local
from isles.core.method import Method

logger = logging.getLogger("isles")

WRAPPER_SEGMENTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Fragment:
    """Some parameters of a model as one flat vector: what this rank exchanges of them (see `isles.core.island`)."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], island: Island | None = None) -> None:
        pairs = list(named_parameters)
        self.names = [name for name, _ in pairs]
        self.parameters = [parameter for _, parameter in pairs]
        holdings: dict[Copies, list[int]] = defaultdict(list)
        for index, name in enumerate(self.names):
            holdings[island.copies(name) if island else SOLE].append(index)
        self._holdings = list(holdings.items())
        """Who holds which parameters: ranks, and places in the lists above."""
        self._is_shared_out = any(copies.size > 1 for copies in holdings)
        self.is_empty = not any(parameter.numel() for parameter in self.parameters)
        """Whether there is nothing in it on any rank; on this one alone there may be nothing all the same."""
        sizes = [tensor.numel() for tensor in self.tensors()]
        self.numel = sum(copies.part_numel(sum(sizes[i] for i in places)) for copies, places in self._holdings)

    def tensors(self) -> list[Tensor]:
        """The storage of the parameters on this rank, writable, outside autograd."""
        return [local(parameter) for parameter in self.parameters]

    def named(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Parameters with their names."""
        return zip(self.names, self.parameters, strict=True)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's part of tensors like the parameters: a new flat fp32 vector that shares no memory with them."""
        parts = []
        for copies, places in self._holdings:
            flat = [tensors[place].reshape(-1).float() for place in places]
            parts += flat if copies.size == 1 else [copies.part(torch.cat(flat))]
        return torch.cat(parts) if parts else torch.zeros(0)

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """The reverse: tensors like the parameters. Where ranks of the island hold copies, all of them call this."""
        shapes = [tensor.shape for tensor in self.tensors()]
        result: dict[int, Tensor] = {}
        start = 0
        for copies, places in self._holdings:
            sizes = [shapes[place].numel() for place in places]
            stop = start + copies.part_numel(sum(sizes))
            whole = copies.whole(flat[start:stop], sum(sizes))
            for place, values in zip(places, whole.split(sizes), strict=True):
                result[place] = values.view(shapes[place])
            start = stop
        return [result[place] for place in range(len(shapes))]

    def read(self) -> Tensor:
        """The island's weights now."""
        return self.flatten(self.tensors())

    def slices(self, places: Iterable[slice]) -> Iterator[Tensor]:
        """The island's weights at these places, which follow each other, in fp32; maybe in the parameters' memory."""
        tensors = self.tensors_in_place()
        rest = [tensor.reshape(-1) for tensor in ([self.read()] if tensors is None else tensors)]
        for place in places:
            parts, missing = [], place.stop - place.start
            while missing:
                part, rest[0] = rest[0][:missing], rest[0][missing:]
                parts.append(part.float())
                missing -= part.numel()
                rest = rest if rest[0].numel() else rest[1:]
            yield torch.cat(parts) if len(parts) > 1 else parts[0]

    def write(self, flat: Tensor) -> None:
        """Sets the model's parameters, each in its own precision, from a flat fp32 vector."""
        if self.names:
            torch._foreach_copy_(self.tensors(), self.unflatten(flat))

    def tensors_in_place(self) -> list[Tensor] | None:
        """The tensors of which this vector is made, one after the other; None where ranks share copies out."""
        return None if self._is_shared_out else self.tensors()

    def pairs(self, flat: Tensor, *, any_precision: bool = False) -> list[tuple[Tensor, Tensor]] | None:
        """Every parameter, as a flat vector, with its part of another vector, to work on in place: one pass less over
        memory than `read` or `write`. None if that cannot be: other precisions, unless they are asked for, copies that
        ranks share out.
        """
        tensors = self.tensors_in_place()
        if tensors is None or not all(t.device == flat.device and t.is_contiguous() for t in tensors):
            return None
        if not any_precision and not all(t.dtype is flat.dtype for t in tensors):
            return None
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [(tensor.view(-1), part) for tensor, part in zip(tensors, parts, strict=True)]

    def snapshot(self, device: torch.device | None = None) -> list[Tensor]:
        """Copies of the parameters as they are, in their own precision, on this device or on their own."""
        return [tensor.to(device or tensor.device, copy=True) for tensor in self.tensors()]

    def restore(self, snapshot: list[Tensor]) -> None:
        """Puts a snapshot back, bit for bit."""
        if snapshot:
            torch._foreach_copy_(self.tensors(), snapshot)


def cut(model: nn.Module, method: Method, island: Island | None = None) -> list[Fragment]:
    """The fragments of a model under a method, on one rank of an island.

    >>> layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(4))
    >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "layers": layers})
    >>> [fragment.names for fragment in cut(model, Method(fragments=3))]
    [['embed.weight'], ['layers.0.weight', 'layers.2.weight'], ['layers.1.weight', 'layers.3.weight']]
    """
    parameters = trainable_parameters(model)
    if not parameters:
        raise ValueError("the model has no trainable parameters to synchronise: is requires_grad off everywhere?")
    if lazy := [name for name, p in parameters.items() if isinstance(p, nn.parameter.UninitializedParameter)]:
        raise ValueError(f"{some_of(lazy)}: lazy parameters have no shape yet; run one forward pass first")
    if unreal := [name for name, parameter in parameters.items() if parameter.is_complex()]:
        raise ValueError(f"{some_of(unreal)}: complex parameters are not supported; store real and imaginary part")
    if isinstance(method.fragments, Sequence):
        groups = _by_name(unwrap(model), parameters, method.fragments)
    else:
        groups = _by_layer(unwrap(model), parameters, method)
    for number, names in enumerate(groups):
        devices = {parameters[name].device: name for name in names}
        if len(devices) > 1:
            where = ", ".join(f"{name} on {device}" for device, name in devices.items())
            todo = "move the model to one device, or give fragments= as lists of parameter names, each on one device"
            raise ValueError(f"fragment {number} has parameters on several devices ({where}): {todo}")
    fragments = [Fragment(((name, parameters[name]) for name in names), island) for names in groups]
    if empty := sum(not fragment.names for fragment in fragments):
        text = "%d of %d fragments are empty, and never sent: the model has fewer parts than that"
        logger.warning(text, empty, len(fragments))
    return fragments


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every trainable parameter once, in model order, by its name in the unwrapped model."""
    return {clean_name(name): p for name, p in unwrap(model).named_parameters() if p.requires_grad}


def unwrap(model: nn.Module) -> nn.Module:
    """The user's model inside torch.compile and DistributedDataParallel."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def clean_name(name: str) -> str:
    """A parameter's name without what wrappers put in, so that a compiled island and a plain one agree on it."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPER_SEGMENTS)


def find_layers(model: nn.Module) -> list[list[str]]:
    """The layer stack: for each layer, in model order, the names of its trainable parameters. Empty: there is none."""
    name_of = {parameter: clean_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    groups: dict[object, set[nn.Module]] = defaultdict(set)
    for container in model.modules():
        if isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            children = [child for child in container.children() if any(p in name_of for p in child.parameters())]
            alike: dict[object, set[nn.Module]] = defaultdict(set)
            for child in children:
                alike[frozenset(map(type, children if isinstance(container, nn.ModuleList) else [child]))].add(child)
            for kind, members in alike.items():
                if len(members) > 1:
                    groups[kind] |= members

    def size(modules: set[nn.Module]) -> int:
        return sum(p.numel() for p in {p for module in modules for p in module.parameters()} if p in name_of)

    # Of equals the first, which is the outermost: modules() walks from outside in.
    stack = max(groups.values(), key=size, default=set())
    nested = {inner for layer in stack for inner in layer.modules() if inner is not layer}
    layers = []
    for module in model.modules():
        if module in stack and module not in nested:
            layers.append([name_of.pop(p) for p in module.parameters() if p in name_of])  # tied ones go to the first
    return [layer for layer in layers if layer]


def _by_layer(model: nn.Module, parameters: dict[str, nn.Parameter], method: Method) -> list[list[str]]:
    if method.fragments == 1:
        return [list(parameters)]
    layers = find_layers(model)
    if not layers:
        parts = method.fragments if isinstance(method.fragments, int) else 1
        return _near_equal({name: parameter.numel() for name, parameter in parameters.items()}, parts)
    in_layers = {name for layer in layers for name in layer}
    outside = [name for name in parameters if name not in in_layers]
    first = [outside] if outside else []
    by_layers = -(-len(layers) // method.fragment_layers)
    count = method.fragments - len(first) if isinstance(method.fragments, int) else by_layers
    if method.pattern == "strided":
        shares = [layers[p::count] for p in range(count)]
    else:  # consecutive ones, as evenly as whole layers allow
        shares = [layers[p * len(layers) // count : (p + 1) * len(layers) // count] for p in range(count)]
    return first + [[name for layer in share for name in layer] for share in shares]


def _near_equal(sizes: dict[str, int], count: int) -> list[list[str]]:
    """Parts of near-equal size out of whole tensors: the largest first, each to the smallest part so far."""
    totals = [0] * count
    part_of: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        part_of[name] = totals.index(min(totals))
        totals[part_of[name]] += sizes[name]
    return [[name for name in sizes if part_of[name] == part] for part in range(count)]


def _by_name(model: nn.Module, parameters: dict[str, nn.Parameter], groups: Sequence[Sequence[str]]) -> list[list[str]]:
    first_name = {parameter: name for name, parameter in parameters.items()}
    every_name = {clean_name(name): p for name, p in model.named_parameters(remove_duplicate=False) if p in first_name}
    unknown = [name for group in groups for name in group if clean_name(name) not in every_name]
    if unknown:
        raise ValueError(f"fragments name what is no trainable parameter of the model: {some_of(unknown)}")
    resolved = [list(dict.fromkeys(first_name[every_name[clean_name(name)]] for name in group)) for group in groups]
    given = [name for group in resolved for name in group]
    if twice := sorted({name for name in given if given.count(name) > 1}):
        raise ValueError(f"fragments name parameters more than once (tied weights count once): {some_of(twice)}")
    if missing := [name for name in parameters if name not in set(given)]:
        raise ValueError(f"fragments leave out trainable parameters: {some_of(missing)}; put each in one, or freeze it")
    return resolved


def some_of(names: Sequence[str], most: int = 8) -> str:
    """Names for an error message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
