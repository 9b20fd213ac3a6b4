"""A window of a rank: the steps that are recorded op by op, the marks that hear the ops, and the file that holds them."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from samestep.job import Job
from samestep.models.spec import ModelSpec
from samestep.models.spec_json import to_json
from samestep.output.output_file import write_whole
from samestep.program import recorded
from samestep.program.program import Program
from samestep.program.recorded import RecordedStep, RecordHead, SentOp
from samestep.runtime.recording.kernel_profile import KernelProfile
from samestep.runtime.recording.layer_marks import LayerListener, mark_layers


class WindowListener(LayerListener, Protocol):
    """Hears the layers of a window, and what the host does outside of tasks."""

    def begin(self, region: str) -> Callable[[], None]:
        """Hear that the host begins to do something outside of tasks; the result is called at its end."""


class RecordWindow:
    """The steps that are recorded op by op, and the file that holds them."""

    def __init__(self, steps: range, path: Path, job: Job, profile: KernelProfile | None) -> None:
        self.steps, self._path, self._job, self.profile = steps, path, job, profile
        self.held: Mapping[str, int] = {}
        self._file: IO[str] | None = None
        self._handles: list[RemovableHandle] = []
        self._collecting: Callable[[str, Mapping[str, int]], None] | None = None

    def overlaps(self, steps: range) -> bool:
        """Return whether it has one of some steps."""
        return self.steps.start < steps.stop and steps.start < self.steps.stop

    @property
    def is_open(self) -> bool:
        """Whether a step of it has begun."""
        return self._file is not None

    def open(self, recorder: WindowListener, head: RecordHead, module: nn.Module, spec: ModelSpec) -> None:
        """Mark the layers and begin the file."""
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        if head.rank == 0:
            write_whole(folder / recorded.MODEL, to_json(spec))
            write_whole(folder / recorded.JOB, self._job.to_toml(with_folder=True))
        self._file = self._path.open("w", encoding="utf-8")
        self._file.write(recorded.head_line(head))
        self._file.flush()
        self._handles = mark_layers(module, spec, recorder)
        ends: list[Callable[[], None]] = []

        def collecting(phase: str, _: Mapping[str, int]) -> None:
            if phase == "start":
                ends.append(recorder.begin("host:gc"))
            elif ends:
                ends.pop()()

        self._collecting = collecting
        gc.callbacks.append(collecting)
        if self.profile is not None:
            self.profile.start()

    def write(self, step: RecordedStep, host_events: Sequence[Sequence[Any]]) -> None:
        """Append a step; `host_events` are what a profile needs besides."""
        if self._file is not None:
            self._file.write(recorded.step_line(step))
            self._file.flush()
            if self.profile is not None:
                self.profile.add(step, host_events)

    def leave(self) -> None:
        """Remove the marks."""
        for handle in self._handles:
            handle.remove()
        if self._collecting is not None:
            gc.callbacks.remove(self._collecting)
        self._handles, self._collecting = [], None
        if self.profile is not None:
            self.profile.stop()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            if self.profile is not None:
                self.profile.write()
        self._file = None


def sent_ops(program: Program) -> list[SentOp]:
    """Return the collectives and messages of a step, in the order of the program, followed by those of exchanges."""
    found = [
        SentOp(op.owner, str(op.kind), op.axis, op.size_bytes, f"{task.kind}{task.microbatch}")
        for task, op in program.ops()
        if op.axis is not None
    ]
    exchanged = [op for phases in program.exchanges for ops in phases.values() for op in ops if op.axis is not None]
    last = f"{program.tasks[-1].kind}{program.tasks[-1].microbatch}"
    return found + [SentOp(op.owner, str(op.kind), str(op.axis), op.size_bytes, last) for op in exchanged]


def head_of(program: Program, spec: ModelSpec, rank: int, device: torch.device) -> RecordHead:
    """Return the description of a rank in front of its steps."""
    step = program.step
    ops = sent_ops(program)
    return RecordHead(
        rank=rank,
        world_size=step.layout.world_size,
        host=socket.gethostname(),
        clock=_clock_identity(),
        layout=str(step.layout),
        stage=step.stage,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        groups={axis: list(step.ranks.group(rank, axis)) for axis in dict.fromkeys(op.axis for op in ops)},
        ops=ops,
        layers=[layer.name for layer in spec.layers],
        num_exchanged=len(ops) - sum(op.axis is not None for _, op in program.ops()),
    )


def _clock_identity() -> str:
    """Return a word that is equal for processes with the same monotonic clock: that of the boot, and the host's name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()
