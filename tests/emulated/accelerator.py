"""An accelerator whose memory is the host's, and which is strict where GPUs are.

Its tensors are ordinary CPU tensors that are listed here.  What is made on ``cpu:0``, the
device with an index, is listed, and so is everything computed from it; what is made on ``cpu``
is not.  Operations run at once, as launched; the clocks keep what a GPU would have been free to
reorder.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from shardhet.comm import devices
from shardhet.fsdp.microbatch.modes import tensors_among
from shardhet.fsdp.stages.calls import MetaPlaceholder
from tests.emulated.clocks import Clock, Event, Host, Stream
from tests.emulated.device_thread import backward_elsewhere
from tests.emulated.memory import Access, Held, Memory, RaceError
from tests.emulated.nccl import Nccl

aten = torch.ops.aten
# They take tensors of host and device together.
ACROSS = {aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default}
# The number of elements of their output is known when the device has computed them.
READ_BY_HOST = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
}
HOST = torch.device("cpu")
DEVICE_OF = Tensor.device.__get__  # type: ignore[attr-defined]
# What cannot be seen from operations; every other function of torch passes.
SEEN_AS_FUNCTIONS = {
    DEVICE_OF,
    torch.tensor,
    Tensor.pin_memory,
    Tensor.to,
    Tensor.cpu,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.item,
}
# How long an operation takes, by its name and the tensors that it reads and writes.
SecondsOf = Callable[[str, Sequence[Tensor], Sequence[Tensor]], float]


class Accelerator:
    """One emulated accelerator and its NCCL; see the module."""

    def __init__(self) -> None:
        self.device = torch.device("cpu", 0)
        self.host = Host()
        self.memory = Memory(self.host)
        self.nccl = Nccl(self)
        self.seconds_of: SecondsOf = lambda _what, _reads, _writes: 0.0
        self._held: dict[int, Held] = {}  # by storage
        self._unrecorded = WeakIdKeyDictionary()  # tensors
        self._copies_to_host = False
        self.refuses_to_pin = False
        self._pinned: set[int] = set()  # storages of the host
        self._in_order: dict[int, Held] = {}  # pinned storages that copies share
        self._given_back_early = 0  # bytes of the host that copies may still use
        # By storage of the host: the last that writes or reads it, and the storage.  As with
        # pinned memory of torch, nobody else has its address until the copy is done.
        self._on_way_to_host: dict[int, tuple[Access, UntypedStorage]] = {}
        self._on_way_from_host: dict[int, tuple[Access, UntypedStorage]] = {}

    @property
    def syncs(self) -> list[str]:
        """Why the host waited for the device, each time that it did."""
        return self.host.syncs

    # Storages #

    def held(self, tensor: Tensor) -> Held | None:
        """The listed storage of ``tensor``; None if it is on the host (or has no memory)."""
        if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return None
        return self._held.get(tensor.untyped_storage()._cdata)

    def take_in(self, tensor: Tensor) -> None:
        """List a new tensor's storage, allocated on the current stream."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._held:
            held = self.memory.allocate(storage.nbytes(), self.current)
            self._held[storage._cdata] = held
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.memory.free(self._held.pop(key))

    def unrecorded(self, tensor: Tensor) -> Tensor:
        """In place of ``devices.unrecorded``."""
        alias = tensor.view(tensor.shape)
        self._unrecorded[alias] = True
        return alias

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Tell the allocator that ``stream`` uses the tensor, if it knows it."""
        held = self.held(tensor)
        if held is not None and tensor not in self._unrecorded:
            held.recorded = stream

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Follow ``storage.resize_``, which no mode sees."""
        held = self._held.get(storage._cdata)
        if held is not None:
            self.memory.free(held)
            if nbytes:
                self.memory.reallocate(held, nbytes, self.current)

    # Operations #

    def launch(
        self, what: str, stream: Stream, *, reads: list[Tensor], writes: list[Tensor]
    ) -> None:
        """Queue an operation on ``stream``."""
        moment = stream.begin(what, self.seconds_of(what, reads, writes))
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                held = self.held(tensor)
                if held is not None and tensor.numel():
                    access = Access(*_bytes_of(tensor), moment, is_write, what)
                    self.memory.access(held, access, stream.clock)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of torch, on the current stream if it concerns the device."""
        given = list(tensors_among((args, kwargs)))
        if any(isinstance(tensor, MetaPlaceholder) for tensor in given):
            return self._run_on_shapes(func, args, kwargs)
        target = kwargs.get("device")
        makes = target is not None and target.type == "cpu" and target.index is not None
        listed = [tensor for tensor in given if self.held(tensor) is not None]
        written = _written(func, args, kwargs)
        is_only_view = _is_view(func) and not written
        if not listed and not makes:
            if not is_only_view:
                self._check_on_host(func, given, written)
            return func(*args, **kwargs)
        if listed and len(listed) < len(given) and func not in ACROSS:
            self._check_on_device(func, given)
        result = func(*args, **kwargs)
        if is_only_view:
            return result
        name = _name_of(func)
        goes_to_host = func is aten._to_copy.default and self._copies_to_host
        made = list(tensors_among(result))
        written_ids = {id(tensor) for tensor in written}
        if not goes_to_host:
            for tensor in made:
                if tensor.device.type == "cpu" and id(tensor) not in written_ids:
                    self.take_in(tensor)
        self.launch(
            name,
            self.current,
            reads=[tensor for tensor in listed if id(tensor) not in written_ids],
            writes=[*written, *(t for t in made if id(t) not in written_ids)],
        )
        if func is aten.copy_.default:
            self._follow_copy(args, kwargs)
        elif func in READ_BY_HOST:
            self.wait_for_current(name)
        elif goes_to_host and kwargs.get("non_blocking"):
            for tensor in made:
                self._comes_to_host(tensor, name)
        elif goes_to_host or (makes and given and not listed):
            self._wait_unless_pinned(given[0], kwargs, name)
            self._leaves_host(given[0], name)
        return result

    def _run_on_shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """With tensors that have no values: nothing is read."""
        result = func(*args, **kwargs)
        for tensor in tensors_among(result):
            if not isinstance(tensor, MetaPlaceholder) and tensor.device.type == "cpu":
                self.take_in(tensor)
        return result

    def _follow_copy(self, args: Any, kwargs: dict[str, Any]) -> None:
        """After ``copy_`` from host to device or back."""
        to, source = args[:2]
        is_to_host, is_from_host = (self.held(each) is None for each in (to, source))
        for tensor, is_write in ((to, True), (source, False)):
            pinned = self._in_order.get(tensor.untyped_storage()._cdata)
            if pinned is not None:
                moment = self.current.begin()
                access = Access(*_bytes_of(tensor), moment, is_write, "copy_")
                self.memory.access(pinned, access, self.current.clock)
        is_asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if is_from_host and not is_to_host:
            self._wait_unless_pinned(source, {"non_blocking": is_asynchronous}, "copy_")
            self._leaves_host(source, "copy_")
        if is_to_host and is_asynchronous and self.is_pinned(to):
            self._comes_to_host(to, "copy_")
        elif is_to_host:
            self.wait_for_current("copy_")

    def _comes_to_host(self, to: Tensor, what: str) -> None:
        storage = to.untyped_storage()
        self._on_way_to_host = self._still_on_way(self._on_way_to_host)
        access = Access(0, 1, self.current.begin(), True, what)
        self._on_way_to_host[storage._cdata] = (access, storage)

    def _still_on_way(
        self, copies: dict[int, tuple[Access, UntypedStorage]]
    ) -> dict[int, tuple[Access, UntypedStorage]]:
        """Those that the host has not waited for."""
        return {
            key: each
            for key, each in copies.items()
            if not each[0].moment.is_before(self.host.clock)
        }

    def _leaves_host(self, source: Tensor, what: str) -> None:
        storage = source.untyped_storage()
        if storage._cdata in self._pinned:
            self._on_way_from_host = self._still_on_way(self._on_way_from_host)
            access = Access(0, 1, self.current.begin(), False, what)
            self._on_way_from_host[storage._cdata] = (access, storage)

    def _check_has_left(self, tensor: Tensor, what: str) -> None:
        """Raise ``RaceError`` if the host writes what the device may still read."""
        if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return
        on_way = self._on_way_from_host.get(tensor.untyped_storage()._cdata)
        if on_way is not None and not on_way[0].moment.is_before(self.host.clock):
            raise RaceError(f"{what} on the host writes what is still copied to the device")

    def pin_in_place(
        self, tensor: Tensor, nbytes: int, device: torch.device
    ) -> Callable[[], None] | None:
        """In place of ``devices.pin``."""
        if self.refuses_to_pin:
            return None
        key = tensor.untyped_storage()._cdata
        self._pinned.add(key)
        self._in_order[key] = Held(nbytes, self.current.number, Clock())

        def unpin() -> None:
            self._pinned.discard(key)
            moments = [each.moment for each in self._in_order.pop(key).accesses]
            if not all(each.is_before(self.host.clock) for each in moments):
                self._given_back_early = nbytes  # nobody hears what a finalizer raises
            self._on_way_to_host.pop(key, None)
            self._on_way_from_host.pop(key, None)

        return unpin

    def _wait_unless_pinned(self, source: Tensor, kwargs: dict[str, Any], why: str) -> None:
        if not (kwargs.get("non_blocking") and self.is_pinned(source)):
            self.wait_for_current(why)

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy in memory that the device reads without the host."""
        copy = tensor.clone()
        storage = copy.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata)
        return copy

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is such a copy."""
        return tensor.untyped_storage()._cdata in self._pinned

    def to_host(self, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.to`` of a tensor of the device to the host: a real copy."""
        self._copies_to_host = True
        try:
            return Tensor.to(*args, **{**kwargs, "copy": True})
        finally:
            self._copies_to_host = False

    def check_has_arrived(self, tensor: Tensor, what: str) -> None:
        """Raise ``RaceError`` if the host reads a copy that the device may still write."""
        if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
            return
        on_way = self._on_way_to_host.get(tensor.untyped_storage()._cdata)
        if on_way is not None and not on_way[0].moment.is_before(self.host.clock):
            raise RaceError(f"{what} on the host reads a copy that is still on its way")

    def wait_for_current(self, why: str) -> None:
        """Let the host wait for the current stream."""
        self.host.wait(self.current.clock, why, self.current.free_at_s)

    def _check_on_host(self, func: Any, given: list[Tensor], written: list[Tensor]) -> None:
        if self._on_way_to_host:
            for tensor in given:
                self.check_has_arrived(tensor, _name_of(func))
        if self._on_way_from_host:
            for tensor in written:
                self._check_has_left(tensor, _name_of(func))

    def _check_on_device(self, func: Any, given: list[Tensor]) -> None:
        for tensor in given:
            if tensor.dim() and tensor.device.type == "cpu" and self.held(tensor) is None:
                raise RuntimeError(
                    f"{func}: a tensor {list(tensor.shape)} of the host beside tensors of the "
                    "device"
                )

    # What the library sees #

    @property
    def current(self) -> Stream:
        return self.host.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.host.current = self.host.current, stream
        try:
            yield
        finally:
            self.host.current = before

    def module(self) -> Any:
        """What ``torch.cuda`` is for GPUs."""
        return SimpleNamespace(
            Stream=lambda priority=0: Stream(self.host, f"of priority {priority}"),
            Event=lambda **options: Event(self.host, **options),
            current_stream=lambda device=None: self.current,
            current_device=lambda: 0,
            default_generators=[torch.default_generator],
            get_device_properties=lambda device: SimpleNamespace(
                name="emulated", total_memory=16 * 2**30, uuid=f"emulated-{id(self)}"
            ),
            get_rng_state=lambda device: torch.get_rng_state(),
            set_rng_state=lambda state, device: torch.set_rng_state(state),
            max_memory_allocated=lambda device=None: self.memory.peak_bytes,
            mem_get_info=lambda device=None: (
                16 * 2**30 - self.memory.allocated_bytes,
                16 * 2**30,
            ),
            memory_allocated=lambda device=None: self.memory.allocated_bytes,
            memory_reserved=lambda device=None: self.memory.allocated_bytes,
            reset_peak_memory_stats=self._reset_peak,
            stream=self.stream,
            synchronize=self._synchronize,
        )

    def _reset_peak(self, device: torch.device | None = None) -> None:
        self.memory.peak_bytes = self.memory.allocated_bytes

    def _synchronize(self, device: torch.device | None = None) -> None:
        everything = Clock()
        for stream in self.host.streams:
            everything.join(stream.clock)
        until_s = max(stream.free_at_s for stream in self.host.streams)
        self.host.wait(everything, "device", until_s)

    def is_on_host(self, of: Tensor | torch.device) -> bool:
        """In place of ``devices.is_on_host``."""
        if isinstance(of, Tensor):
            return self.held(of) is None
        return of.index is None

    @contextmanager
    def installed(self) -> Iterator["Accelerator"]:
        """A context in which ``self.device`` is an accelerator, with NCCL between ranks."""
        module = self.module()
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            self.resize(storage, nbytes)
            return resize(storage, nbytes)

        run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

        def with_functions(*args: Any, **kwargs: Any) -> Any:
            # torch.autograd.backward is a function that the mode sees, and leaves.
            with _Functions(self):
                return run_backward(*args, **kwargs)

        with (
            mock.patch.object(devices, "is_on_host", self.is_on_host),
            mock.patch.object(devices, "of_this_rank", return_value=self.device),
            mock.patch.object(devices, "module_of", return_value=module),
            mock.patch.object(devices, "pin", self.pin_in_place),
            mock.patch.object(devices, "unrecorded", self.unrecorded),
            mock.patch.object(torch.UntypedStorage, "resize_", resize_),
            mock.patch.object(torch.autograd, "_engine_run_backward", with_functions),
            self.nccl.installed(),
            backward_elsewhere(),
            _Functions(self),
            _Operations(self),
        ):
            yield self
            if self._given_back_early:
                text = f"{self._given_back_early} bytes of the host are given back"
                raise RaceError(f"{text} while they may still be copied")


class _Operations(TorchDispatchMode):
    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with (
            torch._C.DisableTorchFunction()
        ):  # what `run` asks of tensors is no function of theirs
            return self._accelerator.run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What cannot be seen from operations, because host and device are one device to torch."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in SEEN_AS_FUNCTIONS:
            return func(*args, **kwargs)
        accelerator = self._accelerator
        if func == DEVICE_OF:
            found = func(*args)
            is_ours = found.type == "cpu" and accelerator.held(args[0]) is not None
            return accelerator.device if is_ours else found
        if func is torch.tensor and _has_index(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is Tensor.pin_memory:
            return accelerator.pin(args[0])
        if func in (Tensor.to, Tensor.cpu) and accelerator.held(args[0]) is not None:
            if func is Tensor.cpu:
                return accelerator.to_host(args[0], HOST)
            if any(_is_host(each) for each in (*args[1:], *kwargs.values())):
                return accelerator.to_host(*args, **kwargs)
        if func in (Tensor.tolist, Tensor.numpy, Tensor.item):
            accelerator.check_has_arrived(args[0], func.__name__)
            if func is not Tensor.item and accelerator.held(args[0]) is not None:
                accelerator.wait_for_current(func.__name__)
        return func(*args, **kwargs)


def _is_host(place: Any) -> bool:
    if isinstance(place, str):
        return place == "cpu"
    return isinstance(place, torch.device) and place == HOST


def _has_index(device: Any) -> bool:
    return isinstance(device, torch.device) and device.index is not None


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes from the first to the last element, in the tensor's storage."""
    itemsize = tensor.element_size()
    first = tensor.storage_offset()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in steps)
    return first * itemsize, (last + 1) * itemsize


@cache
def _name_of(func: Any) -> str:
    return str(func)


@cache
def _positions_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Where ``func`` takes the tensors that it changes, and their names."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that ``func`` changes."""
    given: list[Tensor] = []
    for i, name in _positions_written(func):
        given += tensors_among(kwargs.get(name, args[i] if i < len(args) else None))
    return given


@cache
def _is_view(func: Any) -> bool:
    """Whether ``func`` returns another shape of the same memory, and touches none."""
    return any(each.alias_info is not None for each in func._schema.returns)
