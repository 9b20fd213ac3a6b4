"""What is learned of a model by looking at it once: plain data without torch, the same on every rank.

A trace fills it (`runtime/assembly.py`, `prepare`), and everything that needs to know a model reads it: nothing looks at
the modules a second time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The modules of a model that hold experts, by their paths."""

    counts: Mapping[str, int]
    """How many experts each of them holds."""
    switchable: tuple[str, ...]
    """Modules of experts that their own library computes in several ways."""


@dataclass(frozen=True, slots=True)
class ModelAnalysis:
    """The findings about one model."""

    spec: ModelSpec
    """Its shape, with its cuts, boundaries and slices."""
    cut_styles: Mapping[str, str]
    """How each module that tensor parallelism cuts is cut, by its path: a style of `tracing/tensor_plan.py`."""
    shareable_heads: Mapping[str, int]
    """How many heads of keys or values, which ranks may share, a projection has, by its path."""
    sequence_parts: Mapping[str, tuple[str, ...]]
    """The children of each block that are given whole sequences, by the block's path; empty where none can be cut."""
    experts: ExpertModules
    has_dropout: bool
    """Whether a module or a configuration has a dropout probability above 0."""
    knows_slices: bool = False
    """Whether it was found out how sequences can be sliced."""
