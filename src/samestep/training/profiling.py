"""The profile of some steps of a run (`run.profile = "10:12"`): torch's trace, with the program's names as events.

    samestep::task F0                     the forward of micro-batch 0, as in a timeline of `simulate`
    samestep::op forward:layers.1         one op of the program: the forward of a layer
    samestep::owner bucket.0              the collectives of an op, as the ledger names their owner

Every rank writes `profile/steps-10-12.rank0.json.gz` into the run folder, for chrome://tracing or ui.perfetto.dev; on a GPU
also `profile/steps-10-12.rank0.memory.pickle`, every allocation with its stack, for pytorch.org/memory_viz.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from samestep.building.torch_seams import RecordFunctionFast
from samestep.models.spec import ModelSpec
from samestep.program.ops import Task
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_batch import Indices
from samestep.runtime.step_observer import StepObserver

_MOST_ALLOCATIONS = 1_000_000
"""The number of allocations whose history is kept; older ones are forgotten."""


class Profiler(StepObserver):
    """Profiles some steps of a run; an observer that labels tasks and forwards in them, and does nothing in others."""

    def __init__(self, steps: range, folder: Path, place: RankInfo) -> None:
        self._steps, self._folder, self._place = steps, folder / "profile", place
        self._profile: profile | None = None
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def step(self, number: int, run: Run) -> Iterator[None]:
        """Surround a step of a prepared run by its number, counted from 1."""
        if number in self._steps and self._profile is None:
            self._start(run.model, run.assembly.model.spec)
        yield
        if number + 1 not in self._steps:
            self.close()

    def running(self, task: Task, samples: Indices) -> AbstractContextManager[None]:
        """Return a context that labels the operations of a task in the profile."""
        if self._profile is None:
            return nullcontext()
        label: AbstractContextManager[None] = RecordFunctionFast(f"samestep::task {task.kind}{task.microbatch}")
        return label

    def close(self) -> None:
        """Write the profile, if there is one."""
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._folder.mkdir(exist_ok=True)
        name = f"steps-{self._steps.start}-{self._steps.stop - 1}.rank{self._place.rank}"
        running.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
        if self._place.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _start(self, module: nn.Module, spec: ModelSpec) -> None:
        activities = [ProfilerActivity.CPU]
        if self._place.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
        here = dict(module.named_modules())
        for layer in spec.layers:
            for path in layer.modules:
                if path and path in here:  # other stages hold other layers
                    self._hooks += _label_forwards(here[path], f"samestep::op forward:{layer.name}")
        self._profile = profile(
            activities=activities, profile_memory=True, acc_events=True
        )  # without, torch may warn of cycles
        self._profile.__enter__()


def _label_forwards(module: nn.Module, name: str) -> tuple[RemovableHandle, RemovableHandle]:
    """Label the forwards of a module; calls within calls close in reverse order."""
    open_labels: list[Any] = []

    def enter(*_: Any) -> None:
        label = RecordFunctionFast(name)
        label.__enter__()
        open_labels.append(label)

    def leave(*_: Any) -> None:
        if open_labels:
            open_labels.pop().__exit__(None, None, None)

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)
