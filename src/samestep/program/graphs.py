"""The graphs of `torch.compile` in a step: what one of them contains. No torch."""

from __future__ import annotations

from samestep.program.step import StepSpec


def one_graph(step: StepSpec) -> str:
    """Return the part that runs as one graph, in words of a refusal; empty where nothing is compiled."""
    part = {"none": "", "blocks": "a block", "model": "the model"}[step.compile]
    return part and f"run.compile = {step.compile!r} makes one graph of {part}"


def repeats_in_graphs(step: StepSpec) -> bool:
    """Return whether blocks that are recomputed are repeated by a graph that contains their forward and backward."""
    in_parts = step.layout.recompute in ("selective", "alternate")
    return (step.compile == "blocks" and in_parts) or (
        step.compile == "model" and (in_parts or step.layout.recompute == "full")
    )
