"""Tensors of a simulated device: they say `cuda:0` and have the CUDA dispatch key, over host memory.

A device tensor is a DLPack capsule of a host tensor whose device field was rewritten, so that both share their bytes.
Every operation with a CPU kernel gets a kernel on the key CUDA that runs the CPU kernel on host aliases of its arguments,
once it has refused what a GPU refuses:

    op(device, device)                  the CPU kernel on aliases; its result becomes a device tensor
    op(device, host)                    refused, unless the host tensor is a scalar and the op works element by element
    op(device, generator of the host)   refused
    a freed storage (`resize_(0)`)      refused, and its bytes are overwritten
    .item(), copies, nonzero, x[mask]   counted in `waits.py`
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.device import simulated_streams, waits

_KIND_OF_CPU, _KIND_OF_CUDA = 1, 2
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_as_strided = torch.ops.aten.as_strided.default
_as_strided_ = torch.ops.aten.as_strided_.default
_set = torch.ops.aten.set_.source_Storage_storage_offset

_address_in = ctypes.pythonapi.PyCapsule_GetPointer
_address_in.restype, _address_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


# -- one memory, two names -------------------------------------------------------------------------


def _renamed(tensor: Tensor, kind: int) -> Tensor:
    """Return a tensor over the same memory, which it keeps alive, on another kind of device."""
    capsule = torch._C._to_dlpack(tensor)
    address = _address_in(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + 8).value = kind  # DLDevice.device_type, and device_id behind it
    ctypes.c_int32.from_address(address + 12).value = 0
    out: Tensor = torch._C._from_dlpack(capsule)
    if out.stride() != tensor.stride():
        out = _as_strided.redispatch(_CPU_KEYS, out, tensor.shape, tensor.stride(), out.storage_offset())
    return out


def on_device(host: Tensor) -> Tensor:
    """Return a device tensor over the memory of a fresh host tensor."""
    out = _renamed(host.detach() if host.requires_grad else host, _KIND_OF_CUDA)
    memory.account(out.untyped_storage())
    simulated_streams.made(out)
    return out


def on_host(device: Tensor) -> Tensor:
    """Return the host's view of a device tensor's memory."""
    storage = device.untyped_storage()
    if device.numel() and memory.is_freed(storage):
        raise RuntimeError(f"simulated device: {tuple(device.shape)} is used after its storage was freed (resize_(0))")
    simulated_streams.check(device)
    return _renamed(device, _KIND_OF_CPU)


@dataclass
class Memory:
    """The bytes that device tensors hold, and their peak."""

    allocated: int = 0
    peak: int = 0
    true_size: Any = torch.UntypedStorage.nbytes
    """Torch's own size of a storage, also of one that counts as freed."""

    def account(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it is collected."""
        if size := self.true_size(storage):
            self.add(size)
            weakref.finalize(storage, self.add, -size)

    def add(self, size: int) -> None:
        """Count so many bytes more."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def is_freed(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage was freed by `resize_(0)`."""
        return bool(storage.__dict__.get("is_freed"))

    def resize(self, storage: torch.UntypedStorage, size: int) -> None:
        """Free a storage, or make it again: what was in it is gone."""
        true = self.true_size(storage)
        if size not in (0, true):
            raise RuntimeError(f"simulated device: a storage of {true} bytes was resized to {size}")
        was_freed = self.is_freed(storage)
        if was_freed != (size == 0) and true:
            storage.__dict__["is_freed"] = size == 0
            self.add(-true if size == 0 else true)
            ctypes.memset(storage.data_ptr(), 0xFF, true)


memory = Memory()


class Draws:
    """Random numbers of the device, which has a state of its own, and an offset that grows with what is drawn."""

    generator = torch.Generator().manual_seed(0).get_state()
    offset = 0

    @classmethod
    def seed(cls, seed: int) -> None:
        """Start anew."""
        cls.generator, cls.offset = torch.Generator().manual_seed(seed).get_state(), 0

    @classmethod
    def state(cls) -> Tensor:
        """Return the state, whose last bytes are the offset."""
        return torch.cat([cls.generator, torch.tensor([cls.offset]).view(torch.uint8)])

    @classmethod
    def set_state(cls, state: Tensor) -> None:
        """Go back to a state."""
        cls.generator, cls.offset = state[:-8].clone(), int(state[-8:].clone().view(torch.int64))

    @classmethod
    @contextlib.contextmanager
    def drawing(cls) -> Iterator[None]:
        """Let a CPU kernel draw from the device's state."""
        host = torch.default_generator.get_state()
        torch.default_generator.set_state(cls.generator)
        try:
            yield
        finally:
            cls.generator, cls.offset = torch.default_generator.get_state(), cls.offset + 4
            torch.default_generator.set_state(host)


# -- operations ------------------------------------------------------------------------------------

_WAITING = {
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::equal": "equal",
    "aten::bincount": "bincount",
}
_OF_GPUS = {"aten::_grouped_mm"}
"""Operations that a GPU has a kernel for, and that are made of others on a CPU."""
_INDEXING = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::index_put"}


@dataclass(frozen=True)
class Operation:
    """What a kernel must know of an operation."""

    op: Any
    name: str
    is_view: bool
    is_pointwise: bool
    is_indexing: bool
    draws: bool
    waits: str
    takes_tensor: tuple[bool, ...]
    writes: tuple[str | int, ...]
    """The places and names of arguments that it writes."""

    @classmethod
    def of(cls, op: Any) -> Operation:
        """Read it from the operation's schema and tags."""
        schema = op._schema
        aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
        return cls(
            op=op,
            name=schema.name,
            is_view=torch.Tag.inplace_view in op.tags or any(not one.is_write for one in aliases),
            is_pointwise=torch.Tag.pointwise in op.tags or schema.name in ("aten::where", "aten::fill_", "aten::fill"),
            is_indexing=schema.name in _INDEXING,
            draws=torch.Tag.nondeterministic_seeded in op.tags,
            waits=_WAITING.get(schema.name, ""),
            takes_tensor=tuple(str(one.type) == "Tensor" for one in schema.arguments),
            writes=tuple(
                one.name if one.kwarg_only else index
                for index, one in enumerate(schema.arguments)
                if one.alias_info is not None and one.alias_info.is_write
            ),
        )


@dataclass
class Aliases:
    """The host aliases of the device tensors of one call."""

    operation: Operation
    origin: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def of(self, value: Any) -> Any:
        """Return what a CPU kernel is given for an argument."""
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if type(value) in (list, tuple):
            return type(value)(self.of(one) for one in value)
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({self.operation.name})")
        return value

    def _of_tensor(self, value: Tensor) -> Tensor:
        if value.device.type == "cuda":
            # A kernel may give an empty result its size, which only a host tensor of its own allows.
            alias = on_host(value) if value.numel() else torch.empty(value.shape, dtype=value.dtype, device="cpu")
            self.origin[id(alias)] = (alias, value)
            return alias
        if value.device.type == "cpu" and self.operation.is_indexing:
            if value.dim():
                waits.note("to device")
        elif value.device.type == "cpu" and not (value.dim() == 0 and self.operation.is_pointwise):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({self.operation.name} was given a cpu tensor of shape {tuple(value.shape)})"
            )
        return value

    def back(self, value: Any) -> Any:
        """Return the device's name of a result."""
        if isinstance(value, Tensor):
            alias, device = self.origin.get(id(value), (None, None))
            if alias is None or device is None:
                return on_device(value)
            if alias.shape != device.shape:
                _adopt(device, alias)
            return device
        if type(value) in (list, tuple):
            return type(value)(self.back(one) for one in value)
        return value


def _adopt(device: Tensor, host: Tensor) -> None:
    """Let a device tensor stand for other memory."""
    new = on_device(host)
    _set.redispatch(_CPU_KEYS, device, new.untyped_storage(), new.storage_offset(), new.shape, new.stride())


_known: dict[Any, Operation] = {}


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on device tensors."""
    operation = _known.get(op) or _known.setdefault(op, Operation.of(op))
    if operation.is_view or operation.name == "aten::set_":
        return _resize_(*args[:2]) if operation.name == "aten::resize_" else op.redispatch(_CPU_KEYS, *args, **kwargs)
    if operation.name == "aten::record_stream":
        return None
    _note_waits(operation, args, kwargs)
    if operation.name == "aten::histc" and not args[0].is_floating_point():  # which a CPU has no kernel for
        return torch.histc(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    aliases = Aliases(operation)
    # A Python number in the place of a tensor arrives as a number, which most operations do not take back.
    given = [
        torch.tensor(value, device="cpu") if is_tensor and type(value) in (int, bool) else aliases.of(value)
        for value, is_tensor in zip(args, operation.takes_tensor, strict=False)
    ]
    named = {key: aliases.of(value) for key, value in kwargs.items()}
    with torch._C.DisableTorchFunction(), Draws.drawing() if operation.draws else contextlib.nullcontext():
        out = op(*given, **named)
    for place in operation.writes:
        written = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
        for one in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(one, Tensor) and one.device.type == "cuda":
                simulated_streams.made(one)
    return out if operation.waits and not isinstance(out, (Tensor, tuple)) else aliases.back(out)


def _note_waits(operation: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if operation.waits:
        waits.note(operation.waits)
        simulated_streams.host_has_waited()
    elif operation.is_indexing and any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
        waits.note("x[mask]")
    elif operation.name == "aten::repeat_interleave" and not kwargs.get("output_size"):
        waits.note("repeat_interleave")


def _resize_(tensor: Tensor, size: Sequence[int]) -> Tensor:
    shape = torch.empty(size, device="meta")
    if shape.numel() > tensor.numel():
        larger = torch.empty(size, dtype=tensor.dtype, device="cpu")
        larger.view(-1)[: tensor.numel()].copy_(on_host(tensor).reshape(-1))
        _adopt(tensor, larger)
        return tensor
    resized: Tensor = _as_strided_.redispatch(_CPU_KEYS, tensor, size, shape.stride())
    return resized


def _copy_(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between and on devices; what comes to pinned host memory asynchronously arrives once the host waits.

    A stream that has waited for such a copy may copy it back before that.
    """
    to, of = into.device.type, source.device.type
    pinned = (into if to == "cpu" else source).is_pinned() if to != of else False
    host = on_host(into) if to == "cuda" else into
    found = on_host(source) if of == "cuda" else source
    if to != of and source.numel():
        is_asynchronous = non_blocking and pinned
        words = (f"to {'device' if to == 'cuda' else 'host'}", "pinned" * pinned, "asynchronous" * non_blocking)
        waits.note(" ".join(filter(None, words)))
        if to == "cuda" and is_asynchronous:
            found = simulated_streams.on_its_way(found)
        if to == "cpu" and is_asynchronous:
            waits.arrive.append(simulated_streams.leaves(host.detach(), found.detach().clone()))
            ctypes.memset(host.untyped_storage().data_ptr() + host.storage_offset() * host.itemsize, 0xFF, host.nbytes)
            return into
    host.copy_(found)
    if to == "cuda":
        simulated_streams.made(into)
    elif of == "cuda":
        simulated_streams.host_has_waited()
    return into


def install_kernels() -> list[torch.library.Library]:
    """Give every operation with a CPU kernel one on the key CUDA; the kernels last as long as what is returned."""
    boxed = torch.library.Library("_", "IMPL")
    boxed.fallback(_kernel, "CUDA")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("copy_", _copy_, "CUDA")
    aten.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "CUDA")
    # Under a dispatch mode torch 2.13 asserts that it finds no fallback in Python, only kernels of single operations.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composite = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    for name in torch._C._dispatch_get_all_op_names():
        is_ours = has(name, "CPU") and not any(has(name, key) for key in composite)
        if not name.startswith("aten::") or not (is_ours or name in _OF_GPUS):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        if base not in ("copy_", "_fused_sdp_choice"):
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            aten.impl(name.removeprefix("aten::"), functools.partial(_kernel, op), "CUDA")
    return [boxed, aten]
