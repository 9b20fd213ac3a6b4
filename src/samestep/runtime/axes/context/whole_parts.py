"""Parts of blocks that every rank of `cp` computes on the whole sequence (`independence/gathered_parts.py` finds them).

    given       [B, T/N, D]   all_gather ──►  [B, T, D]   the part, as on one device
    returned    [B, T/N, D]   ◄── a rank's tokens         [B, T, D]

In the backward the gradient of what is returned is zero for the tokens of other ranks, and that of what was gathered is summed:
a reduce_scatter. An argument of the block that the part is given as it is, such as angles or a mask, is on every rank whole.

Legend: B samples, T tokens, N ranks of `cp`, D features.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import JobError, LayoutError
from samestep.independence.sliced_shapes import token_rows_of
from samestep.models.layer_parts import GatheredPart
from samestep.models.spec import ModelSpec
from samestep.program.program import Program
from samestep.program.ring_visits import SlicePlacement
from samestep.runtime.axes.rank_crossings import GroupLine, through
from samestep.runtime.processes.mesh import Mesh
from samestep.state.writes import version_of
from samestep.strategies.context import placement_of
from samestep.trees import keystr, tensors_in, tree_flatten_with_path, tree_unflatten


class Slices(Protocol):
    """The slice of every sequence that a rank runs, as calls that need tokens of other ranks ask for it."""

    length: int
    degree: int
    index: int
    group: dist.ProcessGroup
    block: str

    def placement(self, length: int) -> SlicePlacement:
        """Return which of so many tokens each rank holds."""
        ...

    def rows_along(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a tensor that has a row for each token along a dimension."""
        ...

    def suspend(self) -> tuple[int, str, int]:
        """Let the code that runs next have whole sequences; return the argument with which `resume` ends that."""
        ...

    def resume(self, state: tuple[int, str, int]) -> None:
        """Let the code that runs next have slices again."""
        ...


def install(model: nn.Module, spec: ModelSpec, slicing: Slices) -> None:
    """Give each part all tokens, and the code after it those of this rank.

    Collective over `cp` in each forward and backward, see [Note: collective calls].
    """
    parts: dict[str, GatheredPart] = {}
    for part in (part for layer in spec.layers for part in layer.gathered_parts):
        parts.setdefault(part.owner, part)
    for path, part in parts.items():
        calls = _GatheredCalls(part, slicing)
        module = model.get_submodule(path)
        module.register_forward_pre_hook(calls.enter, with_kwargs=True)
        module.register_forward_hook(calls.leave)


class _GatheredCalls:
    """The calls of one part, which do not contain each other."""

    def __init__(self, part: GatheredPart, slicing: Slices) -> None:
        self._part, self._slicing = part, slicing
        self._given = {part_given.place: part_given for part_given in part.given}
        self._returned = dict(part.returned)
        self._before: tuple[int, str, int] | None = None

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a call with all tokens."""
        slicing = self._slicing
        self._before = None
        if not slicing.length:
            return None
        leaves, tree = tree_flatten_with_path((args, kwargs))
        wholes = [self._whole(keystr(place), leaf) for place, leaf in leaves]
        self._before = slicing.suspend()
        return tree_unflatten(wholes, tree)

    def _whole(self, place: str, leaf: Any) -> Any:
        argument = self._given.get(place)
        if argument is None or not isinstance(leaf, Tensor):
            return leaf
        if argument.is_known and isinstance(tensor := getattr(leaf, "whole", None), Tensor):
            return tensor
        placement = self._slicing.placement(self._slicing.length)
        if leaf.dim() <= argument.dim or leaf.shape[argument.dim] != placement.size:
            raise LayoutError(
                "cp-forward-differs",
                f"{self._part.owner} is given {place} of shape {list(leaf.shape)}, and in the traced forward a row for each of a "
                f"rank's {placement.size} tokens along dimension {argument.dim}. Use cp=1",
            )
        how: dict[str, Any] = {
            "group": self._slicing.group,
            "owner": self._part.owner,
            "placement": placement,
            "dim": argument.dim,
        }
        return through(leaf, functools.partial(gather_tokens, **how), functools.partial(_summed, **how))

    def leave(self, _: nn.Module, args: Any, output: Any) -> Any:
        """Return this rank's tokens of what a call has returned."""
        if self._before is None:
            return None
        self._slicing.resume(self._before)
        self._before = None
        leaves, tree = tree_flatten_with_path(output)
        return tree_unflatten([self._own(keystr(place), leaf) for place, leaf in leaves], tree)

    def _own(self, place: str, leaf: Any) -> Any:
        dim = self._returned.get(place)
        if dim is None or not isinstance(leaf, Tensor):
            return leaf
        if leaf.dim() <= dim or leaf.shape[dim] != self._slicing.length:
            raise LayoutError(
                "cp-forward-differs",
                f"{self._part.owner} returns a tensor of shape {list(leaf.shape)}, and in the traced forward one with a row for each "
                f"token along dimension {dim}. Use cp=1",
            )
        part = self._slicing.rows_along(leaf, dim)
        return part if leaf.requires_grad else with_whole(part, leaf)


def with_whole(part: Tensor, tensor: Tensor) -> Tensor:
    """Return a rank's tokens of a tensor without a gradient, with the tensor itself for parts that compute all tokens."""
    part.whole = tensor  # type: ignore[attr-defined]
    return part


def gather_tokens(part: Tensor, group: dist.ProcessGroup, owner: str, *, placement: SlicePlacement, dim: int) -> Tensor:
    """Return all tokens in their order along a dimension, from those of each rank.

    Collective over `cp`, see [Note: collective calls].
    """
    gathered = GroupLine(group, owner).all_gather(part.movedim(dim, 0))
    if placement.is_head_tail:
        gathered = rows_of(gathered, _places(placement), 0)
    return gathered.movedim(0, dim).contiguous()  # as code may view it


def _summed(gradient: Tensor, group: dist.ProcessGroup, owner: str, *, placement: SlicePlacement, dim: int) -> Tensor:
    """Return the sum over ranks of this rank's tokens of a gradient."""
    sent = rows_of(gradient.movedim(dim, 0), _in_order_of_ranks(placement), 0)
    return GroupLine(group, owner).reduce_scatter(sent).movedim(0, dim).contiguous()


def _in_order_of_ranks(placement: SlicePlacement) -> list[range]:
    return [run for rank in range(placement.degree) for run in placement.runs(rank)]


def _places(placement: SlicePlacement) -> list[range]:
    """Return where the runs of tokens are that ranks hold one after another, in the order of the sequence."""
    places, start = dict[int, range](), 0
    for run in _in_order_of_ranks(placement):
        places[run.start] = range(start, start + len(run))
        start += len(run)
    return [places[first] for first in sorted(places)]


def rows_of(tensor: Tensor, runs: Sequence[range], dim: int) -> Tensor:
    """Return the rows at some runs of places along a dimension; of a single run it is a view."""
    parts = [tensor.narrow(dim, run.start, len(run)) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def own_rows(tensor: Tensor, runs: Sequence[range], dim: int) -> Tensor:
    """Return a copy of the rows at some runs of places along a dimension.

    Autograd keeps a view with all of the tensor that it is a view of, and the rows of one run of tokens of a single sample are a view
    that `contiguous` returns as it is.
    """
    rows = rows_of(tensor, runs, dim)
    return rows.clone(memory_format=torch.contiguous_format) if len(runs) == 1 else rows


class SharedRows:
    """The rows that were cut out of whole tensors in a forward, each cut once as long as it is in use and nobody writes it."""

    def __init__(self) -> None:
        self._cut: dict[tuple[int, int, bool], tuple[weakref.ref[Tensor], int, weakref.ref[Tensor], int]] = {}

    def of(self, x: Tensor, runs: Sequence[range], dim: int) -> Tensor:
        """Return the rows at some runs of places of a tensor along a dimension; of a weight, which is there anyway, a view."""
        if isinstance(x, nn.Parameter):
            return rows_of(x, runs, dim)
        key = id(x), dim, torch.is_grad_enabled()
        if key in self._cut:
            of, version, cut, cut_version = self._cut[key]
            rows = cut()
            if of() is x and version == version_of(x) and rows is not None and cut_version == version_of(rows):
                return rows
        rows = own_rows(x, runs, dim)
        self._cut[key] = weakref.ref(x), version_of(x), weakref.ref(rows), version_of(rows)
        return rows


DIM = 1
"""The dimension of tokens in a prediction."""


class TokenRanks:
    """The ranks that have other tokens of the same samples: whole sequences of what a model predicts, for a loss over all samples.

    Each rank of `cp` has the rows of its own tokens, and a loss over the whole batch is given those of all, in their order. It is
    computed by every rank, which goes back through the rows of its own tokens; what a step does anyway, to sum the gradients of the
    ranks of `cp`, gives the gradient of all. What has no rows of tokens is the same on all, and its gradient enters with the first.
    """

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self._step, self._degree = program.step, program.step.layout.cp
        self._group = mesh.groups.get("cp") if self._degree > 1 else None
        self.index = mesh.index("cp") if self._degree > 1 else 0

    @property
    def send(self) -> bool:
        """Whether there are several."""
        return self._degree > 1

    def sliced(self, outputs: Any, batch: Any) -> int | None:
        """Return the index of the tensor of which this rank has the rows of its tokens; None where each rank has whole sequences.

        Raises:
            JobError: its dimension of tokens is another one than in the batch; all ranks raise it.
        """
        if not self.send:
            return None
        prediction = token_rows_of(outputs)
        index = next(index for index, tensor in enumerate(tensors_in(outputs)) if tensor is prediction)
        lengths = {tensor.shape[DIM] for tensor in tensors_in(batch) if tensor.dim() > DIM}
        is_square = prediction.shape[DIM : DIM + 1] == prediction.shape[DIM + 1 : DIM + 2]
        if is_square or prediction.shape[DIM] * self._degree not in lengths:
            self.check(index, prediction)
        return index

    def check(self, index: int, tensor: Tensor) -> None:
        """Refuse a tensor with a row for each sample that is not the prediction: which of its tokens a rank has is not known.

        Raises:
            JobError: always; all ranks raise it.
        """
        raise JobError(
            "loss-over-batch",
            f"cp={self._degree} gathers the tokens of one prediction [B, T, ...], and the loss over the whole batch reads output "
            f"{index} {list(tensor.shape)}. Use cp=1",
        )

    def whole(self, part: Tensor, owner: str) -> Tensor:
        """Return the rows of all tokens [B, T, ...] from those of this rank's [B, T/N, ...].

        Collective over `cp`, see [Note: collective calls].
        """
        assert self._group is not None
        placement = self._placement(self._degree * part.shape[DIM])
        return gather_tokens(part, self._group, owner, placement=placement, dim=DIM)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all ranks [N * R, ...] from this rank's [R, ...].

        Collective over `cp`, see [Note: collective calls].
        """
        return tensor if self._group is None else GroupLine(self._group, "loss.alike").all_gather(tensor)

    def own(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the rows of this rank's tokens along a dimension."""
        return rows_of(tensor, self._placement(tensor.shape[dim]).runs(self.index), dim)

    def _placement(self, length: int) -> SlicePlacement:
        return placement_of(self._step.model, self._step.layout, length, self._step.ranks_per_node)
