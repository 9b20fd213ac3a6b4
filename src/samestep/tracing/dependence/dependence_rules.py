"""The rules by which dependences on rows (`independence.py`) go from operands to results.

They are the maps of dimensions (`dimension_maps.py`), what is known of rows that an operation moves (`moved_rows.py`), and
what a library has stated. An operation without any is assumed to keep a dimension of rows whose size and place its result
has too, where that may be tried on drawn values; else nothing is known of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from samestep.tracing.dependence.calls import Call, Rule, mapped, nothing_known
from samestep.tracing.dependence.dimension_maps import Map, along_dimension, map_of
from samestep.tracing.dependence.independence import NO_DIM, Along, Dependence, Mixed
from samestep.tracing.dependence.moved_rows import BY_MAP, BY_OPERATION


def by_map(of: Map, call: Call) -> Iterator[Dependence]:
    """Rule of an operation by its map of dimensions."""
    return (mapped(call, operands) for operands in of(call))


def assumed(call: Call) -> Iterator[Dependence]:
    """Rule of an operation that is to be tried: a dimension of rows stays where it is, if the result has it too."""
    rows = [(tensor, found) for tensor in call.given if isinstance(found := call.known.of(tensor), Along)]
    alike = {found for _, found in rows}
    for result, unknown in zip(call.results, nothing_known(call), strict=True):
        one = next(iter(alike)) if len(alike) == 1 else None
        fits = (
            one is not None
            and one.dim != NO_DIM
            and all(one.dim < result.dim() and result.shape[one.dim] == tensor.shape[one.dim] for tensor, _ in rows)
        )
        mixed = any(isinstance(call.known.of(tensor), Mixed) for tensor in call.given)
        yield one if fits and not mixed else unknown


def rule_of(func: Any) -> Rule | None:
    """Return the rule of an operation, or none."""
    packet = func.overloadpacket
    found = map_of(func) or DECLARED.get(packet)
    if packet in BY_OPERATION or found is None:
        return BY_OPERATION.get(packet)
    return BY_MAP.get(found) or functools.partial(by_map, found)


DECLARED: dict[Any, Map] = {}
"""Maps that libraries have stated by `independent`."""


def independent(op: Any, *, along: int) -> None:
    """State that an operation works on each position along one dimension of its tensors by itself.

    The statement is used where samples are split over ranks or micro-batches, and is tried on the first batch of a run.

    Args:
        op: an operation of `torch.ops`, such as `torch.ops.mylib.scan`, with or without the name of an overload.
        along: the dimension, the same for every tensor that the operation takes and returns.
    """
    DECLARED[getattr(op, "overloadpacket", op)] = along_dimension(along)
