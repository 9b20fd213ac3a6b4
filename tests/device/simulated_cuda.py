"""What stands for `torch.cuda` and for torch's C++ half on a machine without a GPU; see `simulated_tensors.py`.

No process may be forked after a backward on the device, as with a GPU. One device index is known to a process: each rank is shown a GPU of its own.
"""

from __future__ import annotations

import atexit
import collections
import ctypes
import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.device import simulated_nccl, simulated_streams
from tests.device.simulated_streams import DEVICE
from tests.device.simulated_tensors import Draws, install_kernels, memory

GPUS_SEEN_BY_A_PARENT = 4
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_ENGINE, _START_THREADS = (
    f"_ZN5torch8autograd6Engine{name}Ev" for name in ("18get_default_engine", "20start_device_threads")
)
_CUDA, _PRIVATEUSE1 = 1, 20  # of c10::DeviceType

_kept: list[Any] = []


def refusal() -> str:
    """Return why this torch cannot be given a simulated device; empty where it can."""
    if torch.version.cuda is not None or (torch.cuda.is_available() and not _kept):
        return (
            "this torch is built for CUDA: its own kernels stand where the simulated ones would; `make gpu` needs a GPU"
        )
    needed = {
        "torch._C._acc.DeviceGuard": hasattr(getattr(torch._C, "_acc", None), "DeviceGuard"),
        "torch._C._to_dlpack": hasattr(torch._C, "_to_dlpack"),
        _REGISTRY: hasattr(_library("libc10.so"), _REGISTRY),
        **{name: hasattr(_library("libtorch_cpu.so"), name) for name in (_HOOKS, _ENGINE, _START_THREADS)},
    }
    gone = [name for name, is_there in needed.items() if not is_there]
    return f"torch {torch.__version__} has no {', '.join(gone)}" if gone else ""


def install() -> None:
    """Give this process a simulated device, once."""
    if _kept:
        return
    if reason := refusal():
        raise RuntimeError(reason)
    _register_guard()
    _replace_hooks()
    _replace_storage()
    _replace_names()
    _kept.extend(install_kernels())
    _kept.append(simulated_nccl.install())
    _start_device_threads()


class DefaultGenerator:
    """What stands for the device's default generator."""

    device = DEVICE
    get_state, set_state = staticmethod(Draws.state), staticmethod(Draws.set_state)

    def manual_seed(self, seed: int) -> DefaultGenerator:
        Draws.seed(seed)
        return self

    def get_offset(self) -> int:
        return Draws.offset

    def initial_seed(self) -> int:
        return 0


def _replace_names() -> None:
    """Replace the functions of `torch.cuda` and `torch.accelerator` that would ask a driver."""
    properties = SimpleNamespace(
        name="Simulated GPU", total_memory=2**33, multi_processor_count=8, major=9, minor=0, uuid="simulated"
    )

    def nothing(*_: Any, **__: Any) -> None: ...

    def reset_peak(*_: Any) -> None:
        memory.peak = memory.allocated

    both: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: GPUS_SEEN_BY_A_PARENT if multiprocessing.parent_process() is None else 1,
        "current_stream": simulated_streams.current,
        "synchronize": simulated_streams.synchronize,
        "memory_allocated": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "memory_stats_as_nested_dict": lambda device=None: {
            "allocated_bytes": {"all": {"current": memory.allocated, "peak": memory.peak}},
            "reserved_bytes": {"all": {"current": _in_segments(memory.allocated), "peak": _in_segments(memory.peak)}},
        },
        "memory_reserved": lambda device=None: _in_segments(memory.allocated),
        "max_memory_reserved": lambda device=None: _in_segments(memory.peak),
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": nothing,
    }
    of_cuda: dict[str, Any] = {
        "_lazy_init": nothing,
        "init": nothing,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "current_device": lambda: 0,
        "set_device": nothing,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "Stream": simulated_streams.Stream,
        "Event": simulated_streams.Event,
        "StreamContext": simulated_streams.StreamContext,
        "stream": lambda stream=None: simulated_streams.StreamContext(stream),
        "default_stream": lambda device=None: simulated_streams.DEFAULT,
        "set_stream": simulated_streams.set_current,
        "is_current_stream_capturing": lambda: False,
        "memory_stats": lambda device=None: collections.Counter(),
        "mem_get_info": lambda device=None: (properties.total_memory - memory.allocated, properties.total_memory),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_arch_list": lambda: ["sm_90"],
        "is_bf16_supported": lambda *args, **kwargs: True,
        "default_generators": (DefaultGenerator(),),
        "manual_seed": Draws.seed,
        "manual_seed_all": Draws.seed,
        "get_rng_state": lambda device=None: Draws.state(),
        "get_rng_state_all": lambda: [Draws.state()],
        "set_rng_state": lambda state, device=None: Draws.set_state(state),
        "set_rng_state_all": lambda states: Draws.set_state(states[0]),
        "ipc_collect": nothing,
    }
    of_accelerator: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": lambda: 0,
        "set_device_index": nothing,
    }
    for where, values in ((torch.cuda, both | of_cuda), (torch.accelerator, both | of_accelerator)):
        for name, value in values.items():
            setattr(where, name, value if isinstance(value, (type, tuple)) else _alone(value))
    torch.cuda.nccl.version = _alone(lambda: (2, 27, 3))  # which the text of a failed collective names


def _in_segments(size: int) -> int:
    """Return the bytes of the segments, of 2 MiB, that hold so many bytes."""
    return -(-size // 2**21) * 2**21


def _alone(function: Any) -> Any:
    """Return a function of its own that calls another one: dynamo knows functions by identity, each under one name."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _replace_storage() -> None:
    """Let storages of the device be freed and made again, be known to streams, and let host memory be pinned."""
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    def size(self: Any) -> int:
        return 0 if memory.is_freed(self) else int(memory.true_size(self))

    def resize_(self: Any, new: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, new)
        memory.resize(self, new)
        return self

    def pinned(self: Tensor, device: Any = None) -> Tensor:
        if self.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        copy = self if is_pinned(self) else self.clone()
        copy.untyped_storage().__dict__["is_pinned"] = True
        return copy

    def is_pinned(self: Tensor, device: Any = None) -> bool:
        return self.device.type == "cpu" and bool(self.untyped_storage().__dict__.get("is_pinned"))

    def pinning(make: Any) -> Any:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
            tensor: Tensor = make(*args, **kwargs)
            return pinned(tensor) if pin_memory else tensor

        return made

    storage.size = storage.nbytes = storage.__len__ = size
    storage.resize_ = resize_
    Tensor.pin_memory, Tensor.is_pinned = pinned, is_pinned  # type: ignore[assignment, method-assign]
    Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment, method-assign]
    for name in ("empty", "empty_like", "zeros", "zeros_like"):
        setattr(torch, name, pinning(getattr(torch, name)))


# -- torch's C++ half ------------------------------------------------------------------------------


def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _register_guard() -> None:
    """Register a device guard, which a torch without CUDA lacks: autograd's engine asks for it."""
    slots = (ctypes.c_uint64 * 24).in_dll(_library("libc10.so"), _REGISTRY)

    class Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc, name-defined]
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.CUDA

    guard = Guard()
    _kept.append(guard)
    torch._C._acc.register_python_privateuseone_device_guard(guard)  # type: ignore[attr-defined]
    slots[_CUDA], slots[_PRIVATEUSE1] = slots[_PRIVATEUSE1], 0


def _replace_hooks() -> None:
    """Let `at::detail::getCUDAHooks()` say that torch was built with CUDA, in a copy of its table of functions."""
    find = getattr(_library("libtorch_cpu.so"), _HOOKS)
    find.restype = ctypes.c_void_p
    hooks = ctypes.c_uint64.from_address(find())
    size = 96
    table = (ctypes.c_uint64 * size)(*(ctypes.c_uint64 * size).from_address(hooks.value - 16))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
    for slot in (2, 3, 4, 5):  # isBuilt, isAvailable, hasPrimaryContext, init; two of the destructor stand before
        table[2 + slot] = ctypes.cast(yes, ctypes.c_void_p).value or 0
    _kept.extend([table, yes])
    before = hooks.value
    hooks.value = ctypes.addressof(table) + 16
    atexit.register(setattr, hooks, "value", before)  # C++ destroys the hooks after Python has freed the table


def _start_device_threads() -> None:
    """Let autograd start the thread of a device that was not there at the first backward of this process or its parent."""
    leaf = torch.ones((), device=DEVICE, requires_grad=True)
    try:
        (leaf * 1).backward()
    except RuntimeError:
        library = _library("libtorch_cpu.so")
        engine, start = getattr(library, _ENGINE), getattr(library, _START_THREADS)
        engine.restype, start.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        start(engine())
        (leaf * 1).backward()


def install_if_asked() -> None:
    """Install in a process that was started with the variable set, as workers are that are spawned."""
    if os.environ.get("SAMESTEP_TESTS_SIMULATE_A_DEVICE"):
        install()
