"""Sequence parallelism on real modules (twin of `strategies/sequence.py`).

Between two boundaries within a block the sequence is cut. A child with tensor-cut modules (attention, MLP) is given
the whole sequence by `gather`, and its row-cut modules leave a rank its tokens of their sum by `scatter`. Everything
else in a block must work on each token by itself: norms, dropouts and plain linear layers do, and experts and routers
where `independence/dependence.py` has shown it; the residual sums are the block's own code. A part that computes
whole sequences as under tp alone is given them by `_join`, and `_split` leaves a rank its tokens of what it returns.
`independence/sequence_proof.py` finds all of it on the meta device, in the forward of one sample.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import LayoutError
from samestep.examination.traced_model import TracedModel
from samestep.models.spec import is_below
from samestep.program.program import Program
from samestep.runtime.axes.folded_hooks import after_forward, before_forward
from samestep.runtime.axes.rank_crossings import MoveName, RankCrossing, moved
from samestep.runtime.axes.weight_gradients import LayerInput, Postponed, postpone_weights, separable
from samestep.runtime.processes.mesh import Mesh
from samestep.tracing.module_inputs import state_of, with_first, with_given

# -- carrying it out -------------------------------------------------------------------------------


def apply(traced: TracedModel, program: Program, mesh: Mesh) -> None:
    """Install the boundaries around the cut parts of each block, and around all blocks.

    Collective over `tp` in each forward and backward, see [Note: collective calls].
    """
    step = program.step
    if not step.layout.sequence_parallel:
        return
    model, group = traced.module, mesh.groups["tp"]
    blocks = [layer.modules[0] for layer in step.model.layers if layer.is_block]
    first, last = model.get_submodule(blocks[0]), model.get_submodule(blocks[-1])
    split = functools.partial(_split, group=group, owner=blocks[0])
    first.register_forward_pre_hook(lambda _, args, kwargs: with_given(args, kwargs, split), with_kwargs=True)
    whole_parts = {part for layer in step.model.layers for part in layer.whole_parts}
    for path in blocks:
        gathered, joined = Shared(group, "gather", "scatter"), Shared(group, "gather", "own")
        parts = [part for part in traced.analysis.sequence_parts[path] if part not in whole_parts]
        for linear in separable(step):
            if any(is_below(linear, part) for part in parts):
                postpone_weights(model.get_submodule(linear), gathered.postponed_gradients_of)
        for part in traced.analysis.sequence_parts[path]:
            module = model.get_submodule(part)
            is_whole = part in whole_parts
            once = functools.partial(joined if is_whole else gathered, part)
            crossing = RankCrossing(part, group, "gather", "own" if is_whole else "scatter", once, is_shared=True)
            before_forward(module, functools.partial(_gather_given, crossing), prepend=True)
            if is_whole:
                cut = functools.partial(_split, group=group, owner=part)
                after_forward(module, functools.partial(_leave, RankCrossing(part, group, "own", "gather", cut)))
        after_forward(model.get_submodule(path), functools.partial(_forget, (gathered, joined)))
    join = functools.partial(moved, group=group, owner=blocks[-1], there="gather", back="own")
    last.register_forward_hook(lambda _, args, output: with_first(output, join))


def _gather_given(gather: Callable[[Tensor], Tensor], _: nn.Module, args: Any, kwargs: Any) -> Any:
    return with_given(args, kwargs, gather)


def _forget(moves: tuple[Shared, ...], *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for move in moves:
            move.forget()


def _leave(change: Callable[[Tensor], Tensor], _: nn.Module, args: Any, output: Any) -> Any:
    return with_first(output, change)


class Shared:
    """A move that runs once for all modules that get one tensor in turn, such as q, k and v.

    In the backward they share one sum, which overlaps with the gradients of their weights. A tensor that was moved
    without gradients, or before it was written, is moved again. The moved tensor is let go of in its backward at the latest: it may
    view the tensor that was moved, which would live as long as it does, and of a repeated forward its graph holds all that this has kept.
    """

    def __init__(self, group: dist.ProcessGroup, there: MoveName, back: MoveName) -> None:
        self._how: dict[str, Any] = {"group": group, "there": there, "back": back}
        self._input = LayerInput()
        self._postponed = Postponed()
        self._given: weakref.ref[Tensor] | None = None
        self._state = (0, False)

    def __call__(self, path: str, x: Tensor) -> Tensor:
        """Return x after the move, which the first module that is given x makes under its path."""
        result, is_given = self._input.moved, self._given is not None and self._given() is x
        if result is not None and is_given and self._state == state_of(x):
            return result
        self._postponed = Postponed(self._input)
        result = moved(x, owner=path, meanwhile=self._postponed.add_up, **self._how)
        # In this order: the tensor that was moved before may be freed with what it was moved to.
        self._given, self._state = weakref.ref(x, self._is_freed), state_of(x)
        self._input.moved = result
        return result

    def postponed_gradients_of(self, inputs: Tensor) -> Postponed | None:
        """Return the weight gradients that overlap with the sum of this tensor's gradient; None if it is not summed."""
        return self._postponed if inputs is self._input.moved else None

    def forget(self) -> None:
        """Free the moved tensor at the end of a block: its input, which may live on to its backward, is moved again in a repeated forward."""
        self._input.moved = None

    def _is_freed(self, inputs: weakref.ref[Tensor]) -> None:
        """Free the moved tensor, and its graph, together with the tensor that was moved."""
        if inputs is self._given:
            self._input.moved = None


# -- the boundaries --------------------------------------------------------------------------------


def scattering(group: dist.ProcessGroup, owner: str) -> RankCrossing:
    """Return the crossing of a row-cut module's output."""
    return RankCrossing(owner, group, "scatter", "gather")


def _split(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return this rank's tokens of a sequence that all ranks hold; the backward gathers the gradient."""
    degree = dist.get_world_size(group)
    if x.shape[1] % degree:
        raise LayoutError(
            "sequence-parallel-indivisible",
            f"sequence_parallel: tp={degree} does not divide the {x.shape[1]} tokens of this batch. Use "
            f"{x.shape[1] // degree * degree} tokens, or tp={degree} alone",
        )
    return moved(x, group, owner, "own", "gather")
