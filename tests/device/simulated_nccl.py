"""Process groups of nccl on the simulated device: gloo carries the bytes, and a host tensor is refused.

The order in which NCCL carries out the messages of a group is not simulated here: `samestep.schedules.check` plays it, and
`test_messages.py` holds what a stage really issues against what is played. See `simulated_tensors.py` for the tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device.simulated_tensors import Aliases, Operation

_c10d = dist.distributed_c10d
_is_nccl = False


def _collective(op: Any) -> Callable[..., Any]:
    operation = Operation.of(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        aliases = Aliases(operation)
        return aliases.back(op(*(aliases.of(one) for one in args), **kwargs))

    return run


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
    _c10d._check_single_tensor = _refusing_host_tensors(_c10d._check_single_tensor)
    _c10d._check_tensor_list = _refusing_host_tensors(_c10d._check_tensor_list)
    dist.init_process_group = _c10d.init_process_group = _init_process_group(_c10d.init_process_group)
    dist.split_group = _c10d.split_group = _split_group
    backend = dist.get_backend
    dist.get_backend = lambda group=None: "nccl" if _is_nccl else backend(group)  # torch's own code asks another name
    return library
