"""A trial of one operation without a rule: on each part of its operands it must compute its part of the whole.

The operation alone runs on values drawn at the shapes of the trace, whole and on parts, along the rows (samples or
tokens) or units (heads, neurons) that a layout splits:

    whole     op(x, w) = y           gradients of x and w for a drawn gradient of y
    part      op(x[p], w) = y[p]     the gradient of x[p] is that of x at p, and those of w add up to that of the whole

A part is the first half, the second half, and half of the rows in any order. What passes is used, and is listed as tried,
not proven. A custom Function of autograd, whose forward the trace can read and whose backward it cannot, is tried alike.

A backward of what all rows share, as a weight that code computes, gets in each part the gradient of that part alone, and
what it returns is summed: it must be additive,

    backward(a + b) = backward(a) + backward(b)          for any a and b, or for those that are zero outside of a part
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from samestep.independence.roundings import limit_of_values
from samestep.tracing.meta_tensors import mutated_operands
from samestep.trees import tree_flatten, tree_unflatten

LARGEST = 2**22
"""Elements of the operands of the largest trial; larger ones are tried with smaller sizes."""

Outcome = Literal["same", "differs", "fails"]
"""Whether the parts are those of the whole; "fails" where the operation does not run on drawn values."""


@dataclass(frozen=True, slots=True)
class RowsAlong:
    """The place of the rows in a tensor: index k along `dim` belongs to row (k // inner) % count."""

    dim: int
    inner: int
    count: int


@dataclass(frozen=True, slots=True)
class Given:
    """An operand of a trial."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    takes_gradient: bool = False
    rows: RowsAlong | None = None
    is_mixed: bool = False
    """Whether it depends on several rows, so that it may get no gradient."""
    values: tuple[Any, ...] | None = None
    """Its elements, where they are known."""

    @property
    def is_guess(self) -> bool:
        """Whether its elements are whole numbers that are not known, so that an operation may mean others."""
        return self.values is None and not (
            self.dtype.is_floating_point or self.dtype.is_complex or self.dtype is torch.bool
        )


_Run = Callable[[list[Tensor]], list[Tensor]]
"""An operation as a function of its operands."""
_Compare = Callable[[_Run, list[Given], bool], Outcome]
"""Compares an operation on parts with that on the whole; the last argument is whether in double precision."""


def try_apart(
    compute: Callable[..., Any], args: tuple[Any, ...], named: tuple[tuple[str, Any], ...], results: Sequence[RowsAlong]
) -> Outcome:
    """Return whether an operation computes each row by itself, forward and backward.

    `args` and `named` hold a `Given` in the place of each tensor; `results` are the rows of the tensors that it returns or
    writes into.
    """
    try:
        return _try_cached(compute, args, named, tuple(results))
    except TypeError:  # arguments that cannot be compared
        return _try_cached.__wrapped__(compute, args, named, tuple(results))


def try_sums(
    compute: Callable[..., Any], args: tuple[Any, ...], named: tuple[tuple[str, Any], ...], dims: Sequence[int | None]
) -> Outcome:
    """Return whether the backward of a Function is additive.

    `dims` are those along which each gradient that comes from above is zero outside of a part; None where every part
    contributes to all elements.
    """
    return _tried(lambda run, operands, wide: _compare_sums(run, operands, dims, wide), compute, args, named)


def outcome_of(compute: Callable[..., Any], operands: tuple[Given, ...]) -> bytes:
    """Return what a function makes of drawn tensors, as bytes; empty where it does not run on them."""
    return _in_a_thread(_outcome_of, compute, operands)


def _outcome_of(compute: Callable[..., Any], operands: tuple[Given, ...]) -> bytes:
    generator = torch.Generator().manual_seed(0)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
            warnings.simplefilter("ignore")
            outcome = compute(*(_draw_operand(operand, 2, True, generator) for operand in operands))
    except Exception:  # the user's own code
        return b""
    return b"".join(leaf.double().numpy().tobytes() for leaf in tree_flatten(outcome)[0] if isinstance(leaf, Tensor))


@functools.lru_cache(maxsize=512)
def _try_cached(
    compute: Callable[..., Any],
    args: tuple[Any, ...],
    named: tuple[tuple[str, Any], ...],
    results: tuple[RowsAlong, ...],
) -> Outcome:
    outcome = _tried(lambda run, operands, wide: _compare_parts(run, operands, results, wide), compute, args, named)
    is_guess = any(isinstance(leaf, Given) and leaf.is_guess for leaf in tree_flatten((args, named))[0])
    return "fails" if outcome == "differs" and is_guess else outcome


def _in_a_thread(trial: Callable[..., Any], *args: Any) -> Any:
    """Run a trial in a separate thread: outside of the modes of the trace, and with autograd."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(trial, *args).result()


def _tried(compare: _Compare, compute: Callable[..., Any], args: Any, named: Any) -> Outcome:
    """Try an operation in double precision where it takes that, or else in the precision of its operands."""
    operands, run = _runnable(compute, args, named)
    if max((math.prod(operand.shape) for operand in operands), default=0) > 2 * LARGEST:
        return "fails"

    def trial(wide: bool) -> Outcome:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            return compare(run, operands, wide)

    for wide in (True, False):
        with suppress(Exception):  # of the user's own code
            return _in_a_thread(trial, wide)
    return "fails"


def _runnable(compute: Callable[..., Any], args: Any, named: Any) -> tuple[list[Given], _Run]:
    """Return the operands of an operation, and the operation as a function of tensors in their places."""
    leaves, tree = tree_flatten((args, dict(named)), is_leaf=lambda leaf: isinstance(leaf, Given))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Given)]

    def run(tensors: list[Tensor]) -> list[Tensor]:
        filled = list(leaves)
        for at, tensor in zip(places, tensors, strict=True):
            filled[at] = tensor
        args, named = tree_unflatten(filled, tree)
        outcome = compute(*args, **named)
        results = [leaf for leaf in tree_flatten(outcome)[0] if isinstance(leaf, Tensor)]
        return results or (mutated_operands(compute, args, named) if hasattr(compute, "_schema") else [])

    return _smaller([leaf for leaf in leaves if isinstance(leaf, Given)]), run


def _smaller(operands: list[Given]) -> list[Given]:
    """Return operands of at most `LARGEST` elements: sizes are halved, equal ones alike, the largest first."""
    while sum(math.prod(operand.shape) for operand in operands) > LARGEST:
        sizes = {size for operand in operands for size in operand.shape}
        fixed = {operand.rows.inner for operand in operands if operand.rows is not None}
        largest = max((size for size in sizes if size % 2 == 0 and size >= 16 and size not in fixed), default=0)
        if not largest:
            break
        operands = [_halve_dim(operand, largest) for operand in operands]
    return operands


def _halve_dim(operand: Given, size: int) -> Given:
    shape = tuple(at // 2 if at == size else at for at in operand.shape)
    rows, changed = operand.rows, shape != operand.shape
    if rows is not None and shape[rows.dim] != operand.shape[rows.dim]:
        rows = replace(rows, count=rows.count // 2)
    return replace(operand, shape=shape, rows=rows, values=None if changed else operand.values)


def _draw_operand(operand: Given, high: int, wide: bool, generator: torch.Generator) -> Tensor:
    if operand.values is not None:
        return torch.tensor(operand.values, dtype=operand.dtype).reshape(operand.shape)
    if operand.dtype is torch.bool:
        return torch.rand(operand.shape, generator=generator) > 0.5
    if not operand.dtype.is_floating_point and not operand.dtype.is_complex:
        return torch.randint(0, high, operand.shape, generator=generator).to(operand.dtype)
    value = torch.randn(operand.shape, dtype=torch.float64, generator=generator)
    return value if wide and operand.dtype.is_floating_point else value.to(operand.dtype)


def _compare_parts(run: _Run, operands: list[Given], results: tuple[RowsAlong, ...], wide: bool) -> Outcome:
    """Run the operation whole and on parts, and compare them."""
    counts = {operand.rows.count for operand in operands if operand.rows is not None}
    if len(counts) != 1:
        return "fails"
    (count,) = counts
    generator = torch.Generator().manual_seed(0)
    inputs = _inputs_of(operands, wide, generator)
    outputs = run(_copies_of(inputs))
    again = run(_copies_of(inputs))
    if len(outputs) != len(results) or not all(is_same(a, b, 0.0) for a, b in zip(outputs, again, strict=True)):
        return "fails"
    results = tuple(replace(rows, count=count) for rows in results)
    if any(
        out.dim() <= rows.dim or out.shape[rows.dim] % (rows.count * rows.inner)
        for out, rows in zip(outputs, results, strict=True)
    ):
        return "differs"
    upstream, tolerance = [_upstream(out, generator) for out in outputs], _tolerance(wide, inputs)
    of_whole = gradients_of(outputs, upstream, inputs)
    shuffled = torch.randperm(count, generator=generator).tolist()
    for rows_in_order in (list(range(count)), shuffled):
        pairs, above = list[tuple[Tensor, Tensor]](), list[Tensor | None]()
        for part in (rows_in_order[: count // 2], rows_in_order[count // 2 :]):
            copies = _copies_of(inputs)
            parts = run([_part(x, operand.rows, part, count) for x, operand in zip(copies, operands, strict=True)])
            expected = [_part(out, rows, part, count) for out, rows in zip(outputs, results, strict=True)]
            pairs += zip(parts, expected, strict=True)
            above += [
                None if up is None else _part(up, rows, part, count) for up, rows in zip(upstream, results, strict=True)
            ]
        of_parts = gradients_of([part for part, _ in pairs], above, inputs)
        if any(
            operand.is_mixed and gradient is not None and bool(gradient.any())
            for operand, gradient in zip(operands, of_parts, strict=True)
        ):
            return "differs"
        pairs += [(a, b) for a, b in zip(of_parts, of_whole, strict=True) if a is not None and b is not None]
        if not all(is_same(a, b, tolerance) for a, b in pairs):
            return "differs"
    return "same"


_SCALES = (1.0, 1e-3, 1e3)
"""Sizes of the gradients of a trial: a backward may limit large ones alone, or small ones."""


def _compare_sums(run: _Run, operands: list[Given], dims: Sequence[int | None], wide: bool) -> Outcome:
    """Return whether a backward's result for gradients is the sum of those for two parts of them, at each of the scales.

    It is run once more on the same gradients: "fails" says that it gives something else then.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = _inputs_of(operands, wide, generator)
    above = [_upstream(out, generator) for out in run(_copies_of(inputs))]
    if len(above) != len(dims):
        return "fails"
    tolerance = _tolerance(wide, inputs)
    for scale in _SCALES:
        sums = [None if gradient is None else scale * gradient for gradient in above]
        parts = [
            None if gradient is None else _part_of(gradient, dim, generator)
            for gradient, dim in zip(sums, dims, strict=True)
        ]
        rest = [None if a is None or b is None else a - b for a, b in zip(sums, parts, strict=True)]
        of_sums, again, *of_parts = (
            gradients_of(run(_copies_of(inputs)), gradients, inputs) for gradients in (sums, sums, parts, rest)
        )
        for total, repeated, first, second in zip(of_sums, again, *of_parts, strict=True):
            if total is None:
                continue
            if repeated is None or not is_same(repeated, total, 0.0):
                return "fails"
            if first is None or second is None or not is_same(first + second, total, tolerance):
                return "differs"
    return "same"


def _part_of(gradient: Tensor, dim: int | None, generator: torch.Generator) -> Tensor:
    """Return one of two gradients that add up to one: its first half along `dim`, or a share of every element."""
    if dim is None:
        drawn = torch.randn(gradient.shape, dtype=torch.float64, generator=generator).to(gradient)
        return drawn * gradient.abs().mean()
    first, half = torch.zeros_like(gradient), gradient.shape[dim] // 2
    first.narrow(dim, 0, half).copy_(gradient.narrow(dim, 0, half))
    return first


def _tolerance(wide: bool, operands: list[Tensor]) -> float:
    narrow = torch.bfloat16 if any(tensor.dtype is torch.bfloat16 for tensor in operands) else torch.float32
    return limit_of_values(torch.float64 if wide else narrow)


def _inputs_of(operands: list[Given], wide: bool, generator: torch.Generator) -> list[Tensor]:
    """Return drawn operands, of which those that take gradients require them."""
    high = max(2, min((size for operand in operands for size in operand.shape if size > 1), default=2))
    drawn = [_draw_operand(operand, high, wide, generator) for operand in operands]
    return [
        x.requires_grad_(operand.takes_gradient and x.is_floating_point())
        for x, operand in zip(drawn, operands, strict=True)
    ]


def _copies_of(inputs: list[Tensor]) -> list[Tensor]:
    """Return what an operation is given: operations write into no leaf that takes a gradient, and the next one is given the same."""
    return [x.clone() for x in inputs]


def gradients_of(
    outputs: Sequence[Tensor], upstream: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradient of each input for those of the outputs; None of one that takes none."""
    pairs = [(out, up) for out, up in zip(outputs, upstream, strict=True) if up is not None and out.grad_fn is not None]
    leaves = [x for x in inputs if x.requires_grad]
    gradients: Iterator[Tensor | None] = itertools.repeat(None)
    if pairs and leaves:
        outs, ups = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(outs, leaves, ups, allow_unused=True))
    return [next(gradients) if x.requires_grad else None for x in inputs]


def _upstream(out: Tensor, generator: torch.Generator) -> Tensor | None:
    if not out.is_floating_point() or out.grad_fn is None:
        return None
    return torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out.dtype)


def _part(tensor: Tensor, rows: RowsAlong | None, part: list[int], count: int) -> Tensor:
    """Return a tensor's rows that a part has."""
    if rows is None:
        return tensor
    outer = tensor.shape[rows.dim] // (count * rows.inner)
    index = torch.arange(tensor.shape[rows.dim]).view(outer, count, rows.inner)[:, part].flatten()
    return tensor.index_select(rows.dim, index)


def is_same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether a tensor is another one, to a tolerance relative to the largest number of that."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.numel():
        return True
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    scale = float(b.detach().abs().nan_to_num(0, 0, 0).max())
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, 1e-30), equal_nan=True)
