"""Buffers to which the model's code gives a value after the step, in a pipeline (twin of `strategies/batch_values.py`).

Every stage runs the model's own code, and has its buffers. The call of `samestep.after_step` is an event of the forward's flow
(`tracing/flow.py`), which the stage of the layer in front of it carries out: it alone has the next value of the buffer. Behind the
update it gives it to the others, whose code may read the buffer in the next step:

    stage of the call    value        all_reduce over pp     value + 0 + ... + 0, which is the value
    all others           zeros
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from samestep.program.program import Program
from samestep.runtime.axes.precision import DTYPES
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.strategies.batch_values import KEPT


@dataclass(frozen=True, slots=True)
class _StageBuffer:
    name: str
    dtype: torch.dtype
    """The dtype in which it is sent."""
    is_mine: bool
    """Whether this stage computes its next value."""


@dataclass(frozen=True, slots=True)
class StageBuffers:
    """The buffers that the stages of a pipeline send each other after an update; none without `pp`."""

    model: nn.Module
    buffers: tuple[_StageBuffer, ...] = ()
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, model: nn.Module, program: Program, mesh: Mesh) -> StageBuffers:
        """Return the buffers of a rank's model."""
        step = program.step
        if step.layout.pp == 1:
            return cls(model)
        mine = {index for chunk in program.chunks for index in chunk}
        found = tuple(
            _StageBuffer(one.name, getattr(torch, one.dtype) if one.dtype else DTYPES[step.master_dtype], index in mine)
            for index, layer in enumerate(step.model.layers)
            for one in layer.kept
        )
        return cls(model, found, mesh.groups["pp"] if found else None)

    @torch.no_grad()
    def share(self) -> None:
        """Let all stages have the values of the stages that have computed them.

        Collective over `pp`, see [Note: collective calls].
        """
        for one in self.buffers:
            buffer = self.model.get_buffer(one.name)
            sent = buffer.to(one.dtype, copy=True) if one.is_mine else torch.zeros_like(buffer, dtype=one.dtype)
            with owned(KEPT):
                dist.all_reduce(sent, group=self.group)
            if not one.is_mine:
                buffer.copy_(sent)
