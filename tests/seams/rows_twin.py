"""What the toy axis `rows` does on real modules: hooks around every linear layer named `up`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from samestep.examination.traced_model import TracedModel
from samestep.program.program import Program
from samestep.runtime.axes.rank_crossings import moved
from samestep.runtime.processes.mesh import Mesh
from tests.seams.rows_strategy import AXIS


def apply(traced: TracedModel, program: Program, mesh: Mesh) -> None:
    if AXIS not in program.axes:
        return
    for path, module in traced.module.named_modules():
        if path.endswith("up"):
            _divide(module, path, mesh)


def _divide(module: nn.Module, path: str, mesh: Mesh) -> None:
    group, degree, index = mesh.groups[AXIS], mesh.size(AXIS), mesh.index(AXIS)

    def put_together(_: nn.Module, args: object, output):
        size = output.shape[-1]
        return moved(F.pad(output, (index * size, (degree - 1 - index) * size)), group, path, "sum", "keep")

    module.register_forward_pre_hook(lambda _, args: (moved(args[0], group, path, "keep", "sum"),))
    module.register_forward_hook(put_together)
