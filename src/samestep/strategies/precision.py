"""Mixed precision: matrix products in the job's compute dtype, all sums in float32.

The module holds weights in the compute dtype; float32 master weights, gradients and optimizer states are kept beside
them (Micikevicius et al. 2018, arXiv:1710.03740). A gradient is cast to float32 before it is added to another, and
reductions run in float32, so the rule is the same in every layout, one device included.
"""

from __future__ import annotations

from samestep.errors import LayoutError
from samestep.program.ops import BodyKey, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec


def refusal(step: StepSpec) -> LayoutError | None:
    """Return None: every precision runs in every layout."""
    return None


def apply(program: Program) -> Program:
    """Return the program with the dtype of its matrix products in its compute ops."""
    dtype = program.step.product_dtype

    def rewrite(_: BodyKey, ops: Ops) -> Ops:
        return tuple(op.but(dtype=dtype) if op.axis is None and op.flops and op.dtype != dtype else op for op in ops)

    return program.with_bodies(rewrite)
