"""A parameter's shape as data: how the forward uses it, where a tensor cut may divide it, and the bytes of its elements in 4 bits.

A row of a weight in 4 bits is held as bytes: two elements in a byte, then one float32 scale for each block of elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

BLOCK = 64
"""Elements of a row that share a scale."""
SCALE_BYTES = 4


def packed_bytes(numel: int) -> int:
    """Return the bytes of so many elements, which are whole blocks."""
    return numel // 2 + numel // BLOCK * SCALE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The tensor cut that a weight allows: along `dim`, between `groups` (heads, columns, vocabulary tokens)."""

    style: Literal["column", "row", "vocab", "gather"]
    """gather: by columns, and the output is gathered. A vocabulary and what is gathered may also stay whole."""
    dim: int
    groups: int
    parts: int = 1
    """Number of weights fused along `dim`, each cut by itself: 3 for fused q, k and v."""
    is_shareable: bool = False
    """Whether several ranks may share a group: a head of keys and values, of which there are fewer than of queries."""


Partial = Literal["", "cut", "sequence"]
"""Why the gradient of a replicated weight is partial: cut, it works on activations that a tensor cut divides, such as
the norm of each head; sequence, it works on a rank's tokens under sequence parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The use of a weight in one layer, by a module that owns it or by other code."""

    layer: int
    owner: str = ""
    """Path of the module that owns the weight, if it is called in the layer, or a module around it; empty where other code
    reads the weight."""
    calls: int = 1
    """Number of these calls."""
    called: tuple[int, int] = (0, 0)
    """First and last event of the forward, as `ParamSpec.called`, among these calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter of the model, and how the forward uses it."""

    name: str
    shape: tuple[int, ...]
    layer: int
    """Index of the layer that uses it first."""
    aliases: tuple[str, ...] = ()
    """Other full names of the same tensor, for a tied weight."""
    shared: bool = False
    """Whether a forward uses it more than once (tied, or its module called again), and sums several gradients."""
    calls: int = 1
    """Largest number of calls of the module that owns it in one forward."""
    called: tuple[int, int] = (0, 0)
    """First and last event of the forward at which its unit's module is entered or left, as indices of such events."""
    uses: tuple[Use, ...] = ()
    """Its uses in the order of layers, if several layers use it; empty if one does."""
    read_outside: bool = False
    """Whether code outside the layer that owns it reads it, such as a model that multiplies by its embedding."""
    is_replaced: bool = False
    """Whether the forward puts another tensor in its place, as `torch.func.functional_call` does."""
    takes_gradient: bool = True
    """Whether a gradient flows back into the input of the module it is gathered with; none flows into tokens."""
    sparse_gradient: bool = False
    """Whether its gradient is a sparse tensor, as an embedding's may be."""
    trainable: bool = True
    is_idle: bool = False
    """Whether it asks for a gradient, and the loss of the trace does not depend on it, in a forward that looks at no values."""
    may_be_unused: bool = False
    """Whether the trace does not show that every step gives it a gradient; a step that gives it none does not update it."""
    is_updated_whole: bool = False
    """Whether the optimizer's rule needs all its elements at once, so that ZeRO gives it to one rank to update."""
    is_updated_by_rows: bool = False
    """Whether the optimizer updates only the rows that are in its sparse gradient."""
    cut: Cut | None = None
    """Tensor cut that it allows; None keeps it whole on every rank."""
    partial: Partial = ""
    """Why its gradient is partial over `tp`, though the weight is replicated; empty if it is not partial."""
    experts: int = 0
    """Number of experts along its first dimension; 0 if it belongs to none."""
    stages: tuple[int, ...] = ()
    """Pipeline stages that hold it, tied, and sum its gradients, if there are several; empty if one does."""
    follows: str = ""
    """Name of the weight of another model whose moving average it is, behind each step; empty if it is none."""
    held_as: str = ""
    embeds: Literal["", "tokens", "positions"] = ""
    """Indices into it, if it is the table of an embedding: the contents of a sample, or the positions in a sequence."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def bytes_of(self, numel: int, element_bytes: int) -> int:
        """Return the bytes of so many of its elements, each of `element_bytes` unless they are held in 4 bits."""
        return packed_bytes(numel) if self.held_as else numel * element_bytes

    @property
    def last_layer(self) -> int:
        """Index of the last layer that uses it."""
        return self.uses[-1].layer if self.uses else self.layer

    @property
    def rows(self) -> int:
        """Number of indices of its first dimension, which ZeRO divides; a single number is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape[1:])
