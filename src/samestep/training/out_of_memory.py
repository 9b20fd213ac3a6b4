"""Memory that ran out: recognised, and told on the rank that it ran out on, by what held it and what it was doing.

An allocator says how much more it was asked for, which helps nobody. What helps is what the bytes are: weights, gradients
and states can be counted, since the run knows them; the rest are activations, buffers and what libraries hold. Where a
rank was comes out of the frames of the error: the task of the schedule, and the deepest module that was called.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable, Iterator
from types import FrameType

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.output.byte_sizes import readable
from samestep.program.ops import Task
from samestep.runtime.run import Run
from samestep.schedules import TaskKind

_SAYINGS = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
"""Of torch's allocators, which raise a RuntimeError on CPUs."""
_TASKS = {TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.WEIGHT: "gradients of weights"}


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there was no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAYINGS.search(str(error)) is not None


def told(error: BaseException, run: Run) -> str:
    """Say in two lines where this rank was, and what it held."""
    place = run.place
    parts = ", ".join(f"{name} {readable(size)}" for name, size in held(run).items())
    where = where_of(error, run)
    return (
        f"rank {place.rank} of {place.world_size} ran out of memory {where}: {_first_line(error)}\n"
        f"  held       {parts}; at most {readable(most_bytes(place.device))} in all, of "
        f"{readable(limit_bytes(place.device))}"
    )


def where_of(error: BaseException, run: Run) -> str:
    """Name the op that an error came out of: the task, and the deepest module that was called in it."""
    task: Task | None = None
    module = ""
    names = {id(one): name for name, one in run.model.named_modules()} if run.is_prepared else {}
    for frame in _frames(error):
        task = next((one for one in frame.f_locals.values() if isinstance(one, Task)), task)
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = names.get(id(owner), "") or module
    inside = f", module {module}" if module else ""
    if not run.is_prepared:
        return f"while the model was made{inside}"
    if task is None or task.kind is TaskKind.UPDATE:
        return f"in the update of step {run.steps_taken + 1}{inside}"
    return f"in the {_TASKS[task.kind]} of micro-batch {task.microbatch}, step {run.steps_taken + 1}{inside}"


def held(run: Run) -> dict[str, int]:
    """Bytes of the storages of what a run keeps between steps, by what they are for."""
    if not run.is_prepared:
        return {"weights": 0}
    params = [_local(param) for param in run.model.parameters()]
    grads = [_local(param.grad) for param in run.model.parameters() if param.grad is not None]
    if run.program.buckets:  # there is where they are added up; elsewhere to ask for them might take more memory
        grads += [piece.gradient() for piece in run.updater.pieces]
    optimizer = run.updater.optimizer
    states = [
        value
        for piece in run.updater.pieces
        for value in (
            *(optimizer.state.get(piece.value, {}) if optimizer else {}).values(),
            *([piece.value] * (piece.target is not None)),
        )
        if isinstance(value, Tensor)
    ]
    return {"weights": _storages(params), "gradients": _storages(grads), "optimizer": _storages(states)}


def most_bytes(device: torch.device) -> int:
    """Bytes that this process has held at most: of the device, or of the host where that is the device."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def limit_bytes(device: torch.device) -> int:
    """Bytes that one process can have: of a device; of the host at most what it is allowed."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    total = int(psutil.virtual_memory().total)
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    return total if allowed == resource.RLIM_INFINITY else min(total, allowed)


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _storages(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors if not tensor.is_meta)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text[max(text.find("DefaultCPUAllocator"), 0) :]  # what stands before it is where in torch that is
