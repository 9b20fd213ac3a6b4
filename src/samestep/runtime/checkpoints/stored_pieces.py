"""The pieces of weights that a rank writes: their names in files, and which elements of the whole weights they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from samestep.models.param_spec import ParamSpec
from samestep.runtime.optimizers.pieces import Piece
from samestep.runtime.placement import WeightSlice, part_index, part_of, whole
from samestep.runtime.prepared_run import PreparedRun


def name_of(run: PreparedRun, piece: Piece) -> str:
    """Return the name of a weight in the files; a part of a weight sharded over tp or ep has a name of its own."""
    return piece.name if piece.is_uncut else name_of_part(run, piece.name)


def name_of_part(run: PreparedRun, name: str) -> str:
    """Return the name in the files of the part of a weight that tp and ep leave this rank."""
    holding = run.program.step.holding(spec_of(run, name))
    if not holding.sharded_over:
        return name
    return f"{name}@{part_index(holding, run.assembly.parallel.mesh)}of{holding.num_parts}"


def spec_of(run: PreparedRun, name: str) -> ParamSpec:
    """Return the spec of a weight as the program leaves it to this rank."""
    return next(param for param in run.program.step.model.params if param.name == name)


def slice_of(run: PreparedRun, piece: Piece) -> WeightSlice:
    """Return the slice of a whole weight in which a piece lies."""
    uncut = next(param for param in run.assembly.model.spec.params if param.name == piece.name)
    return whole(uncut.shape) if piece.is_uncut else slice_of_part(run, piece.name)


def slice_of_part(run: PreparedRun, name: str) -> WeightSlice:
    """Return the slice of a whole weight that tp and ep leave this rank."""
    uncut = next(param for param in run.assembly.model.spec.params if param.name == name)
    cut = spec_of(run, name)
    return part_of(uncut, cut, run.program.step.holding(cut), run.assembly.parallel.mesh)


def slices_of(run: PreparedRun, frozen: Sequence[Piece]) -> dict[str, list[Any]]:
    """Return dimension and intervals of each sharded weight's part that this rank writes, by name in the files."""
    pieces = (*run.updater.pieces, *frozen)
    names = {name: piece for piece in pieces if (name := name_of(run, piece)) != piece.name}
    parts = {name: slice_of(run, names[name]) for name in sorted(names)}
    parts |= {
        part: slice_of_part(run, lost.name)
        for lost in run.assembly.weights.store.given_back()
        if (part := name_of_part(run, lost.name)) != lost.name
    }
    return {name: [part.dim, [list(ends) for ends in part.intervals]] for name, part in parts.items()}


def held_elsewhere(run: PreparedRun) -> set[str]:
    """Return the names of weights that another rank writes: the first of all ranks that hold the same part does."""
    step, mesh = run.program.step, run.assembly.parallel.mesh
    return {param.name for param in step.model.params if any(map(mesh.index, step.holding(param).copied_over))}


def encodes_first(run: PreparedRun, name: str) -> bool:
    """Return whether this rank is the first of those that encode the same contribution to a weight's gradient."""
    holding, made = run.program.step.holding(spec_of(run, name)), run.program.step.contributions
    within = (*holding.replicated_over, *holding.tied_over, *(made.inside if made is not None else ()))
    return not any(map(run.assembly.parallel.mesh.index, within))


def index_of_contributions(run: PreparedRun) -> int:
    """Return the index of this rank among those between which contributions are encoded."""
    made = run.program.step.contributions
    return run.assembly.parallel.mesh.index(made.axis) if made is not None and made.ranks > 1 else 0


def copied(tensor: Tensor, *, is_new: bool = False) -> Tensor:
    """Return a copy on the host, unless nobody else holds a tensor that is there already."""
    found = tensor.detach().cpu()
    return (found if is_new else found.clone()).contiguous()
