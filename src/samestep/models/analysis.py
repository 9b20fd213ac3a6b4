"""The `ModelAnalysis`: the findings of one examination of a model, as plain data without torch, equal on every rank.

A trace fills it (`examination/examine.py`), and all other code reads it: the modules are not examined twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from samestep.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The modules of a model that hold experts."""

    counts: Mapping[str, int]
    """Number of experts of each module, by its path."""
    switchable: tuple[str, ...]
    """Paths of the modules whose library offers several implementations of the experts."""


StateKind = Literal["buffer", "weight", "attribute", "variable", "counts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """Something that a forward keeps, and that another forward may read."""

    owner: str
    """Path of the module that holds it."""
    name: str
    """Name of the buffer, the parameter or the attribute."""
    kind: StateKind
    """The kind of state: "variable" is one outside of the modules, "counts" a gradient that is divided by the tokens counted in
    a micro-batch."""
    of_samples: bool = False
    """Whether it depends on the samples of the forward, or on their number."""
    is_read: bool = True
    """Whether the outputs depend on it, or the code looks at it."""
    is_restorable: bool = False
    """Whether a module of the model holds it, in a form that can be put back, and it depends on no samples."""

    @property
    def full_name(self) -> str:
        """The path of the module and the name."""
        return f"{self.owner}.{self.name}".lstrip(".")


@dataclass(frozen=True, slots=True)
class ModelAnalysis:
    """The findings about one model: its shape, and how tensor, sequence and expert parallelism apply to its modules."""

    spec: ModelSpec
    """Shape of the model, with its cuts, boundaries and slices."""
    experts: ExpertModules
    has_dropout: bool
    """Whether a module or a configuration has a dropout probability above 0."""
    cut_styles: Mapping[str, str] = field(default_factory=dict)
    """Style of the tensor cut of each module that is cut, by its path: a style of `independence/tensor_plan.py`."""
    gathered: Mapping[str, str] = field(default_factory=dict)
    """Modules that a plan cuts otherwise, whose outputs are gathered or which stay whole under a tensor cut, and why."""
    copied: frozenset[str] = frozenset()
    """Modules whose input goes through `copy` under a tensor cut, by their paths."""
    counts: Mapping[int, tuple[tuple[str, str, int], ...]] = field(default_factory=dict)
    """Attributes that a rank divides, for each degree of a tensor cut that was tried: the path of a module that has it,
    its name, and the divisor."""
    shareable_heads: Mapping[str, int] = field(default_factory=dict)
    """Number of heads of keys or values that ranks may share, by the path of the projection."""
    sequence_parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Children of each block that take whole sequences, by the block's path; empty without sequence parallelism."""
    slices_between: tuple[int, ...] = ()
    """Degrees of sequence parallelism for which it has been examined whether blocks work token by token."""
    expert_calls: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """The call of each module of experts, by its path: positional and named arguments, on the meta device."""
    parts_examined: tuple[int, ...] = ()
    """Numbers of slices into which it has been examined whether sequences can be cut."""
    samples_examined: tuple[int, ...] = ()
    """Samples of micro-batches of which it has been examined which modules their forward calls several times."""
    chunks_examined: bool = True
    """Whether it has been examined whether logits and loss can be computed in chunks of tokens."""
    states: tuple[StateSpec, ...] = ()
    """State that a forward keeps, other than the statistics of torch's norms."""
    stages: tuple[str, ...] = ()
    """The modules that `model.stages` names."""
    detached_checkpoints: bool = False
    """Whether it has reentrant checkpoints whose inputs take no gradient, inside of which torch trains nothing."""
