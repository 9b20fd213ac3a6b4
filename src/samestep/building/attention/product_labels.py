"""Products of two tensors as labels of their dimensions, as in einsum: which dimensions they share, and over which is summed."""

from __future__ import annotations

import string
from typing import Any, NamedTuple

from torch import Tensor


class ProductLabels(NamedTuple):
    """A product of two tensors, each dimension with a label."""

    operands: tuple[Tensor, Tensor]
    inputs: tuple[list[str], list[str]]
    output: list[str]
    times: float = 1.0
    added: Tensor | None = None
    """What is added to the product."""
    added_times: float = 1.0


def labels_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductLabels | None:
    """Return the product that a function of torch computes of two tensors of three dimensions or more; None if it is none."""
    name = getattr(func, "__name__", "").strip("_")
    if name in ("matmul", "bmm"):
        given = (*args, *(kwargs[key] for key in ("other", "mat2") if key in kwargs))
        return _of_matrices(given) if len(given) == 2 else None
    if name == "baddbmm":
        return _of_sum(args, kwargs)
    if name != "einsum" or not args or not isinstance(args[0], str):
        return None
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    return _of_equation(args[0], tuple(operands)) if len(operands) == 2 else None


def _of_matrices(given: tuple[Any, ...]) -> ProductLabels | None:
    first, second = given
    if (
        not isinstance(first, Tensor)
        or not isinstance(second, Tensor)
        or first.dim() != second.dim()
        or first.dim() < 3
    ):
        return None
    shared = [f"shared {dim}" for dim in range(first.dim() - 2)]
    return ProductLabels(
        (first, second), ([*shared, "row", "inner"], [*shared, "inner", "column"]), [*shared, "row", "column"]
    )


def _of_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ProductLabels | None:
    named = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
    found = _of_matrices((named.get("batch1"), named.get("batch2")))
    beta, added = named.get("beta", 1), named.get("input")
    return found and found._replace(
        times=float(named.get("alpha", 1)), added=added if beta else None, added_times=float(beta)
    )


def _of_equation(equation: str, operands: tuple[Any, ...]) -> ProductLabels | None:
    """Return the labels of an einsum with its result written out."""
    given, arrow, output = equation.replace(" ", "").partition("->")
    parts = given.split(",")
    if not arrow or len(parts) != 2 or not all(isinstance(one, Tensor) and one.dim() >= 3 for one in operands):
        return None
    free = [letter for letter in string.ascii_letters if letter not in equation]
    counts = [one.dim() - len(part.replace("...", "")) for part, one in zip(parts, operands, strict=True)]
    if any(count and "..." not in part for count, part in zip(counts, parts, strict=True)):
        return None
    most = max(count for count, part in zip([*counts, 0], [*parts, "..."], strict=True) if "..." in part)
    sides = [
        [*part.replace("...", "".join(free[most - count : most]))] for part, count in zip(parts, counts, strict=True)
    ]
    made = [*output.replace("...", "".join(free[:most]))]
    if any(len({*side}) != len(side) for side in (*sides, made)):
        return None
    return ProductLabels((operands[0], operands[1]), (sides[0], sides[1]), made)
