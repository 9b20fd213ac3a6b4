"""The forward of a model as one graph of a compiler (`run.compile = "model"`), in layouts that exchange nothing within it.

A graph has no place between two blocks where weights are gathered or activations sent, so each rank must hold all weights and
exchange gradients alone, after the backward.
"""

from __future__ import annotations

from samestep.program.program import Program
from samestep.program.step import StepSpec


def refusal(step: StepSpec) -> str | None:
    """Return why the forward of a layout is not one graph."""
    layout = step.layout
    within = [f"{axis}={degree}" for axis, degree in layout.inner_degrees.items() if degree > 1]
    within += [f"zero={step.zero}"] if step.zero > 1 else []
    within += ["recompute=offload"] if layout.recompute == "offload" else []
    if not within:
        return None
    works = "run.compile = 'none'" if layout.cp > 1 else "run.compile = 'blocks'"
    return f"{within[0]} moves tensors between parts of the forward, and {step.one_graph}: {works} works, and so does dp with zero=0 or zero=1"


def apply(program: Program) -> Program:
    """Return the program as it is: a graph computes what its modules do."""
    return program
