"""The graphs that the forwards of a rank build, by their number of nodes, which costs nothing to know.

A layout relies on the operations of the trace. A forward that a flag, a counter or a global lets take another branch builds another graph:

    samples are divided           the forward is tried as in a watched step, before the update (`canary.py`)
    features or tokens are cut    operations that have come to it must treat every element alike, since no proof has seen them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

from torch.autograd.graph import get_gradient_edge

from samestep.building.autograd_graph import is_end, nodes_from
from samestep.program.program import Program
from samestep.runtime.guards.loss_trials import is_split
from samestep.trees import tensors_in

_MOST = 8
"""So many graphs of one rank are tried or compared: of the first few alone, where the data decide."""
_BY_ELEMENT = frozenset((
    "Abs", "Add", "Addcmul", "Clamp", "ClampMax", "ClampMin", "Clone", "Cos", "Div", "Elu", "Erf", "Exp", "Gelu", "LeakyRelu", "Lerp", "Log",
    "Log1P", "MaskedFill", "Maximum", "Minimum", "Mul", "NanToNum", "NativeDropout", "Neg", "Pow", "Reciprocal", "Relu", "Rsqrt", "Rsub",
    "Sigmoid", "Silu", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "ToCopy", "Where",
))  # fmt: skip


class ForwardGraphs:
    """The graphs that forwards of this rank have built."""

    def __init__(self, program: Program) -> None:
        """Keep none yet, of forwards of a program; those that choose experts, or look at values, build others with each batch."""
        step, layout = program.step, program.step.layout
        is_one = not any(layer.dispatches for layer in step.model.layers)
        self.tries = is_one and is_split(program) and not step.model.couples_samples
        self.compares = is_one and (layout.cp > 1 or layout.model_ranks > 1) and not step.model.looks
        self._sizes: set[tuple[int, int]] = set()
        self._names: dict[Hashable, tuple[int, Counter[str]]] = {}

    def is_new(self, chunk: int, num_nodes: int) -> bool:
        """Return whether a chunk has not built a graph of this size before."""
        if (chunk, num_nodes) in self._sizes or len(self._sizes) >= _MOST:
            return False
        self._sizes.add((chunk, num_nodes))
        return True

    def come_to(self, circumstances: Hashable, outputs: Any, num_nodes: int) -> str:
        """Return an operation that a forward has come to run, in circumstances in which it built another graph before, and that does not treat
        every element alike; empty if there is none."""
        size, before = self._names.get(circumstances, (0, Counter[str]()))
        if size == num_nodes or (not size and len(self._names) >= _MOST):
            return ""
        ends = [get_gradient_edge(tensor).node for tensor in tensors_in(outputs) if tensor.requires_grad]
        names = Counter(
            node.name().rstrip("0123456789").removesuffix("Backward") for node in nodes_from(ends) if not is_end(node)
        )
        if not size:
            self._names[circumstances] = num_nodes, names
            return ""
        return next((name for name in names - before if name not in _BY_ELEMENT), "")
