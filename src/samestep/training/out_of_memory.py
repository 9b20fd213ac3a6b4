"""The report of a run that ran out of memory: the rank's task, the bytes that it held, and a layout that needs less.

An allocator's message says only how many more bytes were requested. This report adds what the memory held: weights,
gradients and optimizer states are counted from the run's tensors; the rest are activations, buffers and libraries. The
rank's task of the schedule, and the innermost module whose forward was running, are read from the frames of the error's
traceback.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import FrameType

import torch
from torch import nn

from samestep import hardware, wings
from samestep.memory.memory_use import REST, MemoryUse, parts_text
from samestep.output import process_limits
from samestep.output.text import readable
from samestep.program.ops import Task
from samestep.program.update_rules import states_per_param
from samestep.runtime import memory_limits
from samestep.runtime.run import Run
from samestep.schedules import TaskKind
from samestep.training.check import Checked

_ALLOCATOR_MESSAGES = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)
"""Texts of the RuntimeError that torch's CPU allocators raise."""
_CLEARLY_LESS = 0.8
"""A suggested layout must be predicted to need at most this fraction of the bytes predicted for the one that failed."""
_TASKS = {
    TaskKind.FORWARD: "forward",
    TaskKind.OUTPUTS: "forward for outputs",
    TaskKind.BACKWARD: "backward",
    TaskKind.WEIGHT: "gradients of weights",
}


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _ALLOCATOR_MESSAGES.search(str(error)) is not None


def shortage(error: BaseException, run: Run) -> str:
    """Return two lines of text: the rank's task when memory ran out, and the bytes that it held."""
    place = run.place
    sizes, most = held_bytes(run), most_bytes(place.device)
    parts = parts_text({**sizes, REST: max(0, most - sum(sizes.values()))})
    where = where_of(error, run)
    return (
        f"rank {place.rank} of {place.world_size} ran out of memory {where}: {_first_line(error)}\n"
        f"  held       {parts}; at most {readable(most)} in all, of "
        f"{readable(memory_limits.limit_bytes(place.device))}"
    )


def is_too_large(checked: Checked, device_type: str) -> bool:
    """Return whether a run is predicted to need more memory than its ranks have."""
    room, peak = _room_and_peak(checked, device_type)
    return peak.total > room


def _room_and_peak(checked: Checked, device_type: str) -> tuple[int, MemoryUse]:
    """Return the bytes that a rank has, and the memory of a rank at its predicted peak."""
    per_node, layout = checked.ranks_per_node, checked.layout
    room = memory_limits.room_bytes(layout, torch.device(device_type), per_node)
    return room, memory_limits.predicted_peak(checked.workload.spec, checked.job, layout, per_node)


def less_memory(checked: Checked, device_type: str) -> str:
    """Return two lines of text: the memory predicted for a layout that ran out, and the nearest layout that needs less."""
    spec, job, layout = checked.workload.spec, checked.job, checked.layout
    machine, states = hardware.resolve_hardware(None), states_per_param(job)
    room, peak = _room_and_peak(checked, device_type)
    parts = parts_text(peak.parts())
    total = readable(peak.total)
    lines = [f"  predicted  {parts}; {total} in all at {peak.peak_at}, of {readable(room)} a rank"]
    # The prediction may have said that this layout fits: a suggestion must then be predicted to need clearly less.
    smaller = dataclasses.replace(machine, memory_bytes=max(1, int(min(room, _CLEARLY_LESS * peak.total))))
    groups = wings.optional("plan", "open_groups")
    near = groups and groups.nearest(spec, job, smaller, layout, layout.world_size, states)
    if near is not None:
        needs, step_s = readable(near.peak.total), f"{near.step_s:.3g} s"
        lines.append(f'  "{near.layout}" is predicted to need {needs}, and {step_s} per step')
    else:
        lines.append(f"  no layout of {layout.world_size} ranks is predicted to need clearly less")
    return "\n".join(lines)


def where_of(error: BaseException, run: Run) -> str:
    """Return the task of the schedule in which an error was raised, and the innermost module that was running, as
    text."""
    task: Task | None = None
    module = ""
    names = {id(module): name for name, module in run.model.named_modules()} if run.is_prepared else {}
    for frame in _frames(error):
        task = next((value for value in frame.f_locals.values() if isinstance(value, Task)), task)
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = names.get(id(owner), "") or module
    inside = f", module {module}" if module else ""
    if not run.is_prepared:
        return f"while the model was built{inside}"
    if task is None or task.kind is TaskKind.UPDATE:
        return f"in the update of step {run.steps_taken + 1}{inside}"
    return f"in the {_TASKS[task.kind]} of micro-batch {task.microbatch}, step {run.steps_taken + 1}{inside}"


def held_bytes(run: Run) -> dict[str, int]:
    """Return the bytes that a run keeps between steps, by kind: weights, gradients, optimizer."""
    if not run.is_prepared:
        return {"weights": 0}
    return memory_limits.held_bytes(run.model, run.program, run.updater)


def most_bytes(device: torch.device) -> int:
    """Return the largest number of bytes that this process has held: on a GPU since the step began, else so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return process_limits.peak_resident_bytes()


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text[max(text.find("DefaultCPUAllocator"), 0) :]  # the text before it is a line number within torch
