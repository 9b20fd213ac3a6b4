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

from samestep.building.families import FamilyFacts
from samestep.errors import LayoutError
from samestep.examination.traced_model import TracedModel
from samestep.models.spec import is_below
from samestep.program.program import Program
from samestep.runtime.axes.differentiable import apply_move, apply_move_overlapping
from samestep.runtime.axes.folded_hooks import after_forward, before_forward
from samestep.runtime.axes.rank_crossings import RankCrossing
from samestep.runtime.axes.weight_gradients import LayerInput, Postponed, postpone_weights, separable
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh, all_gather, reduce_scatter
from samestep.tracing.module_inputs import state_of, with_first, with_given

# -- carrying it out -------------------------------------------------------------------------------


def apply(traced: TracedModel, program: Program, mesh: Mesh) -> None:
    """Install the boundaries around the cut parts of each block, and around all blocks.

    Collective over `tp` in each forward and backward, see [Note: collective calls].
    """
    step = program.step
    if not step.layout.sequence_parallel:
        return
    model, group, facts = traced.module, mesh.groups["tp"], traced.facts
    blocks = [layer.modules[0] for layer in step.model.layers if layer.is_block]
    first, last = model.get_submodule(blocks[0]), model.get_submodule(blocks[-1])
    split = functools.partial(_split, group=group, owner=blocks[0])
    first.register_forward_pre_hook(lambda _, args, kwargs: with_given(args, kwargs, split, facts), with_kwargs=True)
    whole_parts = {part for layer in step.model.layers for part in layer.whole_parts}
    for path in blocks:
        gathered, joined = Shared(gather, group), Shared(lambda x, group, owner, _: _join(x, group, owner), group)
        parts = [part for part in traced.analysis.sequence_parts[path] if part not in whole_parts]
        for linear in separable(step):
            if any(is_below(linear, part) for part in parts):
                postpone_weights(model.get_submodule(linear), gathered.postponed_gradients_of, facts)
        for part in traced.analysis.sequence_parts[path]:
            module = model.get_submodule(part)
            is_whole = part in whole_parts
            once = functools.partial(joined if is_whole else gathered, part)
            crossing = RankCrossing(part, group, "gather", "own" if is_whole else "scatter", once, is_shared=True)
            before_forward(module, functools.partial(_gather_given, crossing, facts), prepend=True)
            if is_whole:
                cut = functools.partial(_split, group=group, owner=part)
                after_forward(module, functools.partial(_leave, RankCrossing(part, group, "own", "gather", cut)))
        after_forward(model.get_submodule(path), functools.partial(_forget, (gathered, joined)))
    join = functools.partial(_join, group=group, owner=blocks[-1])
    last.register_forward_hook(lambda _, args, output: with_first(output, join))


def _gather_given(gather: Callable[[Tensor], Tensor], facts: FamilyFacts, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return with_given(args, kwargs, gather, facts)


def _forget(moves: tuple[Shared, ...], *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for move in moves:
            move.forget()


def _leave(change: Callable[[Tensor], Tensor], _: nn.Module, args: Any, output: Any) -> Any:
    return with_first(output, change)


SharedMove = Callable[[Tensor, dist.ProcessGroup, str, Callable[[], object]], Tensor]
"""A `Move` with what is called in its backward, while the gradient is summed."""


class Shared:
    """A move that runs once for all modules that get one tensor in turn, such as q, k and v.

    In the backward they share one sum, which overlaps with the gradients of their weights. A tensor that was moved
    without gradients, or before it was written, is moved again. The moved tensor is let go of in its backward at the latest: it may
    view the tensor that was moved, which would live as long as it does, and of a repeated forward its graph holds all that this has kept.
    """

    def __init__(self, move: SharedMove, group: dist.ProcessGroup) -> None:
        self._move, self._group = move, group
        self._input = LayerInput()
        self._postponed = Postponed()
        self._given: weakref.ref[Tensor] | None = None
        self._state = (0, False)

    def __call__(self, path: str, x: Tensor) -> Tensor:
        """Return x after the move, which the first module that is given x makes under its path."""
        moved, is_given = self._input.moved, self._given is not None and self._given() is x
        if moved is not None and is_given and self._state == state_of(x):
            return moved
        self._postponed = Postponed(self._input)
        moved = self._move(x, self._group, path, self._postponed.add_up)
        # In this order: the tensor that was moved before may be freed with what it was moved to.
        self._given, self._state = weakref.ref(x, self._is_freed), state_of(x)
        self._input.moved = moved
        return moved

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


def gather(x: Tensor, group: dist.ProcessGroup, owner: str, meanwhile: Callable[[], object]) -> Tensor:
    """Return the sequence gathered from all ranks, [B, T/N, D] -> [B, T, D]; the backward reduce_scatters its gradient.

    Meanwhile the backward calls `meanwhile`. Collective over `group`, in the backward too, see [Note: collective calls].
    """
    return apply_move_overlapping(x, group, owner, _all_gathered, _reduce_scattering, meanwhile)


def scattering(group: dist.ProcessGroup, owner: str) -> RankCrossing:
    """Return the crossing of a row-cut module's output."""
    return RankCrossing(owner, group, "scatter", "gather", functools.partial(scatter, group=group, owner=owner))


def scatter(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return this rank's tokens of the sum of x, [B, T, D] -> [B, T/N, D]; the backward gathers the gradient.

    Collective over `group`, in the backward too, see [Note: collective calls].
    """
    return apply_move(x, group, owner, _reduce_scattered, _all_gathered)


def _split(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return this rank's tokens of a sequence that all ranks hold; the backward gathers the gradient."""
    degree = dist.get_world_size(group)
    if x.shape[1] % degree:
        raise LayoutError(
            "sequence-parallel-indivisible",
            f"sequence_parallel: tp={degree} does not divide the {x.shape[1]} tokens of this batch. Use "
            f"{x.shape[1] // degree * degree} tokens, or tp={degree} alone",
        )
    return apply_move(x, group, owner, _own, _all_gathered)


def _join(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return the sequence gathered from all ranks; the backward keeps this rank's part of the gradient."""
    return apply_move(x, group, owner, _all_gathered, _own)


def _own(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return this rank's [B, T/N, D] of a sequence [B, T, D] that all ranks hold."""
    part = x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]
    return part.clone(
        memory_format=torch.contiguous_format
    )  # of one sample a view, with which autograd would keep all tokens


def _all_gathered(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return [B, T, D] from the [B, T/N, D] of each rank."""
    degree = dist.get_world_size(group)
    parts = x.new_empty(degree * x.shape[0], *x.shape[1:])
    with owned(owner):
        all_gather(parts, x.contiguous(), group=group)
    return parts.view(degree, *x.shape).transpose(0, 1).flatten(1, 2)


def _reduce_scattered(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Return this rank's [B, T/N, D] of the sum of the [B, T, D] of each rank."""
    part, wait = _reduce_scattering(x, group, owner, False)
    wait()
    return part


def _reduce_scattering(
    x: Tensor, group: dist.ProcessGroup, owner: str, is_alone: bool
) -> tuple[Tensor, Callable[[], object]]:
    """Begin to compute the same; return the result, and a function that waits for it."""
    degree = dist.get_world_size(group)
    parts = x.unflatten(1, (degree, -1)).transpose(0, 1).contiguous()
    part = torch.empty_like(parts[0])
    with owned(owner) as issue:
        work = issue.sent(reduce_scatter(part, parts.flatten(0, 1), group=group, async_op=True))
    assert work is not None
    return part, work.wait
