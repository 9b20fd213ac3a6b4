"""Samples that influence each other: a layout that spreads them over ranks or micro-batches would change the result."""

from __future__ import annotations

from samestep.errors import LayoutError, module_name
from samestep.program.program import Program
from samestep.program.step import StepSpec


def refusal(step: StepSpec) -> LayoutError | None:
    """Return where samples that the layout spreads over micro-batches influence each other."""
    model = step.model
    works = f"so the result would change with the layout. Use one rank with microbatch={step.global_batch}"
    owners = model.batch_norm_owners  # whose statistics are those of groups (`strategies/batch_norm.py`)
    if other := next((path for path in model.coupled_modules if path not in owners), ""):
        return LayoutError(
            "samples-mixed",
            f"{module_name(other)} lets samples influence each other or keeps statistics of them, {works}",
        )
    if model.mixes_samples and "samples" not in step.allow:
        where, _, operation = model.mixes_samples.rpartition(" by ")
        or_loss = "or a loss function (outputs, batch) that computes it from the logits, " * operation.startswith(
            "nll_loss"
        )
        return LayoutError(
            "samples-mixed",
            f"{module_name(where)} lets the samples of a batch influence each other by {operation}, {works}, {or_loss}"
            'or set run.allow = ["samples"] to skip this check',
        )
    unclear = next((mask for mask in model.masks if mask.rows is None), None)
    if unclear is not None:
        where = unclear.owner or model.name
        return LayoutError(
            "samples-mixed", f"{where} draws {unclear.name} for a tensor without a dimension of samples, {works}"
        )
    return None


def apply(program: Program) -> Program:
    """Return the program as it is: what is not refused needs nothing sent."""
    return program
