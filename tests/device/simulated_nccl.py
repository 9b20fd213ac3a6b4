"""Process groups of nccl on the simulated device: gloo carries the bytes, and what NCCL refuses is refused.

    a tensor on the host, of a dtype that NCCL does not know, or with gaps between its elements
    use of what a collective writes on a stream that has not waited for it: each group has a stream of its own, which waits for the
    current one before it begins; `wait` lets the current one wait for the group's

The order in which NCCL carries out the messages of a group is not simulated here: `samestep.schedules.check` plays it, and
`test_messages.py` holds what a stage really issues against what is played. See `simulated_tensors.py` for the tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device import simulated_streams
from tests.device.simulated_streams import Stream
from tests.device.simulated_tensors import Aliases, Operation

_c10d = dist.distributed_c10d
_is_nccl = False
_KNOWN = {
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
}  # fmt: skip
"""Dtypes that NCCL takes."""
_METHODS = (
    "allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "send", "recv",
)  # fmt: skip
"""Of a process group."""


def _collective(op: Any) -> Callable[..., Any]:
    operation = Operation.of(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        aliases = Aliases(operation)
        tensors = [one for arg in args for one in _tensors_in(arg)]
        for one in tensors:
            if one.dtype not in _KNOWN and not one.is_complex():
                raise RuntimeError(f"Unsupported data type for NCCL process group: {one.dtype} ({operation.name})")
            if not one.is_contiguous():
                raise RuntimeError(f"Tensors must be contiguous ({operation.name})")
        out = aliases.back(op(*(aliases.of(one) for one in args), **kwargs))
        if operation.name != "c10d::send":
            own = (
                tensors[-1] if operation.name == "c10d::_allgather_base_" else None
            )  # which stays as it is in its place
            for one in _tensors_in(args[0]):
                simulated_streams.made(one, without=own)
        return out

    return run


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)


class _Work:
    """A collective under way: the stream that waits for it finds what it has written."""

    def __init__(self, work: Any, stream: Stream) -> None:
        self._work, self._seen = work, stream.seen()

    def wait(self, *args: Any) -> Any:
        done = self._work.wait(*args)
        simulated_streams.wait_for(self._seen)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@functools.cache
def _stream_of(group: str) -> Stream:
    """Return the stream of a process group, by the group's name."""
    return Stream()


def _on_a_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def issued(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_nccl:
            return method(group, *args, **kwargs)
        stream = _stream_of(group.group_name)
        stream.wait_stream(simulated_streams.current())
        with stream:
            work = method(group, *args, **kwargs)
        return None if work is None else _Work(work, stream)

    return issued


def _refusing_host_tensors(check: Callable[..., Any]) -> Callable[..., Any]:
    def checked(tensor: Any, name: str, *rest: Any) -> Any:
        tensors = tensor if isinstance(tensor, (list, tuple)) else [tensor]
        if _is_nccl and any(isinstance(one, Tensor) and one.device.type == "cpu" for one in tensors):
            raise RuntimeError(f"No backend type associated with device type cpu ({name} in a group of nccl)")
        return check(tensor, name, *rest)

    return checked


def _init_process_group(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        global _is_nccl
        _is_nccl = backend == "nccl"
        device = kwargs.pop("device_id", None) if _is_nccl else None
        init("gloo" if _is_nccl else backend, *args, **kwargs)
        if device is not None:
            assert dist.group.WORLD is not None
            dist.group.WORLD.bound_device_id = device

    return init_process_group


def _split_group(
    parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, group_desc: str | None = None, **_: Any
) -> Any:
    """Make the groups of a split: on NCCL one call, in which every rank takes part."""
    mine, world = None, dist.group.WORLD
    assert world is not None
    bound, world.bound_device_id = world.bound_device_id, None  # else torch would split gloo too, which it cannot
    try:
        for ranks in split_ranks:
            group = dist.new_group(ranks, timeout=timeout, group_desc=group_desc)
            if dist.get_rank() in ranks:
                mine = group
    finally:
        world.bound_device_id = bound
    return mine


def install() -> torch.library.Library:
    """Give `torch.distributed` groups of nccl; they last as long as what is returned."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("c10d::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                base, _, overload = name.removeprefix("c10d::").partition(".")
                op = getattr(getattr(torch.ops.c10d, base), overload or "default")
                if any("Tensor" in str(one.type) for one in op._schema.arguments):
                    library.impl(base, _collective(op), "CUDA", allow_override=True)
    for name in _METHODS:
        if (method := getattr(dist.ProcessGroup, name, None)) is not None:
            setattr(dist.ProcessGroup, name, _on_a_stream(method))
    _c10d._check_single_tensor = _refusing_host_tensors(_c10d._check_single_tensor)
    _c10d._check_tensor_list = _refusing_host_tensors(_c10d._check_tensor_list)
    dist.init_process_group = _c10d.init_process_group = _init_process_group(_c10d.init_process_group)
    dist.split_group = _c10d.split_group = _split_group
    backend = dist.get_backend
    dist.get_backend = lambda group=None: "nccl" if _is_nccl else backend(group)  # torch's own code asks another name
    return library
