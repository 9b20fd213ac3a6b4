"""The graphs that the forwards of a rank build, by their number of nodes, which costs nothing to know.

A forward that a flag, a counter or a global lets take another branch builds another graph. Its samples may influence each other from then on,
so it is tried as in a watched step, before the update (`canary.py`); and it may combine parts of several ranks (`cut_operations.py`).
"""

from __future__ import annotations

from samestep.program.program import Program
from samestep.runtime.guards.loss_trials import is_split

_MOST = 8
"""So many graphs of one rank are tried: of the first few alone, where the data decide."""


class ForwardGraphs:
    """The graphs that forwards of this rank have built."""

    def __init__(self, program: Program) -> None:
        """Keep none yet, of forwards of a program; those that choose experts build others with each batch."""
        spec, layout = program.step.model, program.step.layout
        is_one = not any(layer.dispatches for layer in spec.layers)
        self.tries_samples = is_one and is_split(program) and not spec.couples_samples
        """Whether samples are divided, and tried apart."""
        self.tries_parts = is_one and (layout.tp > 1 or layout.cp > 1) and not spec.looks
        """Whether ranks have parts of features or tokens; code that looks at values runs other operations with each batch."""
        self._sizes: set[tuple[int, int]] = set()

    def is_new(self, chunk: int, num_nodes: int) -> bool:
        """Return whether a chunk has not built a graph of this size before, if that is tried."""
        if (
            not (self.tries_samples or self.tries_parts)
            or (chunk, num_nodes) in self._sizes
            or len(self._sizes) >= _MOST
        ):
            return False
        self._sizes.add((chunk, num_nodes))
        return True
