"""A pretend accelerator: the rules of one, without the hardware, so that what isles does on a GPU can be tested here.

Its tensors say that they are on the device "pretend"; the values inside are ordinary ones, and are computed at once.
What it keeps is the *order*. Every stream counts what it is given, and knows how far other streams, and the host, had
come at each of its waits (a vector clock). Every piece of memory knows its last write and the reads since. It raises
`Violation` at whatever a GPU would do wrong without a word:

- reading what is written on another stream, or writing what another one still reads, without an event in between
- dropping memory that another stream uses, without having said so (`record_stream`)
- changing pinned memory while a copy from it is under way

and, inside `no_waiting`, at whatever makes the host wait for the device: reading a value (`item`, `bool`, `cpu`), a
copy from or to memory that is not pinned, a number that PyTorch would copy to the device, waiting for an event in the
training loop. Other threads may wait for events. A copy to the host arrives when somebody has waited for it: until then
its memory holds rubbish.

`install` is for the whole process: call it in one of its own (`tests.processes`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

aten = torch.ops.aten
RUBBISH = 0xA5
Clock = dict[int, int]
"""How many operations of each stream have come before."""
NEVER = (0, 0)
FROM_HOST = "copy_ to the device"


class Violation(RuntimeError):
    """Something that would go wrong, or make the host wait, on a real device."""


@dataclass
class Memory:
    """One allocation on the device, or of pinned memory."""

    stream: int
    num_bytes: int
    address: int
    write: tuple[int, int] = NEVER
    reads: Clock = field(default_factory=dict)
    is_watched: bool = False
    known_to: set[int] = field(default_factory=set)
    """Streams that `record_stream` has named."""


class Machine:
    """What all streams, events and tensors of the process share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.violations: list[str] = []
        self.host: Clock = {}
        """What some thread of the host knows to be done."""
        self.streams: dict[int, Stream] = {}
        self.memory: dict[int, Memory] = {}
        self.pinned: dict[int, Any] = {}
        self.to_host: list[tuple[tuple[int, int], torch.Tensor, torch.Tensor]] = []
        """Copies under way: when, where, what."""
        self.from_host: list[tuple[tuple[int, int], torch.Tensor, torch.Tensor]] = []
        self.live_bytes = self.peak_bytes = 0
        self.sizes_from_host: list[int] = []
        """Bytes of every copy to the device."""
        self.watching, self.largest_temporary = False, 0
        """While it watches: the largest memory that was made and not copied from the host."""
        self.loop: int | None = None
        """The thread that must not wait, if there is one now."""
        self.launches = self.bytes_moved = 0
        """Bytes of what operations, other than kernels of Triton, read and write."""
        self.host_waits = 0
        """Of other threads, for events."""

    def refuse(self, what: str) -> NoReturn:
        self.violations.append(what)
        raise Violation(what)

    # ---- memory

    def memory_of(self, data: torch.Tensor) -> Memory:
        storage = data.untyped_storage()
        key = storage._cdata
        if key not in self.memory:
            place = storage.nbytes(), storage.data_ptr()
            made = Memory(current_stream().stream_id, *place, is_watched=self.watching)
            self.memory[key] = made
            self.live_bytes += made.num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._free, key)
        return self.memory[key]

    def memory_at(self, address: int) -> Memory:
        """For a kernel that is given addresses."""
        for memory in self.memory.values():
            if memory.address <= address < memory.address + memory.num_bytes:
                return memory
        return self.refuse(f"a kernel on stream {current_stream().stream_id} uses memory that is not there any more")

    def _free(self, key: int) -> None:
        with self.lock:
            freed = self.memory.pop(key)
            self.live_bytes -= freed.num_bytes
            seen = self.streams[freed.stream].clock
            for stream, count in [*freed.reads.items(), freed.write]:
                if stream not in (0, freed.stream, *freed.known_to) and seen.get(stream, 0) < count:
                    self.violations.append(f"memory of stream {freed.stream} was dropped while stream {stream} used it")

    # ---- order

    def run(self, name: str, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> tuple[int, int]:
        """One operation of the current stream."""
        reads, writes = list(reads), list(writes)
        self.bytes_moved += sum(each.numel() * each.itemsize for each in (*reads, *writes))
        return self.run_on(name, [self.memory_of(each) for each in reads], [self.memory_of(each) for each in writes])

    def run_on(self, name: str, read: list[Memory], written: list[Memory]) -> tuple[int, int]:
        """The same, for who knows the memory."""
        stream = current_stream()
        number, clock = stream.stream_id, stream.clock
        join(clock, known_here())  # it is launched after whatever this thread has waited for
        if any(memory.write == NEVER for memory in read):
            self.refuse(f"{name} on stream {number} reads what nobody has written")
        for memory in (*read, *written):
            source, count = memory.write
            if source and clock.get(source, 0) < count:
                self.refuse(f"{name} on stream {number} uses what stream {source} writes, without having waited for it")
        for memory in written:
            for source, count in memory.reads.items():
                if clock.get(source, 0) < count:
                    self.refuse(f"{name} on stream {number} writes what stream {source} still reads")
        clock[number] = clock.get(number, 0) + 1
        stamp = number, clock[number]
        for memory in read:
            memory.reads[number] = stamp[1]
        for memory in written:
            if name == FROM_HOST:
                self.sizes_from_host.append(memory.num_bytes)
            elif memory.write == NEVER and memory.is_watched:
                self.largest_temporary = max(self.largest_temporary, memory.num_bytes)
            memory.write, memory.reads = stamp, {}
        self.launches += 1
        return stamp

    def host_knows(self, clock: Clock) -> None:
        """A thread has waited: copies that are done by now have arrived. What other threads launch may be launched
        before it: that they are later in this run is luck.
        """
        join(known_here(), clock)
        join(self.host, clock)
        for stamp, target, values in self._done(self.to_host):
            target.copy_(values)
            self.to_host.remove((stamp, target, values))
        for stamp, source, values in self._done(self.from_host):
            self.from_host.remove((stamp, source, values))
            if not torch.equal(bytes_of(source), bytes_of(values)):
                self.refuse("pinned memory was changed while a copy from it was under way")

    def copies_of(self, copies: list[Any], host: torch.Tensor) -> list[Any]:
        """Of copies under way: those from or to this memory of the host; the current stream must come after them."""
        found = [copy for copy in copies if copy[1].untyped_storage()._cdata == host.untyped_storage()._cdata]
        clock = current_stream().clock
        for (stream, count), there, _ in found:
            if clock.get(stream, 0) < count:
                self.refuse(f"stream {current_stream().stream_id} uses host memory that stream {stream} copies")
            assert (there.data_ptr(), there.numel()) == (host.data_ptr(), host.numel()), "only whole vectors"
        return found

    def _done(self, copies: list[Any]) -> list[Any]:
        return [copy for copy in copies if self.host.get(copy[0][0], 0) >= copy[0][1]]

    def wait(self, what: str) -> None:
        """The host waits for the current stream, whoever asks for it."""
        if self.loop is not None:
            self.refuse(f"the host waits for the device: {what}")
        self.host_knows(current_stream().clock)


machine = Machine()
_current = threading.local()
"""What belongs to a thread: its stream, and what it has waited for."""


def known_here() -> Clock:
    """What this thread has waited for."""
    if not hasattr(_current, "known"):
        _current.known = {}
    return _current.known


def join(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# ---- what a device module has


class Stream(torch.Stream):
    """Counts what it is given."""

    clock: Clock

    def __new__(cls, device: Any = None) -> Stream:
        number = len(machine.streams) + 1
        stream = super().__new__(cls, stream_id=number, device_index=0, device_type=PRIVATE)
        stream.clock = {}
        machine.streams[number] = stream
        return stream

    def wait_event(self, event: Event) -> None:
        with machine.lock:
            join(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        with machine.lock:
            join(self.clock, stream.clock)


class Event:
    """A point in the order of a stream."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        with machine.lock:
            self.clock = dict((stream or current_stream()).clock)

    def synchronize(self) -> None:
        with machine.lock:
            if machine.loop == threading.get_ident():
                machine.refuse("the training loop waits for an event")
            machine.host_waits += 1
            machine.host_knows(self.clock)


PRIVATE = int(torch._C._autograd.DeviceType.PrivateUse1)


def current_stream(device: Any = None) -> Stream:
    return getattr(_current, "stream", machine.streams[1])


@contextmanager
def stream_context(stream: Stream) -> Iterator[None]:
    before, _current.stream = current_stream(), stream
    try:
        yield
    finally:
        _current.stream = before


class Module:
    """As torch.cuda is one."""

    Stream, Event = Stream, Event
    stream = staticmethod(stream_context)
    current_stream = staticmethod(current_stream)
    is_initialized = is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)
    manual_seed_all = staticmethod(lambda seed: None)


# ---- tensors


class PretendTensor(torch.Tensor):
    """A tensor of the device; `data_inside` are its values."""

    data_inside: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> PretendTensor:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            data.size(),
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device=torch.device("pretend", 0),
        )
        wrapper.data_inside = data
        return wrapper

    def __repr__(self) -> str:  # printing would read it
        return f"PretendTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with machine.lock:
            special = SPECIAL.get(func)
            return special(*args, **kwargs) if special else _run(func, args, kwargs)


def inside(value: Any) -> Any:
    return _mapped(lambda each: each.data_inside if isinstance(each, PretendTensor) else each, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """With every tensor in it changed. PyTorch has that for any kind of nesting, and takes as long as the rest here."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(function, each) for each in value])
    if isinstance(value, dict):
        return {key: _mapped(function, each) for key, each in value.items()}
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(found.append, value)
    return found


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on the device."""
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    given = _tensors((args, kwargs))
    own = {id(each.data_inside): each for each in given if isinstance(each, PretendTensor)}
    for each in given:
        if not isinstance(each, PretendTensor) and (each.dim() > 0 or func in COPIES_NUMBERS):
            machine.wait(f"{func} with a tensor of the host") if each.dim() == 0 else machine.refuse(
                f"{func} uses memory of the host"
            )
    written = _written(func, args, kwargs)
    if func in ANSWERS or (func is aten.index.Tensor and any(each.dtype is torch.bool for each in given[1:])):
        machine.wait(str(func))
    result = func(*inside(args), **inside(kwargs))
    made = _tensors(result)
    known = {each.data_inside.untyped_storage()._cdata for each in own.values()}
    fresh = [each for each in made if each.untyped_storage()._cdata not in known]
    if written or fresh or not made:
        targets = {id(each) for each in written}
        reads = [each.data_inside for each in own.values() if id(each.data_inside) not in targets]
        machine.run(str(func), reads, [*written, *fresh])
    return _mapped(lambda each: own[id(each)] if id(each) in own else PretendTensor(each), result)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes to, by its schema; values inside."""
    written = []
    for place, name in _places_written(func):
        value = args[place] if place is not None and place < len(args) else kwargs.get(name)
        written += [each.data_inside for each in _tensors(value) if isinstance(each, PretendTensor)]
    return written


@functools.cache
def _places_written(func: Any) -> list[tuple[int | None, str]]:
    return [
        (None if argument.kwarg_only else place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(target, PretendTensor) and isinstance(source, PretendTensor):
        machine.run("copy_", [source.data_inside], [target.data_inside])
        target.data_inside.copy_(source.data_inside)
    elif isinstance(target, PretendTensor):
        stamp = machine.run(FROM_HOST, [], [target.data_inside])
        arriving = machine.copies_of(machine.to_host, source)  # of an earlier copy to the same memory
        target.data_inside.copy_(arriving[-1][2] if arriving else source)
        if non_blocking and is_pinned(source):
            machine.from_host.append((stamp, source, target.data_inside.clone().to(source.dtype)))
        else:
            machine.wait("a copy from memory that is not pinned, or a blocking one")
    else:
        stamp = machine.run("copy_ to the host", [source.data_inside], [])
        if non_blocking and is_pinned(target):
            for copy in machine.copies_of(machine.from_host, target):
                machine.from_host.remove(copy)
            bytes_of(target).fill_(RUBBISH)
            machine.to_host.append((stamp, target, source.data_inside.clone().to(target.dtype)))
        else:
            machine.wait("a copy to memory that is not pinned, or a blocking one")
            target.copy_(source.data_inside)
    return target


def _to_copy(source: torch.Tensor, *, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    if device is None or device.type == "pretend":
        return _run(aten._to_copy.default, (source,), kwargs)
    kwargs.pop("pin_memory", None)
    return _copy(torch.empty_like(source.data_inside, **kwargs), source, non_blocking)


def _copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor], non_blocking: bool = False) -> None:
    for target, source in zip(targets, sources, strict=True):
        _copy(target, source, non_blocking)


def _item(source: PretendTensor) -> Any:
    machine.wait("reading a value")
    return source.data_inside.item()


def _record_stream(tensor: PretendTensor, stream: torch.Stream) -> None:
    machine.memory_of(tensor.data_inside).known_to.add(stream.stream_id)


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _item,
    aten.record_stream.default: _record_stream,
    aten.is_pinned.default: lambda tensor, device=None: False,
    aten._foreach_copy_.default: _copy_each,
}
ANSWERS = {aten.equal.default, aten.nonzero.default, aten.masked_select.default}
"""Operations whose result, or its size, the host has to know."""
COPIES_NUMBERS = {aten.where.self, aten.where.self_out}
"""Where PyTorch copies a number of the host to a real device, and waits for the copy."""


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> PretendTensor:
    return _made(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> PretendTensor:
    return _made(torch.empty_strided(size, stride, dtype=dtype))


def _made(data: torch.Tensor) -> PretendTensor:
    if data.numel():
        bytes_of(data).fill_(RUBBISH)
    with machine.lock:
        machine.memory_of(data)
    return PretendTensor(data)


# ---- pinned memory, which PyTorch has only where there is a real device

_empty_of_torch, _is_pinned_of_torch = torch.empty, torch.Tensor.is_pinned


def _empty_or_pinned(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    made = _empty_of_torch(*size, **kwargs)
    if pin_memory:
        storage = made.untyped_storage()
        machine.pinned[storage._cdata] = weakref.finalize(storage, machine.pinned.pop, storage._cdata, None)
    return made


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    return not isinstance(tensor, PretendTensor) and tensor.untyped_storage()._cdata in machine.pinned


# ---- for tests


def install() -> torch.device:
    """Makes the device known to PyTorch, in this process, once."""
    if machine.streams:
        return torch.device("pretend", 0)
    _setup_privateuseone_for_python_backend("pretend", backend_module=Module())
    Stream()  # the first one, of whoever has chosen none
    library = install.library = torch.library.Library("aten", "IMPL")  # type: ignore[attr-defined]
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", lambda source, target, non_blocking=False: _copy(target, source), "PrivateUse1")
    torch.empty, torch.Tensor.is_pinned = _empty_or_pinned, is_pinned  # type: ignore[assignment, method-assign]
    return torch.device("pretend", 0)


@contextmanager
def no_waiting() -> Iterator[Machine]:
    """From here on the host must not wait for the device, and this thread for nothing of it."""
    machine.loop = threading.get_ident()
    try:
        yield machine
    finally:
        machine.loop = None


def on_device(module: torch.nn.Module) -> torch.nn.Module:
    """Moves parameters and buffers to the device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                moved = parameter.detach().to("pretend")
                part._parameters[name] = torch.nn.Parameter(moved, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to("pretend")
    return module


def settled() -> list[str]:
    """What has gone wrong, after everything that was given to the device is done."""
    with machine.lock:
        for stream in machine.streams.values():
            machine.host_knows(stream.clock)
        return machine.violations
